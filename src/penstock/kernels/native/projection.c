/* The small steps between a hidden state and a low-rank query, and between keys and the index.
 * Twins of the functions in query_steps.py and low_rank.py. Without AVX-512 torch does it. */

#include "avx512.h"

#ifdef PENSTOCK_X86

AVX512 INLINE float mean_square(const char *x, int64_t width, int kind) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 v = load(x, i, kind);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return _mm512_reduce_add_ps(sum) / (float)width;
}

AVX512 INLINE void normalise(const char *x, const char *weight, float epsilon, int64_t rows,
                             int64_t width, char *out, int kind) {
    const int64_t row_bytes = width * (kind == FLOAT32 ? 4 : 2);
    for (int64_t row = 0; row < rows; row++, x += row_bytes, out += row_bytes) {
        const __m512 factor = _mm512_set1_ps(1.0f / sqrtf(mean_square(x, width, kind) + epsilon));
        for (int64_t i = 0; i < width; i += 16)
            store(out, i, _mm512_mul_ps(_mm512_mul_ps(load(x, i, kind), factor),
                                        load(weight, i, kind)), kind);
    }
}

AVX512 INLINE void turn(const char *query, const char *weight, float epsilon, const char *cos,
                        const char *sin, int64_t batch, int64_t heads, int64_t dim, char *out,
                        int kind) {
    const int64_t bytes = kind == FLOAT32 ? 4 : 2, half = dim / 2;
    for (int64_t row = 0; row < batch; row++, cos += dim * bytes, sin += dim * bytes)
        for (int64_t head = 0; head < heads; head++, query += dim * bytes, out += dim * bytes) {
            float scale = 1.0f;
            if (weight != NULL) scale = 1.0f / sqrtf(mean_square(query, dim, kind) + epsilon);
            const __m512 factor = _mm512_set1_ps(scale);
            for (int64_t i = 0; i < half; i += 16) {
                __m512 a = _mm512_mul_ps(load(query, i, kind), factor);
                __m512 b = _mm512_mul_ps(load(query, i + half, kind), factor);
                if (weight != NULL) {
                    a = _mm512_mul_ps(a, load(weight, i, kind));
                    b = _mm512_mul_ps(b, load(weight, i + half, kind));
                }
                const __m512 low = _mm512_mul_ps(b, load(sin, i, kind));
                const __m512 high = _mm512_mul_ps(b, load(cos, i + half, kind));
                store(out, i, _mm512_fmsub_ps(a, load(cos, i, kind), low), kind);
                store(out, i + half, _mm512_fmadd_ps(a, load(sin, i + half, kind), high), kind);
            }
        }
}

/* out[r] = factor[r] * sum over i of x[i] * basis[i][r] */
AVX512 INLINE void product(const char *x, const char *basis, int64_t width, int64_t rank,
                           const float *factor, float *out, int kind) {
    const int64_t bytes = kind == FLOAT32 ? 4 : 2;
    float values[width];
    for (int64_t i = 0; i < width; i += 16) _mm512_storeu_ps(values + i, load(x, i, kind));
    for (int64_t first = 0; first < rank; first += 64) {
        const int64_t vectors = rank - first < 64 ? (rank - first) / 16 : 4;
        __m512 sum[4];
        for (int64_t j = 0; j < vectors; j++) sum[j] = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i++) {
            const __m512 value = _mm512_set1_ps(values[i]);
            const char *line = basis + (i * rank + first) * bytes;
            for (int64_t j = 0; j < vectors; j++)
                sum[j] = _mm512_fmadd_ps(value, load(line, j * 16, kind), sum[j]);
        }
        for (int64_t j = 0; j < vectors; j++)
            _mm512_storeu_ps(out + first + j * 16, _mm512_mul_ps(sum[j],
                             _mm512_loadu_ps(factor + first + j * 16)));
    }
}

#else
#define AVX512
#define EACH_KIND(call)
#endif

/* RMSNorm of rows. x, out: [rows][width]; weight: [width]; width divides by 16 */
AVX512 PENSTOCK_EXPORT void penstock_rms_norm(const char *x, const char *weight, float epsilon,
                                              int64_t rows, int64_t width, int64_t kind,
                                              char *out) {
#define NORMALISE(k) normalise(x, weight, epsilon, rows, width, out, k)
    EACH_KIND(NORMALISE)
}

/* RMSNorm per head where weight is given, then rotary embedding by halves.
 * query, out: [batch][heads][dim]; weight: [dim] or NULL; cos, sin: [batch][dim]
 * dim divides by 32 */
AVX512 PENSTOCK_EXPORT void penstock_turn_query(const char *query, const char *weight,
                                                float epsilon, const char *cos, const char *sin,
                                                int64_t batch, int64_t heads, int64_t dim,
                                                int64_t kind, char *out) {
#define TURN(k) turn(query, weight, epsilon, cos, sin, batch, heads, dim, out, k)
    EACH_KIND(TURN)
}

/* Products of rows with parts of a basis.
 * x: [rows][parts][share] vectors of `width`, rows `stride` elements apart; part p of a row meets
 *     the basis rows [p * width, (p + 1) * width)
 * basis: [parts * width][rank]; factor: float [rank]; width and rank divide by 16
 * out: float [rows][parts][share][rank] */
AVX512 PENSTOCK_EXPORT void penstock_low_rank(const char *x, int64_t stride, int64_t rows,
                                              int64_t parts, int64_t share, int64_t width,
                                              const char *basis, int64_t rank, int64_t kind,
                                              const float *factor, float *out) {
    const int64_t bytes = kind == 0 ? 4 : 2;
    for (int64_t row = 0; row < rows; row++, x += stride * bytes)
        for (int64_t i = 0; i < parts * share; i++, out += rank) {
            const char *vector = x + i * width * bytes;
            const char *part = basis + i / share * width * rank * bytes;
#define PRODUCT(k) product(vector, part, width, rank, factor, out, k)
            EACH_KIND(PRODUCT)
            (void)vector, (void)part, (void)factor;
        }
    (void)kind;
}

/* Quantise one row's components into its blocks of codes.
 * components: float [tokens][rank], in units of the quantisation step; tokens of whole groups
 * codes: [blocks][group_tokens][block_groups][width], of which groups from `first_group` on */
PENSTOCK_EXPORT void penstock_store_codes(const float *components, int64_t tokens, int64_t rank,
                                          int64_t bits, int64_t first_group, int64_t group_tokens,
                                          int64_t block_groups, int64_t width, uint8_t *codes) {
    for (int64_t token = 0; token < tokens; token++, components += rank) {
        const int64_t group = first_group + token / group_tokens, offset = token % group_tokens;
        const int64_t line = (group / block_groups * group_tokens + offset) * block_groups;
        uint8_t *to = codes + (line + group % block_groups) * width;
        if (bits == 4) memset(to, 0x88, width); /* what a missing last component is padded with */
        for (int64_t i = 0; i < rank; i++) {
            const float value = components[i] == components[i] ? components[i] : 0.0f;
            if (bits == 8) {
                const float code = rintf(value < -127.0f ? -127.0f : value > 127.0f ? 127.0f : value);
                to[i] = (uint8_t)(int8_t)code;
            } else {
                const float level = floorf(value < -8.0f ? -8.0f : value > 7.0f ? 7.0f : value);
                const uint8_t nibble = (uint8_t)(level + 8.0f);
                uint8_t *byte = to + i % width;
                *byte = i < width ? (uint8_t)((*byte & 0xf0) | nibble)
                                  : (uint8_t)((*byte & 0x0f) | nibble << 4);
            }
        }
    }
}
