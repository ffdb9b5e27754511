/* Shared by the two kernels of the symmetric product in bfloat16: C = c0 I + c1 D + c2 A B' over the lower tiles of C,
 * mirrored. One layout serves ldmatrix and wgmma: a k-tile is rows of 128 bytes in shared memory, each with 64 numbers
 * of plain bfloat16, or 32 high parts and their 32 low parts, in 16-byte chunks swizzled so that chunk c of row r is at
 * c ^ (r % 8). K-tiles must begin at multiples of 1024 bytes.
 *
 * One rule determines all writes to C: a tile owns its elements on and below the diagonal, computes each once and
 * writes it to both places; with symmetric D the result is therefore exactly symmetric. */
#ifndef TCHI_CUDA_SYMMETRIC_BF16X2_CUH
#define TCHI_CUDA_SYMMETRIC_BF16X2_CUH

#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/ptx.cuh"

#define TCHI_BF16X2_ROW_BYTES 128
#define TCHI_BF16X2_CHUNK 8 /* numbers in 16 bytes */

/* A is n by k, B is n by k, D and C are n by n. */
typedef struct tchi_bf16x2_problem {
    int32_t n, k;
    int32_t tiles; /* of one matrix */
    int32_t has_d; /* D may be absent */
    int64_t first; /* matrix of the grid's first block */
    float c0, c1, c2;
    tchi_cuda_operand a, b, c, d;
} tchi_bf16x2_problem;

/* Numbers along k in one k-tile. */
template <int planes> struct tchi_bf16x2_ktile {
    static constexpr int depth = TCHI_BF16X2_ROW_BYTES / 2 / planes;
};

/* --- tiles ------------------------------------------------------------------------------------------------------- */

typedef struct tchi_bf16x2_tile {
    int64_t matrix;
    int row, col; /* of C, where the tile begins */
} tchi_bf16x2_tile;

/* Square tiles on the diagonal and below it. */
static inline int64_t tchi_bf16x2_tile_count(int64_t n, int size)
{
    return tchi_lower_tiles(tchi_cuda_ceil_div(n, size));
}

/* Tiles of one matrix in sequence, row by row, so that concurrent tiles share A and B in cache. */
static __device__ inline tchi_bf16x2_tile tchi_bf16x2_tile_of(const tchi_bf16x2_problem &p, int size)
{
    int tile = (int)(blockIdx.x % (unsigned)p.tiles);
    int i = (int)tchi_lower_row(tile);
    tchi_bf16x2_tile t;
    t.matrix = p.first + blockIdx.x / (unsigned)p.tiles;
    t.row = i * size;
    t.col = (tile - (int)tchi_lower_tiles(i)) * size;
    return t;
}

/* --- k-tiles ----------------------------------------------------------------------------------------------------- */

/* Swizzled offset of a chunk. */
static __device__ inline char *tchi_bf16x2_chunk(char *ktile, int row, int chunk)
{
    return ktile + row * TCHI_BF16X2_ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

/* Issues the copy of `size` rows from `row` on, elements `from` to `from + depth` of each; zeros outside the n by k
 * matrix. `threads` is a multiple of 64, so that a thread keeps its chunk and its swizzle. */
template <int size, int threads, int planes>
static __device__ inline void tchi_bf16x2_load_rows(char *ktile, const tchi_cuda_operand &m,
                                                    const __nv_bfloat16 *matrix, int n, int k, int row, int from)
{
    constexpr int per_plane = 8 / planes;
    int chunk = (int)threadIdx.x % 8;
    int first = (int)threadIdx.x / 8;
    int col = from + chunk % per_plane * TCHI_BF16X2_CHUNK;
    int bytes = min(max((k - col) * 2, 0), 16);
    const __nv_bfloat16 *source = matrix + chunk / per_plane * m.stride + (row + first) * m.ld + col;
    char *target = tchi_bf16x2_chunk(ktile, first, chunk);
#pragma unroll
    for (int i = 0; i < size; i += threads / 8) {
        int inside = row + first + i < n ? bytes : 0;
        tchi_cp_async_16(target + i * TCHI_BF16X2_ROW_BYTES, inside > 0 ? source : matrix, inside);
        source += threads / 8 * m.ld;
    }
}

/* The k-tiles of A and of B that a tile needs next, A's first, as one group of copies; past the end it is empty. */
template <int size, int threads, int planes>
static __device__ inline void tchi_bf16x2_load(char *stage, const tchi_bf16x2_problem &p, const tchi_bf16x2_tile &tile,
                                               int ktile)
{
    int from = ktile * tchi_bf16x2_ktile<planes>::depth;
    if (from < p.k) {
        const __nv_bfloat16 *a = (const __nv_bfloat16 *)tchi_cuda_at(p.a, tile.matrix, 0, 0);
        const __nv_bfloat16 *b = (const __nv_bfloat16 *)tchi_cuda_at(p.b, tile.matrix, 0, 0);
        tchi_bf16x2_load_rows<size, threads, planes>(stage, p.a, a, p.n, p.k, tile.row, from);
        tchi_bf16x2_load_rows<size, threads, planes>(stage + size * TCHI_BF16X2_ROW_BYTES, p.b, b, p.n, p.k, tile.col,
                                                     from);
    }
    tchi_cp_async_commit();
}

/* --- the result -------------------------------------------------------------------------------------------------- */

/* The tile of C passes through shared memory as float32, with column c of row r at c ^ this. All three access patterns
 * are then free of bank conflicts: pairs of an accumulator, four of a row, and four of a column for the mirror. */
static __device__ inline int tchi_bf16x2_permuted(int row, int col)
{
    return col ^ (((row >> 2 & 7) << 2) ^ ((row & 3) << 3));
}

/* This lane's four numbers of a 16 by 8 accumulator with its corner at (row, col). */
template <int size>
static __device__ inline void tchi_bf16x2_stage(float *staged, int row, int col, float d0, float d1, float d2, float d3)
{
    int lane = (int)threadIdx.x % 32;
    int r = row + lane / 4;
    int c = col + lane % 4 * 2;
    *(float2 *)(staged + r * size + tchi_bf16x2_permuted(r, c)) = make_float2(d0, d1);
    *(float2 *)(staged + (r + 8) * size + tchi_bf16x2_permuted(r + 8, c)) = make_float2(d2, d3);
}

/* Mirrors the lower triangle of a diagonal tile. */
template <int size, int threads> static __device__ inline void tchi_bf16x2_mirror_staged(float *staged)
{
    for (int t = (int)threadIdx.x; t < size * size; t += threads) {
        int r = t / size;
        int c = t % size;
        if (c < r) {
            staged[c * size + tchi_bf16x2_permuted(c, r)] = staged[r * size + tchi_bf16x2_permuted(r, c)];
        }
    }
    __syncthreads();
}

/* Up to four neighbors of a row; `type` is a constant wherever it matters, and `wide` the usual case. */
static __device__ __forceinline__ void tchi_bf16x2_store(tch_scalar type, char *to, int64_t plane, bool wide, int count,
                                                         const tchi_cuda_vec4<float> &v)
{
    if (wide) {
        tchi_cuda_store_wide<float>(type, to, 0, plane, v);
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        if (e < count) {
            tchi_cuda_store<float>(type, to, e, plane, v.v[e]);
        }
    }
}

static __device__ __forceinline__ tchi_cuda_vec4<float> tchi_bf16x2_fetch(tch_scalar type, const char *from,
                                                                          int64_t plane, bool wide, int count)
{
    if (wide) {
        return tchi_cuda_load_wide<float>(type, from, 0, plane);
    }
    tchi_cuda_vec4<float> v;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        v.v[e] = e < count ? tchi_cuda_load<float>(type, from, e, plane) : 0.0f;
    }
    return v;
}

/* Completes the rows of a staged tile, c2 S + c1 D + c0 I, keeps them for the mirror and writes them. A thread keeps
 * its four columns and only steps its addresses. */
template <int size, int threads, bool has_d>
static __device__ __forceinline__ void tchi_bf16x2_write_rows(const tchi_bf16x2_problem &p,
                                                              const tchi_bf16x2_tile &tile, float *staged,
                                                              tch_scalar type, tch_scalar d_type)
{
    constexpr int across = size / 4;
    constexpr int step = threads / across;
    int first = (int)threadIdx.x / across;
    int c = (int)threadIdx.x % across * 4;
    int count = min(p.n - tile.col - c, 4);
    int rows = min(p.n - tile.row, size);
    int diagonal = tile.col + c - tile.row; /* the row in which this thread's first column meets the diagonal */
    bool wide = count == 4 && p.c.wide;
    bool d_wide = count == 4 && p.d.wide;
    char *to = tchi_cuda_at(p.c, tile.matrix, tile.row + first, tile.col + c);
    const char *from = has_d ? tchi_cuda_at(p.d, tile.matrix, tile.row + first, tile.col + c) : NULL;
    int64_t to_step = step * p.c.ld * tchi_cuda_size(type);
    int64_t from_step = step * p.d.ld * tchi_cuda_size(d_type);
#pragma unroll 4
    for (int r = first; r < rows; r += step) {
        float4 *place = (float4 *)(staged + r * size + tchi_bf16x2_permuted(r, c));
        float4 sum = *place;
        tchi_cuda_vec4<float> v = {{p.c2 * sum.x, p.c2 * sum.y, p.c2 * sum.z, p.c2 * sum.w}};
        if (has_d) {
            tchi_cuda_vec4<float> d = tchi_bf16x2_fetch(d_type, from, p.d.stride, d_wide, count);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                v.v[e] += p.c1 * d.v[e];
            }
            from += from_step;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            v.v[e] += r == diagonal + e ? p.c0 : 0.0f;
        }
        *place = make_float4(v.v[0], v.v[1], v.v[2], v.v[3]);
        tchi_bf16x2_store(type, to, p.c.stride, wide, count, v);
        to += to_step;
    }
}

/* Writes columns of the finished tile as rows above the diagonal. A warp writes 32 adjacent elements of each of four
 * rows. */
template <int size, int threads>
static __device__ __forceinline__ void tchi_bf16x2_write_mirror(const tchi_bf16x2_problem &p,
                                                                const tchi_bf16x2_tile &tile, const float *staged,
                                                                tch_scalar type)
{
    constexpr int down = size / 32; /* blocks of 32 rows by 4 columns, `down` of them vertically */
    constexpr int warps = threads / 32;
    static_assert(warps % down == 0, "a warp keeps its rows");
    constexpr int step = warps / down * 4;
    int warp = (int)threadIdx.x / 32;
    int r = warp % down * 32 + (int)threadIdx.x % 8 * 4;
    int first = warp / down * 4 + (int)threadIdx.x % 32 / 8;
    int count = min(p.n - tile.row - r, 4);
    bool wide = count == 4 && p.c.wide;
    char *to = tchi_cuda_at(p.c, tile.matrix, tile.col + first, tile.row + r);
    int64_t to_step = step * p.c.ld * tchi_cuda_size(type);
#pragma unroll 4
    for (int c = first; c < size; c += step) {
        tchi_cuda_vec4<float> v;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            v.v[e] = staged[(r + e) * size + tchi_bf16x2_permuted(r + e, c)];
        }
        tchi_bf16x2_store(type, to, p.c.stride, wide, count, v);
        to += to_step;
    }
}

template <int size, int threads>
static __device__ __forceinline__ void tchi_bf16x2_write_as(const tchi_bf16x2_problem &p, const tchi_bf16x2_tile &tile,
                                                            float *staged, tch_scalar type, tch_scalar d_type)
{
    if (p.has_d) {
        tchi_bf16x2_write_rows<size, threads, true>(p, tile, staged, type, d_type);
    } else {
        tchi_bf16x2_write_rows<size, threads, false>(p, tile, staged, type, d_type);
    }
    if (tile.row != tile.col) {
        __syncthreads();
        tchi_bf16x2_write_mirror<size, threads>(p, tile, staged, type);
    }
}

/* Writes a staged tile and its mirror image. Types are compile-time constants here: dispatching per element took 0.177
 * ms for 16 x 1024 vs 0.145 ms. */
template <int size, int threads, int planes>
static __device__ inline void tchi_bf16x2_write(const tchi_bf16x2_problem &p, const tchi_bf16x2_tile &tile,
                                                float *staged)
{
    constexpr tch_scalar stored = planes == 2 ? TCH_SCALAR_BF16X2 : TCH_SCALAR_BF16;
    if (tile.row == tile.col) {
        tchi_bf16x2_mirror_staged<size, threads>(staged);
    }
    if (p.c.type == stored) {
        tchi_bf16x2_write_as<size, threads>(p, tile, staged, stored, stored);
    } else if (planes == 2 && p.c.type == TCH_SCALAR_F64) {
        tchi_bf16x2_write_as<size, threads>(p, tile, staged, TCH_SCALAR_F64, stored);
    } else {
        tchi_bf16x2_write_as<size, threads>(p, tile, staged, p.c.type, stored);
    }
}

/* --- host -------------------------------------------------------------------------------------------------------- */

/* The kernel for wgmma, in symmetric_bf16x2_wgmma.cu: tiles of 128. */
tch_status tchi_cuda_split_wgmma(tchi_cuda_state *state, tchi_bf16x2_problem *problem, int64_t batch);

typedef void (*tchi_bf16x2_kernel)(tchi_bf16x2_problem problem);

/* Launches a kernel over all tiles of `batch` matrices, in several launches if a grid cannot hold them. */
static inline tch_status tchi_bf16x2_launch(tchi_cuda_state *state, tchi_bf16x2_kernel kernel, const char *name,
                                            tchi_bf16x2_problem *problem, int64_t batch, unsigned threads, int shared)
{
    int64_t most = 0x7FFFFFFF / problem->tiles;
    for (int64_t from = 0; from < batch; from += most) {
        int64_t count = batch - from < most ? batch - from : most;
        problem->first = from;
        TCHI_TRY(tchi_cuda_launch_shared(state, name, kernel, (unsigned)(count * problem->tiles), threads, shared,
                                         shared, *problem));
    }
    return TCH_OK;
}

#endif
