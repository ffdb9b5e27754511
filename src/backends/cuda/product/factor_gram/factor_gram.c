/* Factors of curvature in float32: which of the ways to compute one takes the operands at hand. Ours computes the lower
 * tiles alone but gives each to one block for the whole contraction; cuBLAS divides that too, and computes more than
 * the lower half of C, in panels of columns that begin at the diagonal. */
#include "factor_gram.h"

#include "backends/cuda/matrix/narrow.h"
#include "backends/cuda/product/symmetric/symmetric_any.h"
#include "backends/cuda/runtime/scalars.h"

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

/* What is above the diagonal in a panel comes out as it may: it is not looked at, and the mirror image takes its
 * place. */
tch_status tchi_cuda_factor_gram_panels(tchi_cuda_state *state, int64_t panels, double alpha, const tch_matrices *a,
                                        int32_t transpose, double beta, const tch_matrices *c)
{
    int64_t width = ((c->rows + panels - 1) / panels + 127) / 128 * 128;
    for (int64_t first = 0; first < c->rows; first += width) {
        int64_t cols = c->rows - first < width ? c->rows - first : width;
        tch_matrices below = part_of(a, transpose, first, c->rows - first);
        tch_matrices right = part_of(a, transpose, first, cols);
        tch_matrices panel = panel_of(c, first, cols);
        TCHI_CUDA_PASS(a->type == TCH_SCALAR_F32
                           ? tchi_cuda_gemm_rounded(state, alpha, &below, transpose, &right, !transpose, beta, &panel)
                           : tchi_cuda_gemm(state, alpha, &below, transpose, &right, !transpose, beta, &panel));
    }
    return tchi_cuda_mirror_lower(state, c);
}

/* Panels to divide C into, by what an H200 took for n = 768 and 3072: bench/ladder/cuda_factor_gram.md. */
static int64_t panels_for(tch_scalar type, int64_t n)
{
    return type == TCH_SCALAR_F32 ? (n >= 512 ? 2 : 1) : n >= 1536 ? 3 : 1;
}

/* --- through copies ---------------------------------------------------------------------------------------------- */

#define LARGEST_BYTES 256 /* of the workspace, for one number */

/* A row of the copy, in elements. */
static int64_t copied_row(const tch_matrices *a)
{
    return (a->cols + 7) / 8 * 8;
}

/* Rows of A at a time: whole k-tiles of 64, and about as many each time. */
static int64_t rows_at_once(const tchi_cuda_state *state, const tch_matrices *a)
{
    int64_t most = (tchi_cuda_workspace_bytes(state) - LARGEST_BYTES) / (2 * copied_row(a)) / 64 * 64;
    if (most == 0) {
        return 0;
    }
    int64_t times = (a->rows + most - 1) / most;
    int64_t even = ((a->rows + times - 1) / times + 63) / 64 * 64;
    return even < most ? even : most;
}

int tchi_cuda_factor_gram_narrow_takes(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *c)
{
    return state->device.major == 9 && state->blas_workspace != NULL && a->rows > 0 && c->rows > 0 &&
           c->rows < (1 << 20) && rows_at_once(state, a) > 0;
}

/* One matrix, rows [first, first + count). */
static tch_status add_rows(const tchi_cuda_state *state, double alpha, const tch_matrices *a, double beta,
                           const tch_matrices *c, int64_t first, int64_t count)
{
    uint32_t *largest = a->type == TCH_SCALAR_F32 ? state->blas_workspace : NULL;
    tch_matrices rows = part_of(a, 0, first, count);
    tch_matrices copy = rows;
    copy.data = (char *)state->blas_workspace + LARGEST_BYTES;
    copy.type = a->type == TCH_SCALAR_F32 ? TCH_SCALAR_F16 : a->type;
    copy.ld = copied_row(a);
    copy.stride = count * copy.ld;
    if (largest != NULL) {
        TCHI_CUDA_PASS(tchi_cuda_largest_bits(state, &rows, largest));
    }
    TCHI_CUDA_PASS(tchi_cuda_narrow(state, &rows, largest, &copy));
    return tchi_cuda_factor_gram_wgmma(state, alpha, &copy, largest, beta, c);
}

tch_status tchi_cuda_factor_gram_narrow(const tchi_cuda_state *state, double alpha, const tch_matrices *a, double beta,
                                        const tch_matrices *c)
{
    int64_t step = rows_at_once(state, a);
    for (int64_t b = 0; b < c->batch; b++) {
        tch_matrices one = *a;
        tch_matrices out = *c;
        one.data = tchi_cuda_matrix_at(a, b);
        out.data = tchi_cuda_matrix_at(c, b);
        one.batch = 1;
        out.batch = 1;
        for (int64_t first = 0; first < a->rows; first += step) {
            int64_t count = a->rows - first < step ? a->rows - first : step;
            TCHI_CUDA_PASS(add_rows(state, alpha, &one, first == 0 ? beta : 1.0, &out, first, count));
        }
    }
    return TCH_OK;
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

/* Whether the lower tiles of wgmma, 128 by 256, are enough for every multiprocessor: each has the whole contraction. */
static int fills_device(const tchi_cuda_state *state, const tch_matrices *c)
{
    int64_t rows = (c->rows + 127) / 128;
    return rows * (rows + 2) / 4 * c->batch >= state->device.processors;
}

/* A and C are of float32, or A of a half type and C of float32; other types have no faster way than `gram`. */
tch_status tchi_cuda_gram_rounded(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                                  const tch_matrices *c)
{
    tchi_cuda_state *s = state;
    if (c->rows == 0 || c->batch == 0) {
        return TCH_OK;
    }
    if (c->type != TCH_SCALAR_F32 || a->type == TCH_SCALAR_F64 || (a->type == TCH_SCALAR_F32 && s->device.major < 8)) {
        return tchi_cuda_gram(state, alpha, a, transpose, beta, c);
    }
    if (transpose && a->type == TCH_SCALAR_F32 && fills_device(s, c) && tchi_cuda_factor_gram_narrow_takes(s, a, c)) {
        return tchi_cuda_factor_gram_narrow(s, alpha, a, beta, c);
    }
    return tchi_cuda_factor_gram_panels(s, panels_for(a->type, c->rows), alpha, a, transpose, beta, c);
}
