/* Custom kernels in the CUDA module, on the emulated device and a fake NVRTC: compiler options, compiler results,
 * damaged images, launches, and errors after a kernel fault. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/user_kernel/kernel_text.h"

#include "emulator/host/fake_host.h"
#include "emulator/machine.h"
#include "support/testing.h"

static void expect_in(const char *text, const char *wanted)
{
    CHECK(strstr(text, wanted) != NULL, "expected \"%s\" in: %s", wanted, text);
}

static void *open_device(int capability)
{
    void *state = NULL;
    fake_host_reset();
    emulated.capability[1] = capability;
    assert_int_equal(tchi_cuda_state_create(1, &state), TCH_OK);
    return state;
}

static const char *nvrtc_file = FAKE_NVRTC;

/* The last input of the fake NVRTC. */
static const char *told(const char *what)
{
    const char *(*function)(void);
    void *library = dlopen(nvrtc_file, RTLD_NOW | RTLD_NOLOAD);
    assert_non_null(library);
    void *address = dlsym(library, what);
    memcpy(&function, &address, sizeof function);
    dlclose(library);
    return function();
}

static const tch_kernel_text plain = {.source = "plain", .file = "my \"file\\.cu", .name = "scale<float, 4>"};
static char words[16384];

/* --- the compiler ------------------------------------------------------------------------------------------------ */

static int say_what_to_install(void)
{
    void *state = open_device(90);
    setenv("TORCHIUM_NVRTC", "/nowhere/libnvrtc.so.13", 1);
    tch_status status = tchi_cuda_kernel_compiler(state, words, sizeof words);
    return status == TCH_ERR_UNAVAILABLE && strstr(fake_host.message, "/nowhere/libnvrtc.so.13") != NULL ? 0 : 1;
}

/* Neither configured nor installed: the message says where it looked and what would help. */
static int say_where_it_was_looked_for(void)
{
    void *state = open_device(90);
    tch_kernel_image image = {NULL, 0};
    unsetenv("TORCHIUM_NVRTC");
    setenv("TORCHIUM_CUDA_PATH", "/nowhere/toolkit", 1);
    tch_status status = tchi_cuda_kernel_build(state, &plain, &image, words, sizeof words);
    if (status == TCH_OK) { /* NVRTC is installed in a system folder */
        return 0;
    }
    return status == TCH_ERR_UNAVAILABLE && strstr(fake_host.message, "/nowhere/toolkit") != NULL &&
                   strstr(fake_host.message, "libnvrtc.so.13 and libnvrtc.so.12") != NULL &&
                   strstr(fake_host.message, "pip install nvidia-cuda-nvrtc") != NULL && image.data == NULL
               ? 0
               : 1;
}

/* A library of the right name without the functions. */
static int say_what_is_missing_in_it(void)
{
    void *state = open_device(90);
    tch_kernel_image image = {NULL, 0};
    setenv("TORCHIUM_NVRTC", EMULATED_CUBLAS, 1);
    tch_status status = tchi_cuda_kernel_build(state, &plain, &image, words, sizeof words);
    return status == TCH_ERR_UNAVAILABLE && strstr(fake_host.message, "it has no function nvrtcVersion") != NULL ? 0
                                                                                                                 : 1;
}

TEST(a_missing_compiler_is_explained)
{
    fake_host_in_a_child(say_what_to_install);
    fake_host_in_a_child(say_where_it_was_looked_for);
    fake_host_in_a_child(say_what_is_missing_in_it);
}

static int lack_headers(void)
{
    const tch_kernel_text text = {.source = "LACK_HEADER", .file = "f.cu", .name = "f"};
    void *state = open_device(90);
    tch_kernel_image image;
    unsetenv("TORCHIUM_CUDA_PATH");
    tch_status status = tchi_cuda_kernel_build(state, &text, &image, words, sizeof words);
    int has_toolkit = access("/usr/local/cuda/include/cuda_fp16.h", R_OK) == 0;
    int explained = strstr(words, "pip install nvidia-cuda-runtime") != NULL;
    return status == TCH_ERR_INVALID_ARGUMENT && explained == !has_toolkit ? 0 : 1;
}

/* A fresh folder in which `script` was run; 0 if that failed. */
static int make_folder(char folder[256], const char *script)
{
    char command[2048];
    const char *place = getenv("TMPDIR");
    snprintf(folder, 256, "%.200s/torchium-test-XXXXXX", place != NULL && place[0] != '\0' ? place : "/tmp");
    if (mkdtemp(folder) == NULL) {
        return 0;
    }
    snprintf(command, sizeof command, "cd '%s' && %s", folder, script);
    return system(command) == 0;
}

/* Whether folder/sub was passed to the compiler; the folder is removed. */
static int told_of(const char *folder, const char *sub)
{
    char option[512];
    char command[512];
    snprintf(option, sizeof option, "--include-path=%s/%s\n", folder, sub);
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    int found = strstr(told("fake_nvrtc_options"), option) != NULL;
    return system(command) == 0 && found;
}

static int have_headers(void)
{
    char folder[256];
    tch_kernel_image image;
    void *state = open_device(90);
    if (!make_folder(folder, "mkdir include && touch include/cuda_fp16.h")) {
        return 2;
    }
    setenv("TORCHIUM_CUDA_PATH", folder, 1);
    tch_status status = tchi_cuda_kernel_build(state, &plain, &image, words, sizeof words);
    return told_of(folder, "include") && status == TCH_OK ? 0 : 1;
}

/* pip's packages for CUDA 12 have a folder each. */
static int find_beside_cublas(void)
{
    char folder[256];
    char path[512];
    tch_kernel_image image;
    if (!make_folder(folder,
                     "mkdir -p cublas/lib cuda_nvrtc/lib cuda_runtime/include && "
                     "cp " EMULATED_CUBLAS " cublas/lib/libcublas.so.12 && "
                     "cp " FAKE_NVRTC " cuda_nvrtc/lib/libnvrtc.so.12 && touch cuda_runtime/include/cuda_fp16.h")) {
        return 2;
    }
    snprintf(path, sizeof path, "%s/cublas/lib/libcublas.so.12", folder);
    setenv("TORCHIUM_CUBLAS", path, 1);
    unsetenv("TORCHIUM_NVRTC");
    unsetenv("TORCHIUM_CUDA_PATH");
    void *state = open_device(90);
    tch_status status = tchi_cuda_kernel_build(state, &plain, &image, words, sizeof words);
    snprintf(path, sizeof path, "%s/cuda_nvrtc/lib/libnvrtc.so.12", folder);
    nvrtc_file = path;
    return told_of(folder, "cuda_nvrtc/lib/../../cuda_runtime/include") && status == TCH_OK ? 0 : 1;
}

/* Before any test of this process has loaded the compiler. */
TEST(headers_are_found_or_asked_for)
{
    fake_host_in_a_child(lack_headers);
    fake_host_in_a_child(have_headers);
    fake_host_in_a_child(find_beside_cublas);
}

FAKE_HOST_TEST(the_line_names_gpu_and_compiler)
{
    char again[256];
    assert_int_equal(tchi_cuda_kernel_compiler(*state, words, sizeof words), TCH_OK);
    expect_in(words, "cuda, compute capability 9.0, nvrtc (");
    assert_int_equal(tchi_cuda_kernel_compiler(*state, again, sizeof again), TCH_OK);
    assert_string_equal(words, again);
}

static void a_target(int major, int minor, tchi_cuda_code code, int number, int own)
{
    static const int known[] = {75, 80, 86, 89, 90, 100, 120};
    tchi_cuda_target target = {0};
    assert_int_equal(tchi_cuda_choose_target(major, minor, 7, known, &target), 1);
    assert_int_equal(target.code, code);
    assert_int_equal(target.number, number);
    assert_int_equal(target.specific, own);
}

TEST(targets_by_gpu)
{
    static const int newer[] = {100, 120};
    tchi_cuda_target target;
    a_target(7, 5, TCHI_CUDA_CODE_CUBIN, 75, 0);
    a_target(8, 9, TCHI_CUDA_CODE_CUBIN, 89, 0);
    a_target(9, 0, TCHI_CUDA_CODE_CUBIN, 90, 1);
    a_target(12, 0, TCHI_CUDA_CODE_CUBIN, 120, 1);
    a_target(8, 7, TCHI_CUDA_CODE_PTX, 86, 0); /* an unknown one */
    a_target(13, 0, TCHI_CUDA_CODE_PTX, 120, 0);
    assert_int_equal(tchi_cuda_choose_target(9, 0, 2, newer, &target), 0);
    assert_int_equal(tchi_cuda_choose_target(9, 0, 0, NULL, &target), 0);
}

TEST(a_gpu_newer_than_the_compiler_gets_ptx)
{
    void *newer = open_device(130);
    tch_kernel_image image = {NULL, 0};
    assert_int_equal(tchi_cuda_kernel_compiler(newer, words, sizeof words), TCH_OK);
    expect_in(words, "compute capability 13.0, nvrtc (");
    assert_int_equal(tchi_cuda_kernel_build(newer, &plain, &image, words, sizeof words), TCH_OK);
    expect_in(told("fake_nvrtc_options"), "--gpu-architecture=compute_100\n");
    assert_non_null(memmem(image.data, image.bytes, ".version", 8));
    tchi_cuda_host->release(image.data, image.bytes);
    assert_int_equal(fake_host_close(&newer), 0);
}

TEST(a_gpu_too_old_for_the_compiler)
{
    void *older = open_device(75);
    tch_kernel_image image = {NULL, 0};
    setenv("FAKE_NVRTC_ARCHS", "80 90", 1);
    assert_int_equal(tchi_cuda_kernel_build(older, &plain, &image, words, sizeof words), TCH_ERR_UNAVAILABLE);
    fake_host_expect("NVRTC 13.7");
    fake_host_expect("compute capability 7.5");
    unsetenv("FAKE_NVRTC_ARCHS");
    assert_int_equal(fake_host_close(&older), 0);
}

/* --- compiling --------------------------------------------------------------------------------------------------- */

static void build_and_drop(void *state, const tch_kernel_text *text)
{
    tch_kernel_image image;
    assert_int_equal(tchi_cuda_kernel_build(state, text, &image, words, sizeof words), TCH_OK);
    tchi_cuda_host->release(image.data, image.bytes);
}

static void refuse_to_build(void *state, const tch_kernel_text *text, size_t room)
{
    tch_kernel_image image = {NULL, 0};
    assert_int_equal(tchi_cuda_kernel_build(state, text, &image, words, room), TCH_ERR_INVALID_ARGUMENT);
    assert_null(image.data);
}

/* Macros are defined in the source: as options they would change NVRTC's headers. */
FAKE_HOST_TEST(options_go_where_they_belong)
{
    static const char *const options[] = {"-DN=3", "-DON", "-UQ", "-std=c++20", "--use_fast_math", "-O2"};
    static const char *const includes[] = {"/a folder", "/-b"};
    const tch_kernel_text text = {"plain", "-f.cu", "f", 6, options, 2, includes};
    build_and_drop(*state, &text);
    const char *seen = told("fake_nvrtc_options");
    expect_in(seen, "--gpu-architecture=sm_90a\n--generate-line-info\n");
    expect_in(seen, "-std=c++20\n--use_fast_math\n-Xptxas=-O2\n--include-path=/a folder\n--include-path=/-b\n");
    assert_null(strstr(seen, "c++17"));
    assert_null(strstr(seen, "-DN"));
    expect_in(told("fake_nvrtc_source"),
              "\n#undef N\n#define N 3\n#undef ON\n#define ON 1\n#undef Q\n#line 1 \"-f.cu\"\nplain\n");
    build_and_drop(*state, &plain);
    expect_in(told("fake_nvrtc_options"), "-std=c++17\n");
    assert_null(strstr(told("fake_nvrtc_options"), "line-info")); /* a quote in the file name */
}

/* Messages have the user's line numbers, and no file name can end the directive. */
FAKE_HOST_TEST(the_source_keeps_its_lines)
{
    build_and_drop(*state, &plain);
    assert_string_equal(words, "");
    const char *seen = told("fake_nvrtc_source");
    expect_in(seen, "\n#line 1 \"my \\\"file\\\\.cu\"\nplain\n");
    expect_in(seen, "\n#define TCHI_KERNEL scale<float, 4>\n");
    expect_in(seen, "tchi_signature");
}

FAKE_HOST_TEST(the_compilers_words_are_kept)
{
    tch_kernel_text text = {.source = "BE_WRONG", .file = "f.cu", .name = "f"};
    refuse_to_build(*state, &text, sizeof words);
    assert_string_equal(words, "kernel.cu(3): error: it is wrong\n");
    fake_host_expect("kernel.cu(3): error: it is wrong");
    refuse_to_build(*state, &text, 6);
    assert_string_equal(words, "kerne");
    text.source = "BE_WARNED";
    build_and_drop(*state, &text);
    expect_in(words, "kernel.cu(2): warning");
}

/* Lines of text appended to the source are not reported. */
FAKE_HOST_TEST(a_name_that_is_not_there)
{
    const tch_kernel_text text = {.source = "plain", .file = "f.cu", .name = "missing"};
    refuse_to_build(*state, &text, sizeof words);
    expect_in(words, "the name is not that of one __global__ function: \"missing\" is undefined; expected");
    assert_null(strstr(words, "(84)"));
}

static tch_status build_and_release(void *state)
{
    const tch_kernel_text text = {.source = "BE_WARNED", .file = "f.cu", .name = "f"};
    tch_kernel_image image = {NULL, 0};
    tch_status status = tchi_cuda_kernel_build(state, &text, &image, words, sizeof words);
    if (status == TCH_OK) {
        tchi_cuda_host->release(image.data, image.bytes);
    }
    return status;
}

FAKE_HOST_TEST(memory_that_runs_out)
{
    assert_int_equal(fake_host_fail_allocations(build_and_release, *state), 5);
}

/* --- loading ----------------------------------------------------------------------------------------------------- */

/* A kernel (const float *x, int n), as described by the text appended to the source; `parameter_size` is the size of
 * both. */
static const int32_t signature[] = {2, 0, 8, 3, 4, 1, 0, 1, 8, 4, 0, 0, 0};

static tch_kernel_image build(void *state)
{
    tch_kernel_image image = {NULL, 0};
    emulated.signature = signature;
    emulated.signature_bytes = sizeof signature;
    emulated.parameter_size = 8;
    assert_int_equal(tchi_cuda_kernel_build(state, &plain, &image, words, sizeof words), TCH_OK);
    return image;
}

static tch_status load_image(void *state, const tch_kernel_image *image, void **kernel)
{
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    return tchi_cuda_kernel_load(state, image, kernel, &info, 0, NULL);
}

FAKE_HOST_TEST(a_kernel_is_described)
{
    tch_kernel_image image = build(*state);
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    tch_kernel_parameter parameters[2];
    void *kernel = NULL;
    emulated.static_shared = 1000;
    memset(parameters, 0x55, sizeof parameters);
    assert_int_equal(tchi_cuda_kernel_load(*state, &image, &kernel, &info, 1, parameters), TCH_OK);
    assert_string_equal(emulated.kernel, "_Z_scale<float, 4>");
    assert_int_equal(emulated.shared_allowed, EMULATOR_SHARED_MOST - 1000);
    assert_int_equal(parameters[1].size, 0x55555555); /* no room */
    tchi_cuda_kernel_unload(*state, kernel);
    assert_int_equal(tchi_cuda_kernel_load(*state, &image, &kernel, &info, 2, parameters), TCH_OK);
    assert_memory_equal(parameters, signature + 1, sizeof parameters);
    assert_int_equal(info.parameters, 2);
    assert_int_equal(info.registers, 40);
    assert_int_equal(info.shared_bytes, 1000);
    assert_int_equal(info.max_threads, 1024);
    assert_int_equal(info.suggested_threads, 1024); /* 2048 threads in 2 blocks */
    assert_int_equal(info.suggested_blocks, 2 * ((tchi_cuda_state *)*state)->device.processors);
    tchi_cuda_kernel_unload(*state, kernel);
    tchi_cuda_host->release(image.data, image.bytes);
}

/* Changes every byte of the header and the names; then every length. */
FAKE_HOST_TEST(damaged_images_are_refused)
{
    tch_kernel_image image = build(*state);
    tchi_cuda_image header;
    void *kernel = NULL;
    memcpy(&header, image.data, sizeof header);
    for (size_t i = 0; i < sizeof header; i++) {
        ((unsigned char *)image.data)[i] ^= 0x81;
        assert_int_equal(load_image(*state, &image, &kernel), TCH_ERR_IO);
        ((unsigned char *)image.data)[i] ^= 0x81;
    }
    for (size_t bytes = 0; bytes < image.bytes; bytes++) {
        tch_kernel_image cut = {test_alloc(bytes + 1), bytes};
        memcpy(cut.data, image.data, bytes);
        assert_int_equal(load_image(*state, &cut, &kernel), TCH_ERR_IO);
        test_drop(cut.data);
    }
    emulated.fault = (emulator_fault){"cudaLibraryLoadData", cudaErrorInvalidKernelImage, 0, 1};
    assert_int_equal(load_image(*state, &image, &kernel), TCH_ERR_IO);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    assert_null(kernel);
    tchi_cuda_host->release(image.data, image.bytes);
}

FAKE_HOST_TEST(signatures_that_do_not_fit)
{
    tch_kernel_image image = build(*state);
    void *kernel = NULL;
    emulated.parameter_size = 4;
    assert_int_equal(load_image(*state, &image, &kernel), TCH_ERR_INTERNAL);
    fake_host_expect("parameter 0 of kernel scale<float, 4> has 8 bytes by its signature, 4 by its code");
    emulated.parameter_size = 8;
    emulated.signature_bytes -= 4;
    assert_int_equal(load_image(*state, &image, &kernel), TCH_ERR_IO);
    emulated.signature_bytes -= 20; /* the size of one parameter, but two declared */
    assert_int_equal(load_image(*state, &image, &kernel), TCH_ERR_IO);
    emulated.signature = NULL;
    assert_int_equal(load_image(*state, &image, &kernel), TCH_ERR_BACKEND);
    assert_int_equal(emulated.libraries, 0);
    tchi_cuda_host->release(image.data, image.bytes);
}

FAKE_HOST_TEST(capture_forbids_loading)
{
    const tchi_cuda_state *s = *state;
    tch_kernel_image image = build(*state);
    void *kernel = NULL;
    fake_host_begin_capture(s->local);
    assert_int_equal(load_image(*state, &image, &kernel), TCH_ERR_UNSUPPORTED);
    fake_host_expect("compile it before capturing");
    fake_host_end_capture(s->local);
    tchi_cuda_host->release(image.data, image.bytes);
}

typedef struct loading {
    void *state;
    tch_kernel_image image;
} loading;

static tch_status load_and_unload(void *data)
{
    const loading *l = data;
    void *kernel = NULL;
    tch_status status = load_image(l->state, &l->image, &kernel);
    if (status == TCH_OK) {
        tchi_cuda_kernel_unload(l->state, kernel);
    }
    return status;
}

FAKE_HOST_TEST(memory_that_runs_out_while_loading)
{
    loading l = {*state, build(*state)};
    assert_int_equal(fake_host_fail_allocations(load_and_unload, &l), 2);
    tchi_cuda_host->release(l.image.data, l.image.bytes);
}

/* --- launching --------------------------------------------------------------------------------------------------- */

FAKE_HOST_TEST(a_launch_goes_to_the_stream)
{
    const tchi_cuda_state *s = *state;
    tch_kernel_image image = build(*state);
    float *x = NULL;
    int32_t n = 3;
    const void *arguments[] = {&x, &n};
    tch_kernel_run run = {{70000, 2, 3}, {32, 4, 1}, 100000, arguments};
    void *kernel = NULL;
    assert_int_equal(load_image(*state, &image, &kernel), TCH_OK);
    int waits = emulated.waits;
    assert_int_equal(tchi_cuda_kernel_launch(*state, kernel, &run), TCH_OK);
    assert_int_equal(emulated.launches, 1);
    assert_true(emulated.grid.x == 70000 && emulated.grid.y == 2 && emulated.grid.z == 3);
    assert_true(emulated.block.x == 32 && emulated.block.y == 4 && emulated.block.z == 1);
    assert_int_equal(emulated.launch_shared, 100000);
    assert_ptr_equal(emulated.launch_stream, s->stream);
    assert_ptr_equal(emulated.launch_arguments, arguments);
    assert_int_equal(emulated.waits, waits);
    run.shared_bytes = EMULATOR_SHARED_MOST + 1;
    assert_int_equal(tchi_cuda_kernel_launch(*state, kernel, &run), TCH_ERR_INVALID_ARGUMENT);
    fake_host_expect("shared_bytes is 232449, expected no more than 232448");
    assert_int_equal(emulated.launches, 1);
    run.shared_bytes = 0;
    emulated.fault = (emulator_fault){"cudaLaunchKernel", cudaErrorLaunchOutOfResources, 0, 1};
    assert_int_equal(tchi_cuda_kernel_launch(*state, kernel, &run), TCH_ERR_BACKEND);
    fake_host_expect("scale<float, 4>: error of the emulated device");
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    tchi_cuda_kernel_unload(*state, kernel);
    tchi_cuda_host->release(image.data, image.bytes);
}

/* --- faults ------------------------------------------------------------------------------------------------------ */

/* The error surfaces at synchronization; from then on every context of that device reports it, and no other. */
static int fault(void)
{
    void *state = open_device(90);
    void *beside = NULL;
    void *elsewhere = NULL;
    void *kernel = NULL;
    int32_t n = 3;
    const void *arguments[] = {&n, &n};
    const tch_kernel_run run = {{1, 1, 1}, {1, 1, 1}, 0, arguments};
    assert_int_equal(tchi_cuda_state_create(1, &beside), TCH_OK);
    assert_int_equal(tchi_cuda_state_create(0, &elsewhere), TCH_OK);
    tch_kernel_image image = build(state);
    assert_int_equal(tchi_cuda_begin(state), TCH_OK);
    assert_int_equal(load_image(state, &image, &kernel), TCH_OK);
    assert_int_equal(tchi_cuda_kernel_launch(state, kernel, &run), TCH_OK);
    tchi_cuda_end(state);
    emulated.fault = (emulator_fault){"cudaStreamSynchronize", cudaErrorIllegalAddress, 0, 1};
    assert_int_equal(tchi_cuda_synchronize(state), TCH_ERR_BACKEND);
    fake_host_expect("waiting for the stream: an illegal memory access was encountered (cudaErrorIllegalAddress) after "
                     "kernel scale<float, 4> was launched");
    fake_host_expect("only by a new process");
    fake_host.message[0] = '\0';
    assert_int_equal(tchi_cuda_begin(beside), TCH_ERR_BACKEND);
    fake_host_expect("this process can no longer use cuda:1: an illegal memory access was encountered "
                     "(cudaErrorIllegalAddress) after kernel scale<float, 4> was launched");
    assert_int_equal(tchi_cuda_begin(elsewhere), TCH_OK);
    tchi_cuda_end(elsewhere);
    tchi_cuda_kernel_unload(state, kernel);
    tchi_cuda_host->release(image.data, image.bytes);
    tchi_cuda_state_destroy(state);
    tchi_cuda_state_destroy(beside);
    tchi_cuda_state_destroy(elsewhere);
    assert_int_equal(fake_host.bytes, 0);
    assert_int_equal(tchi_cuda_state_create(1, &state), TCH_ERR_BACKEND);
    fake_host_expect("this process can no longer use cuda:1");
    return 0;
}

TEST(after_a_fault_everything_says_so)
{
    fake_host_in_a_child(fault);
}

int main(void)
{
    setenv("TORCHIUM_CUBLAS", EMULATED_CUBLAS, 1);
    setenv("TORCHIUM_NVRTC", FAKE_NVRTC, 1);
    return test_run(__FILE__, NULL, NULL);
}
