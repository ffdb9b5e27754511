/* What decides about a step, through the operations table: clocks, gradients that are not finite, whether to skip, loss
 * scales, and the factors whose weights the clocks hold. */
#include <math.h>
#include <string.h>

#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/optim/update_cases.h"
#include "support/testing.h"

static const ref_setting plain_setting = {.grad_scale = 1.0};

static world *begin(void **state, int types, uint64_t stream)
{
    return world_begin(*state, &type_cases[types], shape_cases, SHAPE_CASES, stream + (uint64_t)types);
}

/* --- clocks ------------------------------------------------------------------------------------------------------ */

/* 1 - beta^t loses what beta^t has beyond 1, and a device's pow is off by a few units. */
static void check_number(double got, double expected, const char *name)
{
    CHECK(fabs(got - expected) <= 1e-13, "%s is %.17g, expected %.17g", name, got, expected);
}

static void check_clock(const tch_clock *got, const tch_clock *expected)
{
    CHECK(got->step == expected->step, "step %g, expected %g", got->step, expected->step);
    check_number(got->correction1, expected->correction1, "correction1");
    check_number(got->correction2, expected->correction2, "correction2");
    check_number(got->graft, expected->graft, "graft");
    for (int i = 0; i < 2; i++) {
        check_number(got->factor[i], expected->factor[i], "factor");
        CHECK(got->narrow[i] == (float)got->factor[i], "narrow[%d] is not the factor, rounded", i);
    }
}

/* Steps with some of them skipped; the number of clocks is more than one launch takes. */
static void clocks_advance(void **state)
{
    static const int32_t skips[] = {1, 0, 0, 1, 0, 0, 0};
    for (int options = 0; options < 6; options++) {
        world *w = world_begin(*state, &type_cases[1], many_shapes(), MANY_CHUNKS, 2000);
        tch_clock *clocks = test_alloc((size_t)w->count * sizeof *clocks);
        tch_clock expected = {.step = 0};
        world_set_steps(w, 0);
        for (int step = 0; step < 7; step++) {
            test_case("rule %d, correct %d, step %d", options % 3, options / 3, step);
            world_set(w, &skips[step], &w->numbers->skip, sizeof skips[step]);
            CHECK_OK(w->backend->update->advance(w->context->state, w->count, w->clock_list, &w->numbers->hyper,
                                                 &w->numbers->skip, options / 3, (tch_factor_rule)(options % 3)));
            ref_advance(&expected, &lively_hyper, skips[step], options / 3, (tch_factor_rule)(options % 3));
            world_get(w, clocks, w->clocks, w->count * (int64_t)sizeof *clocks);
            for (int64_t k = 0; k < w->count; k++) {
                check_clock(&clocks[k], &expected);
            }
        }
        world_close(w);
    }
}

static void numbers_are_stored(void **state)
{
    double values[64];
    double got[66];
    world *w = world_begin(*state, &type_cases[1], many_shapes(), MANY_CHUNKS, 2050);
    for (int count = 0; count <= 64; count += 16) {
        test_case("%d numbers", count);
        memset(got, 0xFF, sizeof got);
        world_set(w, got, w->norms, sizeof got);
        for (int i = 0; i < 64; i++) {
            values[i] = 1.0 / (i + 1 + count);
        }
        CHECK_OK(w->backend->device->store_numbers(w->context->state, w->norms + 1, values, count));
        memset(values + count, 0, (size_t)(64 - count) * sizeof *values); /* not read any more */
        world_get(w, got, w->norms, sizeof got);
        for (int i = 0; i < count; i++) {
            CHECK(got[1 + i] == 1.0 / (i + 1 + count), "number %d is %g", i, got[1 + i]);
        }
        CHECK(isnan(got[0]) && isnan(got[1 + count]), "a neighbor was written");
    }
    world_close(w);
}

/* --- what is not finite ------------------------------------------------------------------------------------------ */

static int32_t found_now(world *w, int32_t before)
{
    int32_t found = before;
    world_set(w, &found, &w->numbers->found, sizeof found);
    CHECK_OK(w->backend->update->find_nonfinite(w->context->state, &w->update, &w->numbers->found));
    world_get(w, &found, &w->numbers->found, sizeof found);
    return found;
}

/* Gaps hold NaN all the time; then one element after another is not finite. */
static void every_bad_gradient_is_found(void **state)
{
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = begin(state, t, 2100);
        world_field *grad = &w->field[REF_GRAD];
        int64_t size = world_dtype(grad->type).bits / 8;
        test_case("find_nonfinite, %s, nothing to find", type_cases[t].name);
        world_upload(w);
        assert_int_equal(found_now(w, 0), 0);
        assert_int_equal(found_now(w, 1), 1);
        for (int64_t k = 0; k < w->count; k++) {
            const tch_rect *p = &w->rects[k];
            for (int64_t e = 0; e < p->rows * p->cols; e += 1 + p->rows * p->cols / 3) {
                unsigned char *at = grad->before + world_index(w, k, REF_GRAD, e / p->cols, e % p->cols) * size;
                unsigned char keep[8];
                test_case("find_nonfinite, %s, rectangle %d, element %d", type_cases[t].name, (int)k, (int)e);
                memcpy(keep, at, (size_t)size);
                test_encode(world_dtype(grad->type), bad[e % 3], at);
                world_upload(w);
                assert_int_equal(found_now(w, 0), 1);
                memcpy(at, keep, (size_t)size);
            }
        }
        world_close(w);
    }
}

static void skips_are_decided(void **state)
{
    world *w = begin(state, 1, 2200);
    world_numbers *n = w->numbers;
    double expected[2] = {0, 0};
    for (int c = 0; c < 16; c++) {
        int32_t found = c & 1;
        float inf = (float)(c >> 1 & 1);
        const int32_t *found_at = c & 4 ? NULL : &n->found;
        const float *inf_at = c & 8 ? NULL : &n->found_inf;
        int32_t skip = -1;
        double counts[2];
        test_case("decide_skip, case %d", c);
        world_set(w, &found, &n->found, sizeof found);
        world_set(w, &inf, &n->found_inf, sizeof inf);
        CHECK_OK(w->backend->update->decide_skip(w->context->state, found_at, inf_at, &n->skip, n->counts));
        world_get(w, &skip, &n->skip, sizeof skip);
        world_get(w, counts, n->counts, sizeof counts);
        int32_t wanted = (found_at != NULL && found) || (inf_at != NULL && inf != 0);
        expected[0] += 1;
        expected[1] += wanted;
        assert_int_equal(skip, wanted);
        CHECK(counts[0] == expected[0] && counts[1] == expected[1], "counts %g %g", counts[0], counts[1]);
    }
    world_close(w);
}

/* --- loss scaling ------------------------------------------------------------------------------------------------ */

static float unscaled(world *w, double scale, float before)
{
    float numbers[2] = {(float)scale, before};
    world_set(w, &numbers[0], &w->numbers->grad_scale, sizeof numbers[0]);
    world_set(w, &numbers[1], &w->numbers->found_inf, sizeof numbers[1]);
    w->update.grad_scale = &w->numbers->grad_scale;
    world_upload(w);
    CHECK_OK(w->backend->update->unscale(w->context->state, &w->update, &w->numbers->found_inf));
    world_download(w);
    world_get(w, &numbers[1], &w->numbers->found_inf, sizeof numbers[1]);
    return numbers[1];
}

static void gradients_are_unscaled(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = begin(state, t, 2300);
        ref_setting s = plain_setting;
        test_case("unscale, %s", type_cases[t].name);
        s.grad_scale = 24.0;
        w->update.maximize = 1; /* signs stay, whatever the optimizer will make of them */
        CHECK(unscaled(w, s.grad_scale, 0.0F) == 0.0F, "found something");
        world_check(w, ref_unscale, &s, NULL);
        CHECK(unscaled(w, s.grad_scale, 1.0F) == 1.0F, "forgot what was found before");
        world_close(w);
    }
}

/* Infinite before, NaN before, and infinite only after the division. */
static void unscaling_finds_what_is_not_finite(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        for (int c = 0; c < 3; c++) {
            world *w = begin(state, t, 2400);
            world_field *grad = &w->field[REF_GRAD];
            tch_dtype dtype = world_dtype(grad->type);
            double largest = dtype.bits == 64 ? 1e308 : dtype.bits == 32 || dtype.code == TCH_BFLOAT ? 1e38 : 60000.0;
            double value = c == 0 ? -INFINITY : c == 1 ? (double)NAN : largest;
            test_case("unscale, %s, case %d", type_cases[t].name, c);
            test_encode(dtype, value, grad->before + world_index(w, 13, REF_GRAD, 77, 66) * dtype.bits / 8);
            CHECK(unscaled(w, c == 2 ? 0.0625 : 4.0, 0.0F) == 1.0F, "not found");
            world_close(w);
        }
    }
}

static void check_scale(world *w, float scale, int32_t tracker)
{
    float got;
    int32_t count;
    world_get(w, &got, &w->numbers->grad_scale, sizeof got);
    world_get(w, &count, &w->numbers->tracker, sizeof count);
    CHECK(got == scale && count == tracker, "scale %g tracker %d, expected %g and %d", (double)got, count,
          (double)scale, tracker);
}

static void scales_grow_and_back_off(void **state)
{
    static const float found[] = {0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0};
    world *w = begin(state, 1, 2500);
    float scale = 0x1.8p125F;
    int32_t tracker = 0;
    world_set(w, &scale, &w->numbers->grad_scale, sizeof scale);
    world_set(w, &tracker, &w->numbers->tracker, sizeof tracker);
    for (int step = 0; step < 13; step++) {
        test_case("update_scale, step %d", step);
        world_set(w, &found[step], &w->numbers->found_inf, sizeof found[step]);
        CHECK_OK(w->backend->update->update_scale(w->context->state, &w->numbers->grad_scale, &w->numbers->tracker,
                                                  &w->numbers->found_inf, 4.0, 0.3, 3));
        tracker = found[step] != 0 ? 0 : tracker + 1;
        if (found[step] != 0) {
            scale = (float)((double)scale * 0.3);
        } else if (tracker == 3) {
            scale = isfinite((float)((double)scale * 4.0)) ? (float)((double)scale * 4.0) : scale;
            tracker = 0;
        }
        check_scale(w, scale, tracker);
    }
    world_close(w);
}

/* --- factors ----------------------------------------------------------------------------------------------------- */

typedef struct factor_case {
    tch_scalar type;
    int64_t rows, cols, batch;
    int32_t transpose;
} factor_case;

enum { LD = 40, MOST = 3 * LD * LD }; /* elements of a batch, rows LD apart */

static void fill_matrices(test_random *random, tch_scalar type, double *values, unsigned char *image)
{
    tch_dtype dtype = world_dtype(type);
    for (int64_t i = 0; i < MOST; i++) {
        test_encode(dtype, test_random_normal(random), image + i * dtype.bits / 8);
        values[i] = test_decode(dtype, image + i * dtype.bits / 8);
    }
}

/* Element (i, j) of weight A A' + rest C, and the sum of the magnitudes it is made of. */
static double factor_element(const factor_case *f, const double *a, double weight, double rest, double c, int64_t i,
                             int64_t j, double *size)
{
    int64_t inner = f->transpose ? f->rows : f->cols;
    double sum = rest * c;
    *size = fabs(rest * c);
    for (int64_t k = 0; k < inner; k++) {
        double x = f->transpose ? a[k * LD + i] : a[i * LD + k];
        double y = f->transpose ? a[k * LD + j] : a[j * LD + k];
        sum += weight * x * y;
        *size += fabs(weight * x * y);
    }
    return sum;
}

static void check_factor(const factor_case *f, const double *a, const double *c, const unsigned char *after,
                         const tch_clock *clock)
{
    tch_dtype dtype = world_dtype(f->type);
    int64_t n = f->transpose ? f->cols : f->rows;
    for (int64_t e = 0; e < f->batch * n * n; e++) {
        int64_t at = e / (n * n) * LD * LD;
        int64_t i = e / n % n;
        int64_t j = e % n;
        double size;
        double low = i < j ? c[at + j * LD + i] : c[at + i * LD + j]; /* symmetric: the lower half counts */
        double expected = factor_element(f, a + at, clock->factor[0], clock->factor[1], low, i, j, &size);
        double got = test_decode(dtype, after + (at + i * LD + j) * dtype.bits / 8);
        double most = ((double)LD + 8.0) * test_unit_roundoff(dtype) * size;
        CHECK(fabs(got - expected) <= most, "(%lld, %lld): %.9g, expected %.9g", (long long)i, (long long)j, got,
              expected);
    }
}

/* C is made symmetric, as factors are. */
static void mirror(tch_scalar type, unsigned char *image, double *values)
{
    int64_t size = world_dtype(type).bits / 8;
    for (int64_t e = 0; e < MOST; e++) {
        int64_t at = e / (LD * LD) * LD * LD;
        int64_t i = e / LD % LD;
        int64_t j = e % LD;
        if (i < j) {
            values[at + i * LD + j] = values[at + j * LD + i];
            memcpy(image + (at + i * LD + j) * size, image + (at + j * LD + i) * size, (size_t)size);
        }
    }
}

static void update_factor(world *w, const factor_case *f, const tch_clock *clock, unsigned char *a_image,
                          unsigned char *c_image)
{
    void *a;
    void *c;
    int64_t bytes = MOST * world_dtype(f->type).bits / 8;
    int64_t n = f->transpose ? f->cols : f->rows;
    CHECK_OK(tch_memory_alloc(w->context, bytes, &a));
    CHECK_OK(tch_memory_alloc(w->context, bytes, &c));
    world_set(w, a_image, a, bytes);
    world_set(w, c_image, c, bytes);
    world_set(w, clock, w->clocks, sizeof *clock);
    tch_matrices left = {a, f->type, f->rows, f->cols, LD, f->batch, LD * LD};
    tch_matrices out = {c, f->type, n, n, LD, f->batch, LD * LD};
    CHECK_OK(w->backend->update->factor_update(w->context->state, &left, f->transpose, w->clocks, 0, &out));
    world_get(w, c_image, c, bytes);
    CHECK_OK(tch_memory_free(w->context, a));
    CHECK_OK(tch_memory_free(w->context, c));
}

static void factors_take_gradients_in(void **state)
{
    static const factor_case cases[] = {
        {TCH_SCALAR_F32, 5, 9, 3, 0},   {TCH_SCALAR_F32, 5, 9, 3, 1},   {TCH_SCALAR_F64, 33, 17, 2, 0},
        {TCH_SCALAR_F64, 33, 17, 2, 1}, {TCH_SCALAR_F32, 40, 40, 1, 0}, {TCH_SCALAR_F32, 1, 1, 1, 1},
        {TCH_SCALAR_F32, 0, 4, 2, 0},   {TCH_SCALAR_F32, 4, 0, 2, 0},
    };
    static const double weights[][2] = {{1.0, 1.0}, {0.25, 0.75}, {1.0, 0.0}};
    static double a[MOST], c[MOST];
    static unsigned char a_image[MOST * 8], c_image[MOST * 8];
    world *w = begin(state, 1, 2600);
    for (int i = 0; i < 24; i++) {
        const factor_case *f = &cases[i / 3];
        const double *weight = weights[i % 3];
        tch_clock clock = {.factor = {weight[0], weight[1]}, .narrow = {(float)weight[0], (float)weight[1]}};
        test_random random = test_random_stream(2650 + (uint64_t)i);
        test_case("factor %d by %d, transpose %d, weights %g and %g", (int)f->rows, (int)f->cols, f->transpose,
                  weight[0], weight[1]);
        fill_matrices(&random, f->type, a, a_image);
        fill_matrices(&random, f->type, c, c_image);
        mirror(f->type, c_image, c);
        update_factor(w, f, &clock, a_image, c_image);
        check_factor(f, a, c, c_image, &clock);
    }
    world_close(w);
}

/* Where a step is skipped weights are 0 and 1, and gather has zeroed the blocks. */
static void a_skipped_step_leaves_factors_to_the_bit(void **state)
{
    static const factor_case cases[] = {{TCH_SCALAR_F32, 7, 11, 2, 0}, {TCH_SCALAR_F64, 12, 6, 2, 1}};
    static double values[MOST];
    static unsigned char a_image[MOST * 8], c_image[MOST * 8], before[MOST * 8];
    world *w = begin(state, 1, 2700);
    for (int i = 0; i < 4; i++) {
        const factor_case *f = &cases[i / 2];
        tch_clock clock = {.factor = {0.0, 1.0}, .narrow = {0.0F, 1.0F}};
        test_random random = test_random_stream(2750 + (uint64_t)i);
        test_case("factor %d by %d, A %s", (int)f->rows, (int)f->cols, i % 2 == 0 ? "zero" : "not a number");
        if (i % 2 == 1 && !test_on_cpu()) {
            continue; /* a promise of the CPU's alone */
        }
        memset(a_image, i % 2 == 0 ? 0 : 0xFF, sizeof a_image);
        fill_matrices(&random, f->type, values, c_image);
        mirror(f->type, c_image, values);
        memcpy(before, c_image, sizeof before);
        update_factor(w, f, &clock, a_image, c_image);
        CHECK(memcmp(before, c_image, (size_t)(MOST * world_dtype(f->type).bits / 8)) == 0, "the factor changed");
    }
    world_close(w);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clocks_advance),
        cmocka_unit_test(numbers_are_stored),
        cmocka_unit_test(every_bad_gradient_is_found),
        cmocka_unit_test(skips_are_decided),
        cmocka_unit_test(gradients_are_unscaled),
        cmocka_unit_test(unscaling_finds_what_is_not_finite),
        cmocka_unit_test(scales_grow_and_back_off),
        cmocka_unit_test(factors_take_gradients_in),
        cmocka_unit_test(a_skipped_step_leaves_factors_to_the_bit),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
