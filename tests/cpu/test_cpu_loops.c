/* The loops of each instruction set of this processor vs the scalar ones. Copies and single roundings must agree
 * bitwise: conversions, |x|, products with one factor, transposes. Sums of n terms have another order and possibly
 * fewer roundings: they differ by at most 2 n u times the sum of absolute values. */
#include "backends/cpu/loops/loops.h"
#include "backends/cpu/update/steps/steps.h"
#include "support/random.h"
#include "support/testing.h"

typedef tchi_cpu_level level;

static const level *plain;

/* --- conversions ------------------------------------------------------------------------------------------------- */

enum { MANY = 1 << 16 };

static const tch_scalar scalars[] = {TCH_SCALAR_F64, TCH_SCALAR_F32, TCH_SCALAR_F16, TCH_SCALAR_BF16};
static const size_t sizes[] = {8, 4, 2, 2};

/* Every half; floats and doubles near the halves and around the ends of the range, NaN with various payloads. */
static void fill_source(int type, void *data)
{
    test_random random = test_random_stream(31);
    for (uint32_t i = 0; i < MANY; i++) {
        uint32_t noise = (uint32_t)(test_random_uniform(&random) * 4294967296.0);
        if (type == 0) {
            uint64_t bits = (uint64_t)i << 48 | (uint64_t)noise << 16;
            double near = ldexp(1.0 + test_random_uniform(&random), (int)(i % 64) - 32);
            memcpy((double *)data + i, i % 2 == 0 ? (void *)&bits : (void *)&near, sizeof near);
        } else if (type == 1) {
            uint32_t cut = i % 4 == 0 ? 0x1000u : i % 4 == 1 ? noise & 0x1FFFu : i % 4 == 2 ? 0xFFFu : noise;
            uint32_t bits = (i % 8 < 4 ? i << 16 : (0x33000000u + (i << 13)) | (noise & 0x80000000u)) ^ cut;
            memcpy((float *)data + i, &bits, sizeof bits);
        } else {
            ((uint16_t *)data)[i] = (uint16_t)i;
        }
    }
}

static void check_conversions(const level *l)
{
    void *source = test_alloc(MANY * 8), *one = test_alloc(MANY * 8), *other = test_alloc(MANY * 8);
    for (int from = 0; from < 4; from++) {
        fill_source(from, source);
        for (int to = 0; to < 4; to++) {
            tchi_convert_run reference = plain->conversions->run[scalars[to]][scalars[from]];
            tchi_convert_run run = l->conversions->run[scalars[to]][scalars[from]];
            assert_true((run == NULL) == (reference == NULL));
            for (int64_t n = MANY - 13; run != NULL && n <= MANY; n += 13) { /* with and without a remainder */
                reference(n, source, one);
                run(n, source, other);
                for (int64_t i = 0; i < n; i++) {
                    size_t at = (size_t)i * sizes[to];
                    CHECK(memcmp((char *)one + at, (char *)other + at, sizes[to]) == 0,
                          "number %lld differs, from type %d to %d", (long long)i, from, to);
                }
            }
        }
    }
}

/* --- loops ------------------------------------------------------------------------------------------------------- */

enum { MOST = 300 };

/* An array in the precision of `which`, and its values as doubles. */
typedef struct run {
    float f32[MOST];
    double f64[MOST];
} run;

static const void *data_of(const run *r, int which)
{
    return which == 0 ? (const void *)r->f32 : (const void *)r->f64;
}

static void fill_run(test_random *random, int which, run *r)
{
    for (int i = 0; i < MOST; i++) {
        r->f32[i] = (float)test_random_normal(random);
        r->f64[i] = which == 0 ? (double)r->f32[i] : test_random_normal(random);
    }
}

static void check_sums(const level *l, int which, int64_t n, const run *x, const double *y)
{
    double size = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        size += fabs(x->f64[i] * y[i]);
        squares += 9.0 * x->f64[i] * x->f64[i];
    }
    double unit = 2.0 * (double)(n + 2) * 0x1p-53;
    double got = l->loops[which]->dot(n, data_of(x, which), y);
    double expected = plain->loops[which]->dot(n, data_of(x, which), y);
    CHECK(fabs(got - expected) <= unit * size, "the sum of %lld products is off by %.3g", (long long)n, got - expected);
    got = l->loops[which]->sum_squares(n, 3.0, data_of(x, which));
    expected = plain->loops[which]->sum_squares(n, 3.0, data_of(x, which));
    CHECK(fabs(got - expected) <= unit * squares, "the sum of %lld squares is off by %.3g", (long long)n,
          got - expected);
}

/* Infinities and NaN of both kinds, anywhere: NaN are skipped. */
static void check_largest(const level *l, int which, int64_t n, const run *x)
{
    run y = *x;
    const uint32_t odd[] = {0x7FA00000u, 0xFFC00000u, 0xFF800000u};
    const uint64_t odd_doubles[] = {0x7FF4000000000000u, 0xFFF8000000000000u, 0xFFF0000000000000u};
    for (int k = 0; k < 4; k++) {
        double got = l->loops[which]->max_abs(n, data_of(&y, which));
        double expected = plain->loops[which]->max_abs(n, data_of(&y, which));
        CHECK(got == expected, "the largest of %lld is %g, not %g", (long long)n, got, expected);
        if (k < 3 && n > 0) {
            int64_t at = (k + 1) * 7919 % n;
            memcpy(&y.f32[at], &odd[k], sizeof odd[k]);
            memcpy(&y.f64[at], &odd_doubles[k], sizeof odd_doubles[k]);
        }
    }
}

static void check_kronecker(const level *l, int which, int64_t n, const run *x, const run *y)
{
    double one[3 * MOST + 1] = {0}, other[3 * MOST + 1] = {0};
    plain->loops[which]->kronecker(3, data_of(x, which), n, data_of(y, which), one);
    l->loops[which]->kronecker(3, data_of(x, which), n, data_of(y, which), other);
    CHECK(memcmp(one, other, sizeof one) == 0, "a row of 3 by %lld products differs", (long long)n);
}

/* Out of place, and in place. */
static void check_scale(const level *l, int which, int64_t n, const run *x)
{
    double one[MOST + 1] = {0}, other[MOST + 1] = {0};
    size_t bytes = (which == 0 ? sizeof(float) : sizeof(double)) * (size_t)n;
    plain->loops[which]->scale(n, 0.3, data_of(x, which), one);
    l->loops[which]->scale(n, 0.3, data_of(x, which), other);
    CHECK(memcmp(one, other, sizeof one) == 0, "%lld numbers times one differ", (long long)n);
    memcpy(other, data_of(x, which), bytes);
    l->loops[which]->scale(n, 0.3, other, other);
    CHECK(memcmp(one, other, bytes) == 0, "%lld numbers times one differ in place", (long long)n);
}

static void check_loops(const level *l)
{
    test_random random = test_random_stream(32);
    run x, y;
    for (int which = 0; which < 2; which++) {
        for (int64_t n = 0; n < MOST; n += n < 40 ? 1 : 23) {
            fill_run(&random, which, &x);
            fill_run(&random, which, &y);
            check_sums(l, which, n, &x, y.f64);
            check_largest(l, which, n, &x);
            check_kronecker(l, which, n, &x, &y);
            check_scale(l, which, n, &x);
        }
    }
}

static void check_transposes(const level *l)
{
    enum { LD = 20, CELLS = LD * LD };
    double x[CELLS], one[CELLS], other[CELLS];
    for (int i = 0; i < CELLS; i++) {
        x[i] = i + 1.0;
    }
    for (int which = 0; which < 2; which++) {
        for (int64_t rows = 0; rows < 14; rows++) {
            for (int64_t cols = 0; cols < 14; cols++) {
                memset(one, 0, sizeof one);
                memset(other, 0, sizeof other);
                plain->steps[which]->transpose(rows, cols, x, LD, one, LD - 1);
                l->steps[which]->transpose(rows, cols, x, LD, other, LD - 1);
                CHECK(memcmp(one, other, sizeof one) == 0, "the transpose of %d by %d differs", (int)rows, (int)cols);
            }
        }
    }
}

/* --- thin products ----------------------------------------------------------------------------------------------- */

enum { GAP = 5 }; /* between rows */

static float *random_floats(test_random *random, int64_t count)
{
    float *values = test_alloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++) {
        values[i] = (float)test_random_normal(random);
    }
    return values;
}

/* Each element vs its sum in double: |error| <= (terms + 2) u |alpha| sum |a b|. Gaps in C are unchanged, and operands
 * end at their allocation's end, so that a sanitizer detects reads beyond. */
static void check_thin(const tchi_thin_product *thin, test_random *random, int64_t terms, int64_t rows, int64_t cols)
{
    const float alpha = 0.3f, untouched = 77.0f;
    tchi_thin_ctx job = {.inner = terms, .rows = rows, .cols = cols, .alpha = alpha};
    job.lda = rows + GAP, job.ldb = cols + GAP, job.ldc = cols + GAP;
    float *a = random_floats(random, (terms - 1) * job.lda + rows);
    float *b = random_floats(random, (terms - 1) * job.ldb + cols);
    float *c = test_alloc((size_t)((rows + 1) * job.ldc) * sizeof *c);
    for (int64_t i = 0; i < (rows + 1) * job.ldc; i++) {
        c[i] = untouched;
    }
    job.a = a, job.b = b, job.c = c;
    thin->run(&job);
    for (int64_t i = 0; i < (rows + 1) * job.ldc; i++) {
        int64_t row = i / job.ldc, col = i % job.ldc;
        int inside = row < rows && col < cols;
        double sum = 0, size = 0;
        for (int64_t t = 0; t < terms && inside; t++) {
            double product = (double)a[t * job.lda + row] * (double)b[t * job.ldb + col];
            sum += product;
            size += fabs(product);
        }
        double error = fabs((double)c[i] - (inside ? (double)alpha * sum : (double)untouched));
        CHECK(error <= (double)(terms + 2) * 0x1p-24 * (double)alpha * size,
              "element (%d, %d) of %d by %d with %d terms is off by %.3g", (int)row, (int)col, (int)rows, (int)cols,
              (int)terms, error);
    }
}

static void check_thin_products(const level *l)
{
    static const int64_t shapes[][2] = {{4, 16},  {5, 17},   {8, 32},  {9, 40},   {12, 63},
                                        {15, 64}, {23, 100}, {8, 600}, {9, 1100}, {5, 4100}};
    static const int64_t terms[] = {1, 2, 7, 8, 9, 33, 64, 65, 256, 257, 300};
    if (l->thin_product == NULL) {
        return;
    }
    test_random random = test_random_stream(33);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (size_t t = 0; t < sizeof terms / sizeof *terms; t++) {
            int fits =
                terms[t] <= l->thin_product->one_pass || shapes[s][0] * shapes[s][1] <= l->thin_product->most_elements;
            if (fits && shapes[s][0] >= l->thin_product->rows && shapes[s][1] >= l->thin_product->cols) {
                check_thin(l->thin_product, &random, terms[t], shapes[s][0], shapes[s][1]);
            }
        }
    }
}

TEST(every_level)
{
    const level *l = tchi_cpu_levels;
    for (; strcmp(l->name, "plain") != 0; l++) {
    }
    plain = l;
    for (l = tchi_cpu_levels; l != plain; l++) {
        if (l->is_usable()) {
            test_case("%s", l->name);
            check_conversions(l);
            check_loops(l);
            check_transposes(l);
            check_thin_products(l);
        }
    }
}

int main(void)
{
    return test_run(__FILE__, NULL, NULL);
}
