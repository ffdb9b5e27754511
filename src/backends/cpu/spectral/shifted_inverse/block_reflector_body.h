/* Block reflectors H = I - V T V': QR factorization of a panel, and H applied to one side of a matrix or to both sides
 * of a symmetric one. V is stored with its unit diagonal and zeros, so that every use is a plain matrix product. Needs
 * REAL and REAL_BLAS. */

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
    for (int64_t chunk; (chunk = team_next_chunk(team)) * MIRROR_COLUMNS < n;) {
        const int64_t left = chunk * MIRROR_COLUMNS, right = tchi_min(left + MIRROR_COLUMNS, n);
        mirror_square(right - left, x + left * (ldx + 1), ldx);
        for (int64_t i = right; i < n; i++) {
            for (int64_t j = left; j < right; j++) {
                x[j + i * ldx] = x[i + j * ldx];
            }
        }
    }
    team_barrier(team);
}

typedef struct block_reflector {
    int64_t first; /* the first row of the matrix that it touches; it reaches to the last */
    int64_t width;
    const REAL *v;
    int64_t ldv;
    const REAL *t;
    int64_t ldt;
} block_reflector;

/* C <- alpha op(A) op(B) + beta C, column by column. */
static void gemm_columns(const REAL_BLAS *blas, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, REAL alpha,
                         const REAL *a, int64_t lda, const REAL *b, int64_t ldb, REAL beta, REAL *c, int64_t ldc)
{
    blas->gemm(TCHI_COL_MAJOR, trans_a, trans_b, (int)m, (int)n, (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c,
               (int)ldc);
}

/* Four accumulators hide the latency of additions. */
VECTOR_CLONES static void dot_four(int64_t n, const REAL *v, const REAL *p, int64_t ldp, REAL *dots)
{
    const REAL *p0 = p, *p1 = p + ldp, *p2 = p + 2 * ldp, *p3 = p + 3 * ldp;
    REAL s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < n; i++) {
        s0 += v[i] * p0[i];
        s1 += v[i] * p1[i];
        s2 += v[i] * p2[i];
        s3 += v[i] * p3[i];
    }
    dots[0] = s0;
    dots[1] = s1;
    dots[2] = s2;
    dots[3] = s3;
}

VECTOR_CLONES static REAL dot_one(int64_t n, const REAL *v, const REAL *p)
{
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += v[i] * p[i];
    }
    return sum;
}

VECTOR_CLONES static void subtract_multiple(int64_t n, REAL factor, const REAL *restrict v, REAL *restrict p)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        p[i] -= factor * v[i];
    }
}

VECTOR_CLONES static void scale_column(int64_t n, REAL factor, REAL *x)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        x[i] *= factor;
    }
}

static void dot_many(int64_t n, const REAL *v, int64_t count, const REAL *p, int64_t ldp, REAL *dots)
{
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
        dot_four(n, v, p + j * ldp, ldp, dots + j);
    }
    for (; j < count; j++) {
        dots[j] = dot_one(n, v, p + j * ldp);
    }
}

/* The norm, rescaled only if the plain sum of squares left the safe range. */
static REAL norm_of(int64_t n, const REAL *x)
{
    const REAL sum = dot_one(n, x, x);
    if (sum > REAL_SMALLEST / REAL_EPSILON && sum < REAL_LARGEST) {
        return REAL_SQRT(sum);
    }
    REAL largest = 0;
    for (int64_t i = 0; i < n; i++) {
        largest = REAL_ABS(x[i]) > largest ? REAL_ABS(x[i]) : largest;
    }
    if (largest == 0) {
        return 0;
    }
    REAL scaled = 0;
    for (int64_t i = 0; i < n; i++) {
        scaled += (x[i] / largest) * (x[i] / largest);
    }
    return largest * REAL_SQRT(scaled);
}

/* Overwrites x by the reflector's vector (leading 1 included) and returns tau; *head is the remaining entry of H x. A
 * column that is zero below its head gets tau = 0, the identity. */
static REAL make_reflector(int64_t n, REAL *x, REAL *head)
{
    const REAL tail = norm_of(n - 1, x + 1);
    const REAL alpha = x[0];
    x[0] = 1;
    *head = alpha;
    if (tail == 0) {
        return 0;
    }
    const REAL norm = REAL_HYPOT(alpha, tail);
    const REAL beta = alpha > 0 ? -norm : norm;
    if (REAL_ABS(alpha - beta) > 1 / REAL_LARGEST * 4) {
        scale_column(n - 1, 1 / (alpha - beta), x + 1);
    } else {
        for (int64_t i = 1; i < n; i++) {
            x[i] /= alpha - beta;
        }
    }
    *head = beta;
    return (beta - alpha) / beta;
}

enum { LEAF_COLUMNS = 8 };

/* The panel one column at a time. On return p holds V; r (upper triangle) and t are written, zeros included. */
static void factor_leaf(int64_t m, int64_t n, REAL *p, int64_t ldp, REAL *r, int64_t ldr, REAL *t, int64_t ldt)
{
    REAL dots[LEAF_COLUMNS];
    for (int64_t j = 0; j < n; j++) {
        REAL *v = p + j + j * ldp;
        for (int64_t i = 0; i < j; i++) {
            r[i + j * ldr] = p[i + j * ldp];
            p[i + j * ldp] = 0;
        }
        const REAL tau = make_reflector(m - j, v, &r[j + j * ldr]);
        dot_many(m - j, v, j, p + j, ldp, dots);
        for (int64_t i = 0; i < j; i++) {
            REAL sum = 0;
            for (int64_t k = i; k < j; k++) {
                sum += t[i + k * ldt] * dots[k];
            }
            t[i + j * ldt] = -tau * sum;
        }
        t[j + j * ldt] = tau;
        dot_many(m - j, v, n - j - 1, p + j + (j + 1) * ldp, ldp, dots);
        for (int64_t k = j + 1; k < n; k++) {
            subtract_multiple(m - j, tau * dots[k - j - 1], v, p + j + k * ldp);
        }
        for (int64_t i = j + 1; i < n; i++) {
            r[i + j * ldr] = 0;
            t[i + j * ldt] = 0;
        }
    }
}

/* C (rows of V by n) <- H' C or H C, with two panels of width by n for scratch. */
static void apply_left(const REAL_BLAS *blas, int transposed, int64_t m, int64_t width, const REAL *v, int64_t ldv,
                       const REAL *t, int64_t ldt, int64_t n, REAL *c, int64_t ldc, REAL *scratch)
{
    REAL *product = scratch + width * n;
    gemm_columns(blas, TCHI_TRANS, TCHI_NO_TRANS, width, n, m, 1, v, ldv, c, ldc, 0, scratch, width);
    gemm_columns(blas, transposed ? TCHI_TRANS : TCHI_NO_TRANS, TCHI_NO_TRANS, width, n, width, 1, t, ldt, scratch,
                 width, 0, product, width);
    gemm_columns(blas, TCHI_NO_TRANS, TCHI_NO_TRANS, m, n, width, -1, v, ldv, product, width, 1, c, ldc);
}

/* The off-diagonal block of T that joins the reflectors of v1 (n1 columns) with those of v2 (n2 columns), where v2
 * and the given rows of v1 begin at the same row: T12 = -T1 (V1' V2) T2. The scratch holds 2 n1 n2. */
static void join_reflectors(const REAL_BLAS *blas, int64_t m, int64_t n1, const REAL *v1, int64_t n2, const REAL *v2,
                            int64_t ldv, REAL *t, int64_t ldt, REAL *scratch)
{
    REAL *product = scratch + n1 * n2;
    gemm_columns(blas, TCHI_TRANS, TCHI_NO_TRANS, n1, n2, m, 1, v1, ldv, v2, ldv, 0, scratch, n1);
    gemm_columns(blas, TCHI_NO_TRANS, TCHI_NO_TRANS, n1, n2, n1, -1, t, ldt, scratch, n1, 0, product, n1);
    gemm_columns(blas, TCHI_NO_TRANS, TCHI_NO_TRANS, n1, n2, n2, 1, product, n1, t + n1 + n1 * ldt, ldt, 0,
                 t + n1 * ldt, ldt);
}

/* QR of an m by n panel, m >= n: p becomes V, r and t are n by n and fully written. Halves recursively, which leaves
 * only narrow strips to the slow column-wise work. The scratch holds n * n. */
static void factor_panel(const REAL_BLAS *blas, int64_t m, int64_t n, REAL *p, int64_t ldp, REAL *r, int64_t ldr,
                         REAL *t, int64_t ldt, REAL *scratch)
{
    if (n <= LEAF_COLUMNS) {
        factor_leaf(m, n, p, ldp, r, ldr, t, ldt);
        return;
    }
    const int64_t left = n / 2, right = n - left;
    REAL *rest = p + left * ldp;
    factor_panel(blas, m, left, p, ldp, r, ldr, t, ldt, scratch);
    apply_left(blas, 1, m, left, p, ldp, t, ldt, right, rest, ldp, scratch);
    copy_block(left, right, rest, ldp, r + left * ldr, ldr);
    clear_block(left, right, rest, ldp);
    factor_panel(blas, m - left, right, rest + left, ldp, r + left + left * ldr, ldr, t + left + left * ldt, ldt,
                 scratch);
    join_reflectors(blas, m - left, left, p + left, right, rest + left, ldp, t, ldt, scratch);
    clear_block(right, left, r + left, ldr);
    clear_block(right, left, t + left, ldt);
}
