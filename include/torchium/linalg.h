/* Matrix functions of second-order optimization.
 *
 * Conventions, the same for every function here:
 * - A tensor [..., m, n] is a batch of m by n matrices; any number of leading dimensions. Matrices are read by their
 *   strides: transposed, sliced and offset inputs are fine.
 * - float64, float32, and float16 and bfloat16, which are computed in higher precision and rounded once; all tensors of
 *   a call have one dtype unless stated otherwise.
 * - The caller allocates outputs, with the right shape and no overlap with inputs. They are written only after every
 *   argument has been checked. Inputs are never modified.
 * - n = 0 and an empty batch are valid and do nothing.
 * - On a GPU tensors are on the context's device, and a call returns once its work is queued. A function with a
 *   `report` argument synchronizes if it is NULL, and where NVIDIA's eigensolver does; others synchronize only where
 *   stated.
 * - The whole range of a type is supported, subnormal numbers with their reduced precision. Functions with a `report`
 *   argument report overflow; products, orthogonalization and gradients return infinities and NaN.
 * - Symmetry is checked where required (|A - A'| at most 1e-3 of the largest entry for 16-bit types, 1e-5 for float32,
 *   1e-12 for float64); either triangle may then be used. */
#ifndef TORCHIUM_LINALG_H
#define TORCHIUM_LINALG_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/status.h>
#include <torchium/tensor.h>

TCH_BEGIN_DECLS

/* === Products =================================================================================================== */

/* out = A B, [..., m, k] times [..., k, n], leading dimensions broadcast as in NumPy. */
TCH_API tch_status tch_matmul(tch_context *context, const tch_tensor *a, const tch_tensor *b, tch_tensor *out);

/* out = alpha op(A) op(B) + beta out, as in BLAS. With beta = 0, out is not read. */
TCH_API tch_status tch_gemm(tch_context *context, double alpha, const tch_tensor *a, int32_t transpose_a,
                            const tch_tensor *b, int32_t transpose_b, double beta, tch_tensor *out);

/* out = A B for symmetric A and B that commute, such as polynomials in one symmetric matrix, so that the product is
 * exactly symmetric. A and B [..., n, n] of equal shape. Half the work of tch_matmul on the CPU and, in float64, on
 * GPUs with float64 tensor cores (compute capability 8.0, 9.0, 10.0); elsewhere the whole product is computed and one
 * half of it kept. */
TCH_API tch_status tch_symmetric_product(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                         tch_tensor *out);

/* out = alpha A A' + beta out (transpose = 0) or alpha A' A + beta out (1): Gram matrices and factor updates with their
 * moving average. Only the lower triangle of out is read; both are written. */
TCH_API tch_status tch_gram(tch_context *context, double alpha, const tch_tensor *a, int32_t transpose, double beta,
                            tch_tensor *out);

/* out = A B as tch_matmul, with at most `memory_budget` bytes of extra memory (0: the context's workspace limit): in
 * tiles when converting or packing whole operands would need more.
 *
 * On a GPU a, b and out may each be in host memory (TCH_DEVICE_CPU, or TCH_DEVICE_CUDA_HOST for page-locked), row-major
 * or column-major, and larger than the device's memory. The budget is device memory for tiles, 0 meaning the context's
 * workspace limit, or most of the free memory if there is none; copies overlap the products. The call returns when host
 * operands have been read and a host result is complete. */
TCH_API tch_status tch_matmul_chunked(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                      int64_t memory_budget, tch_tensor *out);

/* === Eigenvalues and powers ===================================================================================== */

/* The status of each matrix of a batch. With a `report` tensor (int32, the batch's shape, on the context's device) a
 * function writes one status per matrix and returns TCH_OK; without one it synchronizes and returns TCH_ERR_NUMERIC,
 * naming the first failed matrix. Either way the other matrices are computed, and the output of a failed one keeps its
 * contents. */
typedef enum tch_report {
    TCH_REPORT_OK = 0,
    TCH_REPORT_NOT_FINITE = 1,     /* the input has an infinity or a NaN */
    TCH_REPORT_NOT_SYMMETRIC = 2,  /* the input is not symmetric */
    TCH_REPORT_NOT_POSITIVE = 3,   /* not positive definite even after damping */
    TCH_REPORT_NO_CONVERGENCE = 4, /* the error bound stayed above the tolerance */
    TCH_REPORT_OVERFLOW = 5        /* the result, or an eigenvalue of the input, is beyond the range of the type */
} tch_report;

/* A = V diag(w) V', A symmetric [..., n, n]; w [..., n] ascending; V's columns are the eigenvectors. v may be NULL. */
TCH_API tch_status tch_eigh(tch_context *context, const tch_tensor *a, tch_tensor *w, tch_tensor *v,
                            tch_tensor *report);

/* out = V max(w + eps, eps)^power V' for symmetric A = V diag(w) V': any real power of A + eps I, with
 * eigenvalues clamped to at least eps. eps >= 0; with eps = 0 a negative power of a matrix with an eigenvalue that is
 * not positive is TCH_REPORT_NOT_POSITIVE. */
TCH_API tch_status tch_matrix_power(tch_context *context, const tch_tensor *a, double power, double eps,
                                    tch_tensor *out, tch_tensor *report);

/* The gradient of tch_matrix_power: out is the derivative, with respect to symmetric A, of the sum of all elements of
 * grad times those of the power, and symmetric itself. grad need not be symmetric; it and out have A's shape and dtype.
 * With K(i, j) = (f(w_i) - f(w_j)) / (w_i - w_j), or f'(w_i) where they are equal,
 *     out = V (K o V' (grad + grad')/2 V) V'.
 * Computed in float64 for every dtype. The function is constant where an eigenvalue was clamped; one that is negative
 * by no more than the rounding of A's entries counts as zero, with the derivative from above. Where a
 * derivative is infinite, as for a root of a singular matrix with eps = 0, the matrix is TCH_REPORT_NOT_POSITIVE; where
 * it is beyond float64, TCH_REPORT_OVERFLOW. Elements of out that overflow their type are infinite, which loss
 * scaling detects. */
TCH_API tch_status tch_matrix_power_backward(tch_context *context, const tch_tensor *a, double power, double eps,
                                             const tch_tensor *grad, tch_tensor *out, tch_tensor *report);

/* === Inverse roots ============================================================================================== */

typedef enum tch_root_method {
    TCH_ROOT_AUTO = 0,    /* the fastest that reaches the tolerance */
    TCH_ROOT_EIGEN = 1,   /* eigendecomposition: exact up to rounding, any conditioning */
    TCH_ROOT_NEWTON = 2,  /* coupled iteration with minimax polynomials: products only */
    TCH_ROOT_RATIONAL = 3 /* minimax rational function in partial fractions: shifted inverses */
} tch_root_method;

/* Options of tch_inverse_root. Start from TCH_ROOT_CONFIG_INIT and change what you need. */
typedef struct tch_root_config {
    size_t struct_size;
    double eps;             /* damping: A + max(eps, relative_eps lambda_max) I */
    double relative_eps;    /* preferred: relative damping bounds cost and error in advance */
    tch_root_method method; /* TCH_ROOT_AUTO */
    double tolerance;       /* largest acceptable error of X relative to its norm, both Frobenius; 0: 1e-3 for float32
                               and below, 1e-9 for float64. A looser one allows faster arithmetic. Where float64
                               cannot reach it the eigen method accepts an error of about u / (root d), u the unit
                               roundoff of float64 and d the damping relative to the largest eigenvalue, at most
                               0.1 / root. docs/numerics/inverse-roots.md has the guarantees of Newton in mixed
                               precision. */
    int32_t degree;         /* of the Newton steps, 1 or 2; 0 chooses */
    int32_t exact_residual; /* 0: residuals are estimated with random probes; 1: full Frobenius norms, at the cost of
                               root + 1 products */
} tch_root_config;
#define TCH_ROOT_CONFIG_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_root_config), 0.0, 0.0, TCH_ROOT_AUTO, 0.0, 0, 0                                                    \
    }

/* out = (A + damping I)^(-1/root) for symmetric positive semidefinite A [..., n, n]; root is 1, 2, 3, 4, 6 or 8.
 *
 * `residual`, if not NULL, is a float64 tensor of the batch's shape that receives the residual of each result, |R| /
 * sqrt(n) with R = X^floor(root/2) (A + damping I) X^ceil(root/2) - I. A result is accepted if |X R| / (root |X|),
 * which bounds the relative error of X, is within the tolerance; otherwise `out` keeps its contents (the previous root,
 * in an optimizer) and the matrix is reported. A zero matrix gives damping^(-1/root) I. `config` may be NULL for the
 * defaults.
 *
 * If a matrix fails with the method that TCH_ROOT_AUTO chose, or with the eigen method in float32, its chunk of the
 * batch is repeated by the eigen method in float64: on the CPU always, on a GPU only without a report, where the call
 * synchronizes anyway. With an absolute eps alone Newton and rational synchronize to read the damping of each matrix;
 * with relative_eps they do not. */
TCH_API tch_status tch_inverse_root(tch_context *context, const tch_tensor *a, int32_t root,
                                    const tch_root_config *config, tch_tensor *out, tch_tensor *residual,
                                    tch_tensor *report);

/* The gradient of tch_inverse_root, likewise, for any method; only the damping of `config` is used. With
 * relative damping it includes the dependence of the damping on the largest eigenvalue, shared evenly among eigenvalues
 * equal to it. */
TCH_API tch_status tch_inverse_root_backward(tch_context *context, const tch_tensor *a, int32_t root,
                                             const tch_root_config *config, const tch_tensor *grad, tch_tensor *out,
                                             tch_tensor *report);

/* The method that tch_inverse_root uses for n by n matrices of this dtype on this context, and its scratch bytes per
 * matrix. Either pointer may be NULL. */
TCH_API tch_status tch_inverse_root_plan(tch_context *context, tch_dtype dtype, int64_t batch, int64_t n, int32_t root,
                                         const tch_root_config *config, tch_root_method *method,
                                         int64_t *scratch_bytes);

/* "auto", "eigen", "newton", "rational". */
TCH_API const char *tch_root_method_name(tch_root_method method);

/* === Orthogonalization ========================================================================================== */

/* Singular values above 0.001 |A| are mapped to 0.85 ... 1.13 by five steps of the first, 0.68 ... 1.21 by five of the
 * second, 0.89 ... 1.11 by three of the third, which is the cheapest. */
typedef enum tch_ortho_method {
    TCH_ORTHO_POLAR_EXPRESS = 0, /* optimal coefficients for each step */
    TCH_ORTHO_MUON = 1,          /* (3.4445, -4.7750, 2.0315) at every step, as published with Muon */
    TCH_ORTHO_MINIMAX = 2        /* optimal polynomials of degree 17, 17 and 9, then Polar Express's last one */
} tch_ortho_method;

/* Approximates the polar factor U V' of A = U S V' [..., m, n] by `steps` Newton-Schulz steps, as in Muon: singular
 * values are near 1, not at 1. 1 to 100 steps; 5 is usual, 3 for TCH_ORTHO_MINIMAX. On a GPU with bfloat16 tensor cores
 * every type but float64 is computed in bfloat16 with float32 accumulation. Hopper also has kernels with float16, for
 * batches that fill the GPU; without them TCH_ORTHO_MINIMAX takes two more steps of Polar Express. */
TCH_API tch_status tch_orthogonalize(tch_context *context, const tch_tensor *a, int32_t steps, tch_ortho_method method,
                                     tch_tensor *out);

/* === Kronecker algebra, in row-major order: (A (x) B) vec(X) = vec(A X B') =======================================
 *
 * Leading dimensions of a call's tensors are equal. In the first three functions A and B may also be single matrices,
 * shared by the whole batch. */

/* out[..., m p, n q] = A (x) B for A [..., m, n], B [..., p, q]. Large; the functions below never form it. */
TCH_API tch_status tch_kronecker_product(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                         tch_tensor *out);

/* out = (A (x) B) X for X [..., n q, r], out [..., m p, r], without forming the product. */
TCH_API tch_status tch_kronecker_matmul(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                        const tch_tensor *x, tch_tensor *out);

/* out = A X B' for X [..., n, q], out [..., m, p]: the Kronecker product applied to a parameter's gradient. */
TCH_API tch_status tch_kronecker_apply(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                       const tch_tensor *x, tch_tensor *out);

/* out = (A + pi sqrt(damping) I)^-1 X (B + sqrt(damping)/pi I)^-1 for symmetric positive semidefinite A [..., m, m] and
 * B [..., n, n], X and out [..., m, n], with pi = sqrt((tr A / m) / (tr B / n)): KFAC's factored damping. */
TCH_API tch_status tch_kronecker_solve(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                       const tch_tensor *x, double damping, tch_tensor *out, tch_tensor *report);

/* The A [m, n] and B [p, q] that minimize |M - A (x) B| for M [..., m p, n q], with the shapes of the outputs, equal
 * norms, and the largest entry of A positive. `error`, if not NULL: float64, the batch's shape, |M - A (x) B| / |M|.
 * Matrices are processed one by one; on a GPU each synchronizes several times. */
TCH_API tch_status tch_nearest_kronecker(tch_context *context, const tch_tensor *m, tch_tensor *a, tch_tensor *b,
                                         tch_tensor *error);

TCH_END_DECLS

#endif
