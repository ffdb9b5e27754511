/* Memory of optimizers: forecasts equal allocations, budgets are kept, a steady state allocates nothing on host or
 * device, and a failed allocation changes nothing or marks the optimizer as failed.
 *
 * Host allocations are counted and made to fail through support/fakes/counting_allocator.c, which covers all memory on
 * the CPU; the state's memory also through tch_state_allocator, on every device. */

#include <torchium/amp.h>

#include "support/fakes/counting_allocator.h"
#include "support/messages.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define MOST_ALLOCATIONS 2000

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {9, 9}},
    {.ndim = 1, .shape = {37}},
    {.ndim = 3, .shape = {3, 4, 5}, .order = {2, 0, 1}},
    {.ndim = 2, .shape = {12, 10}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 0},
    {.ndim = 1, .shape = {4999}}, /* large enough for compressed moments */
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.01;
    c.shampoo.max_preconditioner_dim =
        kind == TCH_OPTIM_SOAP ? 10 : 8; /* SOAP: a tall matrix has one factor, known immediately */
    c.shampoo.precondition_frequency = 2;
    c.shampoo.stagger = 0; /* as the references do */
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.numerics.damping = 1e-3;
        c.shampoo.grafting = TCH_GRAFTING_ADAM;
        c.momentum = 0.5;
        c.numerics.method = TCH_ROOT_EIGEN;
    }
    return c;
}

/* With compressed moments, factors and roots, where moments are not float32. */
static tch_optim_config config_kept(tch_optim_kind kind, tch_state_dtype kept)
{
    tch_optim_config c = config_of(kind);
    c.memory.state_dtype = kept;
    c.memory.packed_factors = kept != TCH_STATE_FLOAT32;
    c.memory.root_dtype = kept == TCH_STATE_INT8 ? TCH_STATE_BFLOAT16 : TCH_STATE_FLOAT32;
    return c;
}

static tch_memory_info memory_of(tch_context *context)
{
    tch_memory_info info = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_memory_get_info(context, &info));
    return info;
}

static tch_context *open_context(void)
{
    tch_context *context = NULL;
    CHECK_OK(tch_context_create(test_device(), &context));
    return context;
}

/* Everything of the trial and its context was released. */
static void close_all(trial *t)
{
    tch_context *context = t->context;
    trial_close(t);
    tch_context_destroy(context);
    test_counting_check_empty();
}

/* --- forecasts --------------------------------------------------------------------------------------------------- */

static void check_counts(const trial *t, const tch_optim_memory *memory)
{
    int64_t blocks = 0;
    int64_t factors = 0;
    for (int32_t i = 0; i < t->count; i++) {
        const ref_optim *r = t->parameters[i].reference;
        for (int32_t b = 0; b < r->block_count && ref_has_blocks(r->method); b++) {
            blocks++;
            for (int32_t k = 0; k < r->order; k++) {
                factors += r->blocks[b].factor[k] != NULL;
            }
        }
    }
    CHECK(memory->blocks == blocks, "%lld blocks, expected %lld", (long long)memory->blocks, (long long)blocks);
    CHECK(memory->factors == factors, "%lld factors, expected %lld", (long long)memory->factors, (long long)factors);
}

/* Bytes of the named tensors, plus alignment of up to 255 bytes each. */
static void check_state_bytes(const trial *t, int64_t bytes)
{
    int64_t least = 0;
    int32_t count = tch_optimizer_state_count(t->optimizer);
    for (int32_t i = 0; i < count; i++) {
        tch_optim_state s = trial_state_at(t, i);
        least += tch_tensor_numel(s.tensor) * (int64_t)tch_dtype_size(s.tensor->dtype);
        CHECK(s.parameter >= 0 && s.parameter < t->count, "%s belongs to parameter %d", s.name, s.parameter);
    }
    CHECK(bytes >= least && bytes <= least + 256 * (int64_t)(count + 16), "%lld bytes for %lld of state",
          (long long)bytes, (long long)least);
}

static void forecast(tch_optim_kind kind, tch_dtype dtype, tch_state_dtype kept)
{
    trial t;
    tch_parameter entries[SHAPES];
    tch_parameter unallocated[SHAPES];
    tch_tensor empty[SHAPES];
    tch_optim_config c = config_kept(kind, kept);
    tch_optim_memory before = TCH_OPTIM_MEMORY_INIT;
    tch_optim_memory after = TCH_OPTIM_MEMORY_INIT;
    tch_context *context = open_context();
    c.memory.master_weights = dtype.bits == 16;
    c.memory.packed_factors = c.memory.packed_factors && (kept == TCH_STATE_BFLOAT16 || dtype.bits == 16);
    test_case("%s, %s, state_dtype %d", tch_optim_kind_name(kind), tch_dtype_name(dtype), (int)kept);
    trial_prepare(&t, context, dtype, dtype, &c, SHAPES, shapes, entries);
    for (int32_t i = 0; i < SHAPES; i++) {
        empty[i] = *entries[i].tensor;
        empty[i].data = NULL;
        empty[i].byte_offset = 0;
        unallocated[i] = (tch_parameter){.tensor = &empty[i]};
    }
    int64_t held = memory_of(context).allocated;
    CHECK_OK(tch_optim_forecast(context, &c, SHAPES, unallocated, &before));
    CHECK(memory_of(context).allocated == held, "the forecast has taken memory");
    CHECK_OK(tch_optimizer_create(context, &c, NULL, SHAPES, entries, &t.optimizer));
    trial_steps(&t, 5);
    CHECK_OK(tch_optimizer_get_memory(t.optimizer, &after));
    CHECK(before.state == after.state, "state: %lld, then %lld", (long long)before.state, (long long)after.state);
    CHECK(before.scratch == after.scratch, "scratch: %lld, then %lld", (long long)before.scratch,
          (long long)after.scratch);
    CHECK(before.refresh == after.refresh, "refresh: %lld, then %lld", (long long)before.refresh,
          (long long)after.refresh);
    check_counts(&t, &before);
    check_counts(&t, &after);
    check_state_bytes(&t, after.state);
    trial_close(&t);
    CHECK_OK(tch_memory_trim(context, 0)); /* the workspace is the context's */
    CHECK(memory_of(context).allocated == 0, "the optimizer has left memory behind");
    tch_context_destroy(context);
    test_counting_check_empty();
}

TEST(forecasts)
{
    const tch_dtype types[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_BFLOAT16};
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        for (int i = 0; i < 3; i++) {
            forecast((tch_optim_kind)kind, types[i], TCH_STATE_FLOAT32);
            forecast((tch_optim_kind)kind, types[i], TCH_STATE_BFLOAT16);
            forecast((tch_optim_kind)kind, types[i], TCH_STATE_INT8);
        }
    }
}

/* --- the state's own memory -------------------------------------------------------------------------------------- */

/* All state comes from the caller's allocator, including that of a later group; if it fails, or returns unaligned
 * memory, nothing is kept. */
TEST(memory_of_the_caller)
{
    static const struct {
        int64_t fail_at, off;
        tch_status expected;
    } cases[] = {{0, 0, TCH_OK}, {1, 0, TCH_ERR_OUT_OF_MEMORY}, {0, 64, TCH_ERR_INVALID_ARGUMENT}};
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        for (size_t i = 0; i < TEST_COUNT(cases); i++) {
            trial t;
            tch_parameter entries[SHAPES];
            tch_optim_config c = config_of(kind);
            tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
            test_caller_memory m = {.context = open_context(), .fail_at = cases[i].fail_at, .off = cases[i].off};
            const tch_state_allocator allocator = {sizeof allocator, test_caller_allocate, test_caller_release, &m};
            c.momentum = kind == TCH_OPTIM_SGD ? 0.9 : c.momentum;
            c.numerics.precision = TCH_PRECISION_HIGHEST; /* as the reference's */
            test_case("%s, memory of the caller's, case %d", tch_optim_kind_name(kind), (int)i);
            trial_prepare(&t, m.context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes, entries);
            tch_status got = tch_optimizer_create(m.context, &c,
                                                  &(tch_optim_setup){sizeof(tch_optim_setup), .allocator = &allocator},
                                                  SHAPES, entries, &t.optimizer);
            CHECK(got == cases[i].expected, "gave %s", tch_status_name(got));
            CHECK((got == TCH_OK) == (t.optimizer != NULL), "an optimizer was returned");
            if (t.optimizer != NULL) {
                trial_add_group(&t, &c, SHAPES, shapes);
                trial_steps(&t, 5);
                trial_check(&t, trial_tolerance((tch_optim_kind)kind, TCH_FLOAT32));
                CHECK_OK(tch_optimizer_get_memory(t.optimizer, &memory));
                CHECK(memory.state == m.bytes, "%lld bytes of state, %lld were asked for", (long long)memory.state,
                      (long long)m.bytes);
            }
            trial_close(&t);
            CHECK(m.bytes == 0, "%lld bytes were not given back", (long long)m.bytes);
            tch_context_destroy(m.context);
            test_counting_check_empty();
        }
    }
}

TEST(allocators_that_are_none)
{
    tch_context *context = open_context();
    tch_optimizer *optimizer = NULL;
    tch_optim_config c = config_of(TCH_OPTIM_SGD);
    test_caller_memory m = {.context = context};
    const tch_state_allocator bad[] = {{sizeof *bad, NULL, test_caller_release, &m},
                                       {sizeof *bad, test_caller_allocate, NULL, &m},
                                       {1, test_caller_allocate, test_caller_release, &m}};
    for (int i = 0; i < 3; i++) {
        test_case("incomplete allocator %d", i);
        tch_optim_setup setup = {.struct_size = sizeof setup, .allocator = &bad[i]};
        test_check_refused(tch_optimizer_create(context, &c, &setup, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT,
                           "allocator");
    }
    test_case("a setup of another size");
    tch_optim_setup setup = {.struct_size = 1};
    test_check_refused(tch_optimizer_create(context, &c, &setup, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT,
                       "setup->struct_size");
    CHECK(optimizer == NULL, "an optimizer was returned");
    tch_context_destroy(context);
    test_counting_check_empty();
}

/* --- the steady state -------------------------------------------------------------------------------------------- */

/* Both kinds of steps, often enough for recording. */
static void step_with_gaps(trial *t)
{
    const tch_tensor *gradients[SHAPES];
    trial_list_gradients(t, gradients);
    for (int i = 0; i < 12; i++) {
        gradients[2] = i % 3 == 1 ? NULL : &t->parameters[2].gradient;
        CHECK_OK(tch_optimizer_step(t->optimizer, SHAPES, gradients));
    }
}

/* A step of any kind, with some gradients missing, allocates no host or device memory. */
TEST(nothing_is_allocated_in_the_steady_state)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        trial t;
        tch_optim_config c = config_of(kind);
        tch_context *context = open_context();
        test_case("%s", tch_optim_kind_name(kind));
        trial_open(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        trial_steps(&t, 6);
        step_with_gaps(&t);
        tch_memory_info before = memory_of(context);
        counting_allocator_arm(&test_counting, 0);
        step_with_gaps(&t);
        CHECK(atomic_load(&test_counting.calls) == 0, "%lld host allocations", atomic_load(&test_counting.calls));
        tch_memory_info after = memory_of(context);
        CHECK(after.requests == before.requests, "%lld requests to the pool",
              (long long)(after.requests - before.requests));
        CHECK(after.misses == before.misses && after.peak == before.peak, "the pool has grown");
        close_all(&t);
    }
}

/* --- the budget -------------------------------------------------------------------------------------------------- */

/* Matrices whose combined workspace far exceeds the budget, which still fits the largest one's refresh: the step stays
 * within the budget, with the same results. The context's own limit is restored, and all memory returns to the
 * device. */
static void run_budget(tch_optim_kind kind, int64_t budget, int64_t *taken, double **results)
{
    enum { COUNT = 12 };
    trial_shape large[COUNT];
    trial t;
    tch_parameter entries[COUNT];
    const int64_t limit = (int64_t)1 << 33;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_optim_config c = config_of(kind);
    tch_context *context = open_context();
    c.shampoo.max_preconditioner_dim = 64;
    c.soap.block = 1;
    c.memory.budget = budget;
    CHECK_OK(tch_context_set_workspace_limit(context, limit));
    for (int i = 0; i < COUNT; i++) {
        large[i] = (trial_shape){.ndim = 2, .shape = {128, 192}};
    }
    trial_prepare(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, COUNT, large, entries);
    tch_memory_info before = memory_of(context);
    CHECK_OK(tch_optimizer_create(context, &c, NULL, COUNT, entries, &t.optimizer));
    CHECK_OK(tch_optimizer_get_memory(t.optimizer, &memory));
    tch_optimizer_destroy(t.optimizer);
    CHECK(memory_of(context).reserved - before.reserved < memory.state / 4, "state waits in the pool");
    CHECK_OK(tch_memory_reset_peak(context));
    CHECK_OK(tch_optimizer_create(context, &c, NULL, COUNT, entries, &t.optimizer));
    for (int i = 0; i < 4; i++) {
        trial_draw(&t);
        CHECK_OK(trial_step_library(&t));
        CHECK(tch_context_get_workspace_limit(context) == limit, "the limit of the workspace has changed");
    }
    *taken = memory_of(context).peak - before.allocated - memory.state;
    *results = test_tensor_read(t.parameters[COUNT - 1].memory);
    tch_optimizer_destroy(t.optimizer);
    t.optimizer = NULL;
    CHECK_OK(tch_memory_trim(context, 0));
    CHECK(memory_of(context).allocated == before.allocated, "memory is left after the optimizer");
    trial_close(&t);
    tch_context_destroy(context);
}

/* A GPU chooses other kernels for other batch sizes, and rounds products to TF32 (Shampoo, SOAP) or bfloat16 (Muon):
 * 2^-11 and 2^-8 of elements near 1, times a few steps. */
TEST(budgets_are_kept)
{
    const double allowed = test_on_cpu() ? 1e-5 : 1e-2;
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        bool half = ref_orthogonalizes((tch_optim_kind)kind) && !test_on_cpu(); /* bfloat16 takes half of float32 */
        if (!ref_has_blocks((tch_optim_kind)kind)) {
            continue;
        }
        int64_t budget = half ? 1 << 20 : 2 << 20;
        int64_t taken = 0;
        int64_t free_taken = 0;
        double *narrow = NULL;
        double *wide = NULL;
        test_case("%s within %lld bytes", tch_optim_kind_name(kind), (long long)budget);
        run_budget((tch_optim_kind)kind, 0, &free_taken, &wide);
        run_budget((tch_optim_kind)kind, budget, &taken, &narrow);
        CHECK(free_taken > budget, "without a budget it takes only %lld bytes: the test is too small",
              (long long)free_taken);
        CHECK(taken <= budget, "%lld bytes beyond the state", (long long)taken);
        for (int i = 0; i < 128 * 192; i++) {
            double gap = narrow[i] - wide[i];
            CHECK(gap < allowed && gap > -allowed, "element %d is %g, without a budget %g", i, narrow[i], wide[i]);
        }
        test_counting_check_empty();
    }
}

/* With a small workspace a few bases are computed at a time, with the same result. On the CPU only: a GPU's eigensolver
 * needs more for one basis than all bases of these sizes. */
TEST(bases_in_a_small_workspace)
{
    if (!test_on_cpu()) {
        skip();
    }
    enum { COUNT = 12 };
    tch_context *context = open_context();
    const int64_t limit = 64 << 10;
    trial_shape squares[COUNT];
    trial t;
    tch_parameter entries[COUNT];
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_optim_config c = trial_config(TCH_OPTIM_SOAP);
    test_case("bases within %lld bytes", (long long)limit);
    for (int i = 0; i < COUNT; i++) {
        squares[i] = (trial_shape){.ndim = 2, .shape = {24, 24}};
    }
    CHECK_OK(tch_context_set_workspace_limit(context, limit));
    trial_prepare(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, COUNT, squares, entries);
    int64_t held = memory_of(context).allocated;
    CHECK_OK(tch_memory_reset_peak(context));
    CHECK_OK(tch_optimizer_create(context, &c, NULL, COUNT, entries, &t.optimizer));
    trial_steps(&t, 15);
    CHECK_OK(tch_optimizer_get_memory(t.optimizer, &memory));
    CHECK(memory.refresh > 2 * limit, "all at once take only %lld bytes", (long long)memory.refresh);
    int64_t taken = memory_of(context).peak - held - memory.state - memory.scratch - 4096 /* small things */;
    CHECK(taken <= limit, "%lld bytes of workspace", (long long)taken);
    trial_check(&t, trial_tolerance(TCH_OPTIM_SOAP, TCH_FLOAT64));
    close_all(&t);
}

/* --- no memory --------------------------------------------------------------------------------------------------- */

static void check_out_of_memory(tch_status status)
{
    CHECK(status == TCH_ERR_OUT_OF_MEMORY, "gave %s (%s)", tch_status_name(status), tch_last_error());
    CHECK(strlen(tch_last_error()) > 0, "there is no message");
}

/* One optimizer whose creation fails at its k-th allocation. Returns whether it makes fewer. */
static bool create_without(tch_optim_kind kind, tch_state_dtype kept, long long k)
{
    trial t;
    tch_parameter entries[SHAPES];
    tch_optim_config c = config_kept(kind, kept);
    tch_context *context = open_context();
    trial_prepare(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes, entries);
    counting_allocator_arm(&test_counting, k);
    tch_status status = tch_optimizer_create(context, &c, NULL, SHAPES, entries, &t.optimizer);
    bool reached = atomic_load(&test_counting.calls) >= k;
    counting_allocator_arm(&test_counting, 0);
    if (reached && status != TCH_OK) {
        check_out_of_memory(status);
        CHECK(t.optimizer == NULL, "an optimizer was returned");
        CHECK_OK(tch_optimizer_create(context, &c, NULL, SHAPES, entries, &t.optimizer));
    }
    for (int32_t i = 0; i < SHAPES; i++) {
        test_tensor_check_unchanged(t.parameters[i].memory, "a parameter");
    }
    close_all(&t);
    return !reached;
}

/* The same for a group added between steps: the existing ones continue unaffected. */
static bool add_without(tch_optim_kind kind, tch_state_dtype kept, long long k)
{
    trial t;
    trial more;
    tch_parameter entries[SHAPES];
    int32_t group = 77;
    tch_optim_memory before = TCH_OPTIM_MEMORY_INIT;
    tch_optim_memory after = TCH_OPTIM_MEMORY_INIT;
    tch_optim_config c = config_kept(kind, kept);
    tch_context *context = open_context();
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, 2, shapes);
    trial_prepare(&more, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes, entries);
    for (int32_t i = 0; i < SHAPES; i++) {
        static const char *const names[SHAPES] = {"a", "b", "c", "d", "e", "f"};
        entries[i].name = names[i];
    }
    trial_step(&t);
    CHECK_OK(tch_optimizer_get_memory(t.optimizer, &before));
    counting_allocator_arm(&test_counting, k);
    tch_status status = tch_optimizer_add_group(t.optimizer, &c, SHAPES, entries, NULL, &group);
    bool reached = atomic_load(&test_counting.calls) >= k;
    counting_allocator_arm(&test_counting, 0);
    if (reached && status != TCH_OK) {
        check_out_of_memory(status);
        CHECK_OK(tch_optimizer_get_memory(t.optimizer, &after));
        CHECK(memcmp(&before, &after, sizeof after) == 0, "the figures of memory have changed");
        CHECK(group == 77 && tch_optimizer_group_count(t.optimizer) == 1, "the group was added");
        CHECK(tch_optimizer_parameter_count(t.optimizer) == 2, "its parameters were added");
        trial_steps(&t, 6);
        trial_check(&t, 1e-10);
    }
    trial_close(&t);
    trial_close(&more);
    tch_context_destroy(context);
    test_counting_check_empty();
    return !reached;
}

/* A step that fails at its k-th allocation: either nothing has changed and the next one succeeds, or the optimizer has
 * failed and every later step reports that. */
static bool step_without(tch_optim_kind kind, tch_state_dtype kept, long long k)
{
    trial t;
    const tch_tensor *gradients[SHAPES];
    tch_optim_config c = config_kept(kind, kept);
    tch_context *context = open_context();
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_draw(&t);
    trial_list_gradients(&t, gradients);
    CHECK_OK(tch_memory_trim(context, 0));
    counting_allocator_arm(&test_counting, k);
    tch_status status = tch_optimizer_step(t.optimizer, SHAPES, gradients);
    bool reached = atomic_load(&test_counting.calls) >= k;
    counting_allocator_arm(&test_counting, 0);
    if (status != TCH_OK) {
        check_out_of_memory(status);
        status = tch_optimizer_step(t.optimizer, SHAPES, gradients);
    }
    if (status == TCH_OK) {
        trial_step_references(&t);
        trial_steps(&t, 5);
        trial_check(&t, 1e-10);
    } else {
        check_out_of_memory(status);
        check_out_of_memory(tch_optimizer_step(t.optimizer, SHAPES, gradients));
    }
    close_all(&t);
    return !reached;
}

TEST(every_allocation)
{
    static const struct {
        const char *what;
        bool (*without)(tch_optim_kind kind, tch_state_dtype kept, long long k);
        tch_state_dtype kept;
    } cases[] = {{"creating", create_without, TCH_STATE_FLOAT32},
                 {"creating with state in int8", create_without, TCH_STATE_INT8},
                 {"adding a group", add_without, TCH_STATE_FLOAT32},
                 {"stepping", step_without, TCH_STATE_FLOAT32}};
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
            bool through = false;
            for (long long k = 1; !through; k++) {
                test_case("%s, %s, allocation %lld", tch_optim_kind_name(kind), cases[i].what, k);
                CHECK(k <= MOST_ALLOCATIONS, "it never gets by");
                through = cases[i].without((tch_optim_kind)kind, cases[i].kept, k);
            }
        }
    }
}

TEST(scalers)
{
    bool through = false;
    for (long long k = 1; !through; k++) {
        trial t;
        tch_parameter entries[SHAPES];
        tch_tensor *gradients[SHAPES];
        tch_optim_config c = config_of(TCH_OPTIM_SGD);
        tch_scaler *scaler = NULL;
        tch_context *context = open_context();
        test_case("a scaler, allocation %lld", k);
        trial_prepare(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes, entries);
        trial_draw(&t);
        for (int32_t i = 0; i < SHAPES; i++) {
            gradients[i] = &t.parameters[i].gradient;
        }
        counting_allocator_arm(&test_counting, k);
        tch_status made = tch_scaler_create(context, NULL, &scaler);
        tch_status done = made != TCH_OK ? made : tch_scaler_unscale(scaler, SHAPES, gradients);
        through = atomic_load(&test_counting.calls) < k;
        counting_allocator_arm(&test_counting, 0);
        CHECK((made == TCH_OK) == (scaler != NULL), "a scaler without an error, or an error with one");
        if (done != TCH_OK) {
            check_out_of_memory(done);
            test_tensor_check_unchanged(t.parameters[0].gradient_memory, "a gradient");
        }
        tch_scaler_destroy(scaler);
        close_all(&t);
    }
}

TEST_MAIN(test_counting_install, test_counting_remove)
