/* Codes of keys by unit, made from the keys as they are written. The twin of put_twin(). */

#include "key_codes.h"

#define SMALLEST 1e-30f

enum { OF_FLOAT32 = 0, OF_BFLOAT16 = 1, OF_FLOAT16 = 2 };

typedef uint16_t __attribute__((aligned(1), may_alias)) half_bits;
typedef uint32_t __attribute__((aligned(1), may_alias)) full_bits;

/* To the nearest bfloat16, ties to even, as the high half of a float's bits. */
PLAIN uint32_t to_bfloat16(float value) {
    const uint32_t bits = as_bits(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
}

PLAIN void widen(const char *from, int64_t count, int64_t kind, float *to) {
    if (kind == OF_FLOAT32) {
        memcpy(to, from, count * 4);
    } else if (kind == OF_BFLOAT16) {
        const half_bits *half = (const half_bits *)from;
        for (int64_t i = 0; i < count; i++) to[i] = as_float((uint32_t)half[i] << 16);
    } else {
        const half_bits *half = (const half_bits *)from;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t size = (uint32_t)(half[i] & 0x7fff) << 13;
            const uint32_t sign = (uint32_t)(half[i] & 0x8000) << 16;
            const uint32_t finite = as_bits(as_float(size) * 0x1p112f);
            to[i] = as_float(sign | ((half[i] & 0x7c00) == 0x7c00 ? size | 0x7f800000u : finite));
        }
    }
}

/* Largest absolute value's bits; integers order floats, and not a number comes out on top. */
PLAIN int32_t largest_bits(const float *values, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t bits = (int32_t)(as_bits(values[i]) & 0x7fffffff);
        most = bits > most ? bits : most;
    }
    return most;
}

PLAIN uint32_t byte_codes(const float *key, int64_t dim, float largest, uint8_t *codes) {
    const float step = largest / 127.0f > SMALLEST ? largest / 127.0f : SMALLEST;
    const float inverse = 1.0f / step;
    for (int64_t i = 0; i < dim; i++) codes[i] = (uint8_t)((int32_t)rintf(key[i] * inverse) + 128);
    return as_bits(step);
}

PLAIN uint32_t group_codes(const float *key, int64_t count, uint8_t *codes) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < count; i++) {
        const int32_t value = ordered(as_bits(key[i]));
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    const float most = disordered(high);
    const uint32_t least_bits = to_bfloat16(disordered(low));
    const float least = as_float(least_bits), wide = (most - least) / 15.0f;
    const uint32_t step_bits = to_bfloat16(wide > SMALLEST ? wide : SMALLEST);
    const float inverse = 1.0f / as_float(step_bits);
    for (int64_t i = 0; i < count; i++) {
        int32_t code = (int32_t)rintf((key[i] - least) * inverse);
        code = code > 0 ? code : 0;
        codes[i] = (uint8_t)(code < 15 ? code : 15);
    }
    return step_bits >> 16 | least_bits;
}

/* One unit's codes; 1 if a key is not finite, else 0. */
PLAIN int64_t put_unit_any(const struct layout *k, int64_t unit, const char *raw) {
    const int64_t dim = k->head_dim, bytes = k->kind == OF_FLOAT32 ? 4 : 2;
    float key[dim];
    uint8_t halves[CHUNK];
    int64_t bad = 0;
    for (int64_t head = 0; head < k->kv_heads; head++) {
        uint8_t *codes = k->codes + (unit * k->kv_heads + head) * k->head_bytes;
        uint32_t *steps = k->steps + (unit * k->kv_heads + head) * k->groups;
        widen(raw + head * dim * bytes, dim, k->kind, key);
        const int32_t largest = largest_bits(key, dim);
        if (largest >= 0x7f800000) {
            bad = 1;
        } else if (k->bits == 8) {
            *steps = byte_codes(key, dim, as_float((uint32_t)largest), codes);
        } else {
            for (int64_t first = 0; first < dim; first += CHUNK, codes += CHUNK / 2) {
                const int64_t half = (dim - first < CHUNK ? dim - first : CHUNK) / 2;
                *steps++ = group_codes(key + first, half, halves);
                *steps++ = group_codes(key + first + half, half, halves + half);
                for (int64_t i = 0; i < half; i++)
                    codes[i] = (uint8_t)(halves[i] | halves[half + i] << 4);
            }
        }
    }
    return bad;
}

WIDENED(int64_t, put_unit, (const struct layout *k, int64_t unit, const char *raw), (k, unit, raw))

/* Make the codes of distinct units.
 *
 * units: int64 [count]
 * raw: [count] rows, `row_bytes` apart, each beginning with [kv_heads][head_dim] of `kind`
 * bad: set to the number of units whose keys are not finite; those codes are left as they were */
PENSTOCK_EXPORT void penstock_put_key_codes(const struct layout *k, const int64_t *units,
                                            const char *raw, int64_t row_bytes, int64_t count,
                                            int64_t threads, int64_t *bad) {
    const int64_t parts = parts_of(count, threads);
    int64_t found = 0;
    (void)parts;
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1) reduction(+ : found)
    for (int64_t i = 0; i < count; i++) found += put_unit(k, units[i], raw + i * row_bytes);
    *bad = found;
}
