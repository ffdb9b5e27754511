/* Squared norms of single samples' gradients in float32 for sm_90, in Gram form, <A A', G G'>, as exactly as float32 sums
 * and at the speed of tensor cores. 32 neighbours of a row are scaled together by a power of two, so that the largest is
 * between 2^8 and 2^9, and each becomes an integer and a rest of at most 1/2, both float16: 32 products of integers add up
 * to less than 2^24, which is exact however the tensor cores cut sums off, and the rest keeps 11 bits more. No element is
 * off by more than 2^-21 of the largest of its 32, with errors of either sign.
 *
 * The one thing to know before changing it: a stage in shared memory goes from the tensor memory accelerator ("full") to
 * the warpgroup that splits it where it lies ("ready"), then to the two that multiply ("empty"). The order of a slab's
 * columns is another one after that, the same in both operands. A tile on the diagonal has one operand, loaded once. */
#include "sample_norms.h"

#include "elements.cuh"
#include "hopper.cuh"
#include "tensor_map.h"

#define TILE 128
#define SLAB_BYTES (TILE * 128) /* 32 numbers of each row */
#define DEPTH 32
#define STAGES 4
#define AHEAD 2 /* slabs asked for and not yet split: with more, splitting would wait for products under way */
#define GROUPS 2
#define WARPS (4 * GROUPS)
#define THREADS (128 * (GROUPS + 1)) /* the last warpgroup asks for slabs and splits them */
#define SPLITTER_REGISTERS 88
#define MULTIPLIER_REGISTERS 208

typedef struct split_problem {
    int32_t tiles, items;
    int32_t slabs_a, slabs; /* of A, and of A and G */
    double *parts;
    CUtensorMap a, g;
} split_problem;

typedef struct split_memory {
    char stage[STAGES][2][SLAB_BYTES];
    float kept[64][128 * GROUPS];  /* a tile of A A' while that of G G' is computed */
    float weight[STAGES][2][TILE]; /* what a row's numbers in the stage were divided by */
    uint64_t full[STAGES], ready[STAGES], empty[STAGES];
} split_memory;

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA /* what follows has instructions of sm_90a */

typedef struct split_place {
    int stage, parity;
} split_place;

typedef struct split_tile {
    int matrix, row, col;
} split_tile;

static __device__ __forceinline__ void step(split_place *at)
{
    at->stage++;
    if (at->stage == STAGES) {
        at->stage = 0;
        at->parity ^= 1;
    }
}

static __device__ __forceinline__ split_tile tile_of(const split_problem &p, int item)
{
    int tile = item % p.tiles;
    int above = (int)tchi_lower_row(tile);
    return {item / p.tiles, above * TILE, (tile - (int)tchi_lower_tiles(above)) * TILE};
}

/* --- slabs, asked for and split ------------------------------------------------------------------------------------ */

/* The next slab to ask for. */
typedef struct split_walk {
    split_place at;
    split_tile tile;
    int item, slab;
} split_walk;

/* To the accelerator a number is two of 16 bits. */
static __device__ __forceinline__ void ask(const split_problem &p, split_memory &m, split_walk *next)
{
    if (next->item >= p.items) {
        return;
    }
    bool of_a = next->slab < p.slabs_a;
    bool diagonal = next->tile.row == next->tile.col;
    const CUtensorMap *map = of_a ? &p.a : &p.g;
    int x = (of_a ? next->slab : next->slab - p.slabs_a) * 2 * DEPTH;
    int stage = next->at.stage;
    tchi_barrier_wait(m.empty + stage, next->at.parity ^ 1);
    tchi_barrier_arrive_expecting(m.full + stage, (diagonal ? 1 : 2) * SLAB_BYTES);
    tchi_tma_load(m.stage[stage][0], map, x, next->tile.row, next->tile.matrix, m.full + stage);
    if (!diagonal) {
        tchi_tma_load(m.stage[stage][1], map, x, next->tile.col, next->tile.matrix, m.full + stage);
    }
    step(&next->at);
    next->slab++;
    if (next->slab == p.slabs) {
        next->slab = 0;
        next->item += (int)gridDim.x;
        next->tile = tile_of(p, next->item);
    }
}

/* Two numbers as integers and as what is left of them; adding and subtracting 1.5 * 2^23 rounds to an integer. */
static __device__ __forceinline__ void split_pair(float x, float y, float scale, uint32_t *integers, uint32_t *rests)
{
    const float shift = 0x1.8p23f;
    float top_x = fmaf(x, scale, shift) - shift;
    float top_y = fmaf(y, scale, shift) - shift;
    __half2 top = __floats2half2_rn(top_x, top_y);
    __half2 rest = __floats2half2_rn(fmaf(x, scale, -top_x), fmaf(y, scale, -top_y));
    *integers = *(uint32_t *)&top;
    *rests = *(uint32_t *)&rest;
}

/* One row of a slab, in place, by one thread. Of its chunks of 16 bytes, c and c + 4 together become 8 integers, in chunk
 * c, and 8 rests, in chunk c + 4. Something infinite becomes NaN. */
static __device__ __forceinline__ void split_row(char *slab, int row, float *weight)
{
    float4 v[8];
    float most = 0.0f;
    char *line = slab + row * 128;
#pragma unroll
    for (int c = 0; c < 8; c++) {
        v[c] = *(const float4 *)(line + ((c ^ (row & 7)) << 4));
        most = fmaxf(most, fmaxf(fmaxf(fabsf(v[c].x), fabsf(v[c].y)), fmaxf(fabsf(v[c].z), fabsf(v[c].w))));
    }
    int power = min(135 - (int)(__float_as_uint(most) >> 23), 126);
    float scale = __uint_as_float((uint32_t)(127 + power) << 23);
    *weight = __uint_as_float((uint32_t)(127 - power) << 23);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint4 top, rest;
        split_pair(v[c].x, v[c].y, scale, &top.x, &rest.x);
        split_pair(v[c].z, v[c].w, scale, &top.y, &rest.y);
        split_pair(v[c + 4].x, v[c + 4].y, scale, &top.z, &rest.z);
        split_pair(v[c + 4].z, v[c + 4].w, scale, &top.w, &rest.w);
        *(uint4 *)(line + ((c ^ (row & 7)) << 4)) = top;
        *(uint4 *)(line + (((c + 4) ^ (row & 7)) << 4)) = rest;
    }
}

/* The slabs of all tiles of the block. */
static __device__ __forceinline__ void split_all(const split_problem &p, split_memory &m)
{
    int row = (int)threadIdx.x % 128;
    split_place at = {0, 0};
    split_walk next = {{0, 0}, tile_of(p, (int)blockIdx.x), (int)blockIdx.x, 0};
    for (int slab = 0; slab < AHEAD && row == 0; slab++) {
        ask(p, m, &next);
    }
    for (int item = (int)blockIdx.x; item < p.items; item += (int)gridDim.x) {
        split_tile t = tile_of(p, item);
        for (int slab = 0; slab < p.slabs; slab++) {
            tchi_barrier_wait(m.full + at.stage, at.parity);
            split_row(m.stage[at.stage][0], row, &m.weight[at.stage][0][row]);
            if (t.row != t.col) {
                split_row(m.stage[at.stage][1], row, &m.weight[at.stage][1][row]);
            }
            tchi_wgmma_publish();
            tchi_barrier_arrive(m.ready + at.stage);
            step(&at);
            if (row == 0) {
                ask(p, m, &next);
            }
        }
    }
}

/* --- products ------------------------------------------------------------------------------------------------------ */

/* Products of integers apart from the others, which are small. Addresses in descriptors count 16 bytes: a step of 16
 * numbers is 2 on, the rests begin 4 on. */
static __device__ __forceinline__ void start_slab(float (&integers)[64], float (&rests)[64], const char *rows,
                                                  const char *cols)
{
    uint64_t x = tchi_wgmma_rows(rows);
    uint64_t y = tchi_wgmma_rows(cols);
    tchi_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        tchi_wgmma_f16_n128(integers, x + k, y + k, k > 0);
        tchi_wgmma_f16_n128(rests, x + k + 4, y + k + 4, k > 0);
        tchi_wgmma_f16_n128(rests, x + k, y + k + 4, 1);
        tchi_wgmma_f16_n128(rests, x + k + 4, y + k, 1);
    }
    tchi_wgmma_commit();
}

/* Barrier 1 + g is where warpgroup g waits for the other. */
static __device__ __forceinline__ void wait_for_turn()
{
    tchi_threads_sync(1 + tchi_warpgroup(), 128 * GROUPS);
}

static __device__ __forceinline__ void give_turn()
{
    tchi_threads_arrive(GROUPS - tchi_warpgroup(), 128 * GROUPS);
}

/* Adds a slab's products to the tile, with the weights of its rows and columns. */
static __device__ __forceinline__ void add_slab(float (&sum)[64], const float (&integers)[64], const float (&rests)[64],
                                                const float *rows, const float *cols)
{
    int row = (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4;
    int col = (int)threadIdx.x % 4 * 2;
    float weights[2] = {rows[row], rows[row + 8]};
#pragma unroll
    for (int j = 0; j < 16; j++) {
        float2 across = *(const float2 *)(cols + 8 * j + col);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float both = weights[e / 2] * (e % 2 == 0 ? across.x : across.y);
            sum[4 * j + e] = fmaf(integers[4 * j + e] + rests[4 * j + e], both, sum[4 * j + e]);
        }
    }
}

/* `slabs` slabs of one of the two Gram matrices. The warpgroups take turns to start products, so that those of one run
 * while the other adds. */
static __device__ __forceinline__ void multiply(split_memory &m, float (&sum)[64], int slabs, bool diagonal,
                                                split_place *at)
{
    int other = diagonal ? 0 : 1;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        sum[i] = 0.0f;
    }
    for (int slab = 0; slab < slabs; slab++) {
        float integers[64];
        float rests[64];
        tchi_barrier_wait(m.ready + at->stage, at->parity);
        wait_for_turn();
        start_slab(integers, rests, m.stage[at->stage][0] + tchi_warpgroup() * (SLAB_BYTES / 2),
                   m.stage[at->stage][other]);
        give_turn();
        tchi_wgmma_wait<0>();
        tchi_wgmma_results(integers);
        tchi_wgmma_results(rests);
        add_slab(sum, integers, rests, m.weight[at->stage][0], m.weight[at->stage][other]);
        __syncwarp(); /* all lanes have read their weights */
        if (threadIdx.x % 32 == 0) {
            tchi_barrier_arrive(m.empty + at->stage);
        }
        step(at);
    }
}

static __device__ __forceinline__ double dot_with_kept(const split_memory &m, const float (&x)[64])
{
    float total[4] = {};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        total[i % 4] += x[i] * m.kept[i][threadIdx.x];
    }
    return tchi_cuda_warp_sum((double)((total[0] + total[1]) + (total[2] + total[3])));
}

static __device__ __forceinline__ void multiply_all(const split_problem &p, split_memory &m)
{
    split_place at = {0, 0};
    if (tchi_warpgroup() == 1) {
        give_turn(); /* the first has the first turn */
    }
    for (int item = (int)blockIdx.x; item < p.items; item += (int)gridDim.x) {
        split_tile t = tile_of(p, item);
        bool diagonal = t.row == t.col;
        float sum[64];
        multiply(m, sum, p.slabs_a, diagonal, &at);
#pragma unroll
        for (int i = 0; i < 64; i++) {
            m.kept[i][threadIdx.x] = sum[i];
        }
        multiply(m, sum, p.slabs - p.slabs_a, diagonal, &at);
        double total = dot_with_kept(m, sum);
        if (threadIdx.x % 32 == 0) {
            p.parts[(int64_t)item * WARPS + threadIdx.x / 32] = diagonal ? total : 2.0 * total;
        }
    }
    if (tchi_warpgroup() == 0) {
        wait_for_turn(); /* which the second gave last */
    }
}

static __device__ __forceinline__ void create_barriers(split_memory &m)
{
    for (int i = 0; i < STAGES; i++) {
        tchi_barrier_create(m.full + i, 1);
        tchi_barrier_create(m.ready + i, 128);
        tchi_barrier_create(m.empty + i, WARPS);
    }
    tchi_barrier_publish();
}

#endif

/* Four products of float16 for one of float32: 4 T^2 (p + d) operations a sample, and half of a tile on the diagonal for
 * nothing. For 32 samples of 768 to 3072 with T = 256: 32 GFLOP, 0.043 ms at the 757 TFLOP/s of cuBLAS, of which the 96
 * tiles leave a quarter of 132 multiprocessors idle; 126 MB, 0.03 ms at 4.19 TB/s. */
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
        multiply_all(p, m);
    }
#endif
}

/* --- host --------------------------------------------------------------------------------------------------------- */

static tch_matrices described(const tch_matrices *m)
{
    tch_matrices halves = *m;
    halves.type = TCH_SCALAR_BF16;
    halves.cols *= 2;
    halves.ld *= 2;
    halves.stride *= 2;
    return halves;
}

bool tchi_cuda_sample_norms_split_takes(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g)
{
    tch_matrices inputs = described(a);
    tch_matrices gradients = described(g);
    int64_t tiles = tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TILE));
    return state->device.major == 9 && a->type == TCH_SCALAR_F32 && tiles < ((int64_t)1 << 28) / a->batch &&
           a->cols < (1 << 28) && g->cols < (1 << 28) && tchi_cuda_tensor_map_takes(&inputs) &&
           tchi_cuda_tensor_map_takes(&gradients);
}

tch_status tchi_cuda_sample_norms_split(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        double *parts, int64_t *tiles)
{
    tch_matrices inputs = described(a);
    tch_matrices gradients = described(g);
    split_problem p = {};
    p.tiles = (int32_t)tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TILE));
    p.items = (int32_t)(p.tiles * a->batch);
    p.slabs_a = (int32_t)tchi_cuda_ceil_div(a->cols, DEPTH);
    p.slabs = p.slabs_a + (int32_t)tchi_cuda_ceil_div(g->cols, DEPTH);
    p.parts = parts;
    *tiles = (int64_t)p.tiles * WARPS;
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(&inputs, TILE, &p.a));
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(&gradients, TILE, &p.g));
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)sample_norms_split, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)sizeof(split_memory)),
                  "sample_norms_split");
    int blocks = p.items < state->device.processors ? p.items : state->device.processors;
    sample_norms_split<<<(unsigned)blocks, THREADS, sizeof(split_memory), state->stream>>>(p);
    return tchi_cuda_launched(state, "sample_norms_split");
}
