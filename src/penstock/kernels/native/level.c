/* Which of the kernels may be used: what the machine has, and what compiled.limit() allows. */

#include "kernels.h"

PENSTOCK_EXPORT int64_t penstock_limit = LEVEL_VNNI;

PENSTOCK_EXPORT int64_t penstock_level(void) {
    int64_t has = LEVEL_PLAIN;
#ifdef PENSTOCK_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        has = __builtin_cpu_supports("avx512vnni") ? LEVEL_VNNI : LEVEL_AVX512;
#endif
    return has < penstock_limit ? has : penstock_limit;
}
