/* Symmetric products by the first kernel of the table (kernel_choice.c) that supports the operands. Our kernels compute
 * the lower half and mirror it; cuBLAS computes all of C, symmetric only up to rounding, whose upper half is then
 * replaced. */
#include "backends/cuda/cuda.h"

/* The kernels of the table's symmetric rows, in its order. */
static const struct symmetric_kernel {
    tchi_symmetric_supported *supported;
    tchi_symmetric_kernel *run;
} symmetric_kernels[] = {
    {tchi_cuda_symmetric_f64_supported, tchi_cuda_symmetric_f64},
    {tchi_cuda_symmetric_pingpong_supported, tchi_cuda_symmetric_pingpong},
    {tchi_cuda_symmetric_bf16x2_supported, tchi_cuda_symmetric_bf16x2},
};

/* The first supported kernel, or NULL. */
static tchi_symmetric_kernel *find_symmetric_kernel(const tchi_cuda_state *state, const tch_matrices *d,
                                                    const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    for (size_t i = 0; i < sizeof symmetric_kernels / sizeof symmetric_kernels[0]; i++) {
        if (symmetric_kernels[i].supported(state, d, a, b, c)) {
            return symmetric_kernels[i].run;
        }
    }
    return NULL;
}

/* cuBLAS multiplies matrices of one type, and not of the split one. */
static int gemm_supported(const tch_matrices *a, const tch_matrices *c)
{
    return a->type == c->type && c->type != TCH_SCALAR_BF16X2;
}

/* Commuting products: B is symmetric, so A B = A B', which reads both operands along rows. */
tch_status tchi_cuda_symmetric_product(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                       const tch_matrices *a, const tch_matrices *b, const double *scale,
                                       int32_t exponent, const tch_matrices *c)
{
    if (scale != NULL) {
        return tchi_cuda_symmetric_scaled(state, c0, c1, d, c2, a, b, scale, exponent, c);
    }
    tchi_symmetric_kernel *kernel = find_symmetric_kernel(state, d, a, b, c);
    if (kernel != NULL) {
        return kernel(state, c0, c1, d, c2, a, b, c);
    }
    if (!gemm_supported(a, c)) {
        return tchi_cuda_symmetric_any(state, c0, c1, d, c2, a, b, c);
    }
    TCHI_TRY(tchi_cuda_gemm(state, c2, a, 0, b, 0, 0.0, 0, c));
    if (c0 != 0.0 || d != NULL) {
        TCHI_TRY(tchi_cuda_combine(state, c0, c1, d, 1.0, c, c));
    }
    return tchi_cuda_mirror_lower(state, c);
}

/* A symmetric kernel computes each tile of C in one block over all of k; cuBLAS divides k too and is faster with few
 * tiles and a long k. Reasoned: a symmetric product can lose half of the device. */
static int fills_device(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *c)
{
    int64_t side = (c->rows + 63) / 64;
    return a->cols <= 4 * c->rows || side * (side + 1) / 2 * c->batch >= state->device.processors / 2;
}

/* With a beta only C's lower triangle is defined: the float64 kernel reads it as its D; for cuBLAS, which reads all of
 * C, it is mirrored first. */
tch_status tchi_cuda_gram(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                          int32_t rounded, const tch_matrices *c)
{
    if (rounded) {
        return tchi_cuda_gram_rounded(state, alpha, a, transpose, beta, c);
    }
    tchi_symmetric_kernel *kernel =
        transpose || !fills_device(state, a, c) ? NULL : find_symmetric_kernel(state, NULL, a, a, c);
    if (kernel != NULL && beta == 0.0) {
        return kernel(state, 0.0, 0.0, NULL, alpha, a, a, c);
    }
    if (!transpose && beta == 0.0 && !gemm_supported(a, c)) {
        return tchi_cuda_symmetric_any(state, 0.0, 0.0, NULL, alpha, a, a, c);
    }
    if (kernel == tchi_cuda_symmetric_f64 && c->type == TCH_SCALAR_F64) {
        return kernel(state, 0.0, beta, c, alpha, a, a, c);
    }
    if (beta != 0.0) {
        TCHI_TRY(tchi_cuda_mirror_lower(state, c));
    }
    TCHI_TRY(tchi_cuda_gemm(state, alpha, a, transpose, a, !transpose, beta, 0, c));
    return tchi_cuda_mirror_lower(state, c);
}
