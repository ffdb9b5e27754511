/* Copies of matrices for wgmma, which needs 16-bit elements and rows aligned to 16 bytes: half types as they are, and
 * float32 as float16, which keeps 11 bits like TF32. A power of two brings a matrix's largest element to between 2^14
 * and 2^15: elements down to 2^-29 of the largest keep their 11 bits, and none is wrong by more than 2^-40 of the
 * largest. */
#ifndef TCHI_CUDA_NARROW_H
#define TCHI_CUDA_NARROW_H

#include "backends/cuda/cuda.h"
#include "core/arith.h"

TCH_BEGIN_DECLS

/* largest[b] = the bits of the largest absolute value of matrix b of float32; NaN counts as more than anything. */
tch_status tchi_cuda_largest_bits(const tchi_cuda_state *state, const tch_matrices *x, uint32_t *largest);

/* to = x; float32 becomes float16 times the power of two that largest[b] gives, a half type stays what it is. The rows
 * of `to` are aligned to 16 bytes. */
tch_status tchi_cuda_narrow(const tchi_cuda_state *state, const tch_matrices *x, const uint32_t *largest,
                            const tch_matrices *to);

TCH_END_DECLS

/* The shape of such a copy at `data`. */
static inline tch_matrices tchi_cuda_narrow_copy(void *data, const tch_matrices *m)
{
    tch_matrices copy = *m;
    copy.data = data;
    copy.type = m->type == TCH_SCALAR_F32 ? TCH_SCALAR_F16 : m->type;
    copy.ld = tchi_round_up(m->cols, 8);
    copy.stride = copy.rows * copy.ld;
    return copy;
}

#ifdef __cplusplus
/* 2^power, for -126 to 127. */
static __device__ __forceinline__ float tchi_power_of_two(int power)
{
    return __uint_as_float((uint32_t)(power + 127) << 23);
}

/* The exponent of that power of two: 0 where all are zeros or one is not finite, which the copy preserves. */
static __device__ __forceinline__ int tchi_narrow_power(uint32_t largest)
{
    int exponent = (int)(largest >> 23);
    int power = largest == 0 || exponent == 255 ? 0 : 141 - exponent;
    return power < 126 ? power : 126;
}

static __device__ __forceinline__ float tchi_narrow_scale(uint32_t largest)
{
    return tchi_power_of_two(tchi_narrow_power(largest));
}
#endif

#endif
