/* Typical kernels on the device under test: the list of support/kernel/kernel_sources.c, and errors at compile time and
 * at run time. */
#include <float.h>

#include "support/fakes/counting_allocator.h"
#include "support/kernel/kernel_sources.h"
#include "support/tensors.h"
#include "support/testing.h"

static tch_kernel_config config_of(const char *source, const char *name)
{
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    config.source = source, config.path = "mine.cu", config.name = name, config.use_cache = 0;
    return config;
}

static tch_status compile_source(tch_context *context, const char *source, const char *name, tch_kernel **kernel)
{
    tch_kernel_config config = config_of(source, name);
    return tch_kernel_compile(context, &config, kernel);
}

/* The elements of y written by a kernel f(T *y) in one block. */
static double *run_block(tch_context *context, const tch_kernel_config *config, tch_dtype dtype, int64_t count,
                         int64_t threads)
{
    tch_kernel *kernel = NULL;
    test_tensor *y = test_tensor_make(context, dtype, 1, &count, LAYOUT_CONTIGUOUS);
    tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(&y->tensor);
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, threads);
    CHECK_OK(tch_kernel_compile(context, config, &kernel));
    CHECK_OK(tch_kernel_launch(kernel, &shape, 1, &argument));
    tch_kernel_destroy(kernel);
    return test_tensor_read(y);
}

TEST(all_sources)
{
    for (int i = 0; i < kernel_source_count; i++) {
        kernel_trial trial = {*state, NULL, &kernel_sources[i], (uint64_t)i};
        test_case("%s", kernel_sources[i].title);
        CHECK_OK(compile_source(*state, kernel_sources[i].text, kernel_sources[i].name, &trial.kernel));
        kernel_sources[i].check(&trial);
        tch_kernel_destroy(trial.kernel);
    }
}

/* --- compile errors ---------------------------------------------------------------------------------------------- */

static void refuse_source(tch_context *context, const char *source, const char *name, const char *words)
{
    tch_kernel *kernel = NULL;
    tch_status status = compile_source(context, source, name, &kernel);
    CHECK(status == TCH_ERR_INVALID_ARGUMENT && kernel == NULL, "gave %s", tch_status_name(status));
    CHECK(strstr(tch_last_error(), words) != NULL, "\"%s\" is not in: %s", words, tch_last_error());
}

TEST(compile_errors)
{
    /* A source location as each compiler formats it. */
    const char *first = test_on_cpu() ? "mine.cu:1" : "mine.cu(1)";
    const char *third = test_on_cpu() ? "mine.cu:3" : "mine.cu(3)";
    const struct {
        const char *title, *source, *name, *words;
    } cases[] = {
        {"an unknown name, in line 3", "__global__ void f(float *x)\n{\n    x[0] = nowhere;\n}\n", "f", third},
        {"no such kernel", "__global__ void f(float *x) {}\n", "g", "g"},
        {"a template without arguments", "template <typename T> __global__ void f(T *x) {}\n", "f", "f"},
        {"a template without end",
         "template <int n> struct s { static const int v = s<n + 1>::v; };\n__global__ void f(int *x) { *x = "
         "s<0>::v; }\n",
         "f", first},
        {"a function without __global__", "__device__ void f(int *x) { *x = 1; }\n", "f", "f"},
        {"shared memory without a name", "extern __shared__ []; __global__ void f(float *x) {}\n", "f", first},
        {"not a kernel", "__device__ int f(int x) { return x; }\n", "f", "f"},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        test_case("%s", cases[i].title);
        refuse_source(*state, cases[i].source, cases[i].name, cases[i].words);
    }
}

/* GPU features without a CPU implementation. */
TEST(refused_on_the_cpu)
{
    static const char *const cases[][2] = {
        {"__global__ void f(int *x)\n{\n    asm volatile(\"mov.u32 %0, 1;\" : \"=r\"(*x));\n}\n", "mine.cu:3"},
        {"__global__ void f(int *x)\n{\n    asm(\"\");\n}\n", "inline PTX"},
        {"#include <cooperative_groups.h>\n__global__ void f() {}\n", "cooperative groups"},
        {"#include <mma.h>\n__global__ void f() {}\n", "tensor cores"},
        {"__global__ void f(cudaTextureObject_t t) {}\n", "textures"},
    };
    if (!test_on_cpu()) {
        skip();
    }
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        refuse_source(*state, cases[i][0], "f", cases[i][1]);
    }
}

/* --- run-time errors --------------------------------------------------------------------------------------------- */

static void expect_stop(tch_context *context, const char *source, int64_t blocks, int64_t threads, const char *words)
{
    tch_kernel *kernel = NULL;
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(blocks, threads);
    CHECK_OK(compile_source(context, source, "f", &kernel));
    tch_kernel_argument argument = TCH_ARGUMENT_INT(5);
    tch_status status = tch_kernel_launch(kernel, &shape, 1, &argument);
    CHECK(status == TCH_ERR_BACKEND, "gave %s: %s", tch_status_name(status), tch_last_error());
    CHECK(strstr(tch_last_error(), words) != NULL, "\"%s\" is not in: %s", words, tch_last_error());
    tch_kernel_destroy(kernel);
}

TEST(stopped_on_the_cpu)
{
    static const struct {
        const char *title, *source;
        int64_t blocks, threads;
        const char *words;
    } cases[] = {
        {"an assertion", "__global__ void f(int n)\n{\n    assert(threadIdx.x < n);\n}\n", 4, 8,
         "mine.cu:3: assertion failed"},
        {"an assertion between barriers",
         "__global__ void f(int n)\n{\n    __syncthreads();\n    assert(threadIdx.x < n);\n    __syncthreads();\n}\n",
         4, 8, "mine.cu:4: assertion failed"},
        {"a trap", "__global__ void f(int n)\n{\n    if (n == 5) __trap();\n}\n", 1, 1, "mine.cu:3: __trap()"},
        {"a barrier that some threads pass by",
         "__global__ void f(int n)\n{\n    if (threadIdx.x < 32) __syncthreads();\n    else __syncwarp(1u);\n}\n", 1,
         64, "never come"},
        {"a shuffle that half of a warp passes by",
         "__global__ void f(int n)\n{\n    if (threadIdx.x < 16) n = __shfl_sync(0xffffffffu, n, 0);\n"
         "    else __syncthreads();\n}\n",
         1, 32, "never come"},
    };
    if (!test_on_cpu()) {
        skip();
    }
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        test_case("%s", cases[i].title);
        expect_stop(*state, cases[i].source, cases[i].blocks, cases[i].threads, cases[i].words);
    }
}

/* --- stacks ------------------------------------------------------------------------------------------------------ */

/* Each of 40 threads keeps `count` numbers across a barrier, at which all others run on their own stacks: i + thread at
 * index i, with the sum count (count - 1) / 2 + count thread. */
static void keep_across_a_barrier(tch_context *context, int64_t count)
{
    enum { THREADS = 40 };
    char source[400];
    tch_kernel_config config = config_of(source, "f");
    snprintf(source, sizeof source,
             "__global__ void f(long long *y)\n{\n    volatile int a[%lld];\n    long long sum = 0;\n"
             "    for (int i = 0; i < %lld; i++) a[i] = i + (int)threadIdx.x;\n    __syncthreads();\n"
             "    for (int i = 0; i < %lld; i++) sum += a[i];\n    y[threadIdx.x] = sum;\n}\n",
             (long long)count, (long long)count, (long long)count);
    test_case("%lld integers on each stack", (long long)count);
    const double *got = run_block(context, &config, TCH_INT64, THREADS, THREADS);
    for (int64_t i = 0; i < THREADS; i++) {
        CHECK(got[i] == (double)(count * (count - 1) / 2 + count * i), "thread %lld has %g", (long long)i, got[i]);
    }
}

TEST(large_stacks)
{
    if (!test_on_cpu()) {
        skip();
    }
    keep_across_a_barrier(*state, 20000);
    keep_across_a_barrier(*state, 250000);
    keep_across_a_barrier(*state, 10);
    test_case("more than there is");
    refuse_source(
        *state, "__global__ void f(int *y)\n{\n    volatile int a[500000];\n    a[*y] = 1;\n    __syncthreads();\n}\n",
        "f", "bytes of local variables, expected at most 1048576");
    /* For a leaf function, x86-64 reports up to 128 bytes less. */
    refuse_source(*state, "__global__ void f(int *y)\n{\n    volatile int a[500100];\n    a[*y] = 1;\n}\n", "f",
                  "kernel f has 2000");
}

/* Fast arithmetic is limited to the kernel: the thread that compiles and loads it keeps subnormal numbers. */
TEST(fast_math_stays_inside)
{
    static const char *const options[] = {"--use_fast_math"};
    volatile float small = FLT_MIN;
    tch_kernel *kernel = NULL;
    tch_kernel_config config = config_of("__global__ void f(float *x) { *x = expf(*x); }\n", "f");
    config.options = options, config.option_count = 1;
    CHECK_OK(tch_kernel_compile(*state, &config, &kernel));
    CHECK(small / 4 > 0, "%g / 4 is %g", (double)small, (double)(small / 4));
    tch_kernel_destroy(kernel);
}

/* Barriers do not wait for threads that have returned. */
TEST(returned_threads)
{
    enum { COUNT = 40 };
    tch_kernel_config config = config_of("__global__ void f(int *y)\n{\n    if (threadIdx.x >= 40) return;\n"
                                         "    __shared__ int s[64];\n    s[threadIdx.x] = threadIdx.x;\n"
                                         "    __syncthreads();\n    y[threadIdx.x] = s[39 - threadIdx.x];\n}\n",
                                         "f");
    const double *got = run_block(*state, &config, TCH_INT32, COUNT, 64);
    for (int i = 0; i < COUNT; i++) {
        CHECK(got[i] == COUNT - 1 - i, "element %d is %g", i, got[i]);
    }
}

/* --- missing resources ------------------------------------------------------------------------------------------- */

TEST(no_compiler)
{
    tch_kernel *kernel = NULL;
    if (!test_on_cpu()) {
        skip();
    }
    char *path = strdup(getenv("PATH"));
    char *wanted = getenv("TORCHIUM_CXX") != NULL ? strdup(getenv("TORCHIUM_CXX")) : NULL;
    setenv("PATH", "/nowhere", 1);
    unsetenv("CXX");
    unsetenv("TORCHIUM_CXX");
    tch_status status = compile_source(*state, "__global__ void f() {}\n", "f", &kernel);
    setenv("PATH", path, 1);
    CHECK(status == TCH_ERR_UNAVAILABLE && strstr(tch_last_error(), "apt-get install g++") != NULL, "gave %s: %s",
          tch_status_name(status), tch_last_error());
    setenv("TORCHIUM_CXX", "g++ -v; true", 1);
    status = compile_source(*state, "__global__ void f() {}\n", "f", &kernel);
    unsetenv("TORCHIUM_CXX");
    CHECK(status == TCH_ERR_UNAVAILABLE && strstr(tch_last_error(), "TORCHIUM_CXX") != NULL, "gave %s: %s",
          tch_status_name(status), tch_last_error());
    if (wanted != NULL) {
        setenv("TORCHIUM_CXX", wanted, 1);
    }
    free(wanted);
    free(path);
}

/* Every allocation of compiling and launching fails once, without leaks. */
TEST_ALONE(little_memory, NULL, NULL)
{
    static const char source[] = "__global__ void f(int n) { __syncthreads(); }\n";
    if (!test_on_cpu()) {
        skip();
    }
    counting_allocator counting = {0};
    tch_host_allocator allocator = counting_allocator_interface(&counting);
    CHECK_OK(tch_set_host_allocator(&allocator));
    tch_status status = TCH_ERR_OUT_OF_MEMORY;
    for (int call = 1; status != TCH_OK; call++) {
        tch_context *context = NULL; /* reuses stacks between launches */
        tch_kernel *kernel = NULL;
        tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(3, 40);
        tch_kernel_argument argument = TCH_ARGUMENT_INT(1);
        test_case("allocation %d fails", call);
        long long bytes = counting.bytes;
        CHECK_OK(tch_context_create("cpu", &context));
        counting_allocator_arm(&counting, call);
        status = compile_source(context, source, "f", &kernel);
        status = status == TCH_OK ? tch_kernel_launch(kernel, &shape, 1, &argument) : status;
        CHECK(status == TCH_OK || status == TCH_ERR_OUT_OF_MEMORY, "gave %s: %s", tch_status_name(status),
              tch_last_error());
        counting_allocator_arm(&counting, 0);
        tch_kernel_destroy(kernel);
        tch_context_destroy(context);
        CHECK(counting.bytes == bytes && counting.mistakes == 0, "%lld bytes are left",
              (long long)(counting.bytes - bytes));
    }
    CHECK_OK(tch_set_host_allocator(NULL));
}

/* --- concurrent kernels ------------------------------------------------------------------------------------------ */

/* Loaded kernels of one name keep their own code, even after one is destroyed. */
TEST(several_kernels)
{
    enum { KERNELS = 2 };
    tch_kernel *kernels[KERNELS];
    int64_t one = 1;
    test_tensor *y = test_tensor_make(*state, TCH_INT32, 1, &one, LAYOUT_CONTIGUOUS);
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(&y->tensor);
    for (int i = 0; i < KERNELS; i++) {
        char source[80];
        snprintf(source, sizeof source, "__global__ void f(int *y) { *y = %d; }\n", 100 + i);
        CHECK_OK(compile_source(*state, source, "f", &kernels[i]));
    }
    for (int i = 0; i < KERNELS; i++) {
        CHECK_OK(tch_kernel_launch(kernels[i], &shape, 1, &argument));
        double *got = test_tensor_read(y);
        CHECK(got[0] == 100 + i, "kernel %d wrote %g", i, got[0]);
        tch_kernel_destroy(kernels[i]);
    }
}

/* Common macro names do not affect the text around the source. */
TEST(macros_of_the_source)
{
    static const char source[] =
        "#define T float\n#define P 3\n#define N 64\n#define n N\n#define INT int\n#define block 1\n"
        "#define kernel f\n#define run 2\n#define value 7\n#define size 8\n#define E 9\n#define l 5\n"
        "__global__ void f(int *y) { *y = P + N + E + F + BLOCK + FLAG; }\n";
    const char *options[] = {"-DF=4", "-DBLOCK=5", "-Da=x", "-DFLAG"};
    tch_kernel_config config = config_of(source, "f");
    config.options = options, config.option_count = 4;
    const double *got = run_block(*state, &config, TCH_INT32, 1, 1);
    CHECK(got[0] == 3 + 64 + 9 + 4 + 5 + 1, "the kernel wrote %g", got[0]);
}

TEST_MAIN(test_open_context, test_close_context)
