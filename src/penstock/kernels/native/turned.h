/* Sums across vectors, and tokens turned so that none are needed; for tree_attention.c. */

#ifndef PENSTOCK_TURNED_H
#define PENSTOCK_TURNED_H

#include "avx512.h"

#ifdef PENSTOCK_X86

#define TILE 32 /* tokens: two vectors */

/* 16 sums across 16 vectors. */
AVX512 INLINE __m512 sums_across(__m512 *s) {
    for (int i = 0; i < 8; i++)
        s[i] = _mm512_add_ps(_mm512_unpacklo_ps(s[2 * i], s[2 * i + 1]),
                             _mm512_unpackhi_ps(s[2 * i], s[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(s[2 * i]), b = _mm512_castps_pd(s[2 * i + 1]);
        s[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++)
        s[i] = _mm512_add_ps(_mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(s[0], s[1], 0x88),
                         _mm512_shuffle_f32x4(s[0], s[1], 0xdd));
}

/* 16 tokens of 16 dims each become 16 dims of 16 tokens, TILE floats apart. */
AVX512 INLINE void turn(const char *const *token, int64_t dim, int kind, float *to) {
    __m512 r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = load(token[i], dim, kind);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int i = 0; i < 4; i++) {
        const __m512 a = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
        const __m512 d = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
        _mm512_store_ps(to + i * TILE, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_store_ps(to + (4 + i) * TILE, _mm512_shuffle_f32x4(c, d, 0x88));
        _mm512_store_ps(to + (8 + i) * TILE, _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_store_ps(to + (12 + i) * TILE, _mm512_shuffle_f32x4(c, d, 0xdd));
    }
}

#endif

#endif
