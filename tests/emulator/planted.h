/* Tiny kernels for test_emulator.c, correct ones and ones with a planted fault. */
#ifndef EMULATOR_PLANTED_H
#define EMULATOR_PLANTED_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { PLANTED_THREADS = 64 };

/* out[i] = in[63 - i], or with a missing barrier; and out[i] = in[i - 1], which is correct without one if threads run
 * in ascending order. */
cudaError_t planted_reverse(const float *in, float *out, int barrier);
cudaError_t planted_shift(const float *in, float *out, int barrier);

/* Writes `beyond` elements past the end of a shared array, static or dynamic. */
cudaError_t planted_overrun(int beyond, int dynamic);
/* Reads `beyond` elements past the end of a device allocation. */
cudaError_t planted_read(const float *in, float *out, int beyond);

/* C (16 by 8) = A (16 by 16) B (16 by 8), bfloat16, by one mma; `swapped` exchanges two fragments of A. */
cudaError_t planted_mma(const uint16_t *a, const uint16_t *b, float *c, int swapped);

/* Barriers that only some threads reach. */
enum planted_barrier { TWO_PLACES, BEHIND_SHUFFLE, HALF_A_NAMED_ONE, NO_ARRIVAL, NEVER_CREATED };
cudaError_t planted_barriers(enum planted_barrier fault);

/* 64 elements by asynchronous copies; without the wait they have not arrived. */
cudaError_t planted_copy(const float *in, float *out, int waits);

/* Each block of a cluster of four writes the rank of the next one. */
cudaError_t planted_cluster(int *out);

/* More threads than the launch bounds allow. */
cudaError_t planted_bounds(int threads);

#ifdef __cplusplus
}
#endif

#endif
