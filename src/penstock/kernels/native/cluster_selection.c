/* Tokens of the clusters that rank highest (DynaKV). The twins are in cluster_selection.py. */

#include "kernels.h"

/* The cluster of a token; those that wait for a split are stored as -1 - cluster. */
static inline int64_t owner_of(const void *owners, int64_t item, int64_t at) {
    const int64_t raw = item == 2 ? ((const int16_t *)owners)[at] : ((const int32_t *)owners)[at];
    return raw < 0 ? -1 - raw : raw;
}

/* counts [rows][clusters]: of the tokens first[row] .. end. */
PENSTOCK_EXPORT void penstock_cluster_counts(const void *owners, int64_t item, int64_t rows, int64_t stride,
                                    const int64_t *first, int64_t end, int64_t clusters,
                                    int64_t *counts) {
    memset(counts, 0, 8 * rows * clusters);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = first[row]; i < end; i++)
            counts[row * clusters + owner_of(owners, item, row * stride + i)]++;
}

/* ids and valid [rows][wanted], zeroed by the caller; whole [rows][clusters] likewise. */
PENSTOCK_EXPORT void penstock_cluster_tokens(const void *owners, int64_t item, int64_t rows, int64_t stride,
                                    const int64_t *first, int64_t end, int64_t clusters,
                                    const int64_t *rank, const int64_t *counts, int64_t base,
                                    int64_t wanted, int64_t *ids, uint8_t *valid, uint8_t *whole) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t *order = rank + row * clusters, *count = counts + row * clusters;
        uint8_t *taken = whole + row * clusters;
        int64_t room = wanted, part = -1;
        for (int64_t i = 0; i < clusters; i++) {
            const int64_t size = count[order[i]];
            if (size == 0) continue;
            if (size > room) {
                part = order[i];
                break;
            }
            taken[order[i]] = 1;
            room -= size;
        }
        int64_t *id = ids + row * wanted, found = 0;
        for (int64_t i = first[row]; i < end; i++) {
            const int64_t owner = owner_of(owners, item, row * stride + i);
            if (!taken[owner]) {
                if (owner != part || room == 0) continue;
                room--;
            }
            id[found++] = base + i;
        }
        memset(valid + row * wanted, 1, found);
    }
}
