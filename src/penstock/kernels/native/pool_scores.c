/* Importance of every token that a pool holds for one new token's query: logits with the log of
 * their summed exponentials, then sums over the heads. The twins are in pool_scores.py.
 *
 * Sixteen places at a time, of which the keys are read once and the values never. */

#include "logits.h"

#define TILE 16 /* places */
#define TASK 128 /* places that one thread takes at once */

#ifdef PENSTOCK_X86

typedef struct {
    const float *query; /* [kv_heads][queries][head_dim] */
    const char *tokens; /* [places][2][kv_heads][head_dim] */
    const char *mask; /* [places], 0 or minus infinity */
    float *logits; /* [kv_heads][queries][places] */
    int64_t places, kv_heads, queries, head_dim;
    float scaling;
} pool_t;

/* 16 registers to one: lane t is the sum of sum[t]. */
AVX512 INLINE __m512 fold(__m512 *sum) {
    for (int i = 0; i < 8; i++) {
        const __m512 a = sum[2 * i], b = sum[2 * i + 1];
        sum[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(sum[2 * i]), b = _mm512_castps_pd(sum[2 * i + 1]);
        sum[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                               _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++) {
        const __m512 a = sum[2 * i], b = sum[2 * i + 1];
        sum[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(sum[0], sum[1], 0x88),
                         _mm512_shuffle_f32x4(sum[0], sum[1], 0xdd));
}

/* Which of up to 16 places are visible, and where each one's keys are; those of another place
 * where it is hidden. */
AVX512 INLINE __mmask16 look(const pool_t *p, int64_t first, int64_t count, int kind,
                             const char **keys) {
    const int64_t bytes = kind == FLOAT32 ? 4 : 2;
    const int64_t token_bytes = 2 * p->kv_heads * p->head_dim * bytes;
    __mmask16 seen = 0;
    for (int64_t t = 0; t < count; t++) {
        const int visible = kind == FLOAT32 ? ((const uint32_t *)p->mask)[first + t] == 0
                                            : ((const uint16_t *)p->mask)[first + t] == 0;
        seen |= (__mmask16)(visible << t);
    }
    if (seen == 0) return 0;
    const int64_t some = __builtin_ctz(seen);
    for (int64_t t = 0; t < TILE; t++)
        keys[t] = p->tokens + (first + (seen >> t & 1 ? t : some)) * token_bytes;
    return seen;
}

AVX512 INLINE void tile_logits(const pool_t *p, int64_t first, int64_t count, int kind) {
    const int64_t dim = p->head_dim, head_bytes = dim * (kind == FLOAT32 ? 4 : 2);
    const __mmask16 used = (__mmask16)((1u << count) - 1);
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    float wide[TILE * dim];
    const char *keys[TILE];
    const __mmask16 seen = look(p, first, count, kind, keys);
    for (int64_t head = 0; head < p->kv_heads; head++) {
        const int widened = kind != FLOAT32 && p->queries > 1 && seen;
        if (widened)
            for (int64_t t = 0; t < TILE; t++)
                for (int64_t i = 0; i < dim; i += 16)
                    _mm512_storeu_ps(wide + t * dim + i,
                                     load(keys[t] + head * head_bytes, i, kind));
        for (int64_t i = 0; i < p->queries; i++) {
            const int64_t row = head * p->queries + i;
            float *logits = p->logits + row * p->places + first;
            if (seen == 0) {
                _mm512_mask_storeu_ps(logits, used, nothing);
                continue;
            }
            __m512 sum[TILE];
            for (int t = 0; t < TILE; t++) sum[t] = _mm512_setzero_ps();
            for (int64_t d = 0; d < dim; d += 16) {
                const __m512 q = _mm512_loadu_ps(p->query + row * dim + d);
                for (int t = 0; t < TILE; t++) {
                    const __m512 k = widened ? _mm512_loadu_ps(wide + t * dim + d)
                                             : load(keys[t] + head * head_bytes, d, kind);
                    sum[t] = _mm512_fmadd_ps(k, q, sum[t]);
                }
            }
            const __m512 found = _mm512_mul_ps(fold(sum), _mm512_set1_ps(p->scaling));
            _mm512_mask_storeu_ps(logits, used, _mm512_mask_mov_ps(nothing, seen, found));
        }
    }
}

#define TASK_LOGITS(NAME, KIND)                                                                   \
    AVX512 static void NAME(const pool_t *p, int64_t first, int64_t end) {                        \
        for (; first < end; first += TILE)                                                        \
            tile_logits(p, first, end - first < TILE ? end - first : TILE, KIND);                 \
    }

TASK_LOGITS(logits_float32, FLOAT32)
TASK_LOGITS(logits_bfloat16, BFLOAT16)
TASK_LOGITS(logits_float16, FLOAT16)

#endif

WIDENED(float, log_sum, (const float *logits, int64_t count), (logits, count))

/* Logits of one query per row, and the log of their summed exponentials.
 *
 * query: float [rows][kv_heads][queries][head_dim]; head_dim divides by 16
 * tokens: [rows][places][2][kv_heads][head_dim]; mask: [rows][places], both of `kind`
 * logits: float [rows][kv_heads][queries][places], minus infinity where the mask hides the place
 * log_sums: float [rows][kv_heads][queries] */
PENSTOCK_EXPORT void penstock_pool_logits(const float *query, const char *tokens, const char *mask,
                                          int64_t rows, int64_t places, int64_t kv_heads,
                                          int64_t queries, int64_t head_dim, int64_t kind,
                                          float scaling, float *logits, float *log_sums,
                                          int64_t threads) {
#ifdef PENSTOCK_X86
    const int64_t bytes = kind == FLOAT32 ? 4 : 2, width = kv_heads * head_dim * bytes;
    const int64_t heads = kv_heads * queries, tasks = (places + TASK - 1) / TASK;
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < rows * tasks; task++) {
            const int64_t row = task / tasks, first = task % tasks * TASK;
            const int64_t end = places - first < TASK ? places : first + TASK;
            const pool_t p = {query + row * heads * head_dim, tokens + row * places * 2 * width,
                              mask + row * places * bytes, logits + row * heads * places,
                              places, kv_heads, queries, head_dim, scaling};
            if (kind == FLOAT32) logits_float32(&p, first, end);
            else if (kind == BFLOAT16) logits_bfloat16(&p, first, end);
            else logits_float16(&p, first, end);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * heads; i++)
            log_sums[i] = log_sum(logits + i * places, places);
    }
#else
    (void)query, (void)tokens, (void)mask, (void)rows, (void)places, (void)kv_heads;
    (void)queries, (void)head_dim, (void)kind, (void)scaling, (void)logits, (void)log_sums;
    (void)threads;
#endif
}

PLAIN void add_heads_any(const float *restrict logits, int64_t heads, int64_t places, int64_t count,
                         const float *restrict normalisers, float *restrict out) {
    for (int64_t i = 0; i < count; i++) out[i] = 0.0f;
    for (int64_t head = 0; head < heads; head++) {
        const float *row = logits + head * places;
        if (normalisers == NULL)
            for (int64_t i = 0; i < count; i++) out[i] += row[i];
        else
            for (int64_t i = 0; i < count; i++) out[i] += exp_clamped(row[i] - normalisers[head]);
    }
    for (int64_t i = 0; i < count; i++) {
        const uint32_t hidden = -(uint32_t)(as_bits(logits[i]) == as_bits(-INFINITY));
        out[i] = as_float((as_bits(out[i]) & ~hidden) | (as_bits(-INFINITY) & hidden));
    }
}

WIDENED(void, add_heads,
        (const float *logits, int64_t heads, int64_t places, int64_t count,
         const float *normalisers, float *out),
        (logits, heads, places, count, normalisers, out))

/* Sums over the heads of exp(logit - normaliser), or of the logits themselves; minus infinity
 * where the first head's logit is.
 *
 * logits: float [rows][heads][places]; normalisers: float [rows][heads], or null
 * out: float [rows][places] */
PENSTOCK_EXPORT void penstock_logit_sums(const float *logits, int64_t rows, int64_t heads,
                                         int64_t places, const float *normalisers, float *out,
                                         int64_t threads) {
    const int64_t tasks = (places + TASK - 1) / TASK;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < rows * tasks; task++) {
        const int64_t row = task / tasks, first = task % tasks * TASK;
        add_heads(logits + row * heads * places + first, heads, places,
                  places - first < TASK ? places - first : TASK,
                  normalisers == NULL ? NULL : normalisers + row * heads,
                  out + row * places + first);
    }
}
