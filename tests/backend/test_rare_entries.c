/* Entries of the operation table that a step uses only with several ranks, large matrices or mixed types, at small
 * sizes, so that an emulated device also runs their kernels. Entries that a backend does not implement are skipped. */
#include "support/backend/device_matrices.h"
#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

/* --- loops over the rows of a batch ------------------------------------------------------------------------------ */

static double value(const batch *b, int64_t row, int64_t col)
{
    return batch_get(b, b->image, row / b->m.rows, row % b->m.rows, col);
}

static void put(const batch *b, int64_t row, int64_t col, double number)
{
    batch_put(b, row / b->m.rows, row % b->m.rows, col, number);
}

/* --- ranks ------------------------------------------------------------------------------------------------------- */

/* The maxima of a number and of its complement are complements if all ranks passed the same number. */
TEST(ranks_agree)
{
    static const int32_t cases[][4] = {
        /* the two numbers, the result, expected skip */
        {5, ~5, 0, 0},  {5, ~5, 1, 1}, {0, ~0, 0, 0},         {7, ~5, 0, 1},
        {7, ~5, 1, 1},  {0, 0, 0, 1},  {INT32_MAX, ~0, 0, 1}, {INT32_MAX, ~INT32_MAX, 0, 0},
        {-1, ~-1, 0, 0}};
    tch_context *context = *state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct {
            double counts[2];
            int32_t numbers[4]; /* the last is skip */
        } values = {.numbers = {cases[i][0], cases[i][1], cases[i][2], -1}};
        test_case("%d and %d, found %d", cases[i][0], cases[i][1], cases[i][2]);
        char *there = device_copy(context, &values, sizeof values);
        int32_t *numbers = (int32_t *)(void *)(there + sizeof values.counts);
        CHECK_OK(context->backend->update->decide_skip(context->state, numbers + 2, NULL, numbers, numbers + 3,
                                                       (double *)(void *)there));
        memcpy(&values, device_fetch(context, there, sizeof values), sizeof values);
        CHECK(memcmp(values.numbers, cases[i], 3 * sizeof(int32_t)) == 0, "the numbers changed");
        CHECK(values.numbers[3] == cases[i][3], "skip is %d, expected %d", values.numbers[3], cases[i][3]);
        CHECK(values.counts[0] == 1.0 && values.counts[1] == cases[i][3], "counts %g and %g", values.counts[0],
              values.counts[1]);
    }
}

/* --- a row in two float16 ---------------------------------------------------------------------------------------- */

/* Random numbers between -1 and 1, times 2^spread in the first row of each matrix and 2^-spread from the third on; the
 * second row is zero. */
static void fill_rows(batch *x, int spread, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    for (int64_t row = 0; row < x->m.batch * x->m.rows; row++) {
        double size = row % x->m.rows == 1 ? 0.0 : ldexp(1.0, row % x->m.rows == 0 ? spread : -spread);
        for (int64_t col = 0; col < x->m.cols; col++) {
            put(x, row, col, size * (2.0 * test_random_uniform(&random) - 1.0));
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

/* The output of normalized rows; or the input is X with a shifted diagonal, divided. */
typedef enum goal { NOWHERE, IN_PLACE, ELSEWHERE, MOVED } goal;

/* One matrix of the two is skipped; or there are no low parts. */
typedef enum lack { LACKS_NOTHING, LACKS_MATRIX, LACKS_LOW } lack;

/* Per matrix: whether it is active, its shift and its divisor. */
static const double numbers[] = {2.5, 2.0, 0.25, 3.0, 7.0, 0.1};

/* Two matrices of three rows. */
typedef struct split_trial {
    batch x, before, rows, high, low;
    goal to;
    lack lacks;
    double scale;
} split_trial;

/* Roundoff of an element of a normalized row, and of the norm; one more of each if rows come from float64. */
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

/* The guarantee: 22 bits of a float32, or 2^-25 if low is subnormal; high is correctly rounded, with or without low
 * parts. The product with the scale, a power of two, is exact. A shifted X has three roundings to float32: of X, of the
 * sum and of the quotient. */
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

/* A skipped matrix is not written. */
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
    t.x = batch_make(context, type, 2, 3, cols, gap);
    t.rows = batch_make(context, TCH_SCALAR_F32, 2, 3, cols, gap);
    t.high = batch_make(context, TCH_SCALAR_F16, 2, 3, cols, gap);
    t.low = batch_make(context, TCH_SCALAR_F16, 2, 3, cols, gap);
    fill_rows(&t.x, to == IN_PLACE || to == ELSEWHERE ? 60 : 0, (uint64_t)(7 * cols + gap));
    batch_send(context, &t.x);
    t.before = t.x;
    return t;
}

/* Reads all outputs. */
static void end_split(tch_context *context, split_trial *t)
{
    batch *all[] = {&t->x, &t->rows, &t->high, &t->low};
    for (int i = 0; i < 4; i++) {
        unsigned char *after = batch_fetch(context, all[i]);
        batch_check_guards(all[i], after);
        all[i]->image = after;
    }
}

/* With `left_out` the second matrix is skipped, since its number is not above the limit. */
static void check_split(tch_context *context, tch_scalar type, int64_t cols, int64_t gap, goal to, lack lacks)
{
    bool left_out = lacks == LACKS_MATRIX;
    test_case("type %d, %lld columns, %lld apart, rows to %d, without %d", (int)type, (long long)cols, (long long)gap,
              (int)to, (int)lacks);
    split_trial t = begin_split(context, type, cols, gap, to);
    t.lacks = lacks;
    double *there = device_copy(context, numbers, sizeof numbers);
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
    end_split(context, &t);
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

/* Rows for four threads, one vector per thread, and more vectors than fit in registers; aligned and not. */
TEST(rows_are_split)
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
            put(b, row, j, 2.0 * test_random_uniform(&random) - 1.0);
            put(b, row - row % n + j, row % n, value(b, row, j));
        }
    }
}

/* Symmetric except for one element of the second matrix; the first has the largest element; `bad` ones are not
 * finite. */
static void check_inspection(tch_context *context, tch_scalar type, int64_t n, int64_t gap, int64_t bad)
{
    enum { MATRICES = 2, NUMBERS = 3 * MATRICES };
    test_case("inspection, type %d, n %lld, %lld apart, %lld bad", (int)type, (long long)n, (long long)gap,
              (long long)bad);
    batch x = batch_make(context, type, MATRICES, n, n, gap);
    fill_symmetric(&x, (uint64_t)(900 + n));
    put(&x, 0, 0, -3.0);
    if (n > 1) {
        put(&x, 2 * n - 1, 0, value(&x, 2 * n - 1, 0) + 0.5);
    }
    for (int64_t k = 0; k < bad; k++) {
        put(&x, n - 1, n - 1 - k, k % 2 ? (double)NAN : (double)INFINITY);
    }
    double gap_there = n > 1 ? fabs(value(&x, 2 * n - 1, 0) - value(&x, n, n - 1)) : 0.0;
    batch_send(context, &x);
    double *there = device_poison(context, NUMBERS * sizeof *there);
    CHECK_OK(context->backend->matrix->reduce(context->state, TCH_REDUCE_INSPECT, &x.m, there));
    const double *numbers = device_fetch(context, there, NUMBERS * sizeof *there);
    double largest = 0.0;
    for (int64_t k = 0; k < n * n; k++) {
        largest = fmax(largest, fabs(value(&x, n + k / n, k % n)));
    }
    CHECK(bad > 0 ? isinf(numbers[0]) : numbers[0] == 3.0, "the largest is %g", numbers[0]);
    CHECK(numbers[1] == largest, "the largest is %g, expected %g", numbers[1], largest);
    CHECK(numbers[2] == (double)bad && numbers[3] == 0.0, "%g and %g are not finite", numbers[2], numbers[3]);
    CHECK(bad > 0 || numbers[4] == 0.0, "an asymmetry of %g", numbers[4]);
    CHECK(fabs(numbers[5] - gap_there) <= 0x1p-22, "an asymmetry of %g, expected %g", numbers[5], gap_there);
}

/* One tile and several, full and partial, with aligned rows and not. */
TEST(matrices_are_inspected)
{
    static const int64_t sides[] = {1, 3, 4, 31, 64, 68, 129, 132, 192};
    for (int k = 0; k < 9 * 4; k++) {
        int64_t n = sides[k / 4];
        int64_t bad = k % 2 == 0 ? 0 : n < 3 ? n : 3;
        check_inspection(*state, k % 4 < 2 ? TCH_SCALAR_F32 : TCH_SCALAR_F64, n, n % 4 == 0 ? 4 * (n % 8) : 1, bad);
    }
}

/* --- blocks of float16 ------------------------------------------------------------------------------------------- */

/* The smallest problem with a kernel on an emulated GPU: a tile of its factors per multiprocessor. */
enum { ROWS = 256, COLS = 384, BLOCKS = 6, ELEMENTS = ROWS * COLS, GAP = 5, SPACE = ROWS * (COLS + TCH_CODE_BLOCK) };

/* Gradients and states, and the elements of blocks as gathered with sides and without. */
typedef struct gathered {
    tch_scalar type[2];
    float *plain[2];
    void *kept[2];
    void *state[2];
} gathered;

static gathered gather_twice(tch_context *context, const tch_rect *like, tch_filter filter, int32_t l2,
                             tch_moments moments)
{
    static const tch_hyper hyper = {.beta1 = 0.8, .weight_decay = 0.25};
    const int64_t bytes = (int64_t)BLOCKS * ELEMENTS * (int64_t)sizeof(float);
    const int64_t space = (int64_t)BLOCKS * SPACE * (int64_t)sizeof(float);
    gathered out;
    float *numbers = test_alloc((size_t)space * 2);
    void *zeros = test_zeros(space / (int64_t)sizeof(double));
    test_random random = test_random_stream(91);
    for (int64_t k = 0; k < 2 * BLOCKS * SPACE; k++) {
        numbers[k] = (float)test_random_normal(&random);
    }
    const int64_t factor_bytes = (int64_t)BLOCKS * COLS * COLS * (int64_t)sizeof(float);
    const int64_t note_bytes = 2 * BLOCKS * (int64_t)sizeof(uint32_t);
    float *gradients = device_copy(context, numbers, space);
    float *params = device_copy(context, numbers + SPACE, space);
    void *factors = device_poison(context, factor_bytes);
    uint32_t *notes = device_poison(context, note_bytes);
    for (int with = 0; with < 2; with++) {
        float *state = device_copy(context, moments == TCH_MOMENTS_REAL ? (void *)(numbers + 7) : zeros, space);
        float *scales = device_copy(context, zeros, space);
        char *block[2] = {device_poison(context, bytes), device_poison(context, bytes)};
        tch_rect rects[BLOCKS];
        for (int32_t b = 0; b < BLOCKS; b++) {
            rects[b] = *like;
            rects[b].param = params + b * SPACE;
            rects[b].grad = gradients + b * SPACE;
            rects[b].state[0] = state + b * SPACE;
            rects[b].scale[0] = moments == TCH_MOMENTS_CODES ? scales + b * SPACE : NULL;
            rects[b].block[0] = block[0] + b * bytes / BLOCKS;
            rects[b].block[1] = block[1] + b * bytes / BLOCKS;
            rects[b].block_index = b;
        }
        const tch_update update = {.rects = rects,
                                   .count = BLOCKS,
                                   .real = TCH_SCALAR_F32,
                                   .param_type = TCH_SCALAR_F32,
                                   .grad_type = TCH_SCALAR_F32,
                                   .block_type = TCH_SCALAR_F32,
                                   .moments = moments,
                                   .hyper = device_copy(context, &hyper, sizeof hyper)};
        const int64_t rows = like->transposed ? like->cols : like->rows, cols = ELEMENTS / rows;
        const tch_matrices row_side = {factors, TCH_SCALAR_F32, rows, rows, rows, BLOCKS, rows * rows};
        const tch_matrices col_side = {factors, TCH_SCALAR_F32, cols, cols, cols, BLOCKS, cols * cols};
        const tch_block_sides sides = {.blocks = {NULL, TCH_SCALAR_F32, rows, cols, cols, BLOCKS, ELEMENTS},
                                       .buffers = {block[0], block[1]},
                                       .factors = {row_side, col_side},
                                       .sides = {row_side, col_side}};
        const tch_gathering how = {
            .filter = filter, .l2 = l2, .sides = with ? &sides : NULL, .notes = {notes, notes + BLOCKS}};
        for (int step = 0; step < (moments == TCH_MOMENTS_REAL ? 1 : 2); step++) {
            CHECK_OK(context->backend->update->gather(context->state, &update, &how, &out.type[with]));
        }
        out.state[with] = device_fetch(context, state, space);
        for (int k = 0; k < 2; k++) {
            *(with ? &out.kept[k] : (void **)&out.plain[k]) = device_fetch(context, block[k], bytes);
        }
    }
    return out;
}

/* On backends with float16 blocks, every element is the float32 one times the power of two that brings the block's
 * largest to between 2^14 and 2^15, stored at the front of the buffer; the rest is not written. */
static void check_fp16(const float *plain, const uint16_t *kept, int64_t block)
{
    float largest = 0.0F;
    for (int64_t k = 0; k < ELEMENTS; k++) {
        largest = fmaxf(largest, fabsf(plain[block * ELEMENTS + k]));
    }
    for (int64_t k = block * ELEMENTS; k < (block + 1) * ELEMENTS; k++) {
        double expected = test_round(TCH_FLOAT16, ldexp(plain[k], 14 - ilogbf(largest)));
        double got = test_decode(TCH_FLOAT16, kept + k);
        CHECK(got == expected, "element %lld is %g, expected %g", (long long)k, got, expected);
        CHECK(kept[BLOCKS * ELEMENTS + k] == 0xffff, "element %lld behind the blocks was written", (long long)k);
    }
}

/* Rows contiguous, transposed, and with weight decay and gaps between rows, which have no vectorized kernel. Moments
 * are rounded once, in whichever pass, and not before the blocks are written. */
TEST(blocks_may_be_gathered_in_float16)
{
    static const tch_clock clock = {.step = 3.0, .correction1 = 0.5, .correction2 = 0.5};
    tch_context *context = *state;
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    CHECK_OK(context->backend->device->info(0, &info));
    for (int i = 0; i < 24; i++) {
        tch_moments moments = (tch_moments)(i / 8);
        int64_t gap = i / 4 % 2 == 0 ? 0 : moments == TCH_MOMENTS_CODES ? TCH_CODE_BLOCK : GAP;
        int32_t transposed = i / 2 % 2;
        tch_rect like = {.clock = device_copy(context, &clock, sizeof clock),
                         .rows = ROWS,
                         .cols = COLS,
                         .stride = COLS + gap,
                         .block_ld = transposed ? ROWS : COLS,
                         .transposed = transposed,
                         .factor = 1.0};
        if (moments != TCH_MOMENTS_REAL && i % 8 % 7 != 0) {
            continue;
        }
        test_case("filter %d, transposed %d, decay %d, moments %d", 1 + i % 2, transposed, i / 4 % 2, (int)moments);
        gathered g = gather_twice(context, &like, i % 2 ? TCH_FILTER_EMA : TCH_FILTER_NESTEROV, i / 4 % 2, moments);
        CHECK(memcmp(g.state[0], g.state[1], BLOCKS * SPACE * sizeof(float)) == 0, "other moments with sides");
        CHECK(g.type[0] == TCH_SCALAR_F32, "type %d without sides", (int)g.type[0]);
        CHECK((g.type[1] == TCH_SCALAR_F16) == (info.compute_major == 9 && 3 * BLOCKS >= info.processors),
              "type %d with sides", (int)g.type[1]);
        for (int k = 0; k < 2; k++) {
            if (g.type[1] == TCH_SCALAR_F16) {
                for (int64_t b = 0; b < BLOCKS; b++) {
                    check_fp16(g.plain[k], g.kept[k], b);
                }
            } else {
                CHECK(memcmp(g.plain[k], g.kept[k], BLOCKS * ELEMENTS * sizeof(float)) == 0, "other bits with sides");
            }
        }
    }
}

TEST_MAIN(test_open_context, test_close_context)
