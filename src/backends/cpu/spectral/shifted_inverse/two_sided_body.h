/* A symmetric matrix A between a block reflector and its transpose: A - V W' - W V', in three rounds of products shared
 * by a team of threads. Only tiles on and below the diagonal are updated; diagonal tiles are stored in full, so that
 * all products are general ones. Needs block_reflector_body.h.
 *
 * With Y = A V and S = V' Y:   H' A H has W = Y T - V (T' S T) / 2;   H A H' has T' in T's place. */

typedef struct two_sided_scratch {
    REAL *y;     /* n by group */
    REAL *left;  /* [V W], n by 2 group */
    REAL *right; /* [W V], n by 2 group */
    REAL *s;     /* group by group for every tile of rows, then two more */
} two_sided_scratch;

static size_t two_sided_scratch_count(const band_plan *plan)
{
    return (size_t)(5 * plan->n * plan->group + (plan->tiles + 2) * plan->group * plan->group);
}

static two_sided_scratch make_two_sided_scratch(const band_plan *plan, REAL *memory)
{
    two_sided_scratch scratch = {.y = memory};
    scratch.left = scratch.y + plan->n * plan->group;
    scratch.right = scratch.left + 2 * plan->n * plan->group;
    scratch.s = scratch.right + 2 * plan->n * plan->group;
    return scratch;
}

/* The rows of one tile of Y = A V, and their share of S. */
static void project_tile(const REAL_BLAS *blas, const band_plan *plan, const REAL *a, int64_t lda,
                         const block_reflector *h, int64_t tile, const two_sided_scratch *scratch)
{
    const int64_t n = plan->n, w = h->width, first = h->first;
    const int64_t begin = tchi_max(tile_begin(plan, tile), first), end = tile_end(plan, tile);
    const REAL *v = h->v + begin - first;
    REAL *y = scratch->y + begin - first;
    gemm_columns(blas, TCHI_NO_TRANS, TCHI_NO_TRANS, end - begin, w, end - first, 1, a + begin + first * lda, lda, h->v,
                 h->ldv, 0, y, n);
    if (end < n) {
        gemm_columns(blas, TCHI_TRANS, TCHI_NO_TRANS, end - begin, w, n - end, 1, a + end + begin * lda, lda,
                     h->v + end - first, h->ldv, 1, y, n);
    }
    gemm_columns(blas, TCHI_TRANS, TCHI_NO_TRANS, w, w, end - begin, 1, v, h->ldv, y, n, 0, scratch->s + tile * w * w,
                 w);
}

/* S <- -(T' S T) / 2 with the sum of all tiles' parts, or T S T' for the reflector from the other side. */
static void finish_core(const REAL_BLAS *blas, const band_plan *plan, const block_reflector *h, int transposed,
                        const two_sided_scratch *scratch)
{
    const int64_t w = h->width;
    REAL *sum = scratch->s + plan->tiles * w * w;
    REAL *product = sum + w * w;
    memset(sum, 0, (size_t)(w * w) * sizeof *sum);
    for (int64_t tile = tile_of(plan, h->first); tile < plan->tiles; tile++) {
        const REAL *share = scratch->s + tile * w * w;
        for (int64_t i = 0; i < w * w; i++) {
            sum[i] += share[i];
        }
    }
    const int outer = transposed ? TCHI_NO_TRANS : TCHI_TRANS, inner = transposed ? TCHI_TRANS : TCHI_NO_TRANS;
    gemm_columns(blas, outer, TCHI_NO_TRANS, w, w, w, 1, h->t, h->ldt, sum, w, 0, product, w);
    gemm_columns(blas, TCHI_NO_TRANS, inner, w, w, w, (REAL)-0.5, product, w, h->t, h->ldt, 0, sum, w);
}

/* The rows of one tile of W, and of the factors [V W] and [W V]. */
static void finish_tile(const REAL_BLAS *blas, const band_plan *plan, const block_reflector *h, int transposed,
                        int64_t tile, const two_sided_scratch *scratch)
{
    const int64_t n = plan->n, w = h->width, first = h->first;
    const int64_t begin = tchi_max(tile_begin(plan, tile), first) - first, rows = tile_end(plan, tile) - first - begin;
    const REAL *core = scratch->s + plan->tiles * w * w;
    const REAL *v = h->v + begin;
    REAL *w_right = scratch->right + begin;
    gemm_columns(blas, TCHI_NO_TRANS, transposed ? TCHI_TRANS : TCHI_NO_TRANS, rows, w, w, 1, scratch->y + begin, n,
                 h->t, h->ldt, 0, w_right, n);
    gemm_columns(blas, TCHI_NO_TRANS, TCHI_NO_TRANS, rows, w, w, 1, v, h->ldv, core, w, 1, w_right, n);
    copy_block(rows, w, w_right, n, scratch->left + begin + w * n, n);
    copy_block(rows, w, v, h->ldv, scratch->left + begin, n);
    copy_block(rows, w, v, h->ldv, scratch->right + begin + w * n, n);
}

/* A <- A - V W' - W V' on columns begin to end and the rows from begin down. */
static void update_columns(const REAL_BLAS *blas, const band_plan *plan, REAL *a, int64_t lda, const block_reflector *h,
                           int64_t begin, int64_t end, const two_sided_scratch *scratch)
{
    const int64_t n = plan->n, offset = begin - h->first;
    gemm_columns(blas, TCHI_NO_TRANS, TCHI_TRANS, n - begin, end - begin, 2 * h->width, -1, scratch->left + offset, n,
                 scratch->right + offset, n, 1, a + begin + begin * lda, lda);
}

/* The first two rounds: leaves [V W] and [W V] in the scratch. Called by every thread of the team. */
static void prepare_two_sided(work_team *team, const REAL_BLAS *blas, const band_plan *plan, const REAL *a, int64_t lda,
                              const block_reflector *h, int transposed, const two_sided_scratch *scratch)
{
    const int64_t from = tile_of(plan, h->first), count = plan->tiles - from;
    for (int64_t i; (i = team_next_chunk(team)) < count;) {
        project_tile(blas, plan, a, lda, h, from + i, scratch);
    }
    if (team_gather(team)) {
        finish_core(blas, plan, h, transposed, scratch);
        team_release(team);
    }
    for (int64_t i; (i = team_next_chunk(team)) < count;) {
        finish_tile(blas, plan, h, transposed, from + i, scratch);
    }
    team_barrier(team);
}
