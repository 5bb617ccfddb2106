/* A layer's fetch, from its query to the system call, for the reason that query_path.c gives.
 *
 * The steps are those of query_path.c and fetch.c; the twin is a `RetrievalLayer` whose index,
 * slots or file do them one after the other. */

#define _GNU_SOURCE
#include "steps.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_SUBMITTERS = 4, LEAST_REQUESTS = 8 };

static int64_t now(void) { /* as Python's perf_counter_ns */
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t submit_some(int64_t context, int64_t count, int64_t *requests) {
    const int64_t taken = (int64_t)syscall(SYS_io_submit, context, count, requests);
    return taken > 0 ? taken : 0; /* the submission of the rest meets the error */
}

/* Requests cost a few microseconds each: threads that have nothing else to do take their share.
 * Those that were not taken are moved behind those that were. */
static int64_t submit(int64_t context, int64_t count, int64_t *requests) {
    const int64_t parts = count < 2 * LEAST_REQUESTS ? 1 : penstock_num_threads(MOST_SUBMITTERS);
    int64_t taken[MOST_SUBMITTERS], done = 0;
#pragma omp parallel for schedule(static, 1) num_threads(parts) if (parts > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part * count / parts, end = (part + 1) * count / parts;
        taken[part] = submit_some(context, end - first, requests + first);
    }
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part * count / parts;
        for (int64_t i = 0; i < taken[part]; i++, done++) {
            const int64_t moved = requests[done];
            requests[done] = requests[first + i];
            requests[first + i] = moved;
        }
    }
    return done;
}
#else
static int64_t now(void) {
    return 0;
}

static int64_t submit(int64_t context, int64_t count, int64_t *requests) {
    (void)context, (void)count, (void)requests;
    return 0;
}
#endif

/* The number in steps.h of out's lists, for [batch][wanted] groups. */
enum { CHOSEN, SLOTS, ROWS, UNITS, VICTIMS, STORED, PLACES, READS, IOCBS = READS + 3 };

/* Select groups, take slots for the missing ones, and read them.
 *
 * query, batch, first, num_groups, wanted: as select_groups has them
 * context: of native AIO; room: most requests that it takes now
 * first_key: of the first request
 * scratch: as select_groups has it, and at least to->num_slots bytes
 * out: int64 [8 + 19 * batch * wanted]. First missing groups (-1: more than there are slots, and
 *     nothing after that), requests (-1, -2: as plan_reads has it, -1 too where they
 *     are more than the buffer takes side by side, and nothing after that),
 *     requests taken, what fill_iocbs found, and the clock before they were submitted, in ns;
 *     then, from 8 on, lists of batch * wanted in the order above: chosen groups, their slots; of
 *     missing ones rows, groups, slots, units in the file, rows of the buffer; then reads and
 *     requests */
PENSTOCK_EXPORT void penstock_fetch_groups(const penstock_codes *index, const penstock_slots *to,
                                           const char *query, int64_t batch, int64_t first,
                                           int64_t num_groups, int64_t wanted, int64_t context,
                                           int64_t room, int64_t first_key, char *scratch,
                                           int64_t *out) {
    const int64_t size = batch * wanted;
    int64_t *lists = out + 8;
    int64_t *rows = lists + ROWS * size, *units = lists + UNITS * size;
    int64_t *victims = lists + VICTIMS * size, *stored = lists + STORED * size;
    int64_t *places = lists + PLACES * size, *reads = lists + READS * size;
    int64_t *iocbs = lists + IOCBS * size;
    memset(out, 0, 8 * sizeof(int64_t));
    penstock_select_groups(index, query, batch, first, num_groups, wanted, to->unit_in,
                           to->num_slots, (float)to->resident_factor, scratch, lists);
    penstock_plan_fifo_fetch(lists, NULL, batch, wanted, to->max_units, to->num_slots, to->slot_of,
                             to->unit_in, to->heads, (uint8_t *)scratch, lists + SLOTS * size,
                             rows, units, victims, out);
    const int64_t missing = out[0];
    if (missing <= 0) return;
    for (int64_t i = 0; i < missing; i++) {
        stored[i] = to->stored[rows[i] * to->max_stored + units[i]];
        places[i] = to->slots_per_row ? rows[i] * to->slots_per_row + victims[i] : i;
    }
    if (!to->slots_per_row && missing > to->num_rows) {
        out[1] = -1;
        return;
    }
    penstock_plan_reads(stored, places, missing, to->run_units, to->row_bytes, to->num_rows,
                        to->buffer, reads, out + 1);
    if (out[1] <= 0) return;
    penstock_fill_iocbs(reads, reads + missing, reads + 2 * missing, out[1], to->descriptor,
                        first_key, iocbs, out + 3);
    out[5] = now();
    if (room > 0) out[2] = submit(context, out[1] < room ? out[1] : room, iocbs + 8 * out[1]);
}
