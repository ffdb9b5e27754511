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
#else
static inline unsigned flush_subnormals(void)
{
    return 0;
}

static inline void restore_subnormals(unsigned before)
{
    (void)before;
}
#endif

#endif
