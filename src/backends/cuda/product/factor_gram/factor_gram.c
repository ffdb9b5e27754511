/* Chooses the kernel of curvature factors in float32. The library's kernel computes only the lower tiles but assigns
 * each to one block for the whole contraction; cuBLAS divides the contraction too and computes more than the lower half
 * of C, in panels of columns that begin at the diagonal. */
#include "factor_gram.h"

#include "backends/cuda/matrix/fp16_copy.h"
#include "backends/cuda/runtime/scalars.h"
#include "core/arith.h"

/* Rows, or columns where A is transposed, from `first` on, `count` of them. */
static tch_matrices part_of(const tch_matrices *a, int32_t transpose, int64_t first, int64_t count)
{
    tch_matrices part = *a;
    part.data = (char *)a->data + first * (transpose ? 1 : a->ld) * tchi_cuda_scalar_size(a->type);
    *(transpose ? &part.cols : &part.rows) = count;
    return part;
}

static tch_matrices panel_of(const tch_matrices *c, int64_t first, int64_t cols)
{
    tch_matrices panel = *c;
    panel.data = (char *)c->data + first * (c->ld + 1) * tchi_cuda_scalar_size(c->type);
    panel.rows = c->rows - first;
    panel.cols = cols;
    return panel;
}

/* Elements above the diagonal of a panel are undefined and replaced by the mirror image. */
tch_status tchi_cuda_factor_gram_panels(tchi_cuda_state *state, int64_t panels, double alpha, const tch_matrices *a,
                                        int32_t transpose, double beta, const tch_matrices *c)
{
    int64_t width = ((c->rows + panels - 1) / panels + 127) / 128 * 128;
    for (int64_t first = 0; first < c->rows; first += width) {
        int64_t cols = c->rows - first < width ? c->rows - first : width;
        tch_matrices below = part_of(a, transpose, first, c->rows - first);
        tch_matrices right = part_of(a, transpose, first, cols);
        tch_matrices panel = panel_of(c, first, cols);
        TCHI_TRY(tchi_cuda_gemm(state, alpha, &below, transpose, &right, !transpose, beta, 1, &panel));
    }
    return tchi_cuda_mirror_lower(state, c);
}

/* --- through copies ---------------------------------------------------------------------------------------------- */

#define MOST_COPIES 64
#define LARGEST_BYTES ((int64_t)MOST_COPIES * 4) /* of the workspace, one number per matrix */

/* How the copies of a batch pass through the workspace. */
typedef struct copy_plan {
    int64_t matrices; /* at a time */
    int64_t depth;    /* of the contraction at a time: all of it, or whole k-tiles if one matrix exceeds the
                         workspace */
} copy_plan;

/* `total` in equal parts of at most `most`, multiples of `unit` except for the last. */
static int64_t even_part(int64_t total, int64_t most, int64_t unit)
{
    int64_t parts = (total + most - 1) / most;
    return ((total + parts - 1) / parts + unit - 1) / unit * unit;
}

/* Depth 0 if no k-tile fits. */
static copy_plan plan_copies(const tchi_cuda_state *state, const tch_matrices *c, int32_t transpose, int64_t depth)
{
    int64_t room = (tchi_cuda_workspace_bytes(state) - LARGEST_BYTES) / 2; /* elements */
    int64_t one = transpose ? depth * tchi_round_up(c->rows, 8) : c->rows * tchi_round_up(depth, 8);
    if (one <= room) {
        int64_t most = tchi_min(room / one, MOST_COPIES);
        return (copy_plan){even_part(c->batch, most, 1), depth};
    }
    int64_t most = room / tchi_round_up(c->rows, 8) / 64 * 64;
    return (copy_plan){1, most == 0 ? 0 : even_part(depth, most, 64)};
}

/* Matrices [first, first + count) of a batch. */
static tch_matrices some_of(const tch_matrices *m, int64_t first, int64_t count)
{
    tch_matrices some = *m;
    some.data = tchi_cuda_matrix_at(m, first);
    some.batch = count;
    return some;
}

static tch_status add_part(tchi_cuda_state *state, tchi_factor_weights weights, const tch_matrices *a,
                           int32_t transpose, const tch_matrices *c)
{
    uint32_t *largest = state->blas_workspace;
    tch_matrices copy = tchi_cuda_fp16_copy_of((char *)state->blas_workspace + LARGEST_BYTES, a);
    TCHI_TRY(tchi_cuda_largest_bits(state, a, largest));
    TCHI_TRY(tchi_cuda_fp16_copy(state, a, largest, &copy));
    return tchi_cuda_factor_pingpong(state, weights, &copy, transpose, largest, c);
}

/* Whether the lower tiles of the matrices copied at a time occupy every multiprocessor: each has the whole
 * contraction. */
int tchi_cuda_factor_fp16_supported(const tchi_cuda_state *state, const tch_matrices *a, int32_t transpose,
                                    const tch_matrices *c)
{
    int64_t depth = transpose ? a->rows : a->cols;
    if (state->blas_workspace == NULL || a->type != TCH_SCALAR_F32 || c->rows == 0 || c->batch == 0 || depth == 0 ||
        depth >= 1 << 30) {
        return 0;
    }
    copy_plan plan = plan_copies(state, c, transpose, depth);
    tch_matrices some = some_of(c, 0, plan.matrices);
    return plan.depth > 0 && tchi_cuda_factor_pingpong_supported(state, &some);
}

tch_status tchi_cuda_factor_fp16(tchi_cuda_state *state, tchi_factor_weights weights, const tch_matrices *a,
                                 int32_t transpose, const tch_matrices *c)
{
    const int64_t depth = transpose ? a->rows : a->cols;
    const copy_plan plan = plan_copies(state, c, transpose, depth);
    for (int64_t b = 0; b < c->batch; b += plan.matrices) {
        int64_t count = tchi_min(c->batch - b, plan.matrices);
        tch_matrices some = some_of(a, b, count);
        tch_matrices out = some_of(c, b, count);
        for (int64_t first = 0; first < depth; first += plan.depth) {
            int64_t columns = tchi_min(depth - first, plan.depth);
            tch_matrices part = part_of(&some, !transpose, first, columns);
            weights.adds = first > 0;
            TCHI_TRY(add_part(state, weights, &part, transpose, &out));
        }
    }
    return TCH_OK;
}

/* --- both factors ------------------------------------------------------------------------------------------------ */

/* The number of copies that fit into `bytes`, both arrays being aligned to 256. */
static int64_t copies_in(const tch_matrices *a, int64_t bytes)
{
    int64_t one = tchi_cuda_fp16_copy_of(NULL, a).stride * (int64_t)sizeof(uint16_t);
    return (bytes - 2 * 256) / (one + (int64_t)sizeof(uint32_t));
}

static char *aligned(char *at)
{
    return at + (256 - (uintptr_t)at % 256) % 256;
}

/* Whether the whole batch has enough lower tiles for every multiprocessor, on either side. Does not depend on the
 * scratch size: a step must be bitwise-identical with any. */
int tchi_cuda_factor_pair_supported(const tchi_cuda_state *state, const tchi_factor_pair *pair)
{
    const tch_matrices *a = pair->a;
    if (a->type == TCH_SCALAR_F16) {
        return 1; /* checked by tchi_cuda_fp16_sides_supported */
    }
    if (state->blas_workspace == NULL || a->type != TCH_SCALAR_F32 || a->rows == 0 || a->cols == 0 || a->batch == 0 ||
        a->rows >= 1 << 30 || a->cols >= 1 << 30) {
        return 0;
    }
    return copies_in(a, tchi_cuda_workspace_bytes(state)) > 0 &&
           tchi_cuda_factor_pingpong_supported(state, pair->rows) &&
           tchi_cuda_factor_pingpong_supported(state, pair->cols);
}

static tch_status from_copy(tchi_cuda_state *state, tchi_factor_weights weights, const tch_matrices *copy,
                            const uint32_t *largest, const tch_matrices *rows, const tch_matrices *cols)
{
    TCHI_TRY(tchi_cuda_factor_pingpong(state, weights, copy, 0, largest, rows));
    return tchi_cuda_factor_pingpong(state, weights, copy, 1, largest, cols);
}

tch_status tchi_cuda_factor_pair(tchi_cuda_state *state, tchi_factor_weights weights, const tchi_factor_pair *pair)
{
    if (pair->a->type == TCH_SCALAR_F16) {
        return from_copy(state, weights, pair->a, pair->largest, pair->rows, pair->cols);
    }
    const int64_t workspace = tchi_cuda_workspace_bytes(state), batch = pair->a->batch;
    char *room = pair->bytes > workspace ? pair->scratch : state->blas_workspace;
    const int64_t most = copies_in(pair->a, tchi_max(pair->bytes, workspace));
    const int64_t together = even_part(batch, tchi_min(most, batch), 1);
    for (int64_t b = 0; b < batch; b += together) {
        tch_matrices some = some_of(pair->a, b, batch - b < together ? batch - b : together);
        tch_matrices rows = some_of(pair->rows, b, some.batch);
        tch_matrices cols = some_of(pair->cols, b, some.batch);
        uint32_t *looked_for = (uint32_t *)(void *)aligned(room);
        const uint32_t *largest = pair->largest != NULL ? pair->largest + b : looked_for;
        tch_matrices copy = tchi_cuda_fp16_copy_of(aligned((char *)(looked_for + some.batch)), &some);
        TCHI_TRY(pair->largest != NULL ? TCH_OK : tchi_cuda_largest_bits(state, &some, looked_for));
        TCHI_TRY(tchi_cuda_fp16_copy(state, &some, largest, &copy));
        TCHI_TRY(from_copy(state, weights, &copy, largest, &rows, &cols));
    }
    return TCH_OK;
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

/* For A and C of float32, or A of a half type and C of float32; other types have nothing faster than `gram`. */
tch_status tchi_cuda_gram_rounded(tchi_cuda_state *state, double alpha, const tch_matrices *a, int32_t transpose,
                                  double beta, const tch_matrices *c)
{
    if (c->rows == 0 || c->batch == 0) {
        return TCH_OK;
    }
    if (c->type != TCH_SCALAR_F32 || a->type == TCH_SCALAR_F64 ||
        (a->type == TCH_SCALAR_F32 && state->device.major < 8)) {
        return tchi_cuda_gram(state, alpha, a, transpose, beta, 0, c);
    }
    if (tchi_cuda_factor_fp16_supported(state, a, transpose, c)) {
        return tchi_cuda_factor_fp16(state, (tchi_factor_weights){(float)alpha, (float)beta, NULL, 0}, a, transpose, c);
    }
    /* panels tuned on an H200 for n = 768 and 3072: bench/logs/cuda_factor_gram.md */
    int64_t panels = a->type == TCH_SCALAR_F32 ? (c->rows >= 512 ? 2 : 1) : c->rows >= 1536 ? 3 : 1;
    return tchi_cuda_factor_gram_panels(state, panels, alpha, a, transpose, beta, c);
}
