/* The CPU backend: its state, its operations, and what they share. The table itself is filled in backend.c; each
 * operation is documented where the table declares it, in torchium/backend.h. */
#ifndef TCHI_CPU_H
#define TCHI_CPU_H

#include <torchium/backend.h>

#include "blas.h"
#include "loops/loops.h"

/* The backend's entry point, the same as a module's. */
const tch_backend *tchi_cpu_backend(uint32_t abi, const tch_backend_host *services, char *reason, size_t reason_size);

typedef struct tchi_cpu_state {
    const tchi_blas *blas;
    int threads;                 /* for the public call under way: fixed by `begin`, since scratch is measured for it */
    struct tchi_fibers **fibers; /* kernel.h: `fiber_slots` of them, NULL where not needed yet; kept for every kernel */
    int fiber_slots;
} tchi_cpu_state;

/* What the library gave the backend: messages and memory. */
const tch_backend_host *tchi_cpu_host(void);

/* --- shared ----------------------------------------------------------------------------------------------------- */

/* One matrix of a batch; `thread` numbers the caller among the threads at work, from 0. */
typedef void (*tchi_cpu_task)(void *argument, int64_t index, int thread);

/* Runs a task for every matrix. Threads are used either across matrices, each task on one thread, or inside the tasks,
 * never both: the batch goes out in rounds of one matrix per thread, and what is left over runs one after another with
 * all threads inside each. `work` is a rough count of operations per matrix. */
void tchi_cpu_for_each(const tchi_cpu_state *state, int64_t batch, double work, tchi_cpu_task task, void *argument);

/* Runs body(argument, from, to) over [0, count) split among threads, when `work` operations in all are worth it. Inside
 * a task of tchi_cpu_for_each it runs on the one thread it has. */
void tchi_cpu_split(const tchi_cpu_state *state, int64_t count, double work,
                    void (*body)(void *argument, int64_t from, int64_t to), void *argument);

/* How many tasks may run at once: scratch is this many times what one needs. */
int64_t tchi_cpu_slots(const tchi_cpu_state *state, int64_t batch);

/* Scratch blocks of several threads lie side by side, each rounded to whole cache lines. */
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

/* --- operations ------------------------------------------------------------------------------------------------- */

tch_status tchi_cpu_copy(void *state, const tch_array *dst, const tch_array *src);
tch_status tchi_cpu_fill(void *state, const tch_array *dst, double value);

tch_status tchi_cpu_combine(void *state, double c0, double c1, const tch_matrices *x, double c2, const tch_matrices *y,
                            const tch_matrices *out);
tch_status tchi_cpu_shift_scale(void *state, const tch_matrices *x, const double *shift, const double *scale,
                                double exponent, const tch_matrices *out);
tch_status tchi_cpu_scale_rows(void *state, const tch_matrices *x, const tch_matrices *w, const tch_matrices *out);
tch_status tchi_cpu_random_signs(void *state, uint64_t seed, const tch_matrices *out);
tch_status tchi_cpu_select(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out);
tch_status tchi_cpu_kronecker(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out);

tch_status tchi_cpu_reduce(void *state, tch_reduction kind, const tch_matrices *x, double *out);
tch_status tchi_cpu_rescale(void *state, double eps, const tch_matrices *x, double *norm);
tch_status tchi_cpu_flag_overflow(void *state, const tch_matrices *x, double most, int32_t *flags);
tch_status tchi_cpu_largest_eigenvalue(void *state, const tch_matrices *x, double tolerance, double *out,
                                       void *scratch);
tch_status tchi_cpu_root_setup(void *state, int64_t batch, const tch_root_norms *norms, double eps, double relative_eps,
                               double margin, double symmetry, double *damping, double *bound, int32_t *flags);
tch_status tchi_cpu_root_residual(void *state, int32_t root, const tch_matrices *a, const double *shift,
                                  const tch_matrices *x, int32_t probes, double *out, double *error, void *scratch);
tch_status tchi_cpu_root_verdict(void *state, int64_t batch, const double *residual, double tolerance, int32_t *flags);

tch_status tchi_cpu_factored_damping(void *state, int64_t batch, const double *trace_a, int64_t m,
                                     const double *trace_b, int64_t n, double damping, double *shift_a,
                                     double *shift_b);

tch_status tchi_cpu_gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a, const tch_matrices *b,
                         int32_t transpose_b, double beta, const tch_matrices *c);
tch_status tchi_cpu_gram(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                         const tch_matrices *c);
tch_status tchi_cpu_symmetric_product(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                      const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);

tch_status tchi_cpu_eigh(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags, void *scratch);
tch_status tchi_cpu_spectrum_power(void *state, const tch_spectrum_map *map, const tch_matrices *w, double *damping,
                                   int32_t *flags);
tch_status tchi_cpu_loewner(void *state, const tch_spectrum_map *map, const tch_matrices *w, const tch_matrices *b,
                            int32_t *flags);
tch_status tchi_cpu_spd_solve(void *state, const tch_matrices *a, const double *shift, const tch_matrices *b,
                              int32_t *flags, void *scratch);
tch_status tchi_cpu_shifted_inverse(void *state, const tch_matrices *a, int32_t count, const double *shifts,
                                    const double *weights, const tch_matrices *x, int32_t *flags, void *scratch);

tch_status tchi_cpu_cholesky_inverse(void *state, const tch_matrices *a, const tch_matrices *x, int32_t *flags,
                                     void *scratch);
tch_status tchi_cpu_row_dots(void *state, const tch_matrices *x, const tch_matrices *y, double exponent,
                             const tch_matrices *w);
tch_status tchi_cpu_descending(void *state, const tch_matrices *w, int32_t *order);
tch_status tchi_cpu_permute(void *state, const tch_matrices *x, const int32_t *rows, const int32_t *cols,
                            const tch_matrices *out);

tch_status tchi_cpu_store_numbers(void *state, double *dst, const double *values, int32_t count);
tch_status tchi_cpu_find_nonfinite(void *state, const tch_update *update, int32_t *found);
tch_status tchi_cpu_decide_skip(void *state, const int32_t *found, const float *found_inf, int32_t *skip,
                                double *counts);
tch_status tchi_cpu_advance(void *state, int64_t count, tch_clock *const *clocks, const tch_hyper *hyper,
                            const int32_t *skip, int32_t correct, tch_factor_rule rule);
tch_status tchi_cpu_adamw(void *state, const tch_update *update, int32_t amsgrad, int32_t l2);
tch_status tchi_cpu_sgd(void *state, const tch_update *update, int32_t nesterov);
tch_status tchi_cpu_gather(void *state, const tch_update *update, tch_filter filter, int32_t l2);
tch_status tchi_cpu_graft(void *state, const tch_update *update, tch_graft kind, int32_t replace, double *norms,
                          void *scratch);
tch_status tchi_cpu_rotated_adam(void *state, const tch_update *update);
tch_status tchi_cpu_apply(void *state, const tch_update *update, tch_block_scale scale, const double *wanted,
                          const double *norms, int32_t nesterov, int32_t decay);
tch_status tchi_cpu_unscale(void *state, const tch_update *update, float *found_inf);
tch_status tchi_cpu_update_scale(void *state, float *scale, int32_t *tracker, const float *found_inf, double growth,
                                 double backoff, int32_t interval);
tch_status tchi_cpu_factor_update(void *state, const tch_matrices *a, int32_t transpose, const tch_clock *clock,
                                  int32_t rounded, const tch_matrices *c);

tch_status tchi_cpu_bias_activation(void *state, tch_activation activation, const tch_matrices *x,
                                    const tch_matrices *bias, const tch_matrices *out);
tch_status tchi_cpu_activation_backward(void *state, tch_activation activation, const tch_matrices *kept,
                                        const tch_matrices *gradient);
tch_status tchi_cpu_column_sums(void *state, const tch_matrices *x, const tch_matrices *out);
tch_status tchi_cpu_softmax_loss(void *state, const tch_matrices *logits, const int32_t *labels,
                                 const tch_loss_results *results);
tch_status tchi_cpu_squared_loss(void *state, const tch_matrices *outputs, const tch_matrices *targets,
                                 const tch_loss_results *results);
tch_status tchi_cpu_sample_labels(void *state, const tch_matrices *logits, uint64_t seed, int32_t *labels);
tch_status tchi_cpu_sample_norms(void *state, const tch_matrices *a, const tch_matrices *g, int64_t groups,
                                 double scale, int32_t rounded, double *norms, void *scratch);
tch_status tchi_cpu_sample_squares(void *state, const tch_matrices *a, const tch_matrices *g, double scale, double beta,
                                   int32_t rounded, const tch_matrices *out, void *scratch);
tch_status tchi_cpu_sample_sums(void *state, const tch_matrices *x, double scale, double beta, const tch_matrices *out,
                                void *scratch);
tch_status tchi_cpu_patches(void *state, const tch_patches *patches, const tch_matrices *out);
tch_status tchi_cpu_token_norms(void *state, const tch_matrices *tokens, int64_t rows, int64_t padding,
                                const tch_matrices *g, double scale, double *norms, void *scratch);
tch_status tchi_cpu_token_sums(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                               const double *weights, double scale, double beta, int32_t apart, const tch_matrices *out,
                               void *scratch);
tch_status tchi_cpu_token_cross(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *h,
                                const tch_matrices *a, const tch_matrices *g, double scale, double *norms,
                                void *scratch);
tch_status tchi_cpu_token_dots(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                               const tch_matrices *w, double scale, double *dots, void *scratch);
tch_status tchi_cpu_normalized_sums(void *state, const tch_normalized *layer, double scale, const tch_matrices *weight,
                                    const tch_matrices *bias, void *scratch);
tch_status tchi_cpu_block_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t height, int64_t width,
                               double scale, double beta, const tch_matrices *out, void *scratch);
tch_status tchi_cpu_pair_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t groups, double scale,
                              double *out, void *scratch);
tch_status tchi_cpu_clip_weights(void *state, int64_t count, const double *norms, double most, double *weights);
tch_status tchi_cpu_weigh_samples(void *state, const tch_matrices *x, int64_t groups, const double *weights,
                                  int32_t drop_only, const tch_matrices *out);
tch_status tchi_cpu_damped_divide(void *state, const tch_matrices *x, const tch_matrices *rows,
                                  const tch_matrices *cols, const tch_matrices *values, double damping);
tch_status tchi_cpu_kl_clip(void *state, const double *dot, double lr, double most, double *scale);

/* The sum of x y, in float64, of two runs of one float type. */
double tchi_cpu_dot(int64_t n, tch_scalar type, const void *x, const void *y);

/* Scratch for a whole batch. */
int64_t tchi_cpu_sample_norms_scratch(const tchi_cpu_state *state, tch_scalar type, int64_t positions, int64_t d,
                                      int64_t batch, int64_t p);
int64_t tchi_cpu_sample_squares_scratch(const tchi_cpu_state *state, tch_scalar type, int64_t positions);

/* Scratch of one matrix, by operation. */
int64_t tchi_cpu_largest_eigenvalue_scratch(int64_t n);
int64_t tchi_cpu_root_residual_scratch(int64_t n, int64_t probes);

/* Scratch of one call. */
int64_t tchi_cpu_graft_scratch(int64_t elements, int64_t pieces);
int64_t tchi_cpu_token_scratch(const tchi_cpu_state *state, int64_t samples, int64_t positions);
int64_t tchi_cpu_normalized_scratch(const tchi_cpu_state *state, int64_t features);

#endif
