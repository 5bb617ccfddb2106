/* Bookkeeping of a fetch: which slots missing units take, which reads merge, how they ended. The
 * twins are the numpy versions in engine/fetch_plan.py, storage/coalesce.py and native_aio.py. */

#include "steps.h"

/* Look one selection up, take slots for what is missing by a clock, and admit it.
 *
 * wanted: int64 [batch][width]; valid: bool [batch][width] or NULL
 * slot_of: int32 [batch][max_units], -1 where a unit is absent; unit_in: its inverse, [batch][num_slots]
 * heads: int64 [batch], where each clock hand stands; moved past the last slot taken
 * pinned: bool [num_slots], scratch
 * slots: int64 [batch][width], of every wanted unit
 * rows, units, victims: int64 [batch * width], of the missing ones
 * num_missing: their number; -1 when a row has fewer free slots than it needs (nothing of that row
 *     is changed) */
PENSTOCK_EXPORT void penstock_plan_fifo_fetch(const int64_t *wanted, const uint8_t *valid,
                                              int64_t batch, int64_t width, int64_t max_units,
                                              int64_t num_slots, int32_t *slot_of,
                                              int32_t *unit_in, int64_t *heads, uint8_t *pinned,
                                              int64_t *slots, int64_t *rows, int64_t *units,
                                              int64_t *victims, int64_t *num_missing) {
    int64_t missing = 0;
    for (int64_t row = 0; row < batch; row++) {
        int64_t needed = 0, free = num_slots;
        memset(pinned, 0, num_slots);
        for (int64_t i = 0; i < width; i++) {
            const int64_t slot = slot_of[wanted[i]];
            slots[i] = slot;
            if (slot >= 0) free -= !pinned[slot], pinned[slot] = 1;
            else needed += valid == NULL || valid[i];
        }
        if (needed > free) {
            *num_missing = -1;
            return;
        }
        int64_t slot = heads[row];
        for (int64_t i = 0; i < width; i++) {
            if (slots[i] >= 0 || (valid != NULL && !valid[i])) continue;
            while (pinned[slot]) slot = slot + 1 == num_slots ? 0 : slot + 1;
            const int64_t unit = wanted[i];
            if (unit_in[slot] >= 0) slot_of[unit_in[slot]] = -1;
            unit_in[slot] = (int32_t)unit;
            slot_of[unit] = (int32_t)slot;
            slots[i] = victims[missing] = slot;
            rows[missing] = row;
            units[missing++] = unit;
            slot = slot + 1 == num_slots ? 0 : slot + 1;
        }
        heads[row] = slot;
        wanted += width, slots += width, slot_of += max_units, unit_in += num_slots;
        if (valid != NULL) valid += width;
    }
    *num_missing = missing;
}

/* Merge transfers of units that follow each other, in the file and in the buffer.
 *
 * units, rows: int64 [count], units ascending; max_units: most in one run
 * first_units, first_rows, num_units: int64 [count], of the runs
 * num_runs: how many */
PENSTOCK_EXPORT void penstock_coalesce(const int64_t *units, const int64_t *rows, int64_t count,
                                       int64_t max_units, int64_t *first_units,
                                       int64_t *first_rows, int64_t *num_units,
                                       int64_t *num_runs) {
    int64_t runs = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t size = runs > 0 ? num_units[runs - 1] : 0;
        if (size > 0 && size < max_units && units[i] == first_units[runs - 1] + size &&
            rows[i] == first_rows[runs - 1] + size) {
            num_units[runs - 1]++;
        } else {
            first_units[runs] = units[i];
            first_rows[runs] = rows[i];
            num_units[runs++] = 1;
        }
    }
    *num_runs = runs;
}

/* Reads of units into rows of a buffer, neighbours merged: offsets, lengths and addresses.
 *
 * units, rows: int64 [count]
 * max_units: most in one read; num_rows: of the buffer, at `buffer`
 * reads: int64 [3][count]
 * num_reads: how many; -1 where units do not ascend, -2 where a row is outside the buffer */
PENSTOCK_EXPORT void penstock_plan_reads(const int64_t *units, const int64_t *rows, int64_t count,
                                         int64_t max_units, int64_t row_bytes, int64_t num_rows,
                                         int64_t buffer, int64_t *reads, int64_t *num_reads) {
    int64_t *offsets = reads, *lengths = reads + count, *addresses = reads + 2 * count;
    int64_t made = 0, size = 0; /* of the newest read, in units */
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= num_rows) {
            *num_reads = -2;
            return;
        }
        if (i > 0 && units[i] < units[i - 1]) {
            *num_reads = -1;
            return;
        }
        if (i > 0 && size < max_units && units[i] == units[i - 1] + 1 &&
            rows[i] == rows[i - 1] + 1) {
            size++;
            lengths[made - 1] += row_bytes;
            continue;
        }
        offsets[made] = units[i] * row_bytes;
        lengths[made] = row_bytes;
        addresses[made++] = buffer + rows[i] * row_bytes;
        size = 1;
    }
    *num_reads = made;
}

/* Requests of native AIO for a batch of reads, and pointers to them.
 *
 * offsets, lengths, addresses: int64 [count]; first_key: of the first, the others follow
 * iocbs: int64 [count][8], then the pointers, int64 [count]
 * found: int64 [2]: bytes in all; every offset, length and address or-ed together */
PENSTOCK_EXPORT void penstock_fill_iocbs(const int64_t *offsets, const int64_t *lengths,
                                         const int64_t *addresses, int64_t count,
                                         int64_t descriptor, int64_t first_key, int64_t *iocbs,
                                         int64_t *found) {
    int64_t bytes = 0, bits = 0, *iocb = iocbs;
    for (int64_t i = 0; i < count; i++, iocb += 8) {
        iocb[0] = first_key + i;
        iocb[1] = 0;
        iocb[2] = descriptor << 32;
        iocb[3] = addresses[i];
        iocb[4] = lengths[i];
        iocb[5] = offsets[i];
        iocb[6] = iocb[7] = 0;
        iocbs[8 * count + i] = (int64_t)(intptr_t)iocb;
        bytes += lengths[i];
        bits |= offsets[i] | lengths[i] | addresses[i];
    }
    found[0] = bytes;
    found[1] = bits;
}

/* How one batch of reads fared among the events that came.
 *
 * events: int64 [num_events][4]: key, iocb, result, unused; key = batch number << 32 | read
 * iocbs: int64 [reads][8], whose column 4 is the length asked for
 * found: int64 [2]: events of this batch; the first that failed or came up short, or -1 */
PENSTOCK_EXPORT void penstock_check_events(const int64_t *events, int64_t num_events,
                                           int64_t number, const int64_t *iocbs, int64_t *found) {
    found[0] = 0;
    found[1] = -1;
    for (int64_t i = 0; i < num_events; i++, events += 4) {
        if (events[0] >> 32 != number) continue;
        found[0]++;
        if (found[1] < 0 && events[2] != iocbs[(events[0] & 0xffffffff) * 8 + 4]) found[1] = i;
    }
}

/* Write one token of every row into a window: keys and values side by side, then show it.
 *
 * keys, values: [batch][part_bytes]; tokens, mask: the token's place in the first row
 * token_stride, mask_stride: bytes from one row to the next; mask_bytes: of one number */
PENSTOCK_EXPORT void penstock_put_token(const char *keys, const char *values, int64_t batch,
                                        int64_t part_bytes, char *tokens, int64_t token_stride,
                                        char *mask, int64_t mask_stride, int64_t mask_bytes) {
    for (int64_t row = 0; row < batch; row++) {
        char *token = tokens + row * token_stride;
        memcpy(token, keys + row * part_bytes, part_bytes);
        memcpy(token + part_bytes, values + row * part_bytes, part_bytes);
        memset(mask + row * mask_stride, 0, mask_bytes); /* zero in every dtype */
    }
}

/* Copy runs of bytes that lie side by side to where each goes. The twin is kernels/copy_runs.py.
 *
 * lengths, targets: int64 [count]; targets are addresses */
PENSTOCK_EXPORT void penstock_copy_runs(const char *source, const int64_t *lengths,
                                        const int64_t *targets, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        memcpy((void *)(intptr_t)targets[i], source, lengths[i]);
        source += lengths[i];
    }
}
