/* The tables of clusters, and a changed centroid's copy; for clusters.c and cluster_split.c. */

#ifndef PENSTOCK_CLUSTERS_H
#define PENSTOCK_CLUSTERS_H

#include "avx512.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

#ifdef PENSTOCK_X86

#define ROUNDING 1e-5f /* as in centroid_scan.py */
#define SMALLEST 1e-30f

/* CentroidScan's arrays, in the order of its `_table`. A block is 16 clusters; `blocks` is even.
 * codes: [rows][blocks][width / 4][16][4], each 128 more than it means; width divides by 16 */
struct scan {
    int64_t rows, capacity, dim, width, blocks;
    float *centroids;                          /* [rows][capacity][dim] */
    const float *origin, *ranges;              /* [rows][dim] */
    float *half_squares, *steps, *scores;      /* [rows][16 * blocks] */
    float *largest, *errors, *reach;           /* [rows] */
    uint8_t *codes;
    int8_t *query;                             /* [rows][2][width] */
};

/* What ClusterStep's `_table` adds. */
struct step {
    int64_t update;                            /* 0: adaptive, 1: static, 2: local */
    int64_t tokens, number_bytes;              /* of a row of cluster_of; 2 or 4 */
    int32_t *sizes;                            /* [rows][capacity] */
    float *deviations;                         /* [rows][capacity] */
    const int64_t *free;                       /* [rows] */
    const float *thresholds;                   /* [rows] */
    int32_t *buffer_counts;                    /* [rows][capacity] */
    char *cluster_of;                          /* [rows][tokens] */
};

AVX512 INLINE __mmask16 lanes_left(int64_t left) {
    return left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
}

/* Of what is not a number a conversion makes the least integer, sums of which run over. */
AVX512 INLINE __m512i at_least(__m512i whole, int32_t least) {
    return _mm512_max_epi32(whole, _mm512_set1_epi32(least));
}

AVX512 INLINE __m512 distance_from(const float *a, const float *b, __mmask16 lanes) {
    return _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, a), _mm512_maskz_loadu_ps(lanes, b));
}

AVX512 INLINE double fold(__m512d sum) {
    double lane[8];
    _mm512_storeu_pd(lane, sum);
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

/* A centroid has changed: its code, and the bounds of its row. */
AVX512 static void copy_centroid(const struct scan *s, int64_t row, int64_t cluster) {
    const float *centroid = s->centroids + (row * s->capacity + cluster) * s->dim;
    const float *origin = s->origin + row * s->dim, *ranges = s->ranges + row * s->dim;
    const int64_t place = row * 16 * s->blocks + cluster;
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 squares = _mm512_setzero_ps(), lengths = squares, most = squares, errors = squares;
    for (int64_t i = 0; i < s->dim; i += 16) {
        const __mmask16 lanes = lanes_left(s->dim - i);
        const __m512 part = distance_from(centroid + i, origin + i, lanes);
        const __m512 scaled = _mm512_div_ps(part, _mm512_mask_loadu_ps(one, lanes, ranges + i));
        squares = _mm512_fmadd_ps(part, part, squares);
        lengths = _mm512_fmadd_ps(scaled, scaled, lengths);
        most = _mm512_max_ps(most, _mm512_abs_ps(scaled));
    }
    const float step = _mm512_reduce_max_ps(most) / 127.0f + SMALLEST;
    uint8_t *codes = s->codes + (row * s->blocks + cluster / 16) * 16 * s->width;
    for (int64_t i = 0; i < s->width; i += 16) {
        const __mmask16 lanes = lanes_left(s->dim > i ? s->dim - i : 0);
        const __m512 part = distance_from(centroid + i, origin + i, lanes);
        const __m512 scaled = _mm512_div_ps(part, _mm512_mask_loadu_ps(one, lanes, ranges + i));
        const __m512i code = _mm512_cvtps_epi32(_mm512_div_ps(scaled, _mm512_set1_ps(step)));
        const __m512 left =
            _mm512_fnmadd_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(step), scaled);
        errors = _mm512_fmadd_ps(left, left, errors);
        int32_t four[4];
        _mm_storeu_si128((__m128i *)four, _mm512_cvtepi32_epi8(_mm512_add_epi32(
                                              code, _mm512_set1_epi32(128))));
        for (int64_t j = 0; j < 4; j++)
            memcpy(codes + (i / 4 + j) * 64 + cluster % 16 * 4, four + j, 4);
    }
    const float half = 0.5f * _mm512_reduce_add_ps(squares);
    const float length = sqrtf(_mm512_reduce_add_ps(lengths));
    const float error = sqrtf(_mm512_reduce_add_ps(errors)) + ROUNDING * length;
    s->half_squares[place] = half;
    s->steps[place] = step;
    if (half > s->largest[row]) s->largest[row] = half;
    if (error > s->errors[row]) s->errors[row] = error;
    if (length > s->reach[row]) s->reach[row] = length;
}

#endif

#endif
