/* Rings of k-tiles in shared memory, for persistent kernels whose blocks come in pairs (pair_launch.cuh): each place
 * has a barrier for "full" and one for "empty", and both blocks of a pair copy into it. Two warpgroups of a block may
 * have tiles in turn. A barrier tells apart only the phase that has just ended and the one before, so nobody may wait
 * for a k-tile before it is certain that the one before it in that place has landed: with turns, whoever has one has
 * seen all k-tiles of the tile before. */
#ifndef TCHI_CUDA_PAIR_RING_CUH
#define TCHI_CUDA_PAIR_RING_CUH

#include "hopper.cuh"

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA

/* Where a walk over the places stands, and the parity of that phase of its full barrier. */
typedef struct tchi_ring_place {
    int stage, parity;
} tchi_ring_place;

/* Of k-tile number `ktile`, counted over all tiles of the block. */
template <int stages> static __device__ __forceinline__ tchi_ring_place tchi_ring_at(int64_t ktile)
{
    return {(int)(ktile % stages), (int)(ktile / stages % 2)};
}

template <int stages> static __device__ __forceinline__ void tchi_ring_step(tchi_ring_place *at)
{
    at->stage++;
    if (at->stage == stages) {
        at->stage = 0;
        at->parity ^= 1;
    }
}

/* A warp leaves a place: one lane tells each block. */
static __device__ __forceinline__ void tchi_ring_leave(uint64_t *empty)
{
    int lane = (int)threadIdx.x % 32;
    if (lane < 2) {
        tchi_barrier_arrive_at(empty, lane);
    }
}

/* The pair's item number `own`, or one past the last. */
static __device__ __forceinline__ int tchi_pair_item(int own)
{
    return (int)(blockIdx.x / 2) + own * (int)(gridDim.x / 2);
}

/* Warpgroup 0 begins; `own` counts the block's tiles. Barriers of four arrivals each. */
static __device__ __forceinline__ void tchi_turn_await(uint64_t (&turn)[2], int group, int own)
{
    tchi_barrier_wait(turn + group, (own / 2 + group + 1) % 2);
}

/* To the other warpgroup, once all k-tiles of this one's tile have been seen. */
static __device__ __forceinline__ void tchi_turn_pass(uint64_t (&turn)[2], int group)
{
    if (threadIdx.x % 32 == 0) {
        tchi_barrier_arrive(turn + (group + 1) % 2);
    }
    __syncwarp();
}

#endif
#endif
