/* Entries of the operations table that a step reaches only with several ranks, large matrices or mixed types, here at
 * small sizes, so that an emulated device runs their kernels too. Where a backend does not have an entry, there is
 * nothing to check. */
#include <math.h>
#include <string.h>

#include "core/context.h"
#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

/* --- memory of the device ---------------------------------------------------------------------------------------- */

/* A batch of matrices with a gap behind every row, and its image on the host; all bits are set where nothing is. */
typedef struct batch {
    tch_matrices m;
    tch_dtype dtype;
    unsigned char *image;
    int64_t bytes;
} batch;

static batch make(tch_context *context, tch_scalar type, int64_t count, int64_t rows, int64_t cols, int64_t gap)
{
    static const tch_dtype dtypes[] = {{TCH_FLOAT, 64, 1}, {TCH_FLOAT, 32, 1}, {TCH_FLOAT, 16, 1}};
    batch b = {.dtype = dtypes[type]};
    int64_t ld = cols + gap;
    b.bytes = count * rows * ld * (int64_t)tch_dtype_size(b.dtype);
    b.m = (tch_matrices){NULL, type, rows, cols, ld, count, rows * ld};
    b.image = test_alloc((size_t)b.bytes);
    memset(b.image, 0xff, (size_t)b.bytes);
    CHECK_OK(context->backend->device->allocate(context->state, b.bytes, &b.m.data));
    return b;
}

static void move(tch_context *context, batch *b, tch_copy_kind kind)
{
    bool there = kind == TCH_COPY_TO_DEVICE;
    CHECK_OK(context->backend->device->copy_bytes(context->state, there ? b->m.data : (void *)b->image,
                                                  there ? (void *)b->image : b->m.data, b->bytes, kind));
}

static void drop(tch_context *context, batch *b)
{
    context->backend->device->release(context->state, b->m.data, b->bytes);
}

static unsigned char *element(const batch *b, int64_t row, int64_t col)
{
    return b->image + (row * b->m.ld + col) * (int64_t)tch_dtype_size(b->dtype);
}

static double value(const batch *b, int64_t row, int64_t col)
{
    return test_decode(b->dtype, element(b, row, col));
}

static void check_gaps(const batch *b)
{
    for (int64_t row = 0; row < b->m.batch * b->m.rows; row++) {
        for (int64_t col = b->m.cols; col < b->m.ld; col++) {
            CHECK(isnan(value(b, row, col)), "a gap behind row %lld was written", (long long)row);
        }
    }
}

/* --- ranks ------------------------------------------------------------------------------------------------------- */

/* The largest of a number and of its complement are complements where all ranks came with the same. */
static void ranks_agree(void **state)
{
    static const int32_t cases[][4] = {
        /* the two, the flag before, the flag expected */
        {5, ~5, 0, 0},  {5, ~5, 1, 1}, {0, ~0, 0, 0},         {7, ~5, 0, 1},
        {7, ~5, 1, 1},  {0, 0, 0, 1},  {INT32_MAX, ~0, 0, 1}, {INT32_MAX, ~INT32_MAX, 0, 0},
        {-1, ~-1, 0, 0}};
    tch_context *context = *state;
    const tch_device_ops *device = context->backend->device;
    void *there = NULL;
    CHECK_OK(device->allocate(context->state, 3 * sizeof(int32_t), &there));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t numbers[3] = {cases[i][0], cases[i][1], cases[i][2]};
        test_case("%d and %d, flag %d", numbers[0], numbers[1], numbers[2]);
        CHECK_OK(device->copy_bytes(context->state, there, numbers, sizeof numbers, TCH_COPY_TO_DEVICE));
        CHECK_OK(context->backend->update->agree(context->state, there));
        CHECK_OK(device->copy_bytes(context->state, numbers, there, sizeof numbers, TCH_COPY_TO_HOST));
        CHECK(numbers[0] == cases[i][0] && numbers[1] == cases[i][1], "the numbers changed");
        CHECK(numbers[2] == cases[i][3], "the flag is %d, expected %d", numbers[2], cases[i][3]);
    }
    device->release(context->state, there, 3 * sizeof(int32_t));
}

/* --- a row in two float16 ---------------------------------------------------------------------------------------- */

/* Random numbers between -1 and 1; the second row of each matrix is zero. */
static void fill_rows(batch *x, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    for (int64_t row = 0; row < x->m.batch * x->m.rows; row++) {
        for (int64_t col = 0; col < x->m.cols; col++) {
            double number = row % x->m.rows == 1 ? 0.0 : 2.0 * test_random_uniform(&random) - 1.0;
            test_encode(x->dtype, number, element(x, row, col));
        }
    }
}

static double length_of(const batch *x, int64_t row)
{
    double square = 0.0;
    for (int64_t col = 0; col < x->m.cols; col++) {
        square += value(x, row, col) * value(x, row, col);
    }
    return sqrt(square);
}

/* What the entry promises: 22 bits of a float32, or 2^-25 where low is below the smallest normal number; high is a
 * rounding. The product with the scale, a power of two, is exact. */
static void check_parts(const batch *x, const batch *high, const batch *low, double scale, int64_t row)
{
    for (int64_t col = 0; col < x->m.cols; col++) {
        double number = scale * (double)(float)value(x, row, col);
        double sum = value(high, row, col) + value(low, row, col);
        CHECK(value(high, row, col) == test_round(high->dtype, number), "high (%lld, %lld) is %.9g, of %.9g",
              (long long)row, (long long)col, value(high, row, col), number);
        CHECK(fabs(sum - number) <= fmax(0x1p-22 * fabs(number), 0x1p-25), "(%lld, %lld) is %.12g, expected %.12g",
              (long long)row, (long long)col, sum, number);
    }
}

/* A number of a row of length 1 is off by its rounding, and so is the length; where rows come from float64, by one more
 * of each. */
static void check_normalized(const batch *x, const batch *before, int64_t row)
{
    double length = length_of(before, row);
    double most = before->m.type == TCH_SCALAR_F64 ? 0x1p-22 : 0x1p-23;
    for (int64_t col = 0; col < x->m.cols; col++) {
        double expected = length == 0.0 ? 0.0 : value(before, row, col) / length;
        CHECK(fabs(value(x, row, col) - expected) <= most * fabs(expected), "(%lld, %lld) is %.9g, expected %.9g",
              (long long)row, (long long)col, value(x, row, col), expected);
    }
}

/* Where rows of length 1 go; or what is split is X with something added to its diagonal, divided. */
typedef enum goal { NOWHERE, IN_PLACE, ELSEWHERE, MOVED } goal;

/* One matrix of the two is left out; or high parts are all there is. */
typedef enum lack { LACKS_NOTHING, LACKS_MATRIX, LACKS_LOW } lack;

/* Of each of two matrices: whether it is done, what is added, what it is divided by. */
static const double numbers[] = {2.5, 2.0, 0.25, 3.0, 7.0, 0.1};

/* Of two matrices of three rows. */
typedef struct split_trial {
    batch x, before, rows, high, low;
    goal to;
    double scale;
} split_trial;

/* Three roundings to float32, of X, of the sum and of the quotient, and 22 bits of that. */
static void check_moved(const split_trial *t, int64_t row)
{
    for (int64_t col = 0; col < t->x.m.cols; col++) {
        double added = row % 3 == col ? numbers[2 + row / 3] : 0.0;
        double expected = t->scale * (value(&t->x, row, col) + added) / numbers[4 + row / 3];
        double size = t->scale * (fabs(value(&t->x, row, col)) + added) / numbers[4 + row / 3];
        double sum = value(&t->high, row, col) + value(&t->low, row, col);
        CHECK(fabs(sum - expected) <= fmax(0x1p-21 * size, 0x1p-24), "(%lld, %lld) is %.12g, expected %.12g",
              (long long)row, (long long)col, sum, expected);
    }
}

static void check_split_row(const split_trial *t, int64_t row)
{
    const batch *split = t->to == ELSEWHERE ? &t->rows : &t->x;
    if (t->to == MOVED) {
        check_moved(t, row);
        return;
    }
    if (t->to != NOWHERE) {
        check_normalized(split, &t->before, row);
    }
    check_parts(split, &t->high, &t->low, t->scale, row);
}

/* The high parts are what they are beside low ones, which are not written. */
static void check_high(const split_trial *t, int64_t row)
{
    const batch *split = t->to == ELSEWHERE ? &t->rows : &t->x;
    for (int64_t col = 0; col < split->m.cols; col++) {
        double number = t->scale * (double)(float)value(split, row, col);
        CHECK(t->to == MOVED || value(&t->high, row, col) == test_round(t->high.dtype, number),
              "high (%lld, %lld) is %.9g, of %.9g", (long long)row, (long long)col, value(&t->high, row, col), number);
        CHECK(isnan(value(&t->low, row, col)), "low (%lld, %lld) was written", (long long)row, (long long)col);
    }
}

/* Nothing of a matrix that is left out is written. */
static void check_left_out(const split_trial *t, int64_t row)
{
    for (int64_t col = 0; col < t->x.m.cols; col++) {
        CHECK(isnan(value(&t->high, row, col)) && isnan(value(&t->low, row, col)) && isnan(value(&t->rows, row, col)),
              "(%lld, %lld) was written", (long long)row, (long long)col);
        CHECK(value(&t->x, row, col) == value(&t->before, row, col), "(%lld, %lld) of x changed", (long long)row,
              (long long)col);
    }
}

static split_trial begin_split(tch_context *context, tch_scalar type, int64_t cols, int64_t gap, goal to)
{
    split_trial t = {.to = to, .scale = 0x1p10};
    t.x = make(context, type, 2, 3, cols, gap);
    t.rows = make(context, TCH_SCALAR_F32, 2, 3, cols, gap);
    t.high = make(context, TCH_SCALAR_F16, 2, 3, cols, gap);
    t.low = make(context, TCH_SCALAR_F16, 2, 3, cols, gap);
    fill_rows(&t.x, (uint64_t)(7 * cols + gap));
    batch *all[] = {&t.x, &t.rows, &t.high, &t.low};
    for (int i = 0; i < 4; i++) {
        move(context, all[i], TCH_COPY_TO_DEVICE);
    }
    t.before = t.x;
    t.before.image = test_alloc((size_t)t.x.bytes);
    memcpy(t.before.image, t.x.image, (size_t)t.x.bytes);
    return t;
}

static void end_split(tch_context *context, split_trial *t)
{
    batch *all[] = {&t->x, &t->rows, &t->high, &t->low};
    for (int i = 0; i < 4; i++) {
        check_gaps(all[i]);
        drop(context, all[i]);
    }
}

/* With `left_out` the second matrix is, whose number is the one that is not above the limit. */
static void check_split(tch_context *context, tch_scalar type, int64_t cols, int64_t gap, goal to, lack lacks)
{
    bool left_out = lacks == LACKS_MATRIX;
    test_case("type %d, %lld columns, %lld apart, rows to %d, without %d", (int)type, (long long)cols, (long long)gap,
              (int)to, (int)lacks);
    split_trial t = begin_split(context, type, cols, gap, to);
    double *there = NULL;
    CHECK_OK(context->backend->device->allocate(context->state, sizeof numbers, (void **)&there));
    CHECK_OK(context->backend->device->copy_bytes(context->state, there, numbers, sizeof numbers, TCH_COPY_TO_DEVICE));
    tch_split_matrices out = {t.high.m, t.low.m, t.scale};
    out.low.data = lacks == LACKS_LOW ? NULL : out.low.data;
    const tch_rows_to_split problem = {.x = &t.x.m,
                                       .rows = to == IN_PLACE    ? &t.x.m
                                               : to == ELSEWHERE ? &t.rows.m
                                                                 : NULL,
                                       .out = &out,
                                       .done = {left_out ? there : NULL, 2.0},
                                       .shift = to == MOVED ? there + 2 : NULL,
                                       .bound = to == MOVED ? there + 4 : NULL};
    CHECK_OK(context->backend->matrix->split_rows(context->state, &problem));
    batch *all[] = {&t.x, &t.rows, &t.high, &t.low};
    for (int i = 0; i < 4; i++) {
        move(context, all[i], TCH_COPY_TO_HOST);
    }
    CHECK(to == IN_PLACE || memcmp(t.before.image, t.x.image, (size_t)t.x.bytes) == 0, "x changed");
    for (int64_t row = 0; row < 6; row++) {
        if (left_out && row >= 3) {
            check_left_out(&t, row);
        } else if (lacks == LACKS_LOW) {
            check_high(&t, row);
        } else {
            check_split_row(&t, row);
        }
    }
    context->backend->device->release(context->state, there, sizeof numbers);
    end_split(context, &t);
}

/* Rows that four threads, one vector a thread, and more vectors than registers hold; aligned and not. */
static void rows_are_split(void **state)
{
    static const int64_t columns[] = {1, 6, 64, 1031, 4200};
    static const struct {
        tch_scalar type;
        goal to;
    } kinds[] = {{TCH_SCALAR_F32, NOWHERE}, {TCH_SCALAR_F32, IN_PLACE}, {TCH_SCALAR_F32, ELSEWHERE},
                 {TCH_SCALAR_F32, MOVED},   {TCH_SCALAR_F64, NOWHERE},  {TCH_SCALAR_F64, ELSEWHERE},
                 {TCH_SCALAR_F64, MOVED}};
    enum { COLUMNS = sizeof columns / sizeof columns[0], KINDS = sizeof kinds / sizeof kinds[0] };
    tch_context *context = *state;
    if (context->backend->matrix->split_rows == NULL) {
        return;
    }
    for (int k = 0; k < COLUMNS * KINDS * 6; k++) {
        int64_t cols = columns[k / KINDS / 6];
        goal to = kinds[k / 6 % KINDS].to;
        lack lacks = (lack)(k / 2 % 3);
        if (lacks == LACKS_MATRIX && (to == NOWHERE || to == MOVED)) {
            continue;
        }
        check_split(context, kinds[k / 6 % KINDS].type, cols, k % 2 ? 3 : 8 - cols % 8, to, lacks);
    }
}

/* --- rows in another order --------------------------------------------------------------------------------------- */

/* Backwards in the first matrix and every other row first in the second; float32 rows may become float64. */
static void check_permuted(tch_context *context, tch_scalar to, int64_t rows, int64_t cols, int64_t gap)
{
    int32_t *order = test_alloc((size_t)(2 * rows) * sizeof *order);
    void *there = NULL;
    test_case("%lld by %lld, %lld apart, to type %d", (long long)rows, (long long)cols, (long long)gap, (int)to);
    batch x = make(context, TCH_SCALAR_F32, 2, rows, cols, gap);
    batch out = make(context, to, 2, rows, cols, gap);
    fill_rows(&x, (uint64_t)(300 + rows + cols));
    for (int64_t i = 0; i < rows; i++) {
        order[i] = (int32_t)(rows - 1 - i);
        order[rows + i] = (int32_t)(i < (rows + 1) / 2 ? 2 * i : 2 * (i - (rows + 1) / 2) + 1);
    }
    int64_t bytes = 2 * rows * (int64_t)sizeof *order;
    CHECK_OK(context->backend->device->allocate(context->state, bytes, &there));
    CHECK_OK(context->backend->device->copy_bytes(context->state, there, order, bytes, TCH_COPY_TO_DEVICE));
    move(context, &x, TCH_COPY_TO_DEVICE);
    move(context, &out, TCH_COPY_TO_DEVICE);
    CHECK_OK(context->backend->matrix->permute(context->state, &x.m, there, NULL, &out.m));
    move(context, &out, TCH_COPY_TO_HOST);
    for (int64_t k = 0; k < 2 * rows * cols; k++) {
        int64_t row = k / cols;
        int64_t from = row / rows * rows + order[row];
        CHECK(value(&out, row, k % cols) == value(&x, from, k % cols), "(%lld, %lld) is %g", (long long)row,
              (long long)(k % cols), value(&out, row, k % cols));
    }
    check_gaps(&out);
    context->backend->device->release(context->state, there, bytes);
    drop(context, &x);
    drop(context, &out);
}

/* Rows of aligned vectors and not, fewer and more of them than a block takes. */
static void rows_are_put_in_order(void **state)
{
    static const struct {
        int64_t rows, cols, gap;
    } shapes[] = {{1, 4, 0}, {7, 64, 4}, {5, 1032, 8}, {6, 33, 2}, {33, 12, 3}};
    for (int k = 0; k < 10; k++) {
        check_permuted(*state, k % 2 ? TCH_SCALAR_F64 : TCH_SCALAR_F32, shapes[k / 2].rows, shapes[k / 2].cols,
                       shapes[k / 2].gap);
    }
}

/* --- inspection -------------------------------------------------------------------------------------------------- */

static void fill_symmetric(batch *b, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    int64_t n = b->m.rows;
    for (int64_t row = 0; row < b->m.batch * n; row++) {
        for (int64_t j = 0; j <= row % n; j++) {
            test_encode(b->dtype, 2.0 * test_random_uniform(&random) - 1.0, element(b, row, j));
            memcpy(element(b, row - row % n + j, row % n), element(b, row, j), tch_dtype_size(b->dtype));
        }
    }
}

/* Symmetric but for one element of the second matrix, the first of which has the largest; `bad` ones are not finite. */
static void check_inspection(tch_context *context, tch_scalar type, int64_t n, int64_t gap, int64_t bad)
{
    enum { MATRICES = 2, NUMBERS = 3 * MATRICES };
    double numbers[NUMBERS];
    void *there = NULL;
    test_case("inspection, type %d, n %lld, %lld apart, %lld bad", (int)type, (long long)n, (long long)gap,
              (long long)bad);
    batch x = make(context, type, MATRICES, n, n, gap);
    fill_symmetric(&x, (uint64_t)(900 + n));
    test_encode(x.dtype, -3.0, element(&x, 0, 0));
    if (n > 1) {
        test_encode(x.dtype, value(&x, 2 * n - 1, 0) + 0.5, element(&x, 2 * n - 1, 0));
    }
    for (int64_t k = 0; k < bad; k++) {
        test_encode(x.dtype, k % 2 ? (double)NAN : (double)INFINITY, element(&x, n - 1, n - 1 - k));
    }
    double gap_there = n > 1 ? fabs(value(&x, 2 * n - 1, 0) - value(&x, n, n - 1)) : 0.0;
    move(context, &x, TCH_COPY_TO_DEVICE);
    CHECK_OK(context->backend->device->allocate(context->state, sizeof numbers, &there));
    CHECK_OK(context->backend->matrix->reduce(context->state, TCH_REDUCE_INSPECT, &x.m, there));
    CHECK_OK(context->backend->device->copy_bytes(context->state, numbers, there, sizeof numbers, TCH_COPY_TO_HOST));
    double largest = 0.0;
    for (int64_t k = 0; k < n * n; k++) {
        largest = fmax(largest, fabs(value(&x, n + k / n, k % n)));
    }
    CHECK(bad > 0 ? isinf(numbers[0]) : numbers[0] == 3.0, "the largest is %g", numbers[0]);
    CHECK(numbers[1] == largest, "the largest is %g, expected %g", numbers[1], largest);
    CHECK(numbers[2] == (double)bad && numbers[3] == 0.0, "%g and %g are not finite", numbers[2], numbers[3]);
    CHECK(bad > 0 || numbers[4] == 0.0, "an asymmetry of %g", numbers[4]);
    CHECK(fabs(numbers[5] - gap_there) <= 0x1p-22, "an asymmetry of %g, expected %g", numbers[5], gap_there);
    context->backend->device->release(context->state, there, sizeof numbers);
    drop(context, &x);
}

/* One tile and several, whole and ragged, in rows of aligned vectors and not. */
static void matrices_are_inspected(void **state)
{
    static const int64_t sides[] = {1, 3, 4, 31, 64, 68, 129, 132, 192};
    for (int k = 0; k < 9 * 4; k++) {
        int64_t n = sides[k / 4];
        int64_t bad = k % 2 == 0 ? 0 : n < 3 ? n : 3;
        check_inspection(*state, k % 4 < 2 ? TCH_SCALAR_F32 : TCH_SCALAR_F64, n, n % 4 == 0 ? 4 * (n % 8) : 1, bad);
    }
}

/* --- symmetric products of mixed types --------------------------------------------------------------------------- */

/* Sums are as good as the coarser of the two types, and the result is rounded to its own. */
static void check_product(const batch *a, const batch *b, const batch *d, const batch *c)
{
    tch_dtype coarse = a->dtype.bits < c->dtype.bits ? a->dtype : c->dtype;
    int64_t n = a->m.rows;
    for (int64_t row = 0; row < a->m.batch * n; row++) {
        int64_t first = row - row % n;
        for (int64_t j = 0; j < n; j++) {
            double sum = 0.0, magnitude = 0.0;
            for (int64_t k = 0; k < n; k++) {
                sum += value(a, row, k) * value(b, first + k, j);
                magnitude += fabs(value(a, row, k) * value(b, first + k, j));
            }
            bool lower = j <= row % n; /* the half that is computed */
            if (lower) {
                double expected = 1.25 * sum - 20.0 * value(d, row, j) + (j == row % n ? 0.75 : 0.0);
                double bound = (double)(n + 4) * test_unit_roundoff(coarse) * (1.25 * magnitude + 20.75);
                CHECK(fabs(value(c, row, j) - expected) <= bound, "(%lld, %lld) is %.17g, expected %.17g, bound %.2g",
                      (long long)row, (long long)j, value(c, row, j), expected, bound);
            }
            CHECK(value(c, row, j) == value(c, first + j, row % n), "(%lld, %lld) is not its mirror image",
                  (long long)row, (long long)j);
        }
    }
}

/* 0.75 I - 20 D + 1.25 A B: no kernel for one type takes it, and neither does the BLAS. */
static void products_of_mixed_types(void **state)
{
    static const int64_t sides[] = {1, 17, 70};
    tch_context *context = *state;
    if (context->backend->matrix->symmetric_product == NULL || test_on_cpu()) {
        return; /* the CPU is asked for one type at a time */
    }
    for (int i = 0; i < 6; i++) {
        int64_t n = sides[i / 2];
        tch_scalar in = i % 2 == 0 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
        test_case("%lld by %lld, type %d", (long long)n, (long long)n, (int)in);
        batch a = make(context, in, 2, n, n, 1);
        batch b = make(context, in, 2, n, n, 2);
        batch d = make(context, in, 2, n, n, 3);
        batch c = make(context, in == TCH_SCALAR_F64 ? TCH_SCALAR_F32 : TCH_SCALAR_F64, 2, n, n, 4);
        fill_symmetric(&a, 1);
        fill_symmetric(&b, 2);
        fill_symmetric(&d, 3);
        batch *const all[] = {&a, &b, &d, &c};
        for (int k = 0; k < 4; k++) {
            move(context, all[k], TCH_COPY_TO_DEVICE);
        }
        CHECK_OK(context->backend->matrix->symmetric_product(context->state, 0.75, -20.0, &d.m, 1.25, &a.m, &b.m, NULL,
                                                             0, &c.m));
        move(context, &c, TCH_COPY_TO_HOST);
        check_product(&a, &b, &d, &c);
        check_gaps(&c);
        for (int k = 0; k < 4; k++) {
            drop(context, all[k]);
        }
    }
}

/* Sums in any order are off by as many roundings of the sum of magnitudes as they have terms, and by the last two. */
static void check_gram(const batch *a, const batch *c)
{
    int64_t n = a->m.rows;
    double unit = fmax(test_unit_roundoff(a->dtype), test_unit_roundoff(c->dtype));
    for (int64_t row = 0; row < a->m.batch * n; row++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = 0.0;
            double magnitude = 0.0;
            for (int64_t k = 0; k < a->m.cols; k++) {
                double term = 1.25 * value(a, row, k) * value(a, row - row % n + j, k);
                sum += term;
                magnitude += fabs(term);
            }
            CHECK(fabs(value(c, row, j) - sum) <= (double)(a->m.cols + 2) * unit * magnitude,
                  "(%lld, %lld) is %.9g, expected %.9g", (long long)row, (long long)j, value(c, row, j), sum);
        }
    }
}

/* 1.25 A A' of other rows than columns, in a type that is not A's. */
static void grams_of_mixed_types(void **state)
{
    tch_context *context = *state;
    if (context->backend->matrix->gram == NULL || test_on_cpu()) {
        return; /* the CPU is asked for one type at a time */
    }
    for (int i = 0; i < 2; i++) {
        test_case("type %d", i);
        batch a = make(context, i == 0 ? TCH_SCALAR_F64 : TCH_SCALAR_F32, 2, 70, 33, 1);
        batch c = make(context, i == 0 ? TCH_SCALAR_F32 : TCH_SCALAR_F64, 2, 70, 70, 4);
        fill_rows(&a, 6);
        move(context, &a, TCH_COPY_TO_DEVICE);
        move(context, &c, TCH_COPY_TO_DEVICE);
        CHECK_OK(context->backend->matrix->gram(context->state, 1.25, &a.m, 0, 0.0, 0, &c.m));
        move(context, &c, TCH_COPY_TO_HOST);
        check_gram(&a, &c);
        check_gaps(&c);
        drop(context, &a);
        drop(context, &c);
    }
}

/* --- inverse factors in float32 ---------------------------------------------------------------------------------- */

/* I + S / (2 sqrt(n)), whose eigenvalues lie between 0.4 and 1.6 or so. */
static void fill_positive(batch *b, uint64_t stream)
{
    int64_t n = b->m.rows;
    fill_symmetric(b, stream);
    for (int64_t row = 0; row < b->m.batch * n; row++) {
        for (int64_t j = 0; j < n; j++) {
            double number = 0.5 * value(b, row, j) / sqrt((double)n) + (j == row % n ? 1.0 : 0.0);
            test_encode(b->dtype, number, element(b, row, j));
        }
    }
}

/* Element (i, j) of X A X' in matrix `first / n`. */
static double back(const batch *x, const batch *a, int64_t first, int64_t i, int64_t j)
{
    double sum = 0.0;
    for (int64_t k = 0; k <= i; k++) {
        for (int64_t l = 0; l <= j; l++) {
            sum += value(x, first + i, k) * value(a, first + k, l) * value(x, first + j, l);
        }
    }
    return sum;
}

static void check_inverse_factor(const batch *x, const batch *a)
{
    int64_t n = x->m.rows;
    for (int64_t row = 0; row < x->m.batch * n; row++) {
        for (int64_t j = 0; j < n; j++) {
            double expected = j == row % n ? 1.0 : 0.0;
            bool beside = j / TCH_LOWER_BLOCK > row % n / TCH_LOWER_BLOCK;
            CHECK(j <= row % n || beside || value(x, row, j) == 0.0, "(%lld, %lld) above the diagonal is %g",
                  (long long)row, (long long)j, value(x, row, j));
            if ((row + j) % 7 == 0) { /* one of seven: n^4 operations for all */
                double got = back(x, a, row - row % n, row % n, j);
                CHECK(fabs(got - expected) <= 10.0 * (double)n * test_unit_roundoff(x->dtype),
                      "X A X' is %.9g at (%lld, %lld)", got, (long long)row, (long long)j);
            }
        }
    }
}

/* Sizes of both leaves, and one of several. GPUs that have a way of their own in float64 have this one too. */
static void factors_of_float32_are_inverted(void **state)
{
    static const int64_t sides[] = {1, 20, 64, 77, 140};
    tch_context *context = *state;
    const tch_backend *t = context->backend;
    for (int i = 0; i < 5; i++) {
        int64_t n = sides[i];
        int32_t flags[2] = {TCH_REPORT_OK, TCH_REPORT_OK};
        void *there;
        void *scratch;
        int64_t bytes =
            t->device->scratch_bytes(context->state, TCH_SCRATCH_CHOLESKY_INVERSE, TCH_SCALAR_F32, n, n, 2, 0);
        test_case("%lld by %lld", (long long)n, (long long)n);
        batch a = make(context, TCH_SCALAR_F32, 2, n, n, 1);
        batch x = make(context, TCH_SCALAR_F32, 2, n, n, 3);
        fill_positive(&a, 4);
        CHECK_OK(t->device->allocate(context->state, sizeof flags, &there));
        CHECK_OK(t->device->allocate(context->state, bytes + 1, &scratch));
        CHECK_OK(t->device->copy_bytes(context->state, there, flags, sizeof flags, TCH_COPY_TO_DEVICE));
        move(context, &a, TCH_COPY_TO_DEVICE);
        move(context, &x, TCH_COPY_TO_DEVICE);
        CHECK_OK(t->matrix->cholesky(context->state, &a.m, 1, &x.m, there, scratch));
        move(context, &x, TCH_COPY_TO_HOST);
        CHECK_OK(t->device->copy_bytes(context->state, flags, there, sizeof flags, TCH_COPY_TO_HOST));
        CHECK(flags[0] == TCH_REPORT_OK && flags[1] == TCH_REPORT_OK, "flagged %d and %d", flags[0], flags[1]);
        check_inverse_factor(&x, &a);
        check_gaps(&x);
        t->device->release(context->state, there, sizeof flags);
        t->device->release(context->state, scratch, bytes + 1);
        drop(context, &a);
        drop(context, &x);
    }
}

/* --- factors in float64 ------------------------------------------------------------------------------------------ */

/* V V' / n + 1e-6 I with n / 4 columns in V: most eigenvalues are the least. The last matrix has a negative one. */
static void fill_nearly_singular(batch *b, uint64_t stream)
{
    int64_t n = b->m.rows;
    int64_t rank = n / 4 + 1;
    test_random random = test_random_stream(stream);
    double *v = test_alloc((size_t)(n * rank) * sizeof *v);
    for (int64_t m = 0; m < b->m.batch; m++) {
        for (int64_t i = 0; i < n * rank; i++) {
            v[i] = test_random_normal(&random);
        }
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < n; j++) {
                double sum = i != j ? 0.0 : i == n - 1 && m == b->m.batch - 1 ? -10.0 * (double)n : 1e-6 * (double)n;
                for (int64_t k = 0; k < rank; k++) {
                    sum += v[i * rank + k] * v[j * rank + k];
                }
                test_encode(b->dtype, sum / (double)n, element(b, m * n + i, j));
            }
        }
    }
}

/* L comes from inverses of its blocks, so that the root of the condition number magnifies rounding. */
static void check_factor(const batch *l, const batch *a, int64_t m)
{
    int64_t n = l->m.rows;
    double largest = 1e-6; /* which is the least eigenvalue */
    for (int64_t i = 0; i < n; i++) {
        largest = fmax(largest, value(a, m * n + i, i));
    }
    double allowed = (double)n * test_unit_roundoff(l->dtype) * sqrt(largest / 1e-6);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = -value(a, m * n + i, j);
            for (int64_t k = 0; k <= j && j <= i; k++) {
                sum += value(l, m * n + i, k) * value(l, m * n + j, k);
            }
            CHECK(j > i || fabs(sum) <= allowed * largest, "L L' is off by %.3g at (%lld, %lld), of %.3g", sum,
                  (long long)i, (long long)j, largest);
            bool right = j / TCH_CHOLESKY_BLOCK > i / TCH_CHOLESKY_BLOCK;
            CHECK(!right || isnan(value(l, m * n + i, j)) || value(l, m * n + i, j) == 0.0, "(%lld, %lld) was written",
                  (long long)i, (long long)j);
            CHECK(j <= i || right || fabs(value(l, m * n + i, j)) <= allowed * sqrt(largest),
                  "(%lld, %lld) above the diagonal is %g", (long long)i, (long long)j, value(l, m * n + i, j));
        }
    }
}

/* Sizes around those of leaves and bands. One matrix comes with a flag, and one is not positive definite. */
static void factors_of_float64_are_taken(void **state)
{
    enum { COUNT = 4 };
    static const int64_t sides[] = {1, 20, 128, 129, 257, 512, 530};
    tch_context *context = *state;
    const tch_backend *t = context->backend;
    for (int i = 0; i < 7; i++) {
        int64_t n = sides[i];
        int32_t flags[COUNT] = {TCH_REPORT_OK, TCH_REPORT_OK, TCH_REPORT_NOT_FINITE, TCH_REPORT_OK};
        void *there;
        test_case("%lld by %lld", (long long)n, (long long)n);
        batch a = make(context, TCH_SCALAR_F64, COUNT, n, n, 1);
        batch l = make(context, TCH_SCALAR_F64, COUNT, n, n, 3);
        batch spare = make(context, TCH_SCALAR_F64, COUNT, n, n, 0);
        batch *all[] = {&a, &l, &spare};
        fill_nearly_singular(&a, 5);
        CHECK_OK(t->device->allocate(context->state, sizeof flags, &there));
        CHECK_OK(t->device->copy_bytes(context->state, there, flags, sizeof flags, TCH_COPY_TO_DEVICE));
        for (int k = 0; k < 3; k++) {
            move(context, all[k], TCH_COPY_TO_DEVICE);
        }
        CHECK_OK(t->matrix->cholesky(context->state, &a.m, 0, &l.m, there, spare.m.data));
        move(context, &l, TCH_COPY_TO_HOST);
        CHECK_OK(t->device->copy_bytes(context->state, flags, there, sizeof flags, TCH_COPY_TO_HOST));
        CHECK(flags[0] == TCH_REPORT_OK && flags[1] == TCH_REPORT_OK, "flagged %d and %d", flags[0], flags[1]);
        assert_int_equal(flags[2], TCH_REPORT_NOT_FINITE);
        assert_int_equal(flags[3], TCH_REPORT_NOT_POSITIVE);
        check_factor(&l, &a, 0);
        check_factor(&l, &a, 1);
        check_gaps(&l);
        t->device->release(context->state, there, sizeof flags);
        for (int k = 0; k < 3; k++) {
            drop(context, all[k]);
        }
    }
}

/* --- blocks in float16 ------------------------------------------------------------------------------------------- */

static void *upload(tch_context *context, const void *bytes, int64_t count)
{
    void *there = NULL;
    CHECK_OK(context->backend->device->allocate(context->state, count, &there));
    CHECK_OK(context->backend->device->copy_bytes(context->state, there, bytes, count, TCH_COPY_TO_DEVICE));
    return there;
}

/* Every number of a block that `gather` has written, times the power of two that brings the largest to between 2^14 and
 * 2^15, once more in float16; and nothing between them. */
static void check_halves(const batch *block, const batch *halves, uint32_t bits)
{
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    double power = ldexp(1.0, 14 - ilogbf(largest));
    for (int64_t k = 0; k < block->m.rows * block->m.cols; k++) {
        double expected = test_round(halves->dtype, power * value(block, k / block->m.cols, k % block->m.cols));
        CHECK(value(halves, k / block->m.cols, k % block->m.cols) == expected, "element %lld is %g, expected %g",
              (long long)k, value(halves, k / block->m.cols, k % block->m.cols), expected);
    }
    check_gaps(halves);
}

static void gather_in_halves(tch_context *context, int64_t rows, int64_t cols, int64_t gap, int32_t transposed,
                             tch_filter filter)
{
    const tch_update_ops *t = context->backend->update;
    const tch_hyper hyper = {.beta1 = 0.8};
    const tch_clock clock = {.step = 3.0, .correction1 = 0.5, .correction2 = 0.5};
    static const uint32_t zeros[2];
    uint32_t bits[2];
    batch all[6]; /* gradient, state, two blocks, the same in float16 */
    test_case("%lld by %lld, %lld apart, transposed %d, filter %d", (long long)rows, (long long)cols, (long long)gap,
              transposed, (int)filter);
    for (int i = 0; i < 6; i++) {
        bool turned = transposed && i >= 2;
        all[i] =
            make(context, i < 4 ? TCH_SCALAR_F32 : TCH_SCALAR_F16, 1, turned ? cols : rows, turned ? rows : cols, gap);
        if (i < 2) {
            fill_rows(&all[i], (uint64_t)(rows + i));
        }
        move(context, &all[i], TCH_COPY_TO_DEVICE);
    }
    tch_rect rect = {.grad = all[0].m.data,
                     .state = {all[1].m.data},
                     .block = {all[2].m.data, all[3].m.data},
                     .clock = upload(context, &clock, sizeof clock),
                     .rows = rows,
                     .cols = cols,
                     .stride = cols + gap,
                     .block_ld = all[2].m.ld,
                     .transposed = transposed,
                     .factor = 1.0};
    tch_update update = {.rects = &rect,
                         .count = 1,
                         .real = TCH_SCALAR_F32,
                         .param_type = TCH_SCALAR_F32,
                         .grad_type = TCH_SCALAR_F32,
                         .block_type = TCH_SCALAR_F32,
                         .hyper = upload(context, &hyper, sizeof hyper)};
    uint32_t *largest = upload(context, zeros, sizeof zeros);
    CHECK_OK(t->gather(context->state, &update, filter, 0, largest, largest + 1));
    rect.block[0] = all[4].m.data;
    rect.block[1] = all[5].m.data;
    update.block_type = TCH_SCALAR_F16;
    CHECK_OK(t->gather_halves(context->state, &update, filter, 0, largest, largest + 1));
    CHECK_OK(context->backend->device->copy_bytes(context->state, bits, largest, sizeof bits, TCH_COPY_TO_HOST));
    for (int i = 0; i < 6; i++) {
        move(context, &all[i], TCH_COPY_TO_HOST);
    }
    check_halves(&all[2], &all[4], bits[0]);
    check_halves(&all[3], &all[5], bits[1]);
    context->backend->device->release(context->state, (void *)rect.clock, sizeof clock);
    context->backend->device->release(context->state, (void *)update.hyper, sizeof hyper);
    context->backend->device->release(context->state, largest, sizeof zeros);
    for (int i = 0; i < 6; i++) {
        drop(context, &all[i]);
    }
}

/* Rows with gaps, transposed, and chunks that are all full and aligned. */
static void blocks_are_gathered_in_float16(void **state)
{
    static const int64_t cases[][4] = {
        {17, 33, 3, 0}, {33, 17, 3, 1}, {64, 128, 0, 0}, {64, 128, 0, 1}, {2, 300, 4, 1}};
    tch_context *context = *state;
    for (size_t i = 0; i < 2 * TEST_COUNT(cases) && context->backend->update->gather_halves != NULL; i++) {
        const int64_t *c = cases[i / 2];
        gather_in_halves(context, c[0], c[1], c[2], (int32_t)c[3], i % 2 ? TCH_FILTER_EMA : TCH_FILTER_NESTEROV);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_agree),
        cmocka_unit_test(rows_are_split),
        cmocka_unit_test(rows_are_put_in_order),
        cmocka_unit_test(matrices_are_inspected),
        cmocka_unit_test(products_of_mixed_types),
        cmocka_unit_test(grams_of_mixed_types),
        cmocka_unit_test(factors_of_float32_are_inverted),
        cmocka_unit_test(factors_of_float64_are_taken),
        cmocka_unit_test(blocks_are_gathered_in_float16),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
