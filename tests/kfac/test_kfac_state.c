/* KFAC's state and errors: loss scales, bitwise resume from checkpoints, failed observations and refreshes, skipped
 * layers, out of memory, and invalid arguments. */
#include "support/bad_input.h"
#include "support/fakes/counting_allocator.h"
#include "support/files.h"
#include "support/grad/kfac_trial.h"
#include "support/testing.h"

#define LINEAR TCH_LAYER_INIT(TCH_LAYER_LINEAR)

static const test_layer_case cases[] = {
    {"one", LINEAR, 8, 4, 3, {1}},
    {"two", LINEAR, 8, 3, 5, {2}},
    {"three", LINEAR, 8, 4, 3, {1}},
};
static const test_kfac_layer layers[] = {{&cases[0], 1}, {&cases[1], 0}, {&cases[2], 1}};
#define LAYERS 3

static tch_kfac_config config_of(tch_kfac_method method)
{
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    config.method = method;
    config.damping = 1e-2;
    config.factor_decay = 0.9;
    return config;
}

static test_kfac_trial *trial_of(tch_context *context, int method)
{
    tch_kfac_config config = config_of((tch_kfac_method)method);
    return test_kfac_make(context, &config, LAYERS, layers, TCH_FLOAT32);
}

static test_positions batch_of(tch_context *context, int32_t layer, uint64_t stream)
{
    return test_positions_make(context, layers[layer].layer, TCH_FLOAT32, LAYOUT_CONTIGUOUS, stream);
}

static tch_status observe(const test_kfac_trial *t, int32_t layer, const test_positions *batch)
{
    return tch_kfac_observe(t->kfac, layer, &batch->input->tensor, &batch->gradient->tensor, 1.0, NULL);
}

static tch_status precondition(const test_kfac_trial *t, int left_out)
{
    tch_tensor *arguments[2 * LAYERS];
    for (int i = 0; i < 2 * LAYERS; i++) {
        bool given = t->gradients[i] != NULL && i / 2 != left_out;
        arguments[i] = given ? &t->gradients[i]->tensor : NULL;
    }
    return tch_kfac_precondition(t->kfac, 0.1, 2 * LAYERS, arguments);
}

/* Every layer observes a batch, and all are refreshed and preconditioned. */
static tch_status take_step(const test_kfac_trial *t, uint64_t stream)
{
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < LAYERS && status == TCH_OK; i++) {
        test_positions batch = batch_of(t->context, i, stream + 2 * (uint64_t)i);
        status = observe(t, i, &batch);
    }
    status = status == TCH_OK ? tch_kfac_refresh(t->kfac) : status;
    return status == TCH_OK ? precondition(t, -1) : status;
}

/* After one step. */
static test_kfac_trial *stepped_trial(tch_context *context, int method, uint64_t stream)
{
    test_kfac_trial *t = trial_of(context, method);
    test_case("method %d", method);
    test_kfac_draw_gradients(t, LAYOUT_CONTIGUOUS);
    CHECK_OK(take_step(t, stream));
    return t;
}

/* All of the state, concatenated. */
static double *all_state(const test_kfac_trial *t, int64_t *count)
{
    double *all = NULL;
    for (int pass = 0; pass < 2; pass++) { /* counts, then copies */
        *count = 0;
        for (int32_t i = 0; i < tch_kfac_state_count(t->kfac); i++) {
            tch_optim_state state = TCH_OPTIM_STATE_INIT;
            CHECK_OK(tch_kfac_get_state(t->kfac, i, &state));
            if (pass == 1) {
                tch_tensor view = tch_tensor_view(all + *count, TCH_FLOAT64, state.tensor->ndim, state.tensor->shape);
                CHECK_OK(tch_tensor_copy(t->context, &view, state.tensor));
            }
            *count += tch_tensor_numel(state.tensor);
        }
        all = pass == 0 ? test_zeros(*count) : all;
    }
    return all;
}

/* The state of `t` is bitwise what all_state returned before, for `t` or another. */
static void check_state(const test_kfac_trial *t, const double *before, int64_t count)
{
    int64_t now;
    double *after = all_state(t, &now);
    CHECK(now == count && memcmp(before, after, (size_t)count * sizeof *before) == 0, "the state has changed");
}

static void check_same_state(const test_kfac_trial *a, const test_kfac_trial *b)
{
    int64_t count;
    double *of_a = all_state(a, &count);
    check_state(b, of_a, count);
}

/* Compares the states of two trials up to a difference. */
static void check_close(const test_kfac_trial *a, const test_kfac_trial *b, int32_t layer, const char *what,
                        double bound)
{
    int64_t count;
    double *x = test_kfac_state(a, layer, what, &count);
    double *y = test_kfac_state(b, layer, what, &count);
    for (int64_t k = 0; k < count; k++) {
        CHECK(fabs(x[k] - y[k]) <= bound, "%s: element %lld is %.9g and %.9g", what, (long long)k, x[k], y[k]);
    }
}

static void check_counts(const test_kfac_trial *t, int64_t updates, int64_t refreshes)
{
    for (int32_t i = 0; i < LAYERS; i++) {
        int64_t counts[TCH_KFAC_COUNTS];
        CHECK_OK(tch_kfac_get_counts(t->kfac, i, counts));
        CHECK(counts[0] == updates && counts[1] == 0 && counts[2] == refreshes && counts[3] == 0,
              "counts are %lld %lld %lld %lld", (long long)counts[0], (long long)counts[1], (long long)counts[2],
              (long long)counts[3]);
    }
}

/* Returns the old value. */
static double replace_element(test_tensor *tensor, int64_t k, double value)
{
    double *values = test_tensor_read(tensor);
    double old = values[k];
    values[k] = value;
    test_tensor_write(tensor, values);
    return old;
}

static void check_unchanged_gradients(const test_kfac_trial *t)
{
    for (int i = 0; i < 2 * LAYERS; i++) {
        if (t->gradients[i] != NULL) {
            test_tensor_check_unchanged(t->gradients[i], "a gradient");
        }
    }
}

/* --- loss scales and types --------------------------------------------------------------------------------------- */

/* A loss scale that is a power of two changes no bit. */
TEST(loss_scales_are_divided_out)
{
    const double scale = 4096.0;
    test_kfac_trial *plain = trial_of(*state, TCH_KFAC_EKFAC);
    test_kfac_trial *scaled = trial_of(*state, TCH_KFAC_EKFAC);
    test_tensor *by = test_tensor_make(*state, TCH_FLOAT32, 1, (const int64_t[]){1}, LAYOUT_CONTIGUOUS);
    test_tensor_write(by, &scale);
    test_case("a loss scale");
    for (int round = 0; round < 2; round++) {
        for (int32_t i = 0; i < LAYERS; i++) {
            test_positions batch = batch_of(*state, i, 310);
            CHECK_OK(observe(plain, i, &batch));
            double *g = test_tensor_read(batch.gradient);
            for (int64_t k = 0; k < batch.gradient->count; k++) {
                g[k] *= scale;
            }
            test_tensor_write(batch.gradient, g);
            CHECK_OK(
                tch_kfac_observe(scaled->kfac, i, &batch.input->tensor, &batch.gradient->tensor, 1.0, &by->tensor));
        }
        CHECK_OK(tch_kfac_refresh(plain->kfac));
        CHECK_OK(tch_kfac_refresh(scaled->kfac));
        check_same_state(plain, scaled);
    }
}

/* A float32 input with a bfloat16 gradient, as with autocast: the same as with that gradient in float32, up to the
 * order of sums, which have up to 16 terms of about 1; bfloat16 is exact in 11 bits. */
TEST(inputs_and_gradients_may_differ_in_type)
{
    test_kfac_trial *same = trial_of(*state, TCH_KFAC_EKFAC);
    test_kfac_trial *mixed = trial_of(*state, TCH_KFAC_EKFAC);
    test_positions half = test_positions_make(*state, layers[1].layer, TCH_BFLOAT16, LAYOUT_CONTIGUOUS, 320);
    test_positions wide = batch_of(*state, 1, 320);
    double *g = test_tensor_read(half.gradient);
    test_tensor_write(wide.gradient, g);
    test_case("a bfloat16 gradient");
    for (int round = 0; round < 2; round++) {
        CHECK_OK(tch_kfac_observe(same->kfac, 1, &wide.input->tensor, &wide.gradient->tensor, 1.0, NULL));
        CHECK_OK(tch_kfac_observe(mixed->kfac, 1, &wide.input->tensor, &half.gradient->tensor, 1.0, NULL));
        check_close(same, mixed, 1, "output_factor", 24 * 0x1p-24 * 8.0);
        CHECK_OK(tch_kfac_refresh(same->kfac));
        CHECK_OK(tch_kfac_refresh(mixed->kfac));
    }
}

/* --- checkpoints ------------------------------------------------------------------------------------------------- */

static void save(test_kfac_trial *t, const char *path)
{
    tch_checkpoint_writer *writer;
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    CHECK_OK(tch_kfac_save(t->kfac, writer, "kfac"));
    CHECK_OK(tch_checkpoint_writer_save(writer, t->context, path));
    tch_checkpoint_writer_destroy(writer);
}

static tch_status load(test_kfac_trial *t, const char *path)
{
    tch_checkpoint *file;
    CHECK_OK(tch_checkpoint_open(path, &file));
    tch_status status = tch_kfac_load(t->kfac, file, "kfac");
    tch_checkpoint_close(file);
    return status;
}

/* Both take a step with the same gradients and batches, and stay the same. */
static void step_both(test_kfac_trial *a, test_kfac_trial *b, uint64_t stream)
{
    a->stream = b->stream = stream;
    test_kfac_draw_gradients(a, LAYOUT_CONTIGUOUS);
    test_kfac_draw_gradients(b, LAYOUT_CONTIGUOUS);
    CHECK_OK(take_step(a, stream));
    CHECK_OK(take_step(b, stream));
    check_same_state(a, b);
    for (int i = 0; i < 2 * LAYERS; i++) {
        if (a->gradients[i] != NULL) {
            double *x = test_tensor_read(a->gradients[i]);
            double *y = test_tensor_read(b->gradients[i]);
            CHECK(memcmp(x, y, (size_t)a->gradients[i]->count * sizeof *x) == 0, "gradient %d differs", i);
        }
    }
}

TEST_IN_FOLDER(checkpoints_go_on_bit_for_bit)
{
    for (int method = 0; method < 3; method++) {
        tch_kfac_config config = config_of(method);
        test_kfac_trial *a = test_kfac_make(*state, &config, LAYERS, layers, TCH_FLOAT32);
        test_kfac_trial *b = test_kfac_make(*state, &config, LAYERS, layers, TCH_FLOAT32);
        test_case("method %d", method);
        for (uint64_t i = 0; i < 3; i++) {
            test_kfac_draw_gradients(a, LAYOUT_CONTIGUOUS);
            CHECK_OK(take_step(a, 400 + 10 * i));
        }
        config.damping = 0.5;
        CHECK_OK(tch_kfac_set_config(a->kfac, &config));
        save(a, test_path("kfac.safetensors"));
        CHECK_OK(load(b, test_path("kfac.safetensors")));
        check_same_state(a, b);
        for (uint64_t i = 0; i < 3; i++) {
            step_both(a, b, 700 + 10 * i);
        }
    }
}

static void refuse_number(test_kfac_trial *t, const char *path, const char *name)
{
    int64_t count;
    double *before = all_state(t, &count);
    tch_status got = load(t, path);
    CHECK(got == TCH_ERR_INVALID_ARGUMENT && strstr(tch_last_error(), name) != NULL, "gave %s (%s), expected %s named",
          tch_status_name(got), tch_last_error(), name);
    check_state(t, before, count);
    check_counts(t, 0, 0);
}

/* Invalid counts and settings: errors that name them before anything is written. */
TEST_IN_FOLDER(numbers_that_cannot_be_are_refused)
{
    static const struct {
        const char *key, *text;
    } settings[] = {{"damping", "nan"},      {"damping", "0"},      {"factor_decay", "-1"},
                    {"kl_clip", "inf"},      {"accumulation", "0"}, {"accumulation", "1e300"},
                    {"accumulation", "2.5"}, {"method", "nan"},     {"bias_correction", "0.5"}};
    static const int64_t counts[] = {-1, -5, INT64_MAX, INT64_MIN};
    test_kfac_trial *a = trial_of(*state, TCH_KFAC_EKFAC);
    test_kfac_trial *b = trial_of(*state, TCH_KFAC_EKFAC);
    const char *path = test_path("kfac.safetensors");
    const char *bad = test_path("bad.safetensors");
    char key[64];
    save(a, path);
    for (int64_t at = 0; at < (int64_t)LAYERS * TCH_KFAC_COUNTS; at++) {
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            test_case("count %lld is %lld", (long long)at, (long long)counts[i]);
            test_checkpoint_set_element(path, bad, "kfac/counts", at, &counts[i]);
            refuse_number(b, bad, "'kfac/counts'");
            int64_t one[TCH_KFAC_COUNTS] = {1, 0, 1, 0};
            one[at % TCH_KFAC_COUNTS] = counts[i];
            CHECK(tch_kfac_set_counts(b->kfac, 0, one) == TCH_ERR_INVALID_ARGUMENT, "by hand it was taken");
        }
    }
    test_case("an observation of no update");
    test_checkpoint_set_element(path, bad, "kfac/counts", 1, &(int64_t){1});
    refuse_number(b, bad, "'kfac/counts'");
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        test_case("%s is %s", settings[i].key, settings[i].text);
        snprintf(key, sizeof key, "kfac/%s", settings[i].key);
        test_checkpoint_set_text(path, bad, key, settings[i].text);
        refuse_number(b, bad, key);
    }
    CHECK_OK(load(b, path));
    CHECK_OK(tch_kfac_set_counts(b->kfac, 0, (const int64_t[]){1, 0, 1, 0}));
}

/* --- failures ---------------------------------------------------------------------------------------------------- */

TEST(observations_that_are_not_finite_are_left_out)
{
    for (int method = 0; method < 3; method++) {
        tch_kfac_stats stats = TCH_KFAC_STATS_INIT;
        test_kfac_trial *t = stepped_trial(*state, method, 440);
        int64_t count;
        double *before = all_state(t, &count);
        test_positions batch = batch_of(*state, 1, 441);
        replace_element(batch.gradient, 2, NAN);
        CHECK_OK(observe(t, 1, &batch));
        check_state(t, before, count);
        CHECK_OK(tch_kfac_get_stats(t->kfac, &stats));
        CHECK(stats.observations == LAYERS + 1 && stats.rejected == 1 && stats.refreshes == LAYERS && stats.failed == 0,
              "%lld observations, %lld rejected, %lld refreshes, %lld failed", (long long)stats.observations,
              (long long)stats.rejected, (long long)stats.refreshes, (long long)stats.failed);
        CHECK(stats.scale > 0.0 && stats.scale < 1.0, "kl_clip gave %g", stats.scale);
        CHECK(stats.worst_residual < 1e-3, "a residual of %g", stats.worst_residual);
    }
}

/* A factor that is not finite, or not positive where required, keeps its last inverse or basis. */
TEST(refreshes_that_fail_keep_the_last)
{
    for (int method = 0; method < 3; method++) {
        tch_kfac_stats stats = TCH_KFAC_STATS_INIT;
        test_kfac_trial *t = stepped_trial(*state, method, 450);
        const char *what = method == TCH_KFAC_INVERSE ? "input_inverse" : "input_basis";
        int64_t count;
        double *before = test_kfac_state(t, 1, what, &count);
        double *factor = test_kfac_state(t, 1, "input_factor", &count);
        factor[0] = method == TCH_KFAC_INVERSE ? -1e3 : NAN;
        test_kfac_put_state(t, 1, "input_factor", factor);
        CHECK_OK(tch_kfac_refresh(t->kfac));
        double *after = test_kfac_state(t, 1, what, &count);
        CHECK(memcmp(before, after, (size_t)count * sizeof *before) == 0, "%s has changed", what);
        CHECK_OK(tch_kfac_get_stats(t->kfac, &stats));
        CHECK(stats.failed == 1, "%lld layers failed", (long long)stats.failed);
        CHECK_OK(precondition(t, -1));
    }
}

/* A factor without observations is not refreshed, so that gradients are not divided by the damping alone. The next good
 * observation refreshes it. */
TEST(a_first_observation_may_fail)
{
    for (int method = 0; method < 3; method++) {
        tch_kfac_config config = config_of(method);
        config.kl_clip = 0.0;
        tch_kfac_stats stats = TCH_KFAC_STATS_INIT;
        test_kfac_trial *t = test_kfac_make(*state, &config, LAYERS, layers, TCH_FLOAT32);
        test_positions batch = batch_of(*state, 0, 444);
        double kept = replace_element(batch.input, 0, INFINITY);
        test_kfac_draw_gradients(t, LAYOUT_CONTIGUOUS);
        double *before = test_tensor_read(t->gradients[0]);
        test_case("method %d", method);
        CHECK_OK(observe(t, 0, &batch));
        CHECK_OK(tch_kfac_refresh(t->kfac));
        CHECK_OK(precondition(t, -1));
        double *after = test_tensor_read(t->gradients[0]);
        double by = method == TCH_KFAC_INVERSE ? 1.0 : 1.0 + config.damping;
        for (int64_t i = 0; i < t->gradients[0]->count; i++) {
            CHECK(fabs(after[i] - before[i] / by) <= 1e-6 * fabs(before[i]), "element %lld was %g and is %g",
                  (long long)i, before[i], after[i]);
        }
        replace_element(batch.input, 0, kept);
        CHECK_OK(observe(t, 0, &batch));
        CHECK_OK(tch_kfac_refresh(t->kfac));
        CHECK_OK(tch_kfac_get_stats(t->kfac, &stats));
        CHECK(stats.failed == 0 && stats.rejected == 1, "%lld failed, %lld rejected", (long long)stats.failed,
              (long long)stats.rejected);
    }
}

/* --- skipped layers ---------------------------------------------------------------------------------------------- */

TEST(unseen_and_left_out_layers_stay)
{
    tch_kfac_stats stats = TCH_KFAC_STATS_INIT;
    test_kfac_trial *t = trial_of(*state, TCH_KFAC_INVERSE);
    test_kfac_draw_gradients(t, LAYOUT_CONTIGUOUS);
    test_case("before any observation");
    CHECK_OK(tch_kfac_refresh(t->kfac));
    CHECK_OK(precondition(t, -1));
    check_unchanged_gradients(t);
    CHECK_OK(tch_kfac_get_stats(t->kfac, &stats));
    CHECK(stats.refreshes == 0 && stats.scale == 1.0, "%lld refreshes, scale %g", (long long)stats.refreshes,
          stats.scale);
    CHECK_OK(take_step(t, 460));
    test_case("a layer left out");
    test_kfac_draw_gradients(t, LAYOUT_CONTIGUOUS);
    CHECK_OK(precondition(t, 0));
    test_tensor_check_unchanged(t->gradients[0], "the weight's gradient");
    test_tensor_check_unchanged(t->gradients[1], "the bias' gradient");
    CHECK(!test_tensor_is_unchanged(t->gradients[4]), "the other layer was left out too");
}

TEST(empty_batches_and_no_layers)
{
    tch_kfac_config config = config_of(TCH_KFAC_EIGEN);
    tch_kfac *none;
    const test_layer_case empty = {"one", LINEAR, 0, 4, 3, {1}};
    test_kfac_trial *t = test_kfac_make(*state, &config, LAYERS, layers, TCH_FLOAT32);
    test_positions batch = test_positions_make(*state, &empty, TCH_FLOAT32, LAYOUT_CONTIGUOUS, 470);
    test_case("no samples");
    CHECK_OK(observe(t, 0, &batch));
    check_counts(t, 0, 0);
    test_case("no layers");
    CHECK_OK(tch_kfac_create(*state, &config, NULL, 0, NULL, &none));
    CHECK_OK(tch_kfac_refresh(none));
    CHECK_OK(tch_kfac_precondition(none, 0.1, 0, NULL));
    CHECK(tch_kfac_layer_count(none) == 0 && tch_kfac_state_count(none) == 0, "there is something");
    tch_kfac_destroy(none);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static int install_allocator(void **state)
{
    return test_counting_install(state) == 0 ? test_open_context(state) : -1;
}

static int remove_allocator(void **state)
{
    int closed = test_close_context(state);
    return test_counting_remove(state) == 0 ? closed : -1;
}

/* Everything three times, on a new context, with the k-th allocation failing: errors are reported, nothing leaks, and
 * the rest continues. Returns whether the k-th was never reached. */
static bool rounds_without(tch_kfac_method method, long long k)
{
    tch_context *context;
    tch_kfac_layer described[LAYERS];
    tch_kfac_config config = config_of(method);
    test_tensor *gradients[2 * LAYERS] = {0};
    CHECK_OK(tch_context_create(test_device(), &context));
    test_kfac_trial t = {.context = context, .layers = layers, .count = LAYERS, .gradients = gradients};
    test_kfac_describe(LAYERS, layers, described);
    size_t mark = test_mark();
    test_positions batch = test_positions_make(context, layers[0].layer, TCH_FLOAT32, LAYOUT_CONTIGUOUS, 480);
    gradients[0] = test_tensor_make(context, TCH_FLOAT32, 2, (const int64_t[]){3, 4}, LAYOUT_CONTIGUOUS);
    gradients[1] = test_tensor_make(context, TCH_FLOAT32, 1, (const int64_t[]){3}, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_memory_trim(context, 0));
    counting_allocator_arm(&test_counting, k);
    tch_status status = tch_kfac_create(context, &config, NULL, LAYERS, described, &t.kfac);
    int failures = status != TCH_OK;
    for (int i = 0; failures == 0 ? i < 3 : t.kfac != NULL && i < 4; i++) {
        tch_status results[] = {observe(&t, 0, &batch), tch_kfac_refresh(t.kfac), precondition(&t, -1)};
        status = results[0] != TCH_OK ? results[0] : results[1] != TCH_OK ? results[1] : results[2];
        failures += status != TCH_OK;
        CHECK(status == TCH_OK || status == TCH_ERR_OUT_OF_MEMORY, "gave %s: %s", tch_status_name(status),
              tch_last_error());
    }
    bool reached = atomic_load(&test_counting.calls) >= k;
    counting_allocator_arm(&test_counting, 0);
    CHECK(failures <= reached, "%d failures: %s", failures, tch_last_error()); /* the pool retries, and may succeed */
    CHECK(t.kfac == NULL || status == TCH_OK, "it did not go on: %s", tch_last_error());
    tch_kfac_destroy(t.kfac);
    test_release_since(mark);
    tch_context_destroy(context);
    return !reached;
}

TEST(without_memory)
{
    for (int method = 0; method < 3; method++) {
        bool through = false;
        long long bytes = atomic_load(&test_counting.bytes);
        for (long long k = 1; !through; k++) {
            test_case("method %d, allocation %lld", method, k);
            CHECK(k < 200, "it never gets by");
            through = rounds_without(method, k);
            CHECK(atomic_load(&test_counting.bytes) == bytes, "%lld bytes leaked",
                  atomic_load(&test_counting.bytes) - bytes);
        }
        CHECK(atomic_load(&test_counting.mistakes) == 0, "%lld releases do not match",
              atomic_load(&test_counting.mistakes));
    }
}

/* After the first steps nothing is allocated, whatever the method. */
TEST(later_steps_allocate_nothing)
{
    for (int method = 0; method < 3; method++) {
        test_kfac_trial *t = trial_of(*state, method);
        test_positions batch[LAYERS];
        test_kfac_draw_gradients(t, LAYOUT_CONTIGUOUS);
        for (int32_t i = 0; i < LAYERS; i++) {
            batch[i] = batch_of(*state, i, 490);
        }
        test_case("method %d", method);
        for (int pass = 0; pass < 4; pass++) {
            counting_allocator_arm(&test_counting, 0);
            for (int32_t i = 0; i < LAYERS; i++) {
                CHECK_OK(observe(t, i, &batch[i]));
            }
            CHECK_OK(tch_kfac_refresh(t->kfac));
            CHECK_OK(precondition(t, -1));
            CHECK(pass < 2 || atomic_load(&test_counting.calls) == 0, "%lld allocations in step %d",
                  atomic_load(&test_counting.calls), pass);
        }
    }
}

TEST(the_forecast_is_what_is_taken)
{
    for (int method = 0; method < 3; method++) {
        tch_kfac_layer described[LAYERS];
        tch_kfac_config config = config_of(method);
        test_caller_memory memory = {.context = *state};
        const tch_state_allocator allocator = {sizeof allocator, test_caller_allocate, test_caller_release, &memory};
        int64_t forecast;
        tch_kfac *kfac;
        test_kfac_describe(LAYERS, layers, described);
        test_case("method %d", method);
        CHECK_OK(tch_kfac_forecast(&config, LAYERS, described, &forecast));
        CHECK_OK(tch_kfac_create(*state, &config, &(tch_optim_setup){sizeof(tch_optim_setup), .allocator = &allocator},
                                 LAYERS, described, &kfac));
        CHECK(memory.bytes == forecast && forecast > 0, "%lld bytes were taken, %lld forecast", (long long)memory.bytes,
              (long long)forecast);
        tch_kfac_destroy(kfac);
        CHECK(memory.bytes == 0, "%lld bytes were not given back", (long long)memory.bytes);
    }
}

/* --- refused ----------------------------------------------------------------------------------------------------- */

static void check_refused(tch_status status, const char *says)
{
    CHECK(status > TCH_OK && status < TCH_ERR_OUT_OF_MEMORY, "gave %s, expected an error of the caller's",
          tch_status_name(status));
    CHECK(strstr(tch_last_error(), says) != NULL, "the message \"%s\" does not say \"%s\"", tch_last_error(), says);
}

static void refuse_kfac(tch_context *context, const tch_kfac_config *config, int32_t count,
                        const tch_kfac_layer *described, const char *says)
{
    tch_kfac *kfac = NULL;
    int64_t bytes;
    test_case("refused: %s", says);
    check_refused(tch_kfac_create(context, config, NULL, count, described, &kfac), says);
    CHECK(kfac == NULL, "there is an object");
    check_refused(tch_kfac_forecast(config, count, described, &bytes), says);
}

#define CONFIG(member) TEST_FIELD(tch_kfac_config, member)
#define LAYER(member) TEST_FIELD(tch_kfac_layer, member)

/* Of the first table the last row has factors of float16; the fifth of the second has the name of the other layer. */
TEST(bad_descriptions_are_refused)
{
    static const struct {
        test_field field;
        double value;
        const char *says;
    } configs[] = {
        {CONFIG(method), TCH_KFAC_METHOD_COUNT, "method"},
        {CONFIG(sharing), TCH_SHARING_COUNT, "sharing"},
        {CONFIG(damping), 0.0, "damping"},
        {CONFIG(factor_decay), NAN, "factor_decay"},
        {CONFIG(use_bias_correction), 2, "use_bias_correction"},
        {CONFIG(accumulation_steps), 0, "accumulation_steps is 0, expected 1 to 1073741824"},
        {CONFIG(struct_size), 8, "TCH_KFAC_CONFIG_INIT"},
        {CONFIG(accumulation_steps), INT32_MAX, "accumulation_steps is 2147483647, expected 1 to 1073741824"},
        {CONFIG(kl_clip), INFINITY, "kl_clip is inf, expected 0 to 1e300"},
        {CONFIG(damping), 1.0, "factor_dtype"},
    };
    static const struct {
        tch_layer_kind kind;
        test_field field;
        double value;
        const char *says;
    } described_badly[] = {
        {TCH_LAYER_EMBEDDING, LAYER(bias), 0, "kind"},
        {TCH_LAYER_LINEAR, LAYER(inputs), 0, "inputs"},
        {TCH_LAYER_LINEAR, LAYER(outputs), -1, "outputs"},
        {TCH_LAYER_LINEAR, LAYER(layer.struct_size), 0, "TCH_LAYER_INIT"},
        {TCH_LAYER_LINEAR, LAYER(bias), 0, "'one'"},
        {TCH_LAYER_CONV, LAYER(layer.kernel), 2, "multiple"},
        {TCH_LAYER_CONV, LAYER(layer.groups), 2, "groups"},
        {TCH_LAYER_LINEAR, LAYER(inputs), INT32_MAX, "inputs is 2147483647, expected 1 to 2147483646"},
        {TCH_LAYER_LINEAR, LAYER(outputs), 2147483648.0, "outputs is 2147483648, expected 1 to 2147483647"},
    };
    const tch_kfac_config good = TCH_KFAC_CONFIG_INIT;
    tch_kfac_layer described[LAYERS];
    test_kfac_describe(LAYERS, layers, described);
    for (size_t i = 0; i < TEST_COUNT(configs); i++) {
        tch_kfac_config bad = good;
        bad.factor_dtype = i + 1 == TEST_COUNT(configs) ? TCH_FLOAT16 : bad.factor_dtype;
        test_field_set(&bad, &configs[i].field, configs[i].value);
        refuse_kfac(*state, &bad, LAYERS, described, configs[i].says);
    }
    for (size_t i = 0; i < TEST_COUNT(described_badly); i++) {
        tch_kfac_layer all[2] = {described[0], described[1]};
        all[1].layer.kind = described_badly[i].kind;
        all[1].layer.dims = 1;
        test_field_set(&all[1], &described_badly[i].field, described_badly[i].value);
        all[1].name = i == 4 ? described[0].name : all[1].name;
        refuse_kfac(*state, &good, 2, all, described_badly[i].says);
    }
}

TEST(bad_calls_are_refused)
{
    tch_kfac_config config = config_of(TCH_KFAC_EIGEN);
    test_kfac_trial *t = test_kfac_make(*state, &config, LAYERS, layers, TCH_FLOAT32);
    test_positions one = test_positions_make(*state, &cases[0], TCH_FLOAT32, LAYOUT_CONTIGUOUS, 600);
    test_positions two = test_positions_make(*state, &cases[1], TCH_FLOAT32, LAYOUT_CONTIGUOUS, 602);
    tch_tensor *x = &one.input->tensor;
    tch_tensor *g = &one.gradient->tensor;
    int64_t counts[TCH_KFAC_COUNTS] = {0, 0, 0, -1};
    test_case("calls");
    check_refused(tch_kfac_observe(NULL, 0, x, g, 1.0, NULL), "kfac is NULL");
    check_refused(tch_kfac_observe(t->kfac, LAYERS, x, g, 1.0, NULL), "layer is 3");
    check_refused(tch_kfac_observe(t->kfac, 0, NULL, g, 1.0, NULL), "input");
    check_refused(tch_kfac_observe(t->kfac, 0, x, NULL, 1.0, NULL), "output_gradient");
    check_refused(tch_kfac_observe(t->kfac, 0, x, g, NAN, NULL), "scale");
    check_refused(tch_kfac_observe(t->kfac, 0, x, g, 1.0, g), "grad_scale");
    check_refused(tch_kfac_observe(t->kfac, 0, g, x, 1.0, NULL), "'one'");
    check_refused(tch_kfac_observe(t->kfac, 0, x, &two.gradient->tensor, 1.0, NULL), "output_gradient");
    check_refused(tch_kfac_set_counts(t->kfac, 0, counts), "counts[3]");
    check_refused(tch_kfac_get_counts(t->kfac, -1, counts), "no layer -1");
    config.method = TCH_KFAC_INVERSE;
    check_refused(tch_kfac_set_config(t->kfac, &config), "method");
    check_refused(tch_kfac_refresh(NULL), "kfac is NULL");
    CHECK_OK(tch_kfac_get_config(t->kfac, &config));
    CHECK(config.method == TCH_KFAC_EIGEN, "the configuration has changed");
}

TEST(bad_gradients_are_refused)
{
    test_kfac_trial *t = trial_of(*state, TCH_KFAC_EIGEN);
    test_kfac_draw_gradients(t, LAYOUT_CONTIGUOUS);
    const struct {
        int argument;
        test_tensor *given;
        const char *says;
    } rows[] = {
        {1, NULL, "bias of layer 'one'"},
        {3, t->gradients[1], "bias of layer 'two'"},
        {4, t->gradients[2], "weight of layer 'three'"},
    };
    test_case("gradients");
    for (size_t k = 0; k < TEST_COUNT(rows); k++) {
        tch_tensor *arguments[2 * LAYERS];
        for (int i = 0; i < 2 * LAYERS; i++) {
            test_tensor *given = i == rows[k].argument ? rows[k].given : t->gradients[i];
            arguments[i] = given == NULL ? NULL : &given->tensor;
        }
        check_refused(tch_kfac_precondition(t->kfac, 0.1, 2 * LAYERS, arguments), rows[k].says);
        check_refused(tch_kfac_precondition(t->kfac, 0.1, LAYERS, arguments), "expected 6");
        check_refused(tch_kfac_precondition(t->kfac, NAN, 2 * LAYERS, arguments), "lr");
    }
    check_refused(tch_kfac_precondition(t->kfac, 0.1, 2 * LAYERS, NULL), "expected 6");
    check_unchanged_gradients(t);
}

TEST_MAIN(install_allocator, remove_allocator)
