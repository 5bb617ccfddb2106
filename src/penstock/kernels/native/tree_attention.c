/* Attention of many rows' new tokens over blocks of keys and values, those of several rows read
 * once. The twin of tree_attention_twin().
 *
 * A task is a piece of work and a KV head. It goes over its tokens tile by tile with a running
 * maximum per query; outputs are summed in the workspace itself, then each row merges its parts.
 * For many queries keys are turned, so that a product needs no sum across a vector. */

#include "turned.h"

#ifdef PENSTOCK_X86

#define CHUNK 8 /* queries that are multiplied with a turned tile together */
#define FEW 4 /* queries for which turning a tile does not pay */
#define MOST_DIM 256
#define AHEAD 2 /* tiles that are asked for, the one in use included */

typedef struct {
    const float *query; /* [rows][kv_heads * queries][dim], scaled */
    const char *slots;
    const int32_t *table, *rows, *first_block, *num_blocks, *parts, *places, *lengths;
    float *sums, *stats; /* [rows][most_parts][heads][dim], [..][heads][2]: maximum, total */
    char *out; /* [rows][heads][dim] */
    float *lse; /* [rows][heads] */
    int64_t works, most_rows, most_parts, table_row, block_tokens, kv_heads, queries, dim;
    int64_t slot_stride, value_stride, head_stride, window; /* strides in elements */
    float softcap; /* 0 is none */
} call_t;

typedef struct {
    const char *key[TILE], *value[TILE]; /* behind the last token, the last one again */
    int64_t first, size; /* position of the first token; tokens */
} tile_t;

/* The queries of one lane, or of one task. */
typedef struct {
    const float *query;
    float *sums, *stats;
    int64_t from, to; /* positions that are seen */
} lane_t;

/* One query with a tile as it lies. */
AVX512 INLINE void few_logits(const tile_t *tile, const float *query, int64_t dim, int kind,
                              float *logits) {
    for (int half = 0; half < TILE; half += 16) {
        if (half >= tile->size) break;
        __m512 sum[16];
        for (int t = 0; t < 16; t++) sum[t] = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += 16) {
            const __m512 q = _mm512_loadu_ps(query + d);
            for (int t = 0; t < 16; t++)
                sum[t] = _mm512_fmadd_ps(q, load(tile->key[half + t], d, kind), sum[t]);
        }
        _mm512_store_ps(logits + half, sums_across(sum));
    }
}

/* CHUNK queries with a turned tile. */
AVX512 INLINE void many_logits(const float *turned, const float *const *query, int64_t dim,
                               float (*logits)[TILE]) {
    __m512 a[CHUNK], b[CHUNK];
    for (int j = 0; j < CHUNK; j++) a[j] = b[j] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d++) {
        const __m512 low = _mm512_load_ps(turned + d * TILE);
        const __m512 high = _mm512_load_ps(turned + d * TILE + 16);
        for (int j = 0; j < CHUNK; j++) {
            const __m512 q = _mm512_set1_ps(query[j][d]);
            a[j] = _mm512_fmadd_ps(q, low, a[j]);
            b[j] = _mm512_fmadd_ps(q, high, b[j]);
        }
    }
    for (int j = 0; j < CHUNK; j++) {
        _mm512_store_ps(logits[j], a[j]);
        _mm512_store_ps(logits[j] + 16, b[j]);
    }
}

AVX512 INLINE __m512 capped(__m512 x, float cap) {
    const __m512 one = _mm512_set1_ps(1.0f), y = _mm512_abs_ps(x);
    const __m512 e = exp_negative_512(_mm512_mul_ps(y, _mm512_set1_ps(-2.0f / cap)));
    const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    const __mmask16 less = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 scaled = _mm512_mul_ps(tanh, _mm512_set1_ps(cap));
    return _mm512_mask_sub_ps(scaled, less, _mm512_setzero_ps(), scaled);
}

/* Logits become weights; returns what the query's sums so far are multiplied with. */
AVX512 INLINE float weigh(const call_t *call, const tile_t *tile, const lane_t *lane,
                          float *logits) {
    const int64_t from = lane->from - tile->first, to = lane->to - tile->first;
    uint64_t seen = to >= tile->size ? (1ull << tile->size) - 1 : to > 0 ? (1ull << to) - 1 : 0;
    if (from > 0) seen &= from >= TILE ? 0 : ~((1ull << from) - 1);
    if (!seen) {
        memset(logits, 0, TILE * sizeof(float));
        return 1.0f;
    }
    __m512 a = _mm512_load_ps(logits), b = _mm512_load_ps(logits + 16);
    if (call->softcap != 0.0f) a = capped(a, call->softcap), b = capped(b, call->softcap);
    const __m512 least = _mm512_set1_ps(-INFINITY);
    a = _mm512_mask_mov_ps(least, (__mmask16)seen, a);
    b = _mm512_mask_mov_ps(least, (__mmask16)(seen >> 16), b);
    const float before = lane->stats[0], most = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
    const float now = most > before ? most : before;
    /* No maximum yet: all are NaN, or minus infinity. */
    const __m512 base = _mm512_set1_ps(now == -INFINITY ? 0.0f : now);
    a = exp_negative_512(_mm512_sub_ps(a, base));
    b = exp_negative_512(_mm512_sub_ps(b, base));
    _mm512_store_ps(logits, a);
    _mm512_store_ps(logits + 16, b);
    const float shrink = before == now ? 1.0f : expf(before - now);
    lane->stats[0] = now;
    lane->stats[1] = lane->stats[1] * shrink + _mm512_reduce_add_ps(_mm512_add_ps(a, b));
    return shrink;
}

/* Add weighted values to `many` queries' sums, `wide` vectors of them from dim on. */
AVX512 INLINE void add_values(const tile_t *tile, const lane_t *lane, const float *shrink,
                              float (*weights)[TILE], int64_t dim, int many, int wide, int kind) {
    __m512 sum[16];
    for (int j = 0; j < many; j++)
        for (int i = 0; i < wide; i++)
            sum[j * wide + i] = _mm512_mul_ps(_mm512_loadu_ps(lane[j].sums + dim + 16 * i),
                                              _mm512_set1_ps(shrink[j]));
    for (int64_t t = 0; t < tile->size; t++) {
        __m512 value[4];
        for (int i = 0; i < wide; i++) value[i] = load(tile->value[t], dim + 16 * i, kind);
        for (int j = 0; j < many; j++) {
            const __m512 w = _mm512_set1_ps(weights[j][t]);
            for (int i = 0; i < wide; i++)
                sum[j * wide + i] = _mm512_fmadd_ps(w, value[i], sum[j * wide + i]);
        }
    }
    for (int j = 0; j < many; j++)
        for (int i = 0; i < wide; i++)
            _mm512_storeu_ps(lane[j].sums + dim + 16 * i, sum[j * wide + i]);
}

AVX512 INLINE void add_all_values(const tile_t *tile, const lane_t *lane, const float *shrink,
                                  float (*weights)[TILE], int64_t dim, int many, int kind) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_values(tile, lane, shrink, weights, d, many, 4, kind);
    for (; d + 32 <= dim; d += 32) add_values(tile, lane, shrink, weights, d, many, 2, kind);
    for (; d < dim; d += 16) add_values(tile, lane, shrink, weights, d, many, 1, kind);
}

/* Find the tokens of a tile, and ask for them. */
AVX512 INLINE void find(const call_t *call, const int32_t *table, int64_t head, int64_t first,
                        int64_t end, int64_t bytes, tile_t *tile) {
    const int64_t size = end - first < TILE ? end - first : TILE;
    tile->first = first, tile->size = size;
    for (int64_t t = 0; t < size;) {
        const int64_t position = first + t, block = position / call->block_tokens;
        const int64_t offset = position - block * call->block_tokens;
        const char *key = call->slots + bytes * ((int64_t)table[block] * call->slot_stride +
                                                 head * call->head_stride + offset * call->dim);
        for (int64_t i = offset; i < call->block_tokens && t < size; i++, t++) {
            tile->key[t] = key, tile->value[t] = key + bytes * call->value_stride;
            for (int64_t d = 0; d < bytes * call->dim; d += 64) {
                _mm_prefetch(tile->key[t] + d, _MM_HINT_T1);
                _mm_prefetch(tile->value[t] + d, _MM_HINT_T1);
            }
            key += bytes * call->dim;
        }
    }
    for (int64_t t = size > 0 ? size : TILE; t < TILE; t++) tile->key[t] = tile->key[size - 1];
}

AVX512 INLINE void attend_few(const call_t *call, const tile_t *tile, const lane_t *lane,
                              int64_t count, int kind) {
    float weights[FEW][TILE] __attribute__((aligned(64))), shrink[FEW];
    for (int64_t q = 0; q < count; q++) {
        few_logits(tile, lane[q].query, call->dim, kind, weights[q]);
        shrink[q] = weigh(call, tile, lane + q, weights[q]);
    }
    int64_t q = 0;
    for (; q + 2 <= count; q += 2)
        add_all_values(tile, lane + q, shrink + q, weights + q, call->dim, 2, kind);
    for (; q < count; q++)
        add_all_values(tile, lane + q, shrink + q, weights + q, call->dim, 1, kind);
}

/* `turned`: [dim][TILE]; the tile's values are floats. */
AVX512 INLINE void attend_many(const call_t *call, const tile_t *tile, const float *turned,
                               const lane_t *lane, int64_t count) {
    for (int64_t q = 0; q < count; q += CHUNK) {
        float weights[CHUNK][TILE] __attribute__((aligned(64))), shrink[CHUNK];
        const float *query[CHUNK];
        const int64_t some = count - q < CHUNK ? count - q : CHUNK;
        for (int64_t j = 0; j < CHUNK; j++) query[j] = lane[q + (j < some ? j : 0)].query;
        many_logits(turned, query, call->dim, weights);
        for (int64_t j = 0; j < some; j++)
            shrink[j] = weigh(call, tile, lane + q + j, weights[j]);
        int64_t j = 0;
        for (; j + 4 <= some; j += 4)
            add_all_values(tile, lane + q + j, shrink + j, weights + j, call->dim, 4, FLOAT32);
        for (; j < some; j++)
            add_all_values(tile, lane + q + j, shrink + j, weights + j, call->dim, 1, FLOAT32);
    }
}

/* One KV head of one piece; lane: space for its queries. */
AVX512 INLINE void attend(const call_t *call, int64_t work, int64_t head, lane_t *lane, int kind) {
    const int64_t heads = call->kv_heads * call->queries, dim = call->dim;
    const int64_t bytes = kind == FLOAT32 ? 4 : 2;
    const int32_t *rows = call->rows + work * call->most_rows;
    int64_t count = 0, earliest = INT64_MAX, longest = 0;
    for (int64_t j = 0; j < call->most_rows && rows[j] >= 0; j++) {
        const int64_t place = call->places[work * call->most_rows + j];
        if (place < 0) continue;
        const int64_t to = call->lengths[rows[j]];
        const int64_t from = call->window && to > call->window ? to - call->window : 0;
        earliest = from < earliest ? from : earliest, longest = to > longest ? to : longest;
        for (int64_t i = 0; i < call->queries; i++, count++) {
            const int64_t at = head * call->queries + i;
            lane[count] = (lane_t){call->query + (rows[j] * heads + at) * dim,
                                   call->sums + (place * heads + at) * dim,
                                   call->stats + (place * heads + at) * 2, from, to};
            memset(lane[count].sums, 0, dim * sizeof(float));
            lane[count].stats[0] = -INFINITY, lane[count].stats[1] = 0.0f;
        }
    }
    int64_t first = call->first_block[work] * call->block_tokens;
    int64_t end = first + call->num_blocks[work] * call->block_tokens;
    first = earliest > first ? earliest : first, end = longest < end ? longest : end;
    if (count == 0 || first >= end) return;

    const int32_t *table = call->table + rows[0] * call->table_row;
    float turned[MOST_DIM * TILE] __attribute__((aligned(64)));
    float values[TILE * MOST_DIM] __attribute__((aligned(64)));
    tile_t tiles[AHEAD];
    for (int64_t found = 0, at = 0; first + at * TILE < end; at++) {
        for (; found < at + AHEAD && first + found * TILE < end; found++)
            find(call, table, head, first + found * TILE, end, bytes, tiles + found % AHEAD);
        tile_t *tile = tiles + at % AHEAD;
        if (count <= FEW) {
            attend_few(call, tile, lane, count, kind);
            continue;
        }
        for (int64_t t = 0; t < TILE && t < tile->size; t += 16)
            for (int64_t d = 0; d < dim; d += 16)
                turn(tile->key + t, d, kind, turned + d * TILE + t);
        for (int64_t t = 0; kind != FLOAT32 && t < tile->size; t++) {
            for (int64_t d = 0; d < dim; d += 16)
                _mm512_store_ps(values + t * dim + d, load(tile->value[t], d, kind));
            tile->value[t] = (const char *)(values + t * dim);
        }
        attend_many(call, tile, turned, lane, count);
    }
}

/* Merge the parts of one row. */
AVX512 INLINE void merge(const call_t *call, int64_t row, int kind) {
    const int64_t heads = call->kv_heads * call->queries, dim = call->dim;
    const int64_t bytes = kind == FLOAT32 ? 4 : 2;
    int64_t parts = 0;
    while (parts < call->most_parts && call->parts[row * call->most_parts + parts] >= 0) parts++;
    for (int64_t head = 0; head < heads; head++) {
        const float *stats = call->stats + (row * call->most_parts * heads + head) * 2;
        const float *sums = call->sums + (row * call->most_parts * heads + head) * dim;
        float most = -INFINITY, total = 0.0f, weights[parts + 1];
        for (int64_t k = 0; k < parts; k++) {
            const float largest = stats[k * heads * 2];
            most = largest > most ? largest : most;
        }
        for (int64_t k = 0; k < parts; k++) {
            weights[k] = most == -INFINITY ? 0.0f : expf(stats[k * heads * 2] - most);
            total += weights[k] * stats[k * heads * 2 + 1];
        }
        const __m512 inverse = _mm512_set1_ps(total == 0.0f ? 0.0f : 1.0f / total);
        for (int64_t d = 0; d < dim; d += 16) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t k = 0; k < parts; k++)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[k]),
                                      _mm512_loadu_ps(sums + k * heads * dim + d), sum);
            store(call->out + (row * heads + head) * dim * bytes, d, _mm512_mul_ps(sum, inverse),
                  kind);
        }
        call->lse[row * heads + head] = total == 0.0f ? -INFINITY : most + logf(total);
    }
}

AVX512 static void attend_float32(const call_t *c, int64_t w, int64_t h, lane_t *l) {
    attend(c, w, h, l, FLOAT32);
}
AVX512 static void attend_bfloat16(const call_t *c, int64_t w, int64_t h, lane_t *l) {
    attend(c, w, h, l, BFLOAT16);
}
AVX512 static void attend_float16(const call_t *c, int64_t w, int64_t h, lane_t *l) {
    attend(c, w, h, l, FLOAT16);
}
AVX512 static void merge_float32(const call_t *c, int64_t row) { merge(c, row, FLOAT32); }
AVX512 static void merge_bfloat16(const call_t *c, int64_t row) { merge(c, row, BFLOAT16); }
AVX512 static void merge_float16(const call_t *c, int64_t row) { merge(c, row, FLOAT16); }

#endif

/* Attention of every row's new token over the pieces of its path.
 *
 * query: float [rows][kv_heads][queries][dim], scaled; slots: of `kind` (0 float32, 1 bfloat16,
 * 2 float16), strided; table .. lengths: see TreeWork; sums, stats: the workspace; out: of `kind`,
 * like query; lse: float [rows][kv_heads][queries]
 * sizes: works, most_rows, most_parts, entries from one row of the table to the next,
 * block_tokens, kv_heads, queries, dim (divides by 16, at most 256), strides of slot, value (after
 * its key) and head, window (0: none) */
PENSTOCK_EXPORT void penstock_tree_attention(
    const float *query, const char *slots, const int32_t *table, const int32_t *rows,
    const int32_t *first_block, const int32_t *num_blocks, const int32_t *parts,
    const int32_t *places, const int32_t *lengths, float *sums, float *stats, char *out,
    float *lse, const int64_t *sizes, int64_t num_rows, int64_t kind, float softcap) {
#ifdef PENSTOCK_X86
    const call_t call = {query, slots, table, rows, first_block, num_blocks, parts, places,
                         lengths, sums, stats, out, lse, sizes[0], sizes[1], sizes[2], sizes[3],
                         sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10],
                         sizes[11], softcap};
    const int64_t tasks = call.works * call.kv_heads;
#pragma omp parallel for schedule(dynamic) if (tasks > 1)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t work = task / call.kv_heads, head = task % call.kv_heads;
        lane_t lanes[call.most_rows * call.queries];
        if (kind == FLOAT32) attend_float32(&call, work, head, lanes);
        else if (kind == BFLOAT16) attend_bfloat16(&call, work, head, lanes);
        else attend_float16(&call, work, head, lanes);
    }
#pragma omp parallel for schedule(static) if (num_rows > 1)
    for (int64_t row = 0; row < num_rows; row++) {
        if (kind == FLOAT32) merge_float32(&call, row);
        else if (kind == BFLOAT16) merge_bfloat16(&call, row);
        else merge_float16(&call, row);
    }
#else
    (void)query, (void)slots, (void)table, (void)rows, (void)first_block, (void)num_blocks;
    (void)parts, (void)places, (void)lengths, (void)sums, (void)stats, (void)out, (void)lse;
    (void)sizes, (void)num_rows, (void)kind, (void)softcap;
#endif
}
