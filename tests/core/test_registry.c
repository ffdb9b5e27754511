/* Backends and the module loader. The registry is filled once per process, so every case forks a child before using the
 * library, and the child sends back its results. */
#define _GNU_SOURCE
#include <limits.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/files.h"
#include "support/testing.h"

#define MODULE_FILE "libtorchium_cuda.so"

typedef struct sight {
    tch_backend_info cuda;
    int32_t found;        /* entries named "cuda" */
    int32_t cuda_devices; /* tch_device_count */
    tch_device best;      /* resolution of "auto" */
    tch_status create;    /* of tch_context_create("cuda") */
    tch_status cpu_create;
    char message[1024]; /* of the failed create */
} sight;

static void look(void *answer)
{
    sight *seen = answer;
    memset(seen, 0, sizeof *seen);
    for (int32_t i = 0; i < tch_backend_count(); i++) {
        tch_backend_info info = TCH_BACKEND_INFO_INIT;
        if (tch_backend_info_get(i, &info) == TCH_OK && strcmp(info.name, "cuda") == 0) {
            seen->cuda = info;
            seen->found++;
        }
    }
    tch_context *context = NULL;
    seen->cuda_devices = tch_device_count(TCH_DEVICE_CUDA);
    tch_device_parse("auto", &seen->best);
    seen->create = tch_context_create("cuda", &context);
    snprintf(seen->message, sizeof seen->message, "%.1000s", tch_last_error());
    tch_context_destroy(context);
    seen->cpu_create = tch_context_create("cpu", &context);
    tch_context_destroy(context);
}

/* Sends `size` bytes filled in by `work` from a child with this environment and current folder. */
static void in_child(const char *search_path, const char *folder, void (*work)(void *), void *result, size_t size)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (search_path != NULL) {
            setenv("TORCHIUM_BACKEND_PATH", search_path, 1);
        } else {
            unsetenv("TORCHIUM_BACKEND_PATH");
        }
        if (folder != NULL && chdir(folder) != 0) {
            _exit(2);
        }
        work(result);
        _exit(write(ends[1], result, size) == (ssize_t)size ? 0 : 3);
    }
    close(ends[1]);
    size_t got = 0;
    ssize_t part = 1;
    while (got < size && part > 0) {
        part = read(ends[0], (char *)result + got, size - got);
        got += part > 0 ? (size_t)part : 0;
    }
    close(ends[0]);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with wait status %d", status);
    assert_int_equal(got, size);
}

static sight see(const char *search_path, const char *folder)
{
    sight seen;
    test_case("path \"%s\", folder %s", search_path != NULL ? search_path : "(unset)", folder != NULL ? folder : "-");
    in_child(search_path, folder, look, &seen, sizeof seen);
    CHECK(seen.found == 1, "%d backends are called cuda", seen.found);
    CHECK(seen.cpu_create == TCH_OK, "the CPU did not work beside it");
    return seen;
}

static const char *variant(const char *name)
{
    static char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s/%s", TEST_MODULES, name);
    return folder;
}

/* The module is listed with this reason, which tch_context_create also reports. */
static void expect_absent(const sight *seen, const char *reason)
{
    CHECK(seen->cuda.available == 0 && seen->cuda.devices == 0, "the module counts as available");
    CHECK(strstr(seen->cuda.reason, reason) != NULL, "expected \"%s\" in the reason: %s", reason, seen->cuda.reason);
    CHECK(seen->cuda_devices == 0, "%d devices", seen->cuda_devices);
    CHECK(seen->best.type == TCH_DEVICE_CPU && seen->best.index == 0, "auto is %d:%d", seen->best.type,
          seen->best.index);
    CHECK(seen->create == TCH_ERR_UNAVAILABLE, "a context gave %s", tch_status_name(seen->create));
    CHECK(strstr(seen->message, reason) != NULL, "the reason is not in the message: %s", seen->message);
}

static void expect_present(const sight *seen)
{
    CHECK(seen->cuda.available == 1 && seen->cuda.devices == 1, "not available: %s", seen->cuda.reason);
    CHECK(seen->cuda_devices == 1, "%d devices", seen->cuda_devices);
    CHECK(seen->best.type == TCH_DEVICE_CUDA && seen->best.index == 0, "auto is %d:%d", seen->best.type,
          seen->best.index);
    CHECK(seen->create == TCH_OK, "no context: %s", seen->message);
}

TEST(a_good_module_is_used)
{
    sight seen = see(variant("good"), NULL);
    expect_present(&seen);
    assert_non_null(strstr(seen.cuda.library, MODULE_FILE));
    assert_non_null(strstr(seen.cuda.library, variant("good")));
    assert_non_null(strstr(seen.cuda.details, "imagination"));
    assert_string_equal(seen.cuda.reason, "");
}

TEST(every_way_of_failing_has_its_reason)
{
    static const struct {
        const char *variant, *reason;
    } cases[] = {{"wrong_abi", "7777"},
                 {"wrong_size", "interface"},
                 {"no_entry", "torchium_backend_entry"},
                 {"refuses", "the driver is older than time"},
                 {"refuses_silently", "no reason"},
                 {"incomplete", "gemm"},
                 {"no_matrices", "chapter matrix"},
                 {"half_a_chapter", "update->inspect_gradients"},
                 {"no_devices", "on holiday"}};
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        sight seen = see(variant(cases[i].variant), NULL);
        expect_absent(&seen, cases[i].reason);
        CHECK(strstr(seen.cuda.library, MODULE_FILE) != NULL, "its file is not named: %s", seen.cuda.library);
        for (size_t j = 0; j < TEST_COUNT(cases); j++) {
            CHECK(i == j || j == 1 || strstr(seen.cuda.reason, cases[j].reason) == NULL,
                  "the reason reads like that of %s: %s", cases[j].variant, seen.cuda.reason);
        }
    }
}

/* A copy of the good module in the test's folder, or of its first `most` bytes. */
static void copy_module(int64_t most)
{
    char from[PATH_MAX];
    int64_t size;
    snprintf(from, sizeof from, "%s/%s", variant("good"), MODULE_FILE);
    char *bytes = test_file_read(from, &size);
    test_file_write(test_path(MODULE_FILE), bytes, size < most ? size : most);
}

TEST_IN_FOLDER(a_file_that_is_no_shared_object)
{
    static const char *const texts[] = {"This is a letter, not a library.\n", "", NULL};
    for (int i = 0; i < 3; i++) {
        if (texts[i] != NULL) {
            test_file_write(test_path(MODULE_FILE), texts[i], (int64_t)strlen(texts[i]));
        } else {
            unlink(test_path(MODULE_FILE));
        }
        sight seen = see(test_path("."), NULL);
        expect_absent(&seen, texts[i] != NULL ? "cannot be opened" : "no module");
    }
}

/* dlopen would map such a file and crash the process. */
TEST_IN_FOLDER(a_module_that_was_copied_in_part)
{
    /* The loaded part of any module extends into its third page at least; debugging information may follow. */
    static const int64_t parts[] = {100, 1000, 4096, 8000, INT64_MAX};
    for (size_t i = 0; i < TEST_COUNT(parts); i++) {
        copy_module(parts[i]);
        sight seen = see(test_path("."), NULL);
        if (parts[i] < INT64_MAX) {
            expect_absent(&seen, "cut short");
        } else {
            expect_present(&seen);
        }
    }
}

/* A module in the current folder must not be loaded, however the path is written; the reason lists the folders
 * searched. */
TEST(the_current_folder_is_never_searched)
{
    static const char *const paths[] = {
        NULL, "", ".", "./", ":", "::", "good", "./good", "../modules/good", ":.:", "/nowhere/at/all"};
    for (size_t i = 0; i < 2 * TEST_COUNT(paths); i++) {
        sight seen = see(paths[i / 2], i % 2 == 0 ? variant("good") : TEST_MODULES);
        expect_absent(&seen, "no module");
        expect_absent(&seen, "TORCHIUM_BACKEND_PATH");
    }
}

/* --- a program started through PATH, as "test_registry look" ----------------------------------------------------- */

#define PROGRAM "test_registry"
#define LOOK "look"

/* Results of this program when a shell finds it by name. */
static void look_by_name(void *seen)
{
    char folder[PATH_MAX] = "";
    ssize_t length = readlink("/proc/self/exe", folder, sizeof folder - 1);
    char *slash = length > 0 ? strrchr(folder, '/') : NULL;
    if (slash == NULL || strcmp(slash + 1, PROGRAM) != 0) {
        _exit(4);
    }
    *slash = '\0';
    setenv("PATH", folder, 1);
    FILE *output = popen(PROGRAM " " LOOK, "r");
    if (output == NULL || fread(seen, sizeof(sight), 1, output) != 1 || pclose(output) != 0) {
        _exit(5);
    }
}

static int answer_to_look(void)
{
    sight seen;
    look(&seen);
    return fwrite(&seen, sizeof seen, 1, stdout) == 1 ? 0 : 1;
}

/* The linker knows such a program by name only. In the current folder that name may be another user's file, with a
 * module next to it. */
TEST_IN_FOLDER(a_name_is_not_a_place)
{
    const char *folder = test_path(".");
    sight seen;
    copy_module(INT64_MAX);
    test_file_write(test_path(PROGRAM), "not a program\n", 14);
    test_case("started by its name");
    in_child(NULL, folder, look_by_name, &seen, sizeof seen);
    expect_absent(&seen, "no module");
    CHECK(strstr(seen.cuda.reason, "torchium-test-") == NULL, "it was looked for in the current folder: %s",
          seen.cuda.reason);
}

TEST(the_first_folder_of_the_path_wins)
{
    char path[3 * PATH_MAX];
    snprintf(path, sizeof path, "/nowhere:%s/good:%s/refuses", TEST_MODULES, TEST_MODULES);
    sight seen = see(path, NULL);
    expect_present(&seen);
    snprintf(path, sizeof path, "%s/refuses:%s/good", TEST_MODULES, TEST_MODULES);
    seen = see(path, NULL);
    expect_absent(&seen, "older than time");
}

TEST(a_very_long_path_is_harmless)
{
    size_t length = 100000;
    char *path = test_alloc(length + PATH_MAX + 2);
    memset(path, 'x', length);
    path[0] = '/';
    snprintf(path + length, PATH_MAX, ":%s", variant("good"));
    sight seen;
    test_case("a path of %zu characters", strlen(path));
    in_child(path, NULL, look, &seen, sizeof seen);
    expect_present(&seen);
}

/* --- a context on the fake device: supported operations work, others return the device's error ------------------- */

enum { CALLS = 10, SAID = 160 };

typedef struct answers {
    tch_status status[CALLS];
    char said[CALLS][SAID];
    int32_t device, equal;
} answers;

static void use_fake_device(void *result)
{
    answers *r = result;
    tch_context *context = NULL;
    tch_tensor *t = NULL;
    tch_optimizer *optimizer = NULL;
    tch_scaler *scaler = NULL;
    tch_kfac *kfac = NULL;
    tch_kernel *kernel = NULL;
    tch_network *network = NULL;
    void *pointer = NULL;
    int64_t shape[] = {3};
    float values[] = {1, 2, 3}, back[3] = {0};
    memset(r, 0, sizeof *r);
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT32, 1, shape),
               view = tch_tensor_view(back, TCH_FLOAT32, 1, shape);
    tch_context_create("cuda:0", &context);
    tch_memory_alloc(context, 1000, &pointer);
    r->status[0] = tch_memory_free(context, pointer);
    tch_tensor_create(context, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &t);
    tch_tensor_copy(context, t, &host);
    r->status[1] = tch_tensor_copy(context, &view, t);
    r->device = tch_context_device(context).type;
    r->equal = pointer != NULL && memcmp(values, back, sizeof values) == 0;
    for (int i = 2; i < CALLS; i++) {
        r->status[i] = i == 2   ? tch_tensor_fill(context, t, 1.0)
                       : i == 3 ? tch_tensor_fill(context, &host, 1.0)
                       : i == 4 ? tch_optimizer_create(context, NULL, NULL, 0, NULL, &optimizer)
                       : i == 5 ? tch_scaler_create(context, NULL, &scaler)
                       : i == 6 ? tch_grad_clip_weights(context, NULL, 1.0, NULL)
                       : i == 7 ? tch_kfac_create(context, NULL, NULL, 0, NULL, &kfac)
                       : i == 8 ? tch_kernel_compile(context, NULL, &kernel)
                                : tch_network_create(context, NULL, &network);
        snprintf(r->said[i], SAID, "%.150s", tch_last_error());
    }
    tch_tensor_destroy(t);
    tch_context_destroy(context);
}

/* The fake device copies and allocates; its fill fails, and some chapters of the table are missing. */
TEST(a_context_on_a_modules_device)
{
    static const struct {
        tch_status expected;
        const char *words[2];
    } calls[CALLS] = {
        {TCH_OK, {"", ""}},
        {TCH_OK, {"", ""}},
        {TCH_ERR_UNSUPPORTED, {"the fake device cannot do fills", ""}},
        {TCH_ERR_DEVICE, {"tensor", "cuda:0"}},
        {TCH_ERR_UNSUPPORTED, {"tch_optimizer_create", "`update`"}},
        {TCH_ERR_UNSUPPORTED, {"tch_scaler_create", "`update`"}},
        {TCH_ERR_UNSUPPORTED, {"tch_grad_clip_weights", "`sample`"}},
        {TCH_ERR_UNSUPPORTED, {"tch_kfac_create", "`sample`"}},
        {TCH_ERR_UNSUPPORTED, {"tch_kernel_compile", "`kernel`"}},
        {TCH_ERR_UNSUPPORTED, {"tch_network_create", "`network`"}},
    };
    answers r;
    in_child(variant("good"), NULL, use_fake_device, &r, sizeof r);
    CHECK(r.device == TCH_DEVICE_CUDA && r.equal, "device %d, or other numbers came back", r.device);
    for (int i = 0; i < CALLS; i++) {
        test_case("call %d: %s", i, calls[i].words[0]);
        CHECK(r.status[i] == calls[i].expected, "gave %s: %s", tch_status_name(r.status[i]), r.said[i]);
        CHECK(strstr(r.said[i], calls[i].words[0]) != NULL && strstr(r.said[i], calls[i].words[1]) != NULL, "said %s",
              r.said[i]);
    }
}

/* --- the module of docs/adding-a-backend.md ---------------------------------------------------------------------- */

enum { N = 20 };

typedef struct traced {
    tch_status status;
    int32_t equal;  /* bitwise equal to the CPU's result */
    int32_t lines;  /* that it wrote */
    int32_t device; /* resolution of "auto" */
} traced;

/* (L L' + I)^-1/4 of a fixed L, by the eigen method. */
static tch_status take_root(const char *device, float *root)
{
    tch_context *context = NULL;
    tch_tensor *a = NULL, *out = NULL;
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    int64_t shape[] = {N, N};
    float values[N * N];
    for (int i = 0; i < N * N; i++) {
        int row = i / N;
        int col = i % N;
        values[i] = 1.0f / (float)(1 + row + col) + (row == col ? 1.0f : 0.0f);
    }
    config.method = TCH_ROOT_EIGEN;
    tch_tensor from = tch_tensor_view(values, TCH_FLOAT32, 2, shape);
    tch_tensor to = tch_tensor_view(root, TCH_FLOAT32, 2, shape);
    tch_status status = tch_context_create(device, &context);
    status = status != TCH_OK ? status : tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &a);
    status = status != TCH_OK ? status : tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &out);
    status = status != TCH_OK ? status : tch_tensor_copy(context, a, &from);
    status = status != TCH_OK ? status : tch_inverse_root(context, a, 4, &config, out, NULL, NULL);
    status = status != TCH_OK ? status : tch_tensor_copy(context, &to, out);
    tch_tensor_destroy(a);
    tch_tensor_destroy(out);
    tch_context_destroy(context);
    return status;
}

static void run_traced(void *result)
{
    traced *t = result;
    float here[N * N];
    float there[N * N] = {0};
    char line[256];
    FILE *log = tmpfile();
    memset(t, 0, sizeof *t);
    if (log == NULL || dup2(fileno(log), STDERR_FILENO) < 0) {
        _exit(5);
    }
    t->status = take_root("cpu", here);
    t->status = t->status != TCH_OK ? t->status : take_root("traced:0", there);
    t->equal = memcmp(here, there, sizeof here) == 0;
    fflush(stderr);
    rewind(log);
    while (fgets(line, sizeof line, log) != NULL) {
        t->lines += strstr(line, "eigendecomposition: 1 of 20 x 20, ") != NULL;
    }
    tch_device best = {0};
    tch_device_parse("auto", &best);
    t->device = best.type;
}

TEST(the_example_of_the_manual_runs)
{
    traced t;
    test_case("examples/backend/traced.c");
    in_child(EXAMPLE_BACKEND, NULL, run_traced, &t, sizeof t);
    CHECK_OK(t.status);
    CHECK(t.equal, "its root is another than the CPU's");
    assert_int_equal(t.lines, 1);
    assert_int_not_equal(t.device, TCH_DEVICE_EXTENSION);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], LOOK) == 0) {
        return answer_to_look();
    }
    test_begin(argc, argv);
    return test_run(__FILE__, NULL, NULL);
}
