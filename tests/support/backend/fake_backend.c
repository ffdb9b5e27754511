/* A backend module for the loader's tests. FAKE_VARIANT chooses what is wrong with it; variant GOOD has one device in
 * host memory that can allocate, copy bytes and nothing else. It also serves as the smallest module one can write. */
#include <stdio.h>
#include <string.h>

#include <torchium/backend.h>

#define GOOD 0
#define WRONG_ABI 1
#define WRONG_SIZE 2
#define NO_ENTRY 3
#define REFUSES 4
#define REFUSES_SILENTLY 5
#define INCOMPLETE 6
#define NO_DEVICES 7

static const tch_backend_host *host;

static tch_status unsupported(const char *operation)
{
    return host->fail(TCH_ERR_UNSUPPORTED, "the fake device cannot do %s", operation);
}

static int32_t device_count(char *reason, size_t reason_size)
{
    if (FAKE_VARIANT == NO_DEVICES) {
        snprintf(reason, reason_size, "all fake devices are on holiday");
        return 0;
    }
    return 1;
}

static tch_status device_info(int32_t index, tch_device_info *info)
{
    snprintf(info->name, sizeof info->name, "fake device %d", index);
    info->total_memory = 1 << 30;
    info->free_memory = 1 << 29;
    return TCH_OK;
}

static void describe(char *text, size_t text_size)
{
    snprintf(text, text_size, "nothing but imagination");
}

static tch_status state_create(int32_t index, void **state)
{
    (void)index;
    *state = &host;
    return TCH_OK;
}

static void state_destroy(void *state)
{
    (void)state;
}

static tch_status begin(void *state)
{
    (void)state;
    return TCH_OK;
}

static tch_status set_stream(void *state, void *stream)
{
    (void)state;
    (void)stream;
    return TCH_OK;
}

static void *get_stream(void *state)
{
    (void)state;
    return NULL;
}

static tch_status synchronize(void *state)
{
    (void)state;
    return TCH_OK;
}

static tch_status allocate(void *state, int64_t bytes, void **pointer)
{
    (void)state;
    *pointer = host->allocate((size_t)bytes, 256);
    return *pointer != NULL ? TCH_OK : host->fail(TCH_ERR_OUT_OF_MEMORY, "no %lld bytes", (long long)bytes);
}

static void release(void *state, void *pointer, int64_t bytes)
{
    (void)state;
    host->release(pointer, (size_t)bytes);
}

static tch_status memory_info(void *state, int64_t *total, int64_t *free)
{
    (void)state;
    *total = 1 << 30;
    *free = 1 << 29;
    return TCH_OK;
}

static tch_status copy_bytes(void *state, void *dst, const void *src, int64_t bytes, tch_copy_kind kind)
{
    (void)state;
    (void)kind;
    memcpy(dst, src, (size_t)bytes);
    return TCH_OK;
}

static tch_status zero_bytes(void *state, void *dst, int64_t bytes)
{
    (void)state;
    memset(dst, 0, (size_t)bytes);
    return TCH_OK;
}

/* The rest refuses; unused arguments are the point of it. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

static tch_status copy(void *state, const tch_array *dst, const tch_array *src)
{
    return unsupported("copies");
}

static tch_status fill(void *state, const tch_array *dst, double value)
{
    return unsupported("fills");
}

static tch_status combine(void *state, double c0, double c1, const tch_matrices *x, double c2, const tch_matrices *y,
                          const tch_matrices *out)
{
    return unsupported("combinations");
}

static tch_status shift_scale(void *state, const tch_matrices *x, const double *shift, const double *scale,
                              double exponent, const tch_matrices *out)
{
    return unsupported("shifts");
}

static tch_status scale_rows(void *state, const tch_matrices *x, const tch_matrices *w, const tch_matrices *out)
{
    return unsupported("scaling");
}

static tch_status random_signs(void *state, uint64_t seed, const tch_matrices *out)
{
    return unsupported("signs");
}

static tch_status select_matrices(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out)
{
    return unsupported("selection");
}

static tch_status kronecker(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out)
{
    return unsupported("Kronecker products");
}

static tch_status reduce(void *state, tch_reduction kind, const tch_matrices *x, double *out)
{
    return unsupported("reductions");
}

static tch_status rescale(void *state, double eps, const tch_matrices *x, double *norm)
{
    return unsupported("scaling");
}

static tch_status flag_overflow(void *state, const tch_matrices *x, double most, int32_t *flags)
{
    return unsupported("verdicts");
}

static tch_status largest_eigenvalue(void *state, const tch_matrices *x, double tolerance, double *out, void *scratch)
{
    return unsupported("eigenvalues");
}

static tch_status root_setup(void *state, int64_t batch, const tch_root_norms *norms, double eps, double relative_eps,
                             double margin, double symmetry, double *damping, double *bound, int32_t *flags)
{
    return unsupported("roots");
}

static tch_status factored_damping(void *state, int64_t batch, const double *trace_a, int64_t m, const double *trace_b,
                                   int64_t n, double damping, double *damping_a, double *damping_b)
{
    return unsupported("damping");
}

static tch_status root_residual(void *state, int32_t root, const tch_matrices *a, const double *shift,
                                const tch_matrices *x, int32_t probes, double *out, double *error, void *scratch)
{
    return unsupported("residuals");
}

static tch_status root_verdict(void *state, int64_t batch, const double *residual, double tolerance, int32_t *flags)
{
    return unsupported("verdicts");
}

static tch_status gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a, const tch_matrices *b,
                       int32_t transpose_b, double beta, const tch_matrices *c)
{
    return unsupported("products");
}

static tch_status eigh(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags, void *scratch)
{
    return unsupported("eigenvectors");
}

static tch_status spectrum_power(void *state, const tch_spectrum_map *map, const tch_matrices *w, double *damping,
                                 int32_t *flags)
{
    return unsupported("powers");
}

static tch_status loewner(void *state, const tch_spectrum_map *map, const tch_matrices *w, const tch_matrices *b,
                          int32_t *flags)
{
    return unsupported("derivatives");
}

static tch_status spd_solve(void *state, const tch_matrices *a, const double *shift, const tch_matrices *b,
                            int32_t *flags, void *scratch)
{
    return unsupported("solves");
}

static tch_status store_numbers(void *state, double *dst, const double *values, int32_t count)
{
    return unsupported("stores");
}

static tch_status find_nonfinite(void *state, const tch_update *update, int32_t *found)
{
    return unsupported("searches");
}

static tch_status decide_skip(void *state, const int32_t *found, const float *found_inf, int32_t *skip, double *counts)
{
    return unsupported("decisions");
}

static tch_status advance(void *state, int64_t count, tch_clock *const *clocks, const tch_hyper *hyper,
                          const int32_t *skip, int32_t correct, tch_factor_rule rule)
{
    return unsupported("clocks");
}

static tch_status adamw(void *state, const tch_update *update, int32_t amsgrad, int32_t l2)
{
    return unsupported("AdamW");
}

static tch_status sgd(void *state, const tch_update *update, int32_t nesterov)
{
    return unsupported("SGD");
}

static tch_status gather(void *state, const tch_update *update, tch_filter filter, int32_t l2)
{
    return unsupported("gathering");
}

static tch_status graft(void *state, const tch_update *update, tch_graft kind, int32_t replace, double *norms,
                        void *scratch)
{
    return unsupported("grafting");
}

static tch_status rotated_adam(void *state, const tch_update *update)
{
    return unsupported("rotated Adam");
}

static tch_status apply(void *state, const tch_update *update, tch_block_scale scale, const double *wanted,
                        const double *norms, int32_t nesterov, int32_t decay)
{
    return unsupported("directions");
}

static tch_status unscale(void *state, const tch_update *update, float *found_inf)
{
    return unsupported("unscaling");
}

static tch_status update_scale(void *state, float *scale, int32_t *tracker, const float *found_inf, double growth,
                               double backoff, int32_t interval)
{
    return unsupported("loss scales");
}

static tch_status factor_update(void *state, const tch_matrices *a, int32_t transpose, const tch_clock *clock,
                                int32_t rounded, const tch_matrices *c)
{
    return unsupported("factors");
}

static tch_status cholesky_inverse(void *state, const tch_matrices *a, const tch_matrices *x, int32_t *flags,
                                   void *scratch)
{
    return unsupported("inverse Cholesky factors");
}

static tch_status row_dots(void *state, const tch_matrices *x, const tch_matrices *y, double exponent,
                           const tch_matrices *w)
{
    return unsupported("row products");
}

static tch_status descending(void *state, const tch_matrices *w, int32_t *order)
{
    return unsupported("orders");
}

static tch_status permute(void *state, const tch_matrices *x, const int32_t *rows, const int32_t *cols,
                          const tch_matrices *out)
{
    return unsupported("permutations");
}

static tch_status bias_activation(void *state, tch_activation activation, const tch_matrices *x,
                                  const tch_matrices *bias, const tch_matrices *out)
{
    return unsupported("activations");
}

static tch_status activation_backward(void *state, tch_activation activation, const tch_matrices *kept,
                                      const tch_matrices *gradient)
{
    return unsupported("derivatives");
}

static tch_status column_sums(void *state, const tch_matrices *x, const tch_matrices *out)
{
    return unsupported("column sums");
}

static tch_status softmax_loss(void *state, const tch_matrices *logits, const int32_t *labels,
                               const tch_loss_results *results)
{
    return unsupported("cross entropies");
}

static tch_status squared_loss(void *state, const tch_matrices *outputs, const tch_matrices *targets,
                               const tch_loss_results *results)
{
    return unsupported("squared errors");
}

static tch_status sample_labels(void *state, const tch_matrices *logits, uint64_t seed, int32_t *labels)
{
    return unsupported("labels");
}

static tch_status sample_norms(void *state, const tch_matrices *a, const tch_matrices *g, int64_t groups, double scale,
                               int32_t rounded, double *norms, void *scratch)
{
    return unsupported("norms");
}

static tch_status sample_squares(void *state, const tch_matrices *a, const tch_matrices *g, double scale, double beta,
                                 int32_t rounded, const tch_matrices *out, void *scratch)
{
    return unsupported("squares");
}

static tch_status sample_sums(void *state, const tch_matrices *x, double scale, double beta, const tch_matrices *out,
                              void *scratch)
{
    return unsupported("sums");
}

static tch_status patches_of(void *state, const tch_patches *patches, const tch_matrices *out)
{
    return unsupported("patches");
}

static tch_status token_norms(void *state, const tch_matrices *tokens, int64_t rows, int64_t padding,
                              const tch_matrices *g, double scale, double *norms, void *scratch)
{
    return unsupported("tokens");
}

static tch_status token_sums(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                             const double *weights, double scale, double beta, int32_t apart, const tch_matrices *out,
                             void *scratch)
{
    return unsupported("tokens");
}

static tch_status token_cross(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *h,
                              const tch_matrices *a, const tch_matrices *g, double scale, double *norms, void *scratch)
{
    return unsupported("tokens");
}

static tch_status token_dots(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                             const tch_matrices *w, double scale, double *dots, void *scratch)
{
    return unsupported("tokens");
}

static tch_status normalized_sums(void *state, const tch_normalized *layer, double scale, const tch_matrices *weight,
                                  const tch_matrices *bias, void *scratch)
{
    return unsupported("normalising layers");
}

static tch_status block_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t height, int64_t width,
                             double scale, double beta, const tch_matrices *out, void *scratch)
{
    return unsupported("inner products");
}

static tch_status pair_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t groups, double scale,
                            double *out, void *scratch)
{
    return unsupported("inner products");
}

static tch_status clip_weights(void *state, int64_t count, const double *norms, double most, double *weights)
{
    return unsupported("clipping");
}

static tch_status weigh_samples(void *state, const tch_matrices *x, int64_t groups, const double *weights,
                                int32_t drop_only, const tch_matrices *out)
{
    return unsupported("weights");
}

static tch_status damped_divide(void *state, const tch_matrices *x, const tch_matrices *rows, const tch_matrices *cols,
                                const tch_matrices *values, double damping)
{
    return unsupported("divisions");
}

static tch_status kl_clip(void *state, const double *dot, double lr, double most, double *scale)
{
    return unsupported("clipping");
}

static int64_t scratch_bytes(void *state, tch_scratch_for operation, tch_scalar type, int64_t rows, int64_t cols,
                             int64_t batch, int64_t extra)
{
    return 0;
}

static const tch_backend table = {
    .abi = FAKE_VARIANT == WRONG_ABI ? 7777u : TCH_BACKEND_ABI,
    .table_size = FAKE_VARIANT == WRONG_SIZE ? sizeof(tch_backend) - 8 : sizeof(tch_backend),
    .name = "cuda",
    .device_type = TCH_DEVICE_CUDA,
    .priority = 1000,
    .host_memory = 0,
    .device_count = device_count,
    .device_info = device_info,
    .describe = describe,
    .state_create = state_create,
    .state_destroy = state_destroy,
    .begin = begin,
    .set_stream = set_stream,
    .get_stream = get_stream,
    .synchronize = synchronize,
    .allocate = allocate,
    .release = release,
    .memory_info = memory_info,
    .copy_bytes = copy_bytes,
    .zero_bytes = zero_bytes,
    .copy = copy,
    .fill = fill,
    .combine = combine,
    .shift_scale = shift_scale,
    .scale_rows = scale_rows,
    .random_signs = random_signs,
    .select = select_matrices,
    .kronecker = kronecker,
    .reduce = reduce,
    .largest_eigenvalue = largest_eigenvalue,
    .rescale = rescale,
    .flag_overflow = flag_overflow,
    .root_setup = root_setup,
    .factored_damping = factored_damping,
    .root_residual = root_residual,
    .root_verdict = root_verdict,
    .gemm = FAKE_VARIANT == INCOMPLETE ? NULL : gemm,
    .eigh = eigh,
    .spectrum_power = spectrum_power,
    .loewner = loewner,
    .spd_solve = spd_solve,
    .store_numbers = store_numbers,
    .find_nonfinite = find_nonfinite,
    .decide_skip = decide_skip,
    .advance = advance,
    .adamw = adamw,
    .sgd = sgd,
    .gather = gather,
    .graft = graft,
    .rotated_adam = rotated_adam,
    .apply = apply,
    .unscale = unscale,
    .update_scale = update_scale,
    .factor_update = factor_update,
    .cholesky_inverse = cholesky_inverse,
    .row_dots = row_dots,
    .descending = descending,
    .permute = permute,
    .bias_activation = bias_activation,
    .activation_backward = activation_backward,
    .column_sums = column_sums,
    .softmax_loss = softmax_loss,
    .squared_loss = squared_loss,
    .sample_labels = sample_labels,
    .sample_norms = sample_norms,
    .sample_squares = sample_squares,
    .sample_sums = sample_sums,
    .patches = patches_of,
    .token_norms = token_norms,
    .token_sums = token_sums,
    .token_cross = token_cross,
    .token_dots = token_dots,
    .normalized_sums = normalized_sums,
    .block_dots = block_dots,
    .pair_dots = pair_dots,
    .clip_weights = clip_weights,
    .weigh_samples = weigh_samples,
    .damped_divide = damped_divide,
    .kl_clip = kl_clip,
    .scratch_bytes = scratch_bytes,
};

#if FAKE_VARIANT == NO_ENTRY
#define ENTRY some_other_function
#else
#define ENTRY torchium_backend_entry
#endif

TCH_API const tch_backend *ENTRY(uint32_t abi, const tch_backend_host *offered, char *reason, size_t reason_size);

const tch_backend *ENTRY(uint32_t abi, const tch_backend_host *offered, char *reason, size_t reason_size)
{
    host = offered;
    if (FAKE_VARIANT == REFUSES) {
        snprintf(reason, reason_size, "the driver is older than time");
    }
    (void)abi;
    return FAKE_VARIANT == REFUSES || FAKE_VARIANT == REFUSES_SILENTLY ? NULL : &table;
}
