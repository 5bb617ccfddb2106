/* Attention of one new token over a pool of tokens, of which the first may be int8 codes. The twin
 * of decode_attention_twin() and coded_attention_twin().
 *
 * The pool is read once, front to back, in blocks that stay in the cache between keys and values,
 * with a running maximum per head. Without AVX-512 the caller uses torch instead. */

#include "avx512.h"

#ifdef PENSTOCK_X86

#define BLOCK 16 /* tokens */

typedef struct {
    const char *query; /* [kv_heads][queries][head_dim] */
    const char *codes; /* [coded_places][token], see slot_codes.c; or none */
    const char *tokens; /* [places][2][kv_heads][head_dim] */
    const char *mask; /* [coded_places + places], 0 or minus infinity */
    char *out; /* like query */
    float *lse; /* [kv_heads][queries], or none */
    int64_t coded_places, places, kv_heads, queries, head_dim;
    float scaling;
} call_t;

/* What the heads of a task have seen so far. */
typedef struct {
    float *wide; /* their queries, [heads][queries][head_dim] */
    float *sums; /* like them */
    float *largest, *totals; /* [heads][queries] */
} seen_t;

AVX512 INLINE int is_visible(const char *mask, int64_t place, int kind) {
    if (kind == FLOAT32) return ((const uint32_t *)mask)[place] == 0;
    return ((const uint16_t *)mask)[place] == 0;
}

/* Logits of one key with `part` queries, its values loaded once.
 * query: float [part][dim]; logits: [part][BLOCK], of which the token's column */
AVX512 INLINE void dot(const float *query, int64_t dim, const char *key, float scaling,
                       float *logits, int part, int kind) {
    __m512 sum[4];
    for (int j = 0; j < part; j++) sum[j] = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += 16) {
        const __m512 k = load(key, i, kind);
        for (int j = 0; j < part; j++)
            sum[j] = _mm512_fmadd_ps(_mm512_loadu_ps(query + j * dim + i), k, sum[j]);
    }
    for (int j = 0; j < part; j++) logits[j * BLOCK] = _mm512_reduce_add_ps(sum[j]) * scaling;
}

/* Weighted values of a block, added to 32 (or the last 16) numbers of `part` sums.
 * weights: [part][BLOCK]; sums: [part][dim] */
AVX512 INLINE void weigh(const char *const *values, int64_t size, const float *weights, float *sums,
                         int64_t dim, int64_t i, int part, int kind) {
    const int64_t next = i + 16 < dim ? i + 16 : i; /* two vectors: the values are loaded once */
    __m512 low[4], high[4];
    for (int j = 0; j < part; j++) {
        low[j] = _mm512_loadu_ps(sums + j * dim + i);
        high[j] = _mm512_loadu_ps(sums + j * dim + next);
    }
    for (int64_t t = 0; t < size; t++) {
        const __m512 a = load(values[t], i, kind), b = load(values[t], next, kind);
        for (int j = 0; j < part; j++) {
            const __m512 w = _mm512_set1_ps(weights[j * BLOCK + t]);
            low[j] = _mm512_fmadd_ps(w, a, low[j]);
            high[j] = _mm512_fmadd_ps(w, b, high[j]);
        }
    }
    for (int j = 0; j < part; j++) {
        _mm512_storeu_ps(sums + j * dim + i, low[j]);
        if (next != i) _mm512_storeu_ps(sums + j * dim + next, high[j]);
    }
}

/* A call with the number of queries as a constant, so that their sums stay in registers. */
#define EACH_PART(part, call) \
    if ((part) == 4) { call(4); } \
    else if ((part) == 3) { call(3); } \
    else if ((part) == 2) { call(2); } \
    else { call(1); }

AVX512 INLINE float scale_of(const char *code_scales, int64_t head) {
    const uint32_t bits = (uint32_t)((const uint16_t *)code_scales)[head] << 16;
    float scale;
    memcpy(&scale, &bits, sizeof(scale));
    return scale;
}

/* Places [0, places) of the pool's codes or of its tokens, for KV heads [first, end) of one row.
 * kind: of the query and the mask; of: of the tokens */
AVX512 INLINE void see(const call_t *call, const seen_t *seen, const char *tokens, const char *mask,
                       int64_t places, int64_t first, int64_t end, int kind, int of) {
    const int64_t dim = call->head_dim, heads = call->kv_heads, queries = call->queries;
    const int64_t bytes = of == CODES ? 1 : of == FLOAT32 ? 4 : 2;
    const int64_t numbers = 2 * heads * dim * bytes; /* scales of codes lie behind them */
    const int64_t token_bytes = numbers + (of == CODES ? 2 * heads * 2 : 0);
    float *sums = seen->sums, *largest = seen->largest, *totals = seen->totals;
    float logits[(end - first) * queries][BLOCK];
    for (int64_t place = 0; place < places;) {
        const char *block[BLOCK];
        int64_t size = 0;
        for (; place < places && size < BLOCK; place++)
            if (is_visible(mask, place, kind)) block[size++] = tokens + place * token_bytes;
        if (size == 0) break;
        for (int64_t head = first; head < end; head++) {
            const int64_t row = (head - first) * queries;
            for (int64_t q = 0; q < queries; q += 4)
                for (int64_t t = 0; t < size; t++) {
                    const int64_t part = queries - q < 4 ? queries - q : 4;
                    const float *query = seen->wide + (row + q) * dim;
                    const char *key = block[t] + head * dim * bytes;
                    const float scaling =
                        of == CODES ? call->scaling * scale_of(block[t] + numbers, head) : call->scaling;
#define DOT(n) dot(query, dim, key, scaling, logits[row + q] + t, n, of)
                    EACH_PART(part, DOT)
                }
            __m512 scales = _mm512_set1_ps(1.0f); /* of the values */
            if (of == CODES) {
                float each[BLOCK] = {0};
                for (int64_t t = 0; t < size; t++) each[t] = scale_of(block[t] + numbers, heads + head);
                scales = _mm512_loadu_ps(each);
            }
            for (int64_t q = 0; q < queries; q++) {
                const __mmask16 used = (__mmask16)((1u << size) - 1);
                const __m512 least = _mm512_set1_ps(-INFINITY);
                const __m512 x = _mm512_mask_loadu_ps(least, used, logits[row + q]);
                const float before = largest[row + q], block_max = _mm512_reduce_max_ps(x);
                const float now = block_max > before ? block_max : before;
                /* No maximum yet: all are NaN, or minus infinity. */
                const __m512 base = _mm512_set1_ps(now == -INFINITY ? 0.0f : now);
                const __m512 w = exp_negative_512(_mm512_sub_ps(x, base));
                _mm512_storeu_ps(logits[row + q], of == CODES ? _mm512_mul_ps(w, scales) : w);
                const float shrink = before == now ? 1.0f : expf(before - now);
                totals[row + q] = totals[row + q] * shrink + _mm512_reduce_add_ps(w);
                largest[row + q] = now;
                if (shrink != 1.0f)
                    for (int64_t i = 0; i < dim; i += 16) {
                        float *sum = sums + (row + q) * dim + i;
                        _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(shrink)));
                    }
            }
            const char *values[BLOCK];
            for (int64_t t = 0; t < size; t++)
                values[t] = block[t] + (heads + head) * dim * bytes;
            for (int64_t i = 0; i < dim; i += 32)
                for (int64_t q = 0; q < queries; q += 4) {
                    const int64_t part = queries - q < 4 ? queries - q : 4;
                    float *to = sums + (row + q) * dim;
#define WEIGH(n) weigh(values, size, logits[row + q], to, dim, i, n, of)
                    EACH_PART(part, WEIGH)
                }
        }
    }
}

/* KV heads [first, end) of one row. */
AVX512 INLINE void attend(const call_t *call, int64_t first, int64_t end, int kind) {
    const int64_t dim = call->head_dim, queries = call->queries;
    const int64_t bytes = kind == FLOAT32 ? 4 : 2, count = (end - first) * queries;
    float sums[count * dim], wide[count * dim], largest[count], totals[count];
    const seen_t seen = {wide, sums, largest, totals};
    memset(sums, 0, sizeof(sums));
    for (int64_t i = 0; i < count * dim; i += 16)
        _mm512_storeu_ps(wide + i, load(call->query + first * queries * dim * bytes, i, kind));
    for (int64_t i = 0; i < count; i++) largest[i] = -INFINITY, totals[i] = 0.0f;
    if (call->codes) see(call, &seen, call->codes, call->mask, call->coded_places, first, end, kind, CODES);
    see(call, &seen, call->tokens, call->mask + call->coded_places * bytes, call->places, first, end, kind, kind);
    for (int64_t i = 0; call->lse && i < count; i++)
        call->lse[first * queries + i] = largest[i] + logf(totals[i]);
    for (int64_t i = 0; i < count; i++) {
        const __m512 inverse = _mm512_set1_ps(totals[i] == 0.0f ? 0.0f : 1.0f / totals[i]);
        for (int64_t d = 0; d < dim; d += 16)
            store(call->out + (first * queries + i) * dim * bytes, d,
                  _mm512_mul_ps(_mm512_loadu_ps(sums + i * dim + d), inverse), kind);
    }
}

AVX512 static void attend_float32(const call_t *c, int64_t a, int64_t b) { attend(c, a, b, FLOAT32); }
AVX512 static void attend_bfloat16(const call_t *c, int64_t a, int64_t b) { attend(c, a, b, BFLOAT16); }
AVX512 static void attend_float16(const call_t *c, int64_t a, int64_t b) { attend(c, a, b, FLOAT16); }

#endif

/* Attention of every row's new token.
 *
 * query, out: [batch][kv_heads][queries][head_dim], of `kind` (0 float32, 1 bfloat16, 2 float16)
 * codes: [batch][coded_places][token], as code_units lays them; none where it is null
 * tokens: [batch][places][2][kv_heads][head_dim]
 * mask: [batch][coded_places + places]
 * lse: receives each head's log-sum-exp, [batch][kv_heads][queries]; none where it is null
 * head_dim divides by 16; parts: tasks that a row's heads are cut into */
PENSTOCK_EXPORT void penstock_decode_attention(const char *query, const char *codes, const char *tokens,
                                               const char *mask, char *out, float *lse,
                                               int64_t batch, int64_t coded_places, int64_t places,
                                               int64_t kv_heads, int64_t queries, int64_t head_dim,
                                               int64_t kind, float scaling, int64_t parts) {
#ifdef PENSTOCK_X86
    const int64_t bytes = kind == FLOAT32 ? 4 : 2, width = kv_heads * head_dim * bytes;
    const int64_t coded = coded_places * 2 * kv_heads * (head_dim + 2), all = coded_places + places;
#pragma omp parallel for schedule(static) if (batch * parts > 1)
    for (int64_t task = 0; task < batch * parts; task++) {
        const int64_t row = task / parts, part = task % parts;
        const call_t call = {query + row * queries * width, codes ? codes + row * coded : NULL,
                             tokens + row * places * 2 * width, mask + row * all * bytes,
                             out + row * queries * width, lse ? lse + row * kv_heads * queries : NULL,
                             coded_places, places, kv_heads, queries, head_dim, scaling};
        const int64_t first = kv_heads * part / parts, end = kv_heads * (part + 1) / parts;
        if (kind == FLOAT32) attend_float32(&call, first, end);
        else if (kind == BFLOAT16) attend_bfloat16(&call, first, end);
        else attend_float16(&call, first, end);
    }
#else
    (void)query, (void)codes, (void)tokens, (void)mask, (void)out, (void)lse, (void)batch;
    (void)coded_places, (void)places, (void)kv_heads, (void)queries, (void)head_dim, (void)kind;
    (void)scaling, (void)parts;
#endif
}
