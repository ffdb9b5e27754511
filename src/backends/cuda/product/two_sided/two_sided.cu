/* Two-sided products: Y = L X R' with roots, and L X R' or L' X R with bases.
 *
 *     X16 = half(scale X)                               // fp16_copy.cu, or from gather_fp16
 *     T   = (L X16)', in float16                        // transposed_product.cu
 *     Y   = (R T)', with all scales undone              // and |Y| with it
 *
 * Sums of k terms stay below 2^16 k if X16 is below 2^15 and a side below 2, so T is divided by a power of two that
 * keeps it below 2^15; float16 has 11 bits down to 2^-14. */
#include "two_sided.h"

#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/matrix/fp16_copy.h"
#include "backends/cuda/product/factor_gram/factor_gram.h"
#include "backends/packed_sides.h"

#define THREADS 256

/* --- small kernels ----------------------------------------------------------------------------------------------- */

/* Block b handles left matrix b, then the right ones. Roots are positive definite, so the largest element is on the
 * diagonal. */
static __global__ void __launch_bounds__(THREADS)
    diagonal_bits(const tchi_cuda_operand left, int64_t rows, const tchi_cuda_operand right, int64_t cols,
                  int64_t batch, uint32_t *largest)
{
    __shared__ uint32_t of_warps[THREADS / 32];
    bool second = blockIdx.x >= batch;
    int64_t b = blockIdx.x - (second ? batch : 0);
    uint32_t most = 0;
    for (int64_t i = threadIdx.x; i < (second ? cols : rows); i += THREADS) {
        const char *at = tchi_cuda_at(second ? right : left, b, i, i);
        most = max(most, __float_as_uint(*(const float *)at) & 0x7FFFFFFFu);
    }
    most = tchi_cuda_warp_max(most);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = most;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < THREADS / 32; w++) {
            most = max(most, of_warps[w]);
        }
        largest[blockIdx.x] = most;
    }
}

/* One warp to a matrix, its sums in a fixed order. */
static __global__ void __launch_bounds__(THREADS)
    root_of_squares(const double *partial, int64_t each, int64_t batch, double *norms)
{
    int64_t b = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    double sum = 0;
    if (b >= batch) {
        return;
    }
    for (int64_t i = threadIdx.x % 32; i < each; i += 32) {
        sum += partial[b * each + i];
    }
    sum = tchi_cuda_warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
        norms[b] = sqrt(sum);
    }
}

/* --- by float16 -------------------------------------------------------------------------------------------------- */

/* Both copies together are as large as X of float32. */
typedef struct two_sided_plan {
    tch_matrices copy; /* of X, or X itself */
    tch_matrices transposed;
    uint32_t *left, *right, *x; /* their largest elements, contiguous in the workspace */
    double *partial;
    int64_t each; /* sums of one matrix */
} two_sided_plan;

static tch_matrices fp16_at(void *data, int64_t rows, int64_t cols, int64_t batch)
{
    return (tch_matrices){data, TCH_SCALAR_F16, rows, cols, cols, batch, rows * cols};
}

static two_sided_plan plan_of(const tchi_cuda_state *state, const tch_matrices *x, void *other)
{
    two_sided_plan p = {};
    int is_copy = x->type == TCH_SCALAR_F16;
    int64_t copied = is_copy ? 0 : x->rows * x->cols * x->batch;
    p.copy = is_copy ? *x : fp16_at(other, x->rows, x->cols, x->batch);
    p.transposed = fp16_at((uint16_t *)other + copied, x->cols, x->rows, x->batch);
    p.each = tchi_cuda_transposed_partials(x->cols, x->rows);
    p.partial = (double *)state->blas_workspace;
    p.left = (uint32_t *)(p.partial + p.each * x->batch);
    p.right = p.left + x->batch;
    p.x = p.right + x->batch;
    return p;
}

static int supported(const tchi_cuda_state *state, const tch_matrices *left, const tch_matrices *right,
                     const tch_matrices *y, const two_sided_plan *p)
{
    return y->type == TCH_SCALAR_F32 && state->blas_workspace != NULL && y->batch > 0 &&
           y->stride >= y->rows * y->cols &&
           (char *)(p->x + y->batch) - (char *)p->partial <= tchi_cuda_workspace_bytes(state) &&
           tchi_cuda_transposed_product_supported(state, left, &p->copy, &p->transposed) &&
           tchi_cuda_transposed_product_supported(state, right, &p->transposed, y);
}

/* 1 + ceil(log2(terms)) */
static int32_t power_for(int64_t terms)
{
    int32_t power = 1;
    for (int64_t k = 1; k < terms; k *= 2) {
        power++;
    }
    return power;
}

static tch_status in_fp16(tchi_cuda_state *state, tch_sides sides, const tch_matrices *left, const tch_matrices *right,
                          const tch_matrices *x, const uint32_t *largest, const tch_matrices *y, double *norms,
                          const two_sided_plan *p)
{
    const int roots = sides == TCH_SIDES_ROOTS, back = sides == TCH_SIDES_OUT_OF_BASES;
    const uint32_t *of_x = largest != NULL ? largest : p->x;
    const int32_t power = power_for(x->rows);
    const tchi_transposed_scales first = {roots ? p->left : NULL, NULL, NULL, -power};
    const tchi_transposed_scales second = {roots ? p->right : NULL, roots ? p->left : NULL, of_x, power};
    if (roots) {
        TCHI_TRY(tchi_cuda_launch(state, "diagonal_bits", diagonal_bits, tchi_cuda_grid(2 * x->batch), THREADS,
                                  tchi_cuda_operand_of(left), x->rows, tchi_cuda_operand_of(right), x->cols, x->batch,
                                  p->left));
    }
    if (x->type == TCH_SCALAR_F32) {
        TCHI_TRY(largest != NULL ? TCH_OK : tchi_cuda_largest_bits(state, x, p->x));
        TCHI_TRY(tchi_cuda_fp16_copy(state, x, of_x, &p->copy));
    }
    TCHI_TRY(tchi_cuda_transposed_product(state, left, back, &p->copy, &p->transposed, &first, NULL));
    TCHI_TRY(tchi_cuda_transposed_product(state, right, back, &p->transposed, y, &second,
                                          norms != NULL ? p->partial : NULL));
    if (norms == NULL) {
        return TCH_OK;
    }
    return tchi_cuda_launch(state, "root_of_squares", root_of_squares,
                            tchi_cuda_grid(tchi_cuda_ceil_div(x->batch * 32, THREADS)), THREADS, p->partial, p->each,
                            x->batch, norms);
}

/* --- whitened factors -------------------------------------------------------------------------------------------- */

/* to = x', in tiles of 64 by 64 elements of 16 bits, both with rows of whole 16-byte chunks. Rows of a tile have 65, so
 * that the eight chunks of a column, and the four columns of a warp, are in different banks. Llama-1B: 3.3 GB, 0.8 ms
 * at 4.2 TB/s, where matrix/copy.cu, one element at a time, takes 2.9. */
static __global__ void __launch_bounds__(THREADS)
    transpose_fp16(const tchi_cuda_operand x, const tchi_cuda_operand to, int64_t rows, int64_t cols, int64_t batch)
{
    __shared__ uint16_t tile[64][65];
    const int64_t row = (int64_t)blockIdx.y * 64, col = (int64_t)blockIdx.x * 64;
    const int chunk = (int)threadIdx.x % 8 * 8;
    for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
#pragma unroll
        for (int line = (int)threadIdx.x / 8; line < 64; line += THREADS / 8) {
            if (row + line < rows && col + chunk < cols) {
                const uint4 eight = *(const uint4 *)tchi_cuda_at(x, b, row + line, col + chunk);
                const uint32_t two[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    tile[line][chunk + k] = (uint16_t)(two[k / 2] >> k % 2 * 16);
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int line = (int)threadIdx.x / 8; line < 64; line += THREADS / 8) {
            if (col + line < cols && row + chunk < rows) {
                uint32_t two[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    two[k] = (uint32_t)tile[chunk + 2 * k][line] | (uint32_t)tile[chunk + 2 * k + 1][line] << 16;
                }
                *(uint4 *)tchi_cuda_at(to, b, col + line, row + chunk) = make_uint4(two[0], two[1], two[2], two[3]);
            }
        }
        __syncthreads();
    }
}

/* What a whitened block stored as float16 needs to be rescaled like a copy whose largest element has these bits. */
static __global__ void __launch_bounds__(THREADS)
    product_bits(const uint32_t *side, const uint32_t *x, int32_t power, int64_t batch, uint32_t *largest)
{
    int64_t b = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (b < batch) {
        int total = power + tchi_fp16_unit_power(side[b]) + tchi_fp16_power(x[b]);
        largest[b] = (uint32_t)(141 - max(min(total, 126), -113)) << 23;
    }
}

/* With X the root: columns take (X A)' from A, rows A X = (X A')' from a transposed copy. Either is the transposed
 * product's result, and its rows' Gram matrix the update. Copy and result together are as large as A of float32. */
extern "C" tch_status tchi_cuda_whitened_factor(tchi_cuda_state *state, const tch_blocks *blocks,
                                                const tch_factor_update *how, const tch_matrices *root)
{
    const tch_matrices *a = &blocks->matrices, *factor = how->rows != NULL ? how->rows : how->columns;
    const int64_t m = a->rows, n = a->cols, batch = a->batch;
    const tch_matrices copy = fp16_at(how->product, n, m, batch);
    const tch_matrices *b = how->rows != NULL ? &copy : a;
    const tch_matrices product = fp16_at((uint16_t *)how->product + m * n * batch, b->cols, b->rows, batch);
    const int32_t power = power_for(b->rows);
    uint32_t *const of_root = (uint32_t *)state->blas_workspace, *const largest = of_root + batch;
    const tchi_transposed_scales scales = {of_root, NULL, NULL, -power};
    if (how->rows != NULL) {
        const dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(n, 64)), tchi_cuda_grid_yz(tchi_cuda_ceil_div(m, 64)),
                        tchi_cuda_grid_yz(batch));
        TCHI_TRY(tchi_cuda_launch(state, "transpose_fp16", transpose_fp16, grid, THREADS, tchi_cuda_operand_of(a),
                                  tchi_cuda_operand_of(&copy), m, n, batch));
    }
    TCHI_TRY(tchi_cuda_launch(state, "diagonal_bits", diagonal_bits, tchi_cuda_grid(batch), THREADS,
                              tchi_cuda_operand_of(root), root->rows, tchi_cuda_operand_of(root), root->rows, batch,
                              of_root));
    TCHI_TRY(tchi_cuda_launch(state, "product_bits", product_bits, tchi_cuda_grid(tchi_cuda_ceil_div(batch, THREADS)),
                              THREADS, of_root, blocks->notes, -power, batch, largest));
    TCHI_TRY(tchi_cuda_transposed_product(state, root, 0, b, &product, &scales, NULL));
    const tchi_factor_weights weights = {(float)(how->scale * how->scale), 0.0F, how->clock->factor_f32, 0};
    return tchi_cuda_factor_pingpong(state, weights, &product, 0, largest, factor);
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

static tch_status multiply_by(void *state, int32_t rounded, const tch_matrices *a, int32_t transpose_a,
                              const tch_matrices *b, int32_t transpose_b, const tch_matrices *c)
{
    return tchi_cuda_gemm(state, 1.0, a, transpose_a, b, transpose_b, 0.0, rounded, c);
}

/* Both sides if they are NULL or full. */
static tch_status from_sides(tchi_cuda_state *s, const tch_preconditioner *p, const tch_matrices *left,
                             const tch_matrices *right, const tch_blocks *blocks, void *other, const tch_matrices *y,
                             double *norms)
{
    const tch_matrices *x = &blocks->matrices;
    const int back = p->sides == TCH_SIDES_OUT_OF_BASES;
    tch_matrices between = *x;
    between.data = other;
    if (left != NULL && right != NULL && p->rounded) {
        const two_sided_plan plan = plan_of(s, x, other);
        if (supported(s, left, right, y, &plan)) {
            return in_fp16(s, p->sides, left, right, x, blocks->notes, y, norms, &plan);
        }
    }
    if (left != NULL) {
        TCHI_TRY(multiply_by(s, p->rounded, left, back, x, 0, right != NULL ? &between : y));
        x = &between;
    }
    if (right != NULL) {
        TCHI_TRY(multiply_by(s, p->rounded, x, 0, right, !back, y));
    }
    return norms != NULL ? tchi_cuda_reduce(s, TCH_REDUCE_FROBENIUS, y, norms) : TCH_OK;
}

extern "C" tch_status tchi_cuda_precondition(void *state, const tch_preconditioner *p, const tch_blocks *x, void *other,
                                             const tch_matrices *y, double *norms)
{
    const tch_matrices *kept[2] = {p->left, p->right};
    tch_matrices side[2] = {};
    char *room = (char *)p->room;
    for (int k = 0; k < 2; k++) {
        if (kept[k] != NULL) {
            side[k] = tchi_packed_place(kept[k], y->type, &room);
            TCHI_TRY(tchi_packed_move(state, tchi_cuda_pack_matrices, kept[k], &side[k], 1));
        }
    }
    return from_sides((tchi_cuda_state *)state, p, kept[0] != NULL ? &side[0] : NULL, kept[1] != NULL ? &side[1] : NULL,
                      x, other, y, norms);
}

/* Results may be in either buffer. */
extern "C" int tchi_cuda_fp16_sides_supported(const tchi_cuda_state *state, const tch_block_sides *sides)
{
    int fits = tchi_cuda_factor_pingpong_supported(state, &sides->factors[0]) &&
               tchi_cuda_factor_pingpong_supported(state, &sides->factors[1]);
    for (int k = 0; k < 2 && fits; k++) {
        if (sides->buffers[k] != NULL) {
            char *room = (char *)sides->room;
            tch_matrices y = sides->blocks;
            y.data = sides->buffers[k];
            const tch_matrices left = tchi_packed_place(&sides->sides[0], y.type, &room);
            const tch_matrices right = tchi_packed_place(&sides->sides[1], y.type, &room);
            const tch_matrices x = fp16_at(y.data, y.rows, y.cols, y.batch); /* for its size; aligned like y */
            const two_sided_plan p = plan_of(state, &x, y.data);
            fits = supported(state, &left, &right, &y, &p);
        }
    }
    return fits;
}
