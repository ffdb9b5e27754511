/* Curvature factors in sizes with specialized kernels, through the operation table: C = alpha A A' + beta C, or A' A,
 * in float32 from operands that a device may round to 11 bits.
 *
 * One random element of every 16 by 16 block must be the float64 sum up to that rounding, also for numbers whose
 * squares approach float32's range; nothing outside the matrices is read or written; with a beta of 0 C is not read;
 * and a skipped step leaves C bitwise unchanged. */
#include <float.h>

#include "support/backend/device_matrices.h"
#include "support/random.h"
#include "support/testing.h"

typedef struct factor_case {
    int64_t n, depth, batch;
    int32_t transpose;
    int64_t gap;      /* between rows of A, and twice as much between those of C */
    double magnitude; /* of A's elements */
} factor_case;

/* The first sizes are for an emulated GPU of 16 multiprocessors, which handles them as one of 132 does the others.
 * Copies of 2056 by 9001 and of 40 by 1024 by 512 exceed the workspace. */
static const factor_case cases[] = {
    {264, 70, 3, 0, 1, 1.0},     {264, 70, 3, 1, 0, 1.0},    {300, 33, 3, 1, 3, 1e-17},  {300, 33, 3, 0, 2, 1e17},
    {5, 9, 3, 0, 0, 1.0},        {264, 70, 23, 0, 1, 1.0},   {264, 70, 23, 1, 0, 1e-15}, {1032, 301, 4, 0, 0, 1.0},
    {1033, 301, 4, 1, 3, 1e15},  {2056, 65, 1, 0, 4, 1.0},   {2056, 65, 1, 1, 1, 1.0},   {2056, 9001, 1, 0, 0, 1.0},
    {2056, 9001, 1, 1, 0, 1e-3}, {1024, 512, 40, 1, 0, 1.0}, {1024, 512, 40, 0, 0, 1.0},
};
enum { CASES = sizeof cases / sizeof cases[0], EMULATED = 5 };

/* The CPU has one algorithm for all sizes and skips the large ones. */
static bool is_left_out(int i)
{
    return (device_is_emulated() || test_on_cpu()) && i >= EMULATED;
}

/* An emulated device uses all weights with the first case, and one with each of the others. */
static bool has_weight(int i, int w)
{
    return !device_is_emulated() || i == 0 || w == i % 2;
}

static void mirror(const batch *b)
{
    for (int64_t e = 0; e < b->m.batch * b->m.rows * b->m.cols; e++) {
        int64_t row = e / b->m.cols;
        int64_t i = row % b->m.rows;
        int64_t j = e % b->m.cols;
        if (j > i) {
            batch_put(b, row / b->m.rows, i, j, batch_get(b, b->image, row / b->m.rows, j, i));
        }
    }
}

/* --- what must hold ---------------------------------------------------------------------------------------------- */

static double operand(const factor_case *f, const batch *a, int64_t z, int64_t i, int64_t k)
{
    return f->transpose ? batch_get(a, a->image, z, k, i) : batch_get(a, a->image, z, i, k);
}

static void check_element(const factor_case *f, const batch *a, const batch *c, const float *after,
                          const double weight[2], int64_t z, int64_t i, int64_t j)
{
    double sum = 0.0, size = 0.0;
    for (int64_t k = 0; k < f->depth; k++) {
        double product = operand(f, a, z, i, k) * operand(f, a, z, j, k);
        sum += product;
        size += fabs(product);
    }
    double old = weight[1] == 0.0 ? 0.0 : weight[1] * batch_get(c, c->image, z, i, j);
    double expected = weight[0] * sum + old;
    double rounding = 0x1p-10 + (double)(f->depth + 8) * 0x1p-24;
    double most = rounding * weight[0] * size + 0x1p-22 * fabs(old) + FLT_MIN;
    double got = batch_get(c, after, z, i, j);
    CHECK(fabs(got - expected) <= most, "matrix %lld, (%lld, %lld): %.9g, expected %.9g, off by at most %.3g",
          (long long)z, (long long)i, (long long)j, got, expected, most);
}

static void check_result(const factor_case *f, const batch *a, const batch *c, const float *after,
                         const double weight[2])
{
    test_random random = test_random_stream(77);
    int64_t side = (f->n + 15) / 16;
    for (int64_t block = 0; block < f->batch * side * side; block++) {
        int64_t i = block / side % side * 16 + (int64_t)(16.0 * test_random_uniform(&random));
        int64_t j = block % side * 16 + (int64_t)(16.0 * test_random_uniform(&random));
        if (i < f->n && j < f->n) {
            check_element(f, a, c, after, weight, block / (side * side), i, j);
        }
    }
}

/* A step of weight 0 leaves the factor unchanged. */
static void check_factor(tch_context *context, const factor_case *f, const batch *a, const batch *c,
                         const double weight[2])
{
    float *after = batch_fetch(context, c);
    batch_check_guards(c, after);
    if (weight[0] == 0.0) {
        CHECK(memcmp(after, c->image, (size_t)c->bytes) == 0, "a skipped step changed the factor");
    } else {
        check_result(f, a, c, after, weight);
    }
}

/* A symmetric factor before the step, not read if its weight is 0. */
static batch make_factor(tch_context *context, int64_t count, int64_t n, int64_t gap, double magnitude, uint64_t stream)
{
    batch c = batch_make(context, TCH_SCALAR_F32, count, n, n, 2 * gap + n % 2);
    if (magnitude != 0.0) {
        batch_fill(&c, magnitude * magnitude, stream);
        mirror(&c);
    }
    batch_send(context, &c);
    return c;
}

static tch_clock clock_of(const double weight[2])
{
    return (tch_clock){.factor = {weight[0], weight[1]}, .factor_f32 = {(float)weight[0], (float)weight[1]}};
}

static void check_case(tch_context *context, const factor_case *f, const double weight[2], uint64_t stream)
{
    size_t mark = test_mark();
    const tch_clock clock = clock_of(weight);
    test_case("%lld x %lld from %lld, transpose %d, of size %g, weights %g and %g", (long long)f->batch,
              (long long)f->n, (long long)f->depth, f->transpose, f->magnitude, weight[0], weight[1]);
    batch a = batch_make(context, TCH_SCALAR_F32, f->batch, f->transpose ? f->depth : f->n,
                         f->transpose ? f->n : f->depth, f->gap);
    batch c = make_factor(context, f->batch, f->n, f->gap, weight[1] == 0.0 ? 0.0 : f->magnitude, stream + 1);
    batch_fill(&a, weight[0] == 0.0 ? 0.0 : f->magnitude, stream);
    batch_send(context, &a);
    void *there = device_copy(context, &clock, sizeof clock);
    const tch_blocks blocks = {a.m, NULL};
    const tch_factor_update how = {
        .clock = there, .rows = f->transpose ? NULL : &c.m, .columns = f->transpose ? &c.m : NULL, .rounded = 1};
    CHECK_OK(context->backend->update->update_factors(context->state, &blocks, &how));
    check_factor(context, f, &a, &c, weight);
    test_release_since(mark);
}

TEST(factors_take_gradients_in)
{
    static const double weights[][2] = {{0.25, 0.75}, {1.0, 0.0}, {0.0, 1.0}};
    for (int i = 0; i < CASES; i++) {
        for (int w = 0; w < 3 && !is_left_out(i); w++) {
            if (has_weight(i, w)) {
                check_case(*state, &cases[i], weights[w], 2900 + 10 * (uint64_t)i);
            }
        }
    }
}

/* --- both factors at once ---------------------------------------------------------------------------------------- */

typedef struct pair_case {
    int64_t rows, cols, batch, gap;
    double magnitude;
    int64_t scratch; /* bytes */
} pair_case;

/* The first is for an emulated GPU. Both copies of 20 by 1024 by 512 take 42 MB: two passes with the default workspace,
 * one with 64 MiB. Sides of 5 and of 100 are too small for the kernel. */
static const pair_case pair_cases[] = {
    {264, 300, 3, 1, 1.0, 0},          {300, 264, 3, 0, 1e-17, 64 << 20},
    {264, 301, 3, 2, 1e17, 33 << 20},  {5, 300, 3, 0, 1.0, 0},
    {264, 300, 23, 1, 1.0, 64 << 20},  {1024, 512, 20, 0, 1.0, 0},
    {512, 1024, 20, 3, 1.0, 64 << 20}, {1033, 520, 5, 1, 1e-3, 1 << 20},
    {100, 1024, 8, 0, 1.0, 64 << 20},
};
enum { PAIR_CASES = sizeof pair_cases / sizeof pair_cases[0], PAIR_EMULATED = 4, SCRATCH_GUARD = 4096 };

static void update_both(tch_context *context, const batch *a, const uint32_t *largest, const void *clock,
                        const batch c[2], void *scratch, int64_t bytes)
{
    const tch_blocks blocks = {a->m, largest};
    const tch_factor_update how = {
        .clock = clock, .rows = &c[0].m, .columns = &c[1].m, .rounded = 1, .scratch = scratch, .scratch_bytes = bytes};
    CHECK_OK(context->backend->update->update_factors(context->state, &blocks, &how));
}

/* Bitwise identical for any number of passes, and whether or not the largest elements are known. */
static void check_without_scratch(tch_context *context, const batch *a, const void *clock, const batch c[2])
{
    float *with[2] = {batch_fetch(context, &c[0]), batch_fetch(context, &c[1])};
    void *largest = batch_largest(context, a);
    for (int known = 0; known < 2; known++) {
        batch_send(context, &c[0]);
        batch_send(context, &c[1]);
        update_both(context, a, known ? largest : NULL, clock, c, NULL, 0);
        for (int i = 0; i < 2; i++) {
            float *without = batch_fetch(context, &c[i]);
            CHECK(memcmp(with[i], without, (size_t)c[i].bytes) == 0, "other bits without scratch, factor %d, known %d",
                  i, known);
        }
    }
}

/* Whether packed factors are bitwise equal to full ones: on the CPU, and if a GPU of sm_90 has a kernel for a factor of
 * this size, a tile per multiprocessor. Libraries choose algorithms by alignment. */
static bool is_same_packed(tch_context *context, int64_t n, int64_t count)
{
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    int64_t side = (n + 127) / 128;
    CHECK_OK(context->backend->device->info(0, &info));
    return test_on_cpu() || (info.compute_major == 9 && n >= 256 && side * (side + 1) / 2 * count >= info.processors);
}

/* The lower triangles of an image, row by row, followed by a guard of NaN. */
static float *pack_image(const batch *c, const float *image, int64_t *count)
{
    int64_t n = c->m.rows;
    int64_t each = n * (n + 1) / 2;
    float *packed = test_alloc((size_t)(c->m.batch * each + GUARD) * sizeof *packed);
    *count = c->m.batch * each + GUARD;
    memset(packed, 0xff, (size_t)*count * sizeof *packed);
    for (int64_t z = 0; z < c->m.batch; z++) {
        for (int64_t i = 0; i < n; i++) {
            memcpy(packed + z * each + i * (i + 1) / 2, image + batch_place(c, z, i, 0),
                   (size_t)(i + 1) * sizeof *packed);
        }
    }
    return packed;
}

/* Packed factors are bitwise identical. */
static void check_packed(tch_context *context, const batch *a, const void *clock, const batch c[2])
{
    if (!is_same_packed(context, c[0].m.rows, a->m.batch) || !is_same_packed(context, c[1].m.rows, a->m.batch)) {
        return;
    }
    tch_matrices packed[2];
    int64_t count[2];
    for (int i = 0; i < 2; i++) {
        packed[i] = c[i].m;
        packed[i].ld = 0;
        packed[i].stride = c[i].m.rows * (c[i].m.rows + 1) / 2;
        float *before = pack_image(&c[i], (const float *)c[i].image, &count[i]);
        packed[i].data = device_copy(context, before, count[i] * 4);
    }
    const tch_blocks blocks = {a->m, NULL};
    int64_t bytes = (int64_t)sizeof(float) * a->m.batch * (c[0].m.rows * c[0].m.rows + c[1].m.rows * c[1].m.rows);
    void *room = device_poison(context, bytes);
    const tch_factor_update how = {
        .clock = clock, .rows = &packed[0], .columns = &packed[1], .rounded = 1, .room = room};
    CHECK_OK(context->backend->update->update_factors(context->state, &blocks, &how));
    for (int i = 0; i < 2; i++) {
        float *expected = pack_image(&c[i], batch_fetch(context, &c[i]), &count[i]);
        float *after = device_fetch(context, packed[i].data, count[i] * 4);
        CHECK(memcmp(after, expected, (size_t)count[i] * 4) == 0, "other bits where factor %d is packed", i);
    }
}

static void check_pair(tch_context *context, const pair_case *p, const double weight[2], uint64_t stream)
{
    size_t mark = test_mark();
    const tch_clock clock = clock_of(weight);
    const int64_t bytes = p->scratch + SCRATCH_GUARD;
    const double magnitude = weight[1] == 0.0 ? 0.0 : p->magnitude;
    test_case("both factors of %lld x %lld x %lld, of size %g, weights %g and %g, %lld bytes of scratch",
              (long long)p->batch, (long long)p->rows, (long long)p->cols, p->magnitude, weight[0], weight[1],
              (long long)p->scratch);
    batch a = batch_make(context, TCH_SCALAR_F32, p->batch, p->rows, p->cols, p->gap);
    batch c[2] = {make_factor(context, p->batch, p->rows, p->gap, magnitude, stream + 1),
                  make_factor(context, p->batch, p->cols, p->gap, magnitude, stream + 2)};
    batch_fill(&a, weight[0] == 0.0 ? 0.0 : p->magnitude, stream);
    batch_send(context, &a);
    void *there = device_copy(context, &clock, sizeof clock);
    char *scratch = device_poison(context, bytes);
    update_both(context, &a, NULL, there, c, p->scratch > 0 ? scratch : NULL, p->scratch);
    for (int32_t side = 0; side < 2; side++) {
        const factor_case f = {side ? p->cols : p->rows, side ? p->rows : p->cols, p->batch, side, 0, 0};
        check_factor(context, &f, &a, &c[side], weight);
    }
    const unsigned char *behind = device_fetch(context, scratch + p->scratch, SCRATCH_GUARD);
    for (int i = 0; i < SCRATCH_GUARD; i++) {
        CHECK(behind[i] == 0xff, "byte %d behind the scratch was written", i);
    }
    check_without_scratch(context, &a, there, c);
    check_packed(context, &a, there, c);
    test_release_since(mark);
}

TEST(both_factors_take_gradients_in)
{
    static const double weights[][2] = {{0.25, 0.75}, {1.0, 0.0}, {0.0, 1.0}};
    for (int i = 0; i < (device_is_emulated() || test_on_cpu() ? (int)PAIR_EMULATED : (int)PAIR_CASES); i++) {
        for (int w = 0; w < (i < PAIR_EMULATED ? 3 : 1); w++) {
            if (has_weight(i, w)) {
                check_pair(*state, &pair_cases[i], weights[w], 5900 + 10 * (uint64_t)i);
            }
        }
    }
}

TEST_MAIN(test_open_context, test_close_context)
