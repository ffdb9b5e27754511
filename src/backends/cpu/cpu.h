/* The CPU backend: its state, its operations and shared helpers. backend.c fills the table; torchium/backend.h
 * documents the operations. */
#ifndef TCHI_CPU_H
#define TCHI_CPU_H

#include <torchium/backend.h>

#include "backends/cpu/loops/loops.h"
#include "backends/cpu/runtime/blas/blas.h"

/* Entry point of the backend, as in a module. */
const tch_backend *tchi_cpu_backend(uint32_t abi, const tch_backend_host *services, char *reason, size_t reason_size);

typedef struct tchi_cpu_state {
    const tchi_blas *blas;
    int threads;                 /* for the current public call: set by `begin`, since scratch sizes depend on it */
    struct tchi_fibers **fibers; /* kernel.h: NULL, or TCHI_CPU_FIBER_SLOTS of them, NULL until needed */
} tchi_cpu_state;

/* Services of the library: messages and memory. */
const tch_backend_host *tchi_cpu_host(void);

/* --- shared ----------------------------------------------------------------------------------------------------- */

/* One matrix of a batch; `thread` is the index of the calling thread, from 0. */
typedef void (*tchi_cpu_task)(void *argument, int64_t index, int thread);

/* Runs a task for every matrix. Threads run either across matrices, one thread per task, or inside the tasks, never
 * both: the batch is processed in rounds of one matrix per thread, and the remaining matrices run sequentially with all
 * threads inside each. `work` estimates the operations per matrix. */
void tchi_cpu_for_each(const tchi_cpu_state *state, int64_t batch, double work, tchi_cpu_task task, void *argument);

/* Runs body(argument, from, to) over [0, count), divided among threads if the total `work` in operations is large
 * enough. Inside a task of tchi_cpu_for_each it uses that task's one thread. */
void tchi_cpu_split(const tchi_cpu_state *state, int64_t count, double work,
                    void (*body)(void *argument, int64_t from, int64_t to), void *argument);

/* Runs body(argument, matrix, row) for every row of the shape's batch, divided among threads; an element counts as
 * `work` operations. */
typedef void (*tchi_cpu_row_task)(const void *argument, int64_t index, int64_t row);
void tchi_cpu_for_rows(const tchi_cpu_state *state, const tch_matrices *shape, double work, tchi_cpu_row_task body,
                       const void *argument);

/* Maximum number of concurrent tasks; scratch is allocated once per task. */
int64_t tchi_cpu_slots(const tchi_cpu_state *state, int64_t batch);

/* Scratch blocks of threads are contiguous, each rounded up to whole cache lines. */
#define TCHI_CPU_SCRATCH_ROUND(bytes) (((bytes) + 63) / 64 * 64)

static inline int64_t tchi_cpu_size(tch_scalar type)
{
    static const int64_t sizes[TCH_SCALAR_COUNT] = {8, 4, 2, 2, 4, 8, 4};
    return sizes[type];
}

/* Address of row `row` of matrix `index`. */
static inline void *tchi_cpu_row(const tch_matrices *m, int64_t index, int64_t row)
{
    return (char *)m->data + (index * m->stride + row * m->ld) * tchi_cpu_size(m->type);
}

/* An element of a matrix of float32 or float64. */
static inline double tchi_cpu_get(const tch_matrices *m, int64_t index, int64_t row, int64_t column)
{
    const void *data = tchi_cpu_row(m, index, row);
    return m->type == TCH_SCALAR_F64 ? ((const double *)data)[column] : (double)((const float *)data)[column];
}

static inline void tchi_cpu_set(const tch_matrices *m, int64_t index, int64_t row, int64_t column, double value)
{
    void *data = tchi_cpu_row(m, index, row);
    if (m->type == TCH_SCALAR_F64) {
        ((double *)data)[column] = value;
    } else {
        ((float *)data)[column] = (float)value;
    }
}

/* Rows [row, row + rows) and columns [column, column + cols) of a matrix in another type, `ld` elements apart. */
void tchi_cpu_convert_block(const tch_matrices *m, int64_t index, int64_t row, int64_t rows, int64_t column,
                            int64_t cols, tch_scalar type, void *out, int64_t ld);

/* C = alpha A' B over a batch with a short contraction, if a kernel beats BLAS; otherwise returns 0 and does
 * nothing. */
int tchi_cpu_thin_product(const tchi_cpu_state *state, double alpha, const tch_matrices *a, const tch_matrices *b,
                          const tch_matrices *c);

/* out = beta out + scale sums, of any float type; with beta = 0 out is not read. The sums are overwritten. */
void tchi_cpu_write_sums(int64_t n, double scale, double *sums, double beta, tch_scalar type, void *out);

/* --- operations ------------------------------------------------------------------------------------------------- */

tch_copy_op tchi_cpu_copy;
tch_fill_op tchi_cpu_fill;

tch_combine_op tchi_cpu_combine;
tch_shift_scale_op tchi_cpu_shift_scale;
tch_pack_op tchi_cpu_pack_matrices;
tch_scale_rows_op tchi_cpu_scale_rows;
tch_random_signs_op tchi_cpu_random_signs;
tch_select_op tchi_cpu_select;
tch_kronecker_op tchi_cpu_kronecker;

tch_reduce_op tchi_cpu_reduce;
tch_normalize_op tchi_cpu_normalize;
tch_flag_overflow_op tchi_cpu_flag_overflow;
tch_largest_eigenvalue_op tchi_cpu_largest_eigenvalue;
tch_root_setup_op tchi_cpu_root_setup;
tch_root_residual_op tchi_cpu_root_residual;

tch_factored_damping_op tchi_cpu_factored_damping;

tch_gemm_op tchi_cpu_gemm;
tch_gram_op tchi_cpu_gram;
tch_symmetric_product_op tchi_cpu_symmetric_product;

tch_eigh_op tchi_cpu_eigh;
tch_spectrum_power_op tchi_cpu_spectrum_power;
tch_divided_differences_op tchi_cpu_divided_differences;
tch_spd_solve_op tchi_cpu_spd_solve;
tch_shifted_inverse_op tchi_cpu_shifted_inverse;

tch_cholesky_op tchi_cpu_cholesky;
tch_row_dots_op tchi_cpu_row_dots;
tch_split_rows_op tchi_cpu_split_rows;
tch_descending_op tchi_cpu_descending;
tch_permute_op tchi_cpu_permute;

tch_inspect_gradients_op tchi_cpu_inspect_gradients;
tch_decide_skip_op tchi_cpu_decide_skip;
tch_advance_op tchi_cpu_advance;
tch_elementwise_op tchi_cpu_elementwise;
tch_gather_op tchi_cpu_gather;
tch_rotated_adam_op tchi_cpu_rotated_adam;
tch_apply_op tchi_cpu_apply;
tch_apply_rows_op tchi_cpu_apply_rows;
tch_update_scale_op tchi_cpu_update_scale;
tch_update_factors_op tchi_cpu_update_factors;
tch_precondition_op tchi_cpu_precondition;

tch_bias_activation_op tchi_cpu_bias_activation;
tch_bias_activation_backward_op tchi_cpu_bias_activation_backward;
tch_loss_op tchi_cpu_loss;
tch_sample_labels_op tchi_cpu_sample_labels;
tch_sample_norms_op tchi_cpu_sample_norms;
tch_sample_squares_op tchi_cpu_sample_squares;
tch_sample_sums_op tchi_cpu_sample_sums;
tch_im2col_op tchi_cpu_im2col;
tch_token_sums_op tchi_cpu_token_sums;
tch_token_dots_op tchi_cpu_token_dots;
tch_normalized_sums_op tchi_cpu_normalized_sums;
tch_block_dots_op tchi_cpu_block_dots;
tch_pair_dots_op tchi_cpu_pair_dots;
tch_clip_weights_op tchi_cpu_clip_weights;
tch_weigh_samples_op tchi_cpu_weigh_samples;
tch_damped_divide_op tchi_cpu_damped_divide;

/* The sum of x y, in float64, of two runs of one float type. */
double tchi_cpu_dot(int64_t n, tch_scalar type, const void *x, const void *y);

/* Token `position` of a sample, -1 if it is ignored: outside the embedding, or padding. */
static inline int64_t tchi_cpu_token(const tch_matrices *tokens, int64_t sample, int64_t position, int64_t rows,
                                     int64_t padding)
{
    const void *row = tchi_cpu_row(tokens, 0, sample);
    int64_t token =
        tokens->type == TCH_SCALAR_I64 ? ((const int64_t *)row)[position] : (int64_t)((const int32_t *)row)[position];
    return token >= 0 && token < rows && token != padding ? token : -1;
}

/* Scratch for a whole batch. */
int64_t tchi_cpu_sample_norms_scratch(const tchi_cpu_state *state, tch_scalar type, int64_t positions, int64_t d,
                                      int64_t batch, int64_t p);
int64_t tchi_cpu_sample_squares_scratch(const tchi_cpu_state *state, tch_scalar type, int64_t positions);

/* Scratch of one matrix, by operation. */
int64_t tchi_cpu_largest_eigenvalue_scratch(int64_t n);
int64_t tchi_cpu_root_residual_scratch(int64_t n, int64_t probes);

/* Scratch of one call. */
int64_t tchi_cpu_graft_scratch(int64_t elements, int64_t rects);
int64_t tchi_cpu_token_scratch(const tchi_cpu_state *state, int64_t samples, int64_t positions);
int64_t tchi_cpu_normalized_scratch(const tchi_cpu_state *state, int64_t features);

#endif
