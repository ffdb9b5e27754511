/* Tiles of X' Y for sm_90, X and Y of a half type and given by columns, which wgmma takes from shared memory as they
 * are; for kernels that do something else with a tile than to store it. A block keeps its multiprocessor for the whole
 * launch: one thread asks the tensor memory accelerator for k-tiles of X and Y, and two warpgroups multiply, each half
 * of a tile's rows.
 *
 * The one thing to know before changing it: k-tiles go round through STAGES places in shared memory, each with a
 * barrier for "full" and one for "empty". A warp leaves a place only after it has waited for its own products of that
 * k-tile, which it does when those of the next k-tile are already under way. */
#ifndef TCHI_CUDA_SAMPLE_WGMMA_CUH
#define TCHI_CUDA_SAMPLE_WGMMA_CUH

#include "backends/cuda/cuda.h"
#include "elements.cuh"
#include "hopper.cuh"
#include "tensor_map.h"

#define TCHI_WGMMA_ROWS 128 /* of a tile: columns of X, 64 for each warpgroup */
#define TCHI_WGMMA_COLS 256 /* of a tile: columns of Y */
#define TCHI_WGMMA_DEPTH 64 /* steps of the contraction in a k-tile */
#define TCHI_WGMMA_BOX_BYTES (TCHI_WGMMA_DEPTH * TCHI_CUDA_BOX_COLS * 2)
#define TCHI_WGMMA_X_BOXES (TCHI_WGMMA_ROWS / TCHI_CUDA_BOX_COLS)
#define TCHI_WGMMA_BOXES (TCHI_WGMMA_X_BOXES + TCHI_WGMMA_COLS / TCHI_CUDA_BOX_COLS)
#define TCHI_WGMMA_STAGES 4
#define TCHI_WGMMA_GROUPS 2
#define TCHI_WGMMA_WARPS (4 * TCHI_WGMMA_GROUPS)          /* that multiply */
#define TCHI_WGMMA_THREADS (128 * TCHI_WGMMA_GROUPS + 32) /* one thread of the last warp asks for copies */

typedef struct tchi_wgmma_pair {
    int32_t items; /* of work */
    int32_t ktiles;
    CUtensorMap x, y;
} tchi_wgmma_pair;

/* A tile of one matrix. */
typedef struct tchi_wgmma_work {
    int row, col, matrix;
} tchi_wgmma_work;

typedef struct tchi_wgmma_memory {
    char stage[TCHI_WGMMA_STAGES][TCHI_WGMMA_BOXES][TCHI_WGMMA_BOX_BYTES]; /* X's boxes, then Y's */
    uint64_t full[TCHI_WGMMA_STAGES], empty[TCHI_WGMMA_STAGES];
} tchi_wgmma_memory;

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA /* what follows has instructions of sm_90a */

/* Where a walk over the stages stands, and the parity of that phase of its full barrier. */
typedef struct tchi_wgmma_place {
    int stage, parity;
} tchi_wgmma_place;

static __device__ __forceinline__ void tchi_wgmma_step(tchi_wgmma_place *at)
{
    at->stage++;
    if (at->stage == TCHI_WGMMA_STAGES) {
        at->stage = 0;
        at->parity ^= 1;
    }
}

/* The k-tiles of all tiles of the block, by one thread. */
template <typename place>
static __device__ __forceinline__ void tchi_wgmma_load_all(const tchi_wgmma_pair &p, tchi_wgmma_memory &m,
                                                           place work_of)
{
    tchi_wgmma_place at = {0, 0};
    for (int item = (int)blockIdx.x; item < p.items; item += (int)gridDim.x) {
        tchi_wgmma_work w = work_of(item);
        for (int ktile = 0; ktile < p.ktiles; ktile++) {
            tchi_barrier_wait(m.empty + at.stage, at.parity ^ 1);
            tchi_barrier_arrive_expecting(m.full + at.stage, TCHI_WGMMA_BOXES * TCHI_WGMMA_BOX_BYTES);
#pragma unroll
            for (int box = 0; box < TCHI_WGMMA_BOXES; box++) {
                bool of_x = box < TCHI_WGMMA_X_BOXES;
                int from =
                    of_x ? w.row + box * TCHI_CUDA_BOX_COLS : w.col + (box - TCHI_WGMMA_X_BOXES) * TCHI_CUDA_BOX_COLS;
                tchi_tma_load(m.stage[at.stage][box], of_x ? &p.x : &p.y, from, ktile * TCHI_WGMMA_DEPTH, w.matrix,
                              m.full + at.stage);
            }
            tchi_wgmma_step(&at);
        }
    }
}

template <tch_scalar type>
static __device__ __forceinline__ void tchi_wgmma_start(float (&sum)[128], uint64_t x, uint64_t y, int add)
{
    if (type == TCH_SCALAR_BF16) {
        tchi_wgmma_bf16_n256_columns(sum, x, y, add);
    } else {
        tchi_wgmma_f16_n256_columns(sum, x, y, add);
    }
}

/* All products of a k-tile as one group in the background, the first of a tile (`add` 0) into sums that hold nothing. A
 * step of 16 along the contraction is 16 rows of 128 bytes, and addresses in descriptors count 16. */
template <tch_scalar type>
static __device__ __forceinline__ void
tchi_wgmma_start_ktile(float (&sum)[128], const char (&stage)[TCHI_WGMMA_BOXES][TCHI_WGMMA_BOX_BYTES], int add)
{
    uint64_t x = tchi_wgmma_columns(stage[tchi_warpgroup()], TCHI_WGMMA_BOX_BYTES);
    uint64_t y = tchi_wgmma_columns(stage[TCHI_WGMMA_X_BOXES], TCHI_WGMMA_BOX_BYTES);
    tchi_wgmma_fence();
#pragma unroll
    for (int k = 0; k < TCHI_WGMMA_DEPTH / 16; k++) {
        tchi_wgmma_start<type>(sum, x + k * 128, y + k * 128, k > 0 ? 1 : add);
    }
    tchi_wgmma_commit();
}

static __device__ __forceinline__ void tchi_wgmma_leave(uint64_t *empty)
{
    if (threadIdx.x % 32 == 0) {
        tchi_barrier_arrive(empty);
    }
}

/* One tile. */
template <tch_scalar type>
static __device__ __forceinline__ void tchi_wgmma_multiply(const tchi_wgmma_pair &p, tchi_wgmma_memory &m,
                                                           float (&sum)[128], tchi_wgmma_place *at)
{
    int before = 0;
    for (int ktile = 0; ktile < p.ktiles; ktile++) {
        tchi_barrier_wait(m.full + at->stage, at->parity);
        tchi_wgmma_start_ktile<type>(sum, m.stage[at->stage], ktile > 0);
        tchi_wgmma_wait<1>();
        if (ktile > 0) {
            tchi_wgmma_leave(m.empty + before);
        }
        before = at->stage;
        tchi_wgmma_step(at);
    }
    tchi_wgmma_wait<0>();
    tchi_wgmma_results(sum);
    tchi_wgmma_leave(m.empty + before);
}

/* Row and column of the tile that element e of accumulator j, sum[4 j + e], belongs to. */
static __device__ __forceinline__ int tchi_wgmma_row(int e)
{
    return (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4 + e / 2 * 8;
}

static __device__ __forceinline__ int tchi_wgmma_col(int j, int e)
{
    return 8 * j + (int)threadIdx.x % 4 * 2 + e % 2;
}

/* All of a block's work: done(item, work, sums) has each tile in the threads of the two warpgroups. `shared` has the
 * size of tchi_wgmma_memory. */
template <tch_scalar type, typename place, typename finish>
static __device__ __forceinline__ void tchi_wgmma_tiles(char *shared, const tchi_wgmma_pair &p, place work_of,
                                                        finish done)
{
    tchi_wgmma_memory &m = *(tchi_wgmma_memory *)shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < TCHI_WGMMA_STAGES; i++) {
            tchi_barrier_create(m.full + i, 1);
            tchi_barrier_create(m.empty + i, TCHI_WGMMA_WARPS);
        }
        tchi_barrier_publish();
    }
    __syncthreads();
    if (threadIdx.x >= 128 * TCHI_WGMMA_GROUPS) {
        if (threadIdx.x == 128 * TCHI_WGMMA_GROUPS) {
            tchi_wgmma_load_all(p, m, work_of);
        }
        return;
    }
    tchi_wgmma_place at = {0, 0};
    for (int item = (int)blockIdx.x; item < p.items; item += (int)gridDim.x) {
        float sum[128];
        tchi_wgmma_multiply<type>(p, m, sum, &at);
        done(item, work_of(item), sum);
    }
}

#endif

/* --- host -------------------------------------------------------------------------------------------------------- */

/* The accelerator copies bits: to it both half types are one. */
static inline tch_matrices tchi_wgmma_described(const tch_matrices *m)
{
    tch_matrices copy = *m;
    copy.type = TCH_SCALAR_BF16;
    return copy;
}

static inline bool tchi_wgmma_takes(const tchi_cuda_state *state, const tch_matrices *m)
{
    tch_matrices copy = tchi_wgmma_described(m);
    return state->device.major == 9 && (m->type == TCH_SCALAR_BF16 || m->type == TCH_SCALAR_F16) &&
           tchi_cuda_tensor_map_takes(&copy);
}

static inline tch_status tchi_wgmma_describe(const tch_matrices *x, const tch_matrices *y, int64_t items,
                                             tchi_wgmma_pair *p)
{
    tch_matrices left = tchi_wgmma_described(x);
    tch_matrices right = tchi_wgmma_described(y);
    p->items = (int32_t)items;
    p->ktiles = (int32_t)tchi_cuda_ceil_div(x->rows, TCHI_WGMMA_DEPTH);
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(&left, TCHI_WGMMA_DEPTH, &p->x));
    return tchi_cuda_tensor_map(&right, TCHI_WGMMA_DEPTH, &p->y);
}

/* A block for every multiprocessor, or fewer where there is less to do. */
template <typename problem>
static tch_status tchi_wgmma_launch(const tchi_cuda_state *state, void (*kernel)(problem), const problem &p, int items,
                                    const char *name)
{
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)sizeof(tchi_wgmma_memory)),
                  name);
    int blocks = items < state->device.processors ? items : state->device.processors;
    kernel<<<(unsigned)blocks, TCHI_WGMMA_THREADS, sizeof(tchi_wgmma_memory), state->stream>>>(p);
    return tchi_cuda_launched(state, name);
}

#endif
