/* Matrix functions of second-order optimization.
 *
 * Conventions, the same for every function here:
 * - A tensor [..., m, n] is a batch of m by n matrices; any number of leading dimensions. Matrices are read by their
 *   strides: transposed, sliced and offset inputs are fine.
 * - float32 and float64, and float16 and bfloat16 which are computed wider and rounded once; all tensors of one call
 *   have one dtype unless said otherwise.
 * - Outputs are given by the caller with the right shape, must not overlap an input, and are written only after every
 *   argument was found good. Inputs are never modified.
 * - n = 0 and an empty batch are valid and do nothing.
 * - On a GPU tensors are on the context's device, and a call returns once its work is queued. A function that takes a
 *   `report` waits for the device when none is given, and where NVIDIA's eigensolver does; the others wait only where
 *   they say so.
 * - Numbers may be of any size that their type holds, down to the smallest. Where they are below its normal range
 * (2e-308
 *   in float64, 1e-38 in float32) they have fewer digits, and so has what is computed from them. Results too large for
 *   the type are reported by functions that take a `report`; products, orthogonalization and gradients give infinities
 *   and NaN, as arithmetic does.
 * - Where symmetry is required it is checked (|A - A'| at most 1e-3 of the largest entry for half types, 1e-5 for
 *   float32, 1e-12 for float64); the triangles are then taken as equal. */
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

/* The expert form: out = alpha op(A) op(B) + beta out, op transposing where asked. With beta = 0, out is not read. */
TCH_API tch_status tch_gemm(tch_context *context, double alpha, const tch_tensor *a, int32_t transpose_a,
                            const tch_tensor *b, int32_t transpose_b, double beta, tch_tensor *out);

/* out = A B for symmetric A and B that commute, such as polynomials in one symmetric matrix, so that the product is
 * symmetric too, to the last bit. A and B [..., n, n] of equal shape. It takes half the work of tch_matmul on the CPU
 * and, in float64, on GPUs whose tensor cores have it (compute capability 8.0, 9.0, 10.0); elsewhere the whole product
 * is computed and one half of it kept. */
TCH_API tch_status tch_symmetric_product(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                         tch_tensor *out);

/* out = alpha A A' + beta out (transpose = 0) or alpha A' A + beta out (1): Gram matrices and factor updates with their
 * moving average. Only the lower triangle of out is read; both are written. */
TCH_API tch_status tch_gram(tch_context *context, double alpha, const tch_tensor *a, int32_t transpose, double beta,
                            tch_tensor *out);

/* out = A B as tch_matmul, with at most `memory_budget` bytes of extra memory (0: the context's workspace limit):
 * processed in tiles when converting or packing the operands whole would take more.
 *
 * On a GPU a, b and out may each lie in host memory (TCH_DEVICE_CPU, or TCH_DEVICE_CUDA_HOST for page-locked), and may
 * be larger than the device. Each matrix then lies by rows or by columns. The budget is device memory for tiles, 0
 * meaning the context's workspace limit, or most of what is free where there is none; copies both ways run beside the
 * products. The call returns when the host's operands have been read and its result is written. */
TCH_API tch_status tch_matmul_chunked(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                      int64_t memory_budget, tch_tensor *out);

/* === Eigenvalues and powers ===================================================================================== */

/* What became of each matrix of a batch. Functions that take a `report` tensor (int32, the batch's shape) write one of
 * these per matrix and return TCH_OK; without a report they wait, and return TCH_ERR_NUMERIC naming the first bad
 * matrix. Either way the other matrices are done, and the output of a bad one keeps what it held. On a GPU the report
 * is a tensor of the device: the host learns of a bad matrix when it copies the report back. */
typedef enum tch_report {
    TCH_REPORT_OK = 0,
    TCH_REPORT_NOT_FINITE = 1,     /* the input has an infinity or a NaN */
    TCH_REPORT_NOT_SYMMETRIC = 2,  /* the input is not symmetric */
    TCH_REPORT_NOT_POSITIVE = 3,   /* not positive definite even after damping */
    TCH_REPORT_NO_CONVERGENCE = 4, /* the error, or what bounds it, stayed above the tolerance */
    TCH_REPORT_OVERFLOW = 5        /* the result, or an eigenvalue of the input, is beyond the range of the type */
} tch_report;

/* A = V diag(w) V', A symmetric [..., n, n]; w [..., n] ascending; V's columns are the eigenvectors. v may be NULL. */
TCH_API tch_status tch_eigh(tch_context *context, const tch_tensor *a, tch_tensor *w, tch_tensor *v,
                            tch_tensor *report);

/* out = V max(w + eps, eps)^power V' for symmetric A = V diag(w) V': any real power of A + eps I, with the eigenvalues
 * that damping leaves below eps raised to it, all of them where A is negative definite. eps >= 0; with eps = 0 a
 * negative power of a matrix with an eigenvalue that is not positive is TCH_REPORT_NOT_POSITIVE. */
TCH_API tch_status tch_matrix_power(tch_context *context, const tch_tensor *a, double power, double eps,
                                    tch_tensor *out, tch_tensor *report);

/* The gradient of tch_matrix_power: out is the derivative, with respect to symmetric A, of the sum of all elements of
 * grad times those of the power, and symmetric itself. grad need not be symmetric; it and out have A's shape and dtype.
 * With K(i, j) = (f(w_i) - f(w_j)) / (w_i - w_j), or f'(w_i) where they are equal,
 *     out = V (K o V' (grad + grad')/2 V) V'.
 * Computed in float64 for every dtype. The function is flat where an eigenvalue was raised to eps; one that is negative
 * by no more than the rounding of A's entries counts as zero, where the derivative is that from above. Where a
 * derivative is infinite, as for a root of a singular matrix with eps = 0, the matrix is TCH_REPORT_NOT_POSITIVE; where
 * it is beyond float64, TCH_REPORT_OVERFLOW. Elements of out beyond their type are infinite, which is what loss scaling
 * looks for. */
TCH_API tch_status tch_matrix_power_backward(tch_context *context, const tch_tensor *a, double power, double eps,
                                             const tch_tensor *grad, tch_tensor *out, tch_tensor *report);

/* === Inverse roots ============================================================================================== */

typedef enum tch_root_method {
    TCH_ROOT_AUTO = 0,    /* the fastest that reaches the tolerance */
    TCH_ROOT_EIGEN = 1,   /* eigendecomposition: exact up to rounding, any conditioning */
    TCH_ROOT_NEWTON = 2,  /* coupled iteration with minimax polynomials: products only */
    TCH_ROOT_RATIONAL = 3 /* minimax rational function in partial fractions: shifted inverses */
} tch_root_method;

/* How to take an inverse root. Start from TCH_ROOT_CONFIG_INIT and change what you need. */
typedef struct tch_root_config {
    size_t struct_size;
    double eps;             /* damping: A + max(eps, relative_eps lambda_max) I */
    double relative_eps;    /* relative damping bounds the cost and the error in advance: prefer it */
    tch_root_method method; /* TCH_ROOT_AUTO */
    double tolerance;       /* largest acceptable error of X relative to its norm, both Frobenius; 0: 1e-3 for float32
                               and below, 1e-9 for float64. A looser one allows faster arithmetic. Where float64 itself
                               cannot reach it the eigen method gives what rounding allows, about u / (root d) with d
                               the damping relative to the largest eigenvalue and u float64's unit roundoff, up to an
                               error of 0.1 / root. docs/numerics/inverse-roots.md says what is certain of Newton in
                               mixed arithmetic. */
    int32_t degree;         /* of the Newton steps, 1 or 2; 0 chooses */
    int32_t exact_residual; /* 0: certificates estimated with random probes; 1: full Frobenius norms, by root + 1 more
                               products */
} tch_root_config;
#define TCH_ROOT_CONFIG_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_root_config), 0.0, 0.0, TCH_ROOT_AUTO, 0.0, 0, 0                                                    \
    }

/* out = (A + damping I)^(-1/root) for symmetric positive semidefinite A [..., n, n]; root is 1, 2, 3, 4, 6 or 8.
 *
 * `residual`, if not NULL, is a float64 tensor of the batch's shape that receives the certificate of each result,
 * |R| / sqrt(n) with R = X^floor(root/2) (A + damping I) X^ceil(root/2) - I. What decides is |X R| / (root |X|), which
 * bounds the error of X relative to its norm: a matrix where that is above the tolerance keeps what `out` held (the
 * previous root, in an optimizer) and is reported. A zero matrix gives damping^(-1/root) I. `config` may be
 * NULL for the defaults.
 *
 * Where TCH_ROOT_AUTO chose the method and a matrix failed by it, or the eigen method failed in float32, its chunk of
 * the batch is done again by the eigen method in float64: on the CPU always, on a GPU only without a report, where the
 * call waits anyway. With a report nothing waits on a GPU, and what failed keeps its previous root. An absolute eps
 * alone makes Newton and rational read the damping of each matrix back first, and wait for it; relative_eps does
 * not. */
TCH_API tch_status tch_inverse_root(tch_context *context, const tch_tensor *a, int32_t root,
                                    const tch_root_config *config, tch_tensor *out, tch_tensor *residual,
                                    tch_tensor *report);

/* The gradient of tch_inverse_root in the same manner, whatever the method the root was taken by; of `config` only the
 * damping matters. With relative damping it includes the dependence of the damping on the largest eigenvalue, shared
 * evenly among eigenvalues equal to it. */
TCH_API tch_status tch_inverse_root_backward(tch_context *context, const tch_tensor *a, int32_t root,
                                             const tch_root_config *config, const tch_tensor *grad, tch_tensor *out,
                                             tch_tensor *report);

/* What tch_inverse_root would do for n by n matrices of this dtype on this context: the method `auto` would take, and
 * the scratch bytes per matrix. Either pointer may be NULL. */
TCH_API tch_status tch_inverse_root_plan(tch_context *context, tch_dtype dtype, int64_t batch, int64_t n, int32_t root,
                                         const tch_root_config *config, tch_root_method *method,
                                         int64_t *scratch_bytes);

/* "auto", "eigen", "newton", "rational". */
TCH_API const char *tch_root_method_name(tch_root_method method);

/* === Orthogonalization ========================================================================================== */

/* For singular values from 0.001 of |A| on, five steps of the first leave 0.85 to 1.13, five of the second 0.68 to
 * 1.21, three of the third 0.89 to 1.11, for less work than either. */
typedef enum tch_ortho_method {
    TCH_ORTHO_POLAR_EXPRESS = 0, /* coefficients chosen step by step */
    TCH_ORTHO_MUON = 1,          /* Muon's (3.4445, -4.7750, 2.0315) at every step */
    TCH_ORTHO_MINIMAX = 2        /* polynomials of degree 17, 17 and 9 chosen likewise, then Polar Express's last one */
} tch_ortho_method;

/* out is near the closest semi-orthogonal matrix to A [..., m, n] (U V' of its singular value decomposition), by
 * `steps` Newton-Schulz steps, as Muon uses it: singular values come out near 1, not at 1. steps 1 to 100; 5 is usual,
 * 3 for TCH_ORTHO_MINIMAX. On a GPU that multiplies bfloat16, every type but float64 is computed in it, with sums in
 * float32; where it has no kernels for float16 beside it (Hopper, batches that fill it), TCH_ORTHO_MINIMAX takes two
 * more steps, of Polar Express. */
TCH_API tch_status tch_orthogonalize(tch_context *context, const tch_tensor *a, int32_t steps, tch_ortho_method method,
                                     tch_tensor *out);

/* === Kronecker algebra, in row-major order: (A (x) B) vec(X) = vec(A X B') =======================================
 *
 * Leading dimensions of a call's tensors are equal. In the first three functions A and B may also be single matrices,
 * shared by the whole batch. */

/* out[..., m p, n q] = A (x) B for A [..., m, n], B [..., p, q]. Mind its size; the functions below never form it. */
TCH_API tch_status tch_kronecker_product(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                         tch_tensor *out);

/* out = (A (x) B) X for X [..., n q, r], out [..., m p, r]: the same numbers as forming the product first. */
TCH_API tch_status tch_kronecker_matmul(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                        const tch_tensor *x, tch_tensor *out);

/* out = A X B' for X [..., n, q], out [..., m, p]: the Kronecker product applied to a parameter's gradient. */
TCH_API tch_status tch_kronecker_apply(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                       const tch_tensor *x, tch_tensor *out);

/* out = (A + pi sqrt(damping) I)^-1 X (B + sqrt(damping)/pi I)^-1 for symmetric positive semidefinite A [..., m, m] and
 * B [..., n, n], X and out [..., m, n], with pi = sqrt((tr A / m) / (tr B / n)): KFAC's factored damping. */
TCH_API tch_status tch_kronecker_solve(tch_context *context, const tch_tensor *a, const tch_tensor *b,
                                       const tch_tensor *x, double damping, tch_tensor *out, tch_tensor *report);

/* The A [m, n] and B [p, q] that make |M - A (x) B| least for M [..., m p, n q]. The outputs' shapes say the split; the
 * factors have equal norms, and A's largest entry is positive. `error`, if not NULL: float64, the batch's shape,
 * |M - A (x) B| / |M|. One matrix after the other, and on a GPU it waits for the device several times for each. */
TCH_API tch_status tch_nearest_kronecker(tch_context *context, const tch_tensor *m, tch_tensor *a, tch_tensor *b,
                                         tch_tensor *error);

TCH_END_DECLS

#endif
