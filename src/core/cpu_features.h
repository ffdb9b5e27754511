/* Features of the processor, if the operating system supports them. */
#ifndef TCHI_CPU_FEATURES_H
#define TCHI_CPU_FEATURES_H

#include <stdbool.h>
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

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
static inline bool tchi_cpu_has_crc32c(void)
{
    return __builtin_cpu_supports("sse4.2");
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
static inline bool tchi_cpu_has_crc32c(void)
{
#if defined(__aarch64__) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
    return false;
#endif
}
#endif

#endif
