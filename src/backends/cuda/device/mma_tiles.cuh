/* Product tiles by tensor cores, for kernels that reduce the tile instead of storing it: its squares are summed, or it
 * is multiplied by another. X and Y are given by rows, for a tile of X Y', or by columns, for X' Y; contiguous data is
 * copied 16 bytes at a time. A k-tile in shared memory is LINES of memory (rows of X, or steps of the contraction) in
 * 16-byte chunks, swizzled against bank conflicts; float32 fragments given by columns permute rows and columns of the
 * tile: see tchi_tile_row and tchi_tile_col. Products of half types are exact, float32 operands are rounded to TF32;
 * accumulation is in float32. */
#ifndef TCHI_CUDA_SAMPLE_TILES_CUH
#define TCHI_CUDA_SAMPLE_TILES_CUH

#include "elements.cuh"
#include "ptx.cuh"

#define TCHI_TILE_ROWS 128
#define TCHI_TILE_THREADS 256 /* 8 warps, two by four */
#define TCHI_TILE_STAGES 3    /* k-tiles in flight and in use */

/* A warp has 4 by 4 accumulators of 16 by 8; the stages take 96 KiB, the limit of a block on sm_86, 89 and 120. */
#define TCHI_TILE_COLS 128
#define TCHI_TILE_X_BYTES (TCHI_TILE_ROWS * 128)
#define TCHI_TILE_STAGE_BYTES (TCHI_TILE_X_BYTES + TCHI_TILE_COLS * 128)
#define TCHI_TILE_SHARED_BYTES (TCHI_TILE_STAGES * TCHI_TILE_STAGE_BYTES)

/* One operand. Sizes and strides are in bytes; `end` is the end of the last element. */
typedef struct tchi_tile_side {
    const char *data, *end;
    int64_t ld, stride;
    int64_t count; /* of the rows or columns that tiles are cut from */
} tchi_tile_side;

typedef struct tchi_tile_pair {
    tchi_tile_side x, y;
    int64_t depth; /* of the contraction */
} tchi_tile_pair;

/* A block's work: its tile of matrices first, first + step, ..., `matrices` of them in sequence. */
typedef struct tchi_tile_work {
    int64_t row, col;
    int64_t first, step, matrices;
} tchi_tile_work;

static inline tchi_tile_side tchi_tile_side_of(const tch_matrices *m, bool by_rows)
{
    int64_t size = tchi_cuda_size(m->type);
    int64_t last = (m->batch - 1) * m->stride + (m->rows - 1) * m->ld + m->cols;
    const char *data = (const char *)m->data;
    return {data, data + last * size, m->ld * size, m->stride * size, by_rows ? m->rows : m->cols};
}

/* Whether every row of every matrix begins at a multiple of 16 bytes. */
static inline bool tchi_tile_aligned(const tch_matrices *m)
{
    int64_t size = tchi_cuda_size(m->type);
    return (uintptr_t)m->data % 16 == 0 && m->ld * size % 16 == 0 && m->stride * size % 16 == 0;
}

/* --- k-tiles ----------------------------------------------------------------------------------------------------- */

/* Depth of a k-tile of `width` rows or columns, its lines, the chunks per line, and the lines that the block's threads
 * cover at a time. */
template <int size, bool by_rows, int width> struct tchi_tile_layout {
    static constexpr int depth = 128 / size;
    static constexpr int lines = by_rows ? width : depth;
    static constexpr int line_bytes = by_rows ? 128 : width * size;
    static constexpr int chunks = line_bytes / 16;
    static constexpr int lines_at_once = TCHI_TILE_THREADS / chunks;
    static constexpr int rounds = lines / lines_at_once;
};

template <int size, bool by_rows, int width> static __device__ __forceinline__ int tchi_tile_place(int line, int chunk)
{
    int other = by_rows || size == 2 ? line & 7 : (line & 3) << 1;
    return line * tchi_tile_layout<size, by_rows, width>::line_bytes + ((chunk ^ other) << 4);
}

/* Source of a thread's chunks of the next k-tile, and the part inside the matrix: lines or, by columns, bytes of a
 * chunk. */
typedef struct tchi_tile_source {
    const char *from;
    int inside;
} tchi_tile_source;

static __device__ __forceinline__ int tchi_tile_clamp(int64_t value, int most)
{
    return value < 0 ? 0 : value < most ? (int)value : most;
}

template <class layout, int size, bool by_rows>
static __device__ __forceinline__ tchi_tile_source tchi_tile_source_of(const tchi_tile_side &m, int64_t matrix,
                                                                       int64_t tile)
{
    int chunk = (int)threadIdx.x % layout::chunks;
    int line = (int)threadIdx.x / layout::chunks;
    int64_t left = m.count - tile;
    const char *from = m.data + matrix * m.stride + line * m.ld + chunk * 16;
    if (by_rows) {
        return {from + tile * m.ld, tchi_tile_clamp(left, layout::lines)};
    }
    return {from + tile * size, tchi_tile_clamp(left * size - chunk * 16, 16)};
}

/* Valid bytes of the thread's chunk in round `round`, with `left` steps of the contraction inside. */
template <class layout, int size, bool by_rows>
static __device__ __forceinline__ int tchi_tile_bytes(const tchi_tile_source &s, int left, int round)
{
    int line = (int)threadIdx.x / layout::chunks + round * layout::lines_at_once;
    if (by_rows) {
        int chunk = (int)threadIdx.x % layout::chunks;
        return line < s.inside ? min(max(left * size - chunk * 16, 0), 16) : 0;
    }
    return line < left ? s.inside : 0;
}

/* Aligned operands are copied in the background. */
template <int size, bool by_rows, int width>
static __device__ __forceinline__ void tchi_tile_copy(char *ktile, const tchi_tile_side &m, const tchi_tile_source &s,
                                                      int left)
{
    using layout = tchi_tile_layout<size, by_rows, width>;
    int line = (int)threadIdx.x / layout::chunks;
    int chunk = (int)threadIdx.x % layout::chunks;
#pragma unroll
    for (int i = 0; i < layout::rounds; i++) {
        int bytes = tchi_tile_bytes<layout, size, by_rows>(s, left, i);
        const char *from = bytes > 0 ? s.from + i * (layout::lines_at_once * m.ld) : m.data;
        char *to = ktile + tchi_tile_place<size, by_rows, width>(line + i * layout::lines_at_once, chunk);
        tchi_cp_async_16(to, from, bytes);
    }
}

/* The 16 bytes that begin `skip` bytes into 32. */
static __device__ __forceinline__ uint4 tchi_tile_shift(const uint4 &low, const uint4 &high, int skip)
{
    uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; i++) {
        w[i] = skip & 8 ? w[i + 2] : w[i];
    }
#pragma unroll
    for (int i = 0; i < 5; i++) {
        w[i] = skip & 4 ? w[i + 1] : w[i];
    }
    int bits = skip % 4 * 8;
    return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                      __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
}

/* The first `bytes` of 16 from any address, zero-filled: by two aligned loads where these are inside the operand. */
template <int size>
static __device__ __forceinline__ uint4 tchi_tile_fetch(const tchi_tile_side &m, const char *from, int bytes)
{
    int skip = (int)((uintptr_t)from % 16);
    const char *start = from - skip;
    if (bytes == 16 && start >= m.data && start + 32 <= m.end) {
        const uint4 *whole = (const uint4 *)start;
        return tchi_tile_shift(__ldg(whole), __ldg(whole + 1), skip);
    }
    uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i += size) {
        if (i < bytes) {
            uint32_t bits = size == 2 ? *(const uint16_t *)(from + i) : *(const uint32_t *)(from + i);
            w[i / 4] |= bits << (8 * (i % 4));
        }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Unaligned operands pass through registers: fetched before a k-tile is multiplied, stored to shared memory after
 * it. */
template <int size, bool by_rows, int width>
static __device__ __forceinline__ void tchi_tile_fetch_all(uint4 *held, const tchi_tile_side &m,
                                                           const tchi_tile_source &s, int left)
{
    using layout = tchi_tile_layout<size, by_rows, width>;
#pragma unroll
    for (int i = 0; i < layout::rounds; i++) {
        int bytes = tchi_tile_bytes<layout, size, by_rows>(s, left, i);
        held[i] = bytes > 0 ? tchi_tile_fetch<size>(m, s.from + i * (layout::lines_at_once * m.ld), bytes)
                            : make_uint4(0, 0, 0, 0);
    }
}

template <int size, bool by_rows, int width>
static __device__ __forceinline__ void tchi_tile_put(char *ktile, const uint4 *held)
{
    using layout = tchi_tile_layout<size, by_rows, width>;
    int chunk = (int)threadIdx.x % layout::chunks;
    int line = (int)threadIdx.x / layout::chunks;
#pragma unroll
    for (int i = 0; i < layout::rounds; i++) {
        int place = tchi_tile_place<size, by_rows, width>(line + i * layout::lines_at_once, chunk);
        *(uint4 *)(ktile + place) = held[i];
    }
}

/* --- fragments --------------------------------------------------------------------------------------------------- */

/* A warp's sums, 4 by 4 accumulators of 16 by 8. Element e of accumulator (i, j) is row tchi_tile_row(i, e / 2)
 * and column tchi_tile_col(j, e % 2) of the tile. */
struct tchi_tile_sums {
    float v[4][4][4];
};

static __device__ __forceinline__ int tchi_tile_warp_row()
{
    return (int)threadIdx.x / 128 * 64;
}

static __device__ __forceinline__ int tchi_tile_warp_col()
{
    return (int)threadIdx.x / 32 % 4 * 32;
}

template <int size, bool by_rows> static __device__ __forceinline__ int tchi_tile_row(int i, int half)
{
    int g = (int)threadIdx.x % 32 / 4;
    return tchi_tile_warp_row() + (by_rows || size == 2 ? 16 * i + 8 * half + g : 32 * half + 4 * g + i);
}

template <int size, bool by_rows> static __device__ __forceinline__ int tchi_tile_col(int j, int odd)
{
    int t = (int)threadIdx.x % 4;
    return tchi_tile_warp_col() + (by_rows || size == 2 ? 8 * j + 2 * t + odd : 8 * t + 4 * odd + j);
}

/* Step `step` of the k-tile's four along the contraction: 32 bytes of every line, or a quarter of the lines. */
template <int size, bool by_rows>
static __device__ __forceinline__ void tchi_tile_load_x(uint32_t (&a)[4][4], const char *ktile, int step)
{
    constexpr int width = TCHI_TILE_ROWS;
    int lane = (int)threadIdx.x % 32;
    int row = tchi_tile_warp_row();
    if (by_rows) {
        const char *first = ktile + tchi_tile_place<size, true, width>(row + lane % 16, 2 * step + lane / 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            tchi_ldmatrix_x4(a[i], first + 16 * i * 128);
        }
    } else if (size == 2) {
        int k = 16 * step + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int chunk = row / 8 + 2 * i + lane / 8 % 2;
            tchi_ldmatrix_x4_transposed(a[i], ktile + tchi_tile_place<2, false, width>(k, chunk));
        }
    } else {
#pragma unroll
        for (int part = 0; part < 4; part++) {
            int k = 8 * step + part / 2 * 4 + lane % 4;
            int chunk = row / 4 + part % 2 * 8 + lane / 4;
            uint4 four = *(const uint4 *)(ktile + tchi_tile_place<4, false, width>(k, chunk));
            a[0][part] = four.x, a[1][part] = four.y, a[2][part] = four.z, a[3][part] = four.w;
        }
    }
}

template <int size, bool by_rows>
static __device__ __forceinline__ void tchi_tile_load_y(uint32_t (&b)[4][2], const char *ktile, int step)
{
    constexpr int width = TCHI_TILE_COLS;
    int lane = (int)threadIdx.x % 32;
    int col = tchi_tile_warp_col();
    if (by_rows || size == 2) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            uint32_t r[4];
            if (by_rows) {
                int line = col + 8 * j + lane / 16 * 8 + lane % 8;
                tchi_ldmatrix_x4(r, ktile + tchi_tile_place<size, true, width>(line, 2 * step + lane / 8 % 2));
            } else {
                int k = 16 * step + lane / 8 % 2 * 8 + lane % 8;
                tchi_ldmatrix_x4_transposed(r, ktile + tchi_tile_place<2, false, width>(k, col / 8 + j + lane / 16));
            }
            b[j][0] = r[0], b[j][1] = r[1], b[j + 1][0] = r[2], b[j + 1][1] = r[3];
        }
    } else {
#pragma unroll
        for (int part = 0; part < 2; part++) {
            int k = 8 * step + part * 4 + lane % 4;
            int chunk = col / 4 + lane / 4;
            uint4 four = *(const uint4 *)(ktile + tchi_tile_place<4, false, width>(k, chunk));
            b[0][part] = four.x, b[1][part] = four.y, b[2][part] = four.z, b[3][part] = four.w;
        }
    }
}

template <tch_scalar type>
static __device__ __forceinline__ void tchi_tile_mma(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    if (type == TCH_SCALAR_F32) {
        tchi_mma_tf32(sum, a, b);
    } else if (type == TCH_SCALAR_BF16) {
        tchi_mma_bf16(sum, a, b);
    } else {
        tchi_mma_f16(sum, a, b);
    }
}

template <int count, int each> static __device__ __forceinline__ void tchi_tile_round(uint32_t (&r)[count][each])
{
#pragma unroll
    for (int i = 0; i < count * each; i++) {
        r[i / each][i % each] = tchi_round_tf32(r[i / each][i % each]);
    }
}

template <tch_scalar type, bool by_rows>
static __device__ __forceinline__ void tchi_tile_multiply(tchi_tile_sums &sum, const char *x, const char *y)
{
    constexpr int size = type == TCH_SCALAR_F32 ? 4 : 2;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t a[4][4];
        uint32_t b[4][2];
        tchi_tile_load_x<size, by_rows>(a, x, step);
        tchi_tile_load_y<size, by_rows>(b, y, step);
        if (type == TCH_SCALAR_F32) {
            tchi_tile_round(a);
            tchi_tile_round(b);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                tchi_tile_mma<type>(sum.v[i][j], a[i], b[j]);
            }
        }
    }
}

/* --- all k-tiles of a block -------------------------------------------------------------------------------------- */

/* A walk over the k-tiles of all matrices, for loading ahead of the products. */
typedef struct tchi_tile_walk {
    tchi_tile_source x, y;
    int64_t matrix, matrices; /* the next k-tile's, and how many remain */
    int64_t left;             /* steps of the contraction from the next k-tile on */
} tchi_tile_walk;

template <int size, bool by_rows>
static __device__ __forceinline__ void tchi_tile_enter(tchi_tile_walk *at, const tchi_tile_pair &p,
                                                       const tchi_tile_work &w)
{
    using x_layout = tchi_tile_layout<size, by_rows, TCHI_TILE_ROWS>;
    using y_layout = tchi_tile_layout<size, by_rows, TCHI_TILE_COLS>;
    at->x = tchi_tile_source_of<x_layout, size, by_rows>(p.x, at->matrix, w.row);
    at->y = tchi_tile_source_of<y_layout, size, by_rows>(p.y, at->matrix, w.col);
    at->left = p.depth;
}

template <int size, bool by_rows>
static __device__ __forceinline__ void tchi_tile_step(tchi_tile_walk *at, const tchi_tile_pair &p,
                                                      const tchi_tile_work &w)
{
    constexpr int depth = 128 / size;
    at->x.from += by_rows ? 128 : depth * p.x.ld;
    at->y.from += by_rows ? 128 : depth * p.y.ld;
    at->left -= depth;
    if (at->left <= 0) {
        at->matrix += w.step;
        at->matrices--;
        tchi_tile_enter<size, by_rows>(at, p, w);
    }
}

/* Issues the copies of the next k-tile as one group, empty after the last. */
template <int size, bool by_rows>
static __device__ __forceinline__ void tchi_tile_load(char *stage, const tchi_tile_pair &p, const tchi_tile_work &w,
                                                      tchi_tile_walk *at)
{
    if (at->matrices > 0) {
        int left = (int)(at->left < 128 ? at->left : 128);
        tchi_tile_copy<size, by_rows, TCHI_TILE_ROWS>(stage, p.x, at->x, left);
        tchi_tile_copy<size, by_rows, TCHI_TILE_COLS>(stage + TCHI_TILE_X_BYTES, p.y, at->y, left);
        tchi_tile_step<size, by_rows>(at, p, w);
    }
    tchi_cp_async_commit();
}

/* Data in flight from global to shared memory through registers. */
struct tchi_tile_held {
    uint4 x[4], y[4];
};

template <int size, bool by_rows>
static __device__ __forceinline__ void tchi_tile_hold(tchi_tile_held *held, const tchi_tile_pair &p,
                                                      const tchi_tile_work &w, tchi_tile_walk *at)
{
    if (at->matrices > 0) {
        int left = (int)(at->left < 128 ? at->left : 128);
        tchi_tile_fetch_all<size, by_rows, TCHI_TILE_ROWS>(held->x, p.x, at->x, left);
        tchi_tile_fetch_all<size, by_rows, TCHI_TILE_COLS>(held->y, p.y, at->y, left);
        tchi_tile_step<size, by_rows>(at, p, w);
    }
}

template <int size, bool by_rows>
static __device__ __forceinline__ void tchi_tile_release(char *stage, const tchi_tile_held &held)
{
    tchi_tile_put<size, by_rows, TCHI_TILE_ROWS>(stage, held.x);
    tchi_tile_put<size, by_rows, TCHI_TILE_COLS>(stage + TCHI_TILE_X_BYTES, held.y);
}

/* Calls done(sums) for the tile of each matrix in sequence and clears the sums after it. `shared` has
 * TCHI_TILE_SHARED_BYTES, free for reuse on return. */
template <tch_scalar type, bool by_rows, bool aligned, typename finish>
static __device__ __forceinline__ void tchi_tiles(char *shared, const tchi_tile_pair &p, const tchi_tile_work &w,
                                                  finish done)
{
    constexpr int size = type == TCH_SCALAR_F32 ? 4 : 2;
    constexpr int stage_bytes = TCHI_TILE_STAGE_BYTES;
    int64_t ktiles = tchi_cuda_ceil_div(p.depth, 128 / size);
    tchi_tile_walk at;
    at.matrix = w.first;
    at.matrices = ktiles > 0 ? w.matrices : 0;
    tchi_tile_enter<size, by_rows>(&at, p, w);
    tchi_tile_held held = {};
    tchi_tile_sums sum = {};
    int stage = 0;
    __syncthreads();
    if (aligned) {
        for (int s = 0; s < TCHI_TILE_STAGES - 1; s++) {
            tchi_tile_load<size, by_rows>(shared + s * stage_bytes, p, w, &at);
        }
    } else {
        tchi_tile_hold<size, by_rows>(&held, p, w, &at);
        tchi_tile_release<size, by_rows>(shared, held);
    }
    for (int64_t m = 0; m < w.matrices; m++) {
        for (int64_t s = 0; s < ktiles; s++) {
            char *now = shared + stage * stage_bytes;
            if (aligned) {
                tchi_cp_async_wait<TCHI_TILE_STAGES - 2>();
            }
            __syncthreads(); /* the k-tile has landed for all, and the previous one is no longer in use */
            if (aligned) {
                int next = stage == 0 ? TCHI_TILE_STAGES - 1 : stage - 1;
                tchi_tile_load<size, by_rows>(shared + next * stage_bytes, p, w, &at);
            } else {
                tchi_tile_hold<size, by_rows>(&held, p, w, &at);
            }
            tchi_tile_multiply<type, by_rows>(sum, now, now + TCHI_TILE_X_BYTES);
            stage = stage + 1 == TCHI_TILE_STAGES ? 0 : stage + 1;
            if (!aligned) {
                tchi_tile_release<size, by_rows>(shared + stage * stage_bytes, held);
            }
        }
        done(sum);
#pragma unroll
        for (int i = 0; i < 64; i++) {
            sum.v[i / 16][i / 4 % 4][i % 4] = 0.0f;
        }
    }
}

#endif
