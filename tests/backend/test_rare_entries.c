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

/* Random numbers between -1 and 1, times 2^spread in the first row of each matrix and 2^-spread from the third on; the
 * second is zero. */
static void fill_rows(batch *x, int spread, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    for (int64_t row = 0; row < x->m.batch * x->m.rows; row++) {
        double size = row % x->m.rows == 1 ? 0.0 : ldexp(1.0, row % x->m.rows == 0 ? spread : -spread);
        for (int64_t col = 0; col < x->m.cols; col++) {
            double number = size * (2.0 * test_random_uniform(&random) - 1.0);
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
    lack lacks;
    double scale;
} split_trial;

/* A number of a row of length 1 is off by its rounding, and so is the length; where rows come from float64, by one more
 * of each. */
static void check_normalized(const split_trial *t, int64_t row)
{
    const batch *rows = t->to == ELSEWHERE ? &t->rows : &t->x;
    double length = length_of(&t->before, row);
    double most = t->before.m.type == TCH_SCALAR_F64 ? 0x1p-22 : 0x1p-23;
    for (int64_t col = 0; col < rows->m.cols; col++) {
        double expected = length == 0.0 ? 0.0 : value(&t->before, row, col) / length;
        CHECK(fabs(value(rows, row, col) - expected) <= most * fabs(expected), "(%lld, %lld) is %.9g, expected %.9g",
              (long long)row, (long long)col, value(rows, row, col), expected);
    }
}

/* What the entry promises: 22 bits of a float32, or 2^-25 where low is below the smallest normal number; high is a
 * rounding, whether there are low parts or not. The product with the scale, a power of two, is exact. Of X that is
 * moved there are three roundings to float32, of X, of the sum and of the quotient. */
static void check_parts(const split_trial *t, int64_t row)
{
    const batch *split = t->to == ELSEWHERE ? &t->rows : &t->x;
    double looser = t->to == MOVED ? 2.0 : 1.0;
    for (int64_t col = 0; col < split->m.cols; col++) {
        double added = t->to == MOVED && row % 3 == col ? numbers[2 + row / 3] : 0.0;
        double bound = t->to == MOVED ? numbers[4 + row / 3] : 1.0;
        double x = t->to == MOVED ? value(split, row, col) : (double)(float)value(split, row, col);
        double expected = t->scale * (x + added) / bound;
        double size = t->scale * (fabs(x) + added) / bound;
        double high = value(&t->high, row, col), low = value(&t->low, row, col);
        CHECK(t->to == MOVED || high == test_round(t->high.dtype, expected), "high (%lld, %lld) is %.9g, of %.9g",
              (long long)row, (long long)col, high, expected);
        CHECK(t->lacks == LACKS_LOW ? isnan(low)
                                    : fabs(high + low - expected) <= looser * fmax(0x1p-22 * size, 0x1p-25),
              "(%lld, %lld) is %.12g and %.12g, expected %.12g", (long long)row, (long long)col, high, low, expected);
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
    fill_rows(&t.x, to == IN_PLACE || to == ELSEWHERE ? 60 : 0, (uint64_t)(7 * cols + gap));
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
    t.lacks = lacks;
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
            continue;
        }
        if (to == IN_PLACE || to == ELSEWHERE) {
            check_normalized(&t, row);
        }
        check_parts(&t, row);
    }
    context->backend->device->release(context->state, there, sizeof numbers);
    end_split(context, &t);
}

static void check_split_of_no_rows(tch_context *context)
{
    split_trial t = begin_split(context, TCH_SCALAR_F32, 8, 0, IN_PLACE);
    tch_matrices x = t.x.m, part = t.high.m;
    x.rows = part.rows = 0;
    const tch_split_matrices out = {part, part, t.scale};
    CHECK_OK(
        context->backend->matrix->split_rows(context->state, &(tch_rows_to_split){.x = &x, .rows = &x, .out = &out}));
    end_split(context, &t);
}

/* Rows that four threads, one vector a thread, and more vectors than registers hold; aligned and not. */
static void rows_are_split(void **state)
{
    static const int64_t columns[] = {0, 1, 6, 64, 1031, 4200};
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
    check_split_of_no_rows(context);
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
            fill_rows(&all[i], 0, (uint64_t)(rows + i));
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
        cmocka_unit_test(matrices_are_inspected),
        cmocka_unit_test(blocks_are_gathered_in_float16),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
