/* Matrix products by cuBLAS. The library's matrices are row-major, cuBLAS is column-major: computes C' = op(B)' op(A)'
 * with exchanged operands. */
#include "backends/cuda/cuda.h"

#include "backends/cuda/runtime/scalars.h"
#include "backends/packed_sides.h"
#include "factor_gram/factor_gram.h"
#include "two_sided/two_sided.h"
/* Matrices per call: a grid dimension is at most 65535. */
#define MOST_BATCH 65535

/* Rows per call, for products merged into a tall one. */
#define MOST_ROWS INT32_MAX

/* A single row may have any leading dimension, but cuBLAS requires it to cover the row. */
static int64_t leading(const tch_matrices *x)
{
    return x->rows > 1 ? x->ld : x->cols > 1 ? x->cols : 1;
}

/* One B for the whole batch and contiguous rows of A and C: a single product with tall A and C uses the device
 * better. */
static int one_tall_product(const tch_matrices *a, int32_t transpose_a, const tch_matrices *b, const tch_matrices *c)
{
    return c->batch > 1 && !transpose_a && b->stride == 0 && a->stride == a->rows * leading(a) &&
           c->stride == c->rows * leading(c) && c->rows <= MOST_ROWS / c->batch;
}

static void merge_rows(tch_matrices *x)
{
    x->ld = leading(x);
    x->rows *= x->batch;
    x->batch = 1;
}

/* Weights and compute type of products. */
typedef struct arithmetic {
    const void *alpha, *beta; /* of float64 if C is, of float32 otherwise; on host or device by the handle's pointer
                                 mode */
    tchi_cublas_compute compute;
} arithmetic;

/* Matrices [first, first + count) of the batch. */
static tch_status launch_gemm(const tchi_cuda_state *state, arithmetic how, const tch_matrices *a, int32_t transpose_a,
                              const tch_matrices *b, int32_t transpose_b, const tch_matrices *c, int64_t first,
                              int64_t count)
{
    const tchi_cublas *blas = tchi_cublas_open(NULL); /* created with the state */
    TCHI_CUBLAS_TRY(blas->gemm_strided_batched_ex(
                        state->blas, transpose_b ? TCHI_CUBLAS_T : TCHI_CUBLAS_N,
                        transpose_a ? TCHI_CUBLAS_T : TCHI_CUBLAS_N, c->cols, c->rows, transpose_a ? a->rows : a->cols,
                        how.alpha, tchi_cuda_matrix_at(b, first), tchi_cuda_data_type(b->type), leading(b), b->stride,
                        tchi_cuda_matrix_at(a, first), tchi_cuda_data_type(a->type), leading(a), a->stride, how.beta,
                        tchi_cuda_matrix_at(c, first), tchi_cuda_data_type(c->type), leading(c), c->stride, count,
                        how.compute, TCHI_CUBLAS_ALGORITHM_DEFAULT),
                    "cublasGemmStridedBatchedEx");
    return TCH_OK;
}

static tch_status launch_gemms(const tchi_cuda_state *state, arithmetic how, const tch_matrices *a, int32_t transpose_a,
                               const tch_matrices *b, int32_t transpose_b, const tch_matrices *c)
{
    tch_matrices left = *a;
    tch_matrices out = *c;
    if (one_tall_product(a, transpose_a, b, c)) {
        merge_rows(&left);
        merge_rows(&out);
    }
    for (int64_t first = 0; first < out.batch; first += MOST_BATCH) {
        int64_t count = out.batch - first < MOST_BATCH ? out.batch - first : MOST_BATCH;
        TCHI_TRY(launch_gemm(state, how, &left, transpose_a, b, transpose_b, &out, first, count));
    }
    return TCH_OK;
}

static int is_empty(const tch_matrices *x)
{
    return x->rows == 0 || x->cols == 0 || x->batch == 0;
}

/* Half types are accumulated in float32 and rounded once; C may be float32 with half-precision A and B (streamed.c). */
tch_status tchi_cuda_gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a, const tch_matrices *b,
                          int32_t transpose_b, double beta, int32_t rounded, const tch_matrices *c)
{
    const float weights[2] = {(float)alpha, (float)beta};
    bool in_tf32 = rounded && a->type == TCH_SCALAR_F32;
    arithmetic in_f32 = {&weights[0], &weights[1], in_tf32 ? TCHI_CUBLAS_COMPUTE_TF32 : TCHI_CUBLAS_COMPUTE_F32};
    arithmetic in_f64 = {&alpha, &beta, TCHI_CUBLAS_COMPUTE_F64};
    if (is_empty(c)) {
        return TCH_OK;
    }
    if ((transpose_a ? a->rows : a->cols) == 0) {
        return tchi_cuda_combine(state, 0.0, beta, beta == 0.0 ? NULL : c, 0.0, NULL, c);
    }
    if ((transpose_a ? a->rows : a->cols) == 1 && beta == 0.0 && !in_tf32) {
        return tchi_cuda_outer(state, alpha, a, transpose_a, b, transpose_b, c);
    }
    return launch_gemms(state, c->type == TCH_SCALAR_F64 ? in_f64 : in_f32, a, transpose_a, b, transpose_b, c);
}

/* --- factors ----------------------------------------------------------------------------------------------------- */

static arithmetic weighed_by(const tch_clock *clock, tch_scalar type, int32_t rounded)
{
    if (type == TCH_SCALAR_F64) {
        return (arithmetic){&clock->factor[0], &clock->factor[1], TCHI_CUBLAS_COMPUTE_F64};
    }
    int in_tf32 = rounded && type == TCH_SCALAR_F32;
    return (arithmetic){&clock->factor_f32[0], &clock->factor_f32[1],
                        in_tf32 ? TCHI_CUBLAS_COMPUTE_TF32 : TCHI_CUBLAS_COMPUTE_F32};
}

/* A A' is zero if A has no columns. */
static tch_status weigh_factor(void *state, const tch_clock *clock, const tch_matrices *c)
{
    for (int64_t b = 0; b < c->batch; b++) {
        tch_matrices one = *c;
        one.data = tchi_cuda_matrix_at(c, b);
        one.batch = 1;
        TCHI_TRY(tchi_cuda_shift_scale(state, &one, NULL, &clock->factor[1], 1.0, &one));
    }
    return TCH_OK;
}

/* Weights are read on the device. The result is symmetric up to rounding. A must be finite even with weight 0. */
static tch_status update_factor(void *state, const tch_matrices *a, int32_t transpose, const tch_clock *clock,
                                int32_t rounded, const tch_matrices *c)
{
    const tchi_cublas *blas = tchi_cublas_open(NULL);
    tchi_cuda_state *s = state;
    if (is_empty(c)) {
        return TCH_OK;
    }
    if ((transpose ? a->rows : a->cols) == 0) {
        return weigh_factor(state, clock, c);
    }
    if (rounded && tchi_cuda_factor_fp16_supported(s, a, transpose, c)) {
        return tchi_cuda_factor_fp16(s, (tchi_factor_weights){1.0F, 0.0F, clock->factor_f32, 0}, a, transpose, c);
    }
    TCHI_CUBLAS_TRY(blas->set_pointer_mode(s->blas, TCHI_CUBLAS_SCALARS_ON_DEVICE), "cublasSetPointerMode");
    tch_status status = launch_gemms(s, weighed_by(clock, a->type, rounded), a, transpose, a, !transpose, c);
    TCHI_CUBLAS_TRY(blas->set_pointer_mode(s->blas, TCHI_CUBLAS_SCALARS_ON_HOST), "cublasSetPointerMode");
    return status;
}

/* product = scale A X, or scale X A. */
static tch_status whiten(tchi_cuda_state *state, const tch_matrices *a, const tch_factor_update *how,
                         const tch_matrices *root, tch_matrices *product)
{
    *product = *a;
    product->data = how->product;
    return how->rows != NULL ? tchi_cuda_gemm(state, how->scale, a, 0, root, 0, 0.0, how->rounded, product)
                             : tchi_cuda_gemm(state, how->scale, root, 0, a, 0, 0.0, how->rounded, product);
}

/* The kernels for float16 write packed factors directly; otherwise factors are unpacked and packed again. */
tch_status tchi_cuda_update_factors(void *state, const tch_blocks *blocks, const tch_factor_update *how)
{
    tch_matrices a = blocks->matrices;
    const tch_matrices *kept[2] = {how->rows, how->columns};
    const tchi_factor_pair pair = {&a, how->rows, how->columns, blocks->notes, how->scratch, how->scratch_bytes};
    char *place = how->room;
    if (how->rows != NULL && how->columns != NULL && how->rounded && tchi_cuda_factor_pair_supported(state, &pair)) {
        return tchi_cuda_factor_pair(state, (tchi_factor_weights){1.0F, 0.0F, how->clock->factor_f32, 0}, &pair);
    }
    if (how->root != NULL) {
        tch_matrices root = tchi_packed_place(how->root, a.type == TCH_SCALAR_F64 ? a.type : TCH_SCALAR_F32, &place);
        TCHI_TRY(tchi_packed_move(state, tchi_cuda_pack_matrices, how->root, &root, 1));
        if (a.type == TCH_SCALAR_F16) {
            return tchi_cuda_whitened_factor(state, blocks, how, &root);
        }
        TCHI_TRY(whiten(state, &blocks->matrices, how, &root, &a));
    }
    for (int k = 0; k < 2; k++) {
        if (kept[k] != NULL) {
            const tch_matrices whole = tchi_packed_place(kept[k], a.type, &place);
            TCHI_TRY(tchi_packed_move(state, tchi_cuda_pack_matrices, kept[k], &whole, 1));
            TCHI_TRY(update_factor(state, &a, k, how->clock, how->rounded, &whole));
            TCHI_TRY(tchi_packed_move(state, tchi_cuda_pack_matrices, kept[k], &whole, 0));
        }
    }
    return TCH_OK;
}
