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

/* 32 numbers as two vectors. In pairs, those of even place come first and those of odd place
 * second: two bfloat16 of a word become floats without moving between lanes. Queries, values and
 * sums have the same order then. */
AVX512 INLINE void load_two(const char *from, int64_t index, __m512 *a, __m512 *b, int kind,
                            int pairs) {
    if (pairs) {
        const __m512i words = _mm512_loadu_si512((const uint16_t *)from + index);
        *a = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        *b = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
    } else {
        *a = load(from, index, kind);
        *b = load(from, index + 16, kind);
    }
}

AVX512 INLINE void store_two(char *to, int64_t index, __m512 a, __m512 b, int kind, int pairs) {
    if (pairs) {
        const __m512i even = _mm512_srli_epi32(bfloat16_above(a), 16);
        const __m512i odd =
            _mm512_and_si512(bfloat16_above(b), _mm512_set1_epi32((int)0xffff0000));
        _mm512_storeu_si512((uint16_t *)to + index, _mm512_or_si512(even, odd));
    } else {
        store(to, index, a, kind);
        store(to, index + 16, b, kind);
    }
}

/* The sum of each of four vectors. */
AVX512 INLINE __m128 four_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 last = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 four = _mm512_add_ps(_mm512_shuffle_ps(first, last, 0x44),
                                      _mm512_shuffle_ps(first, last, 0xee));
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* Logits of `keys` keys with `part` queries, their values loaded once.
 * query: float [part][dim]; key: [keys]; logits: [part][BLOCK], of which the tokens' columns */
AVX512 INLINE void dot(const float *query, int64_t dim, const char *const *key,
                       const float *scaling, float *logits, int part, int keys, int kind,
                       int pairs) {
    __m512 sum[4];
    for (int j = 0; j < 4; j++) sum[j] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 32 <= dim; i += 32)
        for (int t = 0; t < keys; t++) {
            __m512 a, b;
            load_two(key[t], i, &a, &b, kind, pairs);
            for (int j = 0; j < part; j++) {
                const float *from = query + j * dim + i;
                __m512 *to = &sum[t * part + j];
                *to = _mm512_fmadd_ps(_mm512_loadu_ps(from), a, *to);
                *to = _mm512_fmadd_ps(_mm512_loadu_ps(from + 16), b, *to);
            }
        }
    if (i < dim)
        for (int t = 0; t < keys; t++) {
            const __m512 k = load(key[t], i, kind);
            for (int j = 0; j < part; j++)
                sum[t * part + j] =
                    _mm512_fmadd_ps(_mm512_loadu_ps(query + j * dim + i), k, sum[t * part + j]);
        }
    float each[4];
    _mm_storeu_ps(each, four_sums(sum[0], sum[1], sum[2], sum[3]));
    for (int t = 0; t < keys; t++)
        for (int j = 0; j < part; j++) logits[j * BLOCK + t] = each[t * part + j] * scaling[t];
}

/* Weighted values of a block, added to 32 (or the last 16) numbers of `part` sums.
 * weights: [part][BLOCK]; sums: [part][dim] */
AVX512 INLINE void weigh(const char *const *values, int64_t size, const float *weights, float *sums,
                         int64_t dim, int64_t i, int part, int kind, int pairs) {
    const int two = i + 16 < dim;
    __m512 low[4], high[4];
    for (int j = 0; j < part; j++) {
        low[j] = _mm512_loadu_ps(sums + j * dim + i);
        high[j] = two ? _mm512_loadu_ps(sums + j * dim + i + 16) : _mm512_setzero_ps();
    }
    for (int64_t t = 0; t < size; t++) {
        __m512 a, b = _mm512_setzero_ps();
        if (two) load_two(values[t], i, &a, &b, kind, pairs);
        else a = load(values[t], i, kind);
        for (int j = 0; j < part; j++) {
            const __m512 w = _mm512_set1_ps(weights[j * BLOCK + t]);
            low[j] = _mm512_fmadd_ps(w, a, low[j]);
            high[j] = _mm512_fmadd_ps(w, b, high[j]);
        }
    }
    for (int j = 0; j < part; j++) {
        _mm512_storeu_ps(sums + j * dim + i, low[j]);
        if (two) _mm512_storeu_ps(sums + j * dim + i + 16, high[j]);
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
                       int64_t places, int64_t first, int64_t end, int kind, int of, int pairs) {
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
            const char *keys[BLOCK];
            float scaling[BLOCK];
            for (int64_t t = 0; t < size; t++) {
                keys[t] = block[t] + head * dim * bytes;
                scaling[t] = call->scaling;
                if (of == CODES) scaling[t] *= scale_of(block[t] + numbers, head);
            }
            for (int64_t q = 0; q < queries; q += 4) {
                const int64_t part = queries - q < 4 ? queries - q : 4;
                const float *query = seen->wide + (row + q) * dim;
                for (int64_t t = 0, some; t < size; t += some) {
                    some = part > 2 ? 1 : part == 2 ? 2 : 4;
                    if (t + some > size) some = 1;
#define DOT(n, keys_of) dot(query, dim, keys + t, scaling + t, logits[row + q] + t, n, keys_of, of, pairs)
                    if (part == 4) DOT(4, 1);
                    else if (part == 3) DOT(3, 1);
                    else if (part == 2 && some == 2) DOT(2, 2);
                    else if (part == 2) DOT(2, 1);
                    else if (some == 4) DOT(1, 4);
                    else DOT(1, 1);
                }
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
#define WEIGH(n) weigh(values, size, logits[row + q], to, dim, i, n, of, pairs)
                    EACH_PART(part, WEIGH)
                }
        }
    }
}

/* KV heads [first, end) of one row. */
AVX512 INLINE void attend(const call_t *call, int64_t first, int64_t end, int kind, int pairs) {
    const int64_t dim = call->head_dim, queries = call->queries;
    const int64_t bytes = kind == FLOAT32 ? 4 : 2, count = (end - first) * queries;
    float sums[count * dim], wide[count * dim], largest[count], totals[count];
    const seen_t seen = {wide, sums, largest, totals};
    memset(sums, 0, sizeof(sums));
    const char *query = call->query + first * queries * dim * bytes;
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < dim; i += 32) {
            const int64_t at = row * dim + i;
            __m512 a, b;
            if (i + 16 == dim) {
                _mm512_storeu_ps(wide + at, load(query, at, kind));
                break;
            }
            load_two(query, at, &a, &b, kind, pairs);
            _mm512_storeu_ps(wide + at, a);
            _mm512_storeu_ps(wide + at + 16, b);
        }
    for (int64_t i = 0; i < count; i++) largest[i] = -INFINITY, totals[i] = 0.0f;
    if (call->codes) see(call, &seen, call->codes, call->mask, call->coded_places, first, end, kind, CODES, 0);
    see(call, &seen, call->tokens, call->mask + call->coded_places * bytes, call->places, first, end, kind, kind, pairs);
    for (int64_t i = 0; call->lse && i < count; i++)
        call->lse[first * queries + i] = largest[i] + logf(totals[i]);
    for (int64_t i = 0; i < count; i++) {
        const __m512 inverse = _mm512_set1_ps(totals[i] == 0.0f ? 0.0f : 1.0f / totals[i]);
        char *out = call->out + (first * queries + i) * dim * bytes;
        for (int64_t d = 0; d < dim; d += 32) {
            const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(sums + i * dim + d), inverse);
            if (d + 16 == dim) {
                store(out, d, a, kind);
                break;
            }
            const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(sums + i * dim + d + 16), inverse);
            store_two(out, d, a, b, kind, pairs);
        }
    }
}

AVX512 static void attend_float32(const call_t *c, int64_t a, int64_t b) { attend(c, a, b, FLOAT32, 0); }
AVX512 static void attend_bfloat16(const call_t *c, int64_t a, int64_t b) {
    if (c->codes) attend(c, a, b, BFLOAT16, 0); /* which lie in order */
    else attend(c, a, b, BFLOAT16, 1);
}
AVX512 static void attend_float16(const call_t *c, int64_t a, int64_t b) { attend(c, a, b, FLOAT16, 0); }

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
