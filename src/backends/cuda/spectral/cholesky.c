/* Batched Cholesky factors L and their inverses X, mostly by matrix products. The factor is computed from left to
 * right; the inverse recursively by halves:
 *
 *     A = [A11  .  ]    L = [L11   0 ]    X = [      X11        0 ]     L21 = A21 X11'
 *         [A21  A22]        [L21  L22]        [-X22 L21 X11   X22 ]     L22 L22' = A22 - L21 L21'
 *
 * The leaves, with all square roots and divisions, are in cholesky.cu. The inverse needs memory only for L21 of one
 * level at a time: L21 X11 overwrites A21. Operation counts: bench/logs/cuda_cholesky.md. */
#include "backends/cuda/cuda.h"

#include "backends/cuda/runtime/scalars.h"

#define LEAF TCHI_CUDA_CHOLESKY_LEAF

/* Rows or columns of a triangular factor per product, skipping the zeros next to it. */
#define STRIP TCH_LOWER_BLOCK

_Static_assert(LEAF == STRIP, "a leaf writes the zeros above its diagonal");

static tch_matrices block(const tch_matrices *m, int64_t row, int64_t col, int64_t rows, int64_t cols)
{
    tch_matrices part = *m;
    part.data = (char *)m->data + (row * m->ld + col) * tchi_cuda_scalar_size(m->type);
    part.rows = rows;
    part.cols = cols;
    return part;
}

static int64_t strip_at(int64_t first, int64_t n)
{
    return n - first < STRIP ? n - first : STRIP;
}

/* C = B X, or B X' if `transposed`, for lower triangular X. */
static tch_status multiply_right(tchi_cuda_state *state, const tch_matrices *b, const tch_matrices *x, int transposed,
                                 const tch_matrices *c)
{
    int64_t n = x->rows;
    for (int64_t first = 0; first < n; first += STRIP) {
        int64_t width = strip_at(first, n), from = transposed ? 0 : first, to = transposed ? first + width : n;
        tch_matrices left = block(b, 0, from, b->rows, to - from);
        tch_matrices strip = transposed ? block(x, first, 0, width, to) : block(x, first, first, n - first, width);
        tch_matrices out = block(c, 0, first, c->rows, width);
        TCHI_TRY(tchi_cuda_gemm(state, 1.0, &left, 0, &strip, transposed, 0.0, 0, &out));
    }
    return TCH_OK;
}

/* C = -X B for lower triangular X. */
static tch_status multiply_left(tchi_cuda_state *state, const tch_matrices *x, const tch_matrices *b,
                                const tch_matrices *c)
{
    for (int64_t first = 0; first < x->rows; first += STRIP) {
        int64_t height = strip_at(first, x->rows);
        tch_matrices strip = block(x, first, 0, height, first + height);
        tch_matrices right = block(b, 0, 0, first + height, b->cols);
        tch_matrices out = block(c, first, 0, height, c->cols);
        TCHI_TRY(tchi_cuda_gemm(state, -1.0, &strip, 0, &right, 0, 0.0, 0, &out));
    }
    return TCH_OK;
}

/* A22 -= L21 L21'. float64 has a symmetric kernel; in float32 mirroring would cost what it saves. */
static tch_status subtract_gram(tchi_cuda_state *state, const tch_matrices *l21, const tch_matrices *a22)
{
    return l21->type == TCH_SCALAR_F64 ? tchi_cuda_gram(state, -1.0, l21, 0, 1.0, 0, a22)
                                       : tchi_cuda_gemm(state, -1.0, l21, 0, l21, 1, 1.0, 0, a22);
}

/* Split point: half of the leaves, rounded up, so that only the last leaf is partial. */
static int64_t first_half(int64_t n)
{
    return ((n + LEAF - 1) / LEAF + 1) / 2 * LEAF;
}

static tch_status invert(tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *x, int32_t *flags,
                         void *scratch)
{
    int64_t n = a->rows;
    if (n <= LEAF) {
        return tchi_cuda_cholesky_leaf(state, a, x, flags);
    }
    int64_t upper = first_half(n);
    int64_t lower = n - upper;
    tch_matrices a11 = block(a, 0, 0, upper, upper);
    tch_matrices a21 = block(a, upper, 0, lower, upper);
    tch_matrices a22 = block(a, upper, upper, lower, lower);
    tch_matrices x11 = block(x, 0, 0, upper, upper);
    tch_matrices x21 = block(x, upper, 0, lower, upper);
    tch_matrices x22 = block(x, upper, upper, lower, lower);
    tch_matrices l21 = {scratch, a->type, lower, upper, upper, a->batch, lower * upper};
    TCHI_TRY(invert(state, &a11, &x11, flags, scratch));
    TCHI_TRY(multiply_right(state, &a21, &x11, 1, &l21));
    TCHI_TRY(subtract_gram(state, &l21, &a22));
    TCHI_TRY(multiply_right(state, &l21, &x11, 0, &a21));
    TCHI_TRY(invert(state, &a22, &x22, flags, scratch));
    return multiply_left(state, &x22, &a21, &x21);
}

/* Elements of the largest L21 of any split, not necessarily the first, whose lower part may be a single row. */
static int64_t largest_l21(int64_t n)
{
    if (n <= LEAF) {
        return 0;
    }
    int64_t upper = first_half(n);
    int64_t here = upper * (n - upper);
    int64_t inside = largest_l21(upper);
    return here > inside ? here : inside;
}

int64_t tchi_cuda_cholesky_inverse_scratch(tch_scalar type, int64_t n, int64_t batch)
{
    return batch * largest_l21(n) * tchi_cuda_scalar_size(type);
}

/* --- the factor itself ------------------------------------------------------------------------------------------- */

/* Columns per trailing update by one symmetric product: enough not to be memory-bound, few enough that most operations
 * are in it. */
#define BAND TCH_CHOLESKY_BLOCK

/* Columns [col, col + width): subtracts the band's earlier columns; then, with X the inverse factor of the diagonal
 * block, the column block times X' is L. */
static tch_status factor_leaf(tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *l, void *scratch,
                              int64_t band, int64_t col, int32_t *flags)
{
    int64_t n = a->rows;
    int64_t width = n - col < LEAF ? n - col : LEAF;
    tch_matrices column = block(a, col, col, n - col, width);
    tch_matrices diagonal = block(a, col, col, width, width);
    tch_matrices out = block(l, col, col, n - col, width);
    tch_matrices x = {scratch, a->type, width, width, width, a->batch, width * width};
    if (col > band) {
        tch_matrices left = block(l, col, band, n - col, col - band);
        tch_matrices top = block(l, col, band, width, col - band);
        TCHI_TRY(tchi_cuda_gemm(state, -1.0, &left, 0, &top, 1, 1.0, 0, &column));
    }
    TCHI_TRY(tchi_cuda_cholesky_leaf(state, &diagonal, &x, flags));
    return tchi_cuda_gemm(state, 1.0, &column, 0, &x, 1, 0.0, 0, &out);
}

/* n^3 / 3 operations per matrix, plus a twelfth (n = 3072) to a third (n = 1024). */
static tch_status factor(tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *l, int32_t *flags,
                         void *scratch)
{
    int64_t n = a->rows;
    for (int64_t band = 0; band < n; band += BAND) {
        int64_t end = n - band < BAND ? n : band + BAND;
        tch_matrices corner = block(l, band, band, end - band, end - band);
        TCHI_TRY(tchi_cuda_combine(state, 0.0, 0.0, NULL, 0.0, NULL, &corner));
        for (int64_t col = band; col < end; col += LEAF) {
            TCHI_TRY(factor_leaf(state, a, l, scratch, band, col, flags));
        }
        if (end < n) {
            tch_matrices done = block(l, end, band, n - end, end - band);
            tch_matrices rest = block(a, end, end, n - end, n - end);
            TCHI_TRY(subtract_gram(state, &done, &rest));
        }
    }
    return TCH_OK;
}

/* The inverse needs 2/3 n^3 operations per matrix; about n^3 are done, see the log. */
tch_status tchi_cuda_cholesky(void *state, const tch_matrices *a, int32_t inverse, const tch_matrices *x,
                              int32_t *flags, void *scratch)
{
    if (a->rows == 0 || a->batch == 0) {
        return TCH_OK;
    }
    return inverse ? invert(state, a, x, flags, scratch) : factor(state, a, x, flags, scratch);
}
