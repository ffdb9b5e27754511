/* Symmetric products of large batches, through the operations table: symmetric products with and without their
 * polynomial terms, and Gram matrices, in sizes for which devices have kernels of their own. In bfloat16 and in split
 * bfloat16 where the device multiplies them, else in float32.
 *
 * What must hold: one element of every 16 by 16 block, chosen at random, is the float64 sum of products up to the
 * rounding of the arithmetic and of the result; all elements equal their mirror image to the last bit; nothing beside
 * the matrices is written, not even between their rows; and a second call is bitwise-identical, as do a hundred where
 * the device is busy with large ones. The same holds, on devices that have them, of the products that orthogonalization
 * of large matrices asks for, with a scale for each matrix and in float16 as well. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/context.h"
#include "linalg/algebra.h"
#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

#define GUARD 2048 /* elements before and behind the matrices */

/* --- batches on the device --------------------------------------------------------------------------------------- */

typedef struct batch {
    tch_matrices m;
    tch_dtype dtype; /* of a plane; split matrices have two: numbers to nearest, and what that leaves of them */
    int64_t planes;
    unsigned char *memory; /* device memory of m, guards included */
    unsigned char *image;  /* what was put there */
    int64_t bytes;
} batch;

static tch_dtype plane_type(tch_scalar type)
{
    bool in_bf16 = type == TCH_SCALAR_BF16 || type == TCH_SCALAR_BF16X2;
    return type == TCH_SCALAR_F16   ? TCH_FLOAT16
           : type == TCH_SCALAR_F64 ? TCH_FLOAT64
           : in_bf16                ? TCH_BFLOAT16
                                    : TCH_FLOAT32;
}

/* Rows `ld` apart, and between planes a row that belongs to none. All bits are set: NaN. */
static batch make_of(tch_context *context, tch_scalar type, int64_t count, int64_t rows, int64_t cols, int64_t ld)
{
    batch b = {.dtype = plane_type(type), .planes = type == TCH_SCALAR_BF16X2 ? 2 : 1};
    b.m = (tch_matrices){NULL, type, rows, cols, ld, count, (rows + 1) * ld};
    int64_t size = (int64_t)tch_dtype_size(b.dtype);
    b.bytes = (count * b.planes * b.m.stride + 2 * GUARD) * size;
    b.image = test_alloc((size_t)b.bytes);
    memset(b.image, 0xff, (size_t)b.bytes);
    void *memory = NULL;
    CHECK_OK(context->backend->device->allocate(context->state, b.bytes, &memory));
    b.memory = memory;
    b.m.data = b.memory + GUARD * size;
    return b;
}

/* What the device multiplies fastest. */
static tch_scalar fastest_type(tch_context *context)
{
    return tchi_product_rates(context).bf16 > 0.0 ? TCH_SCALAR_BF16 : TCH_SCALAR_F32;
}

static void drop(tch_context *context, batch *b)
{
    context->backend->device->release(context->state, b->memory, b->bytes);
}

/* Of plane z: of split matrices, 2 z and 2 z + 1 are those of matrix z. */
static unsigned char *element(const batch *b, unsigned char *image, int64_t z, int64_t i, int64_t j)
{
    return image + (GUARD + z * b->m.stride + i * b->m.ld + j) * (int64_t)tch_dtype_size(b->dtype);
}

static double value_in(const batch *b, unsigned char *image, int64_t z, int64_t i, int64_t j)
{
    double sum = 0.0;
    for (int64_t plane = 0; plane < b->planes; plane++) {
        sum += test_decode(b->dtype, element(b, image, z * b->planes + plane, i, j));
    }
    return sum;
}

static double value(const batch *b, int64_t z, int64_t i, int64_t j)
{
    return value_in(b, b->image, z, i, j);
}

static void put(const batch *b, int64_t z, int64_t i, int64_t j, double number)
{
    for (int64_t plane = 0; plane < b->planes; plane++) {
        unsigned char *here = element(b, b->image, z * b->planes + plane, i, j);
        test_encode(b->dtype, number, here);
        number -= test_decode(b->dtype, here);
    }
}

static void send(tch_context *context, const batch *b)
{
    CHECK_OK(context->backend->device->copy_bytes(context->state, b->memory, b->image, b->bytes, TCH_COPY_TO_DEVICE));
}

static unsigned char *fetch(tch_context *context, const batch *b)
{
    unsigned char *image = test_alloc((size_t)b->bytes);
    CHECK_OK(context->backend->device->copy_bytes(context->state, image, b->memory, b->bytes, TCH_COPY_TO_HOST));
    return image;
}

/* Random numbers; of a symmetric batch those above the diagonal are those below it. */
static void fill(tch_context *context, const batch *b, bool symmetric, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    for (int64_t row = 0; row < b->m.batch * b->m.rows; row++) {
        int64_t z = row / b->m.rows;
        int64_t i = row % b->m.rows;
        for (int64_t j = 0; j < (symmetric ? i + 1 : b->m.cols); j++) {
            double number = 2.0 * test_random_uniform(&random) - 1.0;
            put(b, z, i, j, number);
            if (symmetric && j < i) {
                put(b, z, j, i, number);
            }
        }
    }
    send(context, b);
}

static batch random_batch(tch_context *context, tch_scalar type, int64_t count, int64_t rows, int64_t cols, int64_t ld,
                          bool symmetric, uint64_t stream)
{
    batch b = make_of(context, type, count, rows, cols, ld);
    fill(context, &b, symmetric, stream);
    return b;
}

/* Symmetric matrices of which only the first three are drawn: numbers of a large batch take longer than all its
 * products. */
static batch repeated_batch(tch_context *context, tch_scalar type, int64_t count, int64_t n, uint64_t stream)
{
    batch all = make_of(context, type, count, n, n, n);
    batch few = all;
    int64_t bytes = all.planes * all.m.stride * (int64_t)tch_dtype_size(all.dtype);
    few.m.batch = 3;
    fill(context, &few, true, stream);
    for (int64_t z = few.m.batch; z < count; z++) {
        memcpy(element(&all, all.image, z * all.planes, 0, 0), element(&all, all.image, z % 3 * all.planes, 0, 0),
               (size_t)bytes);
    }
    send(context, &all);
    return all;
}

/* --- the checks -------------------------------------------------------------------------------------------------- */

/* C = c0 I + c1 D + c2 A B'; in a symmetric product B is its own transpose. Or that times a power of a number of each
 * matrix. */
typedef struct half {
    double c0, c1, c2;
    const batch *a, *b, *d; /* d may be NULL */
    batch c;
    const double *scale; /* on the host, and the same on the device; NULL for 1 */
    double *scale_there;
    int32_t exponent;
} half;

static void check_element(const half *h, unsigned char *got, int64_t z, int64_t i, int64_t j)
{
    int64_t k = h->a->m.cols;
    double sum = 0.0;
    double magnitude = 0.0;
    for (int64_t l = 0; l < k; l++) {
        double product = value(h->a, z, i, l) * value(h->b, z, j, l);
        sum += product;
        magnitude += fabs(product);
    }
    double addend = h->d != NULL ? h->c1 * value(h->d, z, i, j) : 0.0;
    double shift = i == j ? h->c0 : 0.0;
    double factor = h->scale != NULL ? pow(h->scale[z], h->exponent) : 1.0;
    double expected = factor * (h->c2 * sum + addend + shift);
    double scale = fabs(factor) * (fabs(h->c2) * magnitude + fabs(addend) + fabs(shift));
    /* Where no kernel takes the whole, the product is rounded, and once more with the other terms. Of split operands
     * the product of the low parts is left out. */
    double rounded = fabs(expected) + (addend != 0.0 || shift != 0.0 ? fabs(factor * h->c2 * sum) : 0.0);
    double unit = h->c.planes == 2 ? 0x1p-17 : test_unit_roundoff(h->c.dtype);
    double left_out = h->a->planes == 2 ? 0x1p-18 * scale : 0.0;
    double coarse = fmax(test_arithmetic_roundoff(h->a->dtype), h->c.dtype.bits == 32 ? 0x1p-24 : 0.0);
    double bound = (double)(k + 4) * coarse * scale + unit * rounded + left_out + test_underflow(h->c.dtype);
    double found = value_in(&h->c, got, z, i, j);
    CHECK(fabs(found - expected) <= bound,
          "element (%lld, %lld) of matrix %lld is %.9g, expected %.9g, off by %.2g > %.2g", (long long)i, (long long)j,
          (long long)z, found, expected, fabs(found - expected), bound);
}

/* One element of every 16 by 16 block; those above the diagonal are another's mirror image. */
static void check_blocks(const half *h, unsigned char *got, uint64_t stream)
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

static void check_mirror_and_gaps(const half *h, unsigned char *got)
{
    size_t size = tch_dtype_size(h->c.dtype);
    int64_t n = h->c.m.rows;
    int64_t total = h->c.m.batch * h->c.planes * h->c.m.stride;
    static const unsigned char untouched[8] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    for (int64_t at = -GUARD; at < total + GUARD; at++) {
        const unsigned char *here = got + (GUARD + at) * (int64_t)size;
        int64_t i = at < 0 ? n : at % h->c.m.stride / h->c.m.ld;
        int64_t j = at < 0 ? n : at % h->c.m.ld;
        if (at < 0 || at >= total || i >= n || j >= n) {
            CHECK(memcmp(here, untouched, size) == 0, "element %lld beside the matrices was written", (long long)at);
        } else {
            const unsigned char *mirror = element(&h->c, got, at / h->c.m.stride, j, i);
            CHECK(memcmp(here, mirror, size) == 0, "(%lld, %lld) of plane %lld is not its mirror image", (long long)i,
                  (long long)j, (long long)(at / h->c.m.stride));
        }
    }
}

static tch_status multiply(tch_context *context, const half *h, bool gram)
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
    send(context, &h->c);
    CHECK_OK(multiply(context, h, gram));
    unsigned char *first = fetch(context, &h->c);
    check_mirror_and_gaps(h, first);
    check_blocks(h, first, stream);
    send(context, &h->c);
    CHECK_OK(multiply(context, h, gram));
    unsigned char *second = fetch(context, &h->c);
    CHECK(memcmp(first, second, (size_t)h->c.bytes) == 0, "a second call gives other bits");
}

/* --- the cases --------------------------------------------------------------------------------------------------- */

/* Kernels with tiles of 128 by 128 are for batches that have one on or below the diagonals for each of a GPU's
 * multiprocessors, 132 on an H200: from 44 x 256, 14 x 512, 7 x 768, 3 x 1152, 1 x 2048 on. Fewer go another way, as do
 * rows that are not aligned (48 x 264) and odd sizes (45 x 257). With 150 x 256 every multiprocessor has several. */
typedef struct size_case {
    int64_t batch, n, gap; /* between rows */
} size_case;

static const size_case sizes[] = {
    {6, 256, 8}, {1, 256, 0},  {3, 512, 8},  {1, 768, 0},   {44, 256, 0}, {45, 257, 7}, {14, 512, 24},
    {7, 768, 8}, {3, 1152, 0}, {5, 1000, 8}, {150, 256, 0}, {48, 264, 1}, {1, 2048, 0}, {45, 264, 8},
};

/* A GPU that is emulated by the CPU, with 16 multiprocessors. */
static bool is_emulated(void)
{
    return getenv("TORCHIUM_EMULATOR_CAPABILITY") != NULL;
}

/* The CPU has one way for all sizes: it does without the large ones. An emulated GPU has its ways with the first. */
static bool is_left_out(const size_case *size)
{
    return is_emulated() ? size != sizes : test_on_cpu() && size->batch * size->n * size->n > 1 << 20;
}

static void check_symmetric(tch_context *context, tch_scalar type, tch_scalar out, const size_case *size,
                            uint64_t stream)
{
    int64_t n = size->n;
    int64_t count = size->batch;
    int64_t ld = n + size->gap;
    batch a = random_batch(context, type, count, n, n, ld, true, stream + 1);
    batch b = random_batch(context, type, count, n, n, ld + 8, true, stream + 2);
    batch d = random_batch(context, type, count, n, n, ld + 16, true, stream + 3);
    half h = {.c2 = 1.25, .a = &a, .b = &b, .c = make_of(context, out, count, n, n, ld)};
    test_case("%lld x %lld, type %d, rows %lld apart: A B", (long long)count, (long long)n, (int)type, (long long)ld);
    check_half(context, &h, false, 101);
    test_case("%lld x %lld, type %d, rows %lld apart: I + A B", (long long)count, (long long)n, (int)type,
              (long long)ld);
    h.c0 = 0.75;
    check_half(context, &h, false, 102);
    test_case("%lld x %lld, type %d, rows %lld apart: I + D + A B", (long long)count, (long long)n, (int)type,
              (long long)ld);
    h.c1 = -20.0; /* as large as the sums, so that a D in the wrong place shows */
    h.d = &d;
    check_half(context, &h, false, 103);
    drop(context, &a);
    drop(context, &b);
    drop(context, &d);
    drop(context, &h.c);
}

static void symmetric_products(void **state)
{
    tch_context *context = *state;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        if (!is_left_out(&sizes[s])) {
            tch_scalar type = fastest_type(context);
            check_symmetric(context, type, type, &sizes[s], 3 * s);
        }
    }
}

/* Rows of split matrices are aligned, which the table asks for. A root wants some of these products in float64. */
static void split_products(void **state)
{
    tch_context *context = *state;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0] && tchi_product_rates(context).bf16x2 > 0.0; s++) {
        if (sizes[s].n % 8 == 0 && sizes[s].gap % 8 == 0 && !is_left_out(&sizes[s])) {
            check_symmetric(context, TCH_SCALAR_BF16X2, TCH_SCALAR_BF16X2, &sizes[s], 500 + 3 * s);
            check_symmetric(context, TCH_SCALAR_BF16X2, TCH_SCALAR_F64, &sizes[s], 600 + 3 * s);
        }
    }
}

static void check_gram(tch_context *context, tch_scalar type, tch_scalar out, const size_case *size, int64_t k,
                       uint64_t stream)
{
    int64_t ld = (k + 7) / 8 * 8 + size->gap;
    test_case("%lld x %lld, type %d, k %lld, rows %lld apart: A A'", (long long)size->batch, (long long)size->n,
              (int)type, (long long)k, (long long)ld);
    batch a = random_batch(context, type, size->batch, size->n, k, ld, false, stream);
    half h = {.c2 = -0.5, .a = &a, .b = &a};
    h.c = make_of(context, out, size->batch, size->n, size->n, size->n + size->gap);
    check_half(context, &h, true, 104);
    drop(context, &a);
    drop(context, &h.c);
}

/* No kernel for one type computes these, and neither does the BLAS. The CPU is asked for one type at a time. */
static void products_of_mixed_types(void **state)
{
    static const size_case mixed[] = {{2, 1, 1}, {2, 17, 2}, {2, 70, 3}};
    for (int i = 0; i < 6 && !test_on_cpu(); i++) {
        tch_scalar in = i % 2 == 0 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
        tch_scalar out = i % 2 == 0 ? TCH_SCALAR_F32 : TCH_SCALAR_F64;
        check_symmetric(*state, in, out, &mixed[i / 2], 700 + 3 * (uint64_t)i);
        check_gram(*state, in, out, &mixed[i / 2], 33, 800 + (uint64_t)i);
    }
}

static void gram_matrices(void **state)
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

/* What a run of steps is made of: the Gram matrix, P, P M, Q. */
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
    batch a = make_of(context, c->in, count, n, gram ? k : n, (gram ? k : n) + 8);
    batch b = make_of(context, c->in, count, n, n, n);
    batch d = make_of(context, c->in, count, n, n, n + 16);
    fill(context, &a, !gram, 401);
    fill(context, &b, true, 402);
    fill(context, &d, true, 403);
    half h = {.c2 = 0.75, .a = &a, .b = gram ? &a : &b, .scale = scale, .scale_there = there, .exponent = c->exponent};
    h.c = make_of(context, c->out, count, n, n, n + 8);
    if (c->with_d) {
        h.c0 = 0.5;
        h.c1 = -20.0;
        h.d = &d;
    }
    check_half(context, &h, false, 404);
    drop(context, &a);
    drop(context, &b);
    drop(context, &d);
    drop(context, &h.c);
}

/* The scales are made up, and go to where those of `normalize` were. */
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

static void check_norm(const batch *x, unsigned char *after, int64_t z, double scale)
{
    double before = 0.0;
    double ratio = 0.0;
    for (int64_t e = 0; e < x->m.rows * x->m.cols; e++) {
        double was = value(x, z, e / x->m.cols, e % x->m.cols);
        double now = value_in(x, after, z, e / x->m.cols, e % x->m.cols) * scale;
        before += was * was;
        ratio += now * now;
    }
    test_case("matrix %d of norm %g", (int)z, sqrt(before));
    CHECK(before == 0.0 ? ratio == 0.0 && isfinite(scale) : fabs(ratio - 1.0) < 1e-4, "|X| becomes %.9g", sqrt(ratio));
    CHECK(scale >= 0x1p-41 && scale <= 0x1p41, "the scale is %g", scale);
}

/* Where the division is left to the products: numbers whose squares leave float32's range, and a matrix of zeros; X
 * times scale is what is left. Small ones are emulated with all that orthogonalization does. */
static void norms_and_products_with_a_scale(void **state)
{
    enum { COUNT = 45, SIZE = 256, BYTES = TCH_NORMALIZE_NUMBERS * COUNT * (int)sizeof(double) };
    static const double sizes_of[] = {1.0, 1e-30, 3e25, 1e-4, 0.0, 1e9};
    tch_context *context = *state;
    const tch_backend *t = context->backend;
    if (is_emulated() || !(tchi_product_rates(context).bf16 > 0.0)) {
        return;
    }
    void *there = NULL;
    double scale[COUNT];
    int32_t deferred;
    batch x = random_batch(context, TCH_SCALAR_BF16, COUNT, SIZE, SIZE, SIZE, false, 405);
    for (int64_t e = 0; e < (int64_t)COUNT * SIZE * SIZE; e++) {
        int64_t z = e / (SIZE * SIZE);
        put(&x, z, e / SIZE % SIZE, e % SIZE, value(&x, z, e / SIZE % SIZE, e % SIZE) * sizes_of[z % 6]);
    }
    send(context, &x);
    CHECK_OK(t->device->allocate(context->state, BYTES, &there));
    CHECK_OK(t->matrix->normalize(context->state, 1e-37, &x.m, COUNT, there, &deferred));
    if (deferred) {
        CHECK_OK(t->device->copy_bytes(context->state, scale, there, sizeof scale, TCH_COPY_TO_HOST));
        unsigned char *after = fetch(context, &x);
        for (int64_t z = 0; z < COUNT; z++) {
            check_norm(&x, after, z, scale[z]);
        }
        check_scaled_products(context, there);
    }
    t->device->release(context->state, there, BYTES);
    drop(context, &x);
}

/* A batch of all planes. */
static tch_matrices planes_of(const batch *b)
{
    tch_matrices planes = b->m;
    planes.type = b->planes == 2 ? TCH_SCALAR_BF16 : planes.type;
    planes.batch *= b->planes;
    return planes;
}

/* Chunks in shared memory that are given back too early are overwritten now and then, when much is under way at once:
 * about every tenth product of this size had a few wrong numbers that way on an H200. Differences are taken on the
 * device. */
static void check_repeats(tch_context *context, tch_scalar type)
{
    const tch_backend *t = context->backend;
    bool on_host = t->host_memory != 0 || is_emulated();
    int64_t n = on_host ? 96 : 2048;
    int64_t count = on_host ? 3 : 48;
    int repeats = on_host ? 5 : 150;
    batch a = repeated_batch(context, type, count, n, 201);
    batch d = repeated_batch(context, type, count, n, 202);
    batch first = make_of(context, type, count, n, n, n);
    batch again = make_of(context, type, count, n, n, n);
    tch_matrices expected = planes_of(&first);
    tch_matrices difference = planes_of(&again);
    void *largest = NULL;
    int64_t planes = expected.batch;
    double *found = test_alloc((size_t)planes * sizeof(double));
    CHECK_OK(t->device->allocate(context->state, planes * (int64_t)sizeof(double), &largest));
    for (int i = 0; i < repeats; i++) {
        const batch *to = i == 0 ? &first : &again;
        tch_matrices result = planes_of(to);
        test_case("%lld x %lld, type %d: product %d", (long long)count, (long long)n, (int)type, i);
        CHECK_OK(tchi_symmetric_polynomial(context, 1.5, -0.75, &d.m, 0.5, &a.m, &a.m, &to->m));
        CHECK_OK(t->matrix->combine(context->state, 0.0, 1.0, &result, -1.0, &expected, &difference));
        CHECK_OK(t->matrix->reduce(context->state, TCH_REDUCE_MAX_ABS, &difference, largest));
        CHECK_OK(
            t->device->copy_bytes(context->state, found, largest, planes * (int64_t)sizeof(double), TCH_COPY_TO_HOST));
        for (int64_t z = 0; z < planes; z++) {
            assert_true(found[z] == 0.0);
        }
    }
    t->device->release(context->state, largest, planes * (int64_t)sizeof(double));
    drop(context, &a);
    drop(context, &d);
    drop(context, &first);
    drop(context, &again);
}

static void large_products_are_the_same_every_time(void **state)
{
    tch_context *context = *state;
    check_repeats(context, fastest_type(context));
    if (tchi_product_rates(context).bf16x2 > 0.0) {
        check_repeats(context, TCH_SCALAR_BF16X2);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(symmetric_products),
        cmocka_unit_test(split_products),
        cmocka_unit_test(gram_matrices),
        cmocka_unit_test(products_of_mixed_types),
        cmocka_unit_test(norms_and_products_with_a_scale),
        cmocka_unit_test(large_products_are_the_same_every_time),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
