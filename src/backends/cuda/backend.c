/* The CUDA module's table and its entry point, the only exported symbol. Opening the module needs neither GPU nor
 * driver: what is missing is reported when devices are counted. */
#include "cuda.h"

#include <stdio.h>

#include "core/arith.h"

const tch_backend_host *tchi_cuda_host;

/* Matrices are square where an operation has one size. */
int64_t tchi_cuda_scratch_bytes(void *state, tch_scratch_for operation, tch_scalar type, int64_t rows, int64_t cols,
                                int64_t batch, int64_t extra)
{
    if (rows == 0 || batch == 0) {
        return 0;
    }
    switch (operation) {
    case TCH_SCRATCH_EIGH:
        return tchi_cuda_eigh_scratch(state, type, rows, batch);
    case TCH_SCRATCH_LARGEST_EIGENVALUE:
        return tchi_cuda_largest_eigenvalue_scratch(state, type, rows, batch);
    case TCH_SCRATCH_ROOT_RESIDUAL:
        return tchi_cuda_root_residual_scratch(state, type, rows, batch, extra);
    case TCH_SCRATCH_SPD_SOLVE:
        return tchi_cuda_spd_solve_scratch(state, type, rows, cols, batch);
    case TCH_SCRATCH_GRAFT:
        return tchi_cuda_graft_scratch(rows, batch);
    case TCH_SCRATCH_CHOLESKY_INVERSE:
        return tchi_cuda_cholesky_inverse_scratch(type, rows, batch);
    case TCH_SCRATCH_SAMPLE_NORMS:
        return tchi_cuda_sample_norms_scratch(rows, cols, extra, batch);
    case TCH_SCRATCH_SAMPLE_SQUARES: /* in registers */
        break;
    case TCH_SCRATCH_SAMPLE_SUMS:
        return tchi_cuda_sample_sums_scratch(rows, cols, batch);
    case TCH_SCRATCH_TOKENS:
        return tchi_max(tchi_cuda_token_runs_scratch(rows, cols, batch), tchi_cuda_token_cross_scratch(rows, cols));
    case TCH_SCRATCH_NORMALIZED:
        return tchi_cuda_normalized_scratch(type, rows, cols, batch);
    case TCH_SCRATCH_BLOCK_DOTS:
        return tchi_cuda_block_dots_scratch(rows, cols);
    case TCH_SCRATCH_PAIR_DOTS:
        return tchi_cuda_pair_dots_scratch(rows, cols, batch);
    case TCH_SCRATCH_SHIFTED_INVERSE: /* unsupported */
        break;
    }
    return 0;
}

static const tch_device_ops device_ops = {
    .count = tchi_cuda_device_count,
    .info = tchi_cuda_device_info,
    .state_create = tchi_cuda_state_create,
    .state_destroy = tchi_cuda_state_destroy,
    .begin = tchi_cuda_begin,
    .end = tchi_cuda_end,
    .stream = tchi_cuda_stream,
    .synchronize = tchi_cuda_synchronize,
    .range = tchi_cuda_range,
    .readback_post = tchi_cuda_readback_post,
    .readback_wait = tchi_cuda_readback_wait,
    .side_begin = tchi_cuda_side_begin,
    .side_mark = tchi_cuda_side_mark,
    .side_join = tchi_cuda_side_join,
    .event_destroy = tchi_cuda_event_destroy,
    .allocate = tchi_cuda_allocate,
    .release = tchi_cuda_release,
    .memory_info = tchi_cuda_memory_info,
    .copy_bytes = tchi_cuda_copy_bytes,
    .zero_bytes = tchi_cuda_zero_bytes,
    .scratch_bytes = tchi_cuda_scratch_bytes,
};

static const tch_matrix_ops matrix_ops = {
    .product_rates = tchi_cuda_product_rates,
    .copy = tchi_cuda_copy,
    .fill = tchi_cuda_fill,
    .combine = tchi_cuda_combine,
    .shift_scale = tchi_cuda_shift_scale,
    .scale_rows = tchi_cuda_scale_rows,
    .random_signs = tchi_cuda_random_signs,
    .select = tchi_cuda_select,
    .kronecker = tchi_cuda_kronecker,
    .reduce = tchi_cuda_reduce,
    .largest_eigenvalue = tchi_cuda_largest_eigenvalue,
    .flag_overflow = tchi_cuda_flag_overflow,
    .root_setup = tchi_cuda_root_setup,
    .root_residual = tchi_cuda_root_residual,
    .factored_damping = tchi_cuda_factored_damping,
    .gemm = tchi_cuda_gemm,
    .gram = tchi_cuda_gram,
    .symmetric_product = tchi_cuda_symmetric_product,
    .normalize = tchi_cuda_normalize,
    .streamed_product = tchi_cuda_streamed_product,
    .newton = tchi_cuda_newton,
    .eigh = tchi_cuda_eigh,
    .divided_differences = tchi_cuda_divided_differences,
    .spectrum_power = tchi_cuda_spectrum_power,
    .spd_solve = tchi_cuda_spd_solve,
    .cholesky = tchi_cuda_cholesky,
    .row_dots = tchi_cuda_row_dots,
    .split_rows = tchi_cuda_split_rows,
    .split_product = tchi_cuda_split_product,
    .pack = tchi_cuda_pack_matrices,
    .descending = tchi_cuda_descending,
    .permute = tchi_cuda_permute,
};

static const tch_update_ops update_ops = {
    .inspect_gradients = tchi_cuda_inspect_gradients,
    .decide_skip = tchi_cuda_decide_skip,
    .advance = tchi_cuda_advance,
    .elementwise = tchi_cuda_elementwise,
    .gather = tchi_cuda_gather,
    .update_factors = tchi_cuda_update_factors,
    .precondition = tchi_cuda_precondition,
    .rotated_adam = tchi_cuda_rotated_adam,
    .apply = tchi_cuda_apply,
    .apply_rows = tchi_cuda_apply_rows,
    .update_scale = tchi_cuda_update_scale,
};

static const tch_sample_ops sample_ops = {
    .sample_norms = tchi_cuda_sample_norms,
    .sample_squares = tchi_cuda_sample_squares,
    .sample_sums = tchi_cuda_sample_sums,
    .im2col = tchi_cuda_im2col,
    .token_sums = tchi_cuda_token_sums,
    .token_dots = tchi_cuda_token_dots,
    .normalized_sums = tchi_cuda_normalized_sums,
    .block_dots = tchi_cuda_block_dots,
    .pair_dots = tchi_cuda_pair_dots,
    .clip_weights = tchi_cuda_clip_weights,
    .weigh_samples = tchi_cuda_weigh_samples,
    .damped_divide = tchi_cuda_damped_divide,
};

static const tch_network_ops network_ops = {
    .bias_activation = tchi_cuda_bias_activation,
    .bias_activation_backward = tchi_cuda_bias_activation_backward,
    .loss = tchi_cuda_loss,
    .sample_labels = tchi_cuda_sample_labels,
};

static const tch_recording_ops recording_ops = {
    .bytes = tchi_cuda_recording_bytes,
    .record = tchi_cuda_recording_record,
    .replay = tchi_cuda_recording_replay,
    .release = tchi_cuda_recording_release,
};

static const tch_kernel_ops kernel_ops = {
    .compiler = tchi_cuda_kernel_compiler,
    .build = tchi_cuda_kernel_build,
    .load = tchi_cuda_kernel_load,
    .unload = tchi_cuda_kernel_unload,
    .launch = tchi_cuda_kernel_launch,
};

static const tch_backend table = {
    .abi = TCH_BACKEND_ABI,
    .table_size = sizeof(tch_backend),
    .name = "cuda",
    .device_type = TCH_DEVICE_CUDA,
    .priority = 100,
    .host_memory = 0,
    .device = &device_ops,
    .matrix = &matrix_ops,
    .update = &update_ops,
    .sample = &sample_ops,
    .network = &network_ops,
    .recording = &recording_ops,
    .kernel = &kernel_ops,
};

const tch_backend *torchium_backend_entry(uint32_t abi, const tch_backend_host *host, char *reason, size_t reason_size)
{
    if (abi != TCH_BACKEND_ABI) {
        snprintf(reason, reason_size,
                 "the module was built for backend interface %u, the library has %u; build both from one source",
                 TCH_BACKEND_ABI, abi);
        return NULL;
    }
    tchi_cuda_host = host;
    return &table;
}
