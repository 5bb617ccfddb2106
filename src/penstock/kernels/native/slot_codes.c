/* Units of a store as int8 codes. The twin is code_units_twin() in kernels/slot_codes.py.
 *
 * A token's codes are [2][kv_heads][head_dim], its keys first; behind them lie [2][kv_heads] scales
 * of bfloat16. Without AVX-512 the caller uses torch instead. */

#include "avx512.h"

#ifdef PENSTOCK_X86

/* A 127th of the largest number, rounded up to bfloat16, so that no code is beyond 127; NaN where
 * a number is not finite. Its bits. */
AVX512 INLINE uint16_t scale_of(const char *numbers, int64_t dim, int kind, float *scale) {
    __m512 most = _mm512_setzero_ps(), spoilt = most;
    for (int64_t i = 0; i < dim; i += 16) {
        const __m512 x = load(numbers, i, kind);
        most = _mm512_max_ps(most, _mm512_abs_ps(x));
        spoilt = _mm512_fmadd_ps(x, _mm512_setzero_ps(), spoilt);
    }
    const float found = _mm512_reduce_add_ps(spoilt) == 0.0f ? _mm512_reduce_max_ps(most) / 127.0f : NAN;
    uint32_t bits;
    memcpy(&bits, &found, sizeof(bits));
    bits = (bits + 0xffffu) & 0xffff0000u;
    if (found != found) bits = 0x7fc00000u;
    memcpy(scale, &bits, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

AVX512 INLINE void code(const char *numbers, int64_t dim, char *codes, char *bits, int kind) {
    float scale;
    const uint16_t found = scale_of(numbers, dim, kind, &scale);
    memcpy(bits, &found, sizeof(found));
    const __m512 by = _mm512_set1_ps(scale == 0.0f ? 1.0f : scale);
    for (int64_t i = 0; i < dim; i += 16) {
        const __m512i each = _mm512_cvtps_epi32(_mm512_div_ps(load(numbers, i, kind), by));
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtsepi32_epi8(each));
    }
}

AVX512 static void code_tokens(const char *tokens, int64_t count, int64_t parts, int64_t dim, int64_t kind, char *to) {
    const int64_t bytes = kind == FLOAT32 ? 4 : 2;
    for (int64_t t = 0; t < count; t++, to += parts * (dim + 2))
        for (int64_t part = 0; part < parts; part++, tokens += dim * bytes) {
#define CODE(kind) code(tokens, dim, to + part * dim, to + parts * dim + 2 * part, kind)
            EACH_KIND(CODE)
        }
}

#endif

/* Code units into slots.
 *
 * units: [count], `unit_stride` bytes apart, each [group_tokens][parts][dim] of `kind`
 * slots: int64 [count], of `memory`, whose slots are group_tokens * parts * (dim + 2) bytes
 * parts: keys and values of all KV heads; dim divides by 16 */
PENSTOCK_EXPORT void penstock_code_units(const char *units, int64_t count, int64_t unit_stride,
                                         const int64_t *slots, char *memory, int64_t group_tokens,
                                         int64_t parts, int64_t dim, int64_t kind) {
#ifdef PENSTOCK_X86
    for (int64_t i = 0; i < count; i++)
        code_tokens(units + i * unit_stride, group_tokens, parts, dim, kind,
                    memory + slots[i] * group_tokens * parts * (dim + 2));
#else
    (void)units, (void)count, (void)unit_stride, (void)slots, (void)memory, (void)group_tokens;
    (void)parts, (void)dim, (void)kind;
#endif
}
