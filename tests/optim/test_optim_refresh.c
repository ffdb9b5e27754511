/* Roots and bases: which factors blocks have, when they are refreshed, failed refreshes, and bases that the first
 * gradient does not determine. test_optim_methods.c has trajectories with every option. */
#include "support/files.h"
#include "support/linalg/reference.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 22

/* Square if SOAP needs it to be determined; the first three are of one class. */
static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {7, 7}, .order = {1, 0}},
    {.ndim = 3, .shape = {4, 5, 6}, .gradient = LAYOUT_REVERSED},
    {.ndim = 3, .shape = {3, 4, 2}},
    {.ndim = 4, .shape = {5, 2, 3, 4}, .order = {0, 3, 1, 2}},
    {.ndim = 5, .shape = {2, 3, 2, 3, 2}},
    {.ndim = 4, .shape = {1, 6, 1, 6}},
    {.ndim = 1, .shape = {19}},
};
#define SHAPES ((int32_t)TEST_COUNT(shapes))

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = trial_config(kind);
    c.shampoo.merge_dims = 0;
    c.soap.block = 1;
    c.shampoo.max_preconditioner_dim = 8;
    return c;
}

/* --- which factors exist ----------------------------------------------------------------------------------------- */

/* A side over 100 times as long as the rest of its block has no factor; at 100 it has one. A side of 12000 would have
 * twelve factors of 1024. Dimensions are merged from the innermost out, never to a vector, and to at most four. */
TEST(shapes_decide_about_factors)
{
    static const struct {
        trial_shape shape;
        int64_t most; /* the largest factor */
        int32_t merge;
        int64_t elements; /* of all factors */
    } cases[] = {
        {{.ndim = 2, .shape = {2, 201}}, 1024, 0, 2 * 2},
        {{.ndim = 2, .shape = {301, 3}}, 1024, 0, 3 * 3},
        {{.ndim = 2, .shape = {2, 200}}, 1024, 0, 2 * 2 + 200 * 200},
        {{.ndim = 3, .shape = {2, 401, 2}}, 1024, 0, 2 * 2 + 2 * 2},
        {{.ndim = 1, .shape = {150}}, 1024, 0, 150 * 150},
        {{.ndim = 2, .shape = {2, 12000}}, 1024, 0, 12 * 2 * 2},
        {{.ndim = 4, .shape = {64, 3, 3, 3}}, 1024, 1, 64 * 64 + 27 * 27},
        {{.ndim = 2, .shape = {8, 16}}, 1024, 1, 8 * 8 + 16 * 16},
        {{.ndim = 4, .shape = {6, 3, 2, 2}}, 8, 1, 6 * 6 + 3 * 3 + 4 * 4},
        {{.ndim = 4, .shape = {6, 3, 2, 2}}, 6, 1, 6 * 6 + 3 * 3 + 4 * 4},
        {{.ndim = 4, .shape = {6, 3, 2, 2}}, 12, 1, 6 * 6 + 12 * 12},
        {{.ndim = 5, .shape = {3, 2, 3, 2, 3}}, 8, 0, 6 * 6 + 3 * 3 + 2 * 2 + 3 * 3},
        {{.ndim = 5, .shape = {3, 2, 3, 2, 3}}, 1024, 1, 3 * 3 + 36 * 36},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        trial t;
        int64_t elements = 0;
        tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
        c.shampoo.max_preconditioner_dim = cases[i].most;
        c.shampoo.merge_dims = cases[i].merge;
        c.shampoo.precondition_1d = 1;
        test_case("%d dimensions, the first %lld, merged up to %lld", cases[i].shape.ndim,
                  (long long)cases[i].shape.shape[0], (long long)cases[i].most);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 1, &cases[i].shape);
        trial_steps(&t, 2);
        trial_check(&t, trial_tolerance(TCH_OPTIM_SHAMPOO, TCH_FLOAT64));
        for (int32_t k = 0; k < tch_optimizer_state_count(t.optimizer); k++) {
            tch_optim_state s = trial_state_at(&t, k);
            elements += strstr(s.name, "factor.") != NULL ? tch_tensor_numel(s.tensor) : 0;
        }
        CHECK(elements == cases[i].elements, "factors have %lld elements, expected %lld", (long long)elements,
              (long long)cases[i].elements);
    }
}

/* --- when they are refreshed ------------------------------------------------------------------------------------- */

enum { MOST_WATCHED = 128 };

/* A root or a basis, and its flag in the reference. */
typedef struct watched {
    tch_tensor *tensor;
    double *values;
    bool *due;
    int32_t refreshes;
    int32_t age; /* steps since the latest refresh */
} watched;

/* Before the first step, when all are the identity. */
static int32_t watch(const trial *t, watched *all)
{
    int32_t found = 0;
    for (int32_t i = 0; i < tch_optimizer_state_count(t->optimizer); i++) {
        tch_optim_state s = trial_state_at(t, i);
        char what[8];
        int parameter, block, k;
        if (sscanf(s.name, "parameter%d/%7[a-z].%d.%d", &parameter, what, &block, &k) == 4 &&
            (strcmp(what, "root") == 0 || strcmp(what, "basis") == 0)) {
            CHECK(found < MOST_WATCHED, "too many for the test");
            bool *due = &t->parameters[parameter].reference->blocks[block].due[k];
            all[found] = (watched){s.tensor, trial_read(t, s.tensor), due, 0, 0};
            for (int64_t e = 0; e < tch_tensor_numel(s.tensor); e++) {
                bool diagonal = e % (s.tensor->shape[0] + 1) == 0;
                CHECK(all[found].values[e] == (diagonal ? 1.0 : 0.0), "%s is not the identity", s.name);
            }
            found++;
        }
    }
    return found;
}

/* The library's step; then marks its refreshes in the references. Returns their number. */
static int32_t step_and_tell(trial *t, watched *all, int32_t count)
{
    int32_t refreshes = 0;
    trial_draw(t);
    CHECK_OK(trial_step_library(t));
    for (int32_t i = 0; i < count; i++) {
        double *now = trial_read(t, all[i].tensor);
        *all[i].due = memcmp(now, all[i].values, (size_t)tch_tensor_numel(all[i].tensor) * sizeof *now) != 0;
        all[i].refreshes += *all[i].due;
        all[i].age = *all[i].due ? 0 : all[i].age + 1;
        refreshes += *all[i].due;
        test_drop(all[i].values);
        all[i].values = now;
    }
    trial_step_references(t);
    return refreshes;
}

/* The schedule in the statistics, of factors with equal intervals. */
static void check_schedule(const trial *t, const watched *all, int32_t count, double interval)
{
    tch_optim_stats s = trial_stats(t);
    double sum = 0.0;
    double most = 0.0;
    for (int32_t i = 0; i < count; i++) {
        sum += all[i].age;
        most = fmax(most, all[i].age);
    }
    CHECK(s.refreshed_factors == count, "%lld of %d factors were refreshed", (long long)s.refreshed_factors, count);
    CHECK(s.interval_mean == interval && s.interval_max == interval, "intervals of %g, at most %g, expected %g",
          s.interval_mean, s.interval_max, interval);
    CHECK(s.staleness_mean == sum / count && s.staleness_max == most, "staleness %g, at most %g, expected %g and %g",
          s.staleness_mean, s.staleness_max, sum / count, most);
}

/* Each is refreshed once per interval, also after the interval changes, and the cost n^3 of one step exceeds another's
 * by at most the most expensive refresh. */
static void check_period(trial *t, watched *all, int32_t count, int32_t period)
{
    double least = HUGE_VAL;
    double most = 0.0;
    double largest = 0.0;
    for (int32_t i = 0; i < count; i++) {
        all[i].refreshes = 0;
    }
    for (int32_t s = 0; s < period; s++) {
        double cost = 0.0;
        step_and_tell(t, all, count);
        for (int32_t i = 0; i < count; i++) {
            double own = pow((double)tch_tensor_numel(all[i].tensor), 1.5);
            largest = fmax(largest, own);
            cost += *all[i].due ? own : 0.0;
        }
        least = fmin(least, cost);
        most = fmax(most, cost);
    }
    check_schedule(t, all, count, period);
    for (int32_t i = 0; i < count; i++) {
        CHECK(all[i].refreshes == 1, "number %d was refreshed %d times", i, all[i].refreshes);
    }
    CHECK(most - least <= largest * (1.0 + 1e-12), "a step costs %g to %g, the largest %g", least, most, largest);
}

TEST(staggered_refreshes)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_SHAMPOO, TCH_OPTIM_SOAP};
    static const int32_t periods[] = {6, 3, 7};
    static watched all[MOST_WATCHED];
    for (size_t i = 0; i < TEST_COUNT(kinds); i++) {
        trial t;
        tch_optim_config c = config_of(kinds[i]);
        c.shampoo.stagger = 1;
        test_case("%s, staggered", tch_optim_kind_name(kinds[i]));
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
        int32_t count = watch(&t, all);
        CHECK(count > 2 * 7, "only %d were found", count);
        CHECK(step_and_tell(&t, all, count) == count, "not all are refreshed at the first step");
        for (size_t k = 0; k < 2 * TEST_COUNT(periods); k++) {
            c.shampoo.precondition_frequency = periods[k / 2];
            trial_set_config(&t, 0, &c);
            check_period(&t, all, count, periods[k / 2]);
        }
        trial_check(&t, trial_tolerance(kinds[i], TCH_FLOAT64));
        tch_optim_stats stats = trial_stats(&t);
        CHECK(stats.refreshes == 7 * (int64_t)count, "%lld refreshes of %d", (long long)stats.refreshes, count);
        CHECK(stats.steps == 1 + 2 * (6 + 3 + 7) && stats.skipped == 0 && stats.failed == 0, "other statistics");
    }
}

/* Vectors have one factor each. A step with a large root has no other refresh, and small ones are batched: eight roots
 * of 8 are as much work as one of 16. */
TEST(roots_of_one_size_come_together)
{
    static const struct {
        int32_t period, count, together;
        int64_t sizes[12];
    } cases[] = {{2, 4, 3, {20, 8, 7, 6}}, {5, 12, 8, {16, 16, 16, 16, 8, 8, 8, 8, 8, 8, 8, 8}}};
    static watched all[MOST_WATCHED];
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        trial_shape vectors[12];
        trial t;
        tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
        c.shampoo.max_preconditioner_dim = 20;
        c.shampoo.precondition_1d = 1;
        c.shampoo.stagger = 1;
        c.shampoo.precondition_frequency = cases[i].period;
        for (int k = 0; k < cases[i].count; k++) {
            vectors[k] = (trial_shape){.ndim = 1, .shape = {cases[i].sizes[k]}};
        }
        test_case("%d roots in a period of %d", cases[i].count, cases[i].period);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, cases[i].count, vectors);
        step_and_tell(&t, all, watch(&t, all));
        int single = 0;
        for (int s = 0; s < cases[i].period; s++) {
            int32_t taken = step_and_tell(&t, all, cases[i].count);
            CHECK(taken == (*all[0].due ? 1 : taken) && (taken == 1 || taken == cases[i].together), "%d at a step",
                  taken);
            single += taken == 1;
        }
        CHECK(single == cases[i].period - 1, "%d steps with one root", single);
    }
}

/* The schedule of a factor whose drift is always small, or large, by the rule in optim.h: a refresh's drift takes
 * effect from the next one on. */
typedef struct expected_gap {
    int32_t gap, next;
    bool measured;
} expected_gap;

static bool expect_due(expected_gap *e, int32_t step, int32_t period, int32_t change)
{
    int32_t exponent = e->gap;
    int32_t gap = 1 << exponent < period ? 1 << exponent : period;
    if (step > 1 && (step - 1) % gap != 0) {
        return false;
    }
    if (e->measured) {
        int32_t next = exponent + change < 0 ? 0 : exponent + change;
        e->next = next == 0 || 1 << (next - 1) < period ? next : exponent;
    }
    e->gap = e->next;
    e->measured = step > 1; /* a first basis has nothing to be measured by */
    return true;
}

TEST(adaptive_intervals)
{
    static const double drifts[] = {1e6, 1e-9};
    static watched bases[MOST_WATCHED];
    for (int i = 0; i < 2; i++) {
        trial t;
        expected_gap expected = {0};
        tch_optim_config c = config_of(TCH_OPTIM_SOAP);
        c.shampoo.stagger = 0;
        c.shampoo.precondition_frequency = 10;
        c.shampoo.refresh_drift = drifts[i];
        test_case("adaptive gaps, drift %g", drifts[i]);
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        int32_t count = watch(&t, bases);
        for (int32_t step = 1; step <= 45; step++) {
            int32_t moved = step_and_tell(&t, bases, count);
            bool due = expect_due(&expected, step, 10, i == 0 ? 1 : -1);
            CHECK(moved == (due ? count : 0), "%d bases moved at step %d, expected %d", moved, step, due ? count : 0);
            check_schedule(&t, bases, count, 1 << expected.gap < 10 ? 1 << expected.gap : 10);
        }
    }
}

/* Each is refreshed even if intervals are the factors' own: eventually once per interval. */
TEST(staggered_adaptive_intervals)
{
    static watched bases[MOST_WATCHED];
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SOAP);
    c.shampoo.stagger = 1;
    c.shampoo.precondition_frequency = 10;
    c.shampoo.refresh_drift = 1e6;
    test_case("staggered adaptive gaps");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    int32_t count = watch(&t, bases);
    int64_t moved[2] = {0};
    for (int32_t step = 0; step < 100; step++) {
        moved[step >= 60] += step_and_tell(&t, bases, count);
    }
    CHECK(moved[1] == 4 * (int64_t)count, "%lld refreshes of %d bases in the last 40 steps", (long long)moved[1],
          count);
    CHECK(moved[0] > 6 * (int64_t)count, "%lld refreshes of %d bases in the first 60", (long long)moved[0], count);
}

/* By norm: steady gradients leave roots to the interval; after a jump by 100, or a first gradient after 1,000 zero
 * ones, they are refreshed within two steps. Parameters stay small. */
TEST(refreshes_follow_the_gradients)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_SHAMPOO, TCH_OPTIM_KL_SHAMPOO};
    static const trial_shape two[] = {{.ndim = 2, .shape = {8, 8}}, {.ndim = 2, .shape = {8, 6}}};
    for (int i = 0; i < 4; i++) {
        trial t;
        bool wakes = i / 2 == 1;
        int64_t early = 0;
        tch_optim_config c = tch_optim_defaults(kinds[i % 2]);
        c.shampoo.refresh_drift = 3.0;
        c.shampoo.precondition_frequency = 5000;
        test_case("%s, %s", tch_optim_kind_name(kinds[i % 2]), wakes ? "a layer wakes up" : "a jump");
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 2, two);
        for (int32_t step = 1; step <= 1000; step++) {
            trial_draw(&t);
            trial_erase(&t, 0, wakes ? t.parameters[0].memory->count : 0);
            CHECK_OK(trial_step_library(&t));
            early = step == 800 ? trial_stats(&t).refreshes : early;
            CHECK(step != 100 || kinds[i % 2] != TCH_OPTIM_KL_SHAMPOO || wakes || trial_stats(&t).refreshes == 4 * 100,
                  "%lld refreshes of 4 factors in the first 100 steps", (long long)trial_stats(&t).refreshes);
        }
        int64_t steady = trial_stats(&t).refreshes - early;
        CHECK(steady < 4 * 200 / 10, "%lld refreshes in 200 steady steps", (long long)steady);
        const tch_tensor *root = trial_state(&t, "parameter0/root.0.0");
        const double *before = trial_read(&t, root);
        for (int32_t step = 0; step < 2; step++) {
            trial_draw(&t);
            trial_scale_gradients(&t, wakes ? 1.0 : 100.0);
            CHECK_OK(trial_step_library(&t));
        }
        double change = ref_distance(64, trial_read(&t, root), before) / ref_norm(64, before);
        CHECK(change > 0.5, "the roots differ by %g two steps later", change);
        for (int32_t k = 0; k < t.count; k++) {
            double size = ref_largest(t.parameters[k].memory->count, test_tensor_read(t.parameters[k].memory));
            CHECK(isfinite(size) && size < 100.0, "parameter %d has grown to %g", k, size);
        }
    }
}

/* --- roots ------------------------------------------------------------------------------------------------------- */

static tch_optim_config loose_newton(void)
{
    tch_optim_config c = trial_config(TCH_OPTIM_SHAMPOO);
    c.beta1 = 0.0;
    c.beta2 = 1.0;
    c.weight_decay = 0.0;
    c.eps = 1e-12;
    c.shampoo.precondition_frequency = 1;
    c.numerics.method = TCH_ROOT_NEWTON;
    c.numerics.tolerance = 1e-3;
    return c;
}

/* The inverse fourth root of a parameter's factor k by tch_inverse_root, and its certificate. */
static double *root_of(const trial *t, int32_t parameter, int k, tch_root_method method, double relative_eps,
                       double tolerance, double *residual)
{
    char name[64];
    tch_root_config how = TCH_ROOT_CONFIG_INIT;
    tch_tensor *out = NULL;
    tch_tensor *certificate = NULL;
    snprintf(name, sizeof name, "parameter%d/factor.0.%d", parameter, k);
    const tch_tensor *factor = trial_state(t, name);
    how.eps = t->configs[0].eps;
    how.relative_eps = relative_eps;
    how.tolerance = tolerance;
    how.method = method;
    CHECK_OK(tch_tensor_create(t->context, factor->dtype, 2, factor->shape, TCH_CONTIGUOUS, &out));
    CHECK_OK(tch_tensor_create(t->context, TCH_FLOAT64, 0, NULL, TCH_CONTIGUOUS, &certificate));
    CHECK_OK(tch_inverse_root(t->context, factor, 4, &how, out, certificate, NULL));
    double *values = trial_read(t, out);
    *residual = *trial_read(t, certificate);
    tch_tensor_destroy(out);
    tch_tensor_destroy(certificate);
    return values;
}

/* The relative distance of the root in the state from this one. */
static double gap(const trial *t, int32_t parameter, tch_root_method method, double relative_eps, double tolerance)
{
    char name[64];
    double residual;
    snprintf(name, sizeof name, "parameter%d/root.0.0", parameter);
    const tch_tensor *root = trial_state(t, name);
    double *expected = root_of(t, parameter, 0, method, relative_eps, tolerance, &residual);
    return ref_distance(tch_tensor_numel(root), trial_read(t, root), expected) /
           ref_norm(tch_tensor_numel(root), expected);
}

static void clear_factors(const trial *t)
{
    for (int32_t i = 0; i < tch_optimizer_state_count(t->optimizer); i++) {
        tch_optim_state s = trial_state_at(t, i);
        if (strstr(s.name, "/factor.") != NULL) {
            CHECK_OK(tch_tensor_fill(t->context, s.tensor, 0.0));
        }
    }
}

static void step_spoiled(trial *t, int32_t first_bad)
{
    trial_draw(t);
    for (int32_t i = first_bad; i < 3; i++) {
        trial_spoil(t, i, NAN);
    }
    CHECK_OK(trial_step_library(t));
}

static void look(const trial *t, int times, int64_t failed)
{
    for (int i = 0; i < times; i++) {
        int64_t told = trial_stats(t).failed;
        CHECK(told == failed, "%lld roots have failed, expected %lld", (long long)told, (long long)failed);
    }
}

/* The third parameter's factors are made invalid twice, the second's once: those then get ten times the damping and a
 * tolerance of 1e-5, and the third's the eigen method as well, also in a resumed run, and however often statistics are
 * read. */
static void check_failed_roots(tch_context *context, bool restart, int looks)
{
    trial t;
    const char *path = test_path("trouble.safetensors");
    tch_optim_config c = loose_newton();
    c.numerics.nonfinite = TCH_NONFINITE_IGNORE;
    test_case("roots that fail%s, statistics read %d times", restart ? ", restarted" : "", looks);
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, 3, shapes);
    step_spoiled(&t, 2);
    look(&t, looks, 2);
    step_spoiled(&t, 1);
    look(&t, looks, 4);
    clear_factors(&t);
    if (restart) {
        trial_save(&t, path);
        trial_replace_optimizer(&t, &c);
        CHECK_OK(trial_load(&t, path));
    }
    step_spoiled(&t, 3);
    look(&t, 1, 0);
    double damping = c.numerics.damping;
    CHECK(gap(&t, 2, TCH_ROOT_NEWTON, 10.0 * damping, 1e-5) > 1e-12, "the test cannot tell the methods apart");
    CHECK(gap(&t, 1, TCH_ROOT_NEWTON, 10.0 * damping, 1e-3) > 1e-8, "the test cannot tell the tolerances apart");
    CHECK(gap(&t, 0, TCH_ROOT_NEWTON, damping, 1e-3) < 1e-9, "a root that never failed is another");
    CHECK(gap(&t, 1, TCH_ROOT_NEWTON, 10.0 * damping, 1e-5) < 1e-9, "not more damping and care after one failure");
    CHECK(gap(&t, 2, TCH_ROOT_EIGEN, 10.0 * damping, 1e-5) < 1e-13, "not the eigen method after two failures");
}

TEST(failed_roots_go_another_way)
{
    for (int i = 0; i < 4; i++) {
        check_failed_roots(*state, i % 2 == 1, i < 2 ? 0 : 256);
    }
}

/* The largest certificate among all roots. */
TEST(the_worst_residual)
{
    trial t;
    double worst = 0.0;
    tch_optim_config c = loose_newton();
    test_case("the worst residual");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 3, shapes);
    step_spoiled(&t, 3);
    for (int i = 0; i < 6; i++) {
        double residual;
        root_of(&t, i / 2, i % 2, TCH_ROOT_NEWTON, c.numerics.damping, c.numerics.tolerance, &residual);
        worst = fmax(worst, residual);
    }
    double told = trial_stats(&t).worst_residual;
    CHECK(worst > 0.0 && told > 0.2 * worst && told < 5.0 * worst, "%g, the roots by themselves %g", told, worst);
}

/* relative_eps is at least 2 u sqrt(gradients in the factor). Low-rank factors show its value. */
TEST(damping_covers_rounding)
{
    const double beta2[] = {1.0, 0.5};
    const trial_shape tall[] = {{.ndim = 2, .shape = {24, 2}}};
    for (int k = 0; k < 2; k++) {
        trial t;
        tch_optim_config c = loose_newton();
        c.numerics.method = TCH_ROOT_EIGEN;
        c.numerics.damping = 1e-9;
        c.eps = 1e-30;
        c.beta2 = beta2[k];
        test_case("damping and rounding, beta2 %g", beta2[k]);
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 1, tall);
        for (int i = 0; i < 8; i++) {
            trial_draw(&t);
            CHECK_OK(trial_step_library(&t));
        }
        double expected = 2.0 * 0x1p-24 * sqrt(beta2[k] < 1.0 ? 2.0 : 8.0);
        double off = gap(&t, 0, TCH_ROOT_EIGEN, expected, 1e-3);
        CHECK(off < 0.02, "the root is off by %g from that with a relative damping of %g", off, expected);
    }
}

/* --- bases that the first gradient does not determine ------------------------------------------------------------ */

/* left right', both n by n. */
static double *times_transposed(int64_t n, const double *left, const double *right)
{
    double *transposed = test_zeros(n * n);
    double *product = test_zeros(n * n);
    ref_transpose(n, n, right, transposed);
    ref_matmul(n, n, n, left, transposed, product);
    return product;
}

static void check_orthonormal(int64_t n, const double *q, double tolerance)
{
    const double *product = times_transposed(n, q, q);
    for (int64_t i = 0; i < n * n; i++) {
        CHECK(fabs(product[i] - (i / n == i % n)) < tolerance, "the basis is not orthonormal: %g", product[i]);
    }
}

/* Rows of q are orthonormal, and q C q' is diagonal and descending; C is symmetric. */
static void check_basis(int64_t n, const double *q, const double *factor)
{
    const double *product = times_transposed(n, times_transposed(n, q, factor), q);
    double size = ref_norm(n * n, factor);
    check_orthonormal(n, q, 1e-12);
    for (int64_t i = 0; i < n * n; i++) {
        CHECK(i / n == i % n || fabs(product[i]) < 1e-12 * size, "the basis does not diagonalize: %g", product[i]);
        CHECK(i / n == 0 || i / n != i % n || product[i] <= product[i - n - 1] + 1e-12 * size, "it is not sorted");
    }
}

static void adopt_bases(trial *t)
{
    for (int32_t i = 0; i < t->count; i++) {
        ref_optim *r = t->parameters[i].reference;
        for (int32_t b = 0; b < r->block_count; b++) {
            for (int32_t k = 0; k < r->order; k++) {
                char name[64];
                int64_t n = r->blocks[b].size[k];
                if (r->blocks[b].factor[k] == NULL) {
                    continue;
                }
                snprintf(name, sizeof name, "parameter%d/basis.%d.%d", i, b, k);
                double *q = trial_read(t, trial_state(t, name));
                check_basis(n, q, r->blocks[b].factor[k]);
                ref_transpose(n, n, q, r->blocks[b].root[k]);
            }
        }
    }
}

TEST(tall_and_wide_matrices)
{
    static const trial_shape open[] = {
        {.ndim = 2, .shape = {13, 5}},
        {.ndim = 2, .shape = {3, 17}},
        {.ndim = 2, .shape = {20, 11}, .order = {1, 0}},
        {.ndim = 4, .shape = {12, 2, 1, 3}},
        {.ndim = 1, .shape = {9}},
        {.ndim = 2, .shape = {1, 14}},
    };
    for (int block = 0; block < 2; block++) {
        trial t;
        tch_optim_config c = config_of(TCH_OPTIM_SOAP);
        c.shampoo.precondition_frequency = 1000;
        c.shampoo.precondition_1d = 1;
        c.shampoo.max_preconditioner_dim = block ? 8 : 1000;
        c.soap.block = block;
        test_case("bases left open by the first gradient, %s", block ? "in blocks" : "whole");
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 6, open);
        trial_step(&t);
        adopt_bases(&t);
        for (int i = 1; i < STEPS; i++) {
            trial_step(&t);
        }
        trial_check(&t, trial_tolerance(TCH_OPTIM_SOAP, TCH_FLOAT64));
    }
}

TEST_MAIN(test_open_context_and_folder, test_close_context_and_folder)
