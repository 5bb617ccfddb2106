/* A linear layer with int8 weights for a few rows. The twin of Int8Linear.twin().
 *
 * Bound by the weights' bytes, which are half of a bfloat16 layer's. */

#include "avx512.h"

#ifdef PENSTOCK_X86

AVX512 INLINE float dot_int8(const int8_t *weight, const float *x, int64_t width) {
    __m512 sum[4];
    for (int j = 0; j < 4; j++) sum[j] = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 64)
        for (int j = 0; j < 4; j++) {
            const __m128i bytes = _mm_loadu_si128((const __m128i *)(weight + i + 16 * j));
            const __m512 w = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
            sum[j] = _mm512_fmadd_ps(w, _mm512_loadu_ps(x + i + 16 * j), sum[j]);
        }
    sum[0] = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
    return _mm512_reduce_add_ps(sum[0]);
}

AVX512 static void multiply(const int8_t *weight, const float *scale, const float *x, int64_t rows,
                            int64_t width, int64_t first, int64_t end, int64_t outputs,
                            float *out) {
    for (int64_t n = first; n < end; n++)
        for (int64_t row = 0; row < rows; row++)
            out[row * outputs + n] = scale[n] * dot_int8(weight + n * width, x + row * width, width);
}

#endif

/* x: float [rows][width]; weight: int8 [outputs][width]; scale: float [outputs]; width divides by 64
 * out: float [rows][outputs] */
PENSTOCK_EXPORT void penstock_int8_linear(const float *x, const int8_t *weight, const float *scale,
                                          int64_t rows, int64_t width, int64_t outputs,
                                          float *out) {
#ifdef PENSTOCK_X86
    const int64_t parts = penstock_num_threads(outputs);
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int64_t part = 0; part < parts; part++)
        multiply(weight, scale, x, rows, width, outputs * part / parts,
                 outputs * (part + 1) / parts, outputs, out);
#else
    (void)x, (void)weight, (void)scale, (void)rows, (void)width, (void)outputs, (void)out;
#endif
}
