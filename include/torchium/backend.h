/* The operations table: the one seam between algorithms and devices. For authors of backends.
 *
 * Everything above this table (src/linalg, the optimizers) is written once and never asks which device it runs on;
 * everything below it implements these operations for one kind of device. The operations are at the level of
 * mathematics, over whole batches. Entries are
 *   REQUIRED              every backend has them;
 *   OPTIONAL              may be NULL: the library composes the result from required ones;
 *   OPTIONAL, NO DEFAULT  may be NULL: what needs it is then not offered, or done another way.
 *
 * Rules for all operations: arguments have been validated; sizes may be zero; work is queued on the state's stream and
 * nothing waits for the device unless said so; nothing allocates, except `allocate` and `state_create`; scratch is
 * given by the caller, as large as `scratch_bytes` says. Outputs do not overlap inputs unless an entry allows it. On
 * failure an operation returns a status after calling host->fail with a message. Scalars that differ between the
 * matrices of a batch live on the device, as arrays of double with one entry per matrix.
 *
 * docs/adding-a-backend.md walks through a new one. */
#ifndef TORCHIUM_BACKEND_H
#define TORCHIUM_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/device.h>
#include <torchium/export.h>
#include <torchium/grad.h>
#include <torchium/kernel.h>
#include <torchium/linalg.h>
#include <torchium/network.h>
#include <torchium/status.h>

/* Raised whenever the table or a struct it uses changes; a module built for another number is refused. */
#define TCH_BACKEND_ABI 9u

/* The function a module exports, and its type. It returns NULL, with a sentence in `reason`, when it cannot work. */
#define TCH_BACKEND_ENTRY "torchium_backend_entry"

/* Element types inside the table. */
typedef enum tch_scalar {
    TCH_SCALAR_F64 = 0,
    TCH_SCALAR_F32 = 1,
    TCH_SCALAR_F16 = 2,
    TCH_SCALAR_BF16 = 3,
    TCH_SCALAR_I32 = 4,
    TCH_SCALAR_I64 = 5,
    TCH_SCALAR_BF16X2 = 6, /* split: see tch_matrices; only in scratch, only where an entry says so */
    TCH_SCALAR_COUNT = 7
} tch_scalar;

/* A batch of row-major matrices: element (i, j) of matrix b is at data[b * stride + i * ld + j]. A stride of 0 repeats
 * one matrix, on inputs only.
 *
 * The split type TCH_SCALAR_BF16X2 keeps a number as the sum of two bfloat16, its rounding and the rounding of what is
 * left, which is good to 17 bits and multiplies by three bfloat16 products. Matrix b is two planes, one after the other:
 * the high parts at (bfloat16 *)data + 2 * b * stride + i * ld + j, the low parts `stride` elements further. */
typedef struct tch_matrices {
    void *data;
    tch_scalar type;
    int64_t rows, cols;
    int64_t ld;
    int64_t batch;
    int64_t stride;
} tch_matrices;

/* An array of any rank, for copies: strides in elements. */
typedef struct tch_array {
    void *data;
    tch_scalar type;
    int32_t rank; /* at most TCH_MAX_RANK */
    const int64_t *shape;
    const int64_t *strides;
} tch_array;

typedef enum tch_reduction {
    TCH_REDUCE_FROBENIUS = 0, /* square root of the sum of squares, without overflow */
    TCH_REDUCE_MAX_ABS = 1,   /* largest |entry| */
    TCH_REDUCE_TRACE = 2,     /* sum of the diagonal */
    TCH_REDUCE_NONFINITE = 3, /* number of entries that are infinite or NaN */
    TCH_REDUCE_ASYMMETRY = 4, /* largest |a_ij - a_ji|, square matrices only */
    TCH_REDUCE_COUNT = 5
} tch_reduction;

typedef enum tch_copy_kind { TCH_COPY_DEVICE = 0, TCH_COPY_TO_DEVICE = 1, TCH_COPY_TO_HOST = 2 } tch_copy_kind;

/* Operations that need scratch, for `scratch_bytes`. */
typedef enum tch_scratch_for {
    TCH_SCRATCH_EIGH = 0,
    TCH_SCRATCH_LARGEST_EIGENVALUE = 1,
    TCH_SCRATCH_SHIFTED_INVERSE = 2, /* `extra` is the number of poles */
    TCH_SCRATCH_ROOT_RESIDUAL = 3,
    TCH_SCRATCH_SPD_SOLVE = 4, /* `cols` is the number of columns of B */
    TCH_SCRATCH_GRAFT = 5,     /* `rows` elements in all, `batch` pieces */
    TCH_SCRATCH_CHOLESKY_INVERSE = 6,
    TCH_SCRATCH_SAMPLE_NORMS = 7,   /* `rows` positions, `cols` of A, `extra` of G, `batch` samples */
    TCH_SCRATCH_SAMPLE_SQUARES = 8, /* the same */
    TCH_SCRATCH_SAMPLE_SUMS = 9,    /* `rows` positions, `cols` columns, `batch` samples */
    TCH_SCRATCH_TOKENS = 10,     /* of the token_ operations: `rows` samples, `cols` positions of the tokens, `extra` V,
                                `batch` columns d */
    TCH_SCRATCH_NORMALIZED = 11, /* `rows` positions, `cols` features or channels, `batch` samples */
    TCH_SCRATCH_BLOCK_DOTS = 12, /* `rows` and `cols` of X */
    TCH_SCRATCH_PAIR_DOTS = 13   /* `rows`, `cols` and `batch` of X */
} tch_scratch_for;

/* What `root_setup` decides from; arrays of one double per matrix. */
typedef struct tch_root_norms {
    const double *largest; /* largest eigenvalue, estimated from below */
    const double *max_abs;
    const double *nonfinite;
    const double *asymmetry;
} tch_root_norms;

/* How `spectrum_power` maps eigenvalues, and what `loewner` takes the derivative of. */
typedef struct tch_spectrum_map {
    double eps; /* damping = max(eps, relative_eps * largest eigenvalue) */
    double relative_eps;
    double power;    /* w becomes (w + damping)^power */
    int32_t clamp;   /* where w + damping is below damping (1), or not positive (0), damping takes its place */
    double negative; /* without clamp, an eigenvalue below both -negative * largest and -damping makes the matrix
                            TCH_REPORT_NOT_POSITIVE */
} tch_spectrum_map;

/* Products per second of each arithmetic, for large matrices, in any unit: what the choice of arithmetic weighs. 0 where
 * the backend does not offer the type to compute in. */
typedef struct tch_product_rates {
    double f64, f32;
    double bf16x2; /* split operands: hi hi + hi lo + lo hi, accumulated in float32 */
    double bf16;   /* accumulated in float32 */
} tch_product_rates;

/* Numbers of float64 for each matrix that `normalize` is given. */
#define TCH_NORMALIZE_NUMBERS 65

/* The coupled iteration of an inverse root: H = c[0] I + c[1] M + c[2] M^2, X <- X H, M <- H^root M. */
#define TCH_NEWTON_MAX_STEPS 40
typedef struct tch_newton_iteration {
    int32_t root;
    int32_t degree; /* of H: 1 or 2 */
    int32_t count;  /* of steps */
    double c[TCH_NEWTON_MAX_STEPS][3];
} tch_newton_iteration;

/* A product whose operands or result lie in host memory. `host` says which of A, B, C do. */
typedef struct tch_streamed_product {
    double alpha, beta;
    tch_matrices a, b, c; /* batch of 1 each, row-major */
    int32_t transpose_a, transpose_b;
    int32_t a_on_host, b_on_host, c_on_host;
} tch_streamed_product;

/* --- what optimizers hand down ------------------------------------------------------------------------------------ */

/* The clock of one parameter, on the device: the steps it has taken, and the numbers that follow for the step under way.
 * Parameters have clocks of their own since a gradient may be missing at some steps. */
typedef struct tch_clock {
    double step;        /* steps taken, the one under way included once `advance` has run */
    double correction1; /* 1 - beta1^step, or 1 where nothing is corrected */
    double correction2; /* 1 - beta2^step, or 1 */
    double graft;       /* 1 - graft_beta2^step */
    double factor[2];   /* a factor C becomes factor[0] G G' + factor[1] C */
    float narrow[2];    /* the same two rounded */
    double spare;       /* a clock is 64 bytes */
} tch_clock;

/* The numbers of one group, on the device, so that a graph that is replayed sees their changes. */
typedef struct tch_hyper {
    double lr;
    double beta1, beta2;
    double eps;
    double weight_decay;
    double momentum, dampening;
    double graft_beta2, graft_eps;
    double spare[7];
} tch_hyper;

/* One rectangle of one parameter. Element (i, j) lies at i * stride + j of the parameter, its master copy, its gradient
 * and its state, and at i * block_ld + j of the blocks, or at j * block_ld + i where they are transposed. Parameters are
 * dense, so a whole one is a rectangle of one row. What an operation does not use may be NULL. */
typedef struct tch_piece {
    void *param;    /* of param_type */
    void *master;   /* the parameter in float32, or NULL: then it is the truth, and param its rounding */
    void *grad;     /* of grad_type; read only, except by `unscale` */
    void *state[3]; /* of the type of the arithmetic */
    void *block[2]; /* of block_type */
    const tch_clock *clock;
    int64_t rows, cols, stride, block_ld;
    int64_t first;       /* the number, in its parameter, of element (0, 0): what random numbers count by */
    int32_t parameter;   /* its number in the optimizer, for the same */
    int32_t block_index; /* which of the numbers per block belong to it; pieces of one block follow each other */
    int32_t transposed;
    double factor; /* of the learning rate, for this piece alone */
} tch_piece;

/* What all operations on pieces share. On the CPU and on a GPU the results are the same up to rounding, and do not depend
 * on how pieces are divided among calls. */
typedef struct tch_update {
    const tch_piece *pieces; /* on the host; read before the call returns */
    int64_t count;
    tch_scalar real; /* the arithmetic and the state: F32, or F64 where parameters are float64 */
    tch_scalar param_type, grad_type, block_type;
    const tch_hyper *hyper;  /* on the device */
    const int32_t *skip;     /* on the device, or NULL: where it is not 0 nothing is written, and nothing that was not
                                finite reaches a state */
    const float *grad_scale; /* on the device, or NULL: gradients are divided by it */
    int32_t maximize;        /* gradients change their sign */
    int32_t stochastic; /* a bfloat16 param without master is rounded up or down at random, so that its mean is right */
    uint64_t seed;      /* of that: bits depend on seed, clock->step, parameter and element alone */
} tch_update;

/* The generator of stochastic rounding, the same on every device: 16 random bits for element `e` of parameter `p` at step
 * `t` are the low half of word e % 4 of Philox-4x32-10 with the counter (e / 4 low, e / 4 high, p, t) and the key (seed
 * low, seed high). They are added below the kept bits of the float32, and the sum is cut off; what is not finite is
 * rounded to nearest. */

typedef enum tch_filter {
    TCH_FILTER_NONE = 0,    /* block[1] is not written */
    TCH_FILTER_EMA = 1,     /* s = beta1 s + (1 - beta1) g in state[0]; block[1] = s / correction1 */
    TCH_FILTER_NESTEROV = 2 /* the same s; block[1] = beta1 s + (1 - beta1) g */
} tch_filter;

/* Where a layer-wise step length comes from, when Shampoo gives only the direction. */
typedef enum tch_graft {
    TCH_GRAFT_NONE = 0,
    TCH_GRAFT_SGD = 1,     /* d = f */
    TCH_GRAFT_ADAGRAD = 2, /* v = v + g^2; d = f / (sqrt(v) + graft_eps) */
    TCH_GRAFT_RMSPROP = 3, /* v = graft_beta2 v + (1 - graft_beta2) g^2; d as before */
    TCH_GRAFT_ADAM = 4     /* that v; d = f / (sqrt(v / clock->graft) + graft_eps) */
} tch_graft;

/* How `apply` scales block b. */
typedef enum tch_block_scale {
    TCH_BLOCK_AS_IS = 0,
    TCH_BLOCK_GRAFT = 1,   /* wanted[b] / norms[b], 0 where norms[b] is 0 */
    TCH_BLOCK_UNIT_RMS = 2 /* sqrt(wanted[b]) / norms[b], 0 where norms[b] is 0; wanted[b] is its number of elements */
} tch_block_scale;

/* How clocks turn hyper-parameters into a factor's weights. */
typedef enum tch_factor_rule {
    TCH_FACTOR_SUM = 0, /* 1 and 1 */
    TCH_FACTOR_EMA = 1, /* 1 - beta2 and beta2 */
    TCH_FACTOR_CORRECTED =
        2 /* (1 - beta2) / (1 - beta2^step), and 1 less that: the factor is always the corrected one */
} tch_factor_rule;

/* --- what networks hand down -------------------------------------------------------------------------------------- */

/* The rows of a batch are always cut into this many ranges, [rows k / N, rows (k + 1) / N): sums over them are taken in
 * each range by itself and then from range to range, so that they do not depend on how the device divides its work. */
#define TCH_LOSS_RANGES 256

/* What the losses of a batch share: where the gradient with respect to the outputs goes, and the sums. */
typedef struct tch_loss_results {
    const tch_matrices *gradient; /* of the outputs' shape; NULL where it is not wanted */
    double weight;                /* of each row in it */
    const float *scale;           /* one number on the device that multiplies it, or NULL */
    double *totals;               /* TCH_NETWORK_TOTALS numbers on the device, added to */
    double *scratch;              /* 3 TCH_LOSS_RANGES numbers on the device */
} tch_loss_results;

/* --- what gradients of single samples hand down ------------------------------------------------------------------- */

/* A convolution's view of its input, always in three dimensions, the unused ones in front with size, kernel, stride and
 * dilation 1 and no padding. Channel c of group h of sample b at (x, y, z) is at data[b strides[0] + (h channels + c)
 * strides[1] + x strides[2] + y strides[3] + z strides[4]]. */
typedef struct tch_patches {
    const void *data;
    tch_scalar type;
    int64_t samples, groups, channels; /* channels of one group */
    int64_t strides[5];
    int64_t size[3], kernel[3], stride[3], dilation[3], before[3], outputs[3];
    tch_padding padding;
} tch_patches;

/* A normalising layer and what it saw; x and g are row-major, and of one type.
 * LAYER_NORM, RMS_NORM: [samples, positions, features]; GROUP_NORM: [samples, features (channels), positions]. */
typedef struct tch_normalized {
    tch_layer_kind kind;
    const void *x, *g;
    tch_scalar type;
    int64_t samples, positions, features;
    int64_t groups; /* GROUP_NORM */
    double eps;
} tch_normalized;

/* --- what user kernels hand down ---------------------------------------------------------------------------------- */

/* What is compiled. All of it has been checked: the name is an expression of identifiers, ::, <>, commas and numbers, options
 * are of those that kernel.h lists. */
typedef struct tch_kernel_text {
    const char *source;
    const char *file; /* for messages */
    const char *name;
    int32_t option_count;
    const char *const *options;
    int32_t include_count;
    const char *const *includes;
} tch_kernel_text;

/* Memory of host->allocate: what a compiler made, in the backend's own form, which can be kept on disk and loaded later. */
typedef struct tch_kernel_image {
    void *data;
    size_t bytes;
} tch_kernel_image;

/* One launch: arguments are pointers to values of the parameters' sizes. */
typedef struct tch_kernel_run {
    int64_t grid[3], block[3];
    int64_t shared_bytes;
    const void *const *arguments;
} tch_kernel_run;

/* What the library offers to a backend. */
typedef struct tch_backend_host {
    size_t struct_size;
    /* Records the message of tch_last_error, printf-style, and returns `status`. */
    tch_status (*fail)(tch_status status, const char *format, ...);
    /* Host memory through the library's allocator. */
    void *(*allocate)(size_t bytes, size_t alignment);
    void (*release)(void *pointer, size_t bytes);
} tch_backend_host;

typedef struct tch_backend {
    uint32_t abi;      /* TCH_BACKEND_ABI */
    size_t table_size; /* sizeof(tch_backend) */
    const char *name;  /* "cpu", "cuda" */
    int32_t device_type;
    int32_t priority;    /* "auto" takes the available backend with the highest */
    int32_t host_memory; /* 1: its memory can be read by the host, and operations are done when they return */

    /* --- devices and state ------------------------------------------------------------------------------------- */

    /* REQUIRED. Devices that can be used now; 0 with a sentence in `reason` when none. */
    int32_t (*device_count)(char *reason, size_t reason_size);
    /* REQUIRED. Fills everything but struct_size. */
    tch_status (*device_info)(int32_t index, tch_device_info *info);
    /* REQUIRED. One line on the libraries it runs on. */
    void (*describe)(char *text, size_t text_size);
    /* REQUIRED. The state of one context: a stream, library handles. */
    tch_status (*state_create)(int32_t index, void **state);
    void (*state_destroy)(void *state);
    /* REQUIRED. Called first in every public call on the context: makes the device current, and fixes what must not
     * change until the call is over (the CPU's thread count, for which scratch is measured). */
    tch_status (*begin)(void *state);
    /* OPTIONAL. Called last in every public call whose `begin` succeeded: gives back what that took, such as the caller's
     * current device. Calls may be nested. */
    void (*end)(void *state);
    /* REQUIRED. NULL is the default stream. */
    tch_status (*set_stream)(void *state, void *stream);
    void *(*get_stream)(void *state);
    /* REQUIRED. Waits, and reports what failed since the last wait. */
    tch_status (*synchronize)(void *state);

    /* OPTIONAL. Named ranges for a profiler's timeline, nested; `name` is a literal. */
    void (*range_push)(void *state, const char *name);
    void (*range_pop)(void *state);
    /* OPTIONAL. Without it every type is taken to compute in itself, and products are done in the matrices' own type. */
    void (*product_rates)(void *state, tch_product_rates *rates);

    /* --- memory ------------------------------------------------------------------------------------------------ */

    /* REQUIRED. Aligned to at least 256 bytes; TCH_ERR_OUT_OF_MEMORY with the sizes in the message. */
    tch_status (*allocate)(void *state, int64_t bytes, void **pointer);
    void (*release)(void *state, void *pointer, int64_t bytes);
    tch_status (*memory_info)(void *state, int64_t *total, int64_t *free);
    /* REQUIRED. Plain bytes. Copies to the host wait until they are done. */
    tch_status (*copy_bytes)(void *state, void *dst, const void *src, int64_t bytes, tch_copy_kind kind);
    tch_status (*zero_bytes)(void *state, void *dst, int64_t bytes);

    /* --- elementwise ------------------------------------------------------------------------------------------- */

    /* REQUIRED. dst = src with conversion of type (to nearest even), equal shapes, any strides of src (0 repeats). */
    tch_status (*copy)(void *state, const tch_array *dst, const tch_array *src);
    /* REQUIRED. Every element of dst = value. */
    tch_status (*fill)(void *state, const tch_array *dst, double value);
    /* REQUIRED. out = c0 I + c1 X + c2 Y; x or y may be NULL with its coefficient ignored; out may be x or y. */
    tch_status (*combine)(void *state, double c0, double c1, const tch_matrices *x, double c2, const tch_matrices *y,
                          const tch_matrices *out);
    /* REQUIRED. out_b = (X_b + shift_b I) scale_b^exponent; shift and scale may be NULL, for 0 and 1; float types may
     * differ, the split type included; in place allowed where they do not. */
    tch_status (*shift_scale)(void *state, const tch_matrices *x, const double *shift, const double *scale,
                              double exponent, const tch_matrices *out);
    /* REQUIRED. out(i, j) = X(i, j) w(i), w being 1 by rows per matrix, of X's type; in place allowed. */
    tch_status (*scale_rows)(void *state, const tch_matrices *x, const tch_matrices *w, const tch_matrices *out);
    /* REQUIRED. Signs +1 and -1 that depend only on seed, row, column and not on the batch. */
    tch_status (*random_signs)(void *state, uint64_t seed, const tch_matrices *out);
    /* REQUIRED. out_b = X_b, converted, wherever flags[b] is 0; elsewhere out_b is left as it is. */
    tch_status (*select)(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out);
    /* REQUIRED. The Kronecker product of each pair. */
    tch_status (*kronecker)(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out);

    /* --- reductions and decisions ------------------------------------------------------------------------------ */

    /* REQUIRED. One double per matrix. */
    tch_status (*reduce)(void *state, tch_reduction kind, const tch_matrices *x, double *out);
    /* REQUIRED. norm[b] is the Frobenius norm of X_b, infinite if that is beyond float64, rounded if it is below. Where it is
     * neither below eps nor near 1 (2^-1000 to 2^1000 in float64, 2^-120 to 2^120 in other types), X_b is multiplied by the
     * power of two that brings it near 1, which is exact, and norm[b] becomes its new norm. The others are not written. */
    tch_status (*rescale)(void *state, double eps, const tch_matrices *x, double *norm);
    /* REQUIRED. flags[b] = OVERFLOW where it is OK and X_b has an entry beyond `most` in size, or a NaN. */
    tch_status (*flag_overflow)(void *state, const tch_matrices *x, double most, int32_t *flags);
    /* OPTIONAL. MAX_ABS, NONFINITE and ASYMMETRY of square matrices in one pass. */
    tch_status (*inspect)(void *state, const tch_matrices *x, double *max_abs, double *nonfinite, double *asymmetry);
    /* REQUIRED. An estimate from below of each symmetric matrix's largest eigenvalue, by Lanczos iteration from a fixed
     * start until its relative error is expected below `tolerance` (or, where the device cannot decide, for a fixed
     * number of steps). */
    tch_status (*largest_eigenvalue)(void *state, const tch_matrices *x, double tolerance, double *out, void *scratch);
    /* REQUIRED. For each matrix: flags = NOT_FINITE, NOT_SYMMETRIC (asymmetry > symmetry * max_abs), OVERFLOW (an infinite
     * bound of finite entries), NOT_POSITIVE (zero matrix and no damping) or OK; damping = max(eps, relative_eps * largest);
     * bound = damping + margin * largest, the margin covering what an estimate lacks. Flagged matrices get damping 0 and
     * bound 1. */
    tch_status (*root_setup)(void *state, int64_t batch, const tch_root_norms *norms, double eps, double relative_eps,
                             double margin, double symmetry, double *damping, double *bound, int32_t *flags);
    /* REQUIRED. out = |R| / sqrt(n) with R = X^floor(p/2) A X^ceil(p/2) - I for A_b + shift_b I, in float64: over `probes`
     * random sign vectors, or exactly when probes is 0. This balanced form is the one that does not magnify X's own
     * rounding. error, if not NULL, = |X R| / (p |X|) likewise, which bounds the error of a symmetric X relative to its
     * norm. */
    tch_status (*root_residual)(void *state, int32_t root, const tch_matrices *a, const double *shift,
                                const tch_matrices *x, int32_t probes, double *out, double *error, void *scratch);
    /* REQUIRED. flags[b] = NO_CONVERGENCE where it is OK and residual[b] is not at most tolerance. */
    tch_status (*root_verdict)(void *state, int64_t batch, const double *residual, double tolerance, int32_t *flags);

    /* REQUIRED. Factored damping: with pi = sqrt((trace_a / m) / (trace_b / n)), or 1 where a trace is not positive,
     * shift_a = pi sqrt(damping) and shift_b = sqrt(damping) / pi, for each matrix. */
    tch_status (*factored_damping)(void *state, int64_t batch, const double *trace_a, int64_t m, const double *trace_b,
                                   int64_t n, double damping, double *shift_a, double *shift_b);

    /* --- products ---------------------------------------------------------------------------------------------- */

    /* REQUIRED. C = alpha op(A) op(B) + beta C; beta = 0 does not read C. One type for all three, or C of float32 where A
     * and B are of a half type. */
    tch_status (*gemm)(void *state, double alpha, const tch_matrices *a, int32_t transpose_a, const tch_matrices *b,
                       int32_t transpose_b, double beta, const tch_matrices *c);
    /* OPTIONAL. C = alpha A A' + beta C (transpose: A' A), both triangles written, only the lower read. */
    tch_status (*gram)(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                       const tch_matrices *c);
    /* OPTIONAL. C = c0 I + c1 D + c2 A B, where B, D and the result are symmetric: its lower half is computed and
     * mirrored. D may be NULL with c1 ignored. A, B and D have one type, C may have another: types are those whose rate
     * is not 0. In the split type rows are aligned to 16 bytes. No operand may be C. */
    tch_status (*symmetric_product)(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                    const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);
    /* OPTIONAL, NO DEFAULT, the three of them together. Newton-Schulz steps on X / max(|X|, eps) without a pass over X for
     * the division. `normalize_takes`: whether the two below take a batch of this shape and type, and are the faster way;
     * data is not looked at. */
    int32_t (*normalize_takes)(void *state, const tch_matrices *x);
    /* scale[b] such that scale[b] X_b is X_b / max(|X_b|, eps), eps > 0; where |X_b| is so far from 1 that squares might
     * leave the range of float32, X_b is multiplied by a power of two first. Behind the scales there is room for work:
     * TCH_NORMALIZE_NUMBERS for each matrix in all. */
    tch_status (*normalize)(void *state, double eps, const tch_matrices *x, double *scale);
    /* C_b = scale_b^exponent (c0 I + c1 D + c2 A B'), symmetric, for exponents 0 to 2; D and scale may be NULL. A, B and D
     * are of bfloat16 or all of float16, C of either. No operand may be C. */
    tch_status (*scaled_product)(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                 const tch_matrices *a, const tch_matrices *b, const double *scale, int32_t exponent,
                                 const tch_matrices *c);
    /* OPTIONAL, NO DEFAULT. A product larger than the device, streamed: copies both ways overlap with arithmetic.
     * `scratch` is device memory; host memory that is not page-locked goes through page-locked buffers of the state,
     * which may be allocated here. Returns when the host's operands have been read and its result is written. */
    tch_status (*streamed_product)(void *state, const tch_streamed_product *product, void *scratch,
                                   int64_t scratch_bytes);
    /* OPTIONAL, NO DEFAULT. Largest n that `newton` takes, 0 for none. */
    int64_t (*newton_limit)(void *state);
    /* OPTIONAL, NO DEFAULT. X_b = (A_b + shift_b I)^(-1/root), all steps in one launch and in float64: the iteration
     * starts from M = (A + shift I) / bound, and its X is scaled by bound^(-1/root). A and X may be of float32 or
     * float64. */
    tch_status (*newton)(void *state, const tch_newton_iteration *iteration, const tch_matrices *a, const double *shift,
                         const double *bound, const tch_matrices *x);

    /* --- decompositions ---------------------------------------------------------------------------------------- */

    /* REQUIRED. On entry symmetric matrices in v (both triangles given); on return row i of v is the eigenvector of the
     * i-th eigenvalue, which are ascending in w, 1 by n of v's type. flags[b], where it was OK on entry, becomes
     * NO_CONVERGENCE on failure and OVERFLOW where an eigenvalue is beyond the type; matrices flagged on entry are
     * skipped. */
    tch_status (*eigh)(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags, void *scratch);
    /* REQUIRED. Maps w in place; damping (one double per matrix, may be NULL) receives what was added. A negative power of
     * zero, or an eigenvalue that is too negative, sets the flag NOT_POSITIVE, any other result beyond w's type
     * OVERFLOW. */
    tch_status (*spectrum_power)(void *state, const tch_spectrum_map *map, const tch_matrices *w, double *damping,
                                 int32_t *flags);
    /* OPTIONAL, NO DEFAULT. B, float64, is nearly diagonal with the numbers `lambda` on its diagonal, and `values` (both 1
     * by n) are a function of them, (lambda + damping)^power, constant where clamped. B becomes that function of B, to
     * first order in what is off the diagonal: element (i, j) is multiplied by the divided difference of the function at
     * lambda_i and lambda_j. Elements too large for that, more than half of an eigenvalue, are taken as rounding: zero. */
    tch_status (*divided_differences)(void *state, const tch_matrices *lambda, const tch_matrices *values,
                                      const double *damping, double power, const tch_matrices *b);
    /* REQUIRED. The derivative of a power in its own basis: B(i, j), float64, is multiplied by the divided difference, at
     * eigenvalues i and j of w (1 by n, ascending, float64), of the function that the map describes; by its derivative
     * where they are equal, computed without cancellation. The function is flat where it is clamped, and an eigenvalue no
     * more than `negative` times the largest below zero counts as zero, where the derivative is that from above. Where the
     * damping is relative_eps times the largest eigenvalue, the derivative through that is added, shared evenly among
     * eigenvalues that equal it. A flag that was OK becomes NOT_POSITIVE where a derivative is infinite or, without clamp,
     * an eigenvalue is too negative, and OVERFLOW where a derivative is beyond float64; matrices flagged on entry are
     * skipped. */
    tch_status (*loewner)(void *state, const tch_spectrum_map *map, const tch_matrices *w, const tch_matrices *b,
                          int32_t *flags);
    /* REQUIRED. B = (A + shift I)^-1 B for symmetric positive definite A + shift I; A is destroyed. shift may be NULL.
     * flags as in eigh, with NOT_POSITIVE. B may have any number of columns. */
    tch_status (*spd_solve)(void *state, const tch_matrices *a, const double *shift, const tch_matrices *b,
                            int32_t *flags, void *scratch);
    /* OPTIONAL, NO DEFAULT. X = sum over j of weights[j] (A + shifts[j] I)^-1 for positive shifts, host arrays; A is
     * destroyed. flags as in spd_solve. */
    tch_status (*shifted_inverse)(void *state, const tch_matrices *a, int32_t count, const double *shifts,
                                  const double *weights, const tch_matrices *x, int32_t *flags, void *scratch);

    /* --- optimizers: all pieces of a step at once -------------------------------------------------------------- */

    /* REQUIRED. dst[k] = values[k], from the host, without anything of the caller's being read later; count <= 64. */
    tch_status (*store_numbers)(void *state, double *dst, const double *values, int32_t count);
    /* REQUIRED. *found = 1 if a gradient of the pieces is not finite; otherwise *found stays. */
    tch_status (*find_nonfinite)(void *state, const tch_update *update, int32_t *found);
    /* REQUIRED. skip = found or found_inf says so; counts[0] grows by 1, and counts[1] by 1 where skip is set. Either input
     * may be NULL, for no. */
    tch_status (*decide_skip)(void *state, const int32_t *found, const float *found_inf, int32_t *skip, double *counts);
    /* REQUIRED. Every clock takes a step, unless skip is set (the other numbers are filled in all the same): step + 1,
     * corrections from beta1, beta2 and graft_beta2 (correction1 and correction2 are 1 where `correct` is 0), factor
     * weights by the rule, which are 0 and 1 where skip is set. `clocks` is an array on the host of addresses on the
     * device. */
    tch_status (*advance)(void *state, int64_t count, tch_clock *const *clocks, const tch_hyper *hyper,
                          const int32_t *skip, int32_t correct, tch_factor_rule rule);
    /* REQUIRED. AdamW as PyTorch defines it: p = p (1 - lr weight_decay); m (state[0]) = beta1 m + (1 - beta1) g; v
     * (state[1]) = beta2 v + (1 - beta2) g^2; p = p - lr factor m / correction1 / (sqrt(v / correction2) + eps), v being
     * the largest so far (state[2]) with amsgrad. l2: weight decay is added to g instead. */
    tch_status (*adamw)(void *state, const tch_update *update, int32_t amsgrad, int32_t l2);
    /* REQUIRED. SGD as PyTorch defines it: g = g + weight_decay p; with momentum != 0, buffer (state[0]) = momentum buffer
     * + (1 - dampening) g, or g at the first step of the clock; nesterov: g = g + momentum buffer, else g = buffer;
     * p = p - lr g. state[0] may be NULL, for no momentum. */
    tch_status (*sgd)(void *state, const tch_update *update, int32_t nesterov);
    /* REQUIRED. Reads gradients into blocks: block[0] = g, with weight_decay p added where l2 is set; block[1] by the
     * filter. Where skip is set blocks are zeroed. Either block may be NULL. */
    tch_status (*gather)(void *state, const tch_update *update, tch_filter filter, int32_t l2);
    /* REQUIRED. The grafted direction d from g in block[0], f in block[1] (or block[0] where that is NULL) and v in state[1]:
     * norms[block_index] = |d| over the pieces of a block, each summed in a fixed order; with `replace`, d takes f's place.
     * `scratch` of TCH_SCRATCH_GRAFT bytes. */
    tch_status (*graft)(void *state, const tch_update *update, tch_graft kind, int32_t replace, double *norms,
                        void *scratch);
    /* REQUIRED. Adam inside blocks, for SOAP: v (state[1]) = beta2 v + (1 - beta2) block[0]^2; block[1] = block[1] /
     * (sqrt(v) + eps) times sqrt(correction2) / correction1. */
    tch_status (*rotated_adam)(void *state, const tch_update *update);
    /* REQUIRED. d = block[1], or block[0] where that is NULL, scaled by the rule; with momentum != 0 and state[2] not NULL,
     * buffer (state[2]) = momentum buffer + d; d = d + momentum buffer (nesterov) or buffer; p = p (1 - lr weight_decay)
     * where `decay` is set; p = p - lr factor d. */
    tch_status (*apply)(void *state, const tch_update *update, tch_block_scale scale, const double *wanted,
                        const double *norms, int32_t nesterov, int32_t decay);
    /* REQUIRED. Loss scaling: gradients are divided by *grad_scale in place, and *found_inf = 1 where one of them is not
     * finite (before or after); otherwise *found_inf stays. */
    tch_status (*unscale)(void *state, const tch_update *update, float *found_inf);
    /* REQUIRED. PyTorch's rule: with *found_inf, scale = scale backoff and tracker = 0; otherwise tracker + 1, and at
     * `interval` scale = scale growth, unless that is infinite, and tracker = 0. */
    tch_status (*update_scale)(void *state, float *scale, int32_t *tracker, const float *found_inf, double growth,
                               double backoff, int32_t interval);
    /* REQUIRED. C = clock->factor[0] A A' + clock->factor[1] C (transpose: A' A), both triangles written. `rounded` allows
     * operands to be rounded as in gemm_rounded. */
    tch_status (*factor_update)(void *state, const tch_matrices *a, int32_t transpose, const tch_clock *clock,
                                int32_t rounded, const tch_matrices *c);
    /* OPTIONAL. As gemm for float32, with operands that may be rounded to 11 bits (TF32) and sums in float32: enough for
     * directions, not for roots. */
    tch_status (*gemm_rounded)(void *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                               const tch_matrices *b, int32_t transpose_b, double beta, const tch_matrices *c);
    /* OPTIONAL. As gram, with operands of float32 that may be rounded to 11 bits and sums in float32: for factors. C may be
     * of float32 where A is of a half type. */
    tch_status (*gram_rounded)(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                               const tch_matrices *c);

    /* --- tracking an eigenbasis -------------------------------------------------------------------------------- */

    /* REQUIRED. A = L L'; X = L^-1, lower triangular with zeros above. A is destroyed. flags as in spd_solve; X of a
     * flagged matrix is undefined. float32 or float64. */
    tch_status (*cholesky_inverse)(void *state, const tch_matrices *a, const tch_matrices *x, int32_t *flags,
                                   void *scratch);
    /* REQUIRED. w(i) = (sum over j of X(i, j) Y(i, j))^exponent, summed in float64, w being 1 by rows of X's type; 0 where
     * exponent is not 1 and the sum not positive. */
    tch_status (*row_dots)(void *state, const tch_matrices *x, const tch_matrices *y, double exponent,
                           const tch_matrices *w);
    /* REQUIRED. order[b n + k] is the index of the k-th largest of w_b (1 by n), equal ones by index, NaN last. */
    tch_status (*descending)(void *state, const tch_matrices *w, int32_t *order);
    /* REQUIRED. out(i, j) = X(rows[i], cols[j]), orders per matrix as `descending` gives them; NULL keeps that order. */
    tch_status (*permute)(void *state, const tch_matrices *x, const int32_t *rows, const int32_t *cols,
                          const tch_matrices *out);

    /* --- networks ---------------------------------------------------------------------------------------------- */

    /* Matrices here are float32, one of them (a batch of 1), an example in each row. */

    /* REQUIRED. z = X + bias in every row, bias being 1 by cols; out = f(z). X becomes z, unless out is X. */
    tch_status (*bias_activation)(void *state, tch_activation activation, const tch_matrices *x,
                                  const tch_matrices *bias, const tch_matrices *out);
    /* REQUIRED. gradient = gradient f'(z), element by element. `kept` is z for GELU and f(z) for the others, which is
     * enough to know f' by; it is not read for NONE. */
    tch_status (*activation_backward)(void *state, tch_activation activation, const tch_matrices *kept,
                                      const tch_matrices *gradient);
    /* REQUIRED. out, 1 by cols, is the sum of the rows of X; 0 where there are none. */
    tch_status (*column_sums)(void *state, const tch_matrices *x, const tch_matrices *out);
    /* REQUIRED. TCH_LOSS_CROSS_ENTROPY of each row of `logits` with its label: loss, right answers and rows are added
     * to the totals; gradient = (softmax - indicator of the label) weight scale. Labels outside [0, cols) are never
     * used as an index: their rows are counted as skipped and have gradient 0. */
    tch_status (*softmax_loss)(void *state, const tch_matrices *logits, const int32_t *labels,
                               const tch_loss_results *results);
    /* REQUIRED. TCH_LOSS_SQUARED: gradient = 2 (outputs - targets) / cols weight scale. */
    tch_status (*squared_loss)(void *state, const tch_matrices *outputs, const tch_matrices *targets,
                               const tch_loss_results *results);

    /* REQUIRED. Labels drawn from the softmax of each row of `logits`: the Fisher matrix's own. Row r takes the first class
     * whose cumulative probability passes a uniform number, made of the low 24 bits of the first word of Philox-4x32-10 with
     * counter (r low, r high, 0, 0) and key (seed low, seed high). A row that is not finite gets label -1. */
    tch_status (*sample_labels)(void *state, const tch_matrices *logits, uint64_t seed, int32_t *labels);

    /* --- gradients of single samples --------------------------------------------------------------------------- */

    /* Matrices A (T by d) and G (T by p) are the inputs and output gradients of one sample at T positions; a batch of them
     * is the samples, or samples times groups, `groups` of one sample following each other. Both have one type: float64,
     * float32, float16 or bfloat16. Sums are in float64 for float64, in float32 at least for the rest. `rounded` allows the
     * operands of float32 products to be rounded as in gemm_rounded. */

    /* REQUIRED. norms[b / groups] += scale |G_b' A_b|^2, sum of squares of a p by d matrix that is not formed whole. As a sum
     * of <a_s, a_t> <g_s, g_t>, whose terms have both signs, only where it is not 256 times smaller than they are. */
    tch_status (*sample_norms)(void *state, const tch_matrices *a, const tch_matrices *g, int64_t groups, double scale,
                               int32_t rounded, double *norms, void *scratch);
    /* REQUIRED. out = beta out + scale times the sum over samples of the squares of the elements of G_b' A_b, b counting
     * samples of one group: out (p by d) has `groups` matrices. float32 or float64, which A and G may be narrower than. */
    tch_status (*sample_squares)(void *state, const tch_matrices *a, const tch_matrices *g, double scale, double beta,
                                 int32_t rounded, const tch_matrices *out, void *scratch);
    /* REQUIRED. Row b of out (a single matrix, batch by cols, float32 or float64) = beta times itself + scale times the sum of
     * the rows of X_b. */
    tch_status (*sample_sums)(void *state, const tch_matrices *x, double scale, double beta, const tch_matrices *out,
                              void *scratch);
    /* REQUIRED. Matrix b groups + h of out (of the input's type, samples times groups of them, outputs' product by channels
     * times kernel's product) has in row l what output position l sees of group h: column (c, i, j, k) in the order of the
     * weight. */
    tch_status (*patches)(void *state, const tch_patches *patches, const tch_matrices *out);
    /* REQUIRED. norms[b] += scale times the sum over pairs s, t of positions with equal tokens of <row s, row t of G_b>.
     * tokens: a single matrix of int32 or int64, a sample in each row; G_b is S by d. Tokens outside [0, rows) and those that
     * equal `padding` count for nothing, here and below. */
    tch_status (*token_norms)(void *state, const tch_matrices *tokens, int64_t rows, int64_t padding,
                              const tch_matrices *g, double scale, double *norms, void *scratch);
    /* REQUIRED. Row v of out = beta times itself + sum over samples b, positions s with token v, of weights[b] times scale
     * times row s of G_b, in a fixed order; out is V by d, float32 or float64. weights may be NULL, for 1; a weight of 0
     * leaves its sample out. With `apart`, out is a batch with a matrix for each sample. */
    tch_status (*token_sums)(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                             const double *weights, double scale, double beta, int32_t apart, const tch_matrices *out,
                             void *scratch);
    /* REQUIRED. norms[b] += scale times the sum over s and t of G_b(t, tokens(b, s)) <row s of H_b, row t of A_b>: H is S by
     * d, A is T by d, G is T by V. */
    tch_status (*token_cross)(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *h,
                              const tch_matrices *a, const tch_matrices *g, double scale, double *norms, void *scratch);
    /* REQUIRED. dots[b] += scale times the sum over s of <row s of G_b, row tokens(b, s) of W>: W is a single matrix, V by d,
     * of G's type, or float32 where that is a half type. */
    tch_status (*token_dots)(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                             const tch_matrices *w, double scale, double *dots, void *scratch);
    /* REQUIRED. For each sample and feature: weight = scale times the sum over positions of x^ g, x^ the normalised x; bias
     * = scale times that of g. Each a single matrix, samples by features, float32 or float64; either may be NULL. */
    tch_status (*normalized_sums)(void *state, const tch_normalized *layer, double scale, const tch_matrices *weight,
                                  const tch_matrices *bias, void *scratch);
    /* REQUIRED. out(i, j) = beta times itself + scale times the sum over the elements of block (i, j) of X(r, c) Y(r, c), blocks
     * being `height` by `width`; X and Y are single matrices of one type, out float32 or float64, and one of them where blocks
     * have one element. */
    tch_status (*block_dots)(void *state, const tch_matrices *x, const tch_matrices *y, int64_t height, int64_t width,
                             double scale, double beta, const tch_matrices *out, void *scratch);
    /* REQUIRED. out[b / groups] += scale times the sum of X_b(i, j) Y_b(i, j); in float64. A stride of 0 repeats one. */
    tch_status (*pair_dots)(void *state, const tch_matrices *x, const tch_matrices *y, int64_t groups, double scale,
                            double *out, void *scratch);
    /* REQUIRED. weights[i] = min(1, most / (sqrt(norms[i]) + 1e-6)), 0 where norms[i] is not finite; a negative one counts as 0.
     * May be in place. */
    tch_status (*clip_weights)(void *state, int64_t count, const double *norms, double most, double *weights);
    /* REQUIRED. out_b = X_b weights[b / groups], converted to out's type, and 0 where the weight is 0 whatever X is. With
     * `drop_only` weights only say which samples are left out: X_b itself where its weight is not 0. In place where the
     * types are equal. */
    tch_status (*weigh_samples)(void *state, const tch_matrices *x, int64_t groups, const double *weights,
                                int32_t drop_only, const tch_matrices *out);

    /* --- curvature --------------------------------------------------------------------------------------------- */

    /* REQUIRED. X(i, j) = X(i, j) / (rows(i) cols(j) + damping), rows and cols being 1 by so many per matrix; or, where they
     * are NULL, X(i, j) / (values(i, j) + damping). Negative rows, cols and values count as 0. */
    tch_status (*damped_divide)(void *state, const tch_matrices *x, const tch_matrices *rows, const tch_matrices *cols,
                                const tch_matrices *values, double damping);
    /* REQUIRED. *scale = min(1, sqrt(most / |lr^2 *dot|)), 1 where that is not finite or *dot is 0. */
    tch_status (*kl_clip)(void *state, const double *dot, double lr, double most, double *scale);

    /* --- recorded work ----------------------------------------------------------------------------------------- */

    /* All OPTIONAL, NO DEFAULT, and there or not there together: for devices on which queueing takes the host long. Work
     * that comes again with the same arguments is kept once, and from then on queued as a whole. */

    /* Whether work can be recorded now: not while the caller records what is queued, or wants every operation by itself. */
    int32_t (*recording_possible)(void *state);
    /* What is queued from here on is kept and not done; until recording_end nothing may be allocated or waited for. After a
     * failure everything is as it was. */
    tch_status (*recording_begin)(void *state);
    /* Also after an error of what was queued. *recording is NULL where it cannot be kept, which is no failure. */
    tch_status (*recording_end)(void *state, void **recording);
    /* Queues all of it, in order with other work; after a failure nothing was queued. */
    tch_status (*recording_replay)(void *state, void *recording);
    /* Called also outside begin and end, and while what was queued is still running. */
    void (*recording_release)(void *state, void *recording);

    /* --- user kernels ------------------------------------------------------------------------------------------ */

    /* All OPTIONAL, NO DEFAULT, and there or not there together, but for kernel_current. */

    /* Everything about compiler and device that an image depends on, as one line for the cache's key. Asked for every kernel,
     * those in the cache too: no compiler should be opened for it. UNAVAILABLE, with what to install, where there is none. */
    tch_status (*kernel_compiler)(void *state, char *text, size_t size);
    /* Compiles. What the compiler says goes to `log`, cut off at its end with a NUL; where it fails, INVALID_ARGUMENT. */
    tch_status (*kernel_build)(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log,
                               size_t log_size);
    /* OPTIONAL. Whether an image, which may be damaged, is what would be compiled now as far as the key does not say: whether
     * files that its compiler found by itself are what they were. Without it they all are. */
    int32_t (*kernel_current)(void *state, const tch_kernel_image *image);
    /* From an image, which may be damaged: TCH_ERR_IO then, and nothing else has happened. */
    tch_status (*kernel_load)(void *state, const tch_kernel_image *image, void **kernel);
    void (*kernel_unload)(void *state, void *kernel);
    /* Fills info, and parameters up to `room` of them. */
    tch_status (*kernel_describe)(void *state, void *kernel, tch_kernel_info *info, int32_t room,
                                  tch_kernel_parameter *parameters);
    /* Queued as everything is. */
    tch_status (*kernel_launch)(void *state, void *kernel, const tch_kernel_run *run);

    /* REQUIRED. Bytes of scratch for one of the operations above on matrices of this type and size. */
    int64_t (*scratch_bytes)(void *state, tch_scratch_for operation, tch_scalar type, int64_t rows, int64_t cols,
                             int64_t batch, int64_t extra);
} tch_backend;

typedef const tch_backend *(*tch_backend_entry)(uint32_t abi, const tch_backend_host *host, char *reason,
                                                size_t reason_size);

#endif
