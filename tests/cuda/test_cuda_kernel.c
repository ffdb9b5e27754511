/* GPU-only aspects of custom kernels: machine code, properties, large shared memory, graphs, threads new to CUDA, and
 * faults, which make the GPU unusable for a process: this program runs itself with the kind of fault as its second
 * argument. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/cuda/graphs.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

/* Without the cache. */
static tch_status try_to_compile(tch_context *context, const char *source, const char *name, tch_kernel **kernel)
{
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    config.source = source;
    config.name = name;
    config.use_cache = 0;
    return tch_kernel_compile(context, &config, kernel);
}

static tch_kernel *compile(tch_context *context, const char *source, const char *name)
{
    tch_kernel *kernel = NULL;
    CHECK_OK(try_to_compile(context, source, name, &kernel));
    return kernel;
}

static tch_kernel_info info_of(const tch_kernel *kernel)
{
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    CHECK_OK(tch_kernel_get_info(kernel, &info));
    return info;
}

static int attribute(enum cudaDeviceAttr which)
{
    int value = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&value, which, 0));
    return value;
}

static void expect_error(const char *wanted)
{
    CHECK(strstr(tch_last_error(), wanted) != NULL, "expected \"%s\" in: %s", wanted, tch_last_error());
}

/* A row of random float32, and its values. */
static test_tensor *fresh_row(tch_context *context, int64_t n, uint64_t stream, double **values)
{
    test_tensor *row = test_tensor_make(context, TCH_FLOAT32, 1, &n, LAYOUT_CONTIGUOUS);
    test_random random = test_random_stream(stream);
    *values = test_alloc((size_t)n * sizeof **values);
    for (int64_t i = 0; i < n; i++) {
        (*values)[i] = (float)test_random_normal(&random);
    }
    test_tensor_write(row, *values);
    return row;
}

/* --- machine code ------------------------------------------------------------------------------------------------ */

TEST(the_code_is_for_this_gpu)
{
    static const char plain[] = "__global__ void ask(int *out) { *out = __CUDA_ARCH__; }";
    static const char hopper[] = "__global__ void ask(int *out)\n"
                                 "{\n"
                                 "    asm volatile(\"wgmma.fence.sync.aligned;\");\n"
                                 "    *out = __CUDA_ARCH__;\n"
                                 "}\n";
    int capability =
        100 * attribute(cudaDevAttrComputeCapabilityMajor) + 10 * attribute(cudaDevAttrComputeCapabilityMinor);
    const int64_t one = 1;
    test_tensor *out = test_tensor_make(*state, TCH_INT32, 1, &one, LAYOUT_CONTIGUOUS);
    tch_kernel *kernel = compile(*state, capability == 900 ? hopper : plain, "ask");
    const tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(&out->tensor);
    const tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 128);
    CHECK_OK(tch_kernel_launch(kernel, &shape, 1, &argument));
    double *got = test_tensor_read(out);
    CHECK(got[0] == capability, "compiled for %g, the GPU is %d", got[0], capability);
    tch_kernel_destroy(kernel);
    test_tensor_free(out);
}

TEST(properties)
{
    static const char source[] = "__global__ void plain(float *x) { x[threadIdx.x] += 1; }\n"
                                 "__global__ void __launch_bounds__(96) narrow(float *x)\n"
                                 "{\n"
                                 "    __shared__ float tile[96];\n"
                                 "    tile[threadIdx.x] = x[threadIdx.x];\n"
                                 "    __syncthreads();\n"
                                 "    x[threadIdx.x] = tile[95 - threadIdx.x];\n"
                                 "}\n"
                                 "__global__ void spilling(float *x, const int *at)\n"
                                 "{\n"
                                 "    float much[500];\n"
                                 "    for (int i = 0; i < 500; i++) much[i] = x[i] * threadIdx.x;\n"
                                 "    float sum = 0;\n"
                                 "    for (int i = 0; i < 500; i++) sum += much[at[i]];\n"
                                 "    x[threadIdx.x] = sum;\n"
                                 "}\n";
    tch_kernel *plain = compile(*state, source, "plain");
    tch_kernel *narrow = compile(*state, source, "narrow");
    tch_kernel *spilling = compile(*state, source, "spilling");
    tch_kernel_info info = info_of(plain);
    assert_int_equal(info.parameters, 1);
    assert_true(info.registers > 0 && info.registers <= 255);
    assert_int_equal(info.shared_bytes, 0);
    assert_int_equal(info.local_bytes, 0);
    assert_int_equal(info.max_threads, 1024);
    assert_true(info.suggested_threads >= 32 && info.suggested_threads <= 1024 && info.suggested_threads % 32 == 0);
    assert_int_equal(info.suggested_blocks % attribute(cudaDevAttrMultiProcessorCount), 0);
    assert_int_equal(info.suggested_blocks * info.suggested_threads,
                     attribute(cudaDevAttrMultiProcessorCount) * attribute(cudaDevAttrMaxThreadsPerMultiProcessor));
    assert_int_equal(info.from_cache, 0);
    info = info_of(narrow);
    assert_int_equal(info.shared_bytes, 96 * 4);
    assert_int_equal(info.max_threads, 96);
    assert_true(info.suggested_threads <= 96);
    info = info_of(spilling);
    assert_true(info.local_bytes >= 500 * 4);
    tch_kernel_destroy(plain);
    tch_kernel_destroy(narrow);
    tch_kernel_destroy(spilling);
}

static void check_parameter(const tch_kernel *kernel, int32_t index, tch_kernel_parameter wanted)
{
    tch_kernel_parameter got;
    memset(&got, 0, sizeof got);
    CHECK_OK(tch_kernel_get_parameter(kernel, index, &got));
    CHECK(memcmp(&got, &wanted, sizeof got) == 0,
          "parameter %d: class %d of %d bytes to class %d of %d bytes, const %d, %d", index, (int)got.what, got.size,
          (int)got.pointee, got.pointee_size, got.is_const, got.is_brain);
}

TEST(parameters)
{
    static const char source[] = "struct pair { double a; int b; };\n"
                                 "struct hidden;\n"
                                 "template <typename T, int N>\n"
                                 "__global__ void many(T *x, const double *__restrict__ y, const void *v, hidden *h,\n"
                                 "                     const pair p, bool b, unsigned char c, int64_t n, float f)\n"
                                 "{\n"
                                 "    if (b) x[0] = y[0] + p.a + n + f + c + N;\n"
                                 "}\n"
                                 "__global__ void none() {}\n";
    tch_kernel *many = compile(*state, source, "many<float, 3>");
    tch_kernel *none = compile(*state, source, "none");
    assert_int_equal(info_of(many).parameters, 9);
    check_parameter(many, 0, (tch_kernel_parameter){TCH_PARAMETER_POINTER, 8, TCH_PARAMETER_REAL, 4, 0, 0});
    check_parameter(many, 1, (tch_kernel_parameter){TCH_PARAMETER_POINTER, 8, TCH_PARAMETER_REAL, 8, 1, 0});
    check_parameter(many, 2, (tch_kernel_parameter){TCH_PARAMETER_POINTER, 8, TCH_PARAMETER_OTHER, 0, 1, 0});
    check_parameter(many, 3, (tch_kernel_parameter){TCH_PARAMETER_POINTER, 8, TCH_PARAMETER_OTHER, 0, 0, 0});
    check_parameter(many, 4, (tch_kernel_parameter){TCH_PARAMETER_OTHER, 16, TCH_PARAMETER_OTHER, 0, 0, 0});
    check_parameter(many, 5, (tch_kernel_parameter){TCH_PARAMETER_UINT, 1, TCH_PARAMETER_OTHER, 0, 0, 0});
    check_parameter(many, 6, (tch_kernel_parameter){TCH_PARAMETER_UINT, 1, TCH_PARAMETER_OTHER, 0, 0, 0});
    check_parameter(many, 7, (tch_kernel_parameter){TCH_PARAMETER_INT, 8, TCH_PARAMETER_OTHER, 0, 0, 0});
    check_parameter(many, 8, (tch_kernel_parameter){TCH_PARAMETER_REAL, 4, TCH_PARAMETER_OTHER, 0, 0, 0});
    assert_int_equal(info_of(none).parameters, 0);
    const tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    CHECK_OK(tch_kernel_launch(none, &shape, 0, NULL));
    CHECK_OK(tch_context_synchronize(*state));
    tch_kernel_destroy(many);
    tch_kernel_destroy(none);
}

/* --- shared memory ----------------------------------------------------------------------------------------------- */

/* Reverses a row through all the shared memory of a block: 227 KiB on Hopper. */
TEST(all_the_shared_memory)
{
    static const char source[] = "extern __shared__ float row[];\n"
                                 "__global__ void turn(const float *x, float *y, int n)\n"
                                 "{\n"
                                 "    for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];\n"
                                 "    __syncthreads();\n"
                                 "    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = row[n - 1 - i];\n"
                                 "}\n";
    int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    int64_t n = most / 4;
    double *values = NULL;
    test_tensor *x = fresh_row(*state, n, 1, &values);
    test_tensor *y = test_tensor_make(*state, TCH_FLOAT32, 1, &n, LAYOUT_CONTIGUOUS);
    tch_kernel *kernel = compile(*state, source, "turn");
    const tch_kernel_argument arguments[] = {TCH_ARGUMENT_TENSOR(&x->tensor), TCH_ARGUMENT_TENSOR(&y->tensor),
                                             TCH_ARGUMENT_INT(n)};
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 512);
    shape.shared_bytes = most + 1;
    assert_int_equal(tch_kernel_launch(kernel, &shape, 3, arguments), TCH_ERR_INVALID_ARGUMENT);
    expect_error("shared_bytes is");
    assert_true(test_tensor_is_unchanged(y));
    shape.shared_bytes = most;
    CHECK_OK(tch_kernel_launch(kernel, &shape, 3, arguments));
    test_tensor_check_written(y, "y");
    double *got = test_tensor_read(y);
    for (int64_t i = 0; i < n; i++) {
        CHECK(got[i] == values[n - 1 - i], "y[%lld] is %g, expected %g", (long long)i, got[i], values[n - 1 - i]);
    }
    tch_kernel_destroy(kernel);
    test_tensor_free(x);
    test_tensor_free(y);
}

/* --- graphs and threads ------------------------------------------------------------------------------------------ */

static const char add_one[] = "__global__ void add_one(float *x, int n)\n"
                              "{\n"
                              "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
                              "    if (i < n) x[i] += 1;\n"
                              "}\n";

static tch_status launch_add_one(tch_kernel *kernel, const test_tensor *x)
{
    const tch_kernel_argument arguments[] = {TCH_ARGUMENT_TENSOR(&x->tensor), TCH_ARGUMENT_INT(x->count)};
    const tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT((x->count + 255) / 256, 256);
    return tch_kernel_launch(kernel, &shape, 2, arguments);
}

static void check_added(const test_tensor *x, const double *values, int times)
{
    double *got = test_tensor_read(x);
    for (int64_t i = 0; i < x->count; i++) {
        float wanted = (float)values[i];
        for (int k = 0; k < times; k++) {
            wanted += 1;
        }
        CHECK(got[i] == wanted, "x[%lld] is %.9g, expected %.9g", (long long)i, got[i], wanted);
    }
}

/* The first launch is captured: the code must be on the GPU by then. Compilation fails during capture, without
 * invalidating it. */
TEST(a_launch_is_captured)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    tch_kernel *none = NULL;
    double *values = NULL;
    test_tensor *x = fresh_row(*state, 1001, 2, &values);
    tch_kernel *kernel = compile(*state, add_one, "add_one");
    cudaStream_t stream = test_enter_stream(*state);
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    tch_status launched = launch_add_one(kernel, x);
    tch_status compiled = try_to_compile(*state, "__global__ void other() {}", "other", &none);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    assert_int_equal(launched, TCH_OK);
    assert_int_equal(compiled, TCH_ERR_UNSUPPORTED);
    CHECK_CUDA(cudaGraphInstantiateWithFlags(&executable, graph, 0));
    check_added(x, values, 0);
    for (int i = 0; i < 3; i++) {
        CHECK_CUDA(cudaGraphLaunch(executable, stream));
    }
    CHECK_CUDA(cudaStreamSynchronize(stream));
    check_added(x, values, 3);
    CHECK_CUDA(cudaGraphDestroy(graph));
    test_leave_stream(*state, stream, executable);
    tch_kernel_destroy(kernel);
    test_tensor_free(x);
}

typedef struct thread_work {
    tch_context *context;
    const test_tensor *x;
    tch_kernel *kernel;
    tch_status status;
} thread_work;

/* Compiles first on a new thread. */
static void *launch_in_thread(void *data)
{
    thread_work *work = data;
    work->status = work->kernel != NULL ? TCH_OK : try_to_compile(work->context, add_one, "add_one", &work->kernel);
    work->status = work->status == TCH_OK ? launch_add_one(work->kernel, work->x) : work->status;
    return NULL;
}

/* One thread compiles and launches, another only launches: CUDA's current context is per thread. */
TEST(threads_that_are_new_to_cuda)
{
    double *values = NULL;
    test_tensor *x = fresh_row(*state, 300, 3, &values);
    thread_work work = {*state, x, NULL, TCH_OK};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, launch_in_thread, &work), 0);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(work.status, TCH_OK);
    }
    check_added(x, values, 2);
    tch_kernel_destroy(work.kernel);
    test_tensor_free(x);
}

/* --- faults ------------------------------------------------------------------------------------------------------ */

/* Kernels that fault, by name. */
static const char faulting[] = "__global__ void address(float *x) { x[1ll << 40] = 1; }\n"
                               "__global__ void trap(float *x) { __trap(); }\n"
                               "__global__ void assertion(float *x) { assert(x == 0); }\n";

/* Runs this program again. `debug` is TORCHIUM_DEBUG_SYNC's value. */
static void run_fault(const char *kind, const char *debug)
{
    int status = 0;
    test_case("%s, TORCHIUM_DEBUG_SYNC=%s", kind, debug);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        setenv("TORCHIUM_DEBUG_SYNC", debug, 1);
        execl("/proc/self/exe", "test_cuda_kernel", test_device(), kind, (char *)NULL);
        _exit(127);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the process ended with status %d", status);
}

TEST(faults_are_reported)
{
    run_fault("address", "0");
    run_fault("address", "1");
    run_fault("trap", "0");
    run_fault("assertion", "0");
}

static int wrong(const char *what)
{
    fprintf(stderr, "%s, the last message being: %s\n", what, tch_last_error());
    return 1;
}

static int says(const char *kind, const char *wanted)
{
    char kernel[64];
    snprintf(kernel, sizeof kernel, "after kernel %s was launched", kind);
    return strstr(tch_last_error(), wanted) != NULL && strstr(tch_last_error(), kernel) != NULL;
}

/* After the fault every context of the device, old and new, reports it, and everything can be destroyed. */
static int after_fault(const char *kind, tch_context *context, tch_context *beside)
{
    tch_context *another = NULL;
    if (tch_context_synchronize(context) != TCH_ERR_BACKEND || !says(kind, "this process can no longer use cuda:0")) {
        return wrong("the context goes on");
    }
    if (tch_context_synchronize(beside) != TCH_ERR_BACKEND || !says(kind, "this process can no longer use cuda:0")) {
        return wrong("another context goes on");
    }
    if (tch_context_create(test_device(), &another) == TCH_OK) {
        return wrong("a new context could be made");
    }
    return 0;
}

static int fault(const char *kind)
{
    const char *debug = getenv("TORCHIUM_DEBUG_SYNC");
    int at_once = debug != NULL && strcmp(debug, "1") == 0;
    const int64_t n = 1;
    tch_context *context = NULL;
    tch_context *beside = NULL;
    tch_kernel *kernel = NULL;
    tch_tensor *x = NULL;
    if (tch_context_create(test_device(), &context) != TCH_OK || tch_context_create(test_device(), &beside) != TCH_OK ||
        tch_tensor_create(context, TCH_FLOAT32, 1, &n, TCH_CONTIGUOUS, &x) != TCH_OK ||
        try_to_compile(context, faulting, kind, &kernel) != TCH_OK) {
        return wrong("nothing could be made");
    }
    const tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(x);
    const tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    tch_status status = tch_kernel_launch(kernel, &shape, 1, &argument);
    if (status != (at_once ? TCH_ERR_BACKEND : TCH_OK)) {
        return wrong("the launch");
    }
    if (!at_once) {
        status = tch_context_synchronize(context);
    }
    if (status != TCH_ERR_BACKEND || !says(kind, "only by a new process")) {
        return wrong("the fault was not reported");
    }
    int result = after_fault(kind, context, beside);
    tch_kernel_destroy(kernel);
    tch_tensor_destroy(x);
    tch_context_destroy(context);
    tch_context_destroy(beside);
    return result;
}

/* A machine with a GPU may lack NVRTC. */
static int has_compiler(void)
{
    tch_context *context = NULL;
    tch_kernel *kernel = NULL;
    tch_status status = tch_context_create(test_device(), &context);
    if (status == TCH_OK) {
        status = try_to_compile(context, "__global__ void nothing() {}", "nothing", &kernel);
        if (status == TCH_ERR_UNAVAILABLE) {
            fprintf(stderr, "%s\n", tch_last_error());
        }
        tch_kernel_destroy(kernel);
        tch_context_destroy(context);
    }
    return status != TCH_ERR_UNAVAILABLE;
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (argc > 2) {
        return fault(argv[2]);
    }
    if (!has_compiler()) {
        return TEST_SKIPPED;
    }
    return test_run(__FILE__, test_open_context, test_close_context);
}
