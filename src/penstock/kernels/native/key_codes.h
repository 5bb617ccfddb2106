/* How quantised keys lie in memory; for key_codes.c and key_scores.c. */

#ifndef PENSTOCK_KEY_CODES_H
#define PENSTOCK_KEY_CODES_H

#include "logits.h"

#define CHUNK 64 /* channels: one register of codes */
#define TILE 16 /* units scored together */
#define PARALLEL_UNITS 1024 /* fewer are not worth waking threads */

/* How KeyCodes lies in memory, in the order of its `_table`.
 * codes: [units][kv_heads][head_bytes]; 8 bits: each 128 more than it means; 4 bits: of every
 *     started 64 channels the first half in the low nibbles, the other half in the high ones
 * steps: [units][kv_heads][groups]; 8 bits: the step, float; 4 bits: of every started 64 channels
 *     two groups, each its step (bfloat16, the low half) and its least value (the high half) */
struct layout {
    uint8_t *codes;
    uint32_t *steps;
    int64_t kv_heads, head_dim, head_bytes, groups, bits, kind;
};

/* Threads for so many units; 0 threads: as many as OpenMP has. */
static inline int64_t parts_of(int64_t count, int64_t threads) {
    if (count < PARALLEL_UNITS) return 1;
    const int64_t parts = threads > 0 ? threads : penstock_num_threads(INT32_MAX);
    return parts < count / TILE ? parts : count / TILE;
}

#endif
