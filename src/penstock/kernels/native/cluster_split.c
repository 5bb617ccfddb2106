/* A cluster in two by k-means with k = 2 (DynaKV). The twin: ClusterStep.split_twin().
 *
 * Everything is in float64 and in the twin's order of additions, so that both find the same parts:
 * along the components as in clusters.h, over the points one after another. */

#include "clusters.h"

#ifdef PENSTOCK_X86

#define POWER_STEPS 2 /* as in cluster_split.py */
#define MOST_ITERATIONS 20
#define TINY 1e-150

/* Vectors have `width` doubles, a multiple of 8; those behind the dimension are 0. */
struct points {
    int64_t count, width;
    double *at;     /* [count][width] */
    double *along;  /* [count] */
    double *vector; /* [width] */
};

AVX512 static double dot(const double *a, const double *b, int64_t width) {
    __m512d sum = _mm512_setzero_pd();
    for (int64_t i = 0; i < width; i += 8)
        sum = _mm512_add_pd(sum, _mm512_mul_pd(_mm512_loadu_pd(a + i), _mm512_loadu_pd(b + i)));
    return fold(sum);
}

AVX512 static void add(double *sum, const double *vector, double factor, int64_t width) {
    const __m512d by = _mm512_set1_pd(factor);
    for (int64_t i = 0; i < width; i += 8) {
        const __m512d term = _mm512_mul_pd(_mm512_loadu_pd(vector + i), by);
        _mm512_storeu_pd(sum + i, _mm512_add_pd(_mm512_loadu_pd(sum + i), term));
    }
}

AVX512 static void add_key(double *sum, const float *key, int64_t dim) {
    for (int64_t i = 0; i < dim; i++) sum[i] += (double)key[i];
}

static void project(const struct points *p) {
    for (int64_t n = 0; n < p->count; n++)
        p->along[n] = dot(p->at + n * p->width, p->vector, p->width);
}

/* The points about their mean. */
static void centre(const struct points *p, const float *keys, int64_t dim) {
    double *mean = p->vector;
    memset(mean, 0, 8 * p->width);
    for (int64_t n = 0; n < p->count; n++) add_key(mean, keys + n * dim, dim);
    for (int64_t i = 0; i < dim; i++) mean[i] /= (double)p->count;
    memset(p->at, 0, 8 * p->count * p->width);
    for (int64_t n = 0; n < p->count; n++)
        for (int64_t i = 0; i < dim; i++)
            p->at[n * p->width + i] = (double)keys[n * dim + i] - mean[i];
}

/* Projections on the direction of largest spread, by a few power iterations. */
static void spread(const struct points *p) {
    int64_t longest = 0;
    double most = -1.0;
    for (int64_t n = 0; n < p->count; n++) {
        const double length = dot(p->at + n * p->width, p->at + n * p->width, p->width);
        if (length > most) most = length, longest = n;
    }
    memcpy(p->vector, p->at + longest * p->width, 8 * p->width);
    for (int step = 0; step < POWER_STEPS; step++) {
        double length = sqrt(dot(p->vector, p->vector, p->width));
        length = length > TINY ? length : TINY;
        for (int64_t i = 0; i < p->width; i++) p->vector[i] /= length;
        project(p);
        memset(p->vector, 0, 8 * p->width);
        for (int64_t n = 0; n < p->count; n++)
            add(p->vector, p->at + n * p->width, p->along[n], p->width);
    }
    project(p);
}

/* Points that differ by rounding alone: by the first component that differs at all. */
static int64_t by_first_difference(const float *keys, int64_t count, int64_t dim,
                                   uint8_t *second) {
    for (int64_t i = 0; i < dim; i++) {
        float least = keys[i];
        int differ = 0;
        for (int64_t n = 1; n < count; n++) {
            differ |= keys[n * dim + i] != keys[i];
            least = keys[n * dim + i] < least ? keys[n * dim + i] : least;
        }
        if (!differ) continue;
        int64_t found = 0;
        for (int64_t n = 0; n < count; n++) found += second[n] = keys[n * dim + i] > least;
        return found;
    }
    return 0;
}

/* How many points are in the second part; 0 where all are equal. */
static int64_t two_means(const struct points *p, const float *keys, int64_t dim,
                         uint8_t *second) {
    centre(p, keys, dim);
    spread(p);
    int64_t size = 0;
    for (int64_t n = 0; n < p->count; n++) size += second[n] = p->along[n] > 0.0;
    if (size == 0 || size == p->count) size = by_first_difference(keys, p->count, dim, second);
    for (int iteration = 0; size && iteration < MOST_ITERATIONS; iteration++) {
        memset(p->vector, 0, 8 * p->width);
        for (int64_t n = 0; n < p->count; n++)
            if (second[n]) add(p->vector, p->at + n * p->width, 1.0, p->width);
        project(p);
        const double between = 0.5 * dot(p->vector, p->vector, p->width) *
                               (1.0 / (double)size - 1.0 / (double)(p->count - size));
        int64_t moved = 0, changed = 0;
        for (int64_t n = 0; n < p->count; n++) {
            const int now = p->along[n] > between;
            moved += now, changed += now != second[n];
        }
        /* The mean of either part lies on its own side; only rounding can empty one. */
        if (!changed || moved == 0 || moved == p->count) break;
        for (int64_t n = 0; n < p->count; n++) second[n] = p->along[n] > between;
        size = moved;
    }
    return size;
}

/* A cluster's statistics from those keys whose `second` is `which`, of which there are `size`. */
AVX512 static void set_cluster(const struct scan *s, const struct step *to, int64_t row,
                               int64_t cluster, const struct points *p, const float *keys,
                               const uint8_t *second, int which, int64_t size) {
    double *mean = p->vector, *squares = p->at; /* the points are done with */
    memset(mean, 0, 8 * p->width);
    memset(squares, 0, 8 * p->width);
    for (int64_t n = 0; n < p->count; n++)
        if (second[n] == which) add_key(mean, keys + n * s->dim, s->dim);
    for (int64_t i = 0; i < s->dim; i++) mean[i] /= (double)size;
    for (int64_t n = 0; n < p->count; n++)
        for (int64_t i = 0; second[n] == which && i < s->dim; i++) {
            const double gap = (double)keys[n * s->dim + i] - mean[i];
            squares[i] += gap * gap;
        }
    __m512d sum = _mm512_setzero_pd();
    for (int64_t i = 0; i < p->width; i += 8)
        sum = _mm512_add_pd(sum, _mm512_loadu_pd(squares + i));
    const int64_t place = row * s->capacity + cluster;
    to->sizes[place] = (int32_t)size;
    to->deviations[place] = (float)fold(sum);
    for (int64_t i = 0; i < s->dim; i++) s->centroids[place * s->dim + i] = (float)mean[i];
    copy_centroid(s, row, cluster);
}

#endif

/* scan, step: the tables in clusters.h
 * keys: float [count][dim], all of a cluster's; `oldest` of them stays in parts of one size
 * child: a free number, or -1 where there is none; the larger part keeps the cluster's
 * scratch: double [count + 1][width] and [count], width: dim rounded up to 8
 * moves: uint8 [count]; moved: int64, how many go to the child; 0 where the cluster stays whole */
PENSTOCK_EXPORT void penstock_split_cluster(const void *scan, const void *step, const float *keys,
                                            int64_t count, int64_t oldest, int64_t row,
                                            int64_t cluster, int64_t child, double *scratch,
                                            uint8_t *moves, int64_t *moved) {
    *moved = 0;
    if (count <= 0) return;
#ifdef PENSTOCK_X86
    const struct scan *s = scan;
    const int64_t width = (s->dim + 7) / 8 * 8;
    const struct points p = {count, width, scratch, scratch + (count + 1) * width,
                             scratch + count * width};
    int64_t size = child < 0 ? 0 : two_means(&p, keys, s->dim, moves);
    if (size == 0) memset(moves, 0, (size_t)count);
    if (2 * size > count || (2 * size == count && moves[oldest])) {
        for (int64_t n = 0; n < count; n++) moves[n] = !moves[n];
        size = count - size;
    }
    set_cluster(s, step, row, cluster, &p, keys, moves, 0, count - size);
    if (size) set_cluster(s, step, row, child, &p, keys, moves, 1, size);
    *moved = size;
#else
    (void)scan, (void)step, (void)keys, (void)count, (void)oldest, (void)row, (void)cluster;
    (void)child, (void)scratch, (void)moves;
#endif
}
