/* Products of split matrices: by a backend's own kernel where it has one for them, and otherwise as products of their
 * parts, one after the other.
 *
 * What must hold: elements chosen at random are the float64 sums of the products that count, of the parts as they are,
 * up to the rounding of sums in float32, which is far less than what any part contributes; nothing beside the result is
 * written; and a result that comes out split is what split_rows would make of it. Where a condition holds of a matrix,
 * a kernel leaves out what it may. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "linalg/gram_schmidt.h"
#include "support/backend/guarded_batch.h"
#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

typedef struct product_case {
    int64_t rows, cols, depth, batch;
    int64_t gap; /* between rows of C */
} product_case;

/* The first for an emulated GPU, which has few multiprocessors: one tile and several, ragged in each direction, with
 * odd and even numbers of steps. */
static const product_case cases[] = {
    {256, 128, 64, 2, 0},   {130, 72, 200, 2, 4},    {264, 257, 136, 1, 1},   {40, 264, 8, 1, 0},
    {7, 5, 3, 2, 0},        {300, 129, 77, 1, 3},    {130, 72, 200, 22, 4},   {264, 257, 136, 8, 1},
    {256, 640, 1024, 5, 0}, {1000, 776, 1000, 1, 0}, {256, 1536, 1536, 2, 8}, {512, 512, 3072, 3, 0},
};
enum { CASES = sizeof cases / sizeof cases[0], EMULATED = 6, SAMPLES = 200 };

/* --- operands ---------------------------------------------------------------------------------------------------- */

/* Parts of an operand on the device, and as they are there. Rows are aligned to 16 bytes. */
typedef struct parts {
    tch_split_matrices m;
    tch_dtype dtype;
    void *memory;
    uint16_t *image;
    int64_t bytes;
} parts;

/* High parts of size 1, and low ones as rounding leaves them: less than half of what the high ones are rounded to. They
 * are drawn from a few thousand, since encoding millions would take longer than all products. */
static void fill_parts(const parts *p, uint64_t stream)
{
    enum { DRAWN = 4096 };
    uint16_t high[DRAWN];
    uint16_t low[DRAWN];
    test_random random = test_random_stream(stream);
    const tch_matrices *m = &p->m.high;
    for (int i = 0; i < DRAWN; i++) {
        double x = test_random_normal(&random);
        test_encode(p->dtype, x, &high[i]);
        test_encode(p->dtype, x - test_decode(p->dtype, &high[i]), &low[i]);
    }
    memset(p->image, 0xff, (size_t)p->bytes);
    for (int64_t r = 0; r < m->batch * m->rows; r++) {
        uint16_t *row = p->image + r / m->rows * m->stride + r % m->rows * m->ld;
        for (int64_t j = 0; j < m->cols; j++) {
            uint64_t which = test_random_bits(&random) % DRAWN;
            row[j] = high[which];
            row[m->batch * m->stride + j] = low[which];
        }
    }
}

static parts make_parts(tch_context *context, tch_dtype dtype, int64_t batch, int64_t rows, int64_t cols, double scale,
                        uint64_t stream)
{
    parts p = {.dtype = dtype};
    tch_scalar type = dtype.code == TCH_FLOAT ? TCH_SCALAR_F16 : TCH_SCALAR_BF16;
    int64_t ld = (cols + 7) / 8 * 8;
    tch_matrices m = {NULL, type, rows, cols, ld, batch, rows * ld};
    p.bytes = 2 * batch * m.stride * (int64_t)sizeof *p.image;
    p.image = test_alloc((size_t)p.bytes);
    fill_parts(&(parts){.m = {.high = m}, .dtype = dtype, .image = p.image, .bytes = p.bytes}, stream);
    CHECK_OK(context->backend->device->allocate(context->state, p.bytes, &p.memory));
    CHECK_OK(context->backend->device->copy_bytes(context->state, p.memory, p.image, p.bytes, TCH_COPY_TO_DEVICE));
    p.m = (tch_split_matrices){m, m, scale};
    p.m.high.data = p.memory;
    p.m.low.data = (char *)p.memory + batch * m.stride * (int64_t)sizeof *p.image;
    return p;
}

static void drop_parts(tch_context *context, parts *p)
{
    context->backend->device->release(context->state, p->memory, p->bytes);
}

static double part_at(const parts *p, int low, int64_t z, int64_t i, int64_t j)
{
    const tch_matrices *m = &p->m.high;
    return test_decode(p->dtype, p->image + (low ? m->batch * m->stride : 0) + z * m->stride + i * m->ld + j);
}

/* --- what must hold ---------------------------------------------------------------------------------------------- */

typedef struct trial {
    const product_case *c;
    parts a, b;
    int32_t transposed;
    tch_low low;
    double alpha, beta;
    tch_condition high_alone, negligible; /* hold of odd matrices, or of none */
    double *largest;                      /* NULL, or what the device has of it */
    const tch_matrices *wide;             /* NULL, or what the result goes to */
    bool handled;                         /* by a kernel, which then does what conditions say */
} trial;

static double b_at(const trial *t, int low, int64_t z, int64_t k, int64_t j)
{
    return t->transposed ? part_at(&t->b, low, z, j, k) : part_at(&t->b, low, z, k, j);
}

/* Element (i, j) of alpha A B, and the root of the sum of its terms' squares. */
static double expected_at(const trial *t, int64_t z, int64_t i, int64_t j, double *size)
{
    double sum = 0.0;
    double squares = 0.0;
    int low = t->handled && t->high_alone.of != NULL && z % 2 == 1 ? TCH_LOW_NONE : t->low;
    int64_t depth = t->handled && t->negligible.of != NULL && z % 2 == 1 ? 0 : t->c->depth;
    for (int64_t k = 0; k < depth; k++) {
        double a = part_at(&t->a, 0, z, i, k);
        double b = b_at(t, 0, z, k, j);
        double term = a * b;
        squares += term * term;
        sum += term + (low & TCH_LOW_A ? part_at(&t->a, 1, z, i, k) * b : 0.0) +
               (low & TCH_LOW_B ? a * b_at(t, 1, z, k, j) : 0.0);
    }
    double factor = t->alpha / (t->a.m.scale * t->b.m.scale);
    *size = fabs(factor) * sqrt(squares);
    return factor * sum;
}

/* Sums are rounded, or cut off, at each of depth / 16 steps: by up to 2^-23 of what they are then, which is about what
 * they are of size in the end. A low part of float16 that is left out or counted twice makes 2e-4 of a sum's size. */
static double bound(const trial *t, double expected, double size)
{
    double steps = 4.0 + (double)t->c->depth / 16.0;
    return 0x1p-23 * steps * (fabs(expected) + size);
}

static void check_element(const trial *t, const batch *c, const double *after, double scale, int64_t z, int64_t i,
                          int64_t j)
{
    double size;
    double expected = expected_at(t, z, i, j, &size);
    double before = t->beta == 0.0 ? 0.0 : t->beta * c->image[batch_place(c, z, i, j)];
    double got = after[batch_place(c, z, i, j)];
    double split = scale == 0.0 ? 0.0 : 0x1p-22 * fabs(expected) + 0x1p-25 / scale;
    double most =
        split + bound(t, expected, size) + 3.0 * 0x1p-24 * (fabs(before) + fabs(expected) + size); /* of three sums */
    CHECK(fabs(got - before - expected) <= most, "matrix %lld, (%lld, %lld): %.9g, expected %.9g, off by at most %.3g",
          (long long)z, (long long)i, (long long)j, got, before + expected, most);
}

/* Some at random, and the last of each direction; `scale` is 0, or that with which C was split. */
static void check_elements(const trial *t, const batch *c, const double *after, double scale)
{
    test_random random = test_random_stream(4711);
    const product_case *p = t->c;
    for (int s = 0; s < SAMPLES; s++) {
        check_element(t, c, after, scale, (int64_t)((double)p->batch * test_random_uniform(&random)),
                      (int64_t)((double)p->rows * test_random_uniform(&random)),
                      (int64_t)((double)p->cols * test_random_uniform(&random)));
    }
    check_element(t, c, after, scale, p->batch - 1, p->rows - 1, p->cols - 1);
    check_element(t, c, after, scale, p->batch - 1, p->rows - 1, 0);
    check_element(t, c, after, scale, 0, 0, p->cols - 1);
}

/* --- running it -------------------------------------------------------------------------------------------------- */

/* Where there is a kernel it must be what runs, given a sixth of a pair of tiles for each multiprocessor and rows of C
 * that begin at even places. */
static void check_handled(tch_context *context, trial *t, const tch_split_problem *problem)
{
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    int32_t handled = 0;
    int64_t pairs = (t->c->rows + 255) / 256 * ((t->c->cols + 127) / 128) * t->c->batch;
    CHECK_OK(context->backend->device->info(0, &info));
    if (context->backend->matrix->split_product != NULL) {
        CHECK_OK(context->backend->matrix->split_product(context->state, problem, &handled));
    }
    bool even = problem->split_c != NULL || (t->c->cols + t->c->gap) % 2 == 0;
    t->handled = handled;
    CHECK(handled == (info.compute_major == 9 && pairs >= info.processors / 6 && even), "handled: %d", (int)handled);
}

static void multiply(tch_context *context, trial *t, const batch *c, const tch_split_matrices *split)
{
    const tch_split_problem problem = {t->alpha, &t->a.m, &t->b.m,       t->transposed, t->low,     t->beta,
                                       &c->m,    split,   t->high_alone, t->negligible, t->largest, t->wide};
    if (t->beta == 0.0) {
        check_handled(context, t, &problem);
    }
    CHECK_OK(tchi_split_product(context, &problem));
}

static void check_floats(tch_context *context, trial *t)
{
    batch c = batch_make(context, t->c->batch, t->c->rows, t->c->cols, t->c->gap);
    if (t->beta != 0.0) {
        batch_fill(&c, 1.0, 99);
    }
    batch_send(context, &c);
    multiply(context, t, &c, NULL);
    float *after = batch_fetch(context, &c);
    batch_check_guards(&c, after);
    double *values = test_alloc((size_t)c.bytes / 4 * sizeof *values);
    for (int64_t e = 0; e < c.bytes / 4; e++) {
        values[e] = after[e];
    }
    check_elements(t, &c, values, 0.0);
    batch_drop(context, &c);
}

/* The result as float64 beside C, which a kernel leaves as it is; gaps between rows stay as they are. */
static void check_wide(tch_context *context, trial *t)
{
    batch c = batch_make(context, t->c->batch, t->c->rows, t->c->cols, t->c->gap);
    tch_matrices wide = c.m;
    int64_t bytes = wide.batch * wide.stride * (int64_t)sizeof(double);
    double *values = test_alloc((size_t)bytes);
    wide.type = TCH_SCALAR_F64;
    memset(values, 0xff, (size_t)bytes);
    batch_fill(&c, 1.0, 99);
    batch_send(context, &c);
    CHECK_OK(context->backend->device->allocate(context->state, bytes, &wide.data));
    CHECK_OK(context->backend->device->copy_bytes(context->state, wide.data, values, bytes, TCH_COPY_TO_DEVICE));
    t->wide = &wide;
    multiply(context, t, &c, NULL);
    t->wide = NULL;
    batch_check_guards(&c, batch_fetch(context, &c));
    CHECK_OK(context->backend->device->copy_bytes(context->state, values, wide.data, bytes, TCH_COPY_TO_HOST));
    double *expected = test_alloc((size_t)c.bytes / 4 * sizeof *expected);
    for (int64_t e = 0; e < wide.batch * wide.stride; e++) {
        int64_t i = e % wide.stride / wide.ld;
        int64_t j = e % wide.stride % wide.ld;
        if (i < wide.rows && j < wide.cols) {
            expected[batch_place(&c, e / wide.stride, i, j)] = values[e];
        } else {
            CHECK(isnan(values[e]), "element %lld behind a row was written", (long long)e);
        }
    }
    check_elements(t, &c, expected, 0.0);
    context->backend->device->release(context->state, wide.data, bytes);
    batch_drop(context, &c);
}

/* The largest |alpha A B| of each matrix, which is to be that of C. */
static void check_largest(tch_context *context, const trial *t, const batch *c, const double *values)
{
    double *got = test_alloc((size_t)t->c->batch * sizeof *got);
    CHECK_OK(context->backend->device->copy_bytes(context->state, got, t->largest, t->c->batch * (int64_t)sizeof *got,
                                                  TCH_COPY_TO_HOST));
    for (int64_t z = 0; z < t->c->batch; z++) {
        double most = 0.0;
        for (int64_t e = 0; e < t->c->rows * t->c->cols; e++) {
            most = fmax(most, fabs(values[batch_place(c, z, e / t->c->cols, e % t->c->cols)]));
        }
        CHECK(fabs(got[z] - most) <= 0x1p-21 * most, "the largest of matrix %lld is %.9g, expected %.9g", (long long)z,
              got[z], most);
    }
}

/* C is then scratch, and what is split is beside it. */
static void check_split(tch_context *context, trial *t)
{
    batch c = batch_make(context, t->c->batch, t->c->rows, t->c->cols, t->c->gap);
    parts out = make_parts(context, TCH_FLOAT16, t->c->batch, t->c->rows, t->c->cols, 16.0, 5);
    const tch_matrices *m = &out.m.high;
    batch_send(context, &c);
    memset(out.image, 0xff, (size_t)out.bytes);
    CHECK_OK(
        context->backend->device->copy_bytes(context->state, out.memory, out.image, out.bytes, TCH_COPY_TO_DEVICE));
    multiply(context, t, &c, &out.m);
    batch_check_guards(&c, batch_fetch(context, &c));
    CHECK_OK(context->backend->device->copy_bytes(context->state, out.image, out.memory, out.bytes, TCH_COPY_TO_HOST));
    double *values = test_alloc((size_t)c.bytes / 4 * sizeof *values);
    for (int64_t e = 0; e < 2 * m->batch * m->stride; e++) {
        CHECK(e % m->ld < m->cols || out.image[e] == 0xffff, "element %lld behind a row was written", (long long)e);
    }
    for (int64_t e = 0; e < m->batch * m->rows * m->cols; e++) {
        int64_t z = e / (m->rows * m->cols);
        int64_t i = e / m->cols % m->rows;
        double high = part_at(&out, 0, z, i, e % m->cols);
        double low = part_at(&out, 1, z, i, e % m->cols);
        values[batch_place(&c, z, i, e % m->cols)] = (high + low) / out.m.scale;
        CHECK(fabs(low) <= 0x1p-11 * fabs(high) + 0x1p-25, "element %lld is split into %g and %g", (long long)e, high,
              low);
    }
    check_elements(t, &c, values, out.m.scale);
    if (t->largest != NULL) {
        check_largest(context, t, &c, values);
    }
    drop_parts(context, &out);
    batch_drop(context, &c);
}

static trial begin_trial(tch_context *context, const product_case *c, tch_dtype dtype, int32_t transposed, int number)
{
    static const double betas[] = {0.0, 1.0, -0.5};
    trial t = {.c = c, .transposed = transposed, .low = (tch_low)(number % 4), .alpha = number % 2 ? -1.0 : 0.75};
    uint64_t stream = 640 + 10 * (uint64_t)number;
    t.beta = betas[number / 4 % 3];
    t.a = make_parts(context, dtype, c->batch, c->rows, c->depth, 256.0, stream);
    t.b = make_parts(context, dtype, c->batch, transposed ? c->cols : c->depth, transposed ? c->depth : c->cols, 2.0,
                     stream + 1);
    test_case("%lld x %lld x %lld x %lld, %s%s, low parts of %d, beta %g", (long long)c->batch, (long long)c->rows,
              (long long)c->cols, (long long)c->depth, dtype.code == TCH_FLOAT ? "float16" : "bfloat16",
              transposed ? ", transposed" : "", (int)t.low, t.beta);
    return t;
}

static void end_trial(tch_context *context, trial *t)
{
    drop_parts(context, &t->a);
    drop_parts(context, &t->b);
}

static int count_of_cases(void)
{
    return getenv("TORCHIUM_EMULATOR_CAPABILITY") != NULL || test_on_cpu() ? (int)EMULATED : (int)CASES;
}

/* Each case with every choice of low parts, and over all of them with every beta. */
static void parts_multiply(void **state)
{
    for (int k = 0; k < count_of_cases() * 16; k++) {
        trial t = begin_trial(*state, &cases[k / 16], k / 8 % 2 ? TCH_BFLOAT16 : TCH_FLOAT16, k / 4 % 2,
                              k % 4 + k / 16 % 3 * 4);
        check_floats(*state, &t);
        end_trial(*state, &t);
    }
}

static void a_product_comes_out_split(void **state)
{
    for (int k = 0; k < count_of_cases() * 4; k++) {
        trial t = begin_trial(*state, &cases[k / 4], TCH_FLOAT16, k % 2, k % 4 == 0 ? 0 : 3);
        check_split(*state, &t);
        end_trial(*state, &t);
    }
}

/* Numbers for conditions, which hold of odd matrices alone with a limit of 1, or for the largest: poison. */
static double *make_numbers(tch_context *context, int64_t batch, bool poison)
{
    double *image = test_alloc((size_t)batch * sizeof *image);
    void *there = NULL;
    for (int64_t z = 0; z < batch; z++) {
        image[z] = poison ? NAN : z % 2 ? 1.0 : z % 4 ? 1.5 : NAN;
    }
    CHECK_OK(context->backend->device->allocate(context->state, batch * (int64_t)sizeof *image, &there));
    CHECK_OK(context->backend->device->copy_bytes(context->state, there, image, batch * (int64_t)sizeof *image,
                                                  TCH_COPY_TO_DEVICE));
    return there;
}

/* Each case with either condition, into C and split, and with the largest element. */
static void less_is_done_where_it_may(void **state)
{
    tch_context *context = *state;
    for (int k = 0; k < count_of_cases() * 8; k++) {
        const product_case *c = &cases[k / 8];
        double *numbers = make_numbers(context, c->batch, false);
        double *largest = make_numbers(context, c->batch, true);
        trial t = begin_trial(context, c, TCH_FLOAT16, k % 2, k % 8 < 4 ? 3 : 2 + k % 2);
        *(k / 2 % 2 ? &t.high_alone : &t.negligible) = (tch_condition){numbers, 1.0};
        t.largest = k % 8 < 4 ? largest : NULL;
        if (k % 8 < 4) {
            check_split(context, &t);
        } else {
            check_floats(context, &t);
            t.beta = k % 4 ? 1.0 : -0.5;
            check_floats(context, &t);
            check_wide(context, &t);
        }
        end_trial(context, &t);
        context->backend->device->release(context->state, numbers, c->batch * (int64_t)sizeof *numbers);
        context->backend->device->release(context->state, largest, c->batch * (int64_t)sizeof *largest);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(parts_multiply), cmocka_unit_test(a_product_comes_out_split),
                                       cmocka_unit_test(less_is_done_where_it_may)};
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
