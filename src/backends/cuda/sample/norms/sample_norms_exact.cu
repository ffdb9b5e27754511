/* Squared norms of per-sample gradients in float32 for sm_90, in Gram form, <A A', G G'>, as accurate as float32 sums
 * and at the speed of tensor cores: numbers are split (exact_split.cuh), and a tile of either matrix is the sum of four
 * products. Integer products are exact for a few k-tiles and are then added to the tile in float32, rounded to nearest;
 * the others are so much smaller that truncation by tensor cores is negligible. Tiles are distributed to blocks by a
 * stream-K split (stream_k.cuh).
 *
 * Before changing it: a stage in shared memory goes from TMA ("full") to the warpgroup that splits it in place
 * ("ready"), then to the two that multiply ("empty"). A tile on the diagonal has one operand, loaded once. Sums are in
 * the units of the last k-tile: if a unit grows, they are rescaled before the next products start. */
#include "sample_norms.h"

#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/persistent_gemm.cuh"
#include "exact_split.cuh"
#include "stream_k.cuh"

#define TILE TCHI_GRAM_TILE
#define KTILE_BYTES TCHI_GRAM_KTILE_BYTES
#define STAGES 5
#define AHEAD 3 /* k-tiles in flight; with more, splitting would wait for products in flight */
/* K-tiles whose integer products are accumulated before they are added to the tile, at most: cuda_sample_norms.md. */
#define TOGETHER 4
#define GROUPS 2
#define WARPS (4 * GROUPS)
#define PARTS (WARPS + 1)
#define THREADS (128 * (GROUPS + 1)) /* the last warpgroup loads k-tiles and splits them */
#define SPLITTER_REGISTERS 88
#define MULTIPLIER_REGISTERS 208
#define JOIN_THREADS 1024

typedef float split_sums[64][128 * GROUPS]; /* a tile, distributed over the multiplying threads */

typedef struct split_problem {
    tchi_stream_k runs;
    int32_t tiles;      /* of a sample */
    float one_a, one_g; /* added to the inputs' Gram matrix: 1 with a bias, or 0 */
    double *parts, *sizes;
    split_sums *kept, *chunks; /* of tiles with split_blocks: A A' of each, and chunks of G G' */
    CUtensorMap a, g;
} split_problem;

typedef struct split_tile {
    int matrix, row, col;
} split_tile;

/* The next k-tile to load. */
typedef struct split_walk {
    tchi_ring_place at;
    tchi_k_range run;
    split_tile tile;
    int number, ktile;
} split_walk;

typedef struct split_memory {
    char stage[STAGES][2][KTILE_BYTES];
    split_sums kept;                          /* a tile of A A' while that of G G' is computed */
    tchi_exact_units units[STAGES][2];        /* of the tile's rows and of its columns */
    int32_t grown[STAGES][2][4];              /* whether one of 32 of them has grown */
    int32_t diagonal[STAGES], begins[STAGES]; /* whether columns are rows; whether a run begins */
    uint64_t full[STAGES], ready[STAGES], empty[STAGES];
    split_walk next; /* of one thread, which has few registers */
} split_memory;

static_assert(sizeof(split_memory) <= 227 * 1024, "a block of sm_90 has no more");

static __device__ __forceinline__ split_tile tile_of(const split_problem &p, int item)
{
    int row = 0;
    int col = item % p.tiles;
    while (col > row) {
        row++;
        col -= row;
    }
    return {item / p.tiles, row * TILE, col * TILE};
}

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA /* uses instructions of sm_90a */

/* --- k-tiles: loading and splitting ------------------------------------------------------------------------------ */

static __device__ __forceinline__ bool find_ktile(const split_problem &p, split_walk *next)
{
    while (next->ktile == next->run.ktiles) {
        next->number++;
        if (next->number >= tchi_stream_k_count(p.runs)) {
            return false;
        }
        next->run = tchi_stream_k_get(p.runs, next->number);
        next->tile = tile_of(p, next->run.item);
        next->ktile = 0;
    }
    return true;
}

static __device__ __forceinline__ void request_ktile(const split_problem &p, split_memory &m)
{
    split_walk *next = &m.next;
    if (!find_ktile(p, next)) {
        return;
    }
    bool diagonal = next->tile.row == next->tile.col;
    const CUtensorMap *map = next->run.of_g ? &p.g : &p.a;
    int x = (next->run.first + next->ktile) * TCHI_GRAM_DEPTH;
    int stage = next->at.stage;
    tchi_barrier_wait(m.empty + stage, next->at.parity ^ 1);
    m.diagonal[stage] = diagonal;
    m.begins[stage] = next->ktile == 0;
    tchi_barrier_arrive_expecting(m.full + stage, (diagonal ? 1 : 2) * KTILE_BYTES);
    tchi_tma_load(m.stage[stage][0], map, x, next->tile.row, next->tile.matrix, m.full + stage);
    if (!diagonal) {
        tchi_tma_load(m.stage[stage][1], map, x, next->tile.col, next->tile.matrix, m.full + stage);
    }
    tchi_ring_step<STAGES>(&next->at);
    next->ktile++;
}

/* Each thread splits a row of an operand. */
static __device__ __forceinline__ void split_operand(split_memory &m, int stage, int operand, int *unit)
{
    int row = (int)threadIdx.x % 128;
    int before = m.begins[stage] ? TCHI_EXACT_NO_UNIT : *unit;
    *unit = tchi_exact_row(m.stage[stage][operand], row, before);
    m.units[stage][operand].before[row] = (uint8_t)before;
    m.units[stage][operand].now[row] = (uint8_t)*unit;
    int grown = __any_sync(0xFFFFFFFFu, *unit != before);
    if (row % 32 == 0) {
        m.grown[stage][operand][row / 32] = grown;
    }
}

static __device__ __forceinline__ int ktiles_of(const tchi_stream_k &r)
{
    int ktiles = 0;
    for (int number = 0; number < tchi_stream_k_count(r); number++) {
        ktiles += tchi_stream_k_get(r, number).ktiles;
    }
    return ktiles;
}

static __device__ __forceinline__ void split_all(const split_problem &p, split_memory &m)
{
    int units[2] = {TCHI_EXACT_NO_UNIT, TCHI_EXACT_NO_UNIT};
    int ktiles = ktiles_of(p.runs);
    bool asks = threadIdx.x % 128 == 0;
    tchi_ring_place at = {0, 0};
    if (asks) {
        m.next = {{0, 0}, {0, 0, 0, 0}, {0, 0, 0}, -1, 0};
        for (int ktile = 0; ktile < AHEAD; ktile++) {
            request_ktile(p, m);
        }
    }
    for (int ktile = 0; ktile < ktiles; ktile++) {
        tchi_barrier_wait(m.full + at.stage, at.parity);
        split_operand(m, at.stage, 0, &units[0]);
        if (!m.diagonal[at.stage]) {
            split_operand(m, at.stage, 1, &units[1]);
        }
        tchi_tma_publish();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            tchi_barrier_arrive(m.ready + at.stage);
        }
        tchi_ring_step<STAGES>(&at);
        if (asks) {
            request_ktile(p, m);
        }
        __syncwarp();
    }
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* Whether a unit of this warpgroup's 64 rows or of any column has grown; uniform in its threads, as wgmma requires. */
static __device__ __forceinline__ bool has_grown(const split_memory &m, int stage, int other)
{
    int2 rows = *(const int2 *)&m.grown[stage][0][2 * tchi_warpgroup()];
    int4 cols = *(const int4 *)m.grown[stage][other];
    return (rows.x | rows.y | cols.x | cols.y | cols.z | cols.w) != 0;
}

static __device__ __forceinline__ void release_stage(uint64_t *empty)
{
    __syncwarp(); /* all lanes have read their units */
    tchi_ring_leave<1>(empty);
}

/* Waits for all products, and adds the integer ones to the tile. */
static __device__ __forceinline__ void settle_partial_sums(float (&sum)[64], float (&integers)[64], float (&rests)[64])
{
    tchi_wgmma_wait<0>();
    tchi_wgmma_results(integers);
    tchi_wgmma_results(rests);
#pragma unroll
    for (int i = 0; i < 64; i++) {
        sum[i] += integers[i];
    }
}

/* At most TOGETHER k-tiles in which no unit grows. Products of a k-tile start while the previous ones are in flight.
 * Returns the number of k-tiles. */
static __device__ __forceinline__ int start_some(split_memory &m, float (&integers)[64], float (&rests)[64], int ktiles,
                                                 int other, tchi_ring_place *at)
{
    int count = 0;
    int before = 0;
    do {
        char(*stage)[KTILE_BYTES] = m.stage[at->stage];
        tchi_exact_start(integers, rests, stage[0] + tchi_warpgroup() * (KTILE_BYTES / 2), stage[other], count > 0);
        tchi_wgmma_wait<1>();
        if (count > 0) {
            release_stage(m.empty + before);
        }
        before = at->stage;
        tchi_ring_step<STAGES>(at);
        count++;
        if (count == TOGETHER || count == ktiles) {
            break;
        }
        tchi_barrier_wait(m.ready + at->stage, at->parity);
    } while (!has_grown(m, at->stage, other));
    return count;
}

/* One run. */
static __device__ __forceinline__ void multiply_split_tile(split_memory &m, float (&sum)[64], int ktiles, bool diagonal,
                                                           tchi_ring_place *at)
{
    int other = diagonal ? 0 : 1;
    float rests[64];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        sum[i] = 0.0f;
        rests[i] = 0.0f;
    }
    while (ktiles > 0) {
        float integers[64];
        tchi_barrier_wait(m.ready + at->stage, at->parity);
        if (has_grown(m, at->stage, other)) {
            tchi_exact_change(sum, rests, m.units[at->stage][0], m.units[at->stage][other]);
        }
        ktiles -= start_some(m, integers, rests, ktiles, other, at);
        settle_partial_sums(sum, integers, rests);
        int last = (at->stage + STAGES - 1) % STAGES;
        if (ktiles == 0) {
            tchi_exact_finish(sum, rests, m.units[last][0], m.units[last][other]);
        }
        release_stage(m.empty + last);
    }
}

static __device__ __forceinline__ void store_split_sums(split_sums &to, const float (&sum)[64], float one)
{
    int thread = tchi_thread_index();
#pragma unroll
    for (int i = 0; i < 64; i++) {
        to[i][thread] = sum[i] + one;
    }
}

/* The sum of a thread's terms, x + `one` times y, and that of their absolute values. */
typedef struct split_terms {
    double sum, size;
} split_terms;

static __device__ __forceinline__ split_terms dot(const split_sums &x, const float (&y)[64], float one)
{
    int thread = tchi_thread_index();
    float total[4] = {};
    float size[4] = {};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        float term = x[i][thread];
        float value = y[i] + one;
        total[i % 4] += term * value;
        size[i % 4] += fabsf(term * value);
    }
    return {tchi_cuda_warp_sum((double)((total[0] + total[1]) + (total[2] + total[3]))),
            tchi_cuda_warp_sum((double)((size[0] + size[1]) + (size[2] + size[3])))};
}

#endif

/* The last of a tile's PARTS is that of sample_norms_join, 0 without split_blocks. */
static __device__ __forceinline__ void write_part(const split_problem &p, int item, int part, double total, double size)
{
    split_tile tile = tile_of(p, item);
    double times = tile.row == tile.col ? 1.0 : 2.0;
    p.parts[(int64_t)item * PARTS + part] = times * total;
    if (p.sizes != nullptr) {
        p.sizes[(int64_t)item * PARTS + part] = times * size;
    }
}

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA

/* Stores a run's tile. A chunk's index is the sum of its stretch's and its tile's index: one of the two grows from
 * chunk to chunk. The bias's 1 is added once, by the owner of the tile. */
static __device__ __forceinline__ void finish_run(const split_problem &p, split_memory &m, const tchi_k_range &run,
                                                  const float (&sum)[64])
{
    int left_over = run.item - p.runs.whole * p.runs.blocks;
    bool helped = left_over >= 0 && p.runs.cut < p.runs.ktiles_g;
    if (helped && tchi_stream_k_helps(p.runs)) {
        store_split_sums(p.chunks[(int)blockIdx.x - p.runs.split_tiles + left_over], sum, 0.0f);
        return;
    }
    if (run.of_g) {
        split_terms terms = dot(m.kept, sum, p.one_g);
        if (threadIdx.x % 32 == 0) {
            write_part(p, run.item, tchi_thread_index() / 32, terms.sum, terms.size);
        }
        return;
    }
    store_split_sums(m.kept, sum, p.one_a);
    if (helped) {
        store_split_sums(p.kept[left_over], sum, p.one_a);
    } else if (threadIdx.x == 0) {
        write_part(p, run.item, WARPS, 0.0, 0.0);
    }
}

static __device__ __forceinline__ void multiply_runs(const split_problem &p, split_memory &m)
{
    tchi_ring_place at = {0, 0};
#pragma unroll 1
    for (int number = 0; number < tchi_stream_k_count(p.runs); number++) {
        tchi_k_range run = tchi_stream_k_get(p.runs, number);
        split_tile tile = tile_of(p, run.item);
        float sum[64];
        multiply_split_tile(m, sum, run.ktiles, tile.row == tile.col, &at);
        finish_run(p, m, tchi_stream_k_get(p.runs, number), sum);
    }
}

static __device__ __forceinline__ void create_barriers(split_memory &m)
{
    for (int i = 0; i < STAGES; i++) {
        tchi_barrier_create(m.full + i, 1);
        tchi_barrier_create(m.ready + i, 4);
        tchi_barrier_create(m.empty + i, WARPS);
    }
    tchi_barrier_publish();
}

#endif

/* Four float16 products for one of float32: 4 T^2 (p + d) operations per sample, and half of a tile on the diagonal is
 * wasted. For 32 samples of 768 to 3072 with T = 256: 48 GFLOP, 0.064 ms at the 757 TFLOP/s of cuBLAS; 126 MB, 0.03 ms
 * at 4.19 TB/s. */
static __global__ void __launch_bounds__(THREADS, 1) sample_norms_split(const __grid_constant__ split_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    extern __shared__ __align__(1024) char shared[];
    split_memory &m = *(split_memory *)shared;
    if (threadIdx.x == 0) {
        create_barriers(m);
    }
    __syncthreads();
    if (tchi_warpgroup() == GROUPS) {
        tchi_registers_give<SPLITTER_REGISTERS>();
        split_all(p, m);
    } else {
        tchi_registers_take<MULTIPLIER_REGISTERS>();
        multiply_runs(p, m);
    }
#endif
}

static __device__ __forceinline__ float dot(float4 x, float4 y)
{
    return (x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w);
}

static __device__ __forceinline__ float size_of(float4 x, float4 y)
{
    return (fabsf(x.x * y.x) + fabsf(x.y * y.y)) + (fabsf(x.z * y.z) + fabsf(x.w * y.w));
}

/* A block per tile with split_blocks: its chunks times its tile of A A'. Reads 64 KB per chunk from L2. Absolute values
 * of partial terms sum to more than those of the terms. */
static __global__ void __launch_bounds__(JOIN_THREADS) sample_norms_join(const __grid_constant__ split_problem p)
{
    __shared__ double sums[32];
    const int each = (int)(sizeof(split_sums) / 16 / JOIN_THREADS);
    int tile = (int)blockIdx.x;
    int64_t begin = (int64_t)tile * (p.runs.ktiles_g - p.runs.cut);
    int64_t end = begin + (p.runs.ktiles_g - p.runs.cut);
    float4 kept[each];
    double total = 0.0;
    double size = 0.0;
#pragma unroll
    for (int i = 0; i < each; i++) {
        kept[i] = ((const float4 *)p.kept[tile])[i * JOIN_THREADS + threadIdx.x];
    }
    for (int split_block = tile * p.runs.split_blocks / p.runs.split_tiles; split_block < p.runs.split_blocks;
         split_block++) {
        int64_t from = tchi_stream_k_stretch(p.runs, split_block);
        int64_t to = tchi_stream_k_stretch(p.runs, split_block + 1);
        if (from >= end) {
            break;
        }
        const float4 *chunk = (const float4 *)p.chunks[split_block + tile];
#pragma unroll
        for (int i = 0; i < each && from < to && begin < to; i++) {
            float4 four = chunk[i * JOIN_THREADS + threadIdx.x];
            total += (double)dot(kept[i], four);
            size += (double)size_of(kept[i], four);
        }
    }
    total = tchi_cuda_block_sum(total, (int)threadIdx.x, JOIN_THREADS, sums);
    size = tchi_cuda_block_sum(size, (int)threadIdx.x, JOIN_THREADS, sums);
    if (threadIdx.x == 0) {
        write_part(p, p.runs.whole * p.runs.blocks + tile, WARPS, total, size);
    }
}

/* --- host -------------------------------------------------------------------------------------------------------- */

bool tchi_cuda_sample_norms_gram_supported(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g)
{
    int64_t tiles = tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TCHI_GRAM_TILE));
    return tchi_cuda_kernel_fits(state, TCHI_GRAM_NORMS_WGMMA, a, NULL) && tiles < ((int64_t)1 << 28) / a->batch &&
           a->cols < (1 << 28) && g->cols < (1 << 28) && tchi_cuda_tensor_map_supported(a, 4) &&
           tchi_cuda_tensor_map_supported(g, 4);
}

static tch_status launch_split_norms(const tchi_cuda_state *state, split_problem *p)
{
    tchi_stream_k *r = &p->runs;
    const int64_t room = (2 * (int64_t)r->split_tiles + r->split_blocks) * (int64_t)sizeof(split_sums);
    if (state->blas_workspace == nullptr || room > tchi_cuda_workspace_bytes(state)) {
        r->cut = r->ktiles_g;
    }
    bool helped = r->cut < r->ktiles_g;
    p->kept = (split_sums *)state->blas_workspace;
    p->chunks = p->kept + r->split_tiles;
    int blocks = helped || r->whole > 0 ? r->blocks : r->split_tiles;
    TCHI_TRY(tchi_cuda_launch_shared(state, "sample_norms_split", sample_norms_split, (unsigned)blocks, THREADS,
                                     sizeof(split_memory), sizeof(split_memory), *p));
    return !helped ? TCH_OK
                   : tchi_cuda_launch(state, "sample_norms_join", sample_norms_join, (unsigned)r->split_tiles,
                                      JOIN_THREADS, *p);
}

/* A and G are interchangeable: the shorter one is A, whose tiles split_blocks do not share. */
tch_status tchi_cuda_sample_norms_split(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        bool bias, double *parts, double *sizes, int64_t *tiles)
{
    const tch_matrices *less = a->cols < g->cols ? a : g;
    const tch_matrices *more = a->cols < g->cols ? g : a;
    split_problem p = {};
    p.tiles = (int32_t)tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TILE));
    p.runs = tchi_stream_k_share(p.tiles * a->batch, state->device.processors,
                                 tchi_cuda_ceil_div(less->cols, TCHI_GRAM_DEPTH),
                                 tchi_cuda_ceil_div(more->cols, TCHI_GRAM_DEPTH));
    p.one_a = bias && less == a ? 1.0f : 0.0f;
    p.one_g = bias && less != a ? 1.0f : 0.0f;
    p.parts = parts;
    p.sizes = sizes;
    *tiles = (int64_t)p.tiles * PARTS;
    TCHI_TRY(tchi_cuda_tensor_map(less, TILE, &p.a));
    TCHI_TRY(tchi_cuda_tensor_map(more, TILE, &p.g));
    return launch_split_norms(state, &p);
}
