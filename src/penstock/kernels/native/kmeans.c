/* Many points to the nearest of many centroids, and their sums: a pass of Lloyd's algorithm. The
 * twins: kmeans.nearest_twin() and kmeans.means_twin().
 *
 * Products of 8-bit copies of both give every score up to a known error; what can still be the
 * nearest, two or three of a thousand, is measured in float64, so that the answer is exact. */

#include "clusters.h"

#ifdef PENSTOCK_X86

#define POINTS 4 /* looked at together, with */
#define BLOCKS 2 /* so many blocks of 16 centroids */
#define TILE (16 * BLOCKS)
#define CHUNK 1024 /* points between two times that sums are added to */

/* [count] of [dim], `stride` components apart. */
struct points {
    const char *at;
    int64_t kind, stride, count;
};

struct query {
    float unit, margin;
    int32_t sum; /* of the components, times -128 */
};

AVX512 INLINE __m512 load_some(const struct points *p, int64_t index, __mmask16 lanes) {
    if (p->kind == FLOAT32) return _mm512_maskz_loadu_ps(lanes, (const float *)p->at + index);
    const __m256i half = _mm256_maskz_loadu_epi16(lanes, (const uint16_t *)p->at + index);
    if (p->kind == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Origin and ranges as CentroidScan.begin() takes them, and the copy. */
AVX512 static void copy_all(const struct scan *s, float *origin, float *ranges, int64_t clusters) {
    memset(origin, 0, 4 * s->dim);
    memset(ranges, 0, 4 * s->dim);
    for (int64_t c = 0; c < clusters; c++)
        for (int64_t i = 0; i < s->dim; i++) origin[i] += s->centroids[c * s->dim + i];
    for (int64_t i = 0; i < s->dim; i++) origin[i] /= (float)clusters;
    for (int64_t c = 0; c < clusters; c++)
        for (int64_t i = 0; i < s->dim; i++) {
            const float gap = fabsf(s->centroids[c * s->dim + i] - origin[i]);
            ranges[i] = gap > ranges[i] ? gap : ranges[i];
        }
    float spread = 0.0f, offset = 0.0f;
    for (int64_t i = 0; i < s->dim; i++) {
        spread = ranges[i] > spread ? ranges[i] : spread;
        offset = fabsf(origin[i]) > offset ? fabsf(origin[i]) : offset;
    }
    float least = 1e-3f * spread > 1e-5f * offset ? 1e-3f * spread : 1e-5f * offset;
    least = least > 0.0f ? least : 1.0f;
    for (int64_t i = 0; i < s->dim; i++) ranges[i] = ranges[i] > least ? ranges[i] : least;
    *s->largest = *s->errors = *s->reach = 0.0f;
    for (int64_t i = 0; i < 16 * s->blocks; i++) s->half_squares[i] = INFINITY, s->steps[i] = 0.0f;
    for (int64_t c = 0; c < clusters; c++) copy_centroid(s, 0, c);
}

/* A component of a point about the origin, in units of its range. */
AVX512 INLINE __m512 scaled(const struct scan *s, const struct points *p, int64_t at, int64_t i) {
    const __mmask16 lanes = lanes_left(s->dim > i ? s->dim - i : 0);
    const __m512 gap = _mm512_sub_ps(load_some(p, at * p->stride + i, lanes),
                                     _mm512_maskz_loadu_ps(lanes, s->origin + i));
    return _mm512_mul_ps(gap, _mm512_maskz_loadu_ps(lanes, s->ranges + i));
}

/* A point as 8-bit numbers. */
AVX512 static struct query make_query(const struct scan *s, const struct points *p, int64_t at,
                                      int8_t *codes) {
    __m512 most = _mm512_setzero_ps(), squares = most, errors = most;
    for (int64_t i = 0; i < s->width; i += 16) {
        const __m512 x = scaled(s, p, at, i);
        most = _mm512_max_ps(most, _mm512_abs_ps(x));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    struct query made = {_mm512_reduce_max_ps(most) / 127.0f + SMALLEST, 0.0f, 0};
    const __m512 inverse = _mm512_set1_ps(1.0f / made.unit), unit = _mm512_set1_ps(made.unit);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < s->width; i += 16) {
        const __m512 x = scaled(s, p, at, i);
        const __m512i whole = at_least(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)), -127);
        const __m512 left = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(whole), unit, x);
        errors = _mm512_fmadd_ps(left, left, errors);
        sum = _mm512_add_epi32(sum, whole);
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtsepi32_epi8(whole));
    }
    const float length = sqrtf(_mm512_reduce_add_ps(squares));
    const float error = sqrtf(_mm512_reduce_add_ps(errors)) + ROUNDING * length;
    made.margin = 2.0f * (*s->errors * (length + error) + *s->reach * error) +
                  4.0f * ROUNDING * *s->largest;
    made.sum = -128 * _mm512_reduce_add_epi32(sum);
    return made;
}

/* Scores of a few points with all centroids: products, less half the centroid's square.
 * codes: [POINTS][width]; scores: [POINTS][16 * blocks]; best: the highest of each point */
VNNI static void score(const struct scan *s, const struct query *q, const int8_t *codes,
                       float *scores, float *best) {
    __m512 most[POINTS];
    for (int n = 0; n < POINTS; n++) most[n] = _mm512_set1_ps(-INFINITY);
    const int64_t next = 16 * s->width;
    for (int64_t block = 0; block < s->blocks; block += BLOCKS) {
        const uint8_t *centroids = s->codes + block * next;
        __m512i sum[POINTS][BLOCKS];
        for (int n = 0; n < POINTS; n++)
            for (int j = 0; j < BLOCKS; j++) sum[n][j] = _mm512_set1_epi32(q[n].sum);
        for (int64_t i = 0; i < s->width; i += 4) {
            __m512i code[BLOCKS];
            for (int j = 0; j < BLOCKS; j++)
                code[j] = _mm512_loadu_si512(centroids + j * next + i * 16);
            for (int n = 0; n < POINTS; n++) {
                int32_t four;
                memcpy(&four, codes + n * s->width + i, 4);
                const __m512i point = _mm512_set1_epi32(four);
                for (int j = 0; j < BLOCKS; j++)
                    sum[n][j] = _mm512_dpbusd_epi32(sum[n][j], code[j], point);
            }
        }
        for (int j = 0; j < BLOCKS; j++) {
            const int64_t place = 16 * (block + j);
            const __m512 step = _mm512_loadu_ps(s->steps + place);
            const __m512 half = _mm512_loadu_ps(s->half_squares + place);
            for (int n = 0; n < POINTS; n++) {
                const __m512 whole = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[n][j]), step);
                const __m512 found = _mm512_fmsub_ps(whole, _mm512_set1_ps(q[n].unit), half);
                _mm512_storeu_ps(scores + n * 16 * s->blocks + place, found);
                most[n] = _mm512_max_ps(most[n], found);
            }
        }
    }
    for (int n = 0; n < POINTS; n++) best[n] = _mm512_reduce_max_ps(most[n]);
}

AVX512 static double distance(const struct points *p, int64_t at, const float *centroid,
                              int64_t dim) {
    __m512d low = _mm512_setzero_pd(), high = low;
    for (int64_t i = 0; i < dim; i += 16) {
        const __mmask16 lanes = lanes_left(dim - i);
        const __m512 x = load_some(p, at * p->stride + i, lanes);
        const __m512 c = _mm512_maskz_loadu_ps(lanes, centroid + i);
        const __m512d first = _mm512_sub_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)),
                                            _mm512_cvtps_pd(_mm512_castps512_ps256(c)));
        const __m512d second = _mm512_sub_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)),
                                             _mm512_cvtps_pd(_mm512_extractf32x8_ps(c, 1)));
        low = _mm512_fmadd_pd(first, first, low);
        high = _mm512_fmadd_pd(second, second, high);
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

/* Of the centroids that can be the nearest the one that is, of equals the first; 0 where the point
 * is not finite. */
AVX512 static int64_t settle(const struct scan *s, const struct points *p, int64_t at,
                             const float *scores, float limit) {
    int64_t chosen = 0, found = 0;
    double least = INFINITY;
    if (!isfinite(limit)) return 0;
    const __m512 enough = _mm512_set1_ps(limit);
    for (int64_t first = 0; first < 16 * s->blocks; first += TILE) {
        uint32_t left = 0;
        for (int j = 0; j < BLOCKS; j++) {
            const __m512 here = _mm512_loadu_ps(scores + first + 16 * j);
            left |= (uint32_t)_mm512_cmp_ps_mask(here, enough, _CMP_GE_OQ) << 16 * j;
        }
        for (; left; left &= left - 1) {
            const int64_t cluster = first + __builtin_ctz(left);
            if (found++ == 0) {
                chosen = cluster;
                continue;
            }
            if (found == 2) least = distance(p, at, s->centroids + chosen * s->dim, s->dim);
            const double gap = distance(p, at, s->centroids + cluster * s->dim, s->dim);
            if (gap < least) least = gap, chosen = cluster;
        }
    }
    return chosen;
}

/* The nearest of a few points from `first` on. */
VNNI static void nearest_of(const struct scan *s, const struct points *p, int64_t first,
                            int8_t *codes, float *scores, int64_t *ids) {
    const int64_t here = p->count - first < POINTS ? p->count - first : POINTS;
    struct query q[POINTS];
    float best[POINTS];
    for (int64_t n = 0; n < POINTS; n++) /* the last one again where there are fewer */
        q[n] = make_query(s, p, first + (n < here ? n : here - 1), codes + n * s->width);
    score(s, q, codes, scores, best);
    for (int64_t n = 0; n < here; n++)
        ids[n] = settle(s, p, first + n, scores + n * 16 * s->blocks, best[n] - q[n].margin);
}

/* Points `first` to `end` to the sums and sizes of their centroids, in their order. */
AVX512 static void add_points(const struct points *p, int64_t first, int64_t end, int64_t dim,
                              const int64_t *ids, float *sums, float *sizes) {
    for (int64_t at = first; at < end; at++) {
        float *sum = sums + ids[at - first] * dim;
        sizes[ids[at - first]] += 1.0f;
        for (int64_t i = 0; i < dim; i += 16) {
            const __mmask16 lanes = lanes_left(dim - i);
            const __m512 more = load_some(p, at * p->stride + i, lanes);
            const __m512 before = _mm512_maskz_loadu_ps(lanes, sum + i);
            _mm512_mask_storeu_ps(sum + i, lanes, _mm512_add_ps(before, more));
        }
    }
}

#endif

/* points: [count] of [dim], of a dtype in dtype_codes.py, `stride` components apart
 * centroids: float [clusters][dim]
 * scratch: as many bytes as kmeans_compiled.py says for so many `threads`
 * ids: int64 [count], or null; sums: float [clusters][dim] and sizes: float [clusters], which are
 * added to, or both null */
PENSTOCK_EXPORT void penstock_nearest_points(const void *points, int64_t kind, int64_t stride,
                                             int64_t count, int64_t dim, const float *centroids,
                                             int64_t clusters, int64_t threads, void *scratch,
                                             int64_t *ids, float *sums, float *sizes) {
#ifdef PENSTOCK_X86
    const struct points p = {points, kind, stride, count};
    const int64_t width = (dim + 15) / 16 * 16, blocks = (clusters + TILE - 1) / TILE * BLOCKS;
    const int64_t padded = 16 * blocks;
    int64_t *chunk_ids = scratch;
    float *origin = (float *)(chunk_ids + CHUNK), *ranges = origin + width;
    float *half = ranges + width, *steps = half + padded, *bounds = steps + padded;
    float *scores = bounds + 16;
    uint8_t *codes = (uint8_t *)(scores + threads * POINTS * padded);
    int8_t *queries = (int8_t *)(codes + padded * width);
    const struct scan s = {
        .rows = 1, .capacity = clusters, .dim = dim, .width = width, .blocks = blocks,
        .centroids = (float *)centroids, .origin = origin, .ranges = ranges, .half_squares = half,
        .steps = steps, .largest = bounds, .errors = bounds + 1, .reach = bounds + 2,
        .codes = codes,
    };
    copy_all(&s, origin, ranges, clusters);
    const int64_t parts = penstock_num_threads(threads);
    (void)parts;
    for (int64_t start = 0; start < count; start += CHUNK) {
        const int64_t end = start + CHUNK < count ? start + CHUNK : count;
        int64_t *found = ids ? ids + start : chunk_ids;
#pragma omp parallel for num_threads(parts) if (parts > 1) schedule(static)
        for (int64_t first = start; first < end; first += POINTS) {
#ifdef _OPENMP
            const int64_t thread = omp_get_thread_num();
#else
            const int64_t thread = 0;
#endif
            nearest_of(&s, &p, first, queries + thread * POINTS * width,
                       scores + thread * POINTS * padded, found + (first - start));
        }
        if (sums) add_points(&p, start, end, dim, found, sums, sizes);
    }
#else
    (void)points, (void)kind, (void)stride, (void)count, (void)dim, (void)centroids;
    (void)clusters, (void)threads, (void)scratch, (void)ids, (void)sums, (void)sizes;
#endif
}
