/* F = sum over poles of w (B + s I)^(-1) for a block tridiagonal B. Needs block_reflector_body.h and band_plan.h.
 *
 * Downwards, B + s I = L L' block by block: L(j) from the Schur complement D(j), M(j) = L(j)^(-1) B(j+1,j)'. An
 * ill-conditioned matrix loses digits here, so this is always in double. Upwards, the inverse Z needs only H(j) =
 * -M(j)' L(j)^(-1):
 *     Z(j,j) = D(j)^(-1) + H(j)' Z(j+1,j+1) H(j),     Z(i,j) = Z(i,j+1) H(j)  for i > j.
 * Between two stretches of blocks, products of H are gathered into one factor C, so that the sum over poles is the
 * inner dimension of a single large product. */

typedef struct band_inverse_scratch {
    REAL *step;    /* H(j), for every pole and block */
    REAL *core;    /* Z(j,j), for every pole and block */
    REAL *chain;   /* C, poles * block by blocks * block */
    REAL *rows;    /* for every stretch: two of its rows by poles * block */
    double *local; /* for every pole: LOCAL_SQUARES of block by block */
    int *done;     /* for every pole: whether it was positive definite */
} band_inverse_scratch;

enum { LOCAL_SQUARES = 5, BLOCKS_PER_STRETCH = 4 };

static int64_t stretches(const band_plan *plan)
{
    return tchi_ceil_div(plan->blocks, BLOCKS_PER_STRETCH);
}

static size_t band_inverse_bytes(const band_plan *plan)
{
    const int64_t b = plan->block, k = plan->poles;
    const int64_t reals = 3 * k * plan->blocks * b * b + stretches(plan) * 2 * BLOCKS_PER_STRETCH * b * b * k;
    return (size_t)(k * LOCAL_SQUARES * b * b) * sizeof(double) + (size_t)reals * sizeof(REAL) +
           (size_t)k * sizeof(int);
}

static band_inverse_scratch make_band_inverse_scratch(const band_plan *plan, void *memory)
{
    const int64_t b = plan->block, k = plan->poles;
    band_inverse_scratch scratch = {.local = memory};
    scratch.step = (REAL *)(scratch.local + k * LOCAL_SQUARES * b * b);
    scratch.core = scratch.step + k * plan->blocks * b * b;
    scratch.chain = scratch.core + k * plan->blocks * b * b;
    scratch.rows = scratch.chain + k * plan->blocks * b * b;
    scratch.done = (int *)(scratch.rows + stretches(plan) * 2 * BLOCKS_PER_STRETCH * b * b * k);
    return scratch;
}

/* One row of an elimination: x[from..to) -= the sum of factors[c] times row c, four rows at a time so that x is stored
 * once per four rows. */
VECTOR_INLINE void subtract_rows(int64_t count, const double *factors, int64_t factor_stride, const double *rows,
                                 int64_t stride, double *restrict x, int64_t from, int64_t to)
{
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
        const double *r0 = rows + k * stride, *r1 = r0 + stride, *r2 = r1 + stride, *r3 = r2 + stride;
        const double *f = factors + k * factor_stride;
        const double f0 = f[0], f1 = f[factor_stride], f2 = f[2 * factor_stride], f3 = f[3 * factor_stride];
#pragma omp simd
        for (int64_t c = from; c < to; c++) {
            x[c] -= f0 * r0[c] + f1 * r1[c] + f2 * r2[c] + f3 * r3[c];
        }
    }
    for (; k < count; k++) {
        const double f0 = factors[k * factor_stride];
#pragma omp simd
        for (int64_t c = from; c < to; c++) {
            x[c] -= f0 * rows[c + k * stride];
        }
    }
}

/* Transforms the rows of [D | B' | I], D given by its upper triangle, to [L' | L^(-1) B' | L^(-1)]: Cholesky
 * elimination. Row i of D starts at column i, so together with the i + 1 leading columns of a triangular B' it is
 * contiguous; a dense B' takes b columns. Returns 0 if a pivot is not positive. */
VECTOR_CLONES static int eliminate(int64_t b, double *rows, int dense)
{
    const int64_t stride = 3 * b;
    for (int64_t i = 0; i < b; i++) {
        double *x = rows + i * stride;
        subtract_rows(i, rows + i, stride, rows, stride, x, i, dense ? 2 * b : b + i);
        subtract_rows(i, rows + i, stride, rows, stride, x, 2 * b, 2 * b + i);
        if (!(x[i] > 0)) {
            return 0;
        }
        const double inverse = 1 / sqrt(x[i]);
        for (int64_t c = i; c < 3 * b; c++) {
            x[c] *= inverse;
        }
    }
    return 1;
}

/* Sets up the rows of block j of [D | B' | I]; D is B(j,j) + s I less the Schur complement from the B' part of the
 * previous block. Rows beyond the matrix are those of the identity. */
static void load_rows(const tchi_blas_f64 *blas, const band_plan *plan, const band_factors *factors, int64_t block,
                      double shift, double *rows)
{
    const int64_t b = plan->block, stride = 3 * b;
    const int64_t here = tchi_min(b, plan->n - block * b), below = tchi_max(tchi_min(b, plan->n - block * b - b), 0);
    const REAL *diagonal = factors->diagonal + block * b * b, *next = factors->below + block * b * b;
    for (int64_t i = 0; i < b; i++) {
        double *x = rows + i * stride;
        for (int64_t c = i; c < b; c++) {
            x[c] = c < here ? (double)diagonal[c + i * b] : 0;
        }
        x[i] += i < here ? shift : 1;
    }
    if (block > 0) {
        blas->gemm(TCHI_COL_MAJOR, TCHI_NO_TRANS, TCHI_TRANS, (int)b, (int)b, (int)b, -1, rows + b, (int)stride,
                   rows + b, (int)stride, 1, rows, (int)stride);
    }
    for (int64_t i = 0; i < b; i++) {
        double *x = rows + i * stride + b;
        memset(x, 0, (size_t)(2 * b) * sizeof *x);
        for (int64_t c = 0; c < below; c++) {
            x[c] = (double)next[c + i * b];
        }
        x[b + i] = 1;
    }
}

static void round_square(int64_t b, const double *from, int64_t ld_from, REAL *to)
{
    for (int64_t j = 0; j < b; j++) {
        for (int64_t i = 0; i < b; i++) {
            to[i + j * b] = (REAL)from[i + j * ld_from];
        }
    }
}

/* Going down for one pole: H(j) into step, D(j)^(-1) into core. Returns 0 when it is not positive definite. */
static int factor_band(const tchi_blas *blas, const REAL_BLAS *real, const band_plan *plan, const band_factors *factors,
                       double shift, REAL *step, REAL *core, double *local)
{
    const int64_t b = plan->block, square = b * b;
    double *rows = local;
    REAL *m = (REAL *)(rows + 3 * square), *k = m + square;
    for (int64_t j = 0; j < plan->blocks; j++) {
        load_rows(&blas->f64, plan, factors, j, shift, rows);
        if (!eliminate(b, rows, j + 2 == plan->blocks)) {
            return 0;
        }
        round_square(b, rows + 2 * b, 3 * b, k);
        gemm_columns(real, TCHI_NO_TRANS, TCHI_TRANS, b, b, b, 1, k, b, k, b, 0, core + j * square, b);
        if (j + 1 < plan->blocks) {
            round_square(b, rows + b, 3 * b, m);
            gemm_columns(real, TCHI_NO_TRANS, TCHI_TRANS, b, b, b, -1, m, b, k, b, 0, step + j * square, b);
        }
    }
    return 1;
}

/* Coming up for one pole: Z(j,j) over D(j)^(-1). */
static void invert_diagonal(const REAL_BLAS *real, const band_plan *plan, const REAL *step, REAL *core, REAL *product)
{
    const int64_t b = plan->block, square = b * b;
    for (int64_t j = plan->blocks - 2; j >= 0; j--) {
        gemm_columns(real, TCHI_NO_TRANS, TCHI_NO_TRANS, b, b, b, 1, core + (j + 1) * square, b, step + j * square, b,
                     0, product, b);
        gemm_columns(real, TCHI_TRANS, TCHI_NO_TRANS, b, b, b, 1, step + j * square, b, product, b, 1,
                     core + j * square, b);
    }
}

/* C(j) = H(e) H(e-1) ... H(j), e the last block of j's stretch; chain points at this pole's rows. */
static void gather_chain(const REAL_BLAS *real, const band_plan *plan, const REAL *step, REAL *chain, int64_t ld)
{
    const int64_t b = plan->block, square = b * b;
    for (int64_t j = plan->blocks - 2; j >= 0; j--) {
        REAL *c = chain + j * b * ld;
        if ((j + 1) % BLOCKS_PER_STRETCH == 0) {
            copy_block(b, b, step + j * square, b, c, ld);
        } else if (j / BLOCKS_PER_STRETCH + 1 < stretches(plan)) {
            gemm_columns(real, TCHI_NO_TRANS, TCHI_NO_TRANS, b, b, b, 1, c + b * ld, ld, step + j * square, b, 0, c,
                         ld);
        }
    }
}

static int invert_pole(const tchi_blas *blas, const REAL_BLAS *real, const band_plan *plan, const band_factors *factors,
                       double shift, int64_t pole, const band_inverse_scratch *scratch)
{
    const int64_t b = plan->block, stride = plan->blocks * b * b;
    double *local = scratch->local + pole * LOCAL_SQUARES * b * b;
    REAL *step = scratch->step + pole * stride, *core = scratch->core + pole * stride;
    if (!factor_band(blas, real, plan, factors, shift, step, core, local)) {
        return 0;
    }
    invert_diagonal(real, plan, step, core, (REAL *)local);
    gather_chain(real, plan, step, scratch->chain + pole * b, plan->poles * b);
    return 1;
}

/* to <- or += the given rows and columns of from. */
static void add_block(int first, int64_t m, int64_t n, const REAL *from, int64_t ld_from, REAL *to, int64_t ld_to)
{
    for (int64_t j = 0; j < n; j++) {
        const REAL *restrict f = from + j * ld_from;
        REAL *restrict t = to + j * ld_to;
        for (int64_t i = 0; i < m; i++) {
            t[i] = first ? f[i] : t[i] + f[i];
        }
    }
}

/* Adds one pole's weighted Z to the diagonal square of a stretch of x, and leaves the square's first block column in
 * `columns`. Works leftwards in a pair of buffers of stretch rows by block. */
static void invert_stretch(const REAL_BLAS *real, const band_plan *plan, int64_t stretch, double weight, int first,
                           const REAL *step, const REAL *core, REAL *columns, REAL *spare, REAL *x, int64_t ldx)
{
    const int64_t b = plan->block, square = b * b, ld = BLOCKS_PER_STRETCH * b;
    const int64_t begin = stretch * BLOCKS_PER_STRETCH, end = tchi_min(begin + BLOCKS_PER_STRETCH, plan->blocks);
    REAL *now = (end - begin) % 2 == 1 ? columns : spare, *before = now == columns ? spare : columns;
    for (int64_t j = end - 1; j >= begin; j--) {
        REAL *here = now + (j - begin) * b;
        for (int64_t i = 0; i < b; i++) {
            for (int64_t r = 0; r < b; r++) {
                here[r + i * ld] = (REAL)weight * core[j * square + r + i * b];
            }
        }
        if (j + 1 < end) {
            gemm_columns(real, TCHI_NO_TRANS, TCHI_NO_TRANS, (end - j - 1) * b, b, b, 1, before + (j + 1 - begin) * b,
                         ld, step + j * square, b, 0, here + b, ld);
        }
        add_block(first, tchi_min(end * b, plan->n) - j * b, tchi_min(b, plan->n - j * b), here, ld,
                  x + j * b * (ldx + 1), ldx);
        REAL *swap = now;
        now = before;
        before = swap;
    }
}

/* The rows of F that belong to one stretch, up to the diagonal. */
static void assemble_rows(const REAL_BLAS *real, const band_plan *plan, const double *weights, int64_t stretch,
                          const band_inverse_scratch *scratch, REAL *x, int64_t ldx)
{
    const int64_t b = plan->block, square = b * b, height = BLOCKS_PER_STRETCH * b, inner = plan->poles * b;
    const int64_t first = stretch * height, rows = tchi_min(height, plan->n - first);
    REAL *columns = scratch->rows + stretch * 2 * height * inner, *spare = columns + height * inner;
    for (int64_t k = 0; k < plan->poles; k++) {
        const int64_t at = k * plan->blocks * square;
        invert_stretch(real, plan, stretch, weights[k], k == 0, scratch->step + at, scratch->core + at,
                       columns + k * b * height, spare, x, ldx);
    }
    for (int64_t left = stretch - 1; left >= 0; left--) {
        const REAL *chain = scratch->chain + left * height * inner;
        gemm_columns(real, TCHI_NO_TRANS, TCHI_NO_TRANS, rows, height, inner, 1, columns, height, chain, inner, 0,
                     x + first + left * height * ldx, ldx);
        for (int64_t k = 0; k < plan->poles && left > 0; k++) {
            gemm_columns(real, TCHI_NO_TRANS, TCHI_NO_TRANS, rows, b, b, 1, columns + k * b * height, height,
                         chain + k * b, inner, 0, spare + k * b * height, height);
        }
        REAL *swap = columns;
        columns = spare;
        spare = swap;
    }
}

/* The lower triangle of F into x. Returns k + 1 for the first pole k that is not positive definite. Called by every
 * thread of the team; all return the same. */
static int invert_band(work_team *team, const tchi_blas *blas, const REAL_BLAS *real, const band_plan *plan,
                       const band_factors *factors, const double *shifts, const double *weights,
                       const band_inverse_scratch *scratch, REAL *x, int64_t ldx)
{
    for (int64_t k; (k = team_next_chunk(team)) < plan->poles;) {
        scratch->done[k] = invert_pole(blas, real, plan, factors, shifts[k], k, scratch);
    }
    team_barrier(team);
    for (int64_t k = 0; k < plan->poles; k++) {
        if (!scratch->done[k]) {
            return (int)(k + 1);
        }
    }
    for (int64_t i; (i = team_next_chunk(team)) < stretches(plan);) {
        assemble_rows(real, plan, weights, stretches(plan) - 1 - i, scratch, x, ldx);
    }
    team_barrier(team);
    return 0;
}
