/* Calls of tch_optimizer_set_kernel and _get_kernel that are wrong, and memory that is refused: nothing changes, a
 * kernel that is in use stays in use, and nothing is left behind. Steps with a kernel allocate nothing. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/fakes/counting_allocator.h"
#include "support/messages.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define MOST_ALLOCATIONS 2000

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {6, 5}}, {.ndim = 1, .shape = {37}}, {.ndim = 1, .shape = {2100}}};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static const char update_source[] = "__device__ void f(tch_element &e, const tch_numbers &k) { e.p -= k.lr * e.g; }\n";

/* M^(-1/p) of a matrix that is nearly its own diagonal: good enough for a check that tolerates anything. */
static const char root_source[] = "__global__ void f(const float *a, float *x, float *s, int n, int root)\n"
                                  "{\n"
                                  "    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {\n"
                                  "        size_t at = (size_t)blockIdx.x * n * n + e;\n"
                                  "        x[at] = e % (n + 1) == 0 ? powf(a[at], -1.0f / root) : 0.0f;\n"
                                  "    }\n"
                                  "}\n";

static tch_context *open_context(void)
{
    tch_context *context = NULL;
    CHECK_OK(tch_context_create(test_device(), &context));
    return context;
}

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.relative_eps = kind == TCH_OPTIM_SHAMPOO ? 1e-3 : c.relative_eps;
    c.precondition_frequency = 1;
    return c;
}

static tch_kernel_config source_of(tch_optim_part part)
{
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    config.source = part == TCH_OPTIM_PART_ROOT ? root_source : update_source;
    config.name = "f";
    return config;
}

/* A tolerance with which the check of the roots above passes. */
static tch_optim_kernel kernel_of(const tch_kernel_config *config, tch_optim_part part)
{
    tch_optim_kernel kernel = TCH_OPTIM_KERNEL_INIT;
    kernel.kernel = config;
    kernel.tolerance = part == TCH_OPTIM_PART_ROOT ? 1e6 : 0.0;
    kernel.threads = part == TCH_OPTIM_PART_ROOT ? 32 : 0;
    return kernel;
}

static tch_status set(const trial *t, tch_optim_part part)
{
    tch_kernel_config config = source_of(part);
    tch_optim_kernel kernel = kernel_of(&config, part);
    return tch_optimizer_set_kernel(t->optimizer, part, &kernel);
}

static tch_optim_kernel_info info_of(const trial *t, tch_optim_part part)
{
    tch_optim_kernel_info info = TCH_OPTIM_KERNEL_INFO_INIT;
    CHECK_OK(tch_optimizer_get_kernel(t->optimizer, part, &info));
    return info;
}

/* --- wrong calls ------------------------------------------------------------------------------------------------- */

static void refuse(const trial *t, tch_optim_part part, const tch_optim_kernel *kernel, tch_status expected,
                   const char *argument)
{
    test_case("%s of %s", argument, part == TCH_OPTIM_PART_ROOT ? "a root" : "an update");
    test_check_refused(tch_optimizer_set_kernel(t->optimizer, part, kernel), expected, argument);
    CHECK(info_of(t, part).in_use && info_of(t, part).reason[0] == '\0', "the kernel is not in use any more");
}

static void wrong_numbers(const trial *t, tch_optim_part part)
{
    tch_kernel_config config = source_of(part);
    const tch_optim_kernel right = kernel_of(&config, part);
    tch_optim_kernel k = right;
    k.struct_size--;
    refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "kernel");
    const double tolerances[] = {-1.0, INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        k = right, k.tolerance = tolerances[i];
        refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "tolerance");
    }
    k = right, k.threads = part == TCH_OPTIM_PART_ROOT ? 1025 : 1;
    refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "threads");
    k = right, k.most_size = part == TCH_OPTIM_PART_ROOT ? -1 : 1;
    refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "most_size");
    k = right, k.shared_bytes = part == TCH_OPTIM_PART_ROOT ? -1 : 1;
    refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "shared_bytes");
}

static void wrong_sources(const trial *t, tch_optim_part part)
{
    const char *options[] = {"-fplugin=evil.so"};
    tch_kernel_config config = source_of(part);
    tch_optim_kernel k = kernel_of(&config, part);
    k.kernel = NULL;
    refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "config");
    k.kernel = &config;
    config.name = "f; system(\"true\")";
    refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "name");
    config.name = NULL;
    refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "name");
    config = source_of(part), config.options = options, config.option_count = 1;
    refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "options");
    config = source_of(part), config.source = NULL;
    refuse(t, part, &k, TCH_ERR_INVALID_ARGUMENT, "source");
    config.path = "/nowhere/at/all.cu";
    refuse(t, part, &k, TCH_ERR_IO, "path");
}

static void wrong_calls(void **state)
{
    (void)state;
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_optim_kernel_info info = TCH_OPTIM_KERNEL_INFO_INIT;
    tch_context *context = open_context();
    trial_open(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    for (int part = TCH_OPTIM_PART_ROOT; part <= TCH_OPTIM_PART_UPDATE; part++) {
        CHECK_OK(set(&t, (tch_optim_part)part));
        wrong_numbers(&t, (tch_optim_part)part);
        wrong_sources(&t, (tch_optim_part)part);
        test_check_refused(tch_optimizer_set_kernel(NULL, (tch_optim_part)part, NULL), TCH_ERR_INVALID_ARGUMENT,
                           "optimizer");
        test_check_refused(tch_optimizer_get_kernel(NULL, (tch_optim_part)part, &info), TCH_ERR_INVALID_ARGUMENT,
                           "optimizer");
        test_check_refused(tch_optimizer_get_kernel(t.optimizer, (tch_optim_part)part, NULL), TCH_ERR_INVALID_ARGUMENT,
                           "info");
    }
    test_check_refused(tch_optimizer_set_kernel(t.optimizer, (tch_optim_part)2, NULL), TCH_ERR_INVALID_ARGUMENT,
                       "part");
    info.struct_size = 1;
    test_check_refused(tch_optimizer_get_kernel(t.optimizer, TCH_OPTIM_PART_ROOT, &info), TCH_ERR_INVALID_ARGUMENT,
                       "info");
    trial_close(&t);
    tch_context_destroy(context);
    test_counting_check_empty();
}

static void parts_that_are_not_there(void **state)
{
    (void)state;
    tch_context *context = open_context();
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        trial t;
        tch_optim_config c = config_of((tch_optim_kind)kind);
        test_case("%s", tch_optim_kind_name((tch_optim_kind)kind));
        trial_open(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        if (kind != TCH_OPTIM_SHAMPOO) {
            test_check_refused(set(&t, TCH_OPTIM_PART_ROOT), TCH_ERR_INVALID_ARGUMENT, "part");
        }
        CHECK_OK(set(&t, TCH_OPTIM_PART_UPDATE));
        int64_t served = ref_has_blocks((tch_optim_kind)kind) ? 2 : SHAPES;
        CHECK(info_of(&t, TCH_OPTIM_PART_UPDATE).served == served, "%lld are served",
              (long long)info_of(&t, TCH_OPTIM_PART_UPDATE).served);
        trial_close(&t);
    }
    tch_context_destroy(context);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* True when the k-th allocation of setting a kernel does not exist. */
static bool set_without(tch_optim_part part, long long k)
{
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_context *context = open_context();
    test_case("setting part %d, allocation %lld", (int)part, k);
    trial_open(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    counting_allocator_arm(&test_counting, k);
    tch_status status = set(&t, part);
    bool through = atomic_load(&test_counting.calls) < k;
    counting_allocator_arm(&test_counting, 0);
    CHECK(status == TCH_OK || (status == TCH_ERR_OUT_OF_MEMORY && !info_of(&t, part).in_use), "gave %s: %s",
          tch_status_name(status), tch_last_error());
    CHECK(status != TCH_OK || info_of(&t, part).in_use, "not in use: %s", info_of(&t, part).reason);
    trial_step(&t);
    trial_close(&t);
    tch_context_destroy(context);
    test_counting_check_empty();
    return through;
}

/* The kernel is in the cache after the first time: what is tried then is finding it there. */
static void memory_that_is_refused(void **state)
{
    (void)state;
    for (int part = TCH_OPTIM_PART_ROOT; part <= TCH_OPTIM_PART_UPDATE; part++) {
        long long k = 0;
        (void)set_without((tch_optim_part)part, MOST_ALLOCATIONS);
        while (!set_without((tch_optim_part)part, ++k)) {
            CHECK(k < MOST_ALLOCATIONS, "it does not end");
        }
    }
}

static void steps_allocate_nothing(void **state)
{
    (void)state;
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    const tch_tensor *gradients[SHAPES];
    tch_context *context = open_context();
    test_case("the steady state");
    trial_open(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    CHECK_OK(set(&t, TCH_OPTIM_PART_ROOT));
    CHECK_OK(set(&t, TCH_OPTIM_PART_UPDATE));
    trial_steps(&t, 3);
    trial_draw(&t);
    trial_list_gradients(&t, gradients);
    counting_allocator_arm(&test_counting, 0);
    for (int i = 0; i < 5; i++) {
        CHECK_OK(tch_optimizer_step(t.optimizer, t.count, gradients));
    }
    CHECK(atomic_load(&test_counting.calls) == 0, "%lld allocations in five steps", atomic_load(&test_counting.calls));
    trial_close(&t);
    tch_context_destroy(context);
    test_counting_check_empty();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_calls),
        cmocka_unit_test(parts_that_are_not_there),
        cmocka_unit_test(memory_that_is_refused),
        cmocka_unit_test(steps_allocate_nothing),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_counting_install, test_counting_remove);
}
