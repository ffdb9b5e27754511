/* Copies of matrices for wgmma, which requires 16-bit elements and rows aligned to 16 bytes: half types unchanged, and
 * float32 as float16, which keeps 11 bits like TF32. A power of two scales a matrix's largest element to between 2^14
 * and 2^15: elements down to 2^-29 of the largest keep their 11 bits, and no error exceeds 2^-40 of the largest. */
#ifndef TCHI_CUDA_FP16_COPY_H
#define TCHI_CUDA_FP16_COPY_H

#include "backends/cuda/cuda.h"
#include "core/arith.h"

TCH_BEGIN_DECLS

/* largest[b] = the bits of the largest absolute value of matrix b of float32; NaN propagates. */
tch_status tchi_cuda_largest_bits(const tchi_cuda_state *state, const tch_matrices *x, uint32_t *largest);

/* to = x; float32 becomes float16 times the power of two from largest[b], half types are unchanged. Rows of `to` are
 * aligned to 16 bytes. */
tch_status tchi_cuda_fp16_copy(const tchi_cuda_state *state, const tch_matrices *x, const uint32_t *largest,
                               const tch_matrices *to);

TCH_END_DECLS

/* Descriptor of such a copy at `data`. */
static inline tch_matrices tchi_cuda_fp16_copy_of(void *data, const tch_matrices *m)
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

/* The exponent of that power of two: 0 if all elements are zero or one is not finite, which the copy preserves. */
static __device__ __forceinline__ int tchi_fp16_power(uint32_t largest)
{
    int exponent = (int)(largest >> 23);
    int power = largest == 0 || exponent == 255 ? 0 : 141 - exponent;
    return power < 126 ? power : 126;
}

/* The exponent that scales the largest element to between 1 and 2 instead. */
static __device__ __forceinline__ int tchi_fp16_unit_power(uint32_t largest)
{
    return max(tchi_fp16_power(largest) - 14, -126);
}

static __device__ __forceinline__ float tchi_fp16_scale(uint32_t largest)
{
    return tchi_power_of_two(tchi_fp16_power(largest));
}
#endif

#endif
