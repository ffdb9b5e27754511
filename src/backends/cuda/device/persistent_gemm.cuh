/* The skeleton of persistent GEMMs for sm_90. A CTA, or a cluster of two that share B, stays on its multiprocessor for
 * the whole launch. One thread of the producer warp issues the TMA copies of k-tiles into a ring of stages in shared
 * memory, each with a "full" and an "empty" barrier; two consumer warpgroups multiply by wgmma, either halves of each
 * tile together or, in ping-pong, alternate tiles, so that one is in its epilogue while the other multiplies.
 *
 * A kernel calls tchi_gemm_run with a struct derived from tchi_gemm that has:
 *
 *     problem, memory, tile               types; memory ends with a tchi_ring, and problem has its number of `items`
 *     tile_of(p, item, rank), next(p, i)  the scheduler: a CTA's tile of an item, and which of its items comes next
 *     ktiles(p), load(p, m, stage, ...)   the producer: stages of the ring that a tile needs, and the copies into one
 *     start(p, m, stage, x, sum, ...)     the operand transform and the products of one k-tile; x comes from compute
 *     compute(p, m, t, group, i, at)      one tile: tchi_gemm_multiply, tchi_gemm_finish, and the epilogue
 *
 * A barrier distinguishes only the current and the previous phase, so no thread may wait for a k-tile before the
 * previous k-tile of that stage has certainly landed: in ping-pong, the active warpgroup has seen all
 * k-tiles of the previous tile. */
#ifndef TCHI_CUDA_PERSISTENT_GEMM_CUH
#define TCHI_CUDA_PERSISTENT_GEMM_CUH

#include "elements.cuh"
#include "hopper.cuh"
#include "tensor_map.h"

#define TCHI_GEMM_WARPGROUPS 2
#define TCHI_GEMM_CONSUMERS (128 * TCHI_GEMM_WARPGROUPS) /* threads; the producer is the next one */
/* With 384 threads each begins with 168 registers. */
#define TCHI_GEMM_CONSUMER_REGISTERS 232
#define TCHI_GEMM_PRODUCER_REGISTERS 40

template <int stages> struct tchi_ring {
    uint64_t full[stages], empty[stages];
    uint64_t turn[TCHI_GEMM_WARPGROUPS]; /* of ping-pong */
};

typedef struct tchi_no_fragment {
} tchi_no_fragment;

/* `moves_registers`: from the producer's warpgroup to the consumers. */
template <int stages_, int cluster_, bool ping_pong_ = false, bool moves_registers_ = true> struct tchi_gemm {
    static constexpr int stages = stages_, cluster = cluster_;
    static constexpr bool ping_pong = ping_pong_, moves_registers = moves_registers_;
    static constexpr int threads = TCHI_GEMM_CONSUMERS + (moves_registers ? 128 : 32);
    static constexpr int resident = 1; /* CTAs on a multiprocessor */
    static constexpr bool stores_by_tma = false;
    static constexpr bool alternates = false; /* between two fragments, registers of A that products still read */
    using fragment = tchi_no_fragment;

    template <class problem> static __device__ __forceinline__ int ktiles(const problem &p)
    {
        return p.ktiles;
    }

    template <class problem> static __device__ __forceinline__ int next(const problem &, int i)
    {
        return i;
    }

    template <class problem> static __device__ __forceinline__ void begin(const problem &, int)
    {
    }
};

/* A stage of the ring, and the parity of the current phase of its full barrier. */
typedef struct tchi_ring_place {
    int stage, parity;
} tchi_ring_place;

/* Of k-tile number `ktile`, counted over all tiles of the CTA. */
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

/* A warp releases a stage: one lane arrives in each CTA of the cluster. */
template <int cluster> static __device__ __forceinline__ void tchi_ring_leave(uint64_t *empty)
{
    int lane = (int)threadIdx.x % 32;
    if (cluster == 1 && lane == 0) {
        tchi_barrier_arrive(empty);
    } else if (cluster == 2 && lane < 2) {
        tchi_barrier_arrive_at(empty, lane);
    }
}

/* Warpgroup 0 begins; `i` counts the CTA's tiles. */
static __device__ __forceinline__ void tchi_turn_await(uint64_t (&turn)[2], int group, int i)
{
    tchi_barrier_wait(turn + group, (i / 2 + group + 1) % 2);
}

/* To the other warpgroup, once this one has seen all k-tiles of its tile. */
static __device__ __forceinline__ void tchi_turn_pass(uint64_t (&turn)[2], int group)
{
    if (threadIdx.x % 32 == 0) {
        tchi_barrier_arrive(turn + (group + 1) % 2);
    }
    __syncwarp();
}

/* --- the k-loop --------------------------------------------------------------------------------------------------- */

/* Starts one k-tile while the previous one is still being multiplied, whose stage is released afterwards. */
template <class gemm, class problem, class memory, class context, class sums>
static __device__ __forceinline__ void tchi_gemm_ktile(const problem &p, memory &m, const context &x, sums &sum,
                                                       typename gemm::fragment &f, int ktile, int *before,
                                                       tchi_ring_place *at)
{
    tchi_barrier_wait(m.ring.full + at->stage, at->parity);
    gemm::start(p, m, at->stage, x, sum, f, ktile > 0);
    tchi_wgmma_commit();
    tchi_wgmma_wait<1>();
    if (ktile > 0) {
        tchi_ring_leave<gemm::cluster>(m.ring.empty + *before);
    }
    *before = at->stage;
    tchi_ring_step<gemm::stages>(at);
}

/* Returns the stage of the last k-tile, whose products may still be running. */
template <class gemm, class problem, class memory, class context, class sums>
static __device__ __forceinline__ int tchi_gemm_multiply(const problem &p, memory &m, const context &x, sums &sum,
                                                         int ktiles, tchi_ring_place *at)
{
    typename gemm::fragment even, odd;
    int before = 0, ktile = 0;
    if constexpr (gemm::alternates) {
        for (; ktile + 1 < ktiles; ktile += 2) {
            tchi_gemm_ktile<gemm>(p, m, x, sum, even, ktile, &before, at);
            tchi_gemm_ktile<gemm>(p, m, x, sum, odd, ktile + 1, &before, at);
        }
        if (ktile < ktiles) {
            tchi_gemm_ktile<gemm>(p, m, x, sum, even, ktile, &before, at);
        }
    } else {
        for (; ktile < ktiles; ktile++) {
            tchi_gemm_ktile<gemm>(p, m, x, sum, even, ktile, &before, at);
        }
    }
    return before;
}

/* The sums are complete. */
template <class gemm, class memory, int count, int each>
static __device__ __forceinline__ void tchi_gemm_finish(memory &m, float (&sum)[count][each], int last)
{
    tchi_wgmma_wait<0>();
    tchi_wgmma_results(sum[0]);
    tchi_ring_leave<gemm::cluster>(m.ring.empty + last);
#pragma unroll
    for (int i = 1; i < count; i++) {
        tchi_wgmma_results(sum[i]);
    }
}

/* --- the frame ---------------------------------------------------------------------------------------------------- */

/* Item number `i` of this CTA or pair of CTAs, or one past the last. */
template <class gemm> static __device__ __forceinline__ int tchi_gemm_item(int i)
{
    return (int)(blockIdx.x / gemm::cluster) + i * (int)(gridDim.x / gemm::cluster);
}

template <class gemm> static __device__ __forceinline__ int tchi_gemm_rank()
{
    return gemm::cluster == 1 ? 0 : tchi_cluster_rank();
}

template <class gemm, class memory> static __device__ __forceinline__ void tchi_gemm_create_barriers(memory &m)
{
    for (int i = 0; i < gemm::stages; i++) {
        tchi_barrier_create(m.ring.full + i, 1);
        tchi_barrier_create(m.ring.empty + i, 4 * gemm::cluster * (gemm::ping_pong ? 1 : TCHI_GEMM_WARPGROUPS));
    }
    for (int i = 0; gemm::ping_pong && i < TCHI_GEMM_WARPGROUPS; i++) {
        tchi_barrier_create(m.ring.turn + i, 4);
    }
    tchi_barrier_publish();
}

template <class gemm, class problem, class memory>
static __device__ inline void tchi_gemm_produce(const problem &p, memory &m)
{
    int rank = tchi_gemm_rank<gemm>();
    tchi_ring_place at = {0, 0};
    for (int i = gemm::next(p, 0); tchi_gemm_item<gemm>(i) < p.items; i = gemm::next(p, i + 1)) {
        auto t = gemm::tile_of(p, tchi_gemm_item<gemm>(i), rank);
        for (int ktile = 0; ktile < gemm::ktiles(p); ktile++) {
            tchi_barrier_wait(m.ring.empty + at.stage, at.parity ^ 1);
            gemm::load(p, m, at.stage, t, rank, ktile);
            tchi_ring_step<gemm::stages>(&at);
        }
    }
}

template <class gemm, class problem, class memory>
static __device__ __forceinline__ void tchi_gemm_consume(const problem &p, memory &m)
{
    int group = tchi_warpgroup();
    int rank = tchi_gemm_rank<gemm>();
    tchi_ring_place at = {0, 0};
    gemm::begin(p, group);
    if constexpr (gemm::ping_pong) {
        for (int i = group; tchi_gemm_item<gemm>(i) < p.items; i += TCHI_GEMM_WARPGROUPS) {
            at = tchi_ring_at<gemm::stages>((int64_t)i * gemm::ktiles(p));
            gemm::compute(p, m, gemm::tile_of(p, tchi_gemm_item<gemm>(i), rank), group, i, &at);
        }
    } else {
        for (int i = gemm::next(p, 0); tchi_gemm_item<gemm>(i) < p.items; i = gemm::next(p, i + 1)) {
            gemm::compute(p, m, gemm::tile_of(p, tchi_gemm_item<gemm>(i), rank), group, i, &at);
        }
    }
    if (gemm::stores_by_tma) {
        if (threadIdx.x % 128 == 0) {
            tchi_tma_wait_read();
        }
        __syncwarp();
    }
}

/* Copies also land in the other CTA of a cluster: no CTA starts before both have barriers, and none exits while the
 * other may still arrive at them. */
template <class gemm> static __device__ __forceinline__ void tchi_gemm_run(const typename gemm::problem &p)
{
    extern __shared__ __align__(1024) char shared[];
    typename gemm::memory &m = *(typename gemm::memory *)shared;
    if (threadIdx.x == 0) {
        tchi_gemm_create_barriers<gemm>(m);
    }
    if (gemm::cluster == 1) {
        __syncthreads();
    } else {
        __syncwarp();
        tchi_cluster_sync();
    }
    if (threadIdx.x >= TCHI_GEMM_CONSUMERS) {
        if constexpr (gemm::moves_registers) {
            tchi_registers_give<TCHI_GEMM_PRODUCER_REGISTERS>();
        }
        if (threadIdx.x == TCHI_GEMM_CONSUMERS) {
            tchi_gemm_produce<gemm>(p, m);
        }
        if (gemm::cluster > 1) {
            __syncwarp();
            tchi_cluster_sync();
        }
    } else {
        if constexpr (gemm::moves_registers) {
            tchi_registers_take<TCHI_GEMM_CONSUMER_REGISTERS>();
        }
        tchi_gemm_consume<gemm>(p, m);
        if (gemm::cluster > 1) {
            tchi_cluster_sync();
        }
    }
}

/* As many CTAs as can be resident, or fewer if there are fewer items. */
template <class gemm, class problem>
static tch_status tchi_gemm_launch(const tchi_cuda_state *state, const char *name, void (*kernel)(problem),
                                   const problem &p)
{
    const size_t shared = sizeof(typename gemm::memory);
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                  name);
    int resident = state->device.processors / gemm::cluster * gemm::resident;
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config =
        tchi_cuda_cluster_config(state, (unsigned)(gemm::cluster * (resident < p.items ? resident : p.items)),
                                 gemm::threads, (int64_t)shared, gemm::cluster, &attribute);
    TCHI_CUDA_TRY(cudaLaunchKernelEx(&config, kernel, p), name);
    return tchi_cuda_launched(state, name);
}

/* --- boxes of 128 by 64 numbers ----------------------------------------------------------------------------------- */

#define TCHI_GEMM_BOX 128                  /* rows of A or of B' in a k-tile */
#define TCHI_GEMM_DEPTH TCHI_CUDA_BOX_COLS /* numbers along k */
#define TCHI_GEMM_BOX_BYTES (TCHI_GEMM_BOX * TCHI_GEMM_DEPTH * 2)

/* Half of a box, 64 rows, or the whole if the map's box has 128 rows. Operands given by columns arrive as boxes of 64
 * columns. */
template <bool columns>
static __device__ __forceinline__ void tchi_gemm_load_half(char *to, const CUtensorMap *map, int k, int row, int matrix,
                                                           uint64_t *full)
{
    tchi_tma_load(to, map, columns ? row : k, columns ? k : row, matrix, full);
}

template <bool columns>
static __device__ __forceinline__ void tchi_gemm_load_a(char *to, const CUtensorMap *map, int k, int row, int matrix,
                                                        uint64_t *full)
{
    tchi_gemm_load_half<columns>(to, map, k, row, matrix, full);
    if (columns) {
        tchi_gemm_load_half<columns>(to + TCHI_GEMM_BOX_BYTES / 2, map, k, row + TCHI_GEMM_BOX / 2, matrix, full);
    }
}

/* Each CTA of a cluster loads half of a shared B, to both. */
template <bool columns>
static __device__ __forceinline__ void tchi_gemm_load_b(char *to, const CUtensorMap *map, int k, int col, int matrix,
                                                        uint64_t *full, int rank, bool shared)
{
    constexpr int half = TCHI_GEMM_BOX / 2, bytes = TCHI_GEMM_BOX_BYTES / 2;
    if (shared) {
        int first = col + rank * half;
        tchi_tma_load_to(3, to + rank * bytes, map, columns ? first : k, columns ? k : first, matrix, full);
    } else {
        tchi_gemm_load_half<columns>(to, map, k, col, matrix, full);
        tchi_gemm_load_half<columns>(to + bytes, map, k, col + half, matrix, full);
    }
}

template <bool columns> static __device__ __forceinline__ uint64_t tchi_gemm_describe(const char *box)
{
    return columns ? tchi_wgmma_columns(box, TCHI_GEMM_BOX_BYTES / 2) : tchi_wgmma_rows(box);
}

/* The product of 64 `count` rows of a box of A and a box of B; the first of a tile (`add` 0) overwrites the sums. A
 * step of 16 along k is 32 bytes of a row, or 16 rows of boxes of columns; descriptor addresses are in units of 16. */
template <tch_scalar type, bool a_columns, bool b_columns, int count>
static __device__ __forceinline__ void tchi_gemm_boxes(float (*sum)[64], const char *a, const char *b, int add)
{
    constexpr int a_step = a_columns ? 128 : 2, b_step = b_columns ? 128 : 2;
    uint64_t left[count];
    uint64_t right = tchi_gemm_describe<b_columns>(b);
#pragma unroll
    for (int i = 0; i < count; i++) {
        left[i] = tchi_gemm_describe<a_columns>(a + i * (TCHI_GEMM_BOX_BYTES / 2));
    }
#pragma unroll
    for (int k = 0; k < TCHI_GEMM_DEPTH / 16; k++) {
#pragma unroll
        for (int i = 0; i < count; i++) {
            tchi_wgmma<type, a_columns, b_columns>(sum[i], left[i] + a_step * k, right + b_step * k, k > 0 ? 1 : add);
        }
    }
}

#endif
