/* A decode step's entries to their clusters (DynaKV). The twins: CentroidScan.nearest_twin()
 * and ClusterStep.take_twin(). What splits a cluster is in cluster_split.c.
 *
 * The nearest centroid is searched in an 8-bit copy of the centroids, bound by its bytes, with a
 * query of 16 bits; what can still be the nearest is measured in float64. Distances and statistics
 * are those of the twins bit for bit: one order of additions, no fused ones (`-std=c11`). */

#include "clusters.h"

#ifdef PENSTOCK_X86

#define QUERY_UNITS 32512.0f /* 127 * 256 */
#define WORTH_THREADS (1 << 20) /* bytes of codes; fewer are read before threads have begun */

/* Squared distance; in the order of squared_distances(). */
AVX512 static double squared_distance(const float *a, const float *b, int64_t dim) {
    __m512d sum = _mm512_setzero_pd();
    for (int64_t i = 0; i < dim; i += 8) {
        const __mmask8 lanes = dim - i >= 8 ? 0xff : (__mmask8)((1u << (dim - i)) - 1);
        const __m512d gap = _mm512_sub_pd(_mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, a + i)),
                                          _mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, b + i)));
        sum = _mm512_add_pd(sum, _mm512_mul_pd(gap, gap));
    }
    return fold(sum);
}

struct query {
    const int8_t *high, *low; /* [width]; 256 * high + low units of `unit` */
    float unit, length, error;
    int32_t high_sum, low_sum; /* of the components, times 128 */
};

/* The key about the origin, in units of each component's range, as 16-bit numbers. */
AVX512 static struct query make_query(const struct scan *s, int64_t row, const float *key) {
    const float *origin = s->origin + row * s->dim, *ranges = s->ranges + row * s->dim;
    int8_t *high = s->query + row * 2 * s->width, *low = high + s->width;
    __m512 most = _mm512_setzero_ps(), squares = most, errors = most;
    for (int64_t i = 0; i < s->dim; i += 16) {
        const __mmask16 lanes = lanes_left(s->dim - i);
        const __m512 x = _mm512_mul_ps(distance_from(key + i, origin + i, lanes),
                                       _mm512_maskz_loadu_ps(lanes, ranges + i));
        most = _mm512_max_ps(most, _mm512_abs_ps(x));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    struct query made = {high, low, _mm512_reduce_max_ps(most) / QUERY_UNITS + SMALLEST,
                         sqrtf(_mm512_reduce_add_ps(squares)), 0.0f, 0, 0};
    const __m512 unit = _mm512_set1_ps(made.unit);
    __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
    for (int64_t i = 0; i < s->width; i += 16) {
        const __mmask16 lanes = lanes_left(s->dim > i ? s->dim - i : 0);
        const __m512 x = _mm512_mul_ps(distance_from(key + i, origin + i, lanes),
                                       _mm512_maskz_loadu_ps(lanes, ranges + i));
        const __m512i whole = at_least(_mm512_cvtps_epi32(_mm512_div_ps(x, unit)), -32512);
        const __m512 left = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(whole), unit, x);
        errors = _mm512_fmadd_ps(left, left, errors);
        const __m512i upper =
            _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
        high_sum = _mm512_add_epi32(high_sum, upper);
        low_sum = _mm512_add_epi32(low_sum, lower);
        _mm_storeu_si128((__m128i *)(high + i), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128((__m128i *)(low + i), _mm512_cvtepi32_epi8(lower));
    }
    made.error = sqrtf(_mm512_reduce_add_ps(errors));
    made.high_sum = 128 * _mm512_reduce_add_epi32(high_sum);
    made.low_sum = 128 * _mm512_reduce_add_epi32(low_sum);
    return made;
}

/* Scores of 32 clusters: products with the query, less half the centroid's square. */
VNNI INLINE __m512 score_two_blocks(const struct scan *s, const struct query *q, int64_t row,
                                    int64_t block, __m512 best) {
    const uint8_t *codes = s->codes + (row * s->blocks + block) * 16 * s->width;
    const int64_t next = 16 * s->width;
    __m512i sum[2][2];
    for (int j = 0; j < 2; j++) sum[j][0] = sum[j][1] = _mm512_setzero_si512();
    for (int64_t i = 0; i < s->width; i += 4) {
        int32_t four[2];
        memcpy(four, q->high + i, 4), memcpy(four + 1, q->low + i, 4);
        for (int j = 0; j < 2; j++) {
            const __m512i code = _mm512_loadu_si512(codes + j * next + i * 16);
            sum[j][0] = _mm512_dpbusd_epi32(sum[j][0], code, _mm512_set1_epi32(four[0]));
            sum[j][1] = _mm512_dpbusd_epi32(sum[j][1], code, _mm512_set1_epi32(four[1]));
        }
    }
    for (int j = 0; j < 2; j++) {
        const int64_t place = (row * s->blocks + block + j) * 16;
        const __m512 high = _mm512_cvtepi32_ps(
            _mm512_sub_epi32(sum[j][0], _mm512_set1_epi32(q->high_sum)));
        const __m512 low = _mm512_cvtepi32_ps(
            _mm512_sub_epi32(sum[j][1], _mm512_set1_epi32(q->low_sum)));
        const __m512 whole = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low);
        const __m512 step =
            _mm512_mul_ps(_mm512_loadu_ps(s->steps + place), _mm512_set1_ps(q->unit));
        const __m512 score =
            _mm512_fmsub_ps(whole, step, _mm512_loadu_ps(s->half_squares + place));
        _mm512_storeu_ps(s->scores + place, score);
        best = _mm512_max_ps(best, score);
    }
    return best;
}

/* The nearest centroid of a row's key, of equals the first; -1 where the key is not finite. */
VNNI static int64_t nearest_of_row(const struct scan *s, int64_t row, const float *key,
                                   int64_t used, double *square) {
    const struct query query = make_query(s, row, key);
    if (!isfinite(query.length)) return -1;
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t block = 0; 16 * block < used; block += 2)
        most = score_two_blocks(s, &query, row, block, most);
    const float margin = 2.0f * (s->errors[row] * query.length + s->reach[row] * query.error) +
                         4.0f * ROUNDING * s->largest[row];
    const float limit = _mm512_reduce_max_ps(most) - margin;
    if (!isfinite(limit)) return -1;
    const float *scores = s->scores + row * 16 * s->blocks;
    const float *centroids = s->centroids + row * s->capacity * s->dim;
    int64_t chosen = -1;
    *square = INFINITY;
    for (int64_t first = 0; first < used; first += 16) {
        uint32_t left = _mm512_cmp_ps_mask(_mm512_loadu_ps(scores + first), _mm512_set1_ps(limit),
                                           _CMP_GE_OQ);
        for (; left; left &= left - 1) {
            const int64_t cluster = first + __builtin_ctz(left);
            const double found = squared_distance(key, centroids + cluster * s->dim, s->dim);
            if (found < *square) *square = found, chosen = cluster;
        }
    }
    return chosen;
}

/* A cluster's statistics with one entry more; whether it is a member. */
AVX512 static int take_entry(const struct scan *s, const struct step *to, int64_t row,
                             int64_t cluster, const float *key, double square) {
    const int64_t place = row * s->capacity + cluster;
    const int32_t size = to->sizes[place];
    if (to->update == 2) return 0;
    if (to->update == 1) {
        to->deviations[place] = (float)((double)to->deviations[place] + square);
        to->sizes[place] = size + 1;
        return 1;
    }
    if (to->buffer_counts[place]) return 0;
    const float after = (float)size + 1.0f;
    const double share = (double)size / (double)after;
    const float deviation = (float)((double)to->deviations[place] + square * share);
    if (!(deviation / after <= to->thresholds[row]) && to->free[row]) return 0;
    to->deviations[place] = deviation;
    to->sizes[place] = size + 1;
    float *centroid = s->centroids + place * s->dim;
    for (int64_t i = 0; i < s->dim; i += 16) {
        const __mmask16 lanes = lanes_left(s->dim - i);
        const __m512 gap = distance_from(key + i, centroid + i, lanes);
        const __m512 moved = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, centroid + i),
                                           _mm512_div_ps(gap, _mm512_set1_ps(after)));
        _mm512_mask_storeu_ps(centroid + i, lanes, moved);
    }
    copy_centroid(s, row, cluster);
    return 1;
}

#endif

/* scan: `struct scan`; places: int64 [count], row times capacity plus number */
PENSTOCK_EXPORT void penstock_copy_centroids(const void *scan, const int64_t *places,
                                             int64_t count) {
#ifdef PENSTOCK_X86
    const struct scan *s = scan;
    for (int64_t i = 0; i < count; i++)
        copy_centroid(s, places[i] / s->capacity, places[i] % s->capacity);
#else
    (void)scan, (void)places, (void)count;
#endif
}

/* keys: float [rows] of [dim], `stride` apart; clusters before `used` are looked at
 * chosen: int64 [rows], -1 where the key is not finite; squares: double [rows], to the chosen */
PENSTOCK_EXPORT void penstock_nearest_centroids(const void *scan, const float *keys,
                                                int64_t stride, int64_t used, int64_t *chosen,
                                                double *squares) {
#ifdef PENSTOCK_X86
    const struct scan *s = scan;
    const int large = s->rows * used * s->width > WORTH_THREADS;
    const int64_t parts = large ? penstock_num_threads(s->rows) : 1;
    (void)parts;
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int64_t row = 0; row < s->rows; row++)
        chosen[row] = nearest_of_row(s, row, keys + row * stride, used, squares + row);
#else
    (void)scan, (void)keys, (void)stride, (void)used, (void)chosen, (void)squares;
#endif
}

/* step: `struct step`; at: position of the entries; the others as above
 * chosen: int64 [rows], -1 - c where the entry is buffered for cluster c
 * waiting: int64, how many are buffered; -1, and nothing is changed, where a key is not finite */
PENSTOCK_EXPORT void penstock_cluster_step(const void *scan, const void *step, const float *keys,
                                           int64_t stride, int64_t used, int64_t at,
                                           int64_t *chosen, double *squares, int64_t *waiting) {
    *waiting = -1;
#ifdef PENSTOCK_X86
    const struct scan *s = scan;
    const struct step *to = step;
    penstock_nearest_centroids(scan, keys, stride, used, chosen, squares);
    for (int64_t row = 0; row < s->rows; row++)
        if (chosen[row] < 0) return;
    *waiting = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        const int64_t cluster = chosen[row];
        if (!take_entry(s, to, row, cluster, keys + row * stride, squares[row])) {
            to->buffer_counts[row * s->capacity + cluster]++;
            ++*waiting;
            chosen[row] = ~cluster;
        }
        if (to->number_bytes == 2)
            ((int16_t *)to->cluster_of)[row * to->tokens + at] = (int16_t)chosen[row];
        else
            ((int32_t *)to->cluster_of)[row * to->tokens + at] = (int32_t)chosen[row];
    }
#else
    (void)scan, (void)step, (void)keys, (void)stride, (void)used, (void)at, (void)chosen;
    (void)squares;
#endif
}
