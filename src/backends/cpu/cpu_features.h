/* What the processor this process runs on can do, asked of the processor and of the operating system's support. */
#ifndef TCHI_CPU_FEATURES_H
#define TCHI_CPU_FEATURES_H

#include <stdbool.h>

#if defined(__x86_64__) || defined(__i386__)
static inline bool tchi_cpu_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
static inline bool tchi_cpu_has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
#else
static inline bool tchi_cpu_has_avx2(void)
{
    return false;
}
static inline bool tchi_cpu_has_avx512(void)
{
    return false;
}
#endif

#endif
