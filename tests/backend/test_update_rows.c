/* NorMuon's operations through the operations table: second moments of rows, the norm that follows from them, and the
 * step, for every type, rows along the rows and along the columns of rectangles, blocks as they are and transposed.
 * Each rectangle is a block of its own here, and its moments lie at the beginning of its state[1]. */
#include <math.h>
#include <string.h>

#include "support/elements.h"
#include "support/optim/update_cases.h"
#include "support/testing.h"

/* Roundings of the arithmetic on the way to a result: of a moment three, of an element of the step ten. The sums are in
 * double, whose roundings are one for each term at most. */
#define ROUNDINGS 16.0

typedef struct rows_trial {
    world *w;
    int64_t *first; /* of each rectangle's rows among all */
    int64_t rows;
    double *norms, *parts; /* on the device */
    double *host_norms;
} rows_trial;

static int64_t count_of(const world *w, int64_t k)
{
    const tch_rect *p = &w->rects[k];
    return p->rows == 0 || p->cols == 0 ? 0 : p->by_column ? p->cols : p->rows;
}

static int64_t length_of(const world *w, int64_t k)
{
    return w->rects[k].by_column ? w->rects[k].rows : w->rects[k].cols;
}

static void *device_numbers(const world *w, int64_t count)
{
    void *pointer = NULL;
    CHECK_OK(tch_memory_alloc(w->context, (count + 1) * (int64_t)sizeof(double), &pointer));
    return pointer;
}

static unsigned char *moment_at(const world *w, unsigned char *image, int64_t k, int64_t row)
{
    int64_t index = world_index(w, k, REF_STATE_1, 0, 0) + row;
    return image + index * world_dtype(w->field[REF_STATE_1].type).bits / 8;
}

static double moment_of(const world *w, unsigned char *image, int64_t k, int64_t row)
{
    return test_decode(world_dtype(w->field[REF_STATE_1].type), moment_at(w, image, k, row));
}

static double value_of(const world *w, ref_field field, const unsigned char *image, int64_t k, int64_t i, int64_t j)
{
    tch_dtype dtype = world_dtype(w->field[field].type);
    return test_decode(dtype, image + world_index(w, k, field, i, j) * dtype.bits / 8);
}

static double element_of(const world *w, ref_field field, const unsigned char *image, int64_t k, int64_t row, int64_t e)
{
    return w->rects[k].by_column ? value_of(w, field, image, k, e, row) : value_of(w, field, image, k, row, e);
}

/* `axis` 0: rows of rectangles, 1: columns, 2: in turn. */
static rows_trial begin(tch_context *context, const world_types *types, const world_shape *shapes, int64_t count,
                        int axis, uint64_t stream)
{
    rows_trial t = {.w = world_begin(context, types, shapes, count, stream)};
    test_random random = test_random_stream(stream + 5000);
    t.first = test_alloc((size_t)count * sizeof *t.first);
    t.host_norms = test_alloc((size_t)count * sizeof *t.host_norms);
    for (int64_t k = 0; k < count; k++) {
        tch_rect *p = &t.w->rects[k];
        p->by_column = axis == 2 ? (int32_t)(k / 2 % 2) : axis;
        p->block_index = (int32_t)k;
        t.first[k] = t.rows;
        t.rows += count_of(t.w, k);
        for (int64_t row = 0; row < count_of(t.w, k); row++) {
            double x = test_random_normal(&random);
            test_encode(world_dtype(types->real), 0.05 * x * x, moment_at(t.w, t.w->field[REF_STATE_1].before, k, row));
        }
    }
    t.norms = device_numbers(t.w, count);
    t.parts = device_numbers(t.w, t.rows);
    memset(t.host_norms, 0, (size_t)count * sizeof *t.host_norms);
    world_set(t.w, t.host_norms, t.norms, count * (int64_t)sizeof *t.norms);
    return t;
}

static void end(rows_trial *t)
{
    CHECK_OK(tch_memory_free(t->w->context, t->norms));
    CHECK_OK(tch_memory_free(t->w->context, t->parts));
    world_close(t->w);
}

static void run_moments(rows_trial *t)
{
    world *w = t->w;
    world_upload(w);
    CHECK_OK(w->backend->update->row_moments(w->context->state, &w->update, t->norms, t->parts));
    world_download(w);
    world_get(w, t->host_norms, t->norms, w->count * (int64_t)sizeof *t->norms);
}

static void run_apply(rows_trial *t)
{
    world *w = t->w;
    world_upload(w);
    CHECK_OK(w->backend->update->apply_rows(w->context->state, &w->update, t->norms));
    world_download(w);
}

/* --- moments ----------------------------------------------------------------------------------------------------- */

static void check_moments(rows_trial *t, const tch_hyper *h, int64_t k)
{
    world *w = t->w;
    double u = test_unit_roundoff(world_dtype(w->types.real));
    world_field *field = &w->field[REF_STATE_1];
    double squares = 0;
    for (int64_t row = 0; row < count_of(w, k); row++) {
        double sum = 0;
        for (int64_t e = 0; e < length_of(w, k); e++) {
            double x = element_of(w, REF_BLOCK_0, w->field[REF_BLOCK_0].before, k, row, e);
            sum += x * x;
        }
        double v = h->beta2 * moment_of(w, field->before, k, row) + (1.0 - h->beta2) * sum / (double)length_of(w, k);
        double got = moment_of(w, field->after, k, row);
        /* Two sums in float64 of squares, in orders of their own, each off by its number of terms at most. */
        double most = (ROUNDINGS * u + 2.0 * (double)length_of(w, k) * 0x1p-53) * v;
        CHECK(fabs(got - v) <= most + test_underflow(world_dtype(field->type)),
              "row %lld of rectangle %lld: %.9g, expected %.9g", (long long)row, (long long)k, got, v);
        memcpy(moment_at(w, field->before, k, row), moment_at(w, field->after, k, row),
               (size_t)world_dtype(field->type).bits / 8);
        squares += sum / ((sqrt(got) + h->eps) * (sqrt(got) + h->eps));
    }
    double terms = (double)(w->rects[k].rows * w->rects[k].cols);
    double most = (ROUNDINGS * u + terms * 0x1p-53) * sqrt(squares);
    CHECK(count_of(w, k) == 0 || fabs(t->host_norms[k] - sqrt(squares)) <= most,
          "norm of rectangle %lld: %.12g, expected %.12g", (long long)k, t->host_norms[k], sqrt(squares));
}

static void moments_follow_the_formula(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        for (int axis = 0; axis < 3; axis++) {
            test_case("row_moments, %s, axis %d", type_cases[t].name, axis);
            rows_trial r = begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, axis, 2000 + (uint64_t)t);
            ref_setting nothing = {.hyper = lively_hyper, .grad_scale = 1.0};
            run_moments(&r);
            for (int64_t k = 0; k < r.w->count; k++) {
                check_moments(&r, &lively_hyper, k);
            }
            world_check(r.w, ref_nothing, &nothing, NULL); /* nothing else was written */
            end(&r);
        }
    }
}

/* --- the step ---------------------------------------------------------------------------------------------------- */

static double allowed(const world *w, double value, double size)
{
    tch_dtype real = world_dtype(w->types.real);
    tch_dtype stored = world_dtype(w->field[REF_PARAM].type);
    double error = ROUNDINGS * (test_unit_roundoff(real) * size + test_underflow(real));
    return stored.bits < real.bits ? error + test_unit_roundoff(stored) * (fabs(value) + error) + test_underflow(stored)
                                   : error;
}

static void check_element(rows_trial *t, const tch_hyper *h, int64_t k, int64_t row, int64_t e)
{
    world *w = t->w;
    const tch_rect *p = &w->rects[k];
    world_field *field = &w->field[REF_PARAM];
    tch_dtype dtype = world_dtype(field->type);
    int64_t index = world_index(w, k, REF_PARAM, p->by_column ? e : row, p->by_column ? row : e);
    double below = sqrt(moment_of(w, w->field[REF_STATE_1].before, k, row)) + h->eps;
    double d = element_of(w, REF_BLOCK_0, w->field[REF_BLOCK_0].before, k, row, e) / below;
    double step = t->host_norms[k] > 0.0 ? h->lr * p->factor * d / t->host_norms[k] : 0.0;
    double kept = (1.0 - h->lr * h->weight_decay) * element_of(w, REF_PARAM, field->before, k, row, e);
    double got = element_of(w, REF_PARAM, field->after, k, row, e);
    double most = allowed(w, kept - step, fabs(kept) + fabs(step));
    CHECK(fabs(got - (kept - step)) <= most,
          "rectangle %lld, row %lld, element %lld: %.9g, expected %.9g, allowed %.3g", (long long)k, (long long)row,
          (long long)e, got, kept - step, most);
    memcpy(field->before + index * dtype.bits / 8, field->after + index * dtype.bits / 8, (size_t)dtype.bits / 8);
    if (w->types.master) {
        tch_dtype half = world_dtype(w->rounded.type);
        test_encode(half, got, w->rounded.before + index * half.bits / 8);
    }
}

static void check_step(rows_trial *t, const tch_hyper *h)
{
    for (int64_t k = 0; k < t->w->count; k++) {
        for (int64_t row = 0; row < count_of(t->w, k); row++) {
            for (int64_t e = 0; e < length_of(t->w, k); e++) {
                check_element(t, h, k, row, e);
            }
        }
    }
}

/* Norms of their own, one of them 0: then only the decay is left. */
static void set_norms(rows_trial *t)
{
    for (int64_t k = 0; k < t->w->count; k++) {
        t->host_norms[k] = k % 5 == 4 ? 0.0 : 0.5 + (double)(k % 3);
    }
    world_set(t->w, t->host_norms, t->norms, t->w->count * (int64_t)sizeof *t->norms);
}

static void steps_follow_the_formula(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        for (int axis = 0; axis < 3; axis++) {
            test_case("apply_rows, %s, axis %d", type_cases[t].name, axis);
            rows_trial r = begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, axis, 2100 + (uint64_t)t);
            ref_setting nothing = {.hyper = lively_hyper, .grad_scale = 1.0};
            set_norms(&r);
            run_apply(&r);
            check_step(&r, &lively_hyper);
            world_check(r.w, ref_nothing, &nothing, NULL);
            end(&r);
        }
    }
}

static void many_rects(void **state)
{
    for (int t = 0; t < TYPE_CASES; t += 3) {
        test_case("%s, %d rectangles", type_cases[t].name, MANY_CHUNKS);
        rows_trial r = begin(*state, &type_cases[t], many_shapes(), MANY_CHUNKS, 2, 2200 + (uint64_t)t);
        run_moments(&r);
        for (int64_t k = 0; k < r.w->count; k++) {
            check_moments(&r, &lively_hyper, k);
        }
        run_apply(&r);
        check_step(&r, &lively_hyper);
        test_case("%s, no rectangles", type_cases[t].name);
        ref_setting nothing = {.hyper = lively_hyper, .grad_scale = 1.0};
        r.w->update.count = 0;
        run_moments(&r);
        run_apply(&r);
        world_check(r.w, ref_nothing, &nothing, NULL);
        end(&r);
    }
}

/* --- corners ----------------------------------------------------------------------------------------------------- */

/* Without eps a row of zeros that has always been one is 0 / 0: it adds nothing, and does not move. */
static void rows_of_zeros(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        for (int axis = 0; axis < 2; axis++) {
            test_case("zeros, %s, axis %d", type_cases[t].name, axis);
            rows_trial r = begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, axis, 2300 + (uint64_t)t);
            ref_setting nothing = {.hyper = lively_hyper, .grad_scale = 1.0};
            tch_hyper h = lively_hyper;
            h.eps = 0.0;
            h.weight_decay = 0.0;
            world_set_hyper(r.w, &h);
            world_fill_constant(r.w, REF_BLOCK_0, 0.0);
            for (int64_t k = 0; k < r.w->count; k++) {
                for (int64_t row = 0; row < count_of(r.w, k); row++) {
                    test_encode(world_dtype(type_cases[t].real), 0.0,
                                moment_at(r.w, r.w->field[REF_STATE_1].before, k, row));
                }
            }
            run_moments(&r);
            for (int64_t k = 0; k < r.w->count; k++) {
                CHECK(r.host_norms[k] == 0.0, "norm of rectangle %lld is %g", (long long)k, r.host_norms[k]);
            }
            set_norms(&r);
            run_apply(&r);
            world_check(r.w, ref_nothing, &nothing, NULL);
            end(&r);
        }
    }
}

static void skipping_writes_nothing(void **state)
{
    int32_t one = 1;
    for (int t = 0; t < TYPE_CASES; t++) {
        test_case("skipped, %s", type_cases[t].name);
        rows_trial r = begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, 2, 2400 + (uint64_t)t);
        ref_setting nothing = {.hyper = lively_hyper, .grad_scale = 1.0};
        world_set(r.w, &one, &r.w->numbers->skip, sizeof one);
        r.w->update.skip = &r.w->numbers->skip;
        world_fill_constant(r.w, REF_BLOCK_0, (double)NAN);
        run_moments(&r);
        run_apply(&r);
        world_check(r.w, ref_nothing, &nothing, NULL);
        for (int64_t k = 0; k < r.w->count; k++) {
            CHECK(r.host_norms[k] == 0.0, "norm of rectangle %lld was written", (long long)k);
        }
        end(&r);
    }
}

/* --- the same bits however the work is divided ------------------------------------------------------------------- */

typedef struct image {
    unsigned char *params, *moments;
    double *norms;
} image;

static unsigned char *copy_of(const world_field *field, int64_t *bytes)
{
    *bytes = field->elements * world_dtype(field->type).bits / 8;
    unsigned char *copy = test_alloc((size_t)*bytes);
    memcpy(copy, field->after, (size_t)*bytes);
    return copy;
}

/* Moments and step from the same start, all rectangles together or one call for each. */
static void take_both(rows_trial *t, bool apart)
{
    world *w = t->w;
    tch_update update = w->update;
    int64_t calls = apart ? w->count : 1;
    update.count = apart ? 1 : w->count;
    world_upload(w);
    for (int64_t k = 0; k < calls; k++) {
        update.rects = &w->rects[k];
        CHECK_OK(w->backend->update->row_moments(w->context->state, &update, t->norms, t->parts + t->first[k]));
        CHECK_OK(w->backend->update->apply_rows(w->context->state, &update, t->norms));
    }
    world_download(w);
    world_get(w, t->host_norms, t->norms, w->count * (int64_t)sizeof *t->norms);
}

static void compare(const rows_trial *t, const image *first, const char *what)
{
    const world_field *params = &t->w->field[REF_PARAM];
    const world_field *moments = &t->w->field[REF_STATE_1];
    size_t param_bytes = (size_t)(params->elements * world_dtype(params->type).bits / 8);
    size_t moment_bytes = (size_t)(moments->elements * world_dtype(moments->type).bits / 8);
    CHECK(memcmp(first->params, params->after, param_bytes) == 0, "%s: parameters have other bits", what);
    CHECK(memcmp(first->moments, moments->after, moment_bytes) == 0, "%s: moments have other bits", what);
    CHECK(memcmp(first->norms, t->host_norms, (size_t)t->w->count * sizeof(double)) == 0, "%s: norms have other bits",
          what);
}

static void the_division_of_work_does_not_matter(void **state)
{
    int32_t threads = tch_get_num_threads();
    for (int t = 0; t < TYPE_CASES; t++) {
        int64_t bytes;
        test_case("%s", type_cases[t].name);
        rows_trial r = begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, 2, 2500 + (uint64_t)t);
        r.w->update.stochastic = 1;
        take_both(&r, false);
        image first = {copy_of(&r.w->field[REF_PARAM], &bytes), copy_of(&r.w->field[REF_STATE_1], &bytes), NULL};
        first.norms = test_alloc((size_t)r.w->count * sizeof(double));
        memcpy(first.norms, r.host_norms, (size_t)r.w->count * sizeof(double));
        take_both(&r, true);
        compare(&r, &first, "one call for each rectangle");
        for (int32_t n = 1; n <= 5; n++) {
            CHECK_OK(tch_set_num_threads(n));
            CHECK_OK(r.w->backend->device->begin(r.w->context->state));
            take_both(&r, false);
            if (r.w->backend->device->end != NULL) {
                r.w->backend->device->end(r.w->context->state);
            }
            compare(&r, &first, "another number of threads");
        }
        CHECK_OK(tch_set_num_threads(threads));
        end(&r);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moments_follow_the_formula),
        cmocka_unit_test(steps_follow_the_formula),
        cmocka_unit_test(many_rects),
        cmocka_unit_test(rows_of_zeros),
        cmocka_unit_test(skipping_writes_nothing),
        cmocka_unit_test(the_division_of_work_does_not_matter),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
