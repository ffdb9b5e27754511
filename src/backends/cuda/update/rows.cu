/* NorMuon: second moments of the rows of a direction, and the step with every row divided by the root of its second
 * moment. For a matrix O of m rows and n columns, in its parameter's shape:
 *
 *     for each row i:      v[i] = beta2 v[i] + (1 - beta2) mean of O[i][j]^2
 *     norm = sqrt of the sum of (O[i][j] / (sqrt(v[i]) + eps))^2, which follows from the sums of the rows
 *     for each element:    p[i][j] = (1 - lr weight_decay) p[i][j] - lr factor O[i][j] / (sqrt(v[i]) + eps) / norm
 *
 * A row runs along the rows of its block, where a warp sums it, or along the columns, where a block of threads sums 128
 * of them. Sums are in double in a fixed order: over a thread's elements, over the threads, and by one block over the
 * rows of a matrix. */
#include "backends/rules.h"

#include "norms.cuh"

/* --- moments ----------------------------------------------------------------------------------------------------- */

#define MOST_MATRICES 512
#define WARPS (TCHI_CUDA_UPDATE_THREADS / 32)
#define COLUMNS 128 /* per block of threads: a vec4 for each thread of a warp */

typedef struct row_matrix {
    const void *block;
    void *moments;
    int64_t count, length, ld;
    int64_t first; /* index of its first row in the call */
    int32_t block_index;
    uint8_t follow; /* rows lie along those of the block */
    uint8_t wide;   /* every fourth element of a row of the block is aligned for vec4s */
} row_matrix;

typedef struct row_matrices {
    const tch_hyper *hyper;
    const int32_t *skip;
    double *parts;
    tch_scalar type; /* of blocks */
    int32_t count;
    int32_t first_group[MOST_MATRICES + 1]; /* blocks of threads before each matrix, and in all */
    row_matrix at[MOST_MATRICES];
} row_matrices;

static_assert(sizeof(row_matrices) <= 32000, "the matrices leave no room among a kernel's parameters");

template <typename real>
static __device__ inline tchi_cuda_vec4<real> load_four(const row_matrices &list, const row_matrix &m, int64_t offset,
                                                        int64_t left)
{
    tchi_cuda_place place = {offset, left < 4 ? (int)left : 4};
    return tchi_cuda_unpack_four(list.type, tchi_cuda_load_raw<real>(list.type, m.wide, m.block, place));
}

/* Updates v by a row. */
template <typename real>
static __device__ inline void update_moment(const row_matrices &list, const row_matrix &m, int64_t row, double sum)
{
    double beta2 = list.hyper->beta2;
    real *v = (real *)m.moments + row;
    *v = (real)(beta2 * (double)*v + (1.0 - beta2) * sum / (double)m.length);
    list.parts[m.first + row] = tchi_rule_row_share(sum, (double)*v, list.hyper->eps);
}

/* A row per warp. */
template <typename real>
static __device__ inline void add_rows(const row_matrices &list, const row_matrix &m, int64_t group)
{
    int lane = (int)threadIdx.x % 32;
    int64_t row = group * WARPS + (int)threadIdx.x / 32;
    double sum = 0;
    if (row >= m.count) {
        return;
    }
#pragma unroll 4
    for (int64_t j = 4 * lane; j < m.length; j += 4 * 32) {
        tchi_cuda_vec4<real> x = load_four<real>(list, m, row * m.ld + j, m.length - j);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum = fma((double)x.v[k], (double)x.v[k], sum);
        }
    }
    sum = tchi_cuda_warp_sum(sum);
    if (lane == 0) {
        update_moment<real>(list, m, row, sum);
    }
}

/* COLUMNS of the block's columns; each warp adds every eighth element. */
template <typename real>
static __device__ inline void add_columns(const row_matrices &list, const row_matrix &m, int64_t group,
                                          double (*shared)[COLUMNS])
{
    int lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x / 32;
    int64_t first = group * COLUMNS;
    int64_t left = m.count - first - 4 * lane;
    double sum[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int64_t i = left > 0 ? warp : m.length; i < m.length; i += WARPS) {
        tchi_cuda_vec4<real> x = load_four<real>(list, m, i * m.ld + first + 4 * lane, left);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum[k] = fma((double)x.v[k], (double)x.v[k], sum[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        shared[warp][4 * lane + k] = sum[k];
    }
    __syncthreads();
    int column = (int)threadIdx.x;
    if (column < COLUMNS && first + column < m.count) {
        double total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            total += shared[w][column];
        }
        update_moment<real>(list, m, first + column, total);
    }
}

template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS)
    row_moments_kernel(const __grid_constant__ row_matrices list)
{
    __shared__ double shared[WARPS][COLUMNS];
    int index = tchi_cuda_find_item(list.first_group, list.count);
    const row_matrix &m = list.at[index];
    int64_t group = (int)blockIdx.x - list.first_group[index];
    if (list.skip != NULL && *list.skip != 0) {
        return;
    }
    if (m.follow) {
        add_rows<real>(list, m, group);
    } else {
        add_columns<real>(list, m, group, shared);
    }
}

static row_matrix matrix_of(const tch_update *update, const tch_rect *rect, int64_t first)
{
    size_t alignment = update->block_type == TCH_SCALAR_F16 || update->block_type == TCH_SCALAR_BF16 ? 8 : 16;
    row_matrix m = {};
    m.block = rect->block[0];
    m.moments = rect->state[1];
    m.count = rect->by_column ? rect->cols : rect->rows;
    m.length = rect->by_column ? rect->rows : rect->cols;
    m.ld = rect->block_ld;
    m.first = first;
    m.block_index = rect->block_index;
    m.follow = (rect->by_column != 0) == (rect->transposed != 0);
    m.wide = (uintptr_t)m.block % alignment == 0 && m.ld % 4 == 0;
    return m;
}

/* Packs as many matrices of the update as fit one launch, from *next on; returns the blocks of threads for them, 0 at
 * the end. *first is the number of rows before them. */
static int32_t pack_matrices(const tch_update *update, int64_t *next, int64_t *first, row_matrices *list,
                             norm_ranges *ranges)
{
    int64_t groups = 0;
    list->count = 0;
    for (; *next < update->count && list->count < MOST_MATRICES; ++*next) {
        row_matrix m = matrix_of(update, &update->rects[*next], *first);
        if (m.count == 0 || m.length == 0) {
            continue;
        }
        int64_t together = m.follow ? WARPS : COLUMNS;
        list->first_group[list->count] = (int32_t)groups;
        ranges->at[list->count] = {m.first, m.count, m.block_index};
        list->at[list->count++] = m;
        groups += (m.count + together - 1) / together;
        *first += m.count;
    }
    list->first_group[list->count] = (int32_t)groups;
    ranges->count = list->count;
    return (int32_t)groups;
}

/* Updates state[1] from block[0], and computes the norms of the matrices divided by their roots. `parts` is scratch. */
tch_status tchi_cuda_row_moments(void *state, const tch_update *update, double *norms, double *parts)
{
    row_matrices list;
    norm_ranges ranges;
    int64_t next = 0;
    int64_t first = 0;
    int32_t groups;
    list.hyper = update->hyper;
    list.skip = update->skip;
    list.parts = parts;
    list.type = update->block_type;
    while ((groups = pack_matrices(update, &next, &first, &list, &ranges)) > 0) {
        auto kernel = update->real == TCH_SCALAR_F64 ? row_moments_kernel<double> : row_moments_kernel<float>;
        TCHI_TRY(tchi_cuda_launch(state, "row_moments", kernel, (unsigned)groups, TCHI_CUDA_UPDATE_THREADS, list));
        TCHI_TRY(launch_range_norms(state, ranges, update->skip, parts, norms));
    }
    return TCH_OK;
}
