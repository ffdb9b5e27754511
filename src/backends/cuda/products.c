/* Matrix products by cuBLAS. Our matrices are row-major and cuBLAS is column-major: what we call C is C' there, so the
 * product is asked for as C' = op(B)' op(A)', with the operands exchanged and nothing transposed that was not before. */
#include "cuda.h"

#include "scalars.h"

/* Matrices in one call: kernels put the batch in a grid dimension that ends at 65535. */
#define MOST_BATCH 65535

/* Rows in one call, for the products that are merged into a tall one. */
#define MOST_ROWS INT32_MAX

/* A single row may carry any leading dimension; cuBLAS wants it to pass over the row all the same. */
static int64_t leading(const tch_matrices *x)
{
    return x->rows > 1 ? x->ld : x->cols > 1 ? x->cols : 1;
}

/* One B for the whole batch, and the rows of the A's and C's each one after the other: a single product with tall A and
 * C, which fills the device better than many with few rows. */
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

/* Matrices [first, first + count) of the batch. */
static tch_status multiply(const tchi_cuda_state *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                           const tch_matrices *b, int32_t transpose_b, double beta, const tch_matrices *c,
                           int64_t first, int64_t count)
{
    const tchi_cublas *blas = tchi_cublas_open(NULL); /* it was there when the state was made */
    const float narrow[2] = {(float)alpha, (float)beta};
    int wide = c->type == TCH_SCALAR_F64;
    const void *scale_product = wide ? (const void *)&alpha : (const void *)&narrow[0];
    const void *scale_c = wide ? (const void *)&beta : (const void *)&narrow[1];
    TCHI_CUBLAS_TRY(blas->gemm_strided_batched_ex(
                        state->blas, transpose_b ? TCHI_CUBLAS_T : TCHI_CUBLAS_N,
                        transpose_a ? TCHI_CUBLAS_T : TCHI_CUBLAS_N, c->cols, c->rows, transpose_a ? a->rows : a->cols,
                        scale_product, tchi_cuda_matrix_at(b, first), tchi_cuda_data_type(b->type), leading(b),
                        b->stride, tchi_cuda_matrix_at(a, first), tchi_cuda_data_type(a->type), leading(a), a->stride,
                        scale_c, tchi_cuda_matrix_at(c, first), tchi_cuda_data_type(c->type), leading(c), c->stride,
                        count, wide ? TCHI_CUBLAS_COMPUTE_F64 : TCHI_CUBLAS_COMPUTE_F32, TCHI_CUBLAS_ALGORITHM_DEFAULT),
                    "cublasGemmStridedBatchedEx");
    return TCH_OK;
}

/* Half types are accumulated in float32 and rounded once. Beyond the table's rule of one type for all three, C may be of
 * float32 where A and B are of a half type: streamed.c adds up slices of a product that way.
 *
 * 2 m n k operations a matrix; at least (m k + k n + m n) elements move. */
tch_status tchi_cuda_gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a, const tch_matrices *b,
                          int32_t transpose_b, double beta, const tch_matrices *c)
{
    if (c->rows == 0 || c->cols == 0 || c->batch == 0) {
        return TCH_OK;
    }
    if ((transpose_a ? a->rows : a->cols) == 0) {
        return tchi_cuda_combine(state, 0.0, beta, beta == 0.0 ? NULL : c, 0.0, NULL, c);
    }
    tch_matrices left = *a;
    tch_matrices out = *c;
    if (one_tall_product(a, transpose_a, b, c)) {
        merge_rows(&left);
        merge_rows(&out);
    }
    for (int64_t first = 0; first < out.batch; first += MOST_BATCH) {
        int64_t count = out.batch - first < MOST_BATCH ? out.batch - first : MOST_BATCH;
        TCHI_CUDA_PASS(multiply(state, alpha, &left, transpose_a, b, transpose_b, beta, &out, first, count));
    }
    return TCH_OK;
}
