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
