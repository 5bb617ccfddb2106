/* A linear layer with 4-bit weights, a scale and an offset a group of columns, for a few tokens.
 *
 * Torch's operator turns each code into a float, which takes 1.6 times as long. Here codes are
 * multiplied as bytes. Inputs are rounded to 15 bits of the largest of 32, as two bytes each. */

#include "avx512.h"

#ifdef PENSTOCK_X86

enum { COLUMNS = 32, BLOCK_ROWS = 64, QUADS = COLUMNS / 4, MOST_CODE = 127 * 256 + 127,
       MOST_TOKENS = 16 };

/* A token's inputs: 4 columns a word, high bytes and low ones, and a scale and a sum for 32. */
typedef struct {
    int32_t *high, *low;
    float *scale, *sum;
} inputs_t;

static inputs_t inputs_of(char *workspace, int64_t width) {
    inputs_t in;
    in.high = (int32_t *)workspace;
    in.low = in.high + width / 4;
    in.scale = (float *)(in.low + width / 4);
    in.sum = in.scale + width / COLUMNS;
    return in;
}

VNNI static void round_inputs(const char *x, int64_t first, int64_t width, int kind,
                              inputs_t in) {
    for (int64_t group = 0; group < width / COLUMNS; group++) {
        const int64_t at = first + group * COLUMNS;
        __m512 part[2];
        for (int j = 0; j < 2; j++) part[j] = load(x, at + 16 * j, kind);
        const float most = _mm512_reduce_max_ps(
            _mm512_max_ps(_mm512_abs_ps(part[0]), _mm512_abs_ps(part[1])));
        const float turned = most > 0 ? MOST_CODE / most : 0;
        __m512i codes[2], total = _mm512_setzero_si512();
        for (int j = 0; j < 2; j++) {
            codes[j] = _mm512_cvtps_epi32(_mm512_mul_ps(part[j], _mm512_set1_ps(turned)));
            total = _mm512_add_epi32(total, codes[j]);
            const __m512i high =
                _mm512_srai_epi32(_mm512_add_epi32(codes[j], _mm512_set1_epi32(128)), 8);
            const __m512i low = _mm512_sub_epi32(codes[j], _mm512_slli_epi32(high, 8));
            const int64_t word = group * QUADS + 4 * j;
            _mm_storeu_si128((__m128i *)(in.high + word), _mm512_cvtepi32_epi8(high));
            _mm_storeu_si128((__m128i *)(in.low + word), _mm512_cvtepi32_epi8(low));
        }
        /* What is no number stays none. */
        const float odd = 0 * _mm512_reduce_add_ps(_mm512_add_ps(part[0], part[1]));
        in.scale[group] = most / MOST_CODE + odd;
        in.sum[group] = in.scale[group] * (float)_mm512_reduce_add_epi32(total);
    }
}

/* 32 rows of two times 4 columns as words of 4 columns. Vector v has rows 4v to 4v + 3 and 16
 * more, of the first columns in its lower half. */
VNNI INLINE void words_of(const uint8_t *codes, __m512i word[4]) {
    __m512i column[4];
    for (int k = 0; k < 4; k++)
        column[k] = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(codes + 32 * k))),
            _mm256_loadu_si256((const __m256i *)(codes + 32 * (k + 4))), 1);
    const __m512i a = _mm512_unpacklo_epi8(column[0], column[1]),
                  b = _mm512_unpackhi_epi8(column[0], column[1]),
                  c = _mm512_unpacklo_epi8(column[2], column[3]),
                  d = _mm512_unpackhi_epi8(column[2], column[3]);
    word[0] = _mm512_unpacklo_epi16(a, c);
    word[1] = _mm512_unpackhi_epi16(a, c);
    word[2] = _mm512_unpacklo_epi16(b, d);
    word[3] = _mm512_unpackhi_epi16(b, d);
}

VNNI INLINE __m512i both(const int32_t *words) {
    return _mm512_mask_set1_epi32(_mm512_set1_epi32(words[0]), 0xff00, words[1]);
}

/* Scales and offsets of a vector's rows, in both halves. */
VNNI INLINE __m512i pairs_of(const uint16_t *pairs, int v) {
    const __m128i first = _mm_loadu_si128((const __m128i *)(pairs + 8 * v)),
                  later = _mm_loadu_si128((const __m128i *)(pairs + 8 * v + 32));
    const __m256i rows = _mm256_inserti128_si256(_mm256_castsi128_si256(first), later, 1);
    return _mm512_broadcast_i64x4(rows);
}

/* Scales of rows, and what a code of 0 is worth. */
VNNI INLINE void split_pairs(__m512i pair, __m512 *scale, __m512 *least) {
    *scale = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    const __m512 offset =
        _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000)));
    *least = _mm512_fnmadd_ps(*scale, _mm512_set1_ps(8), offset);
}

/* Sums of 64 rows, of which the halves of a vector are parts. */
VNNI INLINE void put_rows(const __m512 total[2][4], char *out, int kind) {
    float row[BLOCK_ROWS];
    for (int half = 0; half < 2; half++)
        for (int v = 0; v < 4; v++) {
            const __m256 sum = _mm256_add_ps(_mm512_castps512_ps256(total[half][v]),
                                             _mm512_extractf32x8_ps(total[half][v], 1));
            _mm_storeu_ps(row + 32 * half + 4 * v, _mm256_castps256_ps128(sum));
            _mm_storeu_ps(row + 32 * half + 4 * v + 16, _mm256_extractf128_ps(sum, 1));
        }
    for (int j = 0; j < 4; j++) store(out, 16 * j, _mm512_loadu_ps(row + 16 * j), kind);
}

/* 64 rows for a token. Halves of a vector have different columns, and their offsets once. */
VNNI static void block_of(const uint8_t *codes, const uint16_t *scales, int64_t rows,
                          int64_t width, int64_t group, inputs_t in, char *out, int kind) {
    const __m512i low_half = _mm512_set1_epi8(15);
    __m512 total[2][4];
    for (int half = 0; half < 2; half++)
        for (int v = 0; v < 4; v++) total[half][v] = _mm512_setzero_ps();
    for (int64_t part = 0; part < width / COLUMNS; part++) {
        __m512i high[2][4], low[2][4];
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < 4; v++) high[half][v] = low[half][v] = _mm512_setzero_si512();
        for (int64_t quad = part * QUADS; quad < (part + 1) * QUADS; quad += 2) {
            __m512i word[4];
            words_of(codes + 128 * quad, word);
            const __m512i upper = both(in.high + quad), lower = both(in.low + quad);
            for (int v = 0; v < 4; v++) {
                const __m512i code = _mm512_and_si512(word[v], low_half);
                high[0][v] = _mm512_dpbusd_epi32(high[0][v], code, upper);
                low[0][v] = _mm512_dpbusd_epi32(low[0][v], code, lower);
                const __m512i other = _mm512_and_si512(_mm512_srli_epi16(word[v], 4), low_half);
                high[1][v] = _mm512_dpbusd_epi32(high[1][v], other, upper);
                low[1][v] = _mm512_dpbusd_epi32(low[1][v], other, lower);
            }
        }
        const uint16_t *pairs = scales + 2 * (part * COLUMNS / group * rows);
        const __m512 worth = _mm512_set1_ps(in.scale[part]);
        const __m512 sum = _mm512_maskz_mov_ps(0x00ff, _mm512_set1_ps(in.sum[part]));
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < 4; v++) {
                __m512 scale, least;
                split_pairs(pairs_of(pairs + 64 * half, v), &scale, &least);
                const __m512i product =
                    _mm512_add_epi32(_mm512_slli_epi32(high[half][v], 8), low[half][v]);
                total[half][v] = _mm512_fmadd_ps(
                    _mm512_mul_ps(_mm512_cvtepi32_ps(product), worth), scale, total[half][v]);
                total[half][v] = _mm512_fmadd_ps(sum, least, total[half][v]);
            }
    }
    put_rows(total, out, kind);
}

/* Unpacked codes of 64 rows and 32 columns, with their scales. Words of the two halves alternate,
 * so that one 8-byte broadcast of a token's inputs serves a vector. */
typedef struct {
    __m512i code[QUADS / 2][2][4];
    __m512 scale[2][4], least[2][4];
} part_t;

VNNI INLINE void unpack_part(const uint8_t *codes, const uint16_t *pairs, part_t *part) {
    const __m512i low_half = _mm512_set1_epi8(15);
    const __m512i alternate =
        _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    for (int two = 0; two < QUADS / 2; two++) {
        __m512i word[4];
        words_of(codes + 256 * two, word);
        for (int v = 0; v < 4; v++) {
            const __m512i both_codes = _mm512_permutexvar_epi32(alternate, word[v]);
            part->code[two][0][v] = _mm512_and_si512(both_codes, low_half);
            part->code[two][1][v] = _mm512_and_si512(_mm512_srli_epi16(both_codes, 4), low_half);
        }
    }
    for (int half = 0; half < 2; half++)
        for (int v = 0; v < 4; v++) {
            const __m512i pair =
                _mm512_permutexvar_epi32(alternate, pairs_of(pairs + 64 * half, v));
            split_pairs(pair, &part->scale[half][v], &part->least[half][v]);
        }
}

VNNI INLINE void add_bytes(const part_t *part, const int32_t *const words[], int tokens,
                           __m512i sum[][2][4]) {
    for (int two = 0; two < QUADS / 2; two++) {
        __m512i input[2];
        for (int token = 0; token < tokens; token++) {
            int64_t bytes;
            memcpy(&bytes, words[token] + 2 * two, sizeof bytes);
            input[token] = _mm512_set1_epi64(bytes);
        }
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < 4; v++)
                for (int token = 0; token < tokens; token++)
                    sum[token][half][v] = _mm512_dpbusd_epi32(
                        sum[token][half][v], part->code[two][half][v], input[token]);
    }
}

/* One or two tokens, a constant where this is inlined; operations as in `block_of`. */
VNNI INLINE void add_part(const part_t *part, const inputs_t *in, int64_t number, int tokens,
                          __m512 total[][2][4]) {
    __m512i sum[2][2][4];
    const int32_t *high[2], *low[2];
    for (int token = 0; token < tokens; token++) {
        high[token] = in[token].high + number * QUADS;
        low[token] = in[token].low + number * QUADS;
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < 4; v++) sum[token][half][v] = _mm512_setzero_si512();
    }
    add_bytes(part, high, tokens, sum);
    for (int token = 0; token < tokens; token++)
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < 4; v++)
                sum[token][half][v] = _mm512_slli_epi32(sum[token][half][v], 8);
    add_bytes(part, low, tokens, sum);
    for (int token = 0; token < tokens; token++) {
        const __m512 worth = _mm512_set1_ps(in[token].scale[number]);
        const __m512 once = _mm512_maskz_mov_ps(0x5555, _mm512_set1_ps(in[token].sum[number]));
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < 4; v++) {
                const __m512 product =
                    _mm512_mul_ps(_mm512_cvtepi32_ps(sum[token][half][v]), worth);
                __m512 *to = &total[token][half][v];
                *to = _mm512_fmadd_ps(product, part->scale[half][v], *to);
                *to = _mm512_fmadd_ps(once, part->least[half][v], *to);
            }
    }
}

/* 64 rows for several tokens, whose codes are unpacked once; each says what `block_of` says. */
VNNI static void blocks_of(const uint8_t *codes, const uint16_t *scales, int64_t rows,
                           int64_t width, int64_t group, const inputs_t *in, int64_t tokens,
                           char *out, int64_t out_bytes, int kind) {
    const __m512i halves = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m512 total[MOST_TOKENS][2][4];
    memset(total, 0, sizeof total[0] * tokens);
    for (int64_t number = 0; number < width / COLUMNS; number++) {
        part_t part;
        unpack_part(codes + 128 * QUADS * number,
                    scales + 2 * (number * COLUMNS / group * rows), &part);
        int64_t token = 0;
        for (; token + 2 <= tokens; token += 2)
            add_part(&part, in + token, number, 2, total + token);
        if (token < tokens) add_part(&part, in + token, number, 1, total + token);
    }
    for (int64_t token = 0; token < tokens; token++, out += out_bytes) {
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < 4; v++)
                total[token][half][v] = _mm512_permutexvar_ps(halves, total[token][half][v]);
        put_rows(total[token], out, kind);
    }
}

#endif

/* x: of `kind` [tokens][width]; codes: [rows / 64][width][32], torch's interleaving of 64 rows;
 * scales: bfloat16 [width / group][rows][2]; out: of `kind` [tokens][rows]
 * workspace: 9 / 4 * width bytes for each token */
PENSTOCK_EXPORT void penstock_int4_groups(const char *x, const uint8_t *codes,
                                          const uint16_t *scales, int64_t kind, int64_t tokens,
                                          int64_t width, int64_t rows, int64_t group,
                                          char *workspace, char *out) {
#ifdef PENSTOCK_X86
    const int64_t blocks = rows / BLOCK_ROWS, parts = penstock_num_threads(blocks);
    const int64_t room = 9 * width / 4, size = kind == FLOAT32 ? 4 : 2;
    for (int64_t token = 0; token < tokens; token++)
        round_inputs(x, token * width, width, (int)kind, inputs_of(workspace + token * room, width));
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t first = 0; first < tokens; first += MOST_TOKENS) {
            const int64_t count = tokens - first < MOST_TOKENS ? tokens - first : MOST_TOKENS;
            inputs_t in[MOST_TOKENS];
            for (int64_t token = 0; token < count; token++)
                in[token] = inputs_of(workspace + (first + token) * room, width);
            for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts;
                 block++) {
                const int64_t row = block * BLOCK_ROWS;
                const uint8_t *from = codes + row * width / 2;
                char *to = out + (first * rows + row) * size;
                if (count == 1)
                    block_of(from, scales + 2 * row, rows, width, group, in[0], to, (int)kind);
                else
                    blocks_of(from, scales + 2 * row, rows, width, group, in, count, to,
                              rows * size, (int)kind);
            }
        }
#else
    (void)x, (void)codes, (void)scales, (void)kind, (void)tokens, (void)width, (void)rows;
    (void)group, (void)workspace, (void)out;
#endif
}
