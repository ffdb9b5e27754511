/* AdamW, SGD and Lion over all rectangles of a step, through the operations table: every option and type against the
 * reference, several steps with real clocks, stochastic rounding to the bit, and that results depend neither on how the
 * work is divided nor on threads. */
#include <math.h>
#include <string.h>

#include "support/elements.h"
#include "support/optim/update_cases.h"
#include "support/testing.h"

static const ref_setting plain_setting = {.grad_scale = 1.0};

static tch_status run_adamw(world *w, const ref_setting *s)
{
    return w->backend->update->adamw(w->context->state, &w->update, s->amsgrad, s->l2);
}

static tch_status run_sgd(world *w, const ref_setting *s)
{
    return w->backend->update->sgd(w->context->state, &w->update, s->nesterov);
}

static tch_status run_lion(world *w, const ref_setting *s)
{
    (void)s;
    return w->backend->update->lion(w->context->state, &w->update);
}

/* Puts a setting's scale, sign and hyperparameters on the device. */
static void prepare(world *w, const ref_setting *s)
{
    float scale = (float)s->grad_scale;
    world_set(w, &scale, &w->numbers->grad_scale, sizeof scale);
    world_set_hyper(w, &s->hyper);
    w->update.grad_scale = s->grad_scale != 1.0 ? &w->numbers->grad_scale : NULL;
    w->update.maximize = s->maximize;
}

/* --- against the reference --------------------------------------------------------------------------------------- */

/* An operation and its reference, for each of `options` combinations of what it can be asked for. */
typedef struct formula {
    const char *name;
    uint64_t stream;
    int options;
    ref_setting (*setting)(int options);
    tch_status (*run)(world *w, const ref_setting *s);
    ref_update reference;
} formula;

static void check_formula(tch_context *context, const formula *f)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = world_begin(context, &type_cases[t], shape_cases, SHAPE_CASES, f->stream + (uint64_t)t);
        for (int options = 0; options < f->options; options += OPTION_STEP(t)) {
            test_case("%s, %s, options %d", f->name, type_cases[t].name, options);
            ref_setting s = f->setting(options);
            prepare(w, &s);
            world_run(w, f->run, &s);
            world_check(w, f->reference, &s, NULL);
        }
        world_close(w);
    }
}

static ref_setting adamw_setting(int options)
{
    ref_setting s = plain_setting;
    s.hyper = lively_hyper;
    s.amsgrad = options & 1;
    s.l2 = options >> 1 & 1;
    s.maximize = options >> 2 & 1;
    s.grad_scale = options & 8 ? 24.0 : 1.0;
    return s;
}

static void adamw_follows_the_formula(void **state)
{
    static const formula f = {"adamw", 100, 16, adamw_setting, run_adamw, ref_adamw};
    check_formula(*state, &f);
}

/* From nothing, as an optimizer begins: each step starts from what the device made of the one before. */
static void adamw_takes_several_steps(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = world_begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, 200 + (uint64_t)t);
        test_random random = test_random_stream(250 + (uint64_t)t);
        ref_setting s = adamw_setting(t & 3);
        prepare(w, &s);
        world_set_steps(w, 0);
        for (int f = REF_STATE_0; f <= REF_STATE_2; f++) {
            world_fill_constant(w, (ref_field)f, 0.0);
        }
        for (int step = 1; step <= 4; step++) {
            test_case("adamw, %s, step %d", type_cases[t].name, step);
            world_fill_gradients(w, &random);
            world_advance(w, true);
            world_run(w, run_adamw, &s);
            world_check(w, ref_adamw, &s, NULL);
            world_keep(w);
        }
        world_close(w);
    }
}

static ref_setting sgd_setting(int options)
{
    ref_setting s = plain_setting;
    s.hyper = lively_hyper;
    s.nesterov = options & 1;
    s.hyper.momentum = options & 2 ? 0.7 : 0.0;
    s.hyper.weight_decay = options & 4 ? 0.3 : 0.0;
    s.maximize = options >> 3 & 1;
    s.grad_scale = options & 8 ? 3.0 : 1.0;
    return s;
}

static void sgd_follows_the_formula(void **state)
{
    static const formula f = {"sgd", 300, 16, sgd_setting, run_sgd, ref_sgd};
    check_formula(*state, &f);
}

/* At the first step the buffer is not read: it may hold anything. Without a buffer there is no momentum. */
static void sgd_begins_with_the_gradient(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = world_begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, 400 + (uint64_t)t);
        ref_setting s = sgd_setting(7);
        test_case("sgd, %s, first step", type_cases[t].name);
        prepare(w, &s);
        world_set_steps(w, 0);
        world_advance(w, false);
        world_fill_constant(w, REF_STATE_0, (double)NAN);
        world_run(w, run_sgd, &s);
        world_check(w, ref_sgd, &s, NULL);
        test_case("sgd, %s, no buffer", type_cases[t].name);
        for (int64_t k = 0; k < w->count; k++) {
            w->rects[k].state[0] = NULL;
        }
        world_run(w, run_sgd, &s);
        world_check(w, ref_sgd, &s, NULL);
        world_close(w);
    }
}

static ref_setting lion_setting(int options)
{
    ref_setting s = plain_setting;
    s.hyper = lively_hyper;
    s.hyper.weight_decay = options & 1 ? 0.3 : 0.0;
    s.maximize = options >> 1 & 1;
    s.grad_scale = options & 4 ? 3.0 : 1.0;
    return s;
}

static void lion_follows_the_formula(void **state)
{
    static const formula f = {"lion", 450, 8, lion_setting, run_lion, ref_lion};
    check_formula(*state, &f);
}

/* The sign of nothing is 0: the parameter stays to the bit. */
static void lion_stands_still_without_a_direction(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = world_begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, 470 + (uint64_t)t);
        ref_setting s = lion_setting(0);
        test_case("lion, %s, no direction", type_cases[t].name);
        prepare(w, &s);
        world_fill_constant(w, REF_GRAD, 0.0);
        world_fill_constant(w, REF_STATE_0, 0.0);
        world_run(w, run_lion, &s);
        world_check(w, ref_nothing, &s, NULL);
        world_close(w);
    }
}

static void many_rects(void **state)
{
    for (int t = 0; t < TYPE_CASES; t += 3) {
        world *w = world_begin(*state, &type_cases[t], many_shapes(), MANY_CHUNKS, 500 + (uint64_t)t);
        ref_setting s = adamw_setting(3);
        test_case("adamw, %s, %d rectangles", type_cases[t].name, MANY_CHUNKS);
        prepare(w, &s);
        world_run(w, run_adamw, &s);
        world_check(w, ref_adamw, &s, NULL);
        test_case("lion, %s, %d rectangles", type_cases[t].name, MANY_CHUNKS);
        world_run(w, run_lion, &s);
        world_check(w, ref_lion, &s, NULL);
        test_case("adamw, %s, no rectangles", type_cases[t].name);
        w->update.count = 0;
        world_run(w, run_adamw, &s);
        world_check(w, ref_nothing, &s, NULL);
        world_close(w);
    }
}

static void skipping_writes_nothing(void **state)
{
    int32_t one = 1;
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = world_begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, 600 + (uint64_t)t);
        ref_setting s = adamw_setting(1);
        test_case("skipped, %s", type_cases[t].name);
        prepare(w, &s);
        world_set(w, &one, &w->numbers->skip, sizeof one);
        w->update.skip = &w->numbers->skip;
        world_fill_constant(w, REF_GRAD, (double)NAN);
        world_run(w, run_adamw, &s);
        world_check(w, ref_nothing, &s, NULL);
        world_run(w, run_sgd, &s);
        world_check(w, ref_nothing, &s, NULL);
        world_run(w, run_lion, &s);
        world_check(w, ref_nothing, &s, NULL);
        world_close(w);
    }
}

/* --- the same bits however the work is divided ------------------------------------------------------------------- */

static unsigned char *params_after(const world *w, int64_t *bytes)
{
    const world_field *field = &w->field[REF_PARAM];
    *bytes = field->elements * world_dtype(field->type).bits / 8;
    unsigned char *copy = test_alloc((size_t)*bytes);
    memcpy(copy, field->after, (size_t)*bytes);
    return copy;
}

static tch_status one_call_per_rect(world *w, const ref_setting *s)
{
    tch_update update = w->update;
    tch_status status = TCH_OK;
    update.count = 1;
    for (int64_t k = 0; k < w->count && status == TCH_OK; k++) {
        update.rects = &w->rects[k];
        status = w->backend->update->adamw(w->context->state, &update, s->amsgrad, s->l2);
    }
    return status;
}

static void rects_may_be_divided_among_calls(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        int64_t bytes;
        world *w = world_begin(*state, &type_cases[t], shape_cases, SHAPE_CASES, 700 + (uint64_t)t);
        ref_setting s = adamw_setting(3);
        test_case("%s", type_cases[t].name);
        prepare(w, &s);
        w->update.stochastic = 1;
        world_run(w, run_adamw, &s);
        unsigned char *together = params_after(w, &bytes);
        world_run(w, one_call_per_rect, &s);
        CHECK(memcmp(together, w->field[REF_PARAM].after, (size_t)bytes) == 0,
              "one call per rectangle gives other bits");
        world_close(w);
    }
}

static void threads_do_not_matter(void **state)
{
    int32_t threads = tch_get_num_threads();
    for (int t = 0; t < TYPE_CASES; t++) {
        int64_t bytes;
        unsigned char *first = NULL;
        world *w = world_begin(*state, &type_cases[t], many_shapes(), MANY_CHUNKS, 800 + (uint64_t)t);
        ref_setting s = adamw_setting(0);
        prepare(w, &s);
        w->update.stochastic = 1;
        for (int32_t n = 1; n <= 5; n++) {
            test_case("%s, %d threads", type_cases[t].name, n);
            CHECK_OK(tch_set_num_threads(n));
            CHECK_OK(w->backend->device->begin(w->context->state));
            world_run(w, run_adamw, &s);
            if (w->backend->device->end != NULL) {
                w->backend->device->end(w->context->state);
            }
            unsigned char *params = params_after(w, &bytes);
            CHECK(first == NULL || memcmp(first, params, (size_t)bytes) == 0, "threads change bits");
            first = params;
        }
        CHECK_OK(tch_set_num_threads(threads));
        world_close(w);
    }
}

/* --- stochastic rounding ----------------------------------------------------------------------------------------- */

static void philox_gives_its_known_answers(void **state)
{
    static const uint32_t known[2][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}};
    (void)state;
    for (int i = 0; i < 2; i++) {
        uint32_t fill = i == 0 ? 0 : 0xffffffffu;
        uint32_t counter[4] = {fill, fill, fill, fill};
        uint32_t key[2] = {fill, fill};
        uint32_t out[4];
        ref_philox(counter, key, out);
        assert_memory_equal(out, known[i], sizeof out);
    }
}

static const world_types bfloat_types = {
    "bfloat16", TCH_SCALAR_F32, TCH_SCALAR_BF16, TCH_SCALAR_F32, TCH_SCALAR_F32, false,
};

/* Sums of a bfloat16 near 1 and a small multiple of 2^-20 are exact in float32, so the bits before rounding are
 * known. */
static void fill_exact(world *w, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    for (int f = REF_PARAM; f <= REF_GRAD; f++) {
        world_field *field = &w->field[f];
        tch_dtype dtype = world_dtype(field->type);
        for (int64_t i = 0; i < field->elements; i++) {
            double whole = floor(test_random_uniform(&random) * 8000.0) - 4000.0;
            double sign = test_random_uniform(&random) < 0.5 ? -1.0 : 1.0;
            test_encode(dtype, f == REF_PARAM ? sign * (1.0 + test_random_uniform(&random) * 0.9) : whole * 0x1p-10,
                        field->before + i * dtype.bits / 8);
        }
    }
}

static ref_setting exact_setting(void)
{
    ref_setting s = plain_setting;
    s.hyper = (tch_hyper){.lr = 0x1p-10};
    return s;
}

static uint16_t bits_at(const unsigned char *image, int64_t index)
{
    uint16_t bits;
    memcpy(&bits, image + 2 * index, sizeof bits);
    return bits;
}

static void check_exact_rect(const world *w, int64_t k, double step)
{
    const tch_rect *p = &w->rects[k];
    for (int64_t i = 0; i < p->rows; i++) {
        for (int64_t j = 0; j < p->cols; j++) {
            int64_t at = world_index(w, k, REF_PARAM, i, j);
            int64_t grad_at = world_index(w, k, REF_GRAD, i, j);
            double before = test_decode(TCH_BFLOAT16, w->field[REF_PARAM].before + 2 * at);
            double gradient = test_decode(TCH_FLOAT32, w->field[REF_GRAD].before + 4 * grad_at);
            uint16_t expected =
                ref_round_at_random((float)(before - 0x1p-10 * gradient), w->update.seed, (uint32_t)step,
                                    (uint32_t)p->parameter, (uint64_t)(p->first + i * p->stride + j));
            uint16_t got = bits_at(w->field[REF_PARAM].after, at);
            CHECK(got == expected, "rectangle %lld (%lld, %lld): %04x, expected %04x", (long long)k, (long long)i,
                  (long long)j, got, expected);
        }
    }
}

static void random_bits_are_those_of_the_table(void **state)
{
    static const uint64_t seeds[] = {0, 1, 0x123456789abcdef0u};
    ref_setting s = exact_setting();
    world *w = world_begin(*state, &bfloat_types, shape_cases, SHAPE_CASES, 900);
    fill_exact(w, 901);
    prepare(w, &s);
    w->update.stochastic = 1;
    for (int64_t k = 0; k < w->count; k++) {
        w->rects[k].factor = 1.0F;
        w->rects[k].first += k % 2 == 0 ? 0 : ((int64_t)1 << 34) - 3; /* across the low word of the counter */
    }
    for (int i = 0; i < 3; i++) {
        test_case("seed %llx", (unsigned long long)seeds[i]);
        w->update.seed = seeds[i];
        world_set_steps(w, 0);
        for (int step = 1; step <= 2; step++) {
            world_advance(w, false);
            world_run(w, run_sgd, &s);
            for (int64_t k = 0; k < w->count; k++) {
                check_exact_rect(w, k, (double)step);
            }
        }
    }
    world_close(w);
}

/* 1 + f 2^-7 becomes 1 + 2^-7 with probability f: over n elements the share is off by at most 5 sqrt(f (1 - f) / n),
 * but for one case in a million. */
static void the_mean_of_roundings_is_right(void **state)
{
    enum { N = 40000 };
    static const double shares[] = {0.0, 1.0 / 64, 0.25, 0.5, 0.9375};
    static const world_shape shape = {1, N, 0, 0, 0};
    ref_setting s = exact_setting();
    world *w = world_begin(*state, &bfloat_types, &shape, 1, 950);
    prepare(w, &s);
    w->update.stochastic = 1;
    w->rects[0].factor = 1.0F;
    world_fill_constant(w, REF_PARAM, 1.0);
    for (int c = 0; c < 5; c++) {
        int64_t up = 0;
        test_case("share %g", shares[c]);
        world_fill_constant(w, REF_GRAD, -shares[c] * 0x1p3);
        world_run(w, run_sgd, &s);
        for (int64_t j = 0; j < N; j++) {
            uint16_t bits = bits_at(w->field[REF_PARAM].after, world_index(w, 0, REF_PARAM, 0, j));
            CHECK(bits == 0x3f80 || bits == 0x3f81, "element %lld became %04x", (long long)j, bits);
            up += bits == 0x3f81;
        }
        double off = (double)up / N - shares[c];
        CHECK(fabs(off) <= 5.0 * sqrt(shares[c] * (1.0 - shares[c]) / N), "%lld of %d went up", (long long)up, N);
    }
    world_close(w);
}

/* What cannot be rounded up or down stays what it is, and a number beyond the largest may become infinite. */
static void what_is_not_finite_is_rounded_to_nearest(void **state)
{
    static const world_shape shape = {1, 5, 0, 0, 0};
    static const uint32_t gradients[5] = {0x7f800000u, 0xff800000u, 0x7f800001u, 0x7fffffffu, 0xffc00000u};
    ref_setting s = exact_setting();
    world *w = world_begin(*state, &bfloat_types, &shape, 1, 960);
    prepare(w, &s);
    w->update.stochastic = 1;
    memcpy(w->field[REF_GRAD].before + 4 * world_index(w, 0, REF_GRAD, 0, 0), gradients, sizeof gradients);
    world_run(w, run_sgd, &s);
    for (int j = 0; j < 5; j++) {
        double got = test_decode(TCH_BFLOAT16, w->field[REF_PARAM].after + 2 * world_index(w, 0, REF_PARAM, 0, j));
        test_case("element %d", j);
        CHECK(j < 2 ? got == (j == 0 ? -INFINITY : INFINITY) : isnan(got), "got %g", got);
    }
    world_close(w);
}

/* One matrix of a parameter as a whole, and cut into four rectangles that say where they begin. */
static void random_bits_do_not_depend_on_rects(void **state)
{
    enum { ROWS = 37, COLS = 53, TOP = 11, LEFT = 18 };
    static const world_shape shapes[4] = {{ROWS, COLS, 0, 0, 0}};
    int64_t bytes;
    ref_setting s = adamw_setting(0);
    world *w = world_begin(*state, &type_cases[7], shapes, 4, 970);
    prepare(w, &s);
    w->update.stochastic = 1;
    w->update.count = 1;
    world_run(w, run_adamw, &s);
    unsigned char *whole = params_after(w, &bytes);
    tch_rect base = w->rects[0];
    for (int k = 0; k < 4; k++) {
        int64_t row = k / 2 == 0 ? 0 : TOP;
        int64_t col = k % 2 == 0 ? 0 : LEFT;
        int64_t first = row * COLS + col;
        tch_rect *p = &w->rects[k];
        *p = base;
        p->rows = k / 2 == 0 ? TOP : ROWS - TOP;
        p->cols = k % 2 == 0 ? LEFT : COLS - LEFT;
        p->first += first;
        p->param = (uint16_t *)base.param + first;
        p->grad = (uint16_t *)base.grad + first;
        for (int i = 0; i < 3; i++) {
            p->state[i] = (float *)base.state[i] + first;
        }
    }
    w->update.count = 4;
    world_run(w, run_adamw, &s);
    CHECK(memcmp(whole, w->field[REF_PARAM].after, (size_t)bytes) == 0, "rectangles give other bits than the whole");
    world_close(w);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adamw_follows_the_formula),
        cmocka_unit_test(adamw_takes_several_steps),
        cmocka_unit_test(sgd_follows_the_formula),
        cmocka_unit_test(sgd_begins_with_the_gradient),
        cmocka_unit_test(lion_follows_the_formula),
        cmocka_unit_test(lion_stands_still_without_a_direction),
        cmocka_unit_test(many_rects),
        cmocka_unit_test(skipping_writes_nothing),
        cmocka_unit_test(rects_may_be_divided_among_calls),
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(philox_gives_its_known_answers),
        cmocka_unit_test(random_bits_are_those_of_the_table),
        cmocka_unit_test(the_mean_of_roundings_is_right),
        cmocka_unit_test(what_is_not_finite_is_rounded_to_nearest),
        cmocka_unit_test(random_bits_do_not_depend_on_rects),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
