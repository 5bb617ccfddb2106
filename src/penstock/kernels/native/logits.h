/* Exponentials of logits and their sums in plain loops; for key_scores.c and pool_scores.c. */

#ifndef PENSTOCK_LOGITS_H
#define PENSTOCK_LOGITS_H

#include "avx512.h"

#define LARGEST_EXPONENT 80.0f
#define LANES 16

PLAIN float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

PLAIN uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* A float's bits as an integer that orders like the float, and back. Bounds are taken of these:
 * compilers do not turn comparisons of floats, which may trap, into vector code. */
PLAIN int32_t ordered(uint32_t bits) {
    return (int32_t)bits ^ ((int32_t)bits >> 31 & 0x7fffffff);
}

PLAIN float disordered(int32_t key) {
    return as_float((uint32_t)(key ^ (key >> 31 & 0x7fffffff)));
}

#define LEAST_KEY ((int32_t)0xc2ae0000 ^ 0x7fffffff) /* -87 */
#define LARGEST_KEY 0x42a00000 /* 80 */

/* exp(x), 0 below -87, as of 80 above; within 2 units in the last place. */
PLAIN float exp_clamped(float x) {
    const int32_t key = ordered(as_bits(x)), alive = -(int32_t)(key >= LEAST_KEY);
    const int32_t less = key < LARGEST_KEY ? key : LARGEST_KEY;
    const float y = disordered(less > LEAST_KEY ? less : LEAST_KEY);
    const float n = (y * 1.44269504f + 12582912.0f) - 12582912.0f; /* to the nearest */
    const float r = y - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.9875691e-4f;
    p = p * r + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const float full = p * as_float((uint32_t)((int32_t)n + 127) << 23);
    return as_float(as_bits(full) & (uint32_t)alive);
}

/* Log of the summed exponentials; minus infinity for nothing but minus infinities. Always summed
 * in the same order. */
PLAIN float log_sum_any(const float *logits, int64_t count) {
    int32_t most_key = ordered(as_bits(-INFINITY));
    float sum[LANES] = {0.0f};
    for (int64_t i = 0; i < count; i++) {
        const int32_t key = ordered(as_bits(logits[i]));
        most_key = key > most_key ? key : most_key;
    }
    const float most = disordered(most_key);
    if (most == -INFINITY) return most;
    const int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) sum[j] += exp_clamped(logits[i + j] - most);
    for (int64_t i = whole; i < count; i++) sum[i - whole] += exp_clamped(logits[i] - most);
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) sum[j] += sum[j + half];
    return most + logf(sum[0]);
}

#endif
