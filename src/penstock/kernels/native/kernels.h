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
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#endif

/* The names and numbers of LEVELS in compiled.py. */
enum { LEVEL_OFF, LEVEL_PLAIN, LEVEL_AVX512, LEVEL_VNNI };

/* What may be used: no more than the machine has, and no more than the process is limited to. */
PENSTOCK_EXPORT int64_t penstock_level(void);

#define PLAIN static inline __attribute__((always_inline))

/* A plain loop, NAME_any, compiled once more for wider vectors, of which NAME takes the widest. */
#ifdef PENSTOCK_X86
#define WIDENED(RESULT, NAME, PARAMETERS, ARGUMENTS)                                               \
    AVX512 static RESULT NAME##_avx512 PARAMETERS { return NAME##_any ARGUMENTS; }                \
    AVX2 static RESULT NAME##_avx2 PARAMETERS { return NAME##_any ARGUMENTS; }                    \
    static RESULT NAME##_default PARAMETERS { return NAME##_any ARGUMENTS; }                      \
    static RESULT NAME PARAMETERS {                                                               \
        if (penstock_level() >= LEVEL_AVX512) return NAME##_avx512 ARGUMENTS;                     \
        if (__builtin_cpu_supports("avx2")) return NAME##_avx2 ARGUMENTS;                         \
        return NAME##_default ARGUMENTS;                                                          \
    }
#else
#define WIDENED(RESULT, NAME, PARAMETERS, ARGUMENTS)                                               \
    static RESULT NAME PARAMETERS { return NAME##_any ARGUMENTS; }
#endif

#endif
