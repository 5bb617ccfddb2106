/* Scores of groups from quantised low-rank keys: int8 products, maximum over a group's tokens,
 * softmax per head over the groups, sum over heads. The twin of group_scores_twin().
 *
 * Heads are the vector lanes, 16 at a time: a group's product with 16 heads is one register, so
 * that the maximum over its tokens costs one instruction and nothing is transposed. */

#include "avx512.h"

#ifdef PENSTOCK_X86

#define LANES 16
#define MAX_PARTS 16 /* threads */
#define AT_ONCE 4 /* groups: as many independent sums hide the latency of a multiply-add */

typedef struct {
    const uint8_t *codes; /* one block: [group_tokens][block_groups][width] */
    int64_t group_tokens, block_groups, width;
    int64_t quads; /* four components each; for 4 bits of either half */
    int bits;
} block_t;

/* exp(x) for x <= 0, within 2 units in the last place; 0 below -87, NaN for NaN. */
static inline float exp_negative(float x) {
    if (!(x >= -87.0f)) return x != x ? x : 0.0f;
    const float n = rintf(x * 1.44269504f);
    const float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.9875691e-4f;
    p = p * r + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return p * power.f;
}

/* Largest product of every group with 16 heads, AT_ONCE groups from `first` on.
 * queries: [quads][LANES][4] (4 bits: twice that, the low nibbles' components first). */
VNNI static void products(const block_t *block, int64_t first, const int8_t *queries,
                               int32_t *best) {
    const int64_t width = block->width, plane = block->block_groups * width;
    const uint8_t *token = block->codes + first * width;
    const __m512i sign = _mm512_set1_epi8((char)0x80), low = _mm512_set1_epi8(15);
    const int64_t quads = block->quads;
    __m512i out[AT_ONCE];
    for (int g = 0; g < AT_ONCE; g++) out[g] = _mm512_set1_epi32(INT32_MIN);
    for (int64_t t = 0; t < block->group_tokens; t++, token += plane) {
        __m512i sum[AT_ONCE];
        for (int g = 0; g < AT_ONCE; g++) sum[g] = _mm512_setzero_si512();
        for (int64_t quad = 0; quad < quads; quad++) {
            const __m512i q = _mm512_loadu_si512(queries + quad * LANES * 4);
            if (block->bits == 8) {
                for (int g = 0; g < AT_ONCE; g++) {
                    int32_t four;
                    memcpy(&four, token + g * width + quad * 4, 4);
                    const __m512i code = _mm512_xor_si512(_mm512_set1_epi32(four), sign);
                    sum[g] = _mm512_dpbusd_epi32(sum[g], code, q);
                }
            } else {
                const __m512i high = _mm512_loadu_si512(queries + (quads + quad) * LANES * 4);
                for (int g = 0; g < AT_ONCE; g++) {
                    int32_t four;
                    memcpy(&four, token + g * width + quad * 4, 4);
                    const __m512i code = _mm512_set1_epi32(four);
                    const __m512i upper = _mm512_srli_epi16(code, 4);
                    sum[g] = _mm512_dpbusd_epi32(sum[g], _mm512_and_si512(code, low), q);
                    sum[g] = _mm512_dpbusd_epi32(sum[g], _mm512_and_si512(upper, low), high);
                }
            }
        }
        for (int g = 0; g < AT_ONCE; g++) out[g] = _mm512_max_epi32(out[g], sum[g]);
    }
    for (int g = 0; g < AT_ONCE; g++) _mm512_storeu_si512(best + g * LANES, out[g]);
}

/* Softmax of one part of the groups, unfinished: best, int32 [groups][LANES], becomes exp of the
 * distance to the part's largest logit, float, in place. */
VNNI static void exponentials(int32_t *best, int64_t groups, const float *scale,
                              int32_t *largest_out, float *sum_out) {
    const __m512 factor = _mm512_loadu_ps(scale);
    __m512i largest = _mm512_set1_epi32(INT32_MIN);
    for (int64_t g = 0; g < groups; g++)
        largest = _mm512_max_epi32(largest, _mm512_loadu_si512(best + g * LANES));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        const __m512i gap = _mm512_sub_epi32(_mm512_loadu_si512(best + g * LANES), largest);
        const __m512 w = exp_negative_512(_mm512_mul_ps(_mm512_cvtepi32_ps(gap), factor));
        sum = _mm512_add_ps(sum, w);
        _mm512_storeu_ps(best + g * LANES, w);
    }
    _mm512_storeu_si512(largest_out, largest);
    _mm512_storeu_ps(sum_out, sum);
}

/* scores[g] += sum over lanes of weight * factor */
VNNI static void add_weighted(const float *weights, int64_t groups, const float *factor,
                              float *scores) {
    const __m512 f = _mm512_loadu_ps(factor);
    for (int64_t g = 0; g < groups; g++)
        scores[g] += _mm512_reduce_add_ps(_mm512_mul_ps(_mm512_loadu_ps(weights + g * LANES), f));
}

/* Quantise 16 heads' low-rank queries to int8, one scale per head, and lay them out for the lanes.
 * queries: float [lanes][rank]; packed: int8 [halves * quads][LANES][4], zero where nothing is. */
static void pack_queries(const float *queries, int64_t lanes, int64_t rank, int64_t width, int bits,
                         int8_t *packed, float *scale) {
    const int64_t quads = width / 4;
    memset(packed, 0, (bits == 4 ? 2 : 1) * quads * LANES * 4);
    for (int64_t lane = 0; lane < LANES; lane++) scale[lane] = 0.0f;
    for (int64_t lane = 0; lane < lanes; lane++) {
        const float *query = queries + lane * rank;
        float largest = 1e-30f;
        for (int64_t i = 0; i < rank; i++)
            if (fabsf(query[i]) > largest) largest = fabsf(query[i]);
        scale[lane] = largest / 127.0f;
        for (int64_t i = 0; i < rank; i++) { /* of 4 bits it is in the low or the high half */
            const float code = rintf(query[i] / scale[lane]); /* no number where a query is none */
            packed[(i / 4 * LANES + lane) * 4 + i % 4] = fabsf(code) <= 127.0f ? (int8_t)code : 0;
        }
    }
}

typedef struct {
    int64_t begin, count;
} range_t;

/* The groups of a part that has `most` from `begin` on, of those in [first, end); where there is
 * none, none from `begin` on: what lies before `first` is another part's. */
static range_t range_of(int64_t begin, int64_t most, int64_t first, int64_t end) {
    const int64_t last = begin + most < end ? begin + most : end;
    const int64_t from = begin > first ? begin : first;
    const range_t range = {last > from ? from : begin, last > from ? last - from : 0};
    return range;
}

/* Scores of one row's groups.
 *
 * codes: [blocks][group_tokens][block_groups][width]; width and block_groups divide by 4
 * bits: 8 (int8 codes) or 4 (two components in a byte, the first `width` ones in the low nibbles)
 * queries: float [heads][rank], in units where a code's step is 1; softmax forgives offsets, which
 *     is why neither the sign bit of 8 nor the half step of 4 bits is corrected
 * first: groups before this one have no share, and the score 0; 0 .. num_groups
 * scratch: (num_groups rounded up to 4) * 64 + 128 * (width + 1) bytes, aligned to 4
 * scores: float [num_groups] */
PENSTOCK_EXPORT void penstock_group_scores(const uint8_t *codes, int64_t group_tokens,
                                           int64_t block_groups, int64_t width, int64_t bits,
                                           const float *queries, int64_t rank, int64_t heads,
                                           int64_t first, int64_t num_groups, void *scratch,
                                           float *scores) {
    const int64_t block_bytes = group_tokens * block_groups * width;
    const int64_t padded = (num_groups + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    int32_t *best_of = scratch;
    float *scale = (float *)(best_of + padded * LANES);
    int8_t *packed = (int8_t *)(scale + LANES);
    const int64_t parts = num_groups < 1024 ? 1 : penstock_num_threads(MAX_PARTS);
    const int64_t part_groups = (num_groups / parts + AT_ONCE) / AT_ONCE * AT_ONCE;
    memset(scores, 0, num_groups * sizeof(float));
    if (first >= num_groups) return;
    for (int64_t head = 0; head < heads; head += LANES) {
        const int64_t lanes = heads - head < LANES ? heads - head : LANES;
        int32_t largest[MAX_PARTS][LANES];
        float sum[MAX_PARTS][LANES];
        pack_queries(queries + head * rank, lanes, rank, width, (int)bits, packed, scale);
#pragma omp parallel for num_threads(parts) if (parts > 1)
        for (int64_t part = 0; part < parts; part++) {
            const range_t at = range_of(part * part_groups, part_groups, first, num_groups);
            for (int64_t g = at.begin / AT_ONCE * AT_ONCE; g < at.begin + at.count; g += AT_ONCE) {
                const block_t block = {codes + g / block_groups * block_bytes, group_tokens,
                                       block_groups, width, width / 4, (int)bits};
                products(&block, g % block_groups, packed, best_of + g * LANES);
            }
            exponentials(best_of + at.begin * LANES, at.count, scale, largest[part], sum[part]);
        }
        float factor[MAX_PARTS][LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            int32_t most = INT32_MIN;
            for (int64_t part = 0; part < parts; part++)
                if (largest[part][lane] > most) most = largest[part][lane];
            float total = 0.0f;
            for (int64_t part = 0; part < parts; part++) {
                const float gap = (float)((int64_t)largest[part][lane] - most) * scale[lane];
                factor[part][lane] = exp_negative(gap);
                total += factor[part][lane] * sum[part][lane];
            }
            for (int64_t part = 0; part < parts; part++)
                factor[part][lane] = lane < lanes ? factor[part][lane] / total : 0.0f;
        }
#pragma omp parallel for num_threads(parts) if (parts > 1)
        for (int64_t part = 0; part < parts; part++) {
            const range_t at = range_of(part * part_groups, part_groups, first, num_groups);
            add_weighted((const float *)best_of + at.begin * LANES, at.count, factor[part],
                         scores + at.begin);
        }
    }
}

#endif
