/* From a hidden state to a predicted query, and from a query to the best groups: one call each.
 *
 * Between two layers the weights have swept the caches, so that what a small step costs is mostly
 * fetching its code and its caller's: few calls count for more than fast ones. The steps are those
 * of projection.c, int8_linear.c, group_scores.c and top_units.c; the twins are theirs. */

#include "avx512.h"
#include "steps.h"

#ifdef PENSTOCK_X86

AVX512 INLINE void widen(const char *x, int64_t count, float *out, int kind) {
    for (int64_t i = 0; i < count; i += 16) _mm512_storeu_ps(out + i, load(x, i, kind));
}

AVX512 INLINE void add_and_round(const float *x, const float *bias, int64_t rows, int64_t width,
                                 char *out, int kind) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += 16) {
            __m512 value = _mm512_loadu_ps(x + row * width + i);
            if (bias != NULL) value = _mm512_add_ps(value, _mm512_loadu_ps(bias + i));
            store(out, row * width + i, value, kind);
        }
}

AVX512 static void widen_rows(const char *x, int64_t count, float *out, int64_t kind) {
#define WIDEN(k) widen(x, count, out, k)
    EACH_KIND(WIDEN)
}

AVX512 static void round_rows(const float *x, const float *bias, int64_t rows, int64_t width,
                              char *out, int64_t kind) {
#define ROUND(k) add_and_round(x, bias, rows, width, out, k)
    EACH_KIND(ROUND)
}

/* What is in memory counts for more: a group that comes in has to be so much better. */
static void favour(float *scores, const int32_t *resident, int64_t num_resident, int64_t num_groups,
                   float factor) {
    for (int64_t i = 0; i < num_resident; i++)
        if (resident[i] >= 0 && resident[i] < num_groups) scores[resident[i]] *= factor;
}

#endif

/* Norm, int8 projection, norm per head (where it has weights) and rotary embedding.
 *
 * hidden: [batch][width] of `kind`; cos, sin: [batch][dim]; out: [batch][heads][dim]
 * scratch: batch * 8 * (width + heads * dim) bytes, aligned to 4 */
PENSTOCK_EXPORT void penstock_predict_query(const penstock_projection *layer, const char *hidden,
                                            const char *cos, const char *sin, int64_t batch,
                                            char *scratch, char *out) {
#ifdef PENSTOCK_X86
    const int64_t width = layer->width, outputs = layer->heads * layer->dim;
    float *wide = (float *)scratch, *product = wide + batch * width;
    char *normed = (char *)(product + batch * outputs);
    char *rounded = normed + batch * width * 4;
    penstock_rms_norm(hidden, layer->norm, (float)layer->epsilon, batch, width, layer->kind,
                      normed);
    widen_rows(normed, batch * width, wide, layer->kind);
    penstock_int8_linear(wide, layer->weight, layer->scale, batch, width, outputs, product);
    round_rows(product, layer->bias, batch, outputs, rounded, layer->kind);
    penstock_turn_query(rounded, layer->query_norm, (float)layer->query_epsilon, cos, sin, batch,
                        layer->heads, layer->dim, layer->kind, out);
#else
    (void)layer, (void)hidden, (void)cos, (void)sin, (void)batch, (void)scratch, (void)out;
#endif
}

/* The best groups of each row, ascending: low-rank query, scores, the highest of them.
 *
 * query: [batch][heads][dim] of `kind`; groups [first, num_groups) may be chosen
 * wanted: 1 .. num_groups - first
 * resident: int32 [batch][num_resident], groups whose scores are multiplied by `factor`, -1 for
 *     none; not looked at where that is 1
 * scratch: 4 * heads * rank + 8 * num_groups bytes, then what group_scores or turned_scores asks
 *     for
 * chosen: int64 [batch][wanted] */
PENSTOCK_EXPORT void penstock_select_groups(const penstock_codes *index, const char *query,
                                            int64_t batch, int64_t first, int64_t num_groups,
                                            int64_t wanted, const int32_t *resident,
                                            int64_t num_resident, float factor, char *scratch,
                                            int64_t *chosen) {
#ifdef PENSTOCK_X86
    const int64_t heads = index->kv_heads * index->share;
    const int64_t query_bytes = heads * index->dim * (index->kind == 0 ? 4 : 2);
    float *low_rank = (float *)scratch, *scores = low_rank + heads * index->rank;
    int32_t *keys = (int32_t *)(scores + num_groups);
    const int64_t favoured = factor == 1 ? 0 : num_resident;
    for (int64_t row = 0; row < batch; row++) {
        const char *asked = query + row * query_bytes;
        const uint8_t *codes = index->codes + row * index->row_bytes;
        if (index->turns != NULL) {
            penstock_turned_scores(index, codes, asked, 0, num_groups, keys + num_groups, scores);
        } else {
            penstock_low_rank(asked, heads * index->dim, 1, index->kv_heads, index->share,
                              index->dim, index->basis, index->rank, index->kind, index->factor,
                              low_rank);
            penstock_group_scores(codes, index->group_tokens, index->block_groups, index->width,
                                  index->bits, low_rank, index->rank, heads, 0, num_groups,
                                  index->squares, keys + num_groups, scores);
        }
        favour(scores, resident + row * favoured, favoured, num_groups, factor);
        penstock_top_units(scores, first, num_groups, wanted, keys, chosen + row * wanted);
    }
#else
    (void)index, (void)query, (void)batch, (void)first, (void)num_groups, (void)wanted;
    (void)resident, (void)num_resident, (void)factor, (void)scratch, (void)chosen;
#endif
}
