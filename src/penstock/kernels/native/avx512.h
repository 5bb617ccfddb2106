/* Vectors of 16 floats, loaded from and stored to the dtypes of a model. */

#ifndef PENSTOCK_AVX512_H
#define PENSTOCK_AVX512_H

#include "kernels.h"

#ifdef PENSTOCK_X86

#define INLINE __attribute__((always_inline)) static inline

enum kind { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, CODES = 3 /* int8, loaded only */ };

/* A call with `kind` as a constant, for compilers to make one loop of each. */
#define EACH_KIND(call) \
    if (kind == FLOAT32) { call(FLOAT32); } \
    else if (kind == BFLOAT16) { call(BFLOAT16); } \
    else { call(FLOAT16); }

AVX512 INLINE __m512 load(const char *from, int64_t index, int kind) {
    if (kind == FLOAT32) return _mm512_loadu_ps((const float *)from + index);
    if (kind == CODES)
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + index))));
    const __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + index));
    if (kind == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Rounded to bfloat16, which is in the upper half of each word: to the nearest, ties to even. No NaN
 * has all bits set. */
AVX512 INLINE __m512i bfloat16_above(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

AVX512 INLINE void store(char *to, int64_t index, __m512 value, int kind) {
    if (kind == FLOAT32) {
        _mm512_storeu_ps((float *)to + index, value);
        return;
    }
    __m256i half;
    if (kind == FLOAT16) {
        half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
        half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bfloat16_above(value), 16));
    }
    _mm256_storeu_si256((__m256i *)((uint16_t *)to + index), half);
}

/* exp(x) for x <= 0; NaN for NaN. */
AVX512 INLINE __m512 exp_negative_512(__m512 x) {
    const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.9875691e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665796e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666666e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(alive, p, n);
}

#endif

#endif
