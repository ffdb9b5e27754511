/* What the files of the CUDA module share: the state of a context, the check of CUDA's own calls, and the operations of
 * the table by name. Readable by C and by CUDA C; kernels' helpers are in the .cuh files. */
#ifndef TCHI_CUDA_H
#define TCHI_CUDA_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include <torchium/backend.h>

#include "cublas.h"
#include "cusolver.h"

/* One GPU, as far as decisions need to know it. */
typedef struct tchi_cuda_device {
    int32_t index;
    int32_t major, minor;     /* compute capability */
    int32_t processors;       /* multiprocessors */
    int64_t shared_per_block; /* bytes of shared memory a block can have after opting in */
    int64_t l2_bytes;
} tchi_cuda_device;

/* Work recorded as graphs: see recording.c. */
typedef struct tchi_cuda_recorder {
    int32_t wanted;            /* the environment has nothing against it */
    cudaStream_t stream, main; /* what is captured, NULL until the first time; and while that is done the context's */
} tchi_cuda_recorder;

/* Page-locked buffers, streams and events of streamed products; made at the first one. */
typedef struct tchi_cuda_staging tchi_cuda_staging;

typedef struct tchi_cuda_state {
    tchi_cuda_device device;
    cudaStream_t stream; /* where work is queued: `own`, or the caller's */
    cudaStream_t own;
    tchi_cublas_handle blas;
    void *blas_workspace;        /* device memory, so that cuBLAS allocates none, also under graph capture */
    tchi_cusolver_handle solver; /* NULL until the first decomposition asks for its scratch */
    tchi_cusolver_params solver_params;
    void *solver_host; /* host scratch of cuSOLVER, grown when scratch_bytes is asked */
    size_t solver_host_bytes;
    tchi_cuda_staging *staging;
    tchi_cuda_recorder recorder;
} tchi_cuda_state;

TCH_BEGIN_DECLS

/* What the library offers; set when the module is entered. */
extern const tch_backend_host *tchi_cuda_host;

/* --- errors ------------------------------------------------------------------------------------------------------- */

/* TCH_OK, or a status with the message "what: CUDA's own words"; clears the error where CUDA lets it be cleared. */
tch_status tchi_cuda_check(cudaError_t error, const char *what);

/* TCH_ERR_BACKEND, with what happened, where a kernel's fault has taken the device from this process; see faults.h. */
tch_status tchi_cuda_check_device(int32_t device);

/* After every launch. Under TORCHIUM_DEBUG_SYNC=1 it waits, so that the kernel named is the one that failed. */
tch_status tchi_cuda_launched(const tchi_cuda_state *state, const char *kernel);

#define TCHI_CUDA_TRY(call, what)                                                                                      \
    do {                                                                                                               \
        tch_status tchi_status_ = tchi_cuda_check((call), (what));                                                     \
        if (tchi_status_ != TCH_OK) {                                                                                  \
            return tchi_status_;                                                                                       \
        }                                                                                                              \
    } while (0)

#define TCHI_CUDA_PASS(call)                                                                                           \
    do {                                                                                                               \
        tch_status tchi_status_ = (call);                                                                              \
        if (tchi_status_ != TCH_OK) {                                                                                  \
            return tchi_status_;                                                                                       \
        }                                                                                                              \
    } while (0)

/* --- devices, state, memory: device.c, state.c, memory.c, ranges.c ------------------------------------------------- */

int32_t tchi_cuda_device_count(char *reason, size_t reason_size);
tch_status tchi_cuda_device_info(int32_t index, tch_device_info *info);
tch_status tchi_cuda_device_read(int32_t index, tchi_cuda_device *device);
void tchi_cuda_describe(char *text, size_t text_size);
tch_status tchi_cuda_state_create(int32_t index, void **state);
void tchi_cuda_state_destroy(void *state);
/* Of blas_workspace, which kernels of our own may use between two products of cuBLAS. */
int64_t tchi_cuda_workspace_bytes(const tchi_cuda_state *state);
tch_status tchi_cuda_begin(void *state);
void tchi_cuda_end(void *state);
/* The device of the call that this thread is in, or -1. */
int32_t tchi_cuda_entered(void);
tch_status tchi_cuda_set_stream(void *state, void *stream);
/* Work goes there from now on, that of cuBLAS and cuSOLVER too; nothing is ordered. */
tch_status tchi_cuda_use_stream(tchi_cuda_state *state, cudaStream_t stream);
void *tchi_cuda_get_stream(void *state);
tch_status tchi_cuda_synchronize(void *state);
void tchi_cuda_range_push(void *state, const char *name);
void tchi_cuda_range_pop(void *state);
/* recording.c */
void tchi_cuda_recorder_init(tchi_cuda_recorder *recorder);
void tchi_cuda_recorder_destroy(tchi_cuda_recorder *recorder);
int32_t tchi_cuda_recording_possible(void *state);
tch_status tchi_cuda_recording_begin(void *state);
tch_status tchi_cuda_recording_end(void *state, void **recording);
tch_status tchi_cuda_recording_replay(void *state, void *recording);
void tchi_cuda_recording_release(void *state, void *recording);
/* Rates by compute capability alone, so that the decision can be tested for GPUs that are not at hand. */
tch_product_rates tchi_cuda_rates_of(int32_t major, int32_t minor);
void tchi_cuda_product_rates(void *state, tch_product_rates *rates);
tch_status tchi_cuda_allocate(void *state, int64_t bytes, void **pointer);
void tchi_cuda_release(void *state, void *pointer, int64_t bytes);
tch_status tchi_cuda_memory_info(void *state, int64_t *total, int64_t *free);
tch_status tchi_cuda_copy_bytes(void *state, void *dst, const void *src, int64_t bytes, tch_copy_kind kind);
tch_status tchi_cuda_zero_bytes(void *state, void *dst, int64_t bytes);

/* --- elementwise: copy.cu, elementwise.cu, shift_scale.cu, kronecker.cu -------------------------------------------- */

tch_status tchi_cuda_copy(void *state, const tch_array *dst, const tch_array *src);
tch_status tchi_cuda_fill(void *state, const tch_array *dst, double value);
tch_status tchi_cuda_combine(void *state, double c0, double c1, const tch_matrices *x, double c2, const tch_matrices *y,
                             const tch_matrices *out);
tch_status tchi_cuda_shift_scale(void *state, const tch_matrices *x, const double *shift, const double *scale,
                                 double exponent, const tch_matrices *out);
tch_status tchi_cuda_scale_rows(void *state, const tch_matrices *x, const tch_matrices *w, const tch_matrices *out);
tch_status tchi_cuda_random_signs(void *state, uint64_t seed, const tch_matrices *out);
tch_status tchi_cuda_select(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out);
tch_status tchi_cuda_kronecker(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out);

/* --- reductions and decisions: reduce.cu, frobenius.cu, decisions.cu, lanczos.cu, root_residual.cu ----------------- */

tch_status tchi_cuda_reduce(void *state, tch_reduction kind, const tch_matrices *x, double *out);
tch_status tchi_cuda_inspect(void *state, const tch_matrices *x, double *max_abs, double *nonfinite, double *asymmetry);
tch_status tchi_cuda_largest_eigenvalue(void *state, const tch_matrices *x, double tolerance, double *out,
                                        void *scratch);
int64_t tchi_cuda_largest_eigenvalue_scratch(const tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t batch);
tch_status tchi_cuda_rescale(void *state, double eps, const tch_matrices *x, double *norm);
tch_status tchi_cuda_flag_overflow(void *state, const tch_matrices *x, double most, int32_t *flags);
tch_status tchi_cuda_root_setup(void *state, int64_t batch, const tch_root_norms *norms, double eps,
                                double relative_eps, double margin, double symmetry, double *damping, double *bound,
                                int32_t *flags);
tch_status tchi_cuda_root_residual(void *state, int32_t root, const tch_matrices *a, const double *shift,
                                   const tch_matrices *x, int32_t probes, double *out, double *error, void *scratch);
int64_t tchi_cuda_root_residual_scratch(const tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t batch,
                                        int64_t probes);
tch_status tchi_cuda_root_verdict(void *state, int64_t batch, const double *residual, double tolerance, int32_t *flags);
tch_status tchi_cuda_factored_damping(void *state, int64_t batch, const double *trace_a, int64_t m,
                                      const double *trace_b, int64_t n, double damping, double *shift_a,
                                      double *shift_b);
tch_status tchi_cuda_spectrum_power(void *state, const tch_spectrum_map *map, const tch_matrices *w, double *damping,
                                    int32_t *flags);

/* --- products: products.c, symmetric_product.c, symmetric_f64.cu, symmetric_split.cu, symmetric_turns.cu,
 * normalize.cu, newton_small.cu, streamed.c */

tch_status tchi_cuda_gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a, const tch_matrices *b,
                          int32_t transpose_b, double beta, const tch_matrices *c);
tch_status tchi_cuda_gram(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                          const tch_matrices *c);
tch_status tchi_cuda_symmetric_product(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                       const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);
/* Kernels of our own for it; each says whether it can take these operands, and should. C = c0 I + c1 D + c2 A B' over
 * the lower tiles, mirrored; D may be NULL; A and B n by k, rows aligned to 16 bytes. */
int tchi_cuda_symmetric_f64_takes(const tchi_cuda_state *state, const tch_matrices *d, const tch_matrices *a,
                                  const tch_matrices *b, const tch_matrices *c);
tch_status tchi_cuda_symmetric_f64(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d, double c2,
                                   const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);
int tchi_cuda_symmetric_turns_takes(const tchi_cuda_state *state, const tch_matrices *d, const tch_matrices *a,
                                    const tch_matrices *b, const tch_matrices *c);
tch_status tchi_cuda_symmetric_turns(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d, double c2,
                                     const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);
int tchi_cuda_symmetric_split_takes(const tchi_cuda_state *state, const tch_matrices *d, const tch_matrices *a,
                                    const tch_matrices *b, const tch_matrices *c);
tch_status tchi_cuda_symmetric_split(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d, double c2,
                                     const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);
int32_t tchi_cuda_normalize_takes(void *state, const tch_matrices *x);
tch_status tchi_cuda_normalize(void *state, double eps, const tch_matrices *x, double *scale);
tch_status tchi_cuda_scaled_product(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                    const tch_matrices *a, const tch_matrices *b, const double *scale, int32_t exponent,
                                    const tch_matrices *c);
int64_t tchi_cuda_newton_limit(void *state);
tch_status tchi_cuda_newton(void *state, const tch_newton_iteration *iteration, const tch_matrices *a,
                            const double *shift, const double *bound, const tch_matrices *x);
tch_status tchi_cuda_streamed_product(void *state, const tch_streamed_product *product, void *scratch,
                                      int64_t scratch_bytes);
void tchi_cuda_staging_destroy(tchi_cuda_staging *staging); /* NULL is allowed */

/* --- decompositions: decompositions.c ------------------------------------------------------------------------------ */

tch_status tchi_cuda_eigh(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags, void *scratch);
int64_t tchi_cuda_eigh_scratch(tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t batch);
tch_status tchi_cuda_divided_differences(void *state, const tch_matrices *lambda, const tch_matrices *values,
                                         const double *damping, double power, const tch_matrices *b);
tch_status tchi_cuda_loewner(void *state, const tch_spectrum_map *map, const tch_matrices *w, const tch_matrices *b,
                             int32_t *flags);
tch_status tchi_cuda_spd_solve(void *state, const tch_matrices *a, const double *shift, const tch_matrices *b,
                               int32_t *flags, void *scratch);
int64_t tchi_cuda_spd_solve_scratch(tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t cols, int64_t batch);
int64_t tchi_cuda_scratch_bytes(void *state, tch_scratch_for operation, tch_scalar type, int64_t rows, int64_t cols,
                                int64_t batch, int64_t extra);

/* --- optimizers: updates_adamw.cu, updates_sgd.cu, updates_blocks.cu, updates_apply.cu, updates_graft.cu,
 * updates_control.cu, products.c */

tch_status tchi_cuda_store_numbers(void *state, double *dst, const double *values, int32_t count);
tch_status tchi_cuda_find_nonfinite(void *state, const tch_update *update, int32_t *found);
tch_status tchi_cuda_decide_skip(void *state, const int32_t *found, const float *found_inf, int32_t *skip,
                                 double *counts);
tch_status tchi_cuda_advance(void *state, int64_t count, tch_clock *const *clocks, const tch_hyper *hyper,
                             const int32_t *skip, int32_t correct, tch_factor_rule rule);
tch_status tchi_cuda_adamw(void *state, const tch_update *update, int32_t amsgrad, int32_t l2);
tch_status tchi_cuda_sgd(void *state, const tch_update *update, int32_t nesterov);
tch_status tchi_cuda_gather(void *state, const tch_update *update, tch_filter filter, int32_t l2);
tch_status tchi_cuda_graft(void *state, const tch_update *update, tch_graft kind, int32_t replace, double *norms,
                           void *scratch);
int64_t tchi_cuda_graft_scratch(int64_t elements, int64_t pieces);
tch_status tchi_cuda_rotated_adam(void *state, const tch_update *update);
tch_status tchi_cuda_apply(void *state, const tch_update *update, tch_block_scale scale, const double *wanted,
                           const double *norms, int32_t nesterov, int32_t decay);
tch_status tchi_cuda_unscale(void *state, const tch_update *update, float *found_inf);
tch_status tchi_cuda_update_scale(void *state, float *scale, int32_t *tracker, const float *found_inf, double growth,
                                  double backoff, int32_t interval);
tch_status tchi_cuda_factor_update(void *state, const tch_matrices *a, int32_t transpose, const tch_clock *clock,
                                   int32_t rounded, const tch_matrices *c);
tch_status tchi_cuda_gemm_rounded(void *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                                  const tch_matrices *b, int32_t transpose_b, double beta, const tch_matrices *c);
tch_status tchi_cuda_gram_rounded(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                                  const tch_matrices *c);

/* --- tracking an eigenbasis: cholesky.c, cholesky.cu, basis.cu ----------------------------------------------------- */

tch_status tchi_cuda_cholesky_inverse(void *state, const tch_matrices *a, const tch_matrices *x, int32_t *flags,
                                      void *scratch);
int64_t tchi_cuda_cholesky_inverse_scratch(tch_scalar type, int64_t n, int64_t batch);
/* The same for matrices of up to TCHI_CUDA_CHOLESKY_LEAF, without scratch. Flagged ones get the identity. */
#define TCHI_CUDA_CHOLESKY_LEAF 64
tch_status tchi_cuda_cholesky_leaf(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *x,
                                   int32_t *flags);
tch_status tchi_cuda_row_dots(void *state, const tch_matrices *x, const tch_matrices *y, double exponent,
                              const tch_matrices *w);
tch_status tchi_cuda_descending(void *state, const tch_matrices *w, int32_t *order);
tch_status tchi_cuda_permute(void *state, const tch_matrices *x, const int32_t *rows, const int32_t *cols,
                             const tch_matrices *out);

/* --- networks: network.cu ------------------------------------------------------------------------------------------ */

tch_status tchi_cuda_bias_activation(void *state, tch_activation activation, const tch_matrices *x,
                                     const tch_matrices *bias, const tch_matrices *out);
tch_status tchi_cuda_activation_backward(void *state, tch_activation activation, const tch_matrices *kept,
                                         const tch_matrices *gradient);
tch_status tchi_cuda_column_sums(void *state, const tch_matrices *x, const tch_matrices *out);
tch_status tchi_cuda_softmax_loss(void *state, const tch_matrices *logits, const int32_t *labels,
                                  const tch_loss_results *results);
tch_status tchi_cuda_squared_loss(void *state, const tch_matrices *outputs, const tch_matrices *targets,
                                  const tch_loss_results *results);
tch_status tchi_cuda_sample_labels(void *state, const tch_matrices *logits, uint64_t seed, int32_t *labels);
tch_status tchi_cuda_sample_norms(void *state, const tch_matrices *a, const tch_matrices *g, int64_t groups,
                                  double scale, int32_t rounded, double *norms, void *scratch);
int64_t tchi_cuda_sample_norms_scratch(int64_t positions, int64_t d, int64_t p, int64_t batch);
tch_status tchi_cuda_sample_squares(void *state, const tch_matrices *a, const tch_matrices *g, double scale,
                                    double beta, int32_t rounded, const tch_matrices *out, void *scratch);
tch_status tchi_cuda_sample_sums(void *state, const tch_matrices *x, double scale, double beta, const tch_matrices *out,
                                 void *scratch);
tch_status tchi_cuda_patches(void *state, const tch_patches *patches, const tch_matrices *out);
tch_status tchi_cuda_token_norms(void *state, const tch_matrices *tokens, int64_t rows, int64_t padding,
                                 const tch_matrices *g, double scale, double *norms, void *scratch);
tch_status tchi_cuda_token_sums(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                                const double *weights, double scale, double beta, int32_t apart,
                                const tch_matrices *out, void *scratch);
tch_status tchi_cuda_token_cross(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *h,
                                 const tch_matrices *a, const tch_matrices *g, double scale, double *norms,
                                 void *scratch);
tch_status tchi_cuda_token_dots(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                                const tch_matrices *w, double scale, double *dots, void *scratch);
tch_status tchi_cuda_normalized_sums(void *state, const tch_normalized *layer, double scale, const tch_matrices *weight,
                                     const tch_matrices *bias, void *scratch);
tch_status tchi_cuda_block_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t height,
                                int64_t width, double scale, double beta, const tch_matrices *out, void *scratch);
tch_status tchi_cuda_pair_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t groups, double scale,
                               double *out, void *scratch);
tch_status tchi_cuda_clip_weights(void *state, int64_t count, const double *norms, double most, double *weights);
tch_status tchi_cuda_weigh_samples(void *state, const tch_matrices *x, int64_t groups, const double *weights,
                                   int32_t drop_only, const tch_matrices *out);
tch_status tchi_cuda_damped_divide(void *state, const tch_matrices *x, const tch_matrices *rows,
                                   const tch_matrices *cols, const tch_matrices *values, double damping);
tch_status tchi_cuda_kl_clip(void *state, const double *dot, double lr, double most, double *scale);

/* Scratch of these, as scratch_bytes asks for it. */
int64_t tchi_cuda_sample_sums_scratch(int64_t rows, int64_t cols, int64_t batch);
int64_t tchi_cuda_token_runs_scratch(int64_t samples, int64_t positions, int64_t cols); /* of norms and sums */
int64_t tchi_cuda_token_cross_scratch(int64_t samples, int64_t positions);              /* and of token_dots */
int64_t tchi_cuda_normalized_scratch(tch_scalar type, int64_t positions, int64_t features, int64_t samples);
int64_t tchi_cuda_block_dots_scratch(int64_t rows, int64_t cols);
int64_t tchi_cuda_pair_dots_scratch(int64_t rows, int64_t cols, int64_t batch);

/* out[i] += scale times the sum of partial[i each] to partial[i each + each - 1], in a fixed order. */
tch_status tchi_cuda_add_partials(const tchi_cuda_state *state, int64_t count, int64_t each, const double *partial,
                                  double scale, double *out);

/* --- kernels of a user's: kernel_build.c, kernel.c ----------------------------------------------------------------- */

tch_status tchi_cuda_kernel_compiler(void *state, char *text, size_t size);
tch_status tchi_cuda_kernel_build(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log,
                                  size_t log_size);
tch_status tchi_cuda_kernel_load(void *state, const tch_kernel_image *image, void **kernel);
void tchi_cuda_kernel_unload(void *state, void *kernel);
tch_status tchi_cuda_kernel_describe(void *state, void *kernel, tch_kernel_info *info, int32_t room,
                                     tch_kernel_parameter *parameters);
tch_status tchi_cuda_kernel_launch(void *state, void *kernel, const tch_kernel_run *run);

TCH_END_DECLS

#endif
