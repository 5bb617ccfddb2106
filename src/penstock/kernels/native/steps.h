/* Kernels that others are made of, and what is passed to those as one block of numbers. */

#ifndef PENSTOCK_STEPS_H
#define PENSTOCK_STEPS_H

#include "kernels.h"

/* What predicts one layer's query; the fields of `_Projection` in kernels/predicted_query.py. */
typedef struct {
    const char *norm; /* [width], of `kind` */
    const int8_t *weight; /* [heads * dim][width] */
    const float *scale; /* [heads * dim] */
    const float *bias; /* the same, or NULL */
    const char *query_norm; /* [dim], of `kind`, or NULL */
    double epsilon, query_epsilon;
    int64_t width, heads, dim, kind;
} penstock_projection;

/* What turns the keys of a block back, and queries as far; the fields of `_Turns` in
 * kernels/key_rotation.py. */
typedef struct {
    const int8_t *fast; /* [blocks][fast_width], 127 * cosines, then sines, then 0 */
    const int32_t *fast_sums; /* of each row */
    const int8_t *slow; /* [tiles][slow_width], the same, and 127 where some do not turn */
    const int32_t *slow_sums;
    const int32_t *order; /* [pairs], the fast ones first */
    int64_t fast_width, slow_width; /* divide by 4 */
    int64_t groups; /* of a block, divides by 4 and divides block_groups */
    int64_t pairs, fast_pairs, interleaved;
} penstock_turns;

/* Codes of one layer's keys; the fields of `_Codes` in kernels/group_selection.py. */
typedef struct {
    const char *basis; /* [kv_heads * dim][rank], of `kind` */
    const float *factor; /* [rank] */
    const uint8_t *codes; /* per row [blocks][group_tokens][block_groups][width] */
    int64_t row_bytes, kv_heads, share, dim, rank, kind;
    int64_t group_tokens, block_groups, width, bits;
    int64_t squares; /* as group_scores has them */
    const penstock_turns *turns; /* NULL: keys are as the model has them */
} penstock_codes;

/* Slots of one layer, and the file that fills them; the fields of `_Slots` in
 * kernels/group_fetch.py. */
typedef struct {
    int32_t *slot_of, *unit_in; /* as plan_fifo_fetch has them, like `heads` and the next two */
    int64_t *heads;
    const int64_t *stored; /* [batch][max_stored], unit of the file that a group is */
    int64_t max_units, num_slots, max_stored;
    int64_t slots_per_row; /* of the buffer, from a row to the next; 0: reads lie side by side */
    int64_t buffer, row_bytes, num_rows, run_units; /* as plan_reads has them */
    int64_t descriptor;
    double resident_factor; /* as select_groups has it, of the groups in `unit_in` */
} penstock_slots;

PENSTOCK_EXPORT void penstock_rms_norm(const char *x, const char *weight, float epsilon,
                                       int64_t rows, int64_t width, int64_t kind, char *out);
PENSTOCK_EXPORT void penstock_turn_query(const char *query, const char *weight, float epsilon,
                                         const char *cos, const char *sin, int64_t batch,
                                         int64_t heads, int64_t dim, int64_t kind, char *out);
PENSTOCK_EXPORT void penstock_low_rank(const char *x, int64_t stride, int64_t rows, int64_t parts,
                                       int64_t share, int64_t width, const char *basis,
                                       int64_t rank, int64_t kind, const float *factor, float *out);
PENSTOCK_EXPORT void penstock_int8_linear(const float *x, const int8_t *weight, const float *scale,
                                          int64_t rows, int64_t width, int64_t outputs, float *out);
PENSTOCK_EXPORT void penstock_group_scores(const uint8_t *codes, int64_t group_tokens,
                                           int64_t block_groups, int64_t width, int64_t bits,
                                           const float *queries, int64_t rank, int64_t heads,
                                           int64_t first, int64_t num_groups, int64_t squares,
                                           void *scratch, float *scores);
PENSTOCK_EXPORT void penstock_turned_scores(const penstock_codes *index, const uint8_t *codes,
                                            const char *query, int64_t first, int64_t num_groups,
                                            void *scratch, float *scores);
PENSTOCK_EXPORT void penstock_top_units(const float *scores, int64_t first, int64_t num_units,
                                        int64_t wanted, int32_t *scratch, int64_t *chosen);
PENSTOCK_EXPORT void penstock_select_groups(const penstock_codes *index, const char *query,
                                            int64_t batch, int64_t first, int64_t num_groups,
                                            int64_t wanted, const int32_t *resident,
                                            int64_t num_resident, float factor, char *scratch,
                                            int64_t *chosen);
PENSTOCK_EXPORT void penstock_plan_fifo_fetch(const int64_t *wanted, const uint8_t *valid,
                                              int64_t batch, int64_t width, int64_t max_units,
                                              int64_t num_slots, int32_t *slot_of,
                                              int32_t *unit_in, int64_t *heads, uint8_t *pinned,
                                              int64_t *slots, int64_t *rows, int64_t *units,
                                              int64_t *victims, int64_t *num_missing);
PENSTOCK_EXPORT void penstock_plan_reads(const int64_t *units, const int64_t *rows, int64_t count,
                                         int64_t max_units, int64_t row_bytes, int64_t num_rows,
                                         int64_t buffer, int64_t *reads, int64_t *num_reads);
PENSTOCK_EXPORT void penstock_fill_iocbs(const int64_t *offsets, const int64_t *lengths,
                                         const int64_t *addresses, int64_t count,
                                         int64_t descriptor, int64_t first_key, int64_t *iocbs,
                                         int64_t *found);

#endif
