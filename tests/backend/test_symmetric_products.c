/* Symmetric products of large batches, through the operation table: with and without polynomial terms, and Gram
 * matrices, in sizes with specialized kernels. In bfloat16 and split bfloat16 if the device supports them, else in
 * float32.
 *
 * One random element of every 16 by 16 block must be the float64 sum of products up to the rounding of the arithmetic
 * and of the result; the result is bitwise symmetric; nothing outside the matrices is written, including gaps between
 * rows; and repeated calls are bitwise identical, a hundred times if the device is busy with large ones. The same holds
 * for the products of large orthogonalizations, with a scale per matrix and in float16 as well, on devices that support
 * them. */
#include "linalg/algebra.h"
#include "support/backend/device_matrices.h"
#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

/* --- batches on the device --------------------------------------------------------------------------------------- */

/* The device's fastest type. */
static tch_scalar fastest_type(tch_context *context)
{
    return tchi_product_rates(context).bf16 > 0.0 ? TCH_SCALAR_BF16 : TCH_SCALAR_F32;
}

/* Random numbers; a symmetric batch mirrors its lower triangle. */
static void fill_uniform(tch_context *context, const batch *b, bool symmetric, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    for (int64_t row = 0; row < b->m.batch * b->m.rows; row++) {
        int64_t z = row / b->m.rows;
        int64_t i = row % b->m.rows;
        for (int64_t j = 0; j < (symmetric ? i + 1 : b->m.cols); j++) {
            double number = 2.0 * test_random_uniform(&random) - 1.0;
            batch_put(b, z, i, j, number);
            if (symmetric && j < i) {
                batch_put(b, z, j, i, number);
            }
        }
    }
    batch_send(context, b);
}

static batch random_batch(tch_context *context, tch_scalar type, int64_t count, int64_t rows, int64_t cols, int64_t gap,
                          bool symmetric, uint64_t stream)
{
    batch b = batch_make(context, type, count, rows, cols, gap);
    fill_uniform(context, &b, symmetric, stream);
    return b;
}

/* Symmetric matrices of which only the first three are drawn: random numbers for a large batch take longer than all its
 * products. */
static batch repeated_batch(tch_context *context, tch_scalar type, int64_t count, int64_t n, uint64_t stream)
{
    batch all = batch_make(context, type, count, n, n, 0);
    batch few = all;
    int64_t bytes = all.planes * all.m.stride * (int64_t)tch_dtype_size(all.dtype);
    few.m.batch = 3;
    fill_uniform(context, &few, true, stream);
    for (int64_t z = few.m.batch; z < count; z++) {
        memcpy(batch_element(&all, all.image, z * all.planes, 0, 0),
               batch_element(&all, all.image, z % 3 * all.planes, 0, 0), (size_t)bytes);
    }
    batch_send(context, &all);
    return all;
}

/* --- the checks -------------------------------------------------------------------------------------------------- */

/* C = c0 I + c1 D + c2 A B'; in a symmetric product B is its own transpose. Optionally times a power of a scale per
 * matrix. */
typedef struct half {
    double c0, c1, c2;
    const batch *a, *b, *d;     /* d may be NULL */
    const double *left, *right; /* the values of A and B */
    batch c;
    const double *scale; /* on the host, and on the device; NULL for 1 */
    double *scale_there;
    int32_t exponent;
} half;

static double value(const batch *b, int64_t z, int64_t i, int64_t j)
{
    return batch_get(b, b->image, z, i, j);
}

/* All values, row by row: decoding them in each sum takes most of the time of large batches. */
static double *values_of(const batch *b)
{
    double *values = test_alloc((size_t)(b->m.batch * b->m.rows * b->m.cols) * sizeof *values);
    for (int64_t row = 0; row < b->m.batch * b->m.rows; row++) {
        for (int64_t j = 0; j < b->m.cols; j++) {
            values[row * b->m.cols + j] = value(b, row / b->m.rows, row % b->m.rows, j);
        }
    }
    return values;
}

static void check_element(const half *h, const void *got, int64_t z, int64_t i, int64_t j)
{
    int64_t k = h->a->m.cols, n = h->c.m.rows;
    const double *row = h->left + (z * n + i) * k, *other = h->right + (z * n + j) * k;
    double sum = 0.0, magnitude = 0.0;
    for (int64_t l = 0; l < k; l++) {
        double product = row[l] * other[l];
        sum += product;
        magnitude += fabs(product);
    }
    double addend = h->d != NULL ? h->c1 * value(h->d, z, i, j) : 0.0;
    double shift = i == j ? h->c0 : 0.0;
    double factor = h->scale != NULL ? pow(h->scale[z], h->exponent) : 1.0;
    double expected = factor * (h->c2 * sum + addend + shift);
    double scale = fabs(factor) * (fabs(h->c2) * magnitude + fabs(addend) + fabs(shift));
    /* Without a fused kernel the product is rounded, and again with the other terms. Products of two low parts are
     * omitted. */
    double rounded = fabs(expected) + (addend != 0.0 || shift != 0.0 ? fabs(factor * h->c2 * sum) : 0.0);
    double unit = h->c.planes == 2 ? 0x1p-17 : test_unit_roundoff(h->c.dtype);
    double left_out = h->a->planes == 2 ? 0x1p-18 * scale : 0.0;
    double coarse = fmax(test_arithmetic_roundoff(h->a->dtype), h->c.dtype.bits == 32 ? 0x1p-24 : 0.0);
    double bound = (double)(k + 4) * coarse * scale + unit * rounded + left_out + test_underflow(h->c.dtype);
    double found = batch_get(&h->c, got, z, i, j);
    CHECK(fabs(found - expected) <= bound,
          "element (%lld, %lld) of matrix %lld is %.9g, expected %.9g, off by %.2g > %.2g", (long long)i, (long long)j,
          (long long)z, found, expected, fabs(found - expected), bound);
}

/* One element of every 16 by 16 block; those above the diagonal mirror another. */
static void check_blocks(const half *h, const void *got, uint64_t stream)
{
    int64_t n = h->c.m.rows;
    test_random random = test_random_stream(stream);
    for (int64_t z = 0; z < h->c.m.batch; z++) {
        for (int64_t row = 0; row < n; row += 16) {
            for (int64_t col = 0; col <= row; col += 16) {
                uint64_t bits = test_random_bits(&random);
                int64_t i = row + (int64_t)(bits % 16);
                int64_t j = col + (int64_t)(bits / 16 % 16);
                if (i < n && j <= i) {
                    check_element(h, got, z, i, j);
                }
            }
        }
    }
}

static void check_mirror(const half *h, void *got)
{
    size_t size = tch_dtype_size(h->c.dtype);
    int64_t n = h->c.m.rows, ld = h->c.m.ld;
    for (int64_t row = 0; row < h->c.m.batch * h->c.planes * n; row++) {
        int64_t plane = row / n, i = row % n;
        const char *left = batch_element(&h->c, got, plane, i, 0), *above = batch_element(&h->c, got, plane, 0, i);
        for (int64_t j = 0; j < i; j++) {
            CHECK(memcmp(left + (size_t)j * size, above + (size_t)(j * ld) * size, size) == 0,
                  "(%lld, %lld) of plane %lld is not its mirror image", (long long)i, (long long)j, (long long)plane);
        }
    }
}

static tch_status multiply_symmetric(tch_context *context, const half *h, bool gram)
{
    if (gram) {
        return tchi_gram(context, h->c2, &h->a->m, 0, 0.0, &h->c.m);
    }
    const tch_matrices *d = h->d != NULL ? &h->d->m : NULL;
    if (h->scale != NULL) {
        return context->backend->matrix->symmetric_product(context->state, h->c0, h->c1, d, h->c2, &h->a->m, &h->b->m,
                                                           h->scale_there, h->exponent, &h->c.m);
    }
    return tchi_symmetric_polynomial(context, h->c0, h->c1, d, h->c2, &h->a->m, &h->b->m, &h->c.m);
}

static void check_half(tch_context *context, const half *h, bool gram, uint64_t stream)
{
    batch_send(context, &h->c);
    CHECK_OK(multiply_symmetric(context, h, gram));
    void *first = batch_fetch(context, &h->c);
    batch_check_guards(&h->c, first);
    check_mirror(h, first);
    check_blocks(h, first, stream);
    batch_send(context, &h->c);
    CHECK_OK(multiply_symmetric(context, h, gram));
    void *second = batch_fetch(context, &h->c);
    CHECK(memcmp(first, second, (size_t)h->c.bytes) == 0, "a second call gives other bits");
}

/* --- the cases --------------------------------------------------------------------------------------------------- */

/* Kernels with tiles of 128 by 128 need a tile on or below the diagonals for each multiprocessor, 132 on an H200: from
 * 44 x 256, 14 x 512, 7 x 768, 3 x 1152, 1 x 2048 on. Smaller batches use other kernels, as do unaligned rows (48 x
 * 264) and odd sizes (45 x 257). With 150 x 256 every multiprocessor has several tiles. */
typedef struct size_case {
    int64_t batch, n, gap; /* between rows */
} size_case;

static const size_case sizes[] = {
    {6, 256, 8}, {1, 256, 0},  {3, 512, 8},  {1, 768, 0},   {44, 256, 0}, {45, 257, 7}, {14, 512, 24},
    {7, 768, 8}, {3, 1152, 0}, {5, 1000, 8}, {150, 256, 0}, {48, 264, 1}, {1, 2048, 0}, {45, 264, 8},
};

/* The CPU has one algorithm for all sizes and skips the large ones. An emulated GPU reaches its kernels with the
 * first. */
static bool is_left_out(const size_case *size)
{
    return device_is_emulated() ? size != sizes : test_on_cpu() && size->batch * size->n * size->n > 1 << 20;
}

/* Into one type or two, from the same matrices. */
static void check_symmetric(tch_context *context, tch_scalar type, tch_scalar out, tch_scalar other,
                            const size_case *size, uint64_t stream)
{
    static const char *const terms[] = {"A B", "I + A B", "I + D + A B"};
    size_t mark = test_mark();
    int64_t n = size->n, count = size->batch;
    batch a = random_batch(context, type, count, n, n, size->gap, true, stream + 1);
    batch b = random_batch(context, type, count, n, n, size->gap + 8, true, stream + 2);
    batch d = random_batch(context, type, count, n, n, size->gap + 16, true, stream + 3);
    half h = {.c2 = 1.25, .a = &a, .b = &b, .left = values_of(&a), .right = values_of(&b)};
    for (int i = 0; i < (out == other ? 3 : 6); i++) {
        test_case("%lld x %lld, types %d to %d, gap %lld: %s", (long long)count, (long long)n, (int)type,
                  (int)(i < 3 ? out : other), (long long)size->gap, terms[i % 3]);
        if (i % 3 == 0) {
            h.c = batch_make(context, i < 3 ? out : other, count, n, n, size->gap);
        }
        h.c0 = i % 3 > 0 ? 0.75 : 0.0;
        h.c1 = i % 3 > 1 ? -20.0 : 0.0; /* of the sums' magnitude, so that a misplaced D is detected */
        h.d = i % 3 > 1 ? &d : NULL;
        check_half(context, &h, false, 101 + (uint64_t)i);
    }
    test_release_since(mark);
}

TEST(symmetric_products)
{
    tch_context *context = *state;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        if (!is_left_out(&sizes[s])) {
            tch_scalar type = fastest_type(context);
            check_symmetric(context, type, type, type, &sizes[s], 3 * s);
        }
    }
}

/* Rows of split matrices are aligned, as the table requires. Roots need some of these products in float64. */
TEST(split_products)
{
    tch_context *context = *state;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0] && tchi_product_rates(context).bf16x2 > 0.0; s++) {
        if (sizes[s].n % 8 == 0 && sizes[s].gap % 8 == 0 && !is_left_out(&sizes[s])) {
            check_symmetric(context, TCH_SCALAR_BF16X2, TCH_SCALAR_BF16X2, TCH_SCALAR_F64, &sizes[s], 500 + 3 * s);
        }
    }
}

static void check_gram(tch_context *context, tch_scalar type, tch_scalar out, const size_case *size, int64_t k,
                       uint64_t stream)
{
    size_t mark = test_mark();
    int64_t gap = (k + 7) / 8 * 8 - k + size->gap;
    test_case("%lld x %lld, type %d, k %lld, gap %lld: A A'", (long long)size->batch, (long long)size->n, (int)type,
              (long long)k, (long long)gap);
    batch a = random_batch(context, type, size->batch, size->n, k, gap, false, stream);
    half h = {.c2 = -0.5, .a = &a, .b = &a, .left = values_of(&a)};
    h.right = h.left;
    h.c = batch_make(context, out, size->batch, size->n, size->n, size->gap);
    check_half(context, &h, true, 104);
    test_release_since(mark);
}

/* Mixed types, which neither kernels nor BLAS support. The CPU gets one type at a time. */
TEST(products_of_mixed_types)
{
    static const size_case mixed[] = {{2, 1, 1}, {2, 17, 2}, {2, 70, 3}};
    for (int i = 0; i < 6 && !test_on_cpu(); i++) {
        tch_scalar in = i % 2 == 0 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
        tch_scalar out = i % 2 == 0 ? TCH_SCALAR_F32 : TCH_SCALAR_F64;
        check_symmetric(*state, in, out, out, &mixed[i / 2], 700 + 3 * (uint64_t)i);
        check_gram(*state, in, out, &mixed[i / 2], 33, 800 + (uint64_t)i);
    }
}

TEST(gram_matrices)
{
    static const int64_t widths[] = {8, 64, 72, 136, 521, 1000};
    tch_context *context = *state;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        if (is_left_out(&sizes[s])) {
            continue;
        }
        tch_scalar type = fastest_type(context);
        check_gram(context, type, type, &sizes[s], widths[s % 6], 50 + s);
    }
}

/* --- with a scale, and in float16 -------------------------------------------------------------------------------- */

typedef struct scaled_case {
    tch_scalar in, out;
    int with_d;
    int32_t exponent;
} scaled_case;

/* The products of a step: the Gram matrix, P, P M, Q. */
static const scaled_case scaled_cases[] = {
    {TCH_SCALAR_BF16, TCH_SCALAR_BF16, 0, 2}, {TCH_SCALAR_BF16, TCH_SCALAR_BF16, 1, 1},
    {TCH_SCALAR_BF16, TCH_SCALAR_F16, 0, 2},  {TCH_SCALAR_F16, TCH_SCALAR_F16, 1, 0},
    {TCH_SCALAR_F16, TCH_SCALAR_F16, 0, 0},   {TCH_SCALAR_F16, TCH_SCALAR_BF16, 0, 1},
};

static void check_scaled(tch_context *context, const scaled_case *c, int64_t count, int64_t n, int64_t k,
                         const double *scale, double *there)
{
    bool gram = c->exponent == 2;
    test_case("%lld x %lld, k %lld, types %d to %d, d %d, exponent %d", (long long)count, (long long)n, (long long)k,
              (int)c->in, (int)c->out, c->with_d, c->exponent);
    batch a = random_batch(context, c->in, count, n, gram ? k : n, 8, !gram, 401);
    batch b = random_batch(context, c->in, count, n, n, 0, true, 402);
    batch d = random_batch(context, c->in, count, n, n, 16, true, 403);
    half h = {.c2 = 0.75, .a = &a, .b = gram ? &a : &b, .scale = scale, .scale_there = there, .exponent = c->exponent};
    h.left = values_of(&a);
    h.right = gram ? h.left : values_of(&b);
    h.c = batch_make(context, c->out, count, n, n, 8);
    if (c->with_d) {
        h.c0 = 0.5;
        h.c1 = -20.0;
        h.d = &d;
    }
    check_half(context, &h, false, 404);
}

/* Random scales, at the address where `normalize` would write them. */
static void check_scaled_products(tch_context *context, double *there)
{
    enum { MOST = 45 };
    double scale[MOST];
    for (int i = 0; i < MOST; i++) {
        scale[i] = 0.5 + 0.03 * i;
    }
    CHECK_OK(context->backend->device->copy_bytes(context->state, there, scale, sizeof scale, TCH_COPY_TO_DEVICE));
    for (size_t i = 0; i < TEST_COUNT(scaled_cases); i++) {
        check_scaled(context, &scaled_cases[i], MOST, 256, 512, scale, there);
        check_scaled(context, &scaled_cases[i], 5, 1000, 136, scale, there);
        check_scaled(context, &scaled_cases[i], 3, 1152, 200, scale, there);
    }
}

static void check_norm(const batch *x, const void *after, int64_t z, double scale)
{
    double before = 0.0, ratio = 0.0;
    for (int64_t e = 0; e < x->m.rows * x->m.cols; e++) {
        double was = value(x, z, e / x->m.cols, e % x->m.cols);
        double now = batch_get(x, after, z, e / x->m.cols, e % x->m.cols) * scale;
        before += was * was;
        ratio += now * now;
    }
    test_case("matrix %d of norm %g", (int)z, sqrt(before));
    CHECK(before == 0.0 ? ratio == 0.0 && isfinite(scale) : fabs(ratio - 1.0) < 1e-4, "|X| becomes %.9g", sqrt(ratio));
    CHECK(scale >= 0x1p-41 && scale <= 0x1p41, "the scale is %g", scale);
}

/* Division fused into the products: numbers whose squares exceed float32's range, and a matrix of zeros; X times scale
 * remains. Small ones are emulated with all steps of orthogonalization. */
TEST(norms_and_products_with_a_scale)
{
    enum { COUNT = 45, SIZE = 256, BYTES = TCH_NORMALIZE_NUMBERS * COUNT * (int)sizeof(double) };
    static const double sizes_of[] = {1.0, 1e-30, 3e25, 1e-4, 0.0, 1e9};
    tch_context *context = *state;
    const tch_backend *t = context->backend;
    if (device_is_emulated() || !(tchi_product_rates(context).bf16 > 0.0)) {
        return;
    }
    double scale[COUNT];
    int32_t deferred;
    batch x = random_batch(context, TCH_SCALAR_BF16, COUNT, SIZE, SIZE, 0, false, 405);
    for (int64_t e = 0; e < (int64_t)COUNT * SIZE * SIZE; e++) {
        int64_t z = e / (SIZE * SIZE);
        batch_put(&x, z, e / SIZE % SIZE, e % SIZE, value(&x, z, e / SIZE % SIZE, e % SIZE) * sizes_of[z % 6]);
    }
    batch_send(context, &x);
    double *there = device_poison(context, BYTES);
    CHECK_OK(t->matrix->normalize(context->state, 1e-37, &x.m, COUNT, there, &deferred));
    if (deferred) {
        CHECK_OK(t->device->copy_bytes(context->state, scale, there, sizeof scale, TCH_COPY_TO_HOST));
        void *after = batch_fetch(context, &x);
        for (int64_t z = 0; z < COUNT; z++) {
            check_norm(&x, after, z, scale[z]);
        }
        check_scaled_products(context, there);
    }
}

/* A batch of all planes. */
static tch_matrices planes_of(const batch *b)
{
    tch_matrices planes = b->m;
    planes.type = b->planes == 2 ? TCH_SCALAR_BF16 : planes.type;
    planes.batch *= b->planes;
    return planes;
}

/* Chunks in shared memory that are released too early are overwritten occasionally, under heavy load: about every tenth
 * product of this size had a few wrong numbers that way on an H200. Differences are computed on the device. */
static void check_repeats(tch_context *context, tch_scalar type)
{
    const tch_backend *t = context->backend;
    bool on_host = t->host_memory != 0 || device_is_emulated();
    int64_t n = on_host ? 96 : 2048;
    int64_t count = on_host ? 3 : 48;
    int repeats = on_host ? 5 : 150;
    batch a = repeated_batch(context, type, count, n, 201);
    batch d = repeated_batch(context, type, count, n, 202);
    batch first = batch_make(context, type, count, n, n, 0);
    batch again = batch_make(context, type, count, n, n, 0);
    tch_matrices expected = planes_of(&first);
    tch_matrices difference = planes_of(&again);
    int64_t planes = expected.batch, bytes = planes * (int64_t)sizeof(double);
    double *largest = device_poison(context, bytes);
    for (int i = 0; i < repeats; i++) {
        const batch *to = i == 0 ? &first : &again;
        tch_matrices result = planes_of(to);
        test_case("%lld x %lld, type %d: product %d", (long long)count, (long long)n, (int)type, i);
        CHECK_OK(tchi_symmetric_polynomial(context, 1.5, -0.75, &d.m, 0.5, &a.m, &a.m, &to->m));
        CHECK_OK(t->matrix->combine(context->state, 0.0, 1.0, &result, -1.0, &expected, &difference));
        CHECK_OK(t->matrix->reduce(context->state, TCH_REDUCE_MAX_ABS, &difference, largest));
        double *found = device_fetch(context, largest, bytes);
        for (int64_t z = 0; z < planes; z++) {
            assert_true(found[z] == 0.0);
        }
    }
}

TEST(large_products_are_the_same_every_time)
{
    tch_context *context = *state;
    check_repeats(context, fastest_type(context));
    if (tchi_product_rates(context).bf16x2 > 0.0) {
        check_repeats(context, TCH_SCALAR_BF16X2);
    }
}

TEST_MAIN(test_open_context, test_close_context)
