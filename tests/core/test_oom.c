/* Out of memory. For every operation the k-th allocation of the call fails, for k = 1, 2, ... until the call succeeds:
 * each failure is reported, changes no tensor and leaks nothing, and the same call on the same context then succeeds.
 * Host allocations and, through support/backend/failing_backend.c, device allocations are counted together. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <unistd.h>

#include "support/backend/failing_backend.h"
#include "support/fakes/counting_allocator.h"
#include "support/linalg/operations.h"
#include "support/testing.h"

#define MOST_ALLOCATIONS 200

static failing_backend_blocks_function device_blocks; /* NULL on the CPU, whose memory is host memory */

/* The module's folder next to this program; "" if there is none. */
static void failing_module(char *folder, size_t size)
{
    char self[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    self[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(self, '/');
    snprintf(folder, size, "%.*s/modules/failing", slash == NULL ? 0 : (int)(slash - self), self);
}

static bool refuses(void *user)
{
    return counting_allocator_refuses(user);
}

/* Finds the loaded module, and hooks its allocations. */
static int watch_device(void)
{
    char folder[PATH_MAX], path[PATH_MAX + 32];
    failing_backend_watch_function watch = NULL;
    failing_module(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/libtorchium_cuda.so", folder);
    void *module = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    void *watch_address = module == NULL ? NULL : dlsym(module, FAILING_BACKEND_WATCH);
    void *blocks_address = module == NULL ? NULL : dlsym(module, FAILING_BACKEND_BLOCKS);
    if (watch_address == NULL || blocks_address == NULL) {
        print_error("%s is not what the library loaded\n", path);
        return -1;
    }
    memcpy(&watch, &watch_address, sizeof watch);
    memcpy(&device_blocks, &blocks_address, sizeof device_blocks);
    watch(refuses, &test_counting);
    return 0;
}

static int install_allocator(void **state)
{
    (void)tch_backend_count();
    return test_on_cpu() || watch_device() == 0 ? test_counting_install(state) : -1;
}

static void check_nothing_left(void)
{
    test_counting_check_empty();
    CHECK(device_blocks == NULL || device_blocks() == 0, "%lld blocks of device memory leaked", device_blocks());
}

/* Created before allocations fail: a context, and a call or none. */
typedef struct trial {
    tch_context *context;
    test_call call;
} trial;

static tch_status create_context(trial *t)
{
    tch_context *context = (tch_context *)t;
    tch_status status = tch_context_create(test_device(), &context);
    CHECK((context == NULL) == (status != TCH_OK), "status and context do not agree");
    tch_context_destroy(context);
    return status;
}

static tch_status create_tensor(trial *t)
{
    const int64_t shape[] = {10, 10};
    tch_tensor *tensor = NULL;
    tch_memory_info info = TCH_MEMORY_INFO_INIT;
    tch_status status = tch_tensor_create(t->context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &tensor);
    CHECK_OK(tch_memory_get_info(t->context, &info));
    CHECK((tensor == NULL) == (status != TCH_OK), "status and tensor do not agree");
    CHECK(tensor != NULL || info.allocated == 0, "%lld bytes are still counted as allocated",
          (long long)info.allocated);
    tch_tensor_destroy(tensor);
    return status;
}

static tch_status call_operation(trial *t)
{
    return test_call_run(&t->call, t->context);
}

/* One run with the k-th allocation failing. Returns whether it succeeded because it makes fewer. */
static bool fail_allocation(tch_status (*call)(trial *t), const test_operation *operation, tch_dtype dtype, long long k)
{
    trial t = {0};
    CHECK_OK(tch_context_create(test_device(), &t.context));
    if (operation != NULL) {
        test_call_make(&t.call, t.context, operation, dtype);
    }
    CHECK_OK(tch_memory_trim(t.context, 0));
    tch_clear_error();
    counting_allocator_arm(&test_counting, k);
    tch_status status = call(&t);
    bool reached = atomic_load(&test_counting.calls) >= k;
    counting_allocator_arm(&test_counting, 0);
    if (reached) {
        CHECK(status == TCH_ERR_OUT_OF_MEMORY, "gave %s (%s)", tch_status_name(status), tch_last_error());
        CHECK(strlen(tch_last_error()) > 0, "there is no message");
    }
    if (reached && operation != NULL) {
        test_call_check_unchanged(&t.call);
    }
    CHECK_OK(reached ? call(&t) : status);
    if (operation != NULL) {
        test_call_check_done(&t.call);
        test_call_free(&t.call);
    }
    tch_context_destroy(t.context);
    check_nothing_left();
    return !reached;
}

static void fail_each_allocation(const char *what, tch_status (*call)(trial *t), const test_operation *operation,
                                 tch_dtype dtype)
{
    long long k = 0;
    bool through = false;
    while (!through) {
        test_case("%s %s, allocation %lld", what, tch_dtype_name(dtype), ++k);
        CHECK(k <= MOST_ALLOCATIONS, "it never gets by");
        through = fail_allocation(call, operation, dtype, k);
    }
    CHECK(k > 1 || operation != NULL, "it takes no memory");
}

TEST(every_operation)
{
    static const tch_dtype dtypes[] = {{TCH_FLOAT, 32, 1}, {TCH_FLOAT, 64, 1}, {TCH_BFLOAT, 16, 1}};
    for (int32_t n = 0; n < 3 * test_operation_count(); n++) {
        fail_each_allocation(test_operations[n / 3].name, call_operation, &test_operations[n / 3], dtypes[n % 3]);
    }
}

TEST(contexts_and_tensors)
{
    fail_each_allocation("a context", create_context, NULL, TCH_FLOAT32);
    fail_each_allocation("a tensor", create_tensor, NULL, TCH_FLOAT32);
}

/* A pool releases free memory before it fails: the second attempt succeeds. */
TEST(kept_memory_is_given_up_first)
{
    tch_context *context = NULL;
    void *kept = NULL, *wanted = NULL;
    test_case("the pool's last resort");
    CHECK_OK(tch_context_create(test_device(), &context));
    CHECK_OK(tch_memory_alloc(context, 1 << 20, &kept));
    CHECK_OK(tch_memory_free(context, kept));
    long long before = atomic_load(&test_counting.failures);
    counting_allocator_arm(&test_counting, 2); /* the first is the block's record, the second the block */
    CHECK_OK(tch_memory_alloc(context, 1 << 22, &wanted));
    CHECK(atomic_load(&test_counting.failures) == before + 1, "no allocation failed");
    counting_allocator_arm(&test_counting, 0);
    tch_memory_info info = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_memory_get_info(context, &info));
    CHECK(info.reserved == info.allocated, "the kept block is still held");
    CHECK_OK(tch_memory_free(context, wanted));
    tch_context_destroy(context);
    check_nothing_left();
}

int main(int argc, char **argv)
{
    char folder[PATH_MAX];
    failing_module(folder, sizeof folder);
    setenv("TORCHIUM_BACKEND_PATH", folder, 1); /* before modules are loaded; the CPU needs none */
    test_begin(argc, argv);
    return test_run(__FILE__, install_allocator, test_counting_remove);
}
