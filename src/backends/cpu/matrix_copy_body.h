/* Small movements of matrices, column by column. Needs REAL and band_plan.h. */

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

enum { MIRROR_TILE = 32 };

/* The same for a large matrix, by squares, so that the strided side stays in the cache. */
static void mirror_lower(int64_t n, REAL *x, int64_t ldx)
{
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t left = 0; left < n; left += MIRROR_TILE) {
        const int64_t right = min_i64(left + MIRROR_TILE, n);
        mirror_square(right - left, x + left * (ldx + 1), ldx);
        for (int64_t i = right; i < n; i++) {
            for (int64_t j = left; j < right; j++) {
                x[j + i * ldx] = x[i + j * ldx];
            }
        }
    }
}
