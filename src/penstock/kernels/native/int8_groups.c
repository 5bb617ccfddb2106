/* A linear layer with 8-bit weights, one scale for 32 input columns, for a few tokens.
 *
 * Torch's packed 8-bit operator knows one scale a row. On pretrained models that costs two to three
 * times the error of groups, and files of other formats have groups. */

#include "avx512.h"

#ifdef PENSTOCK_X86

enum { COLUMNS = 32, MOST_TOKENS = 8, BLOCK_ROWS = 16 };

/* 16 scales from `index` on; those behind `count` are 0. */
AVX512 INLINE __m512 scales_from(const char *scales, int64_t index, int64_t count, int kind) {
    const __mmask16 there = count < 16 ? (__mmask16)((1u << count) - 1) : (__mmask16)0xffff;
    if (kind == FLOAT32) return _mm512_maskz_loadu_ps(there, (const float *)scales + index);
    const __m256i half = _mm256_maskz_loadu_epi16(there, (const uint16_t *)scales + index);
    if (kind == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

AVX512 INLINE __m512 widened(const int8_t *codes) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/* One row for `tokens`; a constant where this is inlined, and so is `kind`. */
AVX512 INLINE void row_of(const float *x, const int8_t *codes, const char *scales, int64_t at,
                          int64_t width, int64_t rows, int tokens, float *out, int kind) {
    const int64_t groups = width / COLUMNS;
    __m512 first[MOST_TOKENS], last[MOST_TOKENS];
    for (int token = 0; token < tokens; token++) first[token] = last[token] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group += 16) {
        const int64_t count = groups - group < 16 ? groups - group : 16;
        float scale[16];
        _mm512_storeu_ps(scale, scales_from(scales, at + group, count, kind));
        for (int64_t j = 0; j < count; j++) {
            const int64_t i = (group + j) * COLUMNS;
            const __m512 factor = _mm512_set1_ps(scale[j]);
            const __m512 low = _mm512_mul_ps(widened(codes + i), factor),
                         high = _mm512_mul_ps(widened(codes + i + 16), factor);
            for (int token = 0; token < tokens; token++) {
                const float *from = x + token * width + i;
                first[token] = _mm512_fmadd_ps(low, _mm512_loadu_ps(from), first[token]);
                last[token] = _mm512_fmadd_ps(high, _mm512_loadu_ps(from + 16), last[token]);
            }
        }
    }
    for (int token = 0; token < tokens; token++)
        out[token * rows] = _mm512_reduce_add_ps(_mm512_add_ps(first[token], last[token]));
}

/* Inputs of a few tokens stay in the nearest cache while some rows go by. */
AVX512 INLINE void rows_of(const float *x, const int8_t *codes, const char *scales, int64_t tokens,
                           int64_t width, int64_t first, int64_t end, int64_t rows, float *out,
                           int kind) {
    for (int64_t token = 0, some; token < tokens; token += some) {
        const float *from = x + token * width;
        float *to = out + token * rows;
        some = tokens - token;
        some = some >= MOST_TOKENS ? MOST_TOKENS : some >= 4 ? 4 : some >= 2 ? 2 : 1;
        for (int64_t row = first; row < end; row++) {
            const int64_t at = row * (width / COLUMNS);
            const int8_t *code = codes + row * width;
            if (some == MOST_TOKENS)
                row_of(from, code, scales, at, width, rows, MOST_TOKENS, to + row, kind);
            else if (some == 4) row_of(from, code, scales, at, width, rows, 4, to + row, kind);
            else if (some == 2) row_of(from, code, scales, at, width, rows, 2, to + row, kind);
            else row_of(from, code, scales, at, width, rows, 1, to + row, kind);
        }
    }
}

AVX512 static void some_rows(const float *x, const int8_t *codes, const char *scales,
                             int64_t kind, int64_t tokens, int64_t width, int64_t first,
                             int64_t end, int64_t rows, float *out) {
    for (int64_t row = first; row < end; row += BLOCK_ROWS) {
        const int64_t stop = row + BLOCK_ROWS < end ? row + BLOCK_ROWS : end;
#define ROWS(k) rows_of(x, codes, scales, tokens, width, row, stop, rows, out, k)
        EACH_KIND(ROWS)
    }
}

#endif

/* x: float [tokens][width]; codes: int8 [rows][width]; scales: of `kind` [rows][width / 32]
 * out: float [tokens][rows] */
PENSTOCK_EXPORT void penstock_int8_groups(const float *x, const int8_t *codes, const char *scales,
                                          int64_t kind, int64_t tokens, int64_t width,
                                          int64_t rows, float *out) {
#ifdef PENSTOCK_X86
    const int64_t parts = penstock_num_threads(rows);
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int64_t part = 0; part < parts; part++)
        some_rows(x, codes, scales, kind, tokens, width, rows * part / parts,
                  rows * (part + 1) / parts, rows, out);
#else
    (void)x, (void)codes, (void)scales, (void)kind, (void)tokens, (void)width, (void)rows;
    (void)out;
#endif
}
