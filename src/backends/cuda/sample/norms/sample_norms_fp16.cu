/* Squared norms of per-sample gradients by wgmma on copies of operands that it does not support: float32, and unaligned
 * rows. As many samples at a time as fit the workspace, and parts of G's columns if a single sample is too large: a
 * gradient's squared norm is the sum of those of its parts.
 *
 *     for (each part of the samples that fits the workspace) {
 *         x = half of A times 2^e;                            // e of each matrix; half types are copied unchanged
 *         for (each part of G's columns that fits) {
 *             y = half of G times 2^f;
 *             norms[b] += scale * |y' x|^2 / 4^(e + f);       // sample_norms_wgmma.cu
 *         }
 *     } */
#include "sample_norms.h"

#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/tensor_map.h"
#include "backends/cuda/matrix/fp16_copy.h"

/* What to copy, and how much at a time. */
typedef struct fp16_plan {
    bool copy_a, copy_g;
    int64_t samples;
    int64_t cols; /* of G */
} fp16_plan;

/* Bytes of a copy of `cols` columns of a sample's matrices, and of their largest elements. */
static int64_t copied_bytes(const tch_matrices *m, int64_t groups, int64_t cols)
{
    return groups * (m->rows * tchi_round_up(cols, 8) * 2 + (int64_t)sizeof(uint32_t));
}

#define SPARE_BYTES 1024 /* lost to alignment */

static fp16_plan plan_of(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g, int64_t groups)
{
    int64_t room = state->blas_workspace == nullptr ? 0 : tchi_cuda_workspace_bytes(state) - SPARE_BYTES;
    fp16_plan plan = {!tchi_cuda_tensor_map_supported(a, 2), !tchi_cuda_tensor_map_supported(g, 2), 0, g->cols};
    int64_t of_a = plan.copy_a ? copied_bytes(a, groups, a->cols) : 0;
    int64_t of_g = plan.copy_g ? copied_bytes(g, groups, g->cols) : 0;
    if (of_a + of_g <= room) {
        int64_t samples = a->batch / groups;
        plan.samples = of_a + of_g == 0 ? samples : room / (of_a + of_g);
        plan.samples = plan.samples < samples ? plan.samples : samples;
    } else if (plan.copy_g) {
        plan.cols = (room - of_a - 4 * groups) / (2 * g->rows * groups) / TCHI_NORMS_TILE_COLS * TCHI_NORMS_TILE_COLS;
        plan.samples = plan.cols > 0 ? 1 : 0;
    }
    return plan;
}

bool tchi_cuda_sample_norms_fp16_supported(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                           int64_t groups)
{
    return tchi_cuda_kernel_fits(state, TCHI_NORMS_FP16, a, NULL) && a->batch < (1 << 20) &&
           plan_of(state, a, g, groups).samples > 0;
}

/* Allocates from the workspace at *at, in multiples of 256 bytes. */
static void *carve_scratch(char **at, int64_t bytes)
{
    char *here = *at;
    *at = here + (bytes + 255) / 256 * 256;
    return here;
}

/* Samples and columns of m, in place or as a copy with its largest elements. */
typedef struct fp16_side {
    tch_matrices m;
    uint32_t *largest; /* NULL if not scaled */
} fp16_side;

static tch_status prepare(const tchi_cuda_state *state, const tch_matrices *part, bool copied, char **at,
                          fp16_side *side)
{
    side->m = *part;
    side->largest = nullptr;
    if (!copied) {
        return TCH_OK;
    }
    if (part->type == TCH_SCALAR_F32) {
        side->largest = (uint32_t *)carve_scratch(at, part->batch * (int64_t)sizeof(uint32_t));
        TCHI_TRY(tchi_cuda_largest_bits(state, part, side->largest));
    }
    side->m = tchi_cuda_fp16_copy_of(*at, part);
    carve_scratch(at, side->m.batch * side->m.stride * 2);
    return tchi_cuda_fp16_copy(state, part, side->largest, &side->m);
}

static tch_matrices part_of(const tch_matrices *m, int64_t first, int64_t batch, int64_t col, int64_t cols)
{
    tch_matrices part = *m;
    part.data = (char *)m->data + (first * m->stride + col) * tchi_cuda_size(m->type);
    part.batch = batch;
    part.cols = cols;
    return part;
}

tch_status tchi_cuda_sample_norms_fp16(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                       int64_t groups, double scale, double *norms, double *parts)
{
    fp16_plan plan = plan_of(state, a, g, groups);
    for (int64_t first = 0; first < a->batch; first += plan.samples * groups) {
        int64_t left = a->batch - first;
        int64_t batch = left < plan.samples * groups ? left : plan.samples * groups;
        char *at = (char *)state->blas_workspace;
        tch_matrices inputs = part_of(a, first, batch, 0, a->cols);
        fp16_side x, y;
        TCHI_TRY(prepare(state, &inputs, plan.copy_a, &at, &x));
        for (int64_t col = 0; col < g->cols; col += plan.cols) {
            int64_t cols = g->cols - col < plan.cols ? g->cols - col : plan.cols;
            char *after = at;
            int64_t tiles = 0;
            tch_matrices gradients = part_of(g, first, batch, col, cols);
            TCHI_TRY(prepare(state, &gradients, plan.copy_g, &after, &y));
            TCHI_TRY(tchi_cuda_sample_norms_wgmma(state, &x.m, &y.m, parts, &tiles));
            tchi_norms_parts sums = {parts, tiles, groups, x.largest, y.largest};
            TCHI_TRY(tchi_cuda_sample_norms_add(state, batch / groups, &sums, scale, norms + first / groups));
        }
    }
    return TCH_OK;
}
