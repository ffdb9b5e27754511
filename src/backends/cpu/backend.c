/* The CPU backend's table, its one device, and host memory behind the memory entries. */
#define _GNU_SOURCE
#include "cpu.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/status.h"
#include "core/threads.h"

#include "backends/cpu/runtime/processor.h"
#include "backends/cpu/spectral/eigh/eigh.h"
#include "backends/cpu/spectral/shifted_inverse/shifted_inverse.h"
#include "backends/cpu/user_kernel/kernel.h"
#include "backends/host_memory.h"

#define ALIGNMENT 256

static const tch_backend_host *host;

const tch_backend_host *tchi_cpu_host(void)
{
    return host;
}

/* --- the device ------------------------------------------------------------------------------------------------- */

/* The value of the first line of /proc/meminfo that begins with `key`; empty when there is none. */
static void read_meminfo(const char *key, char *value, size_t size)
{
    char line[512];
    value[0] = '\0';
    FILE *file = fopen("/proc/meminfo", "r");
    if (file == NULL) {
        return;
    }
    while (fgets(line, sizeof line, file) != NULL) {
        char *colon = strchr(line, ':');
        if (colon != NULL && strncmp(line, key, strlen(key)) == 0) {
            colon += 1 + strspn(colon + 1, " \t");
            colon[strcspn(colon, "\n")] = '\0';
            snprintf(value, size, "%s", colon);
            break;
        }
    }
    fclose(file);
}

static int64_t free_memory(void)
{
    char value[64];
    long long kilobytes = 0;
    read_meminfo("MemAvailable", value, sizeof value);
    if (sscanf(value, "%lld", &kilobytes) == 1) {
        return kilobytes * 1024;
    }
    return (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

static tch_status memory_info(void *state, int64_t *total, int64_t *free)
{
    *total = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    *free = free_memory();
    return TCH_OK;
}

static tch_status device_info(int32_t index, tch_device_info *info)
{
    char features[128];
    cpu_set_t usable;
    bool known = sched_getaffinity(0, sizeof usable, &usable) == 0;
    tchi_cpu_processor_name(info->name, sizeof info->name);
    tchi_cpu_processor_features(features, sizeof features);
    snprintf(info->features, sizeof info->features, "%s%sloops: %s", features, features[0] != '\0' ? " " : "",
             tchi_loops_name());
    info->processors = known ? CPU_COUNT(&usable) : (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    return memory_info(NULL, &info->total_memory, &info->free_memory);
}

static int32_t device_count(char *reason, size_t reason_size, char *libraries, size_t size)
{
    static const char *const threading[] = {"sequential", "pthreads held at one thread a call", "OpenMP threads"};
    const char *why = "";
    const tchi_blas *blas = tchi_blas_open(&why);
    if (blas == NULL) {
        snprintf(reason, reason_size, "%s", why);
        snprintf(libraries, size, "no BLAS");
        return 0;
    }
    snprintf(libraries, size, "%.200s (OpenBLAS %s, %s kernels, %s; %s)%s%s%s%s", blas->library, blas->version,
             blas->core, threading[blas->threading <= TCHI_BLAS_OPENMP ? blas->threading : 0], blas->origin,
             blas->note[0] ? "; " : "", blas->note, blas->passed_over[0] ? "; " : "", blas->passed_over);
    return 1;
}

/* --- state and memory ------------------------------------------------------------------------------------------- */

static tch_status state_create(int32_t index, void **state)
{
    tchi_cpu_state *s;
    TCHI_TRY(tchi_backend_take(host, sizeof *s, "a context", &s));
    s->blas = tchi_blas_open(NULL);
    s->threads = tchi_num_threads();
    *state = s;
    return TCH_OK;
}

static void state_destroy(void *state)
{
    tchi_cpu_kernel_leave(state);
    host->release(state, sizeof(tchi_cpu_state));
}

static tch_status begin(void *state)
{
    ((tchi_cpu_state *)state)->threads = tchi_num_threads();
    return TCH_OK;
}

static tch_status stream_of_state(void *state, int32_t set, void **stream)
{
    if (set && *stream != NULL) {
        return host->fail(TCH_ERR_UNSUPPORTED, "the cpu has no streams: stream must be NULL");
    }
    *stream = NULL;
    return TCH_OK;
}

static tch_status synchronize(void *state)
{
    return TCH_OK;
}

static tch_status allocate(void *state, int64_t bytes, void **pointer)
{
    *pointer = host->allocate((size_t)bytes, ALIGNMENT);
    if (*pointer == NULL) {
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %lld bytes were requested, about %lld are free",
                          (long long)bytes, (long long)free_memory());
    }
    return TCH_OK;
}

static void release(void *state, void *pointer, int64_t bytes)
{
    host->release(pointer, (size_t)bytes);
}

static tch_status copy_bytes(void *state, void *dst, const void *src, int64_t bytes, tch_copy_kind kind)
{
    memcpy(dst, src, (size_t)bytes);
    return TCH_OK;
}

static tch_status zero_bytes(void *state, void *dst, int64_t bytes)
{
    memset(dst, 0, (size_t)bytes);
    return TCH_OK;
}

/* One scratch block serves one thread: they are contiguous, each rounded to cache lines. */
static int64_t scratch_bytes(void *state, tch_scratch_for operation, tch_scalar type, int64_t rows, int64_t cols,
                             int64_t batch, int64_t extra)
{
    int is_double = type == TCH_SCALAR_F64;
    int64_t each = 0;
    if (rows == 0) {
        return 0;
    }
    switch (operation) {
    case TCH_SCRATCH_EIGH:
        each = (int64_t)(is_double ? &tchi_cpu_eigh_f64 : &tchi_cpu_eigh_f32)->scratch_bytes(rows);
        break;
    case TCH_SCRATCH_LARGEST_EIGENVALUE:
        each = tchi_cpu_largest_eigenvalue_scratch(rows);
        break;
    case TCH_SCRATCH_SHIFTED_INVERSE:
        each = (int64_t)(is_double ? &tchi_cpu_shifted_inverse_f64 : &tchi_cpu_shifted_inverse_f32)
                   ->scratch_bytes(rows, extra);
        break;
    case TCH_SCRATCH_ROOT_RESIDUAL:
        each = tchi_cpu_root_residual_scratch(rows, extra);
        break;
    case TCH_SCRATCH_SPD_SOLVE: /* LAPACK solves in place */
    case TCH_SCRATCH_CHOLESKY_INVERSE:
        break;
    case TCH_SCRATCH_GRAFT:
        return tchi_cpu_graft_scratch(rows, batch);
    case TCH_SCRATCH_SAMPLE_NORMS:
        return tchi_cpu_sample_norms_scratch(state, type, rows, cols, batch, extra);
    case TCH_SCRATCH_SAMPLE_SQUARES:
        return tchi_cpu_sample_squares_scratch(state, type, rows);
    case TCH_SCRATCH_PAIR_DOTS: /* one result per pair */
        return batch * (int64_t)sizeof(double);
    case TCH_SCRATCH_SAMPLE_SUMS:
    case TCH_SCRATCH_BLOCK_DOTS:
        break;
    case TCH_SCRATCH_TOKENS:
        return tchi_cpu_token_scratch(state, rows, cols);
    case TCH_SCRATCH_NORMALIZED:
        return tchi_cpu_normalized_scratch(state, cols);
    }
    return tchi_cpu_slots(state, batch) * TCHI_CPU_SCRATCH_ROUND(each);
}

/* --- the table -------------------------------------------------------------------------------------------------- */

static const tch_device_ops device_ops = {
    .count = device_count,
    .info = device_info,
    .state_create = state_create,
    .state_destroy = state_destroy,
    .begin = begin,
    .stream = stream_of_state,
    .synchronize = synchronize,
    .allocate = allocate,
    .release = release,
    .memory_info = memory_info,
    .copy_bytes = copy_bytes,
    .zero_bytes = zero_bytes,
    .scratch_bytes = scratch_bytes,
};

static const tch_matrix_ops matrix_ops = {
    .copy = tchi_cpu_copy,
    .fill = tchi_cpu_fill,
    .combine = tchi_cpu_combine,
    .shift_scale = tchi_cpu_shift_scale,
    .scale_rows = tchi_cpu_scale_rows,
    .random_signs = tchi_cpu_random_signs,
    .select = tchi_cpu_select,
    .kronecker = tchi_cpu_kronecker,
    .reduce = tchi_cpu_reduce,
    .normalize = tchi_cpu_normalize,
    .flag_overflow = tchi_cpu_flag_overflow,
    .largest_eigenvalue = tchi_cpu_largest_eigenvalue,
    .root_setup = tchi_cpu_root_setup,
    .root_residual = tchi_cpu_root_residual,
    .factored_damping = tchi_cpu_factored_damping,
    .gemm = tchi_cpu_gemm,
    .gram = tchi_cpu_gram,
    .symmetric_product = tchi_cpu_symmetric_product,
    .eigh = tchi_cpu_eigh,
    .spectrum_power = tchi_cpu_spectrum_power,
    .divided_differences = tchi_cpu_divided_differences,
    .spd_solve = tchi_cpu_spd_solve,
    .shifted_inverse = tchi_cpu_shifted_inverse,
    .cholesky = tchi_cpu_cholesky,
    .row_dots = tchi_cpu_row_dots,
    .split_rows = tchi_cpu_split_rows,
    .pack = tchi_cpu_pack_matrices,
    .descending = tchi_cpu_descending,
    .permute = tchi_cpu_permute,
};

static const tch_update_ops update_ops = {
    .inspect_gradients = tchi_cpu_inspect_gradients,
    .decide_skip = tchi_cpu_decide_skip,
    .advance = tchi_cpu_advance,
    .elementwise = tchi_cpu_elementwise,
    .gather = tchi_cpu_gather,
    .update_factors = tchi_cpu_update_factors,
    .precondition = tchi_cpu_precondition,
    .rotated_adam = tchi_cpu_rotated_adam,
    .apply = tchi_cpu_apply,
    .apply_rows = tchi_cpu_apply_rows,
    .update_scale = tchi_cpu_update_scale,
};

static const tch_sample_ops sample_ops = {
    .sample_norms = tchi_cpu_sample_norms,
    .sample_squares = tchi_cpu_sample_squares,
    .sample_sums = tchi_cpu_sample_sums,
    .im2col = tchi_cpu_im2col,
    .token_sums = tchi_cpu_token_sums,
    .token_dots = tchi_cpu_token_dots,
    .normalized_sums = tchi_cpu_normalized_sums,
    .block_dots = tchi_cpu_block_dots,
    .pair_dots = tchi_cpu_pair_dots,
    .clip_weights = tchi_cpu_clip_weights,
    .weigh_samples = tchi_cpu_weigh_samples,
    .damped_divide = tchi_cpu_damped_divide,
};

static const tch_network_ops network_ops = {
    .bias_activation = tchi_cpu_bias_activation,
    .bias_activation_backward = tchi_cpu_bias_activation_backward,
    .loss = tchi_cpu_loss,
    .sample_labels = tchi_cpu_sample_labels,
};

static const tch_kernel_ops kernel_ops = {
    .compiler = tchi_cpu_kernel_compiler,
    .build = tchi_cpu_kernel_build,
    .load = tchi_cpu_kernel_load,
    .unload = tchi_cpu_kernel_unload,
    .launch = tchi_cpu_kernel_launch,
};

static const tch_backend table = {
    .abi = TCH_BACKEND_ABI,
    .table_size = sizeof(tch_backend),
    .name = "cpu",
    .device_type = TCH_DEVICE_CPU,
    .priority = 0,
    .host_memory = 1,
    .device = &device_ops,
    .matrix = &matrix_ops,
    .update = &update_ops,
    .sample = &sample_ops,
    .network = &network_ops,
    .kernel = &kernel_ops,
};

const tch_backend *tchi_cpu_backend(uint32_t abi, const tch_backend_host *services, char *reason, size_t reason_size)
{
    if (abi != TCH_BACKEND_ABI) {
        snprintf(reason, reason_size, "built for backend interface %u, asked for %u", TCH_BACKEND_ABI, abi);
        return NULL;
    }
    host = services;
    return &table;
}
