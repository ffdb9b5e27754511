/* Small movements of matrices, column by column. Needs REAL, band_plan.h and work_team.h. */

static void copy_block(int64_t m, int64_t n, const REAL *from, int64_t ld_from, REAL *to, int64_t ld_to)
{
    for (int64_t j = 0; j < n; j++) {
        memcpy(to + j * ld_to, from + j * ld_from, (size_t)m * sizeof *to);
    }
}

static void clear_block(int64_t m, int64_t n, REAL *a, int64_t lda)
{
    for (int64_t j = 0; j < n; j++) {
        memset(a + j * lda, 0, (size_t)m * sizeof *a);
    }
}

/* Copies the lower triangle of a square onto its upper one. */
static void mirror_square(int64_t n, REAL *x, int64_t ldx)
{
    for (int64_t i = 1; i < n; i++) {
        for (int64_t j = 0; j < i; j++) {
            x[j + i * ldx] = x[i + j * ldx];
        }
    }
}

/* Columns per chunk of work: narrow enough for the strided side to stay in the cache. */
enum { MIRROR_COLUMNS = 32 };

/* The same for a whole matrix. Called by every thread of the team. */
static void mirror_lower(work_team *team, int64_t n, REAL *x, int64_t ldx)
{
    for (int64_t chunk; (chunk = team_take(team)) * MIRROR_COLUMNS < n;) {
        const int64_t left = chunk * MIRROR_COLUMNS, right = tchi_min(left + MIRROR_COLUMNS, n);
        mirror_square(right - left, x + left * (ldx + 1), ldx);
        for (int64_t i = right; i < n; i++) {
            for (int64_t j = left; j < right; j++) {
                x[j + i * ldx] = x[i + j * ldx];
            }
        }
    }
    team_meet(team);
}
