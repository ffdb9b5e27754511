/* A = Q B Q' with block tridiagonal B, and the back-transformation X = Q F Q'. The reflectors of panel j overwrite the
 * columns of a, their triangular factors are on the diagonals of the groups' larger ones. Needs two_sided_body.h. */

typedef struct band_factors {
    REAL *diagonal; /* blocks of block by block: B(j,j), of which the lower triangle counts */
    REAL *below;    /* blocks of block by block: B(j+1,j), upper triangular except the last */
    REAL *t;        /* groups of group by group */
    REAL *products; /* groups of two of group by group: for the thread of the group, or of the strip before it */
    two_sided_scratch two_sided;
} band_factors;

static size_t band_factors_count(const band_plan *plan)
{
    const int64_t bands = 2 * plan->blocks * plan->block * plan->block;
    const int64_t squares = 3 * plan->groups * plan->group * plan->group;
    return (size_t)(bands + squares) + two_sided_scratch_count(plan);
}

static band_factors make_band_factors(const band_plan *plan, REAL *memory)
{
    const int64_t band = plan->blocks * plan->block * plan->block;
    const int64_t squares = plan->groups * plan->group * plan->group;
    band_factors factors = {.diagonal = memory};
    factors.below = factors.diagonal + band;
    factors.t = factors.below + band;
    factors.products = factors.t + squares;
    factors.two_sided = make_two_sided_scratch(plan, factors.products + 2 * squares);
    return factors;
}

static REAL *group_t(const band_plan *plan, const band_factors *factors, int64_t group)
{
    return factors->t + group * plan->group * plan->group;
}

static REAL *group_products(const band_plan *plan, const band_factors *factors, int64_t group)
{
    return factors->products + 2 * group * plan->group * plan->group;
}

static REAL *panel_t(const band_plan *plan, const band_factors *factors, int64_t panel)
{
    const int64_t column = panel * plan->block;
    return group_t(plan, factors, column / plan->group) + column % plan->group * (plan->group + 1);
}

static block_reflector panel_reflector(const band_plan *plan, const band_factors *factors, const REAL *a, int64_t lda,
                                       int64_t panel)
{
    const int64_t column = panel * plan->block, first = column + plan->block;
    return (block_reflector){.first = first,
                             .width = plan->block,
                             .v = a + first + column * lda,
                             .ldv = lda,
                             .t = panel_t(plan, factors, panel),
                             .ldt = plan->group};
}

static block_reflector group_reflector(const band_plan *plan, const band_factors *factors, const REAL *a, int64_t lda,
                                       int64_t group)
{
    const int64_t column = group * plan->group, first = column + plan->block;
    return (block_reflector){.first = first,
                             .width = tchi_min(plan->group, plan->panels * plan->block - column),
                             .v = a + first + column * lda,
                             .ldv = lda,
                             .t = group_t(plan, factors, group),
                             .ldt = plan->group};
}

static void keep_diagonal(const band_plan *plan, const band_factors *factors, const REAL *a, int64_t lda, int64_t block)
{
    const int64_t b = plan->block, begin = block * b, rows = tchi_min(b, plan->n - begin);
    copy_block(rows, rows, a + begin + begin * lda, lda, factors->diagonal + block * b * b, b);
}

/* Saves the diagonal block of panel j and factors the part below it. */
static void reduce_panel(const REAL_BLAS *blas, const band_plan *plan, const band_factors *factors, REAL *a,
                         int64_t lda, int64_t panel)
{
    const int64_t b = plan->block, first = (panel + 1) * b;
    keep_diagonal(plan, factors, a, lda, panel);
    factor_panel(blas, plan->n - first, b, a + first + panel * b * lda, lda, factors->below + panel * b * b, b,
                 panel_t(plan, factors, panel), plan->group, factors->products);
}

/* Updates the trailing matrix after panel j. The next panel is the first chunk of work, so that one thread factors it,
 * which cannot be divided, while the others update the columns behind it. */
static void update_and_look_ahead(work_team *team, const REAL_BLAS *blas, const band_plan *plan,
                                  const band_factors *factors, REAL *a, int64_t lda, int64_t panel)
{
    const block_reflector h = panel_reflector(plan, factors, a, lda, panel);
    const int64_t rest = h.first + plan->block, from = tile_of(plan, rest);
    for (int64_t i; (i = team_next_chunk(team)) <= plan->tiles - from;) {
        const int64_t tile = from + i - 1;
        const int64_t begin = i == 0 ? h.first : tchi_max(rest, tile_begin(plan, tile));
        update_columns(blas, plan, a, lda, &h, begin, i == 0 ? rest : tile_end(plan, tile), &factors->two_sided);
        if (i == 0 && panel + 1 < plan->panels) {
            reduce_panel(blas, plan, factors, a, lda, panel + 1);
        }
    }
    team_barrier(team);
}

/* The part beyond the panels: the last two diagonal blocks and the block between them. */
static void keep_corner(const band_plan *plan, const band_factors *factors, const REAL *a, int64_t lda)
{
    const int64_t b = plan->block, last = (plan->blocks - 1) * b;
    for (int64_t block = plan->panels; block < plan->blocks; block++) {
        keep_diagonal(plan, factors, a, lda, block);
    }
    if (plan->blocks > 1) {
        copy_block(plan->n - last, b, a + last + (last - b) * lda, lda, factors->below + plan->panels * b * b, b);
    }
}

/* Called by every thread of the team. */
static void reduce_to_band(work_team *team, const REAL_BLAS *blas, const band_plan *plan, const band_factors *factors,
                           REAL *a, int64_t lda)
{
    if (plan->panels > 0 && team_gather(team)) {
        reduce_panel(blas, plan, factors, a, lda, 0);
        team_release(team);
    }
    for (int64_t panel = 0; panel < plan->panels; panel++) {
        const block_reflector h = panel_reflector(plan, factors, a, lda, panel);
        prepare_two_sided(team, blas, plan, a, lda, &h, 0, &factors->two_sided);
        update_and_look_ahead(team, blas, plan, factors, a, lda, panel);
    }
    if (team_gather(team)) {
        keep_corner(plan, factors, a, lda);
        team_release(team);
    }
}

/* Joins the reflectors of a group: merges their triangular factors panel by panel and clears what the matrix left above
 * the reflectors. */
static void join_group(const REAL_BLAS *blas, const band_plan *plan, const band_factors *factors, REAL *a, int64_t lda,
                       int64_t group)
{
    const int64_t b = plan->block, column = group * plan->group, first = column + b;
    const int64_t width = tchi_min(plan->group, plan->panels * b - column);
    REAL *t = group_t(plan, factors, group);
    for (int64_t done = b; done < width; done += b) {
        REAL *v1 = a + first + done + column * lda, *v2 = v1 + done * lda;
        clear_block(done, b, v2 - done, lda);
        join_reflectors(blas, plan->n - first - done, done, v1, b, v2, lda, t, plan->group,
                        group_products(plan, factors, group));
        clear_block(b, done, t + done, plan->group);
    }
}

/* Applies to the columns of a strip, from the left, every group that begins below them. */
static void restore_strip(const REAL_BLAS *blas, const band_plan *plan, const band_factors *factors, const REAL *a,
                          int64_t lda, REAL *x, int64_t ldx, int64_t strip)
{
    const int64_t begin = strip_begin(plan, strip), columns = strip_end(plan, strip) - begin;
    for (int64_t group = plan->groups - 1; group >= strip; group--) {
        const block_reflector h = group_reflector(plan, factors, a, lda, group);
        apply_left(blas, 0, plan->n - h.first, h.width, h.v, h.ldv, h.t, h.ldt, columns, x + h.first + begin * ldx, ldx,
                   group_products(plan, factors, strip));
    }
}

static void restore_from_left(work_team *team, const REAL_BLAS *blas, const band_plan *plan,
                              const band_factors *factors, REAL *a, int64_t lda, REAL *x, int64_t ldx)
{
    for (int64_t group; (group = team_next_chunk(team)) < plan->groups;) {
        join_group(blas, plan, factors, a, lda, group);
    }
    team_barrier(team);
    for (int64_t strip; (strip = team_next_chunk(team)) < plan->groups;) {
        restore_strip(blas, plan, factors, a, lda, x, ldx, strip);
    }
    team_barrier(team);
}

static void restore_from_both_sides(work_team *team, const REAL_BLAS *blas, const band_plan *plan,
                                    const band_factors *factors, const REAL *a, int64_t lda, REAL *x, int64_t ldx)
{
    for (int64_t tile; (tile = team_next_chunk(team)) < plan->tiles;) {
        const int64_t begin = tile_begin(plan, tile);
        mirror_square(tile_end(plan, tile) - begin, x + begin * (ldx + 1), ldx);
    }
    team_barrier(team);
    for (int64_t group = plan->groups - 1; group >= 0; group--) {
        const block_reflector h = group_reflector(plan, factors, a, lda, group);
        const int64_t from = tile_of(plan, h.first);
        prepare_two_sided(team, blas, plan, x, ldx, &h, 1, &factors->two_sided);
        for (int64_t i; (i = team_next_chunk(team)) < plan->tiles - from;) {
            update_columns(blas, plan, x, ldx, &h, tchi_max(h.first, tile_begin(plan, from + i)),
                           tile_end(plan, from + i), &factors->two_sided);
        }
        team_barrier(team);
    }
}

/* x <- Q x Q', lower triangles. All left-only work on a column precedes the first two-sided update of it, so it is done
 * first for all columns without synchronization. Called by every thread of the team. */
static void restore_from_band(work_team *team, const REAL_BLAS *blas, const band_plan *plan,
                              const band_factors *factors, REAL *a, int64_t lda, REAL *x, int64_t ldx)
{
    if (plan->groups > 0) {
        restore_from_left(team, blas, plan, factors, a, lda, x, ldx);
        restore_from_both_sides(team, blas, plan, factors, a, lda, x, ldx);
    }
}
