/* What the two Gram kernels of float32 for sm_90 share: tiles of 128 by 128, k-tiles of 32 numbers of each row, which
 * the tensor memory accelerator copies as twice as many numbers of 16 bits, and the way they go round through the
 * stages in shared memory. */
#ifndef TCHI_CUDA_SAMPLE_GRAM_CUH
#define TCHI_CUDA_SAMPLE_GRAM_CUH

#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/tensor_map.h"
#include "sample_norms.h"

#define TCHI_GRAM_TILE 128
#define TCHI_GRAM_DEPTH 32
#define TCHI_GRAM_KTILE_BYTES (TCHI_GRAM_TILE * TCHI_GRAM_DEPTH * 4)

/* Where a walk over the stages stands, and the parity of that phase of its full barrier. */
typedef struct tchi_gram_place {
    int stage, parity;
} tchi_gram_place;

template <int stages> static __device__ __forceinline__ void tchi_gram_step(tchi_gram_place *at)
{
    at->stage++;
    if (at->stage == stages) {
        at->stage = 0;
        at->parity ^= 1;
    }
}

/* --- host -------------------------------------------------------------------------------------------------------- */

static inline tch_matrices tchi_gram_described(const tch_matrices *m)
{
    tch_matrices halves = *m;
    halves.type = TCH_SCALAR_BF16;
    halves.cols *= 2;
    halves.ld *= 2;
    halves.stride *= 2;
    return halves;
}

static inline bool tchi_gram_takes(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g)
{
    tch_matrices inputs = tchi_gram_described(a);
    tch_matrices gradients = tchi_gram_described(g);
    int64_t tiles = tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TCHI_GRAM_TILE));
    return state->device.major == 9 && a->type == TCH_SCALAR_F32 && tiles < ((int64_t)1 << 28) / a->batch &&
           a->cols < (1 << 28) && g->cols < (1 << 28) && tchi_cuda_tensor_map_takes(&inputs) &&
           tchi_cuda_tensor_map_takes(&gradients);
}

static inline tch_status tchi_gram_describe(const tch_matrices *m, CUtensorMap *map)
{
    tch_matrices halves = tchi_gram_described(m);
    return tchi_cuda_tensor_map(&halves, TCHI_GRAM_TILE, map);
}

#endif
