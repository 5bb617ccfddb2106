/* Scores of units by their quantised keys. The twin of score_twin() in key_codes.py.
 *
 * Sixteen units at a time: their products with one query become one register, so that the exp of
 * sixteen logits costs what one does. */

#include "key_codes.h"

#define WIDE 512 /* bytes of a unit's codes from which on reading ahead pays */
#define READ_AHEAD (64 << 10) /* bytes of codes: they stay in a second-level cache */
#define LINE 64 /* bytes that memory hands over at once */

/* A query as `PreparedQuery` keeps it, in the order of its `_table`.
 * codes: int8 [kv_heads][queries][chunks][64], where the keys' channels come to lie
 * factors: float [kv_heads][queries], what a product of codes is worth
 * sums: float [kv_heads][queries][chunks][2], of the codes in either half of a chunk
 * normalisers: float [kv_heads][queries]; null: raw products are summed */
struct asked {
    const int8_t *codes;
    const float *factors, *sums, *normalisers;
    int64_t queries;
};

/* What to fill: a tile's scores; or every head's logits, [kv_heads][queries], `apart` each. */
struct answer {
    float *scores, *logits;
    int64_t apart;
};

/* Steps (and least values) of up to 16 units, unit by unit in a register's lanes. */
PLAIN void turn_steps(const struct layout *k, const int64_t *units, int64_t count,
                      uint32_t *turned) {
    const int64_t width = k->kv_heads * k->groups;
    for (int64_t t = 0; t < TILE; t++) {
        const uint32_t *steps = k->steps + units[t < count ? t : count - 1] * width;
        for (int64_t i = 0; i < width; i++) turned[i * TILE + t] = steps[i];
    }
}

/* Codes of one head of one unit as the query has them: [chunks][64], zero where there is none. */
PLAIN void unpack(const uint8_t *codes, int64_t dim, int64_t bits, int16_t *to) {
    for (int64_t first = 0; first < dim; first += CHUNK, to += CHUNK) {
        const int64_t count = dim - first < CHUNK ? dim - first : CHUNK;
        if (bits == 8) {
            for (int64_t i = 0; i < count; i++) to[i] = codes[first + i];
        } else {
            const uint8_t *packed = codes + first / 2;
            for (int64_t i = 0; i < count / 2; i++) {
                to[i] = packed[i] & 15;
                to[CHUNK / 2 + i] = packed[i] >> 4;
            }
        }
    }
}

/* Scores of up to 16 units in plain loops, for compilers to turn into vector code. */
PLAIN void score_plain_any(const struct layout *k, const struct asked *q, const int64_t *units,
                             int64_t count, const struct answer *to) {
    const int64_t chunks = (k->head_dim + CHUNK - 1) / CHUNK, per_unit = k->kv_heads * k->groups;
    const int64_t halves = k->bits == 8 ? 1 : 2, half = CHUNK / halves;
    int16_t codes[chunks * CHUNK];
    float logits[q->queries][TILE], total[TILE] = {0.0f};
    memset(codes, 0, sizeof(codes));
    for (int64_t head = 0; head < k->kv_heads; head++) {
        for (int64_t t = 0; t < count; t++) {
            const uint32_t *steps = k->steps + units[t] * per_unit + head * k->groups;
            unpack(k->codes + (units[t] * k->kv_heads + head) * k->head_bytes, k->head_dim, k->bits,
                   codes);
            for (int64_t i = 0; i < q->queries; i++) {
                const int64_t row = head * q->queries + i;
                const int8_t *query = q->codes + row * chunks * CHUNK;
                const float *sums = q->sums + row * chunks * 2;
                float value = 0.0f;
                for (int64_t part = 0; part < chunks * halves; part++) {
                    int32_t sum = 0;
                    for (int64_t j = part * half; j < (part + 1) * half; j++)
                        sum += (int32_t)codes[j] * (int16_t)query[j];
                    if (k->bits == 8) {
                        const float offset = sums[2 * part] + sums[2 * part + 1];
                        value += as_float(*steps) * ((float)sum - 128.0f * offset);
                    } else {
                        value += as_float(steps[part] << 16) * (float)sum;
                        value += as_float(steps[part] & 0xffff0000u) * sums[part];
                    }
                }
                logits[i][t] = value * q->factors[row];
            }
        }
        for (int64_t i = 0; i < q->queries; i++) {
            const int64_t row = head * q->queries + i;
            if (to->logits != NULL)
                memcpy(to->logits + row * to->apart, logits[i], count * sizeof(float));
            else if (q->normalisers == NULL)
                for (int64_t t = 0; t < count; t++) total[t] += logits[i][t];
            else
                for (int64_t t = 0; t < count; t++)
                    total[t] += exp_clamped(logits[i][t] - q->normalisers[row]);
        }
    }
    if (to->logits == NULL) memcpy(to->scores, total, count * sizeof(float));
}

WIDENED(void, score_plain,
        (const struct layout *k, const struct asked *q, const int64_t *units, int64_t count,
         const struct answer *to),
        (k, q, units, count, to))

#ifdef PENSTOCK_X86

/* 16 registers to two: lane t is the sum of the lower, or of the upper, half of sum[t]. */
VNNI INLINE void fold_halves(__m512i *sum, __m512i *lower, __m512i *upper) {
    for (int i = 0; i < 8; i++) {
        const __m512i a = sum[2 * i], b = sum[2 * i + 1];
        sum[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    for (int i = 0; i < 4; i++) {
        const __m512i a = sum[2 * i], b = sum[2 * i + 1];
        sum[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    for (int i = 0; i < 2; i++) {
        const __m512i a = sum[2 * i], b = sum[2 * i + 1];
        sum[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88),
                                  _mm512_shuffle_i32x4(a, b, 0xdd));
    }
    *lower = _mm512_shuffle_i32x4(sum[0], sum[1], 0x88);
    *upper = _mm512_shuffle_i32x4(sum[0], sum[1], 0xdd);
}

/* 64 codes, a byte each. */
VNNI INLINE __m512i load_codes(const uint8_t *codes, __mmask64 used, int bits) {
    if (bits == 8) return _mm512_maskz_loadu_epi8(used, codes);
    const __m256i packed = _mm256_maskz_loadu_epi8((__mmask32)used, codes);
    const __m512i shift = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
    return _mm512_and_si512(_mm512_srlv_epi64(_mm512_broadcast_i64x4(packed), shift),
                            _mm512_set1_epi8(15));
}

/* Products of 16 units with one query, in the keys' own units. heads: the units' codes of a head;
 * steps: [groups][TILE]; chunks is a constant where it is 1 or 2. */
VNNI INLINE __m512 products(const struct layout *k, const uint8_t *const *heads,
                            const uint32_t *steps, const int8_t *query, const float *sums,
                            int64_t chunks, int bits) {
    const int64_t bytes = CHUNK * bits / 8, rest = k->head_bytes - (chunks - 1) * bytes;
    const __mmask64 last = rest == 64 ? ~(__mmask64)0 : ((__mmask64)1 << rest) - 1;
    __m512i sum[TILE], lower, upper;
    __m512 value = _mm512_setzero_ps(), offset = value;
    for (int t = 0; t < TILE; t++) sum[t] = _mm512_setzero_si512();
    for (int64_t c = 0; c < chunks; c++) {
        const __m512i q = _mm512_loadu_si512(query + c * CHUNK);
        const __mmask64 used = c + 1 < chunks ? ~(__mmask64)0 : last;
        for (int t = 0; t < TILE; t++)
            sum[t] = _mm512_dpbusd_epi32(sum[t], load_codes(heads[t] + c * bytes, used, bits), q);
        const float *of = sums + 2 * c;
        if (bits == 8) {
            offset = _mm512_add_ps(offset, _mm512_set1_ps(of[0] + of[1]));
            continue;
        }
        fold_halves(sum, &lower, &upper);
        for (int i = 0; i < 2; i++) {
            const __m512i word = _mm512_loadu_si512(steps + (2 * c + i) * TILE);
            const __m512 step = _mm512_castsi512_ps(_mm512_slli_epi32(word, 16));
            const __m512 least = _mm512_castsi512_ps(
                _mm512_and_si512(word, _mm512_set1_epi32((int32_t)0xffff0000u)));
            value = _mm512_fmadd_ps(step, _mm512_cvtepi32_ps(i ? upper : lower), value);
            value = _mm512_fmadd_ps(least, _mm512_set1_ps(of[i]), value);
        }
        for (int t = 0; t < TILE; t++) sum[t] = _mm512_setzero_si512();
    }
    if (bits == 4) return value;
    fold_halves(sum, &lower, &upper);
    value = _mm512_cvtepi32_ps(_mm512_add_epi32(lower, upper));
    value = _mm512_fnmadd_ps(_mm512_set1_ps(128.0f), offset, value);
    return _mm512_mul_ps(value, _mm512_loadu_ps(steps));
}

VNNI INLINE void score_tile(const struct layout *k, const struct asked *q, const int64_t *units,
                            int64_t count, const struct answer *to, int64_t chunks, int bits) {
    const __mmask16 used = (__mmask16)((1u << count) - 1);
    uint32_t turned[k->kv_heads * k->groups * TILE];
    __m512 total = _mm512_setzero_ps();
    turn_steps(k, units, count, turned);
    for (int64_t head = 0; head < k->kv_heads; head++) {
        const uint8_t *heads[TILE];
        for (int64_t t = 0; t < TILE; t++)
            heads[t] = k->codes +
                       (units[t < count ? t : count - 1] * k->kv_heads + head) * k->head_bytes;
        for (int64_t i = 0; i < q->queries; i++) {
            const int64_t row = head * q->queries + i;
            const __m512 value =
                products(k, heads, turned + head * k->groups * TILE,
                         q->codes + row * chunks * CHUNK, q->sums + row * chunks * 2, chunks, bits);
            const __m512 factor = _mm512_set1_ps(q->factors[row]);
            if (to->logits != NULL) {
                float *logits = to->logits + row * to->apart;
                _mm512_mask_storeu_ps(logits, used, _mm512_mul_ps(value, factor));
                continue;
            }
            if (q->normalisers == NULL) {
                total = _mm512_fmadd_ps(value, factor, total);
                continue;
            }
            const __m512 x = _mm512_fmsub_ps(value, factor, _mm512_set1_ps(q->normalisers[row]));
            total = _mm512_add_ps(total, exp_negative_512(_mm512_min_ps(
                                             x, _mm512_set1_ps(LARGEST_EXPONENT))));
        }
    }
    if (to->logits == NULL) _mm512_mask_storeu_ps(to->scores, used, total);
}

#define SCORE_TILE(NAME, CHUNKS, BITS)                                                            \
    VNNI static void NAME(const struct layout *k, const struct asked *q, const int64_t *units,    \
                          int64_t count, const struct answer *to) {                               \
        score_tile(k, q, units, count, to, CHUNKS, BITS);                                         \
    }

SCORE_TILE(score_8_narrow, 1, 8)
SCORE_TILE(score_8_usual, 2, 8)
SCORE_TILE(score_8_wide, (k->head_dim + CHUNK - 1) / CHUNK, 8)
SCORE_TILE(score_4_narrow, 1, 4)
SCORE_TILE(score_4_usual, 2, 4)
SCORE_TILE(score_4_wide, (k->head_dim + CHUNK - 1) / CHUNK, 4)

#endif

typedef void (*tile_t)(const struct layout *, const struct asked *, const int64_t *, int64_t,
                       const struct answer *);

static tile_t tile_of(const struct layout *k) {
#ifdef PENSTOCK_X86
    const int64_t chunks = (k->head_dim + CHUNK - 1) / CHUNK;
    if (penstock_level() < LEVEL_VNNI) return score_plain;
    if (chunks == 1) return k->bits == 8 ? score_8_narrow : score_4_narrow;
    if (chunks == 2) return k->bits == 8 ? score_8_usual : score_4_usual;
    return k->bits == 8 ? score_8_wide : score_4_wide;
#else
    (void)k;
    return score_plain;
#endif
}

/* Wide units: read a byte of every line of their codes, in the order in which they lie. Tiles go
 * through them head by head, which no machine foresees, and would wait for memory line by line. */
static void read_ahead(const struct layout *k, const int64_t *units, int64_t count) {
    const int64_t bytes = k->kv_heads * k->head_bytes;
    for (int64_t i = 0; i < count; i++) {
        const volatile uint8_t *codes = k->codes + units[i] * bytes;
        for (int64_t at = 0; at < bytes; at += LINE) (void)codes[at];
    }
}

/* Narrow ones: ask for those of the next tile, wherever they are. (Inlined, or else compilers take
 * it for a function without an effect and leave it out.) */
PLAIN void expect(const struct layout *k, const int64_t *units, int64_t count) {
    const int64_t bytes = k->kv_heads * k->head_bytes, words = k->kv_heads * k->groups;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *codes = k->codes + units[i] * bytes;
        for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(codes + at);
        for (int64_t at = 0; at < words; at += LINE / 4)
            __builtin_prefetch(k->steps + units[i] * words + at);
    }
}

static void score_all(const struct layout *k, const struct asked *q, const int64_t *units,
                      int64_t count, const struct answer *to, int64_t threads) {
    const int64_t bytes = k->kv_heads * k->head_bytes, ahead = READ_AHEAD / bytes / TILE * TILE;
    const int64_t stretch = ahead > TILE ? ahead : TILE, parts = parts_of(count, threads);
    const tile_t tile = tile_of(k);
    (void)parts;
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
    for (int64_t begin = 0; begin < count; begin += stretch) {
        const int64_t end = count - begin < stretch ? count : begin + stretch;
        if (bytes >= WIDE) read_ahead(k, units + begin, end - begin);
        for (int64_t first = begin; first < end; first += TILE) {
            const int64_t size = end - first < TILE ? end - first : TILE;
            const int64_t left = count - first - size;
            const struct answer part = {to->scores == NULL ? NULL : to->scores + first,
                                        to->logits == NULL ? NULL : to->logits + first, to->apart};
            if (bytes < WIDE) expect(k, units + first + size, left < TILE ? left : TILE);
            tile(k, q, units + first, size, &part);
        }
    }
}

/* Scores of units.
 *
 * units: int64 [count], in any order; scores: float [count] */
PENSTOCK_EXPORT void penstock_score_key_codes(const struct layout *k, const struct asked *q,
                                              const int64_t *units, int64_t count, float *scores,
                                              int64_t threads) {
    const struct answer to = {scores, NULL, 0};
    score_all(k, q, units, count, &to, threads);
}

WIDENED(float, log_sum, (const float *logits, int64_t count), (logits, count))

/* Every head's logits of units, and the log of their summed exponentials.
 *
 * logits: float [kv_heads][queries][count]; log_sums: float [kv_heads][queries] */
PENSTOCK_EXPORT void penstock_key_logits(const struct layout *k, const struct asked *q,
                                         const int64_t *units, int64_t count, float *logits,
                                         float *log_sums, int64_t threads) {
    const struct answer to = {NULL, logits, count};
    const int64_t heads = k->kv_heads * q->queries, parts = parts_of(count, threads);
    (void)parts;
    score_all(k, q, units, count, &to, threads);
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
    for (int64_t head = 0; head < heads; head++)
        log_sums[head] = log_sum(logits + head * count, count);
}
