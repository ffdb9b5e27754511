/* Two-sided products through the operation table: L X R' with roots or bases, and L' X R with bases, of operands that a
 * device may round to 11 bits.
 *
 * Random elements must be the float64 sums up to that rounding, also for very large or small X or roots; norms are
 * those of the output; nothing outside the matrices is written; and results are bitwise identical for any division of a
 * batch of large matrices, and whether or not the largest elements are known. */
#include "support/backend/device_matrices.h"
#include "support/random.h"
#include "support/testing.h"

typedef struct sides_case {
    int64_t rows, cols, batch;
    int64_t gap;      /* between rows of X */
    double magnitude; /* of X's elements */
    double root;      /* of roots */
} sides_case;

/* The first sizes are for an emulated GPU: partial tiles, odd and even numbers of k-tiles. Sides that are not multiples
 * of 8, small sides and unaligned rows use another algorithm. */
static const sides_case cases[] = {
    {264, 320, 2, 0, 1.0, 1.0},   {320, 264, 1, 8, 1e-20, 1e6},  {300, 264, 1, 0, 1.0, 1.0},
    {17, 40, 2, 3, 1.0, 1.0},     {256, 256, 1, 0, 1e14, 1e-22}, {256, 264, 1, 0, 1e-25, 1e22},
    {1024, 520, 3, 0, 1e17, 1.0}, {768, 3072, 2, 0, 1.0, 1e3},   {2304, 768, 2, 4, 1.0, 1.0},
    {1000, 1000, 7, 1, 1.0, 1.0}, {256, 256, 40, 0, 1.0, 1.0},
};
enum { CASES = sizeof cases / sizeof cases[0], EMULATED = 6, SAMPLES = 20 };

/* --- sides ------------------------------------------------------------------------------------------------------- */

/* Diagonal plus rank one, both positive. */
static void fill_roots(const batch *b, double magnitude, test_random *random)
{
    double *a = test_alloc((size_t)b->m.rows * sizeof *a);
    for (int64_t z = 0; z < b->m.batch; z++) {
        for (int64_t i = 0; i < b->m.rows; i++) {
            a[i] = test_random_normal(random);
        }
        for (int64_t i = 0; i < b->m.rows; i++) {
            for (int64_t j = 0; j < b->m.rows; j++) {
                double on = i == j ? 0.1 + a[i] * a[i] : 0.0;
                batch_put(b, z, i, j, magnitude * (0.5 * a[i] * a[j] + on));
            }
        }
    }
}

/* A product of two reflections: orthogonal, and not symmetric. */
static void fill_bases(const batch *b, test_random *random)
{
    int64_t n = b->m.rows;
    double *u = test_alloc((size_t)n * sizeof *u);
    double *v = test_alloc((size_t)n * sizeof *v);
    for (int64_t z = 0; z < b->m.batch; z++) {
        double uu = 0.0, vv = 0.0, uv = 0.0;
        for (int64_t i = 0; i < n; i++) {
            u[i] = test_random_normal(random);
            v[i] = test_random_normal(random) + 0.5 * u[i];
            uu += u[i] * u[i];
            vv += v[i] * v[i];
            uv += u[i] * v[i];
        }
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < n; j++) {
                double q = (i == j ? 1.0 : 0.0) - 2.0 * u[i] * u[j] / uu - 2.0 * v[i] * v[j] / vv +
                           4.0 * uv * u[i] * v[j] / (uu * vv);
                batch_put(b, z, i, j, q);
            }
        }
    }
}

static void fill_side(const batch *b, tch_sides sides, double magnitude, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    if (sides == TCH_SIDES_ROOTS) {
        fill_roots(b, magnitude, &random);
    } else {
        fill_bases(b, &random);
    }
}

/* --- what must hold ---------------------------------------------------------------------------------------------- */

typedef struct problem {
    tch_sides sides;
    batch side[2], x, other;
    void *norms;
} problem;

static double side_at(const problem *p, int which, int64_t z, int64_t i, int64_t k)
{
    const batch *b = &p->side[which];
    return p->sides == TCH_SIDES_OUT_OF_BASES ? batch_get(b, b->image, z, k, i) : batch_get(b, b->image, z, i, k);
}

/* Row i of op(L) X, and of the same with squares. */
static void row_of(const problem *p, int64_t z, int64_t i, double *row, double *squares)
{
    memset(row, 0, (size_t)p->x.m.cols * sizeof *row);
    memset(squares, 0, (size_t)p->x.m.cols * sizeof *squares);
    for (int64_t k = 0; k < p->x.m.rows; k++) {
        double l = side_at(p, 0, z, i, k);
        const float *x = batch_element(&p->x, p->x.image, z, k, 0);
        for (int64_t j = 0; j < p->x.m.cols; j++) {
            row[j] += l * x[j];
            squares[j] += l * x[j] * l * x[j];
        }
    }
}

/* Rounding errors are independent: a sum's error is about the root of its terms' squares, times 2^-11; with truncated
 * operands 2^-10 of the sum for each of three. */
static void check_row(const problem *p, const float *after, int64_t z, int64_t i, test_random *random)
{
    double *row = test_alloc((size_t)p->x.m.cols * sizeof *row);
    double *squares = test_alloc((size_t)p->x.m.cols * sizeof *squares);
    row_of(p, z, i, row, squares);
    for (int s = 0; s < SAMPLES; s++) {
        int64_t j = (int64_t)((double)p->x.m.cols * test_random_uniform(random));
        double expected = 0.0, size = 0.0;
        for (int64_t k = 0; k < p->x.m.cols; k++) {
            double r = side_at(p, 1, z, j, k);
            expected += row[k] * r;
            size += squares[k] * r * r;
        }
        double most = 8.0 * 0x1p-11 * (sqrt(size) + fabs(expected));
        double got = batch_get(&p->x, after, z, i, j);
        CHECK(fabs(got - expected) <= most, "matrix %lld, (%lld, %lld): %.9g, expected %.9g, off by at most %.3g",
              (long long)z, (long long)i, (long long)j, got, expected, most);
    }
}

static void check_result(tch_context *context, const problem *p, const float *after)
{
    test_random random = test_random_stream(78);
    double *norms = device_fetch(context, p->norms, p->x.m.batch * (int64_t)sizeof *norms);
    for (int64_t z = 0; z < p->x.m.batch; z++) {
        double sum = 0.0;
        for (int64_t e = 0; e < p->x.m.rows * p->x.m.cols; e++) {
            double x = batch_get(&p->x, after, z, e / p->x.m.cols, e % p->x.m.cols);
            sum += x * x;
        }
        CHECK(fabs(norms[z] - sqrt(sum)) <= 1e-6 * sqrt(sum), "norm of matrix %lld: %.9g, expected %.9g", (long long)z,
              norms[z], sqrt(sum));
        for (int s = 0; s < SAMPLES; s++) {
            check_row(p, after, z, (int64_t)((double)p->x.m.rows * test_random_uniform(&random)), &random);
        }
    }
}

/* --- running cases ----------------------------------------------------------------------------------------------- */

static tch_matrices part_of(const tch_matrices *m, int64_t first, int64_t count)
{
    tch_matrices part = *m;
    part.data = (char *)m->data + first * m->stride * (int64_t)sizeof(float);
    part.batch = count;
    return part;
}

static void multiply_both_sides(tch_context *context, const problem *p, const uint32_t *largest, int64_t first,
                                int64_t count)
{
    const tch_matrices left = part_of(&p->side[0].m, first, count);
    const tch_matrices right = part_of(&p->side[1].m, first, count);
    const tch_matrices x = part_of(&p->x.m, first, count);
    tch_matrices between = part_of(&p->other.m, first, count);
    const tch_preconditioner both = {.sides = p->sides, .left = &left, .right = &right, .rounded = 1};
    const tch_blocks blocks = {x, largest != NULL ? largest + first : NULL};
    CHECK_OK(context->backend->update->precondition(context->state, &both, &blocks, between.data, &x,
                                                    (double *)p->norms + first));
}

/* Again, one matrix at a time and with the largest elements known: for sizes and rows not left to libraries, which
 * choose by the batch. */
static void check_division(tch_context *context, const problem *p, const float *after)
{
    const tch_matrices *x = &p->x.m;
    if (x->rows < 256 || x->cols < 256 || x->rows % 8 != 0 || x->cols % 8 != 0 || x->ld % 4 != 0) {
        return;
    }
    batch_send(context, &p->x);
    void *largest = batch_largest(context, &p->x);
    for (int64_t z = 0; z < p->x.m.batch; z++) {
        multiply_both_sides(context, p, largest, z, 1);
    }
    float *again = batch_fetch(context, &p->x);
    CHECK(memcmp(after, again, (size_t)p->x.bytes) == 0, "other bits one by one");
}

static void check_case(tch_context *context, const sides_case *c, tch_sides sides, uint64_t stream)
{
    problem p = {.sides = sides};
    const int64_t norm_bytes = c->batch * (int64_t)sizeof(double);
    const tch_scalar type = TCH_SCALAR_F32;
    test_case("%lld x %lld x %lld, sides %d, of size %g, roots of %g", (long long)c->batch, (long long)c->rows,
              (long long)c->cols, (int)sides, c->magnitude, c->root);
    p.side[0] = batch_make(context, type, c->batch, c->rows, c->rows, 0);
    p.side[1] = batch_make(context, type, c->batch, c->cols, c->cols, c->gap);
    p.x = batch_make(context, type, c->batch, c->rows, c->cols, c->gap);
    p.other = batch_make(context, type, c->batch, c->rows, c->cols, c->gap);
    p.norms = device_poison(context, norm_bytes);
    fill_side(&p.side[0], sides, c->root, stream);
    fill_side(&p.side[1], sides, c->root, stream + 1);
    batch_fill(&p.x, c->magnitude, stream + 2);
    const batch *all[] = {&p.side[0], &p.side[1], &p.x, &p.other};
    for (int i = 0; i < 3; i++) {
        batch_send(context, all[i]);
    }
    multiply_both_sides(context, &p, NULL, 0, c->batch);
    float *after = batch_fetch(context, &p.x);
    batch_check_guards(&p.x, after);
    check_result(context, &p, after);
    float *other = batch_fetch(context, &p.other);
    for (int64_t e = 0; e < GUARD; e++) {
        CHECK(isnan(other[e]) && isnan(other[p.other.bytes / 4 - 1 - e]), "element %lld beside the other buffer",
              (long long)e);
    }
    check_division(context, &p, after);
}

TEST(both_sides_multiply)
{
    bool small = device_is_emulated() || test_on_cpu();
    for (int i = 0; i < (small ? (int)EMULATED : (int)CASES); i++) {
        for (int sides = TCH_SIDES_ROOTS; sides <= TCH_SIDES_OUT_OF_BASES; sides++) {
            check_case(*state, &cases[i], (tch_sides)sides, 7900 + 10 * (uint64_t)i + 3 * (uint64_t)sides);
        }
    }
}

/* --- factors of whitened blocks ---------------------------------------------------------------------------------- */

/* The first sizes are for an emulated GPU; 300 is not a multiple of 8. */
static const sides_case whitened_cases[] = {
    {264, 320, 2, 0, 1.0, 1.0},    {320, 264, 1, 8, 1e-20, 1e15}, {300, 264, 1, 0, 1.0, 1.0},
    {17, 40, 2, 3, 1.0, 1.0},      {256, 264, 1, 0, 1e14, 1e-12}, {1024, 768, 3, 0, 1.0, 1e3},
    {768, 3072, 2, 8, 1e-10, 1.0},
};
enum { WHITENED = sizeof whitened_cases / sizeof whitened_cases[0], WHITENED_EMULATED = 5 };

typedef struct whitening {
    batch a, root, factor;
    bool rows; /* the factor of rows: A X, else X A */
    double scale, weight[2];
} whitening;

static double entry_of(const whitening *w, int64_t z, int64_t i, int64_t k)
{
    return w->rows ? batch_get(&w->a, w->a.image, z, i, k) : batch_get(&w->a, w->a.image, z, k, i);
}

/* Row i of scale A X, or column i of scale X A; returns what its rounding errors are relative to. */
static double whitened_row(const whitening *w, int64_t z, int64_t i, double *row)
{
    int64_t n = w->root.m.rows;
    double total = 0.0;
    for (int64_t j = 0; j < n; j++) {
        double squares = 0.0;
        row[j] = 0.0;
        for (int64_t k = 0; k < n; k++) {
            double product = w->scale * entry_of(w, z, i, k) * batch_get(&w->root, w->root.image, z, k, j);
            row[j] += product;
            squares += product * product;
        }
        total += squares + row[j] * row[j];
    }
    return sqrt(total);
}

static double dot(int64_t n, const double *x, const double *y)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

static void check_whitened(const whitening *w, const float *after)
{
    test_random random = test_random_stream(79);
    const int64_t n = w->root.m.rows, side = w->factor.m.rows;
    double *x = test_alloc((size_t)n * sizeof *x), *y = test_alloc((size_t)n * sizeof *y);
    for (int64_t s = 0; s < SAMPLES * w->factor.m.batch; s++) {
        int64_t z = s / SAMPLES, i = (int64_t)((double)side * test_random_uniform(&random));
        int64_t j = s % 4 == 0 ? i : (int64_t)((double)side * test_random_uniform(&random));
        double of_x = whitened_row(w, z, i, x), of_y = whitened_row(w, z, j, y);
        double old = w->weight[1] * batch_get(&w->factor, w->factor.image, z, i, j);
        double expected = w->weight[0] * dot(n, x, y) + old;
        double most = 8.0 * 0x1p-11 * w->weight[0] * (of_x * sqrt(dot(n, y, y)) + sqrt(dot(n, x, x)) * of_y) +
                      0x1p-22 * fabs(old);
        double got = batch_get(&w->factor, after, z, i, j);
        CHECK(fabs(got - expected) <= most, "matrix %lld, (%lld, %lld): %.9g, expected %.9g, off by at most %.3g",
              (long long)z, (long long)i, (long long)j, got, expected, most);
    }
}

/* The same blocks as `gather` leaves them where it chooses float16. */
static tch_matrices in_fp16(tch_context *context, const batch *a)
{
    batch copy = batch_make(context, TCH_SCALAR_F16, a->m.batch, a->m.rows, a->m.cols, a->m.ld - a->m.cols);
    for (int64_t z = 0; z < a->m.batch; z++) {
        double largest = 0.0;
        for (int64_t e = 0; e < a->m.rows * a->m.cols; e++) {
            largest = fmax(largest, fabs(batch_get(a, a->image, z, e / a->m.cols, e % a->m.cols)));
        }
        for (int64_t e = 0; e < a->m.rows * a->m.cols; e++) {
            int64_t i = e / a->m.cols, j = e % a->m.cols;
            batch_put(&copy, z, i, j, ldexp(batch_get(a, a->image, z, i, j), 14 - ilogb(largest)));
        }
    }
    batch_send(context, &copy);
    return copy.m;
}

static void check_whitening(tch_context *context, const sides_case *c, bool rows, bool fp16, uint64_t stream)
{
    size_t mark = test_mark();
    const int64_t side = rows ? c->rows : c->cols, other = rows ? c->cols : c->rows;
    whitening w = {.rows = rows, .scale = 1.0 / sqrt((double)other), .weight = {0.25, 0.75}};
    const tch_clock clock = {.factor = {0.25, 0.75}, .factor_f32 = {0.25F, 0.75F}};
    test_case("%lld x %lld x %lld, rows %d, float16 %d, of size %g, roots of %g", (long long)c->batch,
              (long long)c->rows, (long long)c->cols, rows, fp16, c->magnitude, c->root);
    w.a = batch_make(context, TCH_SCALAR_F32, c->batch, c->rows, c->cols, c->gap);
    w.root = batch_make(context, TCH_SCALAR_F32, c->batch, other, other, 0);
    w.factor = batch_make(context, TCH_SCALAR_F32, c->batch, side, side, 0);
    batch_fill(&w.a, c->magnitude, stream);
    fill_side(&w.root, TCH_SIDES_ROOTS, c->root, stream + 1);
    fill_side(&w.factor, TCH_SIDES_ROOTS, c->magnitude * c->magnitude * c->root * c->root, stream + 2);
    batch_send(context, &w.a);
    batch_send(context, &w.root);
    batch_send(context, &w.factor);
    const tch_blocks blocks = {fp16 ? in_fp16(context, &w.a) : w.a.m, fp16 ? batch_largest(context, &w.a) : NULL};
    const tch_factor_update how = {
        .clock = device_copy(context, &clock, sizeof clock),
        .rows = rows ? &w.factor.m : NULL,
        .columns = rows ? NULL : &w.factor.m,
        .rounded = 1,
        .root = &w.root.m,
        .scale = w.scale,
        .product = device_poison(context, c->batch * w.a.m.stride * (int64_t)sizeof(float)),
    };
    CHECK_OK(context->backend->update->update_factors(context->state, &blocks, &how));
    float *after = batch_fetch(context, &w.factor);
    batch_check_guards(&w.factor, after);
    check_whitened(&w, after);
    test_release_since(mark);
}

static bool has_fp16_blocks(tch_context *context, const sides_case *c)
{
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    CHECK_OK(context->backend->device->info(0, &info));
    return !test_on_cpu() && info.compute_major == 9 && c->rows >= 256 && c->cols >= 256 && c->rows % 8 == 0 &&
           c->cols % 8 == 0;
}

TEST(factors_of_whitened_blocks)
{
    bool small = device_is_emulated() || test_on_cpu();
    for (int i = 0; i < (small ? (int)WHITENED_EMULATED : (int)WHITENED); i++) {
        for (int k = 0; k < (has_fp16_blocks(*state, &whitened_cases[i]) ? 4 : 2); k++) {
            check_whitening(*state, &whitened_cases[i], k % 2 == 0, k >= 2, 8800 + 10 * (uint64_t)i);
        }
    }
}

TEST_MAIN(test_open_context, test_close_context)
