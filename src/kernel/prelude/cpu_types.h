/* Keywords of CUDA C++ and CUDA's vector types. */
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 0
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __shared__ thread_local /* a block stays on one thread of the CPU */
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))
#ifndef __restrict__
#define __restrict__ __restrict
#endif

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#define TCHI_VECTORS(T, name, a2, a4)                                                                                  \
    struct name##1                                                                                                     \
    {                                                                                                                  \
        T x;                                                                                                           \
    };                                                                                                                 \
    struct alignas(a2) name##2                                                                                         \
    {                                                                                                                  \
        T x, y;                                                                                                        \
    };                                                                                                                 \
    struct name##3                                                                                                     \
    {                                                                                                                  \
        T x, y, z;                                                                                                     \
    };                                                                                                                 \
    struct alignas(a4) name##4                                                                                         \
    {                                                                                                                  \
        T x, y, z, w;                                                                                                  \
    };                                                                                                                 \
    static inline constexpr name##1 make_##name##1(T x)                                                                \
    {                                                                                                                  \
        return {x};                                                                                                    \
    }                                                                                                                  \
    static inline constexpr name##2 make_##name##2(T x, T y)                                                           \
    {                                                                                                                  \
        return {x, y};                                                                                                 \
    }                                                                                                                  \
    static inline constexpr name##3 make_##name##3(T x, T y, T z)                                                      \
    {                                                                                                                  \
        return {x, y, z};                                                                                              \
    }                                                                                                                  \
    static inline constexpr name##4 make_##name##4(T x, T y, T z, T w)                                                 \
    {                                                                                                                  \
        return {x, y, z, w};                                                                                           \
    }
TCHI_VECTORS(signed char, char, 2, 4)
TCHI_VECTORS(unsigned char, uchar, 2, 4)
TCHI_VECTORS(short, short, 4, 8)
TCHI_VECTORS(unsigned short, ushort, 4, 8)
TCHI_VECTORS(int, int, 8, 16)
TCHI_VECTORS(unsigned int, uint, 8, 16)
TCHI_VECTORS(long long, longlong, 16, 16)
TCHI_VECTORS(unsigned long long, ulonglong, 16, 16)
TCHI_VECTORS(float, float, 8, 16)
TCHI_VECTORS(double, double, 16, 16)
#undef TCHI_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z)
    {
    }
    constexpr operator uint3() const
    {
        return {x, y, z};
    }
};

/* A function of the prelude that is one statement, in one line. */
#define TCHI_FUNCTION(R, name, parameters, ...)                                                                        \
    static inline R name parameters                                                                                    \
    {                                                                                                                  \
        __VA_ARGS__;                                                                                                   \
    }
