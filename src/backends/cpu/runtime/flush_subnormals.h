/* Flushes subnormal numbers to zero in the calling thread. The inverse of a band matrix decays exponentially away from
 * the diagonal into that range, where arithmetic is a hundred times slower and the digits are meaningless. */
#ifndef TCHI_CPU_FLUSH_SUBNORMALS_H
#define TCHI_CPU_FLUSH_SUBNORMALS_H

#if defined(__SSE2__)
#include <xmmintrin.h>

/* Returns the state for restore_subnormals. */
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

/* Bit 24 of FPCR flushes results and operands. The memory clobbers keep loads and stores, and so the arithmetic between
 * them, on their side of the change. */
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
