/* Roots of one's own in Shampoo: a coupled Newton iteration with one block of threads for each factor must train as the
 * built-in does; one that cannot be used must leave the built-in's training to the bit; one that passes its check and
 * fails later must be found by the certificate.
 *
 * The kernels' roots are within root_tolerance of the exact ones, and the built-in's too: a step that is their product
 * with the gradient differs by a few times that, and the way of all steps by no more, since they do not build up on
 * each other in a training whose gradients are drawn. */
#include <stdio.h>
#include <string.h>

#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 10
#define TOLERANCE 1e-3

/* Factor batches of 9, 12, 20, 33 and 5; and a vector, which has no factor. Three factors of size 9. */
static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {9, 12}}, {.ndim = 2, .shape = {33, 20}},  {.ndim = 1, .shape = {19}},
    {.ndim = 2, .shape = {9, 9}},  {.ndim = 3, .shape = {5, 5, 5}},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

/* M = A, X = I; then H = ((p + 1) I - M) / p, X = X H, M = H^p M, until M is the identity. */
#define NEWTON(T)                                                                                                      \
    "typedef " T " real;\n"                                                                                            \
    "__device__ void multiply(const real *a, const real *b, real *c, int n)\n"                                         \
    "{\n"                                                                                                              \
    "    __syncthreads();\n"                                                                                           \
    "    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {\n"                                                    \
    "        real sum = 0;\n"                                                                                          \
    "        for (int k = 0; k < n; k++) sum += a[e / n * n + k] * b[k * n + e % n];\n"                                \
    "        c[e] = sum;\n"                                                                                            \
    "    }\n"                                                                                                          \
    "    __syncthreads();\n"                                                                                           \
    "}\n"                                                                                                              \
    "__device__ void copy(const real *a, real *b, int n)\n"                                                            \
    "{\n"                                                                                                              \
    "    for (int e = threadIdx.x; e < n * n; e += blockDim.x) b[e] = a[e];\n"                                         \
    "}\n"                                                                                                              \
    "__global__ void newton(const real *factors, real *roots, real *scratch, int n, int root)\n"                       \
    "{\n"                                                                                                              \
    "    size_t first = (size_t)blockIdx.x * n * n;\n"                                                                 \
    "    real *x = roots + first, *m = scratch + 4 * first, *h = m + n * n, *t = h + n * n;\n"                         \
    "    for (int e = threadIdx.x; e < n * n; e += blockDim.x) x[e] = e % (n + 1) == 0;\n"                             \
    "    copy(factors + first, m, n);\n"                                                                               \
    "    for (int step = 0; step < 24; step++) {\n"                                                                    \
    "        __syncthreads();\n"                                                                                       \
    "        for (int e = threadIdx.x; e < n * n; e += blockDim.x)\n"                                                  \
    "            h[e] = ((e % (n + 1) == 0 ? root + 1 : 0) - m[e]) / root;\n"                                          \
    "        multiply(x, h, t, n);\n"                                                                                  \
    "        copy(t, x, n);\n"                                                                                         \
    "        for (int k = 0; k < root; k++) {\n"                                                                       \
    "            multiply(h, m, t, n);\n"                                                                              \
    "            copy(t, m, n);\n"                                                                                     \
    "        }\n"                                                                                                      \
    "    }\n"                                                                                                          \
    "}\n"

static const char newton_float[] = NEWTON("float");
static const char newton_double[] = NEWTON("double");

/* --- setting and asking ------------------------------------------------------------------------------------------ */

static tch_optim_kernel kernel_of(tch_kernel_config *config, const char *source, const char *name)
{
    tch_optim_kernel kernel = TCH_OPTIM_KERNEL_INIT;
    *config = (tch_kernel_config)TCH_KERNEL_CONFIG_INIT;
    config->source = source;
    config->path = "root.cu";
    config->name = name;
    kernel.kernel = config;
    kernel.threads = 64;
    return kernel;
}

static tch_optim_kernel_info set(const trial *t, const char *source, const char *name, int64_t most_size)
{
    tch_kernel_config config;
    tch_optim_kernel kernel = kernel_of(&config, source, name);
    tch_optim_kernel_info info = TCH_OPTIM_KERNEL_INFO_INIT;
    kernel.most_size = most_size;
    CHECK_OK(tch_optimizer_set_kernel(t->optimizer, TCH_OPTIM_PART_ROOT, &kernel));
    CHECK_OK(tch_optimizer_get_kernel(t->optimizer, TCH_OPTIM_PART_ROOT, &info));
    return info;
}

static tch_optim_kernel_info info_of(const trial *t)
{
    tch_optim_kernel_info info = TCH_OPTIM_KERNEL_INFO_INIT;
    CHECK_OK(tch_optimizer_get_kernel(t->optimizer, TCH_OPTIM_PART_ROOT, &info));
    return info;
}

static tch_optim_config base(void)
{
    tch_optim_config c = test_optim_defaults(TCH_OPTIM_SHAMPOO);
    c.lr = 0.02;
    c.relative_eps = 1e-3;
    c.precondition_frequency = 2;
    c.stagger = 0; /* as the references do */
    c.precision = TCH_PRECISION_HIGHEST;
    c.root_tolerance = TOLERANCE;
    c.merge_dims = 0;
    return c;
}

static int64_t factors_of(const trial *t)
{
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    CHECK_OK(tch_optimizer_get_memory(t->optimizer, &memory));
    return memory.factors;
}

static bool are_same(const trial *a, const trial *b)
{
    bool same = true;
    for (int32_t i = 0; i < a->count; i++) {
        double *x = test_tensor_read(a->parameters[i].memory);
        double *y = test_tensor_read(b->parameters[i].memory);
        same = same && memcmp(x, y, (size_t)a->parameters[i].memory->count * sizeof *x) == 0;
    }
    return same;
}

static void take_steps(trial *t, int steps)
{
    trial_steps(t, steps);
}

/* --- roots that are right ---------------------------------------------------------------------------------------- */

static void newton_of_ones_own(void **state)
{
    const tch_dtype types[] = {TCH_FLOAT32, TCH_FLOAT64};
    const char *sources[] = {newton_float, newton_double};
    for (int i = 0; i < 2; i++) {
        trial t;
        tch_optim_config c = base();
        test_case("newton in %s", tch_dtype_name(types[i]));
        trial_open(&t, *state, types[i], types[i], &c, SHAPES, shapes);
        tch_optim_kernel_info info = set(&t, sources[i], "newton", 0);
        CHECK(info.in_use && info.left == 0 && info.served == factors_of(&t), "%lld of %lld factors: %s",
              (long long)info.served, (long long)factors_of(&t), info.reason);
        CHECK(info.worst > 0.0 && info.worst < 0.01, "the check has seen %g", info.worst);
        take_steps(&t, STEPS);
        tch_optim_stats stats = trial_stats(&t);
        CHECK(stats.own_root && !stats.own_update, "the statistics know nothing of it");
        CHECK(stats.failed == 0 && stats.refused == 0, "%lld failed, %lld refused", (long long)stats.failed,
              (long long)stats.refused);
        CHECK(info_of(&t).launches > 0, "it was not launched");
        trial_check(&t, 4.0 * TOLERANCE);
        trial_close(&t);
    }
}

/* Larger factors are the built-in's where the kernel says so, and none of its business. */
static void only_small_ones(void **state)
{
    trial t;
    tch_optim_config c = base();
    test_case("most_size");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    tch_optim_kernel_info info = set(&t, newton_float, "newton", 12);
    CHECK(info.in_use && info.left == 2 && info.served == factors_of(&t) - 2, "%lld served, %lld left",
          (long long)info.served, (long long)info.left);
    CHECK(strstr(info.reason, "most_size is 12") != NULL, "%s", info.reason);
    take_steps(&t, STEPS);
    trial_check(&t, 4.0 * TOLERANCE);
    trial_close(&t);
}

/* --- roots that are not ------------------------------------------------------------------------------------------ */

static const struct {
    const char *what, *source, *name, *words;
} unfit[] = {
    {"a source that does not compile",
     "__global__ void f(const float *a, float *x, float *s, int n, int root) { y[0] = 1; }\n", "f", "root.cu"},
    {"a name that is not there", "__global__ void f(const float *a, float *x, float *s, int n, int root) {}\n", "g",
     "g"},
    {"other parameters", "__global__ void f(const float *a, float *x, int n) {}\n", "f", "expected (const float *"},
    {"roots that cannot be written",
     "__global__ void f(const float *a, const float *x, float *s, int n, int root) {}\n", "f",
     "expected (const float *"},
    {"pointers to other numbers", newton_double, "newton", "float64"},
    {"nothing written",
     "__global__ void f(const float *a, float *x, float *s, int n, int root)\n"
     "{ for (int e = threadIdx.x; e < n * n; e += blockDim.x) x[blockIdx.x * n * n + e] = 0; }\n",
     "f", "certificate"},
    {"no numbers",
     "__global__ void f(const float *a, float *x, float *s, int n, int root)\n"
     "{ for (int e = threadIdx.x; e < n * n; e += blockDim.x) x[blockIdx.x * n * n + e] = NAN; }\n",
     "f", "nan"},
    {"the first matrix alone",
     "__global__ void f(const float *a, float *x, float *s, int n, int root)\n"
     "{ for (int e = threadIdx.x; e < n * n; e += blockDim.x) x[e] = e % (n + 1) == 0; }\n",
     "f", "certificate"},
};

static void the_built_in_remains(void **state)
{
    for (size_t i = 0; i < sizeof unfit / sizeof unfit[0]; i++) {
        trial own;
        trial built_in;
        tch_optim_config c = base();
        test_case("%s", unfit[i].what);
        trial_open(&own, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        trial_open(&built_in, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        tch_optim_kernel_info info = set(&own, unfit[i].source, unfit[i].name, 0);
        CHECK(!info.in_use && info.served == 0 && info.left == factors_of(&own), "it is used");
        CHECK(strstr(info.reason, unfit[i].words) != NULL, "the reason does not say \"%s\": %s", unfit[i].words,
              info.reason);
        take_steps(&own, STEPS);
        take_steps(&built_in, STEPS);
        CHECK(are_same(&own, &built_in), "the training is not the built-in's");
        CHECK(!trial_stats(&own).own_root && trial_stats(&own).refused == 0, "the statistics say that it is used");
        trial_close(&own);
        trial_close(&built_in);
    }
}

/* Passes its check, which tries two matrices, and gives nonsense for any other number of them: on the CPU the built-in
 * takes over within the step, and the training is its own to the bit. On a GPU the roots stay what they were, the
 * identity, until the statistics have been asked for. */
static void roots_that_fail_later(void **state)
{
    static const trial_shape three[] = {
        {.ndim = 2, .shape = {9, 7}}, {.ndim = 2, .shape = {9, 7}}, {.ndim = 2, .shape = {9, 7}}};
    static char source[sizeof newton_float + 256];
    trial own;
    trial built_in;
    tch_optim_config c = base();
    c.precondition_frequency = 1;
    test_case("a kernel that fails later");
    snprintf(source, sizeof source,
             "%s__global__ void later(const float *a, float *x, float *s, int n, int root)\n"
             "{ newton(a, x, s, n, root); __syncthreads(); if (gridDim.x != 2) x[blockIdx.x * n * n] = 3; }\n",
             newton_float);
    char *global = strstr(source, "__global__ void newton");
    memcpy(global, "__device__", strlen("__device__"));
    trial_open(&own, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 3, three);
    trial_open(&built_in, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 3, three);
    tch_optim_kernel_info info = set(&own, source, "later", 0);
    CHECK(info.in_use && info.served == 6, "%s", info.reason);
    take_steps(&own, 1);
    tch_optim_stats stats = trial_stats(&own);
    CHECK(stats.refused == 6 && stats.own_root, "%lld roots refused", (long long)stats.refused);
    CHECK(stats.failed == (test_on_cpu() ? 0 : 6), "%lld failed", (long long)stats.failed);
    (void)trial_stats(&own); /* asked again, nothing is held against the built-in */
    int64_t launches = info_of(&own).launches;
    take_steps(&own, STEPS);
    take_steps(&built_in, STEPS + 1);
    CHECK(info_of(&own).launches == launches && trial_stats(&own).refused == 6, "the kernel is still asked");
    CHECK(trial_stats(&own).failed == 0, "%lld failed", (long long)trial_stats(&own).failed);
    CHECK(!test_on_cpu() || are_same(&own, &built_in), "the training is not the built-in's");
    trial_close(&own);
    trial_close(&built_in);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(newton_of_ones_own),
        cmocka_unit_test(only_small_ones),
        cmocka_unit_test(the_built_in_remains),
        cmocka_unit_test(roots_that_fail_later),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
