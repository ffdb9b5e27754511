/* Shared by the CUDA module: the state of a context, error checks, and the operations of the table. For C and CUDA C;
 * device helpers are in the .cuh files. */
#ifndef TCHI_CUDA_H
#define TCHI_CUDA_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <torchium/backend.h>

#include "backends/cuda/product/kernel_choice.h"
#include "backends/cuda/runtime/libraries/cublas.h"
#include "backends/cuda/runtime/libraries/cusolver.h"
#include "core/status.h"

/* Properties of a GPU that decisions depend on. */
typedef struct tchi_cuda_device {
    int32_t index;
    int32_t major, minor;     /* compute capability */
    int32_t processors;       /* multiprocessors */
    int64_t shared_per_block; /* bytes of shared memory a block can have after opting in */
    int64_t l2_bytes;
} tchi_cuda_device;

/* Work recorded as graphs: see recording.c. */
typedef struct tchi_cuda_recorded tchi_cuda_recorded;
typedef struct tchi_cuda_recorder {
    int32_t enabled;               /* not disabled by the environment */
    int32_t phases;                /* a graph for each phase */
    cudaStream_t stream, main;     /* the captured stream, NULL until the first capture; during one the context's */
    cudaStream_t other;            /* the stream of the next phase's capture; NULL until there are two */
    tchi_cuda_recorded *under_way; /* NULL unless one exists, or if memory is short */
} tchi_cuda_recorder;

/* Page-locked buffers, streams and events of streamed products, created by the first one. */
typedef struct tchi_cuda_staging tchi_cuda_staging;

typedef struct tchi_cuda_state {
    tchi_cuda_device device;
    cudaStream_t stream; /* where work is queued: `local`, or the caller's */
    cudaStream_t local;
    cudaStream_t side;  /* NULL until first needed */
    cudaEvent_t forked; /* the event that the side stream waits for; created with it */
    tchi_cublas_handle blas;
    void *blas_workspace;        /* device memory, so that cuBLAS allocates none, also under graph capture */
    tchi_cusolver_handle solver; /* NULL until the first decomposition asks for its scratch */
    tchi_cusolver_params solver_params;
    void *solver_host; /* host scratch of cuSOLVER, grown when scratch_bytes is called */
    size_t solver_host_bytes;
    tchi_cuda_staging *staging;
    tchi_cuda_recorder recorder;
} tchi_cuda_state;

/* tchi_kernel_fits on this device. */
static inline int tchi_cuda_kernel_fits(const tchi_cuda_state *state, tchi_kernel kernel, const tch_matrices *a,
                                        const tch_matrices *c)
{
    return tchi_kernel_fits(kernel, state->device.major, state->device.processors, a, c);
}

/* Whether a stream is being captured in a CUDA graph. Then work can be queued, but nothing can synchronize, and
 * allocated memory would belong to the graph. For the legacy default stream CUDA returns an error while another stream
 * is captured: that counts as capturing too, since the same calls are forbidden. */
static inline int tchi_cuda_is_capturing(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaErrorStreamCaptureImplicit) {
        cudaGetLastError();
        return 1;
    }
    return status != cudaStreamCaptureStatusNone;
}

TCH_BEGIN_DECLS

/* The library's services, set by the entry point. */
extern const tch_backend_host *tchi_cuda_host;

/* --- errors ------------------------------------------------------------------------------------------------------ */

/* TCH_OK, or a status with the message "what: CUDA's error text"; clears the error if possible. */
tch_status tchi_cuda_check(cudaError_t error, const char *what);

/* TCH_ERR_BACKEND with the cause if a kernel fault has made the device unusable for this process. */
tch_status tchi_cuda_check_device(int32_t device);

/* A custom kernel was launched on the device: messages of a later fault name it. */
void tchi_cuda_remember_kernel(int32_t device, const char *name);

/* After every launch. Under TORCHIUM_DEBUG_SYNC=1 it waits, so that the kernel named is the one that failed. */
tch_status tchi_cuda_launched(const tchi_cuda_state *state, const char *kernel);

#define TCHI_CUDA_TRY(call, what) TCHI_TRY(tchi_cuda_check((call), (what)))

/* --- devices, state, memory: device.c, state.c, memory.c, ranges.c, events.c ------------------------------------- */

tch_device_count_op tchi_cuda_device_count;
tch_device_info_op tchi_cuda_device_info;
tch_status tchi_cuda_device_read(int32_t index, tchi_cuda_device *device);
tch_state_create_op tchi_cuda_state_create;
tch_state_destroy_op tchi_cuda_state_destroy;
/* Size of blas_workspace, which kernels may use between two cuBLAS products. */
int64_t tchi_cuda_workspace_bytes(const tchi_cuda_state *state);
tch_begin_op tchi_cuda_begin;
tch_end_op tchi_cuda_end;
/* The device of the call that this thread is in, or -1. */
int32_t tchi_cuda_entered(void);
tch_stream_op tchi_cuda_stream;
/* Queues all further work there, including cuBLAS and cuSOLVER; streams are not ordered. */
tch_status tchi_cuda_use_stream(tchi_cuda_state *state, cudaStream_t stream);
tch_synchronize_op tchi_cuda_synchronize;
tch_range_op tchi_cuda_range;
tch_readback_post_op tchi_cuda_readback_post;
tch_readback_wait_op tchi_cuda_readback_wait;
tch_side_begin_op tchi_cuda_side_begin;
tch_side_mark_op tchi_cuda_side_mark;
tch_side_join_op tchi_cuda_side_join;
tch_event_destroy_op tchi_cuda_event_destroy;
/* Create a non-blocking stream or an event without timing, unless there is one. */
cudaError_t tchi_cuda_ensure_stream(cudaStream_t *stream);
cudaError_t tchi_cuda_ensure_event(cudaEvent_t *event);
/* NULL is allowed. Errors during teardown are ignored. */
void tchi_cuda_drop_stream(cudaStream_t stream);
void tchi_cuda_drop_event(cudaEvent_t event);
/* ranges.c: whether a profiler is attached; and its ranges, recording or not */
bool tchi_cuda_profiler_attached(void);
void tchi_cuda_range_open(const char *name);
void tchi_cuda_range_close(void);
/* recording.c */
/* Notes the begin of a range in a recording, or its end with NULL. */
void tchi_cuda_recording_range(tchi_cuda_state *s, const char *name);
void tchi_cuda_recorder_init(tchi_cuda_recorder *recorder);
void tchi_cuda_recorder_destroy(tchi_cuda_recorder *recorder);
tch_recording_record_op tchi_cuda_recording_record;
tch_recording_replay_op tchi_cuda_recording_replay;
tch_recording_bytes_op tchi_cuda_recording_bytes;
tch_recording_release_op tchi_cuda_recording_release;
/* Rates by compute capability alone, so that decisions for other GPUs can be tested. */
tch_product_rates tchi_cuda_rates_of(int32_t major, int32_t minor);
tch_product_rates_op tchi_cuda_product_rates;
tch_allocate_op tchi_cuda_allocate;
tch_release_op tchi_cuda_release;
tch_memory_info_op tchi_cuda_memory_info;
tch_copy_bytes_op tchi_cuda_copy_bytes;
tch_zero_bytes_op tchi_cuda_zero_bytes;

/* --- elementwise: copy.cu, elementwise.cu, packed.cu, shift_scale.cu, kronecker.cu ------------------------------- */

tch_copy_op tchi_cuda_copy;
tch_fill_op tchi_cuda_fill;
tch_combine_op tchi_cuda_combine;
tch_shift_scale_op tchi_cuda_shift_scale;
tch_pack_op tchi_cuda_pack_matrices;
tch_scale_rows_op tchi_cuda_scale_rows;
tch_random_signs_op tchi_cuda_random_signs;
tch_select_op tchi_cuda_select;
tch_kronecker_op tchi_cuda_kronecker;

/* --- reductions and decisions: reduce.cu, frobenius.cu, decisions.cu, lanczos.cu, root_residual.cu --------------- */

tch_reduce_op tchi_cuda_reduce;
tch_largest_eigenvalue_op tchi_cuda_largest_eigenvalue;
int64_t tchi_cuda_largest_eigenvalue_scratch(const tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t batch);
tch_status tchi_cuda_rescale(const tchi_cuda_state *state, double eps, const tch_matrices *x, double *norm);
tch_flag_overflow_op tchi_cuda_flag_overflow;
tch_root_setup_op tchi_cuda_root_setup;
tch_root_residual_op tchi_cuda_root_residual;
int64_t tchi_cuda_root_residual_scratch(const tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t batch,
                                        int64_t probes);
tch_status tchi_cuda_root_verdict(const tchi_cuda_state *state, int64_t batch, const double *residual, double tolerance,
                                  int32_t *flags);
tch_factored_damping_op tchi_cuda_factored_damping;
tch_spectrum_power_op tchi_cuda_spectrum_power;

/* --- products: products.c, symmetric_product.c, symmetric_f64.cu, symmetric_bf16x2.cu, symmetric_pingpong.cu,
 * ns_scale.cu, newton_small.cu, streamed.c */

tch_gemm_op tchi_cuda_gemm;
tch_gram_op tchi_cuda_gram;
tch_symmetric_product_op tchi_cuda_symmetric_product;
/* Its custom kernels, and whether the table and the kernel support these operands. C = c0 I + c1 D + c2 A B' over the
 * lower tiles, mirrored; D may be NULL; A and B n by k, rows aligned to 16 bytes. */
typedef int tchi_symmetric_supported(const tchi_cuda_state *state, const tch_matrices *d, const tch_matrices *a,
                                     const tch_matrices *b, const tch_matrices *c);
typedef tch_status tchi_symmetric_kernel(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d, double c2,
                                         const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);
tchi_symmetric_supported tchi_cuda_symmetric_f64_supported;
tchi_symmetric_kernel tchi_cuda_symmetric_f64;
tchi_symmetric_supported tchi_cuda_symmetric_pingpong_supported;
tchi_symmetric_kernel tchi_cuda_symmetric_pingpong;
tchi_symmetric_supported tchi_cuda_symmetric_bf16x2_supported;
tchi_symmetric_kernel tchi_cuda_symmetric_bf16x2;
/* The same products with a scale per matrix, and whether all products of steps on X are supported. */
int tchi_cuda_symmetric_scaled_supported(const tchi_cuda_state *state, const tch_matrices *x);
tch_status tchi_cuda_symmetric_scaled(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d, double c2,
                                      const tch_matrices *a, const tch_matrices *b, const double *scale,
                                      int32_t exponent, const tch_matrices *c);
/* The same for any float types, including the split one, if no faster kernel supports the operands. */
tchi_symmetric_kernel tchi_cuda_symmetric_any;
/* Copies the lower triangle of square matrices to the upper. */
tch_status tchi_cuda_mirror_lower(tchi_cuda_state *state, const tch_matrices *c);
/* C = alpha op(A) op(B), op(A) having one column and op(B) one row; C is not read. Any float types. */
tch_status tchi_cuda_outer(tchi_cuda_state *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                           const tch_matrices *b, int32_t transpose_b, const tch_matrices *c);
tch_normalize_op tchi_cuda_normalize;
int64_t tchi_cuda_newton_limit(const tchi_cuda_state *state);
tch_newton_op tchi_cuda_newton;
tch_streamed_product_op tchi_cuda_streamed_product;
void tchi_cuda_staging_destroy(tchi_cuda_staging *staging); /* NULL is allowed */

/* --- decompositions: decompositions.c ---------------------------------------------------------------------------- */

tch_eigh_op tchi_cuda_eigh;
int64_t tchi_cuda_eigh_scratch(tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t batch);
tch_divided_differences_op tchi_cuda_divided_differences;
tch_spd_solve_op tchi_cuda_spd_solve;
int64_t tchi_cuda_spd_solve_scratch(tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t cols, int64_t batch);
tch_scratch_bytes_op tchi_cuda_scratch_bytes;

/* --- optimizers: update/, products.c ------------------------------------------------------------------------------ */

/* copy_bytes of TCH_COPY_NUMBERS */
tch_status tchi_cuda_store_numbers(tchi_cuda_state *state, double *dst, const double *values, int64_t count);
tch_inspect_gradients_op tchi_cuda_inspect_gradients;
tch_decide_skip_op tchi_cuda_decide_skip;
tch_advance_op tchi_cuda_advance;
tch_elementwise_op tchi_cuda_elementwise;
tch_gather_op tchi_cuda_gather;
int64_t tchi_cuda_graft_scratch(int64_t elements, int64_t rects);
tch_rotated_adam_op tchi_cuda_rotated_adam;
tch_apply_op tchi_cuda_apply;
tch_apply_rows_op tchi_cuda_apply_rows;
tch_status tchi_cuda_row_moments(void *state, const tch_update *update, double *norms, double *parts);
tch_update_scale_op tchi_cuda_update_scale;
tch_update_factors_op tchi_cuda_update_factors;
tch_precondition_op tchi_cuda_precondition;
tch_status tchi_cuda_gram_rounded(tchi_cuda_state *state, double alpha, const tch_matrices *a, int32_t transpose,
                                  double beta, const tch_matrices *c);

/* --- tracking an eigenbasis: cholesky.c, cholesky.cu, basis.cu, split_product.cu ---------------------------------- */

tch_cholesky_op tchi_cuda_cholesky;
int64_t tchi_cuda_cholesky_inverse_scratch(tch_scalar type, int64_t n, int64_t batch);
/* The same for matrices of up to TCHI_CUDA_CHOLESKY_LEAF, without scratch. Flagged ones become the identity. */
#define TCHI_CUDA_CHOLESKY_LEAF 128
tch_status tchi_cuda_cholesky_leaf(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *x,
                                   int32_t *flags);
tch_row_dots_op tchi_cuda_row_dots;
tch_split_rows_op tchi_cuda_split_rows;
tch_split_product_op tchi_cuda_split_product;
tch_descending_op tchi_cuda_descending;
tch_permute_op tchi_cuda_permute;

/* --- networks: network.cu ---------------------------------------------------------------------------------------- */

tch_bias_activation_op tchi_cuda_bias_activation;
tch_bias_activation_backward_op tchi_cuda_bias_activation_backward;
tch_loss_op tchi_cuda_loss;
tch_sample_labels_op tchi_cuda_sample_labels;
tch_sample_norms_op tchi_cuda_sample_norms;
int64_t tchi_cuda_sample_norms_scratch(int64_t positions, int64_t d, int64_t p, int64_t batch);
tch_sample_squares_op tchi_cuda_sample_squares;
tch_sample_sums_op tchi_cuda_sample_sums;
tch_im2col_op tchi_cuda_im2col;
tch_token_sums_op tchi_cuda_token_sums;
tch_token_dots_op tchi_cuda_token_dots;
tch_normalized_sums_op tchi_cuda_normalized_sums;
tch_block_dots_op tchi_cuda_block_dots;
tch_pair_dots_op tchi_cuda_pair_dots;
tch_clip_weights_op tchi_cuda_clip_weights;
tch_weigh_samples_op tchi_cuda_weigh_samples;
tch_damped_divide_op tchi_cuda_damped_divide;

/* The part of token_dots without a second matrix. */
tch_status tchi_cuda_token_norms(tchi_cuda_state *state, const tch_matrices *tokens, int64_t rows, int64_t padding,
                                 const tch_matrices *g, double scale, double *norms, void *scratch);

/* Scratch sizes, for scratch_bytes. */
int64_t tchi_cuda_sample_sums_scratch(int64_t rows, int64_t cols, int64_t batch);
int64_t tchi_cuda_token_runs_scratch(int64_t samples, int64_t positions, int64_t cols); /* of norms and sums */
int64_t tchi_cuda_token_cross_scratch(int64_t samples, int64_t positions);
int64_t tchi_cuda_normalized_scratch(tch_scalar type, int64_t positions, int64_t features, int64_t samples);
int64_t tchi_cuda_block_dots_scratch(int64_t rows, int64_t cols);
int64_t tchi_cuda_pair_dots_scratch(int64_t rows, int64_t cols, int64_t batch);

/* out[i] += scale times the sum of partial[i each] to partial[i each + each - 1], in a fixed order. */
tch_status tchi_cuda_add_partials(const tchi_cuda_state *state, int64_t count, int64_t each, const double *partial,
                                  double scale, double *out);

/* --- custom kernels: kernel_build.c, kernel.c ----------------------------------------------------------------- */

tch_kernel_compiler_op tchi_cuda_kernel_compiler;
tch_kernel_build_op tchi_cuda_kernel_build;
tch_kernel_load_op tchi_cuda_kernel_load;
tch_kernel_unload_op tchi_cuda_kernel_unload;
tch_kernel_launch_op tchi_cuda_kernel_launch;

TCH_END_DECLS

#endif
