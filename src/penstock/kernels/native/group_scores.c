/* Scores of groups from quantised low-rank keys: int8 products, maximum over a group's tokens,
 * softmax per head over the groups, sum over heads, or the root of the sum of squares. The twin of
 * group_scores_twin(). Or the maxima alone, of each head.
 *
 * Heads are the vector lanes, 16 at a time: a group's product with 16 heads is one register, so
 * that the maximum over its tokens costs one instruction and nothing is transposed. */

#include "block_queries.h"

#ifdef PENSTOCK_X86

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
 * queries: [quads][LANES][4] (4 bits: twice that, the low nibbles' components first)
 * scale, excess: [LANES], what a product is worth, and what is too much in it: codes are taken as
 *     if they began at 0 */
VNNI static void products(const block_t *block, int64_t first, const int8_t *queries,
                          const float *scale, const float *excess, float *best) {
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
    const __m512 factor = _mm512_loadu_ps(scale), less = _mm512_loadu_ps(excess);
    for (int g = 0; g < AT_ONCE; g++)
        _mm512_storeu_ps(best + g * LANES,
                         _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(out[g]), less), factor));
}

/* Softmax of one part of the groups, unfinished: logits, [groups][LANES], become exp of the distance
 * to the part's largest one, in place. */
VNNI static void exponentials(float *logits, int64_t groups, float *largest_out, float *sum_out) {
    __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++)
        largest = _mm512_max_ps(largest, _mm512_loadu_ps(logits + g * LANES));
    for (int64_t g = 0; g < groups; g++) {
        const __m512 gap = _mm512_sub_ps(_mm512_loadu_ps(logits + g * LANES), largest);
        const __m512 w = exp_negative_512(gap);
        sum = _mm512_add_ps(sum, w);
        _mm512_storeu_ps(logits + g * LANES, w);
    }
    _mm512_storeu_ps(largest_out, largest);
    _mm512_storeu_ps(sum_out, sum);
}

/* scores[g] += sum over lanes of weight * factor, or of its square */
VNNI static void add_weighted(const float *weights, int64_t groups, const float *factor,
                              int squares, float *scores) {
    const __m512 f = _mm512_loadu_ps(factor), one = _mm512_set1_ps(1.0f);
    for (int64_t g = 0; g < groups; g++) {
        const __m512 share = _mm512_mul_ps(_mm512_loadu_ps(weights + g * LANES), f);
        const __m512 again = squares ? share : one;
        scores[g] += _mm512_reduce_add_ps(_mm512_mul_ps(share, again));
    }
}

VNNI static void take_roots(float *scores, int64_t count) {
    for (int64_t i = 0; i < count; i++) scores[i] = sqrtf(scores[i]);
}

/* Quantise 16 heads' low-rank queries to int8, one scale per head, and lay them out for the lanes.
 * queries: float [lanes][rank]; packed: int8 [halves * quads][LANES][4], zero where nothing is. */
static void pack_queries(const float *queries, int64_t lanes, int64_t rank, int64_t quads, int bits,
                         const tile_t *to) {
    int8_t *packed = to->packed;
    memset(packed, 0, quads * LANES * 4);
    for (int64_t lane = 0; lane < LANES; lane++) to->scale[lane] = to->excess[lane] = 0.0f;
    for (int64_t lane = 0; lane < lanes; lane++) {
        const float *query = queries + lane * rank;
        float largest = 1e-30f;
        for (int64_t i = 0; i < rank; i++)
            if (fabsf(query[i]) > largest) largest = fabsf(query[i]);
        to->scale[lane] = largest / 127.0f;
        float sum = 0.0f;
        for (int64_t i = 0; i < rank; i++) { /* of 4 bits it is in the low or the high half */
            const float code = rintf(query[i] / to->scale[lane]); /* none where a query has none */
            const int8_t kept = fabsf(code) <= 127.0f ? (int8_t)code : 0;
            packed[(i / 4 * LANES + lane) * 4 + i % 4] = kept;
            sum += (float)kept;
        }
        to->excess[lane] = (bits == 8 ? 128.0f : 7.5f) * sum;
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

/* One row's scores: where its codes are, what asks, and where numbers go meanwhile. */
typedef struct {
    const uint8_t *codes;
    int64_t group_tokens, block_groups, width;
    int bits;
    int64_t heads, first, num_groups; /* groups before `first` have no share, and the score 0 */
    int squares; /* heads' shares are squared, and the root is taken of their sum */
    const float *queries; /* low-rank ones, one of each head for all groups; or NULL, and: */
    int64_t rank;
    const penstock_codes *index;
    const char *query;
    float *logits; /* [groups][LANES] */
    char *scratch; /* of the queries */
    float *scores; /* or NULL, and: */
    float *by_head; /* [num_groups][heads] */
} row_t;

/* Logits of the groups [at.begin, at.begin + at.count) that one query asks. */
static void logits_of(const row_t *row, range_t at, const tile_t *asked) {
    for (int64_t g = at.begin / AT_ONCE * AT_ONCE; g < at.begin + at.count; g += AT_ONCE) {
        const int64_t block = g / row->block_groups;
        const block_t codes = {row->codes + block * row->group_tokens * row->block_groups
                               * row->width, row->group_tokens, row->block_groups, row->width,
                               row->width / 4, row->bits};
        products(&codes, g % row->block_groups, asked->packed, asked->scale, asked->excess,
                 row->logits + g * LANES);
    }
}

/* Logits of a part where every block has its own query: those of a few blocks, then theirs. */
static void turned_logits_of(const row_t *row, range_t at, const split_t *split, int64_t lanes,
                             int64_t quads) {
    const penstock_turns *turns = row->index->turns;
    const int64_t end = at.begin + at.count;
    const int64_t end_block = (end + turns->groups - 1) / turns->groups;
    int8_t packed[TILE * quads * LANES * 4];
    float scale[TILE * LANES], excess[TILE * LANES];
    const tile_t tile = {packed, scale, excess};
    if (at.count == 0) return;
    memset(packed, 0, sizeof packed);
    memset(scale, 0, sizeof scale);
    memset(excess, 0, sizeof excess);
    for (int64_t block = at.begin / (TILE * turns->groups) * TILE; block < end_block;
         block += TILE) {
        const int64_t count = end_block - block < TILE ? end_block - block : TILE;
        turn_tile(turns, split, lanes, block, count, quads, row->bits, &tile);
        for (int64_t i = 0; i < count; i++) {
            const range_t those = range_of((block + i) * turns->groups, turns->groups, at.begin,
                                           end);
            const tile_t asked = {packed + i * quads * LANES * 4, scale + i * LANES,
                                  excess + i * LANES};
            logits_of(row, those, &asked);
        }
    }
}

/* What a part's groups have of the 16 heads from `head` on. */
static void keep_by_head(const row_t *row, range_t at, int64_t head, int64_t lanes) {
    for (int64_t g = at.begin; g < at.begin + at.count; g++)
        memcpy(row->by_head + g * row->heads + head, row->logits + g * LANES,
               lanes * sizeof(float));
}

static void score_row(const row_t *row) {
    const int64_t first = row->first, num_groups = row->num_groups;
    const penstock_turns *turns = row->queries == NULL ? row->index->turns : NULL;
    const int64_t quads = (row->bits == 4 ? 2 : 1) * row->width / 4;
    const int64_t parts = num_groups < 1024 ? 1 : penstock_num_threads(MAX_PARTS);
    const int64_t whole = turns != NULL ? TILE * turns->groups : AT_ONCE;
    const int64_t part_groups = (num_groups / parts + whole) / whole * whole;
    split_t split = {0, 0, NULL, NULL};
    tile_t all = {NULL, (float *)row->scratch, (float *)row->scratch + LANES};
    if (turns != NULL) {
        split.quads = (turns->fast_width + turns->slow_width) / 4;
        split.padded = (row->rank + LANES - 1) / LANES * LANES;
        split.factors = (float *)row->scratch;
        split.weights = (int32_t *)(split.factors + LANES * split.padded);
    } else {
        all.packed = (int8_t *)(all.excess + LANES);
    }
    if (row->scores != NULL) memset(row->scores, 0, num_groups * sizeof(float));
    if (first >= num_groups) return;
    for (int64_t head = 0; head < row->heads; head += LANES) {
        const int64_t lanes = row->heads - head < LANES ? row->heads - head : LANES;
        float largest[MAX_PARTS][LANES], sum[MAX_PARTS][LANES];
        if (turns != NULL) {
            split_query(row->index, turns, row->query, head, lanes, &split);
        } else {
            pack_queries(row->queries + head * row->rank, lanes, row->rank, quads, row->bits,
                         &all);
        }
#pragma omp parallel for num_threads(parts) if (parts > 1)
        for (int64_t part = 0; part < parts; part++) {
            const range_t at = range_of(part * part_groups, part_groups, first, num_groups);
            if (turns != NULL) {
                turned_logits_of(row, at, &split, lanes, quads);
            } else {
                logits_of(row, at, &all);
            }
            if (row->by_head != NULL) {
                keep_by_head(row, at, head, lanes);
            } else {
                exponentials(row->logits + at.begin * LANES, at.count, largest[part], sum[part]);
            }
        }
        if (row->by_head != NULL) continue;
        float factor[MAX_PARTS][LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            float most = -INFINITY, total = 0.0f;
            for (int64_t part = 0; part < parts; part++)
                if (largest[part][lane] > most) most = largest[part][lane];
            for (int64_t part = 0; part < parts; part++) {
                factor[part][lane] = exp_negative(largest[part][lane] - most);
                total += factor[part][lane] * sum[part][lane];
            }
            for (int64_t part = 0; part < parts; part++)
                factor[part][lane] = lane < lanes ? factor[part][lane] / total : 0.0f;
        }
#pragma omp parallel for num_threads(parts) if (parts > 1)
        for (int64_t part = 0; part < parts; part++) {
            const range_t at = range_of(part * part_groups, part_groups, first, num_groups);
            add_weighted(row->logits + at.begin * LANES, at.count, factor[part], row->squares,
                         row->scores + at.begin);
            if (row->squares && head + LANES >= row->heads)
                take_roots(row->scores + at.begin, at.count);
        }
    }
}

/* Scores of one row's groups.
 *
 * codes: [blocks][group_tokens][block_groups][width]; width and block_groups divide by 4
 * bits: 8 (int8 codes) or 4 (two components in a byte, the first `width` ones in the low nibbles)
 * queries: float [heads][rank], in units where a code's step is 1
 * first: groups before this one have no share, and the score 0; 0 .. num_groups
 * squares: a score is the root of the sum of the shares' squares; 0: their sum
 * scratch: (num_groups rounded up to 4) * 64 + 128 * (width + 1) bytes, aligned to 4
 * scores: float [num_groups] */
PENSTOCK_EXPORT void penstock_group_scores(const uint8_t *codes, int64_t group_tokens,
                                           int64_t block_groups, int64_t width, int64_t bits,
                                           const float *queries, int64_t rank, int64_t heads,
                                           int64_t first, int64_t num_groups, int64_t squares,
                                           void *scratch, float *scores) {
    float *logits = scratch;
    const int64_t padded = (num_groups + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    const row_t row = {codes, group_tokens, block_groups, width, (int)bits, heads, first,
                       num_groups, (int)squares, queries, rank, NULL, NULL, logits,
                       (char *)(logits + padded * LANES), scores, NULL};
    score_row(&row);
}

/* Scores of one row's groups whose keys are turned back block by block.
 *
 * query: [heads][dim] of `kind`, as if the row's text began at its first place
 * codes, first, scores: as group_scores has them
 * scratch: (num_groups rounded up to 4) * 64 + 16 * (rank rounded up to 16) * (widths of the
 *     tables + 4) bytes, aligned to 4 */
PENSTOCK_EXPORT void penstock_turned_scores(const penstock_codes *index, const uint8_t *codes,
                                            const char *query, int64_t first, int64_t num_groups,
                                            void *scratch, float *scores) {
    float *logits = scratch;
    const int64_t padded = (num_groups + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    const row_t row = {codes, index->group_tokens, index->block_groups, index->width,
                       (int)index->bits, index->kv_heads * index->share, first, num_groups,
                       (int)index->squares, NULL, index->rank, index, query, logits,
                       (char *)(logits + padded * LANES), scores, NULL};
    score_row(&row);
}

/* Each head's largest product of every group of one row: the logits that turned_scores sums up.
 *
 * index, codes, query, scratch: as turned_scores has them
 * by_head: float [num_groups][heads] */
PENSTOCK_EXPORT void penstock_turned_logits(const penstock_codes *index, const uint8_t *codes,
                                            const char *query, int64_t num_groups, void *scratch,
                                            float *by_head) {
    float *logits = scratch;
    const int64_t padded = (num_groups + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    const row_t row = {codes, index->group_tokens, index->block_groups, index->width,
                       (int)index->bits, index->kv_heads * index->share, 0, num_groups, 0, NULL,
                       index->rank, index, query, logits, (char *)(logits + padded * LANES), NULL,
                       by_head};
    score_row(&row);
}

#endif
