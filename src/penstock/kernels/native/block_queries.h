/* Low-rank queries of blocks whose keys are turned back by the block's start, 8 bits, for the lanes
 * of group_scores.c. The twin of KeyTurns.queries() in key_rotation.py, but for what 8 bits round.
 *
 * A query that is turned by an angle and projected is, for each component, a sum over pairs of
 * cosine * u + sine * v, where u and v are no block's: made once, they meet the table of all
 * blocks' cosines and sines in integer products. Components are the lanes. Pairs that hardly turn
 * from one end of a tile to the other meet the tile's middle, once. */

#ifndef PENSTOCK_BLOCK_QUERIES_H
#define PENSTOCK_BLOCK_QUERIES_H

#include "avx512.h"
#include "steps.h"

#ifdef PENSTOCK_X86

#define LANES 16
#define TILE 8 /* blocks whose queries are made together; of `TILE_BLOCKS` in key_rotation.py */
#define AT_A_TIME 4 /* blocks of one pass over u and v: their sums are in registers */

#define UNROLLED _Pragma("GCC unroll 4")

/* u and v of 16 heads. */
typedef struct {
    int64_t quads; /* of a row of both tables, four numbers each; the fast ones first */
    int64_t padded; /* components, whole vectors */
    int32_t *weights; /* [LANES][quads][padded], four numbers in a word, each + 128 */
    float *factors; /* [LANES][padded], what a product is worth */
} split_t;

/* Queries of a tile's blocks: [TILE][quads][LANES][4] as pack_queries() has one; and, for
 * [TILE][LANES], what a product is worth and what is too much in it. */
typedef struct {
    int8_t *packed;
    float *scale, *excess;
} tile_t;

/* Rounded, 0 where there is no number. */
VNNI INLINE __m512i rounded(__m512 x) {
    return _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
}

VNNI INLINE __m512 load_some(const char *from, int64_t index, __mmask16 some, int kind) {
    if (kind == FLOAT32) return _mm512_maskz_loadu_ps(some, (const float *)from + index);
    const __m256i half = _mm256_maskz_loadu_epi16(some, (const uint16_t *)from + index);
    if (kind == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

VNNI INLINE float one_of(const char *from, int64_t index, int kind) {
    return _mm512_cvtss_f32(load_some(from, index, 1, kind));
}

/* u and v of one head's components from `first` on. */
VNNI INLINE void split_vector(const penstock_codes *index, const penstock_turns *turns,
                              const float *query, const char *basis, int64_t first,
                              int32_t *weights, int64_t padded, float *factors, int kind) {
    const int64_t rank = index->rank, pairs = turns->pairs, fast = turns->fast_pairs;
    const int64_t width = turns->fast_width + turns->slow_width, slow = pairs - fast;
    const int64_t left = rank - first, step = turns->interleaved ? 2 : 1;
    const int64_t apart = turns->interleaved ? 1 : pairs;
    const __mmask16 some = left >= LANES ? 0xffff : (__mmask16)((1 << left) - 1);
    float parts[width * LANES];
    __m512 most = _mm512_set1_ps(1e-30f), rest = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i++) _mm512_storeu_ps(parts + i * LANES, _mm512_setzero_ps());
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t one = turns->order[i] * step, two = one + apart;
        const int64_t place = i < fast ? i : turns->fast_width + i - fast;
        const __m512 a = load_some(basis, one * rank + first, some, kind);
        const __m512 b = load_some(basis, two * rank + first, some, kind);
        const __m512 x = _mm512_set1_ps(query[one]), y = _mm512_set1_ps(query[two]);
        const __m512 u = _mm512_fmadd_ps(a, x, _mm512_mul_ps(b, y));
        const __m512 v = _mm512_fmsub_ps(a, y, _mm512_mul_ps(b, x));
        most = _mm512_max_ps(_mm512_abs_ps(u), most);
        most = _mm512_max_ps(_mm512_abs_ps(v), most);
        _mm512_storeu_ps(parts + place * LANES, u);
        _mm512_storeu_ps(parts + (place + (i < fast ? fast : slow)) * LANES, v);
    }
    for (int64_t i = 2 * pairs; i < index->dim; i++)
        rest = _mm512_fmadd_ps(load_some(basis, i * rank + first, some, kind),
                               _mm512_set1_ps(query[i]), rest);
    most = _mm512_max_ps(_mm512_abs_ps(rest), most);
    if (index->dim > 2 * pairs)
        _mm512_storeu_ps(parts + (turns->fast_width + 2 * slow) * LANES, rest);
    const __m512 per_step = _mm512_div_ps(_mm512_set1_ps(127.0f), most);
    for (int64_t i = 0; i < width; i += 4) {
        __m512i word = _mm512_setzero_si512();
        for (int j = 0; j < 4; j++) {
            const __m512 part = _mm512_loadu_ps(parts + (i + j) * LANES);
            const __m512i code = _mm512_add_epi32(rounded(_mm512_mul_ps(part, per_step)),
                                                  _mm512_set1_epi32(128));
            word = _mm512_or_si512(word, _mm512_sllv_epi32(code, _mm512_set1_epi32(8 * j)));
        }
        _mm512_storeu_si512(weights + i / 4 * padded + first, word);
    }
    const __m512 factor = _mm512_maskz_loadu_ps(some, index->factor + first);
    const __m512 step_of_both = _mm512_mul_ps(most, _mm512_set1_ps(1.0f / (127.0f * 127.0f)));
    _mm512_storeu_ps(factors + first, _mm512_mul_ps(step_of_both, factor));
}

VNNI INLINE void split_heads(const penstock_codes *index, const penstock_turns *turns,
                             const char *query, int64_t head, int64_t lanes, const split_t *split,
                             int kind) {
    const int64_t dim = index->dim, bytes = kind == FLOAT32 ? 4 : 2;
    float values[dim];
    for (int64_t lane = 0; lane < lanes; lane++) {
        const char *from = query + (head + lane) * dim * bytes;
        const char *basis = index->basis + (head + lane) / index->share * dim * index->rank * bytes;
        for (int64_t i = 0; i < dim; i++) values[i] = one_of(from, i, kind);
        for (int64_t first = 0; first < index->rank; first += LANES)
            split_vector(index, turns, values, basis, first,
                         split->weights + lane * split->quads * split->padded, split->padded,
                         split->factors + lane * split->padded, kind);
    }
}

/* u and v of `lanes` heads from `head` on. */
VNNI static void split_query(const penstock_codes *index, const penstock_turns *turns,
                             const char *query, int64_t head, int64_t lanes,
                             const split_t *split) {
    const int64_t kind = index->kind;
#define SPLIT(k) split_heads(index, turns, query, head, lanes, split, k)
    EACH_KIND(SPLIT)
}

/* Sums of `vectors` vectors of one head for AT_A_TIME rows of a table, on what is there. */
VNNI INLINE void add_turned(const int32_t *weights, int64_t quads, int64_t padded,
                            const int8_t *const *table, const int blocks, const int vectors,
                            __m512i total[AT_A_TIME][4]) {
    __m512i sum[AT_A_TIME][4]; /* in registers */
    UNROLLED for (int b = 0; b < blocks; b++)
        UNROLLED for (int v = 0; v < vectors; v++) sum[b][v] = total[b][v];
    for (int64_t i = 0; i < quads; i++, weights += padded) {
        UNROLLED for (int b = 0; b < blocks; b++) {
            int32_t four;
            memcpy(&four, table[b] + i * 4, 4);
            const __m512i turn = _mm512_set1_epi32(four);
            UNROLLED for (int v = 0; v < vectors; v++) {
                const __m512i word = _mm512_loadu_si512(weights + v * LANES);
                sum[b][v] = _mm512_dpbusd_epi32(sum[b][v], word, turn);
            }
        }
    }
    UNROLLED for (int b = 0; b < blocks; b++)
        UNROLLED for (int v = 0; v < vectors; v++) total[b][v] = sum[b][v];
}

/* Components of `vectors` vectors of one head, for a tile's blocks. out: [TILE][padded] */
VNNI INLINE void turn_some(const penstock_turns *turns, const int32_t *weights,
                           const float *factors, int64_t padded, int64_t first, int64_t count,
                           float *out, const int vectors) {
    const int64_t fast_quads = turns->fast_width / 4, tile = first / TILE;
    const int8_t *slow = turns->slow + tile * turns->slow_width;
    __m512i common[AT_A_TIME][4], total[AT_A_TIME][4];
    for (int v = 0; v < vectors; v++)
        common[0][v] = _mm512_set1_epi32(-128 * turns->slow_sums[tile]);
    add_turned(weights + fast_quads * padded, turns->slow_width / 4, padded, &slow, 1, vectors,
               common);
    for (int64_t done = 0; done < count; done += AT_A_TIME, out += AT_A_TIME * padded) {
        const int8_t *table[AT_A_TIME];
        for (int b = 0; b < AT_A_TIME; b++) {
            const int64_t block = first + (done + b < count ? done + b : count - 1);
            const __m512i less = _mm512_set1_epi32(-128 * turns->fast_sums[block]);
            table[b] = turns->fast + block * turns->fast_width;
            for (int v = 0; v < vectors; v++) total[b][v] = _mm512_add_epi32(common[0][v], less);
        }
        add_turned(weights, fast_quads, padded, table, AT_A_TIME, vectors, total);
        for (int b = 0; b < AT_A_TIME; b++)
            for (int v = 0; v < vectors; v++)
                _mm512_storeu_ps(out + b * padded + v * LANES,
                                 _mm512_mul_ps(_mm512_cvtepi32_ps(total[b][v]),
                                               _mm512_loadu_ps(factors + v * LANES)));
    }
}

/* Quantise one head's queries of a few blocks, with one scale, and put them into its lane. */
VNNI INLINE void put_lane(const float *components, int64_t padded, int64_t quads, int64_t count,
                          int8_t *packed, float *scale) {
    __m512 most = _mm512_set1_ps(1e-30f);
    for (int64_t i = 0; i < count * padded; i += LANES)
        most = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(components + i)), most);
    const float largest = _mm512_reduce_max_ps(most);
    const __m512 per_step = _mm512_set1_ps(127.0f / largest);
    for (int64_t b = 0; b < count; b++, components += padded, packed += quads * LANES * 4) {
        for (int64_t i = 0; i < padded; i += LANES) {
            const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(components + i), per_step);
            const __m128i codes = _mm512_cvtsepi32_epi8(rounded(value));
            int32_t fours[4];
            _mm_storeu_si128((__m128i *)fours, codes);
            const int64_t there = quads - i / 4 < 4 ? quads - i / 4 : 4;
            int8_t *to = packed + i * LANES;
            if (there == 4) {
                UNROLLED for (int j = 0; j < 4; j++) memcpy(to + j * LANES * 4, fours + j, 4);
            } else {
                for (int64_t j = 0; j < there; j++) memcpy(to + j * LANES * 4, fours + j, 4);
            }
        }
        scale[b * LANES] = largest / 127.0f;
    }
}

/* What is too much in the products of a packed query with codes that are taken to begin at 0. */
VNNI INLINE void sum_lanes(const int8_t *packed, int64_t quads, int bits, float *excess) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < quads; i++)
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1),
                                  _mm512_loadu_si512(packed + i * LANES * 4));
    const __m512 each = _mm512_set1_ps(bits == 8 ? 128.0f : 7.5f);
    _mm512_storeu_ps(excess, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), each));
}

/* Queries of `count` blocks, at most TILE, from `first` on, which TILE divides.
 * quads: of a packed query; what no lane or component fills must be 0 */
VNNI static void turn_tile(const penstock_turns *turns, const split_t *split, int64_t lanes,
                           int64_t first, int64_t count, int64_t quads, int bits,
                           const tile_t *tile) {
    const int64_t padded = split->padded;
    float components[TILE * padded];
    for (int64_t lane = 0; lane < lanes; lane++) {
        const int32_t *weights = split->weights + lane * split->quads * padded;
        const float *factors = split->factors + lane * padded;
        int64_t at = 0;
#define TURN_SOME(vectors) \
    for (; padded - at >= vectors * LANES; at += vectors * LANES) \
        turn_some(turns, weights + at, factors + at, padded, first, count, components + at, \
                  vectors);
        TURN_SOME(4)
        TURN_SOME(3)
        TURN_SOME(2)
        TURN_SOME(1)
        put_lane(components, padded, quads, count, tile->packed + lane * 4, tile->scale + lane);
    }
    for (int64_t b = 0; b < count; b++)
        sum_lanes(tile->packed + b * quads * LANES * 4, quads, bits, tile->excess + b * LANES);
}

#endif

#endif
