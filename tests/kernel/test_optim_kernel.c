/* Updates of one's own in an optimizer: AdamW and SGD written again as functions of one element must go the way of the
 * references with every option, type and layout; a function that does not compile, is not the one asked for, or fails
 * its check must leave a training that is the built-in's to the bit.
 *
 * Tolerances are those of the built-in, see test_optim_adamw_sgd.c, with room for a formula that rounds twice as often:
 * 4 (steps + 10) u of the way. */
#include <math.h>
#include <string.h>

#include "support/elements.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 12

static const trial_shape shapes[] = {
    {.ndim = 1, .shape = {37}},
    {.ndim = 0},
    {.ndim = 1, .shape = {0}},
    {.ndim = 2, .shape = {13, 9}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 4, .shape = {2, 3, 4, 5}, .order = {0, 3, 1, 2}},
    {.ndim = 2, .shape = {17, 61}, .gradient = LAYOUT_REVERSED},
    {.ndim = 1, .shape = {5003}, .gradient = LAYOUT_OFFSET},
    {.ndim = 1, .shape = {4096}, .gradient_follows = 1},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static const char adamw_source[] = "__device__ void adamw(tch_element &e, const tch_numbers &k)\n"
                                   "{\n"
                                   "    tch_real g = k.l2 ? e.g + k.weight_decay * e.p : e.g;\n"
                                   "    if (!k.l2) e.p *= 1 - k.lr * k.weight_decay;\n"
                                   "    e.m = k.beta1 * e.m + k.one_minus_beta1 * g;\n"
                                   "    e.v = k.beta2 * e.v + k.one_minus_beta2 * g * g;\n"
                                   "    tch_real v = e.v;\n"
                                   "    if (k.amsgrad) v = e.vmax = e.vmax >= v ? e.vmax : v;\n"
                                   "    e.p -= k.lr * (e.m / k.correction1) / (sqrt(v / k.correction2) + k.eps);\n"
                                   "}\n";

static const char sgd_source[] = "template <int one>\n"
                                 "__device__ void sgd(tch_element &e, const tch_numbers &k)\n"
                                 "{\n"
                                 "    tch_real d = e.g + k.weight_decay * e.p;\n"
                                 "    if (k.momentum != 0) {\n"
                                 "        e.m = k.step <= one ? d : k.momentum * e.m + (one - k.dampening) * d;\n"
                                 "        d = k.nesterov ? d + k.momentum * e.m : e.m;\n"
                                 "    }\n"
                                 "    e.p -= k.lr * d;\n"
                                 "}\n";

/* --- setting and asking ------------------------------------------------------------------------------------------ */

static tch_status try_to_set(tch_optimizer *optimizer, const char *source, const char *name, double tolerance)
{
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    tch_optim_kernel kernel = TCH_OPTIM_KERNEL_INIT;
    config.source = source;
    config.path = "update.cu";
    config.name = name;
    kernel.kernel = &config;
    kernel.tolerance = tolerance;
    return tch_optimizer_set_kernel(optimizer, TCH_OPTIM_PART_UPDATE, &kernel);
}

static tch_optim_kernel_info info_of(const tch_optimizer *optimizer)
{
    tch_optim_kernel_info info = TCH_OPTIM_KERNEL_INFO_INIT;
    CHECK_OK(tch_optimizer_get_kernel(optimizer, TCH_OPTIM_PART_UPDATE, &info));
    return info;
}

/* Sets it and expects it to be used for all. */
static void set(tch_optimizer *optimizer, const char *source, const char *name, double tolerance)
{
    CHECK_OK(try_to_set(optimizer, source, name, tolerance));
    tch_optim_kernel_info info = info_of(optimizer);
    CHECK(info.in_use && info.left == 0 && info.reason[0] == '\0', "%lld are left to the built-in: %s",
          (long long)info.left, info.reason);
}

static double tolerance_of(tch_dtype dtype)
{
    return 4.0 * (STEPS + 10) * test_arithmetic_roundoff(dtype);
}

/* What a check with the built-in's own formula may show: a dozen roundings, magnified by the division by what
 * changes. */
static double check_tolerance(tch_dtype dtype)
{
    return 100.0 * test_arithmetic_roundoff(dtype);
}

static void check_launches(const trial *t, int64_t steps)
{
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    tch_optim_kernel_info info = info_of(t->optimizer);
    CHECK(info.launches >= steps, "%lld launches in %lld steps", (long long)info.launches, (long long)steps);
    CHECK_OK(tch_optimizer_get_stats(t->optimizer, &stats));
    CHECK(stats.own_update && !stats.own_root && stats.refused == 0, "the statistics know nothing of it");
}

/* --- against the references -------------------------------------------------------------------------------------- */

typedef struct option {
    const char *name;
    tch_optim_config config;
} option;

static void run_option(tch_context *context, const option *o, tch_dtype dtype, tch_dtype gradients)
{
    trial t;
    bool sgd = o->config.kind == TCH_OPTIM_SGD;
    test_case("%s, %s, parameters in %s, gradients in %s", tch_optim_kind_name(o->config.kind), o->name,
              tch_dtype_name(dtype), tch_dtype_name(gradients));
    trial_open(&t, context, dtype, gradients, &o->config, SHAPES, shapes);
    set(t.optimizer, sgd ? sgd_source : adamw_source, sgd ? "sgd<1>" : "adamw", check_tolerance(dtype));
    trial_steps(&t, STEPS);
    check_launches(&t, STEPS);
    trial_check(&t, tolerance_of(dtype));
    trial_close(&t);
}

static tch_optim_config base(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.02;
    c.weight_decay = 0.1;
    return c;
}

static void adamw_of_ones_own(void **state)
{
    option options[4] = {{"defaults", base(TCH_OPTIM_ADAMW)},
                         {"l2 and maximize", base(TCH_OPTIM_ADAMW)},
                         {"amsgrad", base(TCH_OPTIM_ADAMW)},
                         {"master weights", base(TCH_OPTIM_ADAMW)}};
    options[1].config.decay = TCH_DECAY_L2;
    options[1].config.maximize = 1;
    options[2].config.amsgrad = 1;
    options[2].config.beta2 = 0.5;
    options[3].config.master_weights = 1;
    for (int i = 0; i < 3; i++) {
        run_option(*state, &options[i], TCH_FLOAT32, TCH_FLOAT32);
        run_option(*state, &options[i], TCH_FLOAT64, TCH_FLOAT64);
    }
    run_option(*state, &options[0], TCH_FLOAT32, TCH_FLOAT16);
    run_option(*state, &options[0], TCH_FLOAT32, TCH_BFLOAT16);
    run_option(*state, &options[3], TCH_FLOAT16, TCH_FLOAT16);
    run_option(*state, &options[3], TCH_BFLOAT16, TCH_BFLOAT16);
    run_option(*state, &options[1], TCH_FLOAT16, TCH_FLOAT16);
    run_option(*state, &options[1], TCH_BFLOAT16, TCH_BFLOAT16);
}

static void sgd_of_ones_own(void **state)
{
    option options[3] = {{"plain", base(TCH_OPTIM_SGD)},
                         {"momentum and dampening", base(TCH_OPTIM_SGD)},
                         {"nesterov", base(TCH_OPTIM_SGD)}};
    options[1].config.momentum = 0.9;
    options[1].config.dampening = 0.3;
    options[2].config.momentum = 0.8;
    options[2].config.nesterov = 1;
    for (int i = 0; i < 3; i++) {
        run_option(*state, &options[i], TCH_FLOAT32, TCH_FLOAT32);
        run_option(*state, &options[i], TCH_FLOAT64, TCH_FLOAT64);
    }
}

/* Groups with numbers and flags of their own, and one that comes later, which keeps the built-in. What the others leave
 * to AdamW is served too. */
static void groups_and_what_others_leave(void **state)
{
    const tch_optim_kind kinds[] = {TCH_OPTIM_ADAMW, TCH_OPTIM_MUON, TCH_OPTIM_SHAMPOO};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        trial t;
        tch_optim_config c = base(kinds[i]);
        test_case("groups of %s", tch_optim_kind_name(kinds[i]));
        c.relative_eps = kinds[i] == TCH_OPTIM_SHAMPOO ? 1e-3 : c.relative_eps;
        c.precision = TCH_PRECISION_HIGHEST;
        c.root_method = kinds[i] == TCH_OPTIM_SHAMPOO ? TCH_ROOT_EIGEN : c.root_method;
        c.muon_steps = kinds[i] == TCH_OPTIM_MUON ? 2 : c.muon_steps;
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 2, shapes);
        c.lr = 0.1;
        c.decay = kinds[i] == TCH_OPTIM_MUON ? c.decay : TCH_DECAY_L2;
        trial_add_group(&t, &c, 2, shapes + 6);
        set(t.optimizer, adamw_source, "adamw", check_tolerance(TCH_FLOAT64));
        CHECK(info_of(t.optimizer).served == 4, "%lld are served", (long long)info_of(t.optimizer).served);
        trial_add_group(&t, &c, 1, shapes);
        trial_steps(&t, STEPS);
        check_launches(&t, STEPS);
        trial_check(&t, tolerance_of(TCH_FLOAT64));
        trial_close(&t);
    }
}

/* --- beside the built-in ----------------------------------------------------------------------------------------- */

/* Two trainings that see the same numbers. */
typedef struct twins {
    trial own, built_in;
} twins;

static void open_twins(twins *w, tch_context *context, tch_dtype dtype, const tch_optim_config *config)
{
    trial_open(&w->own, context, dtype, dtype, config, SHAPES, shapes);
    trial_open(&w->built_in, context, dtype, dtype, config, SHAPES, shapes);
}

static void close_twins(twins *w)
{
    trial_close(&w->own);
    trial_close(&w->built_in);
}

static void step_scaled(trial *t, const tch_tensor *scale, const tch_tensor *found)
{
    const tch_tensor *gradients[SHAPES];
    trial_draw(t);
    trial_list_gradients(t, gradients);
    CHECK_OK(tch_optimizer_step_scaled(t->optimizer, t->count, gradients, scale, found));
}

/* Elements that differ by more than `most` of the larger of themselves and 1. */
static int64_t count_differences(const twins *w, double most)
{
    int64_t count = 0;
    for (int32_t i = 0; i < w->own.count; i++) {
        double *a = test_tensor_read(w->own.parameters[i].memory);
        double *b = test_tensor_read(w->built_in.parameters[i].memory);
        for (int64_t k = 0; k < w->own.parameters[i].memory->count; k++) {
            count += !(fabs(a[k] - b[k]) <= most * fmax(1.0, fabs(b[k])));
        }
    }
    return count;
}

static void loss_scaling(void **state)
{
    const tch_dtype types[] = {TCH_FLOAT32, TCH_FLOAT16};
    for (int i = 0; i < 2; i++) {
        twins w;
        const int64_t one = 1;
        tch_optim_config c = base(TCH_OPTIM_ADAMW);
        c.master_weights = i;
        test_case("loss scaling, %s", tch_dtype_name(types[i]));
        open_twins(&w, *state, types[i], &c);
        set(w.own.optimizer, adamw_source, "adamw", 0.0);
        test_tensor *scale = test_tensor_make(*state, TCH_FLOAT32, 1, &one, LAYOUT_CONTIGUOUS);
        test_tensor *found = test_tensor_make(*state, TCH_FLOAT32, 1, &one, LAYOUT_CONTIGUOUS);
        for (int k = 0; k < STEPS; k++) {
            test_tensor_write(scale, &(double){k % 2 == 0 ? 3.0 : 0.25});
            test_tensor_write(found, &(double){k % 4 == 3 ? 1.0 : 0.0});
            step_scaled(&w.own, &scale->tensor, &found->tensor);
            step_scaled(&w.built_in, &scale->tensor, &found->tensor);
        }
        tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
        CHECK_OK(tch_optimizer_get_stats(w.own.optimizer, &stats));
        CHECK(stats.skipped == STEPS / 4, "%lld steps skipped", (long long)stats.skipped);
        /* a parameter of a half type may be rounded the other way, by one of its units */
        double most = i == 0 ? tolerance_of(TCH_FLOAT32) : 0x1p-10;
        int64_t differences = count_differences(&w, most);
        CHECK(differences == 0, "%lld elements differ", (long long)differences);
        close_twins(&w);
    }
}

/* The same bits are drawn for the same elements: where rounding before them differs, one in a hundred may fall on the
 * other side. Rounded to the nearest, or by other bits, half of them would. */
static void stochastic_rounding(void **state)
{
    twins w;
    tch_optim_config c = base(TCH_OPTIM_ADAMW);
    c.stochastic_rounding = 1;
    c.seed = 77;
    test_case("stochastic rounding");
    open_twins(&w, *state, TCH_BFLOAT16, &c);
    set(w.own.optimizer, adamw_source, "adamw", 0.0);
    step_scaled(&w.own, NULL, NULL);
    step_scaled(&w.built_in, NULL, NULL);
    int64_t differences = count_differences(&w, 0.0);
    CHECK(differences < 100, "%lld of some 10000 elements differ", (long long)differences);
    close_twins(&w);
}

/* An update unlike any built-in is taken at its word where nothing was said of a tolerance. */
static void something_else(void **state)
{
    trial t;
    tch_optim_config c = base(TCH_OPTIM_SGD);
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    tch_optim_kernel kernel = TCH_OPTIM_KERNEL_INIT;
    const char *options[] = {"-DTWICE=2", "-DRUN", "-DSTEPS=7", "-Dn=i", "-Dchunk=place", "-URUN", "-DNDEBUG"};
    config.source = "namespace my { __device__ void sign(tch_element &e, const tch_numbers &k)\n"
                    "{ e.p -= TWICE * k.lr * (e.g > 0 ? 1 : -1); } }\n";
    config.name = "my::sign";
    config.options = options;
    config.option_count = sizeof options / sizeof options[0]; /* of which most name things of the library's text */
    kernel.kernel = &config;
    test_case("an update by signs");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 1, shapes);
    double *before = test_tensor_read(t.parameters[0].memory);
    CHECK_OK(tch_optimizer_set_kernel(t.optimizer, TCH_OPTIM_PART_UPDATE, &kernel));
    CHECK(info_of(t.optimizer).in_use && info_of(t.optimizer).worst > 0.1, "%s", info_of(t.optimizer).reason);
    step_scaled(&t, NULL, NULL);
    double *after = test_tensor_read(t.parameters[0].memory);
    for (int i = 0; i < 37; i++) {
        double expected = before[i] - 2 * 0.02 * (t.parameters[0].drawn[i] > 0 ? 1 : -1);
        CHECK(fabs(after[i] - expected) < 1e-15, "element %d is %g, expected %g", i, after[i], expected);
    }
    trial_close(&t);
}

/* --- falling back ------------------------------------------------------------------------------------------------ */

static const struct {
    const char *what, *source, *name;
    double tolerance;
    const char *words[2]; /* of the reason */
} unfit[] = {
    {"a source that does not compile",
     "\n__device__ void f(tch_element &e, const tch_numbers &k)\n{\n    e.q = 1;\n}\n",
     "f",
     0.0,
     {"update.cu", "4"}},
    {"a name that is not there", "__device__ void f(tch_element &e, const tch_numbers &k) {}\n", "g", 0.0, {"g", ""}},
    {"other parameters", "__device__ void f(float *p) {}\n", "f", 0.0, {"tch_element", "tch_numbers"}},
    {"an element by value",
     "__device__ void f(tch_element e, const tch_numbers &k) {}\n",
     "f",
     0.0,
     {"tch_element", "tch_numbers"}},
    {"a parameter that is no number",
     "__device__ void f(tch_element &e, const tch_numbers &k) { e.p = sqrt(-1 - e.p * e.p); }\n",
     "f",
     0.0,
     {"f: its check gives p", "nan"}},
    {"a state that is infinite",
     "__device__ void f(tch_element &e, const tch_numbers &k) { e.v = 1 / (e.v - e.v); }\n",
     "f",
     0.0,
     {"f: its check gives v", "inf"}},
    {"another update than the built-in",
     "__device__ void f(tch_element &e, const tch_numbers &k) { e.p -= k.lr * e.g; }\n",
     "f",
     1e-3,
     {"differs from the built-in in p", "0.001"}},
};

static void the_built_in_remains(void **state)
{
    for (size_t i = 0; i < sizeof unfit / sizeof unfit[0]; i++) {
        twins w;
        tch_optim_config c = base(TCH_OPTIM_ADAMW);
        test_case("%s", unfit[i].what);
        open_twins(&w, *state, TCH_FLOAT32, &c);
        CHECK_OK(try_to_set(w.own.optimizer, unfit[i].source, unfit[i].name, unfit[i].tolerance));
        tch_optim_kernel_info info = info_of(w.own.optimizer);
        CHECK(!info.in_use && info.served == 0 && info.left == SHAPES, "it is used");
        CHECK(info.reason[strlen(info.reason) - 1] != '\n', "the reason ends in a new line");
        for (int k = 0; k < 2; k++) {
            CHECK(strstr(info.reason, unfit[i].words[k]) != NULL, "the reason does not say \"%s\": %s",
                  unfit[i].words[k], info.reason);
        }
        for (int k = 0; k < STEPS; k++) {
            step_scaled(&w.own, NULL, NULL);
            step_scaled(&w.built_in, NULL, NULL);
        }
        CHECK(info_of(w.own.optimizer).launches == 0, "it was launched");
        CHECK(count_differences(&w, 0.0) == 0, "the training is not the built-in's");
        close_twins(&w);
    }
}

/* On the CPU a kernel that stops is found by the check; on a GPU it takes the context with it. */
static void a_kernel_that_stops(void **state)
{
    trial t;
    tch_optim_config c = base(TCH_OPTIM_ADAMW);
    if (!test_on_cpu()) {
        skip();
    }
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    CHECK_OK(try_to_set(t.optimizer,
                        "#include <assert.h>\n"
                        "__device__ void f(tch_element &e, const tch_numbers &k) { assert(e.p > 2); }\n",
                        "f", 0.0));
    CHECK(!info_of(t.optimizer).in_use && strstr(info_of(t.optimizer).reason, "e.p > 2") != NULL, "%s",
          info_of(t.optimizer).reason);
    trial_step(&t);
    trial_check(&t, tolerance_of(TCH_FLOAT32));
    trial_close(&t);
}

static void back_to_the_built_in(void **state)
{
    twins w;
    tch_optim_config c = base(TCH_OPTIM_ADAMW);
    test_case("back to the built-in");
    open_twins(&w, *state, TCH_FLOAT32, &c);
    set(w.own.optimizer, adamw_source, "adamw", 0.0);
    CHECK_OK(tch_optimizer_set_kernel(w.own.optimizer, TCH_OPTIM_PART_UPDATE, NULL));
    CHECK(!info_of(w.own.optimizer).in_use && info_of(w.own.optimizer).reason[0] == '\0', "it is still there");
    step_scaled(&w.own, NULL, NULL);
    step_scaled(&w.built_in, NULL, NULL);
    CHECK(count_differences(&w, 0.0) == 0, "the training is not the built-in's");
    close_twins(&w);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adamw_of_ones_own),
        cmocka_unit_test(sgd_of_ones_own),
        cmocka_unit_test(groups_and_what_others_leave),
        cmocka_unit_test(loss_scaling),
        cmocka_unit_test(stochastic_rounding),
        cmocka_unit_test(something_else),
        cmocka_unit_test(the_built_in_remains),
        cmocka_unit_test(a_kernel_that_stops),
        cmocka_unit_test(back_to_the_built_in),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
