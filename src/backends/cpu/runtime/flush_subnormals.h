/* Numbers too small for the normal range, treated as zero by the calling thread for a while. The inverse of a band
 * matrix falls off exponentially away from the diagonal, straight into that range, where arithmetic is a hundred
 * times slower and the digits mean nothing. */
#ifndef TCHI_CPU_FLUSH_SUBNORMALS_H
#define TCHI_CPU_FLUSH_SUBNORMALS_H

#if defined(__SSE2__)
#include <xmmintrin.h>

/* Returns what restore_subnormals wants back. */
static inline unsigned flush_subnormals(void)
{
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040u); /* flush results to zero, and read operands as zero */
    return before;
}

static inline void restore_subnormals(unsigned before)
{
    _mm_setcsr(before);
}
#elif defined(__aarch64__)
#include <stdint.h>

/* Bit 24 of FPCR flushes results and reads operands as zero, both at once. The memory clobbers keep loads and stores,
 * and so the arithmetic between them, on their side of the change. */
static inline unsigned flush_subnormals(void)
{
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before)::"memory");
    __asm__ volatile("msr fpcr, %0" ::"r"(before | (uint64_t)1 << 24) : "memory");
    return (unsigned)before; /* the upper half is reserved, and zero */
}

static inline void restore_subnormals(unsigned before)
{
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)before) : "memory");
}
#endif

#endif
