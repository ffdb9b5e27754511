/* Small arithmetic on sizes, for every folder and for both languages. */
#ifndef TCHI_ARITH_H
#define TCHI_ARITH_H

#include <stdint.h>

#ifdef __CUDACC__
#define TCHI_ARITH static __host__ __device__ inline
#else
#define TCHI_ARITH static inline
#endif

TCHI_ARITH int64_t tchi_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

TCHI_ARITH int64_t tchi_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* For a >= 0 and b > 0. */
TCHI_ARITH int64_t tchi_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* The next multiple of `unit`. */
TCHI_ARITH int64_t tchi_round_up(int64_t a, int64_t unit)
{
    return tchi_ceil_div(a, unit) * unit;
}

#endif
