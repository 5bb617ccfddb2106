/* What a selection misses, and which slots give way, cluster by cluster (DynaKV, section 6.2).
 * The twin: SlotTable.look_up, ClusterAligned.victims and SlotTable.admit. */

#include "kernels.h"

#define MOST_SIZE 0xffff
#define CLOCK_BITS 24
#define CLUSTER_BITS 20
#define OLDEST 255

struct clusters {
    const void *owners; /* [rows][stride], those that wait as -1 - cluster */
    int64_t item, stride, base;
    const int32_t *sizes, *updated; /* [rows][size_stride], [rows][updated_stride] */
    int64_t size_stride, updated_stride, now, reserved, prefers_small;
};

static int64_t cluster_of(const struct clusters *c, int64_t row, int64_t unit) {
    const int64_t at = row * c->stride + unit - c->base;
    const int64_t raw =
        c->item == 2 ? ((const int16_t *)c->owners)[at] : ((const int32_t *)c->owners)[at];
    return raw < 0 ? -1 - raw : raw;
}

static int64_t age_of(const struct clusters *c, int64_t row, int64_t cluster) {
    const int64_t updated = c->updated[row * c->updated_stride + cluster];
    const int64_t age = c->now - updated;
    return updated == 0 || age > OLDEST ? OLDEST : age < 0 ? 0 : age;
}

/* Ages below this one are of updated clusters that are retained. */
static int64_t retained_below(const struct clusters *c, int64_t row, const int32_t *held,
                              int64_t slots) {
    int64_t counts[OLDEST + 1] = {0}, sum = 0;
    for (int64_t i = 0; i < slots; i++)
        if (held[i] >= 0) counts[age_of(c, row, cluster_of(c, row, held[i]))]++;
    for (int64_t age = 0; age < OLDEST; age++)
        if ((sum += counts[age]) > c->reserved) return age;
    return OLDEST;
}

static int before(const int64_t *keys, int64_t a, int64_t b) {
    return keys[a] < keys[b] || (keys[a] == keys[b] && a < b);
}

/* Bring the `count` slots with the smallest keys to the front of `slots`. */
static void select_smallest(int64_t *slots, const int64_t *keys, int64_t number, int64_t count) {
    int64_t low = 0, high = number - 1;
    while (low < high) {
        const int64_t pivot = slots[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (before(keys, slots[i], pivot)) i++;
            while (before(keys, pivot, slots[j])) j--;
            if (i <= j) {
                const int64_t kept = slots[i];
                slots[i++] = slots[j];
                slots[j--] = kept;
            }
        }
        if (count - 1 <= j) high = j;
        else if (count - 1 >= i) low = i;
        else return;
    }
}

/* keys and order: [slots]; wanted_at [slots] as the policy keeps it; pinned [slots].
 * Victims, ascending. */
static void choose(const struct clusters *c, int64_t row, const int32_t *held, int64_t slots,
                   const uint8_t *pinned, int32_t *wanted_at, int64_t clock, int64_t count,
                   int64_t *keys, int64_t *order, int64_t *victims) {
    const int64_t young = retained_below(c, row, held, slots);
    int64_t free = 0;
    for (int64_t i = 0; i < slots; i++) {
        if (pinned[i]) continue;
        order[free++] = i;
        if (held[i] < 0) {
            keys[i] = -1;
            continue;
        }
        const int64_t cluster = cluster_of(c, row, held[i]);
        int64_t size = c->prefers_small ? c->sizes[row * c->size_stride + cluster] : 0;
        if (size > MOST_SIZE) size = MOST_SIZE;
        keys[i] = (MOST_SIZE - size) << (CLOCK_BITS + CLUSTER_BITS);
        keys[i] |= ((int64_t)wanted_at[i] & ((1 << CLOCK_BITS) - 1)) << CLUSTER_BITS;
        keys[i] |= cluster & ((1 << CLUSTER_BITS) - 1);
        if (age_of(c, row, cluster) < young) keys[i] |= (int64_t)1 << (16 + CLOCK_BITS + CLUSTER_BITS);
    }
    select_smallest(order, keys, free, count);
    for (int64_t i = 0; i < count; i++) keys[order[i]] = INT64_MIN;
    for (int64_t i = 0, found = 0; found < count; i++)
        if (!pinned[i] && keys[i] == INT64_MIN) {
            victims[found++] = i;
            wanted_at[i] = (int32_t)clock;
        }
}

/* As penstock_plan_fifo_fetch; numbers: item, stride, base, size_stride, updated_stride, now,
 * reserved, prefers_small, clock. scratch: int64 [3 * slots], and pinned behind it, [slots]. */
PENSTOCK_EXPORT void penstock_plan_cluster_fetch(
    const int64_t *wanted, const uint8_t *valid, int64_t batch, int64_t width, int64_t max_units,
    int64_t num_slots, int32_t *slot_of, int32_t *unit_in, const void *owners,
    const int32_t *sizes, const int32_t *updated, const int64_t *numbers, int32_t *wanted_at,
    int64_t *scratch, int64_t *slots, int64_t *rows, int64_t *units, int64_t *victims,
    int64_t *found) {
    const struct clusters c = {owners,     numbers[0], numbers[1], numbers[2], sizes,     updated,
                               numbers[3], numbers[4], numbers[5], numbers[6], numbers[7]};
    const int64_t clock = numbers[8];
    uint8_t *pinned = (uint8_t *)(scratch + 3 * num_slots);
    int64_t missing = 0;
    for (int64_t row = 0; row < batch; row++) {
        int32_t *where = slot_of + row * max_units, *held = unit_in + row * num_slots;
        const int64_t first = missing;
        int64_t hits = 0;
        memset(pinned, 0, (size_t)num_slots);
        for (int64_t i = row * width; i < (row + 1) * width; i++) {
            slots[i] = where[wanted[i]];
            if (slots[i] >= 0) {
                hits += !pinned[slots[i]];
                pinned[slots[i]] = 1;
                wanted_at[row * num_slots + slots[i]] = (int32_t)clock;
            } else if (valid == NULL || valid[i]) {
                rows[missing] = row;
                units[missing++] = wanted[i];
            }
        }
        const int64_t count = missing - first;
        if (count == 0) continue;
        if (count > num_slots - hits) {
            *found = -1;
            return;
        }
        choose(&c, row, held, num_slots, pinned, wanted_at + row * num_slots, clock, count, scratch,
               scratch + num_slots, victims + first);
        for (int64_t i = first; i < missing; i++) {
            const int64_t slot = victims[i];
            if (held[slot] >= 0) where[held[slot]] = -1;
            held[slot] = (int32_t)units[i];
            where[units[i]] = (int32_t)slot;
        }
        for (int64_t i = row * width; i < (row + 1) * width; i++)
            if (slots[i] < 0 && (valid == NULL || valid[i])) slots[i] = where[wanted[i]];
    }
    *found = missing;
}
