/* What the compiled kernels share. Plain C11; vector paths are chosen at run time. */

#ifndef PENSTOCK_KERNELS_H
#define PENSTOCK_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define PENSTOCK_EXPORT __declspec(dllexport)
#else
#define PENSTOCK_EXPORT __attribute__((visibility("default")))
#endif

#ifdef _OPENMP
#include <omp.h>
#endif

/* A plain loop compiled once more for AVX-512, where the system chooses by itself. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define PENSTOCK_VECTORISED __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define PENSTOCK_VECTORISED
#endif

/* Threads to use: torch's own, because it sets how many the process's OpenMP has. */
static inline int64_t penstock_num_threads(int64_t most) {
#ifdef _OPENMP
    const int64_t threads = omp_get_max_threads();
    return threads < most ? threads : most;
#else
    (void)most;
    return 1;
#endif
}

#if defined(__x86_64__) && defined(__GNUC__)
#define PENSTOCK_X86 1
#include <immintrin.h>
static inline int penstock_has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
static inline int penstock_has_vnni(void) {
    return penstock_has_avx512() && __builtin_cpu_supports("avx512vnni");
}
#endif

#endif
