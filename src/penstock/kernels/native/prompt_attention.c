/* Attention of many queries over one block of keys, added to one softmax. The twin of
 * add_block_twin().
 *
 * Keys and values are packed once, in panels of 16 lanes of 32 bits: a float, or with AVX-512 BF16
 * a pair of numbers whose products are added in one instruction. A tile of queries then goes over
 * the keys, a strip at a time, with a running maximum and sum per query, so that logits stay in the
 * cache and outputs are float32 from the first block to the last. */

#include "avx512.h"

#ifdef PENSTOCK_X86

#include <cpuid.h>

#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

enum {
    LANES = 16,
    ROWS = 6, /* queries of one product: 24 of the 32 registers hold sums */
    PANELS = 4, /* panels of one product */
    TILE = 48, /* queries of a tile; a multiple of ROWS */
    STRIP = 256, /* keys that a tile has logits of at a time */
    MOST_DIM = 256,
};

typedef struct {
    const char *query, *keys, *values;
    const float *mask; /* [batch][tokens], added to logits; or none */
    float *out, *lse; /* [batch][queries][heads][dim], [batch][heads][queries] */
    int32_t *packed; /* scratch */
    int64_t query_strides[3], key_strides[3], value_strides[3]; /* bytes; batch, head, token */
    int64_t batch, heads, kv_heads, queries, tokens, dim, kind, offset, is_first;
    int64_t together; /* keys that are packed at a time; a multiple of LANES */
    float scaling;
} prompt_t;

/* 32-bit words of a head's packed keys, or values. */
static int64_t packed_words(int64_t tokens, int64_t dim, int64_t step) {
    return (tokens + LANES - 1) / LANES * LANES * dim / step;
}

/* One product: sums of ROWS rows and `panels` panels over `depth` steps.
 * a: the rows' words, `a_row` apart; b: panels, `b_panel` words apart, of [depth][LANES] */
#define PRODUCT(NAME, TARGET, ADD)                                                                 \
    TARGET INLINE void NAME(const int32_t *a, int64_t a_row, const int32_t *b, int64_t b_panel,    \
                            int64_t depth, float *c, int64_t c_row, int panels, int fresh) {       \
        __m512 sum[ROWS][PANELS];                                                                  \
        for (int i = 0; i < ROWS; i++)                                                             \
            for (int p = 0; p < panels; p++)                                                       \
                sum[i][p] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + i * c_row + p * LANES); \
        for (int64_t k = 0; k < depth; k++) {                                                      \
            __m512i panel[PANELS];                                                                 \
            for (int p = 0; p < panels; p++)                                                       \
                panel[p] = _mm512_loadu_si512(b + p * b_panel + k * LANES);                        \
            for (int i = 0; i < ROWS; i++) {                                                       \
                const __m512i row = _mm512_set1_epi32(a[i * a_row + k]);                           \
                for (int p = 0; p < panels; p++) sum[i][p] = ADD(sum[i][p], row, panel[p]);        \
            }                                                                                      \
        }                                                                                          \
        for (int i = 0; i < ROWS; i++)                                                             \
            for (int p = 0; p < panels; p++) _mm512_storeu_ps(c + i * c_row + p * LANES, sum[i][p]); \
    }

#define ADD_FLOATS(sum, a, b) _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum)
#define ADD_PAIRS(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
PRODUCT(product_float, AVX512, ADD_FLOATS)
PRODUCT(product_pairs, BF16, ADD_PAIRS)

/* 2 ** x for x <= 0, to about a unit of bfloat16's last place divided by 100. */
AVX512 INLINE __m512 exp2_short(__m512 x) {
    const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.6181291e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5503e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(alive, p, n);
}

/* Weights of one query in a strip from its logits, the sums so far brought to the new maximum.
 * logits: [>= count rounded up to LANES]; weights: words, zero from `count` on to `end` */
#define SOFTMAX(NAME, TARGET, STEP)                                                                \
    TARGET INLINE void NAME(float *logits, const float *mask, int64_t count, int64_t end,          \
                            float scaling, int32_t *weights, float *largest, float *total,         \
                            float *sums, int64_t dim) {                                            \
        const __m512 scale = _mm512_set1_ps(scaling), none = _mm512_set1_ps(-INFINITY);            \
        __m512 most = none;                                                                        \
        for (int64_t t = 0; t < count; t += LANES) {                                               \
            const __mmask16 in = count - t < LANES ? (1u << (count - t)) - 1 : 0xffff;             \
            __m512 x = _mm512_mul_ps(_mm512_loadu_ps(logits + t), scale);                          \
            if (mask) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(in, mask + t));                   \
            x = _mm512_mask_mov_ps(none, in, x);                                                   \
            _mm512_storeu_ps(logits + t, x);                                                       \
            most = _mm512_max_ps(most, x);                                                         \
        }                                                                                          \
        const float former = *largest, found = _mm512_reduce_max_ps(most);                         \
        const float now = found > former ? found : former;                                         \
        if (now == -INFINITY) { /* nothing is seen yet */                                          \
            memset(weights, 0, end / STEP * 4);                                                    \
            return;                                                                                \
        }                                                                                          \
        if (now > former) {                                                                        \
            const float shrink = former == -INFINITY ? 0.0f : exp2f(former - now);                 \
            for (int64_t i = 0; i < dim; i += LANES)                                               \
                _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i),                \
                                                         _mm512_set1_ps(shrink)));                 \
            *total *= shrink;                                                                      \
            *largest = now;                                                                        \
        }                                                                                          \
        const __m512 top = _mm512_set1_ps(now);                                                    \
        __m512 sum = _mm512_setzero_ps();                                                          \
        int64_t t = 0;                                                                             \
        for (; t < count; t += LANES) {                                                            \
            const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(logits + t), top);                      \
            __m512 w;                                                                              \
            if (STEP == 2) w = exp2_short(x);                                                      \
            else w = exp_negative_512(_mm512_mul_ps(x, _mm512_set1_ps(0.69314718f)));              \
            sum = _mm512_add_ps(sum, w);                                                           \
            store((char *)weights, t, w, STEP == 2 ? BFLOAT16 : FLOAT32);                          \
        }                                                                                          \
        if (t < end) memset((char *)weights + t * 4 / STEP, 0, (end - t) * 4 / STEP);              \
        *total += _mm512_reduce_add_ps(sum);                                                       \
    }

SOFTMAX(softmax_float, AVX512, 1)
SOFTMAX(softmax_pairs, BF16, 2)

/* Keys of one head: [panels][dim / step][LANES] words. */
AVX512 INLINE void pack_keys(const prompt_t *c, const char *keys, int64_t count, int32_t *to, int64_t step) {
    const int64_t words = c->dim / step, bytes = c->kind == FLOAT32 ? 4 : 2;
    for (int64_t t = 0; t < count; t += LANES)
        for (int64_t i = 0; i < LANES; i++) {
            int32_t wide[MOST_DIM];
            const char *from = keys + (t + i) * c->key_strides[2];
            if (t + i >= count) memset(wide, 0, sizeof(wide));
            else if (step == 2 || bytes == 4) memcpy(wide, from, words * 4);
            else
                for (int64_t d = 0; d < c->dim; d += LANES) _mm512_storeu_ps((float *)wide + d, load(from, d, (int)c->kind));
            for (int64_t w = 0; w < words; w++) to[t * words + w * LANES + i] = wide[w];
        }
}

/* Values of one head: [dim / LANES][tokens / step][LANES] words; `rows` words of a panel's lane. */
AVX512 INLINE void pack_values(const prompt_t *c, const char *values, int64_t count, int32_t *to, int64_t step) {
    const int64_t padded = (count + LANES - 1) / LANES * LANES, depth = padded / step;
    for (int64_t d = 0; d < c->dim; d += LANES) {
        int32_t *panel = to + d * depth;
        for (int64_t k = 0; k < depth; k++, panel += LANES) {
            const char *from = values + k * step * c->value_strides[2];
            if (step == 1) {
                const __m512 v = k < count ? load(from, d, (int)c->kind) : _mm512_setzero_ps();
                _mm512_storeu_ps((float *)panel, v);
                continue;
            }
            __m512i low = _mm512_setzero_si512(), high = low;
            if (2 * k < count) low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + 2 * d)));
            if (2 * k + 1 < count)
                high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + c->value_strides[2] + 2 * d)));
            _mm512_storeu_si512(panel, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}

/* A tile of queries of one KV head over `count` packed keys, of which the first is key `base`. */
#define OVER_TILE(NAME, TARGET, PRODUCT_OF, SOFTMAX_OF, STEP)                                      \
    TARGET static void NAME(const prompt_t *c, int64_t row, int64_t kv_head, int64_t tile,         \
                            int64_t base, int64_t count, int fresh) {                              \
        const int64_t dim = c->dim, words = dim / STEP, group = c->heads / c->kv_heads;            \
        const int64_t first = tile * TILE, all = group * c->queries;                               \
        const int64_t rows = all - first < TILE ? all - first : TILE;                              \
        const int64_t padded = (rows + ROWS - 1) / ROWS * ROWS;                                    \
        _Alignas(64) int32_t query[TILE * MOST_DIM / STEP], weights[TILE * STRIP / STEP];          \
        _Alignas(64) float sums[TILE * MOST_DIM], logits[TILE * STRIP];                            \
        float largest[TILE], totals[TILE];                                                         \
        int64_t sees[TILE], most = 0;                                                              \
        for (int64_t r = 0; r < padded; r++) {                                                     \
            const int64_t head = kv_head * group + (first + r) / c->queries, q = (first + r) % c->queries; \
            largest[r] = -INFINITY, totals[r] = 0.0f, sees[r] = 0;                                 \
            memset(sums + r * dim, 0, dim * 4);                                                    \
            memset(query + r * words, 0, words * 4);                                               \
            if (r >= rows) continue;                                                               \
            sees[r] = q + c->offset + 1 - base;                                                    \
            if (sees[r] > count) sees[r] = count;                                                  \
            if (sees[r] > most) most = sees[r];                                                    \
            const char *from = c->query + row * c->query_strides[0] + head * c->query_strides[1] + q * c->query_strides[2]; \
            if (STEP == 2) memcpy(query + r * words, from, words * 4);                             \
            else                                                                                   \
                for (int64_t d = 0; d < dim; d += LANES)                                           \
                    _mm512_storeu_ps((float *)query + r * words + d, load(from, d, (int)c->kind)); \
            const float lse = c->lse[(row * c->heads + head) * c->queries + q];                    \
            if (fresh || lse == -INFINITY) continue;                                               \
            largest[r] = lse * 1.44269504f, totals[r] = 1.0f;                                      \
            memcpy(sums + r * dim, c->out + ((row * c->queries + q) * c->heads + head) * dim, dim * 4); \
        }                                                                                          \
        if (most <= 0 && !fresh) return; /* none of these keys is seen */                          \
        const int64_t all_padded = (count + LANES - 1) / LANES * LANES;                            \
        const int64_t head_words = packed_words(c->together, dim, STEP);                                \
        const int32_t *keys = c->packed + (row * c->kv_heads + kv_head) * 2 * head_words;          \
        const int32_t *values = keys + head_words;                                                 \
        const float *mask = c->mask ? c->mask + row * c->tokens + base : NULL;                     \
        for (int64_t t = 0; t < most; t += STRIP) {                                                \
            const int64_t size = most - t < STRIP ? most - t : STRIP;                              \
            const int64_t end = (size + LANES - 1) / LANES * LANES;                                \
            for (int64_t p = 0; p < end; p += PANELS * LANES)                                      \
                for (int64_t r = 0; r < padded; r += ROWS) {                                       \
                    const int32_t *a = query + r * words, *b = keys + (t + p) * words;             \
                    float *to = logits + r * STRIP + p;                                            \
                    const int64_t panels = (end - p) / LANES;                                      \
                    if (panels >= 4) PRODUCT_OF(a, words, b, words * LANES, words, to, STRIP, 4, 1); \
                    else if (panels == 3) PRODUCT_OF(a, words, b, words * LANES, words, to, STRIP, 3, 1); \
                    else if (panels == 2) PRODUCT_OF(a, words, b, words * LANES, words, to, STRIP, 2, 1); \
                    else PRODUCT_OF(a, words, b, words * LANES, words, to, STRIP, 1, 1);           \
                }                                                                                  \
            for (int64_t r = 0; r < padded; r++) {                                                 \
                int64_t seen = sees[r] - t < size ? sees[r] - t : size;                            \
                SOFTMAX_OF(logits + r * STRIP, mask ? mask + t : NULL, seen < 0 ? 0 : seen, end,   \
                           c->scaling * 1.44269504f, weights + r * STRIP / STEP, largest + r,      \
                           totals + r, sums + r * dim, dim);                                       \
            }                                                                                      \
            const int64_t panel = all_padded / STEP * LANES, row_words = STRIP / STEP;             \
            for (int64_t d = 0; d < dim; d += PANELS * LANES)                                      \
                for (int64_t r = 0; r < padded; r += ROWS) {                                       \
                    const int32_t *a = weights + r * row_words;                                    \
                    const int32_t *b = values + d / LANES * panel + t / STEP * LANES;              \
                    float *to = sums + r * dim + d;                                                \
                    const int64_t panels = (dim - d) / LANES;                                      \
                    if (panels >= 4) PRODUCT_OF(a, row_words, b, panel, end / STEP, to, dim, 4, 0); \
                    else if (panels == 3) PRODUCT_OF(a, row_words, b, panel, end / STEP, to, dim, 3, 0); \
                    else if (panels == 2) PRODUCT_OF(a, row_words, b, panel, end / STEP, to, dim, 2, 0); \
                    else PRODUCT_OF(a, row_words, b, panel, end / STEP, to, dim, 1, 0);            \
                }                                                                                  \
        }                                                                                          \
        for (int64_t r = 0; r < rows; r++) {                                                       \
            const int64_t head = kv_head * group + (first + r) / c->queries, q = (first + r) % c->queries; \
            float *to = c->out + ((row * c->queries + q) * c->heads + head) * dim;                 \
            const __m512 inverse = _mm512_set1_ps(totals[r] > 0.0f ? 1.0f / totals[r] : 0.0f);     \
            for (int64_t d = 0; d < dim; d += LANES)                                               \
                _mm512_storeu_ps(to + d, _mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + d), inverse)); \
            c->lse[(row * c->heads + head) * c->queries + q] =                                     \
                totals[r] > 0.0f ? (largest[r] + log2f(totals[r])) * 0.69314718f : -INFINITY;      \
        }                                                                                          \
    }

OVER_TILE(tile_float, AVX512, product_float, softmax_float, 1)
OVER_TILE(tile_pairs, BF16, product_pairs, softmax_pairs, 2)

AVX512 static void pack_float(const prompt_t *c, const char *k, const char *v, int64_t count, int32_t *to) {
    pack_keys(c, k, count, to, 1);
    pack_values(c, v, count, to + packed_words(c->together, c->dim, 1), 1);
}

AVX512 static void pack_pairs(const prompt_t *c, const char *k, const char *v, int64_t count, int32_t *to) {
    pack_keys(c, k, count, to, 2);
    pack_values(c, v, count, to + packed_words(c->together, c->dim, 2), 2);
}

#endif

/* What multiplies bfloat16 here: 0 nothing but floats, 1 AVX-512 BF16, 2 AMX (torch's is faster). */
PENSTOCK_EXPORT void penstock_bfloat16_units(int64_t *found) {
    *found = 0;
#ifdef PENSTOCK_X86
    unsigned int a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5)) *found = 1;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1u << 22)) *found = 2;
#endif
}

/* Add a block to a softmax.
 *
 * sizes: batch, heads, KV heads, queries, tokens, dim, kind, offset, is_first, uses_pairs, together;
 *        query i sees the keys up to i + offset; dim divides by 16 and is at most 256; so many keys
 *        are packed at a time, a multiple of 16
 * strides: bytes from row to row, head to head and token to token of query, keys and values
 * mask: float [batch][tokens], or null
 * out, lse: float [batch][queries][heads][dim] and [batch][heads][queries]; what they hold counts
 *        unless is_first
 * packed: 32-bit words, 2 * batch * KV heads * together * dim (half of it with pairs) */
PENSTOCK_EXPORT void penstock_prompt_attention(const char *query, const char *keys, const char *values,
                                               const float *mask, float *out, float *lse, int32_t *packed,
                                               const int64_t *sizes, const int64_t *strides, float scaling) {
#ifdef PENSTOCK_X86
    prompt_t call = {.query = query, .keys = keys, .values = values, .mask = mask, .out = out, .lse = lse,
                     .packed = packed, .batch = sizes[0], .heads = sizes[1], .kv_heads = sizes[2],
                     .queries = sizes[3], .tokens = sizes[4], .dim = sizes[5], .kind = sizes[6],
                     .offset = sizes[7], .is_first = sizes[8], .together = sizes[10], .scaling = scaling};
    memcpy(call.query_strides, strides, 24);
    memcpy(call.key_strides, strides + 3, 24);
    memcpy(call.value_strides, strides + 6, 24);
    const int64_t pairs = sizes[9], step = pairs ? 2 : 1, problems = call.batch * call.kv_heads;
    const int64_t tiles = (call.heads / call.kv_heads * call.queries + TILE - 1) / TILE;
    const int64_t words = packed_words(call.together, call.dim, step);
    const int64_t threads = penstock_num_threads(problems * tiles);
    const prompt_t *c = &call;
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t base = 0; base < c->tokens; base += c->together) {
        const int64_t count = c->tokens - base < c->together ? c->tokens - base : c->together;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < problems; i++) {
            const int64_t row = i / c->kv_heads, head = i % c->kv_heads;
            const char *k = c->keys + row * c->key_strides[0] + head * c->key_strides[1] + base * c->key_strides[2];
            const char *v = c->values + row * c->value_strides[0] + head * c->value_strides[1] + base * c->value_strides[2];
            (pairs ? pack_pairs : pack_float)(c, k, v, count, c->packed + 2 * words * i);
        }
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < problems * tiles; i++) {
            const int64_t row = i / tiles / c->kv_heads, head = i / tiles % c->kv_heads;
            (pairs ? tile_pairs : tile_float)(c, row, head, i % tiles, base, count, c->is_first && base == 0);
        }
    }
#else
    (void)query, (void)keys, (void)values, (void)mask, (void)out, (void)lse, (void)packed, (void)sizes;
    (void)strides, (void)scaling;
#endif
}
