/* What surrounds AES in storage/block_cipher.py: numbers of blocks, and masks over runs of bytes.
 *
 * Runs are taken as if they lay behind each other. A call has a piece of that, [begin, begin + size)
 * bytes; both and all lengths divide by 16. The twins are the numpy versions there. */

#include "kernels.h"

enum { BLOCK_BYTES = 16 };

/* The part of a run that is in a piece: where it begins in the run, and its length. */
typedef struct {
    int64_t start, length;
} part_t;

PLAIN part_t part_of(int64_t run_begin, int64_t run_length, int64_t begin, int64_t end) {
    const int64_t start = begin > run_begin ? begin - run_begin : 0;
    const int64_t stop = end < run_begin + run_length ? end - run_begin : run_length;
    return (part_t){start, stop > start ? stop - start : 0};
}

/* Number each block of a piece: 16 bytes, little-endian.
 *
 * firsts, lengths: int64 [runs], number of a run's first block, and its bytes
 * numbers: uint64 [size / 16][2] */
PENSTOCK_EXPORT void penstock_number_blocks(const int64_t *firsts, const int64_t *lengths,
                                            int64_t runs, int64_t begin, int64_t size,
                                            uint64_t *numbers) {
    for (int64_t run = 0, at = 0; run < runs && at < begin + size; at += lengths[run++]) {
        const part_t part = part_of(at, lengths[run], begin, begin + size);
        const uint64_t first = (uint64_t)(firsts[run] + part.start / BLOCK_BYTES);
        for (int64_t i = 0; i < part.length / BLOCK_BYTES; i++, numbers += 2) {
            numbers[0] = first + (uint64_t)i;
            numbers[1] = 0;
        }
    }
}

PLAIN void mask_some_any(const uint8_t *from, const uint8_t *masks, int64_t length, uint8_t *to) {
    for (int64_t i = 0; i < length; i++) to[i] = from[i] ^ masks[i];
}

WIDENED(void, mask_some, (const uint8_t *from, const uint8_t *masks, int64_t length, uint8_t *to),
        (from, masks, length, to))

/* Exclusive or of a piece and its masks, out of the runs into `work` or the other way.
 *
 * addresses, lengths: int64 [runs]; masks, work: uint8 [size] */
PENSTOCK_EXPORT void penstock_mask_runs(const int64_t *addresses, const int64_t *lengths,
                                        int64_t runs, int64_t begin, int64_t size,
                                        const uint8_t *masks, uint8_t *work, int64_t into_work) {
    for (int64_t run = 0, at = 0; run < runs && at < begin + size; at += lengths[run++]) {
        const part_t part = part_of(at, lengths[run], begin, begin + size);
        uint8_t *bytes = (uint8_t *)(intptr_t)addresses[run] + part.start;
        if (part.length == 0) continue;
        if (into_work) mask_some(bytes, masks, part.length, work);
        else mask_some(work, masks, part.length, bytes);
        masks += part.length, work += part.length;
    }
}
