/* Inverse roots of small matrices in one launch: a block keeps the coupled iteration of its matrix in shared memory, in
 * float64, from (A + shift I) / bound to the finished root. Before changing the order of products: only M, H and X fit,
 * each as its lower tiles, so a result always overwrites an operand and H^root is never formed. Since all of them
 * commute, M is multiplied by powers of H while H is squared: M <- H M where root's binary digit is 1.
 *
 *     M = (A + shift I) / bound, X = I;
 *     for (step = 0; step < count; step++) {
 *         H = c[step][0] I + c[step][1] M + c[step][2] M M;
 *         X = X H;
 *         for (r = root; r > 0; r /= 2) {                     // M = H^root M
 *             M = r % 2 ? H M : M;
 *             H = H H;
 *         }
 *     }
 *     X = X pow(bound, -1.0 / root);                          // all of them symmetric, and commuting
 *
 * Let N be the batch, P the number of products of an iteration (26 for a fourth root at relative damping 1e-6). Memory:
 * A and X, 8 or 16 N n^2 bytes. Compute: N P n^3, half of a full product each; diagonal tiles are computed in full, so
 * N P n^2 (n + 16). Compute-bound from n = 16 on. Measurements: bench/logs/cuda_newton_small.md. */
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/ptx.cuh"

/* Tiles are 16 by 16: two tensor-core products wide, one deep. */
#define TILE 16
#define TILE_ELEMENTS (TILE * TILE)

/* Result tiles per warp. Three divides the 36, 21, 15, 6 and 3 lower tiles of n = 128, 96, 80, 48 and 32, and gives n =
 * 128 twelve warps, three per tensor core of a multiprocessor. */
#define WARP_TILES 3

#define MAX_TILES 8 /* along a side: n = 128 */
#define MAX_THREADS (32 * (MAX_TILES * (MAX_TILES + 1) / 2) / WARP_TILES)

typedef struct problem {
    tch_newton_iteration iteration;
    tch_matrices a, x;
    const double *shift, *bound;
    int n, tiles; /* tiles along a side */
} problem;

/* The lower tiles that a warp computes, in row order: most or all of them in one row. */
typedef struct share {
    int count;
    int row[WARP_TILES], col[WARP_TILES];
} share;

/* --- symmetric matrices in shared memory ------------------------------------------------------------------------- */

/* Lower tiles of a matrix with this many along a side. */
static __host__ __device__ inline int lower_tiles(int tiles)
{
    return tiles * (tiles + 1) / 2;
}

/* Offset of tile (row, col), row >= col; tiles are stored row by row. */
static __device__ __forceinline__ int tile_at(int row, int col)
{
    return (lower_tiles(row) + col) * TILE_ELEMENTS;
}

/* Position of an element in its tile. Each row permutes its groups of four columns, so that four rows by four columns,
 * read by half a warp at once, are in sixteen different pairs of banks, by rows and by columns. */
static __device__ __forceinline__ int element_at(int row, int col)
{
    return row * TILE + (col ^ ((row & 3) << 2));
}

static __device__ __forceinline__ void tile_of(int index, int *row, int *col)
{
    int r = 0;
    while (lower_tiles(r + 1) <= index) {
        r++;
    }
    *row = r;
    *col = index - lower_tiles(r);
}

static __device__ __forceinline__ share share_of(int tiles)
{
    share s;
    int first = (int)threadIdx.x / 32 * WARP_TILES;
    s.count = min(WARP_TILES, lower_tiles(tiles) - first);
#pragma unroll
    for (int i = 0; i < WARP_TILES; i++) {
        tile_of(min(first + i, lower_tiles(tiles) - 1), &s.row[i], &s.col[i]);
    }
    return s;
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* Positions of a lane's elements in a tile, 0 <= h < 2, 0 <= i < 4, lane = 4 g + t: (g + 8 h, 4 i + t) at rows[i] + 128
 * h, and (4 i + t, g + 8 h) at cols[h] + 64 i. */
typedef struct lane_offsets {
    int rows[4], cols[2];
} lane_offsets;

static __device__ __forceinline__ lane_offsets offsets_of_lane()
{
    int g = (int)threadIdx.x % 32 / 4;
    int t = (int)threadIdx.x % 4;
    lane_offsets o;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        o.rows[i] = element_at(g, 4 * i + t);
    }
    o.cols[0] = element_at(t, g);
    o.cols[1] = element_at(t, g + 8);
    return o;
}

/* Tile (row, k) of a symmetric matrix, stored transposed above the diagonal: v[2 i + h] is its element (g + 8 h, 4 i +
 * t), the left fragment of a product; v[h], v[2 + h], v[4 + h] and v[6 + h] are the right fragment of the transposed
 * tile's columns from 8 h on. */
static __device__ __forceinline__ void load_fragment(double v[8], const double *matrix, int row, int k,
                                                     const lane_offsets &o)
{
    const double *tile = matrix + (row >= k ? tile_at(row, k) : tile_at(k, row));
    if (row >= k) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = tile[o.rows[i / 2] + 128 * (i % 2)];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = tile[o.cols[i % 2] + 64 * (i / 2)];
        }
    }
}

/* The warp's tiles of A B over `depth` tiles. In c[s], the halves of four are columns 0 to 7 and 8 to 15 of tile s. */
static __device__ __forceinline__ void add_tile_products(double c[WARP_TILES][8], const double *a, const double *b,
                                                         const share &mine, int depth)
{
    const lane_offsets offsets = offsets_of_lane();
#pragma unroll
    for (int i = 0; i < 8 * WARP_TILES; i++) {
        c[i / 8][i % 8] = 0.0;
    }
#pragma unroll 1
    for (int k = 0; k < depth; k++) {
        double left[8];
#pragma unroll
        for (int s = 0; s < WARP_TILES; s++) {
            if (s < mine.count) {
                double right[8];
                if (s == 0 || mine.row[s] != mine.row[s - 1]) {
                    load_fragment(left, a, mine.row[s], k, offsets);
                }
                load_fragment(right, b, mine.col[s], k, offsets);
                const double low[4] = {right[0], right[2], right[4], right[6]};
                const double high[4] = {right[1], right[3], right[5], right[7]};
                tchi_mma_f64_16x8x16(c[s], left, low);
                tchi_mma_f64_16x8x16(c[s] + 4, left, high);
            }
        }
    }
}

/* Row and column in its tile of number i of the eight elements of a tile that a lane holds after a product. */
static __device__ __forceinline__ int held_row(int i)
{
    return (int)threadIdx.x % 32 / 4 + 8 * (i / 2 % 2);
}

static __device__ __forceinline__ int held_col(int i)
{
    return 8 * (i / 4) + 2 * ((int)threadIdx.x % 4) + i % 2;
}

/* c0 I + c1 A + c2 C in place of C, one tile; `tile` is A's. */
static __device__ __forceinline__ void combine_tile(double c[8], const double *tile, bool diagonal,
                                                    const double *coefficient)
{
    const double c0 = coefficient[0];
    const double c1 = coefficient[1];
    const double c2 = coefficient[2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = held_row(i);
        int col = held_col(i);
        double constant = diagonal && row == col ? c0 : 0.0;
        c[i] = fma(c2, c[i], fma(c1, tile[element_at(row, col)], constant));
    }
}

/* Of a tile on the diagonal the lower half is written twice, so that symmetry is exact. */
static __device__ __forceinline__ void store_tile(double *tile, const double c[8], bool diagonal)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = held_row(i);
        int col = held_col(i);
        if (!diagonal) {
            tile[element_at(row, col)] = c[i];
        } else if (row >= col) {
            tile[element_at(row, col)] = c[i];
            tile[element_at(col, row)] = c[i];
        }
    }
}

/* --- the iteration ----------------------------------------------------------------------------------------------- */

/* The three matrices, contiguous in shared memory. */
typedef enum part { PART_M = 0, PART_H = 1, PART_X = 2 } part;

/* OUT = A B; OUT may be A or B: all threads read before any writes. With coefficients, and OUT distinct from A and B,
 * OUT = c0 I + c1 A + c2 A B. All products are done here; not inlined, so that it is compiled once and stays within its
 * registers. */
static __device__ __noinline__ void multiply_matrices(part out, part a, part b, const double *coefficient, int depth,
                                                      int tiles)
{
    extern __shared__ __align__(16) double shared[];
    int size = lower_tiles(tiles) * TILE_ELEMENTS;
    const share mine = share_of(tiles);
    double c[WARP_TILES][8];
    add_tile_products(c, shared + a * size, shared + b * size, mine, depth);
    __syncthreads();
#pragma unroll
    for (int s = 0; s < WARP_TILES; s++) {
        if (s < mine.count) {
            int tile = tile_at(mine.row[s], mine.col[s]);
            bool diagonal = mine.row[s] == mine.col[s];
            if (coefficient != nullptr) {
                combine_tile(c[s], shared + a * size + tile, diagonal, coefficient);
            }
            store_tile(shared + out * size + tile, c[s], diagonal);
        }
    }
    __syncthreads();
}

/* X = H, replacing the identity. */
static __device__ __forceinline__ void take_first(int tiles)
{
    extern __shared__ __align__(16) double shared[];
    int size = lower_tiles(tiles) * TILE_ELEMENTS;
    for (int i = (int)threadIdx.x; i < size; i += (int)blockDim.x) {
        shared[PART_X * size + i] = shared[PART_H * size + i];
    }
    __syncthreads();
}

/* M <- H^root M; H is overwritten. */
static __device__ __forceinline__ void update_m(int root, int tiles)
{
    for (; root > 0; root >>= 1) {
        if (root & 1) {
            multiply_matrices(PART_M, PART_H, PART_M, nullptr, tiles, tiles);
        }
        if (root > 1) {
            multiply_matrices(PART_H, PART_H, PART_H, nullptr, tiles, tiles);
        }
    }
}

static __device__ __forceinline__ void iterate_newton(const tch_newton_iteration &iteration, int tiles)
{
    for (int step = 0; step < iteration.count; step++) {
        multiply_matrices(PART_H, PART_M, PART_M, iteration.c[step], iteration.degree == 2 ? tiles : 0, tiles);
        if (step == 0) {
            take_first(tiles);
        } else {
            multiply_matrices(PART_X, PART_X, PART_H, nullptr, tiles, tiles);
        }
        if (step + 1 < iteration.count) {
            update_m(iteration.root, tiles);
        }
    }
}

/* --- global and shared memory ------------------------------------------------------------------------------------ */

/* M = (A + shift I) / bound and X = I, from A's lower triangle, padded with the identity, which the iteration preserves
 * separately. Numerator and denominator are first scaled half of the way to 1 by a power of two: 1 / bound may overflow
 * although bound does not. */
static __device__ __forceinline__ void load_matrix(const problem &p, int64_t matrix, double *m, double *x)
{
    double shift = p.shift[matrix];
    double bound = p.bound[matrix];
    double unit = ldexp(1.0, -ilogb(bound) / 2);
    double inverse = 1.0 / (bound * unit);
    for (int index = (int)threadIdx.x / 32; index < lower_tiles(p.tiles); index += (int)blockDim.x / 32) {
        int tile_row;
        int tile_col;
        tile_of(index, &tile_row, &tile_col);
#pragma unroll
        for (int e = (int)threadIdx.x % 32; e < TILE_ELEMENTS; e += 32) {
            int row = TILE * tile_row + e / TILE;
            int col = TILE * tile_col + e % TILE;
            double one = row == col ? 1.0 : 0.0;
            double value = one;
            if (row < p.n && col < p.n) {
                int64_t at = matrix * p.a.stride + max(row, col) * p.a.ld + min(row, col);
                value = (tchi_cuda_load<double>(p.a.type, p.a.data, at, 0) + one * shift) * unit * inverse;
            }
            int place = index * TILE_ELEMENTS + element_at(e / TILE, e % TILE);
            m[place] = value;
            x[place] = one;
        }
    }
}

/* The output is X bound^(-1/root), both triangles. */
static __device__ __forceinline__ void store_matrix(const problem &p, int64_t matrix, const double *x)
{
    double factor = pow(p.bound[matrix], -1.0 / p.iteration.root);
    for (int index = (int)threadIdx.x / 32; index < p.tiles * p.tiles; index += (int)blockDim.x / 32) {
        int tile_row = index / p.tiles;
        int tile_col = index % p.tiles;
        bool lower = tile_row >= tile_col;
        const double *tile = x + (lower ? tile_at(tile_row, tile_col) : tile_at(tile_col, tile_row));
#pragma unroll
        for (int e = (int)threadIdx.x % 32; e < TILE_ELEMENTS; e += 32) {
            int r = e / TILE;
            int c = e % TILE;
            int64_t row = TILE * tile_row + r;
            int64_t col = TILE * tile_col + c;
            if (row < p.n && col < p.n) {
                double value = factor * tile[lower ? element_at(r, c) : element_at(c, r)];
                tchi_cuda_store<double>(p.x.type, p.x.data, matrix * p.x.stride + row * p.x.ld + col, 0, value);
            }
        }
    }
}

/* A block per matrix, with a warp per WARP_TILES lower tiles. */
static __global__ void __launch_bounds__(MAX_THREADS) newton_kernel(const __grid_constant__ problem p)
{
    extern __shared__ __align__(16) double shared[];
    int size = lower_tiles(p.tiles) * TILE_ELEMENTS;
    for (int64_t matrix = blockIdx.x; matrix < p.a.batch; matrix += gridDim.x) {
        load_matrix(p, matrix, shared + PART_M * size, shared + PART_X * size);
        __syncthreads();
        iterate_newton(p.iteration, p.tiles);
        store_matrix(p, matrix, shared + PART_X * size);
        __syncthreads();
    }
}

/* --- the operation ----------------------------------------------------------------------------------------------- */

static int64_t shared_bytes(int tiles)
{
    return (int64_t)3 * lower_tiles(tiles) * TILE_ELEMENTS * (int64_t)sizeof(double);
}

/* Without full-rate float64 tensor cores (compute capability 8.0, 9.0, 10.0) the saved launches are worth two tiles;
 * reasoned, not measured. */
int64_t tchi_cuda_newton_limit(const tchi_cuda_state *state)
{
    const tchi_cuda_device *device = &state->device;
    bool fast = device->minor == 0 && (device->major == 8 || device->major == 9 || device->major == 10);
    int tiles = fast ? MAX_TILES : 2;
    while (tiles > 0 && shared_bytes(tiles) > device->shared_per_block) {
        tiles--;
    }
    return (int64_t)TILE * tiles;
}

tch_status tchi_cuda_newton(void *state, const tch_newton_iteration *iteration, const tch_matrices *a,
                            const double *shift, const double *bound, const tch_matrices *x)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    if (a->batch == 0 || a->rows == 0) {
        return TCH_OK;
    }
    int tiles = (int)tchi_cuda_ceil_div(a->rows, TILE);
    int warps = (lower_tiles(tiles) + WARP_TILES - 1) / WARP_TILES;
    problem p = {*iteration, *a, *x, shift, bound, (int)a->rows, tiles};
    const int64_t most = shared_bytes((int)(tchi_cuda_newton_limit(s) / TILE));
    return tchi_cuda_launch_shared(s, "newton_kernel", newton_kernel, tchi_cuda_grid(a->batch), 32 * warps, most,
                                   shared_bytes(tiles), p);
}
