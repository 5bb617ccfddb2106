/* Rows of 4-bit weights as a plain bfloat16 matrix, turned. The twin of transposed_twin().
 *
 * Torch interleaves 64 rows: 32 bytes for each input column, the low halves for the first 32 rows
 * and the high halves for the others. A prompt's products need them plain, and torch has nothing
 * that unpacks them: with its elementwise operators they take as long as the product itself. */

#include "avx512.h"

#ifdef PENSTOCK_X86

enum { BLOCK_ROWS = 64 };

/* Scales and offsets of 64 rows: pairs of bfloat16. */
AVX512 INLINE void load_scales(const uint16_t *pairs, __m512 scale[4], __m512 offset[4]) {
    for (int j = 0; j < 4; j++) {
        const __m512i both = _mm512_loadu_si512(pairs + 32 * j);
        scale[j] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        offset[j] = _mm512_castsi512_ps(
            _mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
    }
}

AVX512 INLINE __m512 weight_of(__m128i codes, __m512 scale, __m512 offset) {
    const __m512i signed_codes =
        _mm512_sub_epi32(_mm512_cvtepu8_epi32(codes), _mm512_set1_epi32(8));
    /* Not fused, as the twin rounds the product. */
    return _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(signed_codes), scale), offset);
}

AVX512 static void unpack_group(const uint8_t *codes, const uint16_t *scales, int64_t rows,
                                int64_t width, int64_t group, int64_t which, int64_t first,
                                int64_t end, uint16_t *out) {
    const __m256i low_half = _mm256_set1_epi8(15);
    for (int64_t row = first; row < end; row += BLOCK_ROWS) {
        __m512 scale[4], offset[4];
        load_scales(scales + 2 * (which * rows + row), scale, offset);
        const uint8_t *from = codes + row * width / 2 + which * group * 32;
        for (int64_t k = 0; k < group; k++) {
            char *to = (char *)(out + (which * group + k) * (end - first) + row - first);
            const __m256i bytes = _mm256_loadu_si256((const __m256i *)(from + 32 * k));
            const __m256i halves[2] = {
                _mm256_and_si256(bytes, low_half),
                _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_half)};
            for (int j = 0; j < 4; j++) {
                const __m128i sixteen = j & 1 ? _mm256_extracti128_si256(halves[j / 2], 1)
                                              : _mm256_castsi256_si128(halves[j / 2]);
                store(to, 16 * j, weight_of(sixteen, scale[j], offset[j]), BFLOAT16);
            }
        }
    }
}

#endif

/* codes: [rows / 64][width][32]; scales: bfloat16 [width / group][rows][2]
 * first, end: rows, both divide by 64; out: bfloat16 [width][end - first] */
PENSTOCK_EXPORT void penstock_unpack_int4(const uint8_t *codes, const uint16_t *scales,
                                          int64_t rows, int64_t width, int64_t group,
                                          int64_t first, int64_t end, uint16_t *out) {
#ifdef PENSTOCK_X86
    const int64_t groups = width / group, parts = penstock_num_threads(groups);
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t which = groups * part / parts; which < groups * (part + 1) / parts; which++)
            unpack_group(codes, scales, rows, width, group, which, first, end, out);
#else
    (void)codes, (void)scales, (void)rows, (void)width, (void)group, (void)first, (void)end;
    (void)out;
#endif
}
