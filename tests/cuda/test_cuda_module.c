/* The CUDA module on machines without a GPU: loading, reasons for not working, the search for CUDA's libraries, and
 * choices for other GPUs. Each case runs this program again in its own environment, since libraries are located once
 * per process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backends/cuda/cuda.h"

#include "support/testing.h"

#define FAKE_DRIVER "LD_LIBRARY_PATH=" TEST_MODULES "/driver"
#define FAKE_TOOLKIT TEST_MODULES "/toolkit"

enum { MAX_TEXT = 8192, MAX_VARIABLES = 8 };

static const char *program;

/* Kernels are not linked. */
int64_t tchi_cuda_newton_limit(const tchi_cuda_state *state)
{
    return 0;
}

/* Expected output of `program what` with these variables; NULL ends the list. */
static const char *answer(const char *what, const char *const variables[])
{
    static char text[MAX_TEXT];
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        static const char *const cleared[] = {"TORCHIUM_BACKEND_PATH", "TORCHIUM_CUBLAS", "TORCHIUM_CUSOLVER",
                                              "TORCHIUM_CUDA_PATH", "CUDA_VISIBLE_DEVICES"};
        for (size_t i = 0; i < sizeof cleared / sizeof cleared[0]; i++) {
            unsetenv(cleared[i]);
        }
        for (; *variables != NULL; variables++) {
            putenv((char *)*variables);
        }
        dup2(ends[1], STDOUT_FILENO);
        execl(program, program, what, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    size_t got = 0;
    for (ssize_t part = 1; part > 0 && got<sizeof text - 1; got += part> 0 ? (size_t)part : 0) {
        part = read(ends[0], text + got, sizeof text - 1 - got);
    }
    text[got] = '\0';
    close(ends[0]);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with wait status %d", status);
    return text;
}

static void expect(const char *text, const char *wanted)
{
    CHECK(strstr(text, wanted) != NULL, "expected \"%s\" in: %s", wanted, text);
}

/* --- children ---------------------------------------------------------------------------------------------------- */

/* The backend "cuda" as users see it; the CPU still works. */
static int print_backend(void)
{
    for (int32_t i = 0; i < tch_backend_count(); i++) {
        tch_backend_info info = TCH_BACKEND_INFO_INIT;
        if (tch_backend_info_get(i, &info) == TCH_OK && strcmp(info.name, "cuda") == 0) {
            printf("cuda: %d devices\nlibrary: %s\ndetails: %s\nreason: %s\n", info.devices, info.library, info.details,
                   info.reason);
        }
    }
    tch_context *context = NULL;
    printf("cpu: %s\n", tch_status_name(tch_context_create("cpu", &context)));
    tch_context_destroy(context);
    if (tch_device_count(TCH_DEVICE_CUDA) == 0) {
        printf("context: %s\n", tch_status_name(tch_context_create("cuda", &context)));
        printf("message: %s\n", tch_last_error());
    }
    return 0;
}

static int print_libraries(void)
{
    const char *why = "";
    const tchi_cublas *blas = tchi_cublas_open(&why);
    printf("cublas: %s %d\nreason: %s\n", blas != NULL ? blas->library : "none", blas != NULL ? blas->version : 0, why);
    const tchi_cusolver *solver = tchi_cusolver_open(&why);
    printf("cusolver: %s %d %s\nreason: %s\n", solver != NULL ? solver->library : "none",
           solver != NULL ? solver->version : 0, solver != NULL && solver->xsyev_batched != NULL ? "batched" : "single",
           why);
    return 0;
}

/* Like PyTorch, loads the library before the search. */
static int print_libraries_loaded_before(void)
{
    return dlopen(FAKE_TOOLKIT "/lib64/libcublas.so.13", RTLD_NOW | RTLD_LOCAL) != NULL ? print_libraries() : 1;
}

/* --- the module and its reasons ---------------------------------------------------------------------------------- */

TEST(the_module_lies_beside_the_library)
{
    const char *const none[] = {NULL};
    const char *text = answer("backend", none);
    expect(text, "/libtorchium_cuda.so\n");
    expect(text, "cpu: TCH_OK");
    expect(text, "details: CUDA runtime ");
}

TEST(without_a_driver_it_says_so)
{
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) != NULL) {
        skip();
    }
    const char *const none[] = {NULL};
    const char *text = answer("backend", none);
    expect(text, "cuda: 0 devices");
    expect(text, "driver none");
    expect(text, "reason: no NVIDIA driver is loaded");
    expect(text, "context: TCH_ERR_UNAVAILABLE");
    expect(text, "message: no cuda device can be used: no NVIDIA driver is loaded");
}

TEST(every_trouble_with_the_driver_has_its_reason)
{
    static const struct {
        const char *variables[MAX_VARIABLES];
        const char *reason;
    } cases[] = {
        {{FAKE_DRIVER, "FAKE_DRIVER_VERSION=11040"}, "too old: it is for CUDA 11.4, this module needs "},
        {{FAKE_DRIVER, "FAKE_DRIVER_INIT=100"}, "finds no GPU"},
        {{FAKE_DRIVER, "FAKE_DRIVER_INIT=100", "CUDA_VISIBLE_DEVICES="}, "CUDA_VISIBLE_DEVICES is \"\""},
        {{FAKE_DRIVER, "FAKE_DRIVER_INIT=100", "CUDA_VISIBLE_DEVICES=7"}, "CUDA_VISIBLE_DEVICES is \"7\""},
        {{FAKE_DRIVER, "FAKE_DRIVER_INIT=3"}, "forked"},
        {{FAKE_DRIVER, "FAKE_DRIVER_INIT=802"}, "cudaErrorSystemNotReady"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        test_case("%s", cases[i].reason);
        const char *text = answer("backend", cases[i].variables);
        expect(text, cases[i].reason);
        expect(text, "cuda: 0 devices");
        expect(text, "cpu: TCH_OK");
        expect(text, "context: TCH_ERR_UNAVAILABLE");
        for (size_t j = 0; j < sizeof cases / sizeof cases[0]; j++) {
            CHECK(i == j || strstr(text, cases[j].reason) == NULL, "it reads like another reason: %s", text);
        }
    }
}

TEST(another_interface_is_refused)
{
    char reason[512] = "";
    tch_backend_entry *enter = NULL;
    void *module = dlopen(CUDA_MODULE, RTLD_NOW | RTLD_LOCAL);
    CHECK(module != NULL, "%s", dlerror());
    void *address = dlsym(module, TCH_BACKEND_ENTRY);
    assert_non_null(address);
    memcpy(&enter, &address, sizeof enter);
    assert_null(enter(TCH_BACKEND_ABI + 1, NULL, reason, sizeof reason));
    expect(reason, "built for backend interface");
    const tch_backend *table = enter(TCH_BACKEND_ABI, NULL, reason, sizeof reason);
    assert_non_null(table);
    assert_string_equal(table->name, "cuda");
    assert_int_equal(table->table_size, sizeof *table);
    dlclose(module);
}

/* --- CUDA's libraries -------------------------------------------------------------------------------------------- */

TEST(libraries_are_found_where_the_user_says)
{
    const char *const folder[] = {"TORCHIUM_CUDA_PATH=" FAKE_TOOLKIT, NULL};
    const char *text = answer("libraries", folder);
    expect(text, "cublas: " FAKE_TOOLKIT "/lib64/libcublas.so.13 130000\n");
    expect(text, "cusolver: " FAKE_TOOLKIT "/lib64/libcusolver.so.12 11605 single\n");
    const char *const file[] = {"TORCHIUM_CUBLAS=" FAKE_TOOLKIT "/lib64/libcublas.so.13", NULL};
    text = answer("libraries", file);
    expect(text, "cublas: " FAKE_TOOLKIT "/lib64/libcublas.so.13 130000\n");
    expect(text, "cusolver: " FAKE_TOOLKIT "/lib64/libcusolver.so.12"); /* next to cuBLAS */
}

TEST(what_is_loaded_already_comes_first)
{
    const char *const nowhere[] = {"TORCHIUM_CUDA_PATH=/nowhere", NULL};
    const char *text = answer("loaded", nowhere);
    expect(text, "cublas: " FAKE_TOOLKIT "/lib64/libcublas.so.13 130000\n");
}

TEST(a_library_that_cannot_be_used_is_named)
{
    const char *const nowhere[] = {"TORCHIUM_CUBLAS=/nowhere/libcublas.so.13",
                                   "TORCHIUM_CUSOLVER=/nowhere/libcusolver.so.12", NULL};
    const char *text = answer("libraries", nowhere);
    expect(text, "cublas: none");
    expect(text, "cannot use the cuBLAS that TORCHIUM_CUBLAS names, /nowhere/libcublas.so.13: there is no file");
    expect(text, "cannot use the cuSOLVER that TORCHIUM_CUSOLVER names");
    const char *const other[] = {"TORCHIUM_CUBLAS=libm.so.6", NULL};
    expect(answer("libraries", other), "libm.so.6: it has no function cublasCreate_v2");
    const char *const broken[] = {"TORCHIUM_CUBLAS=" __FILE__, NULL};
    expect(answer("libraries", broken), "invalid ELF header");
}

/* If the system has cuBLAS, it cannot be missing. */
TEST(a_missing_library_says_where_it_was_looked_for)
{
    const char *const nowhere[] = {"TORCHIUM_CUDA_PATH=/nowhere", NULL};
    const char *text = answer("libraries", nowhere);
    if (strstr(text, "cublas: none") == NULL) {
        skip();
    }
    expect(text, "no cuBLAS can be used: searched for libcublas.so.13 and libcublas.so.12");
    expect(text, "TORCHIUM_CUDA_PATH (/nowhere)");
    expect(text, "or give the file in TORCHIUM_CUBLAS");
    expect(text, "no cuSOLVER can be used");
}

/* --- rates ------------------------------------------------------------------------------------------------------- */

/* The choice of arithmetic depends on the order of rates on each kind of GPU. */
TEST(rates_by_compute_capability)
{
    static const struct {
        int32_t major, minor;
        double f64, f32, bf16x2, bf16, f16x2;
    } cases[] = {
        {7, 5, 0.5, 16, 0, 0, 0},           {8, 0, 19, 19, 90, 280, 80},        {8, 6, 30.0 / 64, 30, 40, 130, 0},
        {8, 7, 30.0 / 64, 30, 40, 130, 0},  {8, 9, 30.0 / 64, 30, 40, 130, 0},  {9, 0, 56, 50, 280, 700, 180},
        {10, 0, 37, 75, 400, 1500, 0},      {10, 3, 1.3, 75, 400, 1500, 0},     {11, 0, 60.0 / 64, 60, 60, 190, 0},
        {12, 0, 60.0 / 64, 60, 60, 190, 0}, {12, 1, 60.0 / 64, 60, 60, 190, 0}, {99, 0, 60.0 / 64, 60, 60, 190, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        test_case("compute capability %d.%d", cases[i].major, cases[i].minor);
        tch_product_rates rates = tchi_cuda_rates_of(cases[i].major, cases[i].minor);
        CHECK(rates.f64 == cases[i].f64 && rates.f32 == cases[i].f32 && rates.bf16x2 == cases[i].bf16x2 &&
                  rates.bf16 == cases[i].bf16 && rates.f16x2 == cases[i].f16x2,
              "rates %g %g %g %g %g", rates.f64, rates.f32, rates.bf16x2, rates.bf16, rates.f16x2);
    }
}

int main(int argc, char **argv)
{
    static const struct {
        const char *word;
        int (*print)(void);
    } children[] = {
        {"backend", print_backend}, {"libraries", print_libraries}, {"loaded", print_libraries_loaded_before}};
    for (size_t i = 0; i < sizeof children / sizeof children[0]; i++) {
        if (argc == 2 && strcmp(argv[1], children[i].word) == 0) {
            return children[i].print();
        }
    }
    program = argv[0];
    return test_run(__FILE__, NULL, NULL);
}
