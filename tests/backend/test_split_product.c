/* Products of split matrices, by a backend's own kernel or as separate products of their parts.
 *
 * Random elements must be the float64 sums of the included products up to float32 accumulation, an error far below what
 * any part contributes; nothing outside the result is written; and a split result equals that of split_rows. Kernels
 * may skip work by a per-matrix condition. */
#include "core/tensor.h"
#include "linalg/gram_schmidt.h"
#include "support/backend/device_matrices.h"
#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

typedef struct product_case {
    int64_t rows, cols, depth, batch;
    int64_t gap; /* between rows of C */
} product_case;

/* The first sizes are for an emulated GPU, which has few multiprocessors: one tile and several, partial in each
 * direction, with odd and even numbers of steps. */
static const product_case cases[] = {
    {256, 128, 64, 2, 0},   {130, 72, 200, 2, 4},    {264, 257, 136, 1, 1},   {40, 264, 8, 1, 0},
    {7, 5, 3, 2, 0},        {300, 129, 77, 1, 3},    {130, 72, 200, 22, 4},   {264, 257, 136, 8, 1},
    {256, 640, 1024, 5, 0}, {1000, 776, 1000, 1, 0}, {256, 1536, 1536, 2, 8}, {512, 512, 3072, 3, 0},
};
enum { CASES = sizeof cases / sizeof cases[0], EMULATED = 6, SAMPLES = 200 };

/* --- operands ---------------------------------------------------------------------------------------------------- */

/* High and low parts of an operand. Rows are aligned to 16 bytes. */
typedef struct parts {
    tch_split_matrices m;
    batch part[2];
} parts;

/* Parts filled with NaN. */
static parts make_parts(tch_context *context, tch_scalar type, int64_t count, int64_t rows, int64_t cols, double scale)
{
    int64_t gap = (cols + 7) / 8 * 8 - cols;
    parts p = {
        .part = {batch_make(context, type, count, rows, cols, gap), batch_make(context, type, count, rows, cols, gap)}};
    p.m = (tch_split_matrices){p.part[0].m, p.part[1].m, scale};
    return p;
}

/* High parts of size 1, and low ones below half of their unit in the last place. Drawn from a few thousand values,
 * since encoding millions would take longer than all products. */
static parts draw_parts(tch_context *context, tch_scalar type, int64_t count, int64_t rows, int64_t cols, double scale,
                        uint64_t stream)
{
    enum { DRAWN = 4096 };
    uint16_t drawn[2][DRAWN];
    test_random random = test_random_stream(stream);
    parts p = make_parts(context, type, count, rows, cols, scale);
    for (int i = 0; i < DRAWN; i++) {
        double x = test_random_normal(&random);
        test_encode(p.part[0].dtype, x, &drawn[0][i]);
        test_encode(p.part[0].dtype, x - test_decode(p.part[0].dtype, &drawn[0][i]), &drawn[1][i]);
    }
    for (int64_t e = 0; e < count * rows * cols; e++) {
        uint64_t which = test_random_bits(&random) % DRAWN;
        for (int low = 0; low < 2; low++) {
            const batch *b = &p.part[low];
            *(uint16_t *)batch_element(b, b->image, e / (rows * cols), e / cols % rows, e % cols) = drawn[low][which];
        }
    }
    batch_send(context, &p.part[0]);
    batch_send(context, &p.part[1]);
    return p;
}

static double part_at(const parts *p, int low, int64_t z, int64_t i, int64_t j)
{
    return batch_get(&p->part[low], p->part[low].image, z, i, j);
}

/* --- what must hold ---------------------------------------------------------------------------------------------- */

typedef struct trial {
    const product_case *c;
    parts a, b;
    int32_t transposed;
    tch_low low;
    double alpha, beta;
    tch_condition high_alone, negligible; /* true for odd matrices, or for none */
    double *largest;                      /* NULL, or its device copy */
    const tch_matrices *wide;             /* NULL, or the split output */
    bool handled;                         /* by a kernel that supports conditions */
} trial;

static double b_at(const trial *t, int low, int64_t z, int64_t k, int64_t j)
{
    return t->transposed ? part_at(&t->b, low, z, j, k) : part_at(&t->b, low, z, k, j);
}

/* Element (i, j) of alpha A B, and the root of the sum of its terms' squares. */
static double expected_at(const trial *t, int64_t z, int64_t i, int64_t j, double *size)
{
    double sum = 0.0, squares = 0.0;
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

/* Sums are rounded or truncated at each of depth / 16 steps, by up to 2^-23 of the partial sum, which is about the
 * magnitude of the result. A missing or doubled low part of float16 changes 2e-4 of it. */
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
    double before = t->beta == 0.0 ? 0.0 : t->beta * batch_get(c, c->image, z, i, j);
    double got = after[batch_place(c, z, i, j)];
    double split = scale == 0.0 ? 0.0 : 0x1p-22 * fabs(expected) + 0x1p-25 / scale;
    double most =
        split + bound(t, expected, size) + 3.0 * 0x1p-24 * (fabs(before) + fabs(expected) + size); /* of three sums */
    CHECK(fabs(got - before - expected) <= most, "matrix %lld, (%lld, %lld): %.9g, expected %.9g, off by at most %.3g",
          (long long)z, (long long)i, (long long)j, got, before + expected, most);
}

/* Some at random, and the last in each direction; `scale` is 0, or the scale with which C was split. */
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

/* --- running cases ----------------------------------------------------------------------------------------------- */

/* If a kernel exists it must run, given a sixth of a pair of tiles per multiprocessor and rows of C at even offsets. */
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

static void multiply_split(tch_context *context, trial *t, const batch *c, const tch_split_matrices *split)
{
    const tch_split_problem problem = {t->alpha, &t->a.m, &t->b.m,       t->transposed, t->low,     t->beta,
                                       &c->m,    split,   t->high_alone, t->negligible, t->largest, t->wide};
    if (t->beta == 0.0) {
        check_handled(context, t, &problem);
    }
    CHECK_OK(tchi_split_product(context, &problem));
}

/* The contents of an image at the positions of C. */
static double *numbers_of(const batch *b, const void *image)
{
    double *numbers = test_zeros(b->m.batch * b->m.stride + 2 * GUARD);
    for (int64_t e = 0; e < b->m.batch * b->m.rows * b->m.cols; e++) {
        int64_t row = e / b->m.cols, z = row / b->m.rows, i = row % b->m.rows, j = e % b->m.cols;
        numbers[batch_place(b, z, i, j)] = batch_get(b, image, z, i, j);
    }
    return numbers;
}

static batch make_result(tch_context *context, const trial *t, tch_scalar type)
{
    return batch_make(context, type, t->c->batch, t->c->rows, t->c->cols, t->c->gap);
}

static void check_floats(tch_context *context, trial *t)
{
    batch c = make_result(context, t, TCH_SCALAR_F32);
    if (t->beta != 0.0) {
        batch_fill(&c, 1.0, 99);
        batch_send(context, &c);
    }
    multiply_split(context, t, &c, NULL);
    float *after = batch_fetch(context, &c);
    batch_check_guards(&c, after);
    check_elements(t, &c, numbers_of(&c, after), 0.0);
}

/* The result as float64 and C, which a kernel leaves unchanged; gaps between rows are unchanged. */
static void check_wide(tch_context *context, trial *t)
{
    batch c = make_result(context, t, TCH_SCALAR_F32), wide = make_result(context, t, TCH_SCALAR_F64);
    batch_fill(&c, 1.0, 99);
    batch_send(context, &c);
    t->wide = &wide.m;
    multiply_split(context, t, &c, NULL);
    t->wide = NULL;
    batch_check_guards(&c, batch_fetch(context, &c));
    double *after = batch_fetch(context, &wide);
    batch_check_guards(&wide, after);
    check_elements(t, &c, numbers_of(&wide, after), 0.0);
}

/* The largest |alpha A B| of each matrix must be that of C. */
static void check_largest(tch_context *context, const trial *t, const batch *c, const double *values)
{
    double *got = device_fetch(context, t->largest, t->c->batch * (int64_t)sizeof *got);
    for (int64_t z = 0; z < t->c->batch; z++) {
        double most = 0.0;
        for (int64_t e = 0; e < t->c->rows * t->c->cols; e++) {
            most = fmax(most, fabs(values[batch_place(c, z, e / t->c->cols, e % t->c->cols)]));
        }
        CHECK(fabs(got[z] - most) <= 0x1p-21 * most, "the largest of matrix %lld is %.9g, expected %.9g", (long long)z,
              got[z], most);
    }
}

/* C is then scratch, and the split output is separate. */
static void check_split(tch_context *context, trial *t)
{
    batch c = make_result(context, t, TCH_SCALAR_F32);
    parts out = make_parts(context, TCH_SCALAR_F16, t->c->batch, t->c->rows, t->c->cols, 16.0);
    multiply_split(context, t, &c, &out.m);
    batch_check_guards(&c, batch_fetch(context, &c));
    double *values = test_zeros(c.bytes / 4);
    for (int low = 0; low < 2; low++) {
        unsigned char *after = batch_fetch(context, &out.part[low]);
        batch_check_guards(&out.part[low], after);
        out.part[low].image = after;
    }
    for (int64_t e = 0; e < c.m.batch * c.m.rows * c.m.cols; e++) {
        int64_t row = e / c.m.cols, z = row / c.m.rows, i = row % c.m.rows, j = e % c.m.cols;
        double high = part_at(&out, 0, z, i, j), low = part_at(&out, 1, z, i, j);
        values[batch_place(&c, z, i, j)] = (high + low) / out.m.scale;
        CHECK(fabs(low) <= 0x1p-11 * fabs(high) + 0x1p-25, "element %lld is split into %g and %g", (long long)e, high,
              low);
    }
    check_elements(t, &c, values, out.m.scale);
    if (t->largest != NULL) {
        check_largest(context, t, &c, values);
    }
}

static trial begin_trial(tch_context *context, const product_case *c, tch_scalar type, int32_t transposed, int number)
{
    static const double betas[] = {0.0, 1.0, -0.5};
    trial t = {.c = c, .transposed = transposed, .low = (tch_low)(number % 4), .alpha = number % 2 ? -1.0 : 0.75};
    uint64_t stream = 640 + 10 * (uint64_t)number;
    t.beta = betas[number / 4 % 3];
    t.a = draw_parts(context, type, c->batch, c->rows, c->depth, 256.0, stream);
    t.b = draw_parts(context, type, c->batch, transposed ? c->cols : c->depth, transposed ? c->depth : c->cols, 2.0,
                     stream + 1);
    test_case("%lld x %lld x %lld x %lld, %s%s, low parts of %d, beta %g", (long long)c->batch, (long long)c->rows,
              (long long)c->cols, (long long)c->depth, type == TCH_SCALAR_F16 ? "float16" : "bfloat16",
              transposed ? ", transposed" : "", (int)t.low, t.beta);
    return t;
}

static int count_of_cases(void)
{
    return device_is_emulated() || test_on_cpu() ? (int)EMULATED : (int)CASES;
}

/* Each case with every choice of low parts, cycling through beta. */
TEST(parts_multiply)
{
    for (int k = 0; k < count_of_cases() * 16; k++) {
        trial t = begin_trial(*state, &cases[k / 16], k / 8 % 2 ? TCH_SCALAR_BF16 : TCH_SCALAR_F16, k / 4 % 2,
                              k % 4 + k / 16 % 3 * 4);
        check_floats(*state, &t);
    }
}

TEST(a_product_comes_out_split)
{
    for (int k = 0; k < count_of_cases() * 4; k++) {
        trial t = begin_trial(*state, &cases[k / 4], TCH_SCALAR_F16, k % 2, k % 4 == 0 ? 0 : 3);
        check_split(*state, &t);
    }
}

/* Numbers for conditions, true for odd matrices only with a limit of 1; or for the largest: poison. */
static double *make_numbers(tch_context *context, int64_t count, bool poison)
{
    double *image = test_alloc((size_t)count * sizeof *image);
    for (int64_t z = 0; z < count; z++) {
        image[z] = poison ? NAN : z % 2 ? 1.0 : z % 4 ? 1.5 : NAN;
    }
    return device_copy(context, image, count * (int64_t)sizeof *image);
}

/* Each case with either condition, into C and split, and with the largest element. */
TEST(less_is_done_where_it_may)
{
    tch_context *context = *state;
    for (int k = 0; k < count_of_cases() * 8; k++) {
        const product_case *c = &cases[k / 8];
        double *numbers = make_numbers(context, c->batch, false);
        double *largest = make_numbers(context, c->batch, true);
        trial t = begin_trial(context, c, TCH_SCALAR_F16, k % 2, k % 8 < 4 ? 3 : 2 + k % 2);
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
    }
}

TEST_MAIN(test_open_context, test_close_context)
