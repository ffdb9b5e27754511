/* The best that lost to symmetric_pingpong.cu: C = c0 I + c1 D + c2 A B' in bfloat16 over the lower tiles of C,
 * mirrored, both warpgroups together on one tile of 128 by 256, four stages of 48 KiB. While a tile is written the
 * tensor cores wait: "together" in bench/ladder/cuda_orthogonalize.md, which has the other ways as well.
 *
 * The one thing to know before changing it: all of C is written in squares of 64 by 64, and a square belongs to the one
 * warpgroup that has its sums. A square below the diagonal is written with its mirror image, one on it is made
 * symmetric first, one above it is left out. */
#ifndef BENCH_SYMMETRIC_TOGETHER_CUH
#define BENCH_SYMMETRIC_TOGETHER_CUH

#include "backends/cuda/cuda.h"
#include "backends/cuda/device/hopper.cuh"
#include "backends/cuda/device/tensor_map.h"
#include "backends/cuda/product/symmetric/symmetric_squares.cuh"

namespace together
{

enum {
    ROWS = 128, /* of a tile */
    COLS = 256,
    DEPTH = TCHI_CUDA_BOX_COLS, /* numbers along k in a k-tile */
    ROW_BYTES = 2 * DEPTH,
    A_BYTES = ROWS * ROW_BYTES,
    STAGE_BYTES = A_BYTES + COLS * ROW_BYTES,
    STAGES = 4,
    WARPGROUPS = 2,                   /* that multiply */
    THREADS = 128 * (WARPGROUPS + 1), /* one thread of the last ones asks for copies */
    MULTIPLY_REGISTERS = 232,
    LOAD_REGISTERS = 40
};

typedef struct problem {
    int32_t tiles;     /* of one matrix */
    int32_t all_tiles; /* of the batch */
    int32_t ktiles;
    float c0, c1, c2;
    const __nv_bfloat16 *d; /* NULL without one */
    int64_t d_ld, d_stride;
    CUtensorMap a, b, c;
} problem;

typedef struct memory {
    char stage[STAGES][STAGE_BYTES];               /* A, then B */
    char result[WARPGROUPS][2][TCHI_SQUARE_BYTES]; /* a square and its mirror image */
    uint64_t full[STAGES], empty[STAGES];
} memory;

typedef struct tile {
    int matrix, row, col;
} tile;

/* Tiles of a row of C follow one another: rows 2 r and 2 r + 1 of tiles have r + 1 each. */
static __device__ inline tile tile_of(const problem &p, int number)
{
    int left = number % p.tiles, row = 0;
    while (left >= row / 2 + 1) {
        left -= row / 2 + 1;
        row++;
    }
    return {number / p.tiles, row * ROWS, left * COLS};
}

/* Where a walk over the stages stands, and the parity of that phase of its full barrier. */
typedef struct place {
    int stage, parity;
} place;

static __device__ __forceinline__ void step(place *at)
{
    at->stage = (at->stage + 1) % STAGES;
    at->parity ^= at->stage == 0;
}

/* --- loading: one thread ----------------------------------------------------------------------------------------- */

static __device__ inline void load_all(const problem &p, memory &m)
{
    place at = {0, 0};
    for (int number = (int)blockIdx.x; number < p.all_tiles; number += (int)gridDim.x) {
        tile t = tile_of(p, number);
        for (int x = 0; x < p.ktiles * DEPTH; x += DEPTH) {
            char *stage = m.stage[at.stage];
            uint64_t *full = m.full + at.stage;
            tchi_barrier_wait(m.empty + at.stage, at.parity ^ 1);
            tchi_barrier_arrive_expecting(full, STAGE_BYTES);
            tchi_tma_load(stage, &p.a, x, t.row, t.matrix, full);
            tchi_tma_load(stage + A_BYTES, &p.b, x, t.col, t.matrix, full);
            tchi_tma_load(stage + 2 * A_BYTES, &p.b, x, t.col + ROWS, t.matrix, full);
            step(&at);
        }
    }
}

/* --- multiplying ------------------------------------------------------------------------------------------------- */

/* As tchi_wgmma_bf16_n128 for B 256 by 16: d is the left half, e the right one. */
static __device__ __forceinline__ void wgmma_n256(float (&d)[64], float (&e)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "
        "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "
        "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "
        "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(e[0]),
          "+f"(e[1]), "+f"(e[2]), "+f"(e[3]), "+f"(e[4]), "+f"(e[5]), "+f"(e[6]), "+f"(e[7]), "+f"(e[8]), "+f"(e[9]),
          "+f"(e[10]), "+f"(e[11]), "+f"(e[12]), "+f"(e[13]), "+f"(e[14]), "+f"(e[15]), "+f"(e[16]), "+f"(e[17]),
          "+f"(e[18]), "+f"(e[19]), "+f"(e[20]), "+f"(e[21]), "+f"(e[22]), "+f"(e[23]), "+f"(e[24]), "+f"(e[25]),
          "+f"(e[26]), "+f"(e[27]), "+f"(e[28]), "+f"(e[29]), "+f"(e[30]), "+f"(e[31]), "+f"(e[32]), "+f"(e[33]),
          "+f"(e[34]), "+f"(e[35]), "+f"(e[36]), "+f"(e[37]), "+f"(e[38]), "+f"(e[39]), "+f"(e[40]), "+f"(e[41]),
          "+f"(e[42]), "+f"(e[43]), "+f"(e[44]), "+f"(e[45]), "+f"(e[46]), "+f"(e[47]), "+f"(e[48]), "+f"(e[49]),
          "+f"(e[50]), "+f"(e[51]), "+f"(e[52]), "+f"(e[53]), "+f"(e[54]), "+f"(e[55]), "+f"(e[56]), "+f"(e[57]),
          "+f"(e[58]), "+f"(e[59]), "+f"(e[60]), "+f"(e[61]), "+f"(e[62]), "+f"(e[63])
        : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void leave(uint64_t *empty)
{
    if (threadIdx.x % 32 == 0) {
        tchi_barrier_arrive(empty);
    }
}

/* 64 rows of A for each warpgroup, all of B for both. A step of 16 along k is 32 bytes of a row, and addresses in
 * descriptors count 16. A k-tile is left when the next one is already being multiplied; the last one is left to the
 * caller: its stage is returned. */
static __device__ __forceinline__ int multiply(const problem &p, memory &m, float (&sum)[2][64], place *at)
{
    int before = 0;
    for (int ktile = 0; ktile < p.ktiles; ktile++) {
        tchi_barrier_wait(m.full + at->stage, at->parity);
        uint64_t a = tchi_wgmma_rows(m.stage[at->stage] + tchi_warpgroup() * 64 * ROW_BYTES);
        uint64_t b = tchi_wgmma_rows(m.stage[at->stage] + A_BYTES);
        tchi_wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            wgmma_n256(sum[0], sum[1], a + 2 * k, b + 2 * k, ktile > 0 || k > 0);
        }
        tchi_wgmma_commit();
        tchi_wgmma_wait<1>();
        if (ktile > 0) {
            leave(m.empty + before);
        }
        before = at->stage;
        step(at);
    }
    return before;
}

/* --- the result -------------------------------------------------------------------------------------------------- */

/* What a thread needs of D for one square: two numbers of row g, then of row g + 8, for each eight columns. */
static __device__ __forceinline__ void fetch_d(uint32_t (&d)[16], const problem &p, int matrix, int row, int col)
{
    int lane = (int)threadIdx.x % 32;
    int64_t first = row + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const __nv_bfloat16 *from = p.d + matrix * p.d_stride + first * p.d_ld + col + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        d[i] = __ldg((const unsigned *)(from + i % 2 * 8 * p.d_ld + i / 2 * 8));
    }
}

template <int from, bool has_d>
static __device__ __forceinline__ void finish(const problem &p, float (&sum)[64], const uint32_t (&d)[16])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        sum[from + i] *= p.c2;
        if (has_d) {
            sum[from + i] += p.c1 * tchi_square_number<TCH_SCALAR_BF16>(d[i / 2], i % 2);
        }
    }
}

/* Writes one square and its mirror image. One thread of the warpgroup speaks to the accelerator, and waits until it has
 * read the square before. */
template <int from, bool has_d>
static __device__ __forceinline__ void write_square(const problem &p, int matrix, int row, int col, float (&sum)[64],
                                                    const uint32_t (&d)[16], char (&place)[2][TCHI_SQUARE_BYTES])
{
    bool speaker = threadIdx.x % 128 == 0;
    int barrier = 1 + tchi_warpgroup();
    finish<from, has_d>(p, sum, d);
    if (row == col) {
        tchi_square_add_identity<from>(sum, p.c0);
    }
    if (speaker) {
        tchi_tma_wait_read();
    }
    tchi_warpgroup_sync(barrier);
    tchi_square_write<from, TCH_SCALAR_BF16>(place[0], place[1], sum);
    if (row == col) {
        tchi_warpgroup_sync(barrier);
        tchi_square_symmetrize(place[0], place[1]);
    }
    tchi_tma_publish();
    tchi_warpgroup_sync(barrier);
    if (speaker) {
        tchi_tma_store(&p.c, col, row, matrix, place[0]);
        if (row != col) {
            tchi_tma_store(&p.c, row, col, matrix, place[1]);
        }
        tchi_tma_commit();
    }
}

/* All tiles of a block; D is asked for while the last products run. */
template <bool has_d> static __device__ __forceinline__ void multiply_all(const problem &p, memory &m)
{
    int group = tchi_warpgroup();
    place at = {0, 0};
    for (int number = (int)blockIdx.x; number < p.all_tiles; number += (int)gridDim.x) {
        float sum[2][64];
        tile t = tile_of(p, number);
        uint32_t d[4][16];
        int row = t.row + group * TCHI_SQUARE;
        int last = multiply(p, m, sum, &at);
#pragma unroll
        for (int square = 0; has_d && square < 4; square++) {
            if (t.col + square * TCHI_SQUARE <= row) {
                fetch_d(d[square], p, t.matrix, row, t.col + square * TCHI_SQUARE);
            }
        }
        tchi_wgmma_wait<0>();
        tchi_wgmma_results(sum[0]);
        tchi_wgmma_results(sum[1]);
        leave(m.empty + last);
#pragma unroll
        for (int square = 0; square < 4; square++) {
            int col = t.col + square * TCHI_SQUARE;
            if (col <= row && square % 2 == 0) {
                write_square<0, has_d>(p, t.matrix, row, col, sum[square / 2], d[square], m.result[group]);
            } else if (col <= row) {
                write_square<32, has_d>(p, t.matrix, row, col, sum[square / 2], d[square], m.result[group]);
            }
        }
    }
    if (threadIdx.x % 128 == 0) {
        tchi_tma_wait_read();
    }
}

template <bool has_d>
static __global__ void __launch_bounds__(THREADS, 1) symmetric_together(const __grid_constant__ problem p)
{
    extern __shared__ __align__(1024) char shared[];
    memory &m = *(memory *)shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            tchi_barrier_create(m.full + i, 1);
            tchi_barrier_create(m.empty + i, 4 * WARPGROUPS); /* warps */
        }
        tchi_barrier_publish();
    }
    __syncthreads();
    if (threadIdx.x >= 128 * WARPGROUPS) {
        tchi_registers_give<LOAD_REGISTERS>();
        if (threadIdx.x == 128 * WARPGROUPS) {
            load_all(p, m);
        }
    } else {
        tchi_registers_take<MULTIPLY_REGISTERS>();
        multiply_all<has_d>(p, m);
    }
}

/* --- host -------------------------------------------------------------------------------------------------------- */

static bool takes(const tch_matrices *d, const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    bool plain = a->type == TCH_SCALAR_BF16 && c->type == TCH_SCALAR_BF16;
    bool mapped = tchi_cuda_tensor_map_takes(a) && tchi_cuda_tensor_map_takes(b) && tchi_cuda_tensor_map_takes(c);
    return plain && mapped && c->rows % COLS == 0 && (d == NULL || d->type == TCH_SCALAR_BF16);
}

static tch_status run(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d, double c2,
                      const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    int32_t side = (int32_t)(c->rows / COLS);
    problem p = {};
    p.tiles = side * (side + 1);
    p.all_tiles = p.tiles * (int32_t)c->batch;
    p.ktiles = (int32_t)tchi_cuda_ceil_div(a->cols, DEPTH);
    p.c0 = (float)c0, p.c1 = (float)c1, p.c2 = (float)c2;
    if (d != NULL) {
        p.d = (const __nv_bfloat16 *)d->data;
        p.d_ld = d->ld;
        p.d_stride = d->stride;
    }
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(a, ROWS, &p.a));
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(b, ROWS, &p.b));
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(c, TCHI_SQUARE, &p.c));
    auto kernel = d != NULL ? symmetric_together<true> : symmetric_together<false>;
    TCHI_CUDA_TRY(
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(memory)),
        "symmetric_together");
    unsigned blocks = (unsigned)std::min(p.all_tiles, state->device.processors);
    kernel<<<blocks, THREADS, sizeof(memory), state->stream>>>(p);
    return tchi_cuda_launched(state, "symmetric_together");
}

} // namespace together

#endif
