/* How the eigensolver's loops are compiled for wider vectors than the rest of the library. A kernel is one function
 * marked TCHI_KERNEL and one wrapper per instruction set that calls it: inlining recompiles the same text with the
 * wrapper's instructions, so there is a single text to read and to test. */
#ifndef TCHI_CPU_EIGH_TARGET_H
#define TCHI_CPU_EIGH_TARGET_H

#include "cpu_features.h"

#define TCHI_KERNEL static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define TCHI_AVX2 __attribute__((target("avx2,fma")))
#if defined(__clang__)
#define TCHI_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#else
#define TCHI_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")))
#endif
#else
#define TCHI_AVX2
#define TCHI_AVX512
#endif

typedef enum tchi_isa { TCHI_ISA_PLAIN, TCHI_ISA_AVX2, TCHI_ISA_AVX512, TCHI_ISA_COUNT } tchi_isa;

static inline tchi_isa tchi_cpu_isa(void)
{
    if (tchi_cpu_has_avx512()) {
        return TCHI_ISA_AVX512;
    }
    return tchi_cpu_has_avx2() ? TCHI_ISA_AVX2 : TCHI_ISA_PLAIN;
}

#endif
