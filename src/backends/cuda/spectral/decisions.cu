/* Device-side decisions of roots: damping, bounds, flags, and the powers of a spectrum. One thread or one block per
 * matrix, a few bytes each.
 *
 *     for (b = 0; b < batch; b++) {
 *         damping[b] = max(eps, relative_eps * largest[b]);               // root_setup
 *         bound[b] = damping[b] + margin * largest[b];
 *         flags[b] = residual[b] <= tolerance ? TCH_REPORT_OK : TCH_REPORT_NO_CONVERGENCE;    // root_verdict
 *         for (i = 0; i < n; i++) {
 *             w[b][i] = pow(w[b][i] + damping[b], power);                 // spectrum_power
 *         }
 *     } */
#include "backends/cuda/device/elements.cuh"
#include "backends/rules.h"

#define THREADS 256

static unsigned blocks_for(int64_t batch)
{
    return tchi_cuda_grid(tchi_cuda_ceil_div(batch, THREADS));
}

static __device__ inline int64_t first_index()
{
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}

static __device__ inline int64_t index_stride()
{
    return (int64_t)gridDim.x * THREADS;
}

/* --- before a root ----------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS)
    root_setup_kernel(int64_t batch, tch_root_norms norms, double eps, double relative_eps, double margin,
                      double symmetry, double *damping, double *bound, int32_t *flags)
{
    for (int64_t b = first_index(); b < batch; b += index_stride()) {
        tchi_rule_root_setup(&norms, b, eps, relative_eps, margin, symmetry, &damping[b], &bound[b], &flags[b]);
    }
}

tch_status tchi_cuda_root_setup(void *state, int64_t batch, const tch_root_norms *norms, double eps,
                                double relative_eps, double margin, double symmetry, double *damping, double *bound,
                                int32_t *flags)
{
    return tchi_cuda_launch(state, "root_setup", root_setup_kernel, blocks_for(batch), THREADS, batch, *norms, eps,
                            relative_eps, margin, symmetry, damping, bound, flags);
}

static __global__ void __launch_bounds__(THREADS)
    factored_damping_kernel(int64_t batch, const double *trace_a, double m, const double *trace_b, double n,
                            double damping, double *shift_a, double *shift_b)
{
    for (int64_t b = first_index(); b < batch; b += index_stride()) {
        tchi_rule_factored_damping(trace_a[b], m, trace_b[b], n, damping, &shift_a[b], &shift_b[b]);
    }
}

tch_status tchi_cuda_factored_damping(void *state, int64_t batch, const double *trace_a, int64_t m,
                                      const double *trace_b, int64_t n, double damping, double *shift_a,
                                      double *shift_b)
{
    return tchi_cuda_launch(state, "factored_damping", factored_damping_kernel, blocks_for(batch), THREADS, batch,
                            trace_a, (double)m, trace_b, (double)n, damping, shift_a, shift_b);
}

/* --- after it ---------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS)
    root_verdict_kernel(int64_t batch, const double *residual, double tolerance, int32_t *flags)
{
    for (int64_t b = first_index(); b < batch; b += index_stride()) {
        tchi_rule_root_verdict(residual[b], tolerance, &flags[b]);
    }
}

tch_status tchi_cuda_root_verdict(const tchi_cuda_state *s, int64_t batch, const double *residual, double tolerance,
                                  int32_t *flags)
{
    return tchi_cuda_launch(s, "root_verdict", root_verdict_kernel, blocks_for(batch), THREADS, batch, residual,
                            tolerance, flags);
}

/* --- powers of a spectrum ---------------------------------------------------------------------------------------- */

/* A block per matrix; w is (batch, 1, n) and ascending. */
static __global__ void __launch_bounds__(THREADS)
    spectrum_power_kernel(tch_spectrum_map map, tchi_cuda_operand w, int64_t n, int64_t batch, double *damping,
                          int32_t *flags)
{
    for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
        if (flags[b] != TCH_REPORT_OK) {
            continue;
        }
        char *row = tchi_cuda_at(w, b, 0, 0);
        /* decisions from the ends of the spectrum, before it is overwritten */
        const double first = tchi_cuda_load<double>(w.type, row, 0, w.stride);
        const double largest = fmax(tchi_cuda_load<double>(w.type, row, n - 1, w.stride), 0.0);
        const double added = fmax(map.eps, map.relative_eps * largest);
        double least = map.clamp ? added : 0.0;
        bool bad = !map.clamp && first < -fmax(map.negative * largest, added);
        bool beyond = false;
        __syncthreads();
        for (int64_t i = threadIdx.x; i < n; i += THREADS) {
            double base = tchi_cuda_load<double>(w.type, row, i, w.stride) + added;
            double place = base > least ? base : added;
            double value = pow(place, map.power);
            bool finite = w.type == TCH_SCALAR_F64 ? isfinite(value) : isfinite((float)value);
            bad = bad || (!finite && !(place > 0.0));
            beyond = beyond || (!finite && place > 0.0);
            tchi_cuda_store<double>(w.type, row, i, w.stride, value);
        }
        bad = __syncthreads_or(bad) != 0;
        beyond = __syncthreads_or(beyond) != 0;
        if (threadIdx.x == 0) {
            flags[b] = bad ? TCH_REPORT_NOT_POSITIVE : beyond ? TCH_REPORT_OVERFLOW : TCH_REPORT_OK;
            if (damping != NULL) {
                damping[b] = added;
            }
        }
    }
}

tch_status tchi_cuda_spectrum_power(void *state, const tch_spectrum_map *map, const tch_matrices *w, double *damping,
                                    int32_t *flags)
{
    if (w->batch == 0 || w->cols == 0) {
        return TCH_OK;
    }
    return tchi_cuda_launch(state, "spectrum_power", spectrum_power_kernel, tchi_cuda_grid(w->batch), THREADS, *map,
                            tchi_cuda_operand_of(w), w->cols, w->batch, damping, flags);
}
