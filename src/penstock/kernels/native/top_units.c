/* The highest-scoring units in ascending order of unit. The twin of top_units_twin().
 *
 * The score of the last one chosen is found by bisection on the scores' bits: a few passes that
 * compare and count, which compilers turn into vector code, instead of one that moves things. */

#include "kernels.h"

/* A float's bits as an integer that orders like the float. */
static inline int32_t key_of(float score) {
    int32_t bits;
    memcpy(&bits, &score, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

PLAIN int64_t count_above_any(const int32_t *keys, int64_t count, int32_t limit) {
    int32_t above = 0;
    for (int64_t i = 0; i < count; i++) above += keys[i] > limit;
    return above;
}

WIDENED(int64_t, count_above, (const int32_t *keys, int64_t count, int32_t limit),
        (keys, count, limit))

PLAIN void make_keys_any(const float *scores, int64_t count, int32_t *keys, int32_t *least,
                         int32_t *most) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < count; i++) {
        const int32_t key = key_of(scores[i]);
        keys[i] = key;
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    *least = low;
    *most = high;
}

WIDENED(void, make_keys,
        (const float *scores, int64_t count, int32_t *keys, int32_t *least, int32_t *most),
        (scores, count, keys, least, most))

/* scores: float [num_units]; units before `first` are not chosen
 * wanted: 1 .. num_units - first
 * scratch: int32 [num_units]
 * chosen: int64 [wanted] */
PENSTOCK_EXPORT void penstock_top_units(const float *scores, int64_t first, int64_t num_units,
                                        int64_t wanted, int32_t *scratch, int64_t *chosen) {
    const int64_t count = num_units - first;
    int32_t low, high; /* keys in [low, high] are still undecided */
    make_keys(scores + first, count, scratch, &low, &high);
    int64_t above = 0; /* keys larger than `high` */
    while (low < high) {
        const int32_t middle = (int32_t)(((int64_t)low + high) >> 1); /* rounded down */
        const int64_t more = count_above(scratch, count, middle);
        if (more > wanted) low = middle + 1;
        else high = middle, above = more;
        if (above == wanted) break;
    }
    int64_t equal = wanted - above, found = 0; /* of those that are just `high` */
    for (int64_t i = 0; found < wanted; i++)
        if (scratch[i] > high || (scratch[i] == high && equal-- > 0)) chosen[found++] = first + i;
}
