/* The tiles of a lower triangle, numbered row by row: 0 is (0, 0), 1 is (1, 0), 2 is (1, 1), ... */
#ifndef TCHI_CUDA_TRIANGLE_CUH
#define TCHI_CUDA_TRIANGLE_CUH

#include <stdint.h>

/* Tiles in the first `rows` rows. */
static __host__ __device__ inline int64_t tchi_lower_tiles(int64_t rows)
{
    return rows * (rows + 1) / 2;
}

/* The row that a tile is in; the square root is a guess, put right afterwards. */
static __device__ inline int64_t tchi_lower_row(int64_t tile)
{
    int64_t i = (int64_t)((sqrtf(8.0f * (float)tile + 1.0f) - 1.0f) * 0.5f);
    while (tchi_lower_tiles(i) > tile) {
        i--;
    }
    while (tchi_lower_tiles(i + 1) <= tile) {
        i++;
    }
    return i;
}

#endif
