/* Finds and opens cuBLAS, cuSOLVER and NVRTC at run time. Libraries already in the process come first, so that PyTorch
 * and Torchium share one copy. Then the places that users and installers name, in this order:
 *
 *     TORCHIUM_CUBLAS, _CUSOLVER, _NVRTC        a file, used exclusively
 *     loaded already                            by PyTorch, CuPy, the program
 *     next to cuBLAS                            for the others: its folder, and the neighboring ones of pip's packages
 *     $TORCHIUM_CUDA_PATH, and lib64, lib in it a toolkit's folder
 *     the system's search                       LD_LIBRARY_PATH, ld.so.conf
 *     /usr/local/cuda/lib64
 *     ../nvidia, ../../nvidia from this module  pip's packages, if Torchium is one of them */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cublas.h"
#include "cusolver.h"
#include "nvrtc.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

typedef struct symbol {
    const char *name;
    void *slot; /* a function pointer in the table */
    int optional;
} symbol;

/* A library: its names and folders for CUDA 13 and 12, and the result of the search. */
typedef struct library {
    const char *title;
    const char *variable;
    const char *sonames[2];
    const char *pip_folders[2];
    const char *sibling; /* a file whose folder is searched early, or NULL */
    const char *advice;
    const symbol *symbols;
    size_t symbol_count;
    int locate_only;    /* a file whose whole path is known is not opened */
    char path[512];     /* the file opened, or empty */
    char problem[512];  /* of the last file that is there but cannot be used */
    char failure[1024]; /* the sentence for the user */
} library;

/* ISO C has no conversion from void* to a function pointer; POSIX promises that the representation fits. */
static int bind_symbols(library *lib, void *handle)
{
    void *address = NULL;
    for (size_t i = 0; i < lib->symbol_count; i++) {
        const symbol *s = &lib->symbols[i];
        address = dlsym(handle, s->name);
        if (address == NULL && !s->optional) {
            snprintf(lib->problem, sizeof lib->problem, "it has no function %s", s->name);
            return 0;
        }
        memcpy(s->slot, &address, sizeof address);
    }
    Dl_info info;
    address = dlsym(handle, lib->symbols[0].name);
    int known = address != NULL && dladdr(address, &info) != 0;
    snprintf(lib->path, sizeof lib->path, "%s", known ? info.dli_fname : lib->sonames[0]);
    return 1;
}

static int note_file(library *lib, const char *path)
{
    if (access(path, R_OK) != 0) {
        return 0;
    }
    snprintf(lib->path, sizeof lib->path, "%s", path);
    return 1;
}

/* With RTLD_NOLOAD in `flags`, only an already loaded library. It stays open until the process ends. */
static int open_file(library *lib, const char *name, int flags)
{
    if (lib->locate_only && name[0] == '/') {
        return note_file(lib, name);
    }
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags);
    if (handle == NULL) {
        if (flags == 0 && (name[0] != '/' || access(name, F_OK) == 0)) {
            snprintf(lib->problem, sizeof lib->problem, "%s", dlerror());
        }
        return 0;
    }
    if (!bind_symbols(lib, handle)) {
        dlclose(handle);
        return 0;
    }
    return 1;
}

/* Tries the library's names in folder/sub, or in the folder itself. */
static int open_in(library *lib, const char *folder, const char *sub)
{
    char path[PATH_MAX];
    for (size_t i = 0; i < COUNT(lib->sonames); i++) {
        int length = snprintf(path, sizeof path, "%s/%s%s%s", folder, sub, sub[0] != '\0' ? "/" : "", lib->sonames[i]);
        if (length > 0 && (size_t)length < sizeof path && open_file(lib, path, 0)) {
            return 1;
        }
    }
    return 0;
}

/* Tries the library's names in the system's search path, or with RTLD_NOLOAD among loaded libraries. */
static int open_by_system(library *lib, int flags)
{
    for (size_t i = 0; i < COUNT(lib->sonames); i++) {
        if (open_file(lib, lib->sonames[i], flags)) {
            return 1;
        }
    }
    return 0;
}

/* The folder of a file with links resolved; 0 if there is none. */
static int folder_of(const char *file, char folder[PATH_MAX])
{
    if (file == NULL || realpath(file, folder) == NULL) {
        return 0;
    }
    *strrchr(folder, '/') = '\0'; /* realpath returns an absolute path */
    return 1;
}

/* pip's packages have one folder for all libraries, or one for each: nvidia/cublas/lib, nvidia/cuda_nvrtc/lib. `up` is
 * the way from the folder to theirs. */
static int open_in_pip_folders(library *lib, const char *folder, const char *up)
{
    char sub[64];
    for (size_t i = 0; i < COUNT(lib->pip_folders); i++) {
        snprintf(sub, sizeof sub, "%s/%s", up, lib->pip_folders[i]);
        if (open_in(lib, folder, sub)) {
            return 1;
        }
    }
    return 0;
}

static int open_next_to_sibling(library *lib)
{
    char folder[PATH_MAX];
    return folder_of(lib->sibling, folder) && (open_in(lib, folder, "") || open_in_pip_folders(lib, folder, "../.."));
}

/* Relative folders are ignored: they depend on the current folder. */
static int open_in_named_folder(library *lib)
{
    const char *folder = secure_getenv("TORCHIUM_CUDA_PATH");
    return folder != NULL && folder[0] == '/' &&
           (open_in(lib, folder, "") || open_in(lib, folder, "lib64") || open_in(lib, folder, "lib"));
}

static int open_in_pip_packages(library *lib)
{
    static const char anchor = 0;
    char folder[PATH_MAX];
    Dl_info info;
    return dladdr(&anchor, &info) != 0 && folder_of(info.dli_fname, folder) &&
           (open_in_pip_folders(lib, folder, "../nvidia") || open_in_pip_folders(lib, folder, "../../nvidia"));
}

static void find_library(library *lib)
{
    const char *asked = secure_getenv(lib->variable);
    if (asked != NULL && asked[0] != '\0') {
        if (!open_file(lib, asked, 0)) {
            snprintf(lib->failure, sizeof lib->failure, "cannot use the %s that %s names, %.300s: %.300s", lib->title,
                     lib->variable, asked, lib->problem[0] ? lib->problem : "there is no file");
        }
        return;
    }
    if (open_by_system(lib, RTLD_NOLOAD) || open_next_to_sibling(lib) || open_in_named_folder(lib) ||
        open_by_system(lib, 0) || open_in(lib, "/usr/local/cuda", "lib64") || open_in_pip_packages(lib)) {
        return;
    }
    const char *folder = secure_getenv("TORCHIUM_CUDA_PATH");
    snprintf(
        lib->failure, sizeof lib->failure,
        "no %s can be used: searched for %s and %s among loaded libraries, in TORCHIUM_CUDA_PATH (%.200s), in the "
        "system's search path, in /usr/local/cuda/lib64 and in pip's nvidia packages next to this module (last answer: "
        "%.300s); %s, or give the file in %s",
        lib->title, lib->sonames[0], lib->sonames[1], folder != NULL ? folder : "not set",
        lib->problem[0] ? lib->problem : "no such file", lib->advice, lib->variable);
}

/* Runs `search` once. Returns whether the library was found; *reason, if not NULL, says why not. */
static int is_found(pthread_once_t *once, void (*search)(void), const library *lib, const char **reason)
{
    pthread_once(once, search);
    if (reason != NULL) {
        *reason = lib->failure;
    }
    return lib->path[0] != '\0';
}

static const char *path_of_cublas(void)
{
    const tchi_cublas *blas = tchi_cublas_open(NULL);
    return blas != NULL ? blas->library : NULL;
}

/* --- cuBLAS ------------------------------------------------------------------------------------------------------ */

static tchi_cublas cublas;
static tchi_cublas_status (*cublas_property)(libraryPropertyType type, int *value);

/* The 64-bit functions exist since cuBLAS 12. */
static const symbol cublas_symbols[] = {
    {"cublasCreate_v2", &cublas.create, 0},
    {"cublasDestroy_v2", &cublas.destroy, 0},
    {"cublasSetStream_v2", &cublas.set_stream, 0},
    {"cublasSetWorkspace_v2", &cublas.set_workspace, 0},
    {"cublasSetMathMode", &cublas.set_math_mode, 0},
    {"cublasSetPointerMode_v2", &cublas.set_pointer_mode, 0},
    {"cublasGetStatusString", &cublas.get_status_string, 0},
    {"cublasGetProperty", &cublas_property, 0},
    {"cublasGemmStridedBatchedEx_64", &cublas.gemm_strided_batched_ex, 0},
    {"cublasStrsm_v2_64", &cublas.trsm[0], 0},
    {"cublasDtrsm_v2_64", &cublas.trsm[1], 0},
    {"cublasStrsmBatched_64", &cublas.trsm_batched[0], 0},
    {"cublasDtrsmBatched_64", &cublas.trsm_batched[1], 0},
};

static library cublas_library = {
    .title = "cuBLAS",
    .variable = "TORCHIUM_CUBLAS",
    .sonames = {"libcublas.so.13", "libcublas.so.12"},
    .pip_folders = {"cu13/lib", "cublas/lib"},
    .advice = "install it (pip install nvidia-cublas, or NVIDIA's package libcublas-13-0)",
    .symbols = cublas_symbols,
    .symbol_count = COUNT(cublas_symbols),
};

static void find_cublas(void)
{
    find_library(&cublas_library);
    if (cublas_library.path[0] == '\0') {
        return;
    }
    int major = 0;
    int minor = 0;
    int patch = 0;
    cublas_property(MAJOR_VERSION, &major);
    cublas_property(MINOR_VERSION, &minor);
    cublas_property(PATCH_LEVEL, &patch);
    cublas.version = major * 10000 + minor * 100 + patch;
    snprintf(cublas.library, sizeof cublas.library, "%s", cublas_library.path);
}

const tchi_cublas *tchi_cublas_open(const char **reason)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    return is_found(&once, find_cublas, &cublas_library, reason) ? &cublas : NULL;
}

/* --- cuSOLVER ---------------------------------------------------------------------------------------------------- */

static tchi_cusolver cusolver;
static tchi_cusolver_status (*cusolver_version)(int *version);

static const symbol cusolver_symbols[] = {
    {"cusolverDnCreate", &cusolver.create, 0},
    {"cusolverDnDestroy", &cusolver.destroy, 0},
    {"cusolverDnSetStream", &cusolver.set_stream, 0},
    {"cusolverDnCreateParams", &cusolver.create_params, 0},
    {"cusolverDnDestroyParams", &cusolver.destroy_params, 0},
    {"cusolverGetVersion", &cusolver_version, 0},
    {"cusolverDnXsyevd_bufferSize", &cusolver.xsyevd_buffer_size, 0},
    {"cusolverDnXsyevd", &cusolver.xsyevd, 0},
    {"cusolverDnXsyevBatched_bufferSize", &cusolver.xsyev_batched_buffer_size, 1},
    {"cusolverDnXsyevBatched", &cusolver.xsyev_batched, 1},
    {"cusolverDnXpotrf_bufferSize", &cusolver.xpotrf_buffer_size, 0},
    {"cusolverDnXpotrf", &cusolver.xpotrf, 0},
    {"cusolverDnSpotrfBatched", &cusolver.potrf_batched[0], 0},
    {"cusolverDnDpotrfBatched", &cusolver.potrf_batched[1], 0},
};

static library cusolver_library = {
    .title = "cuSOLVER",
    .variable = "TORCHIUM_CUSOLVER",
    .sonames = {"libcusolver.so.12", "libcusolver.so.11"},
    .pip_folders = {"cu13/lib", "cusolver/lib"},
    .advice = "eigenvalues and solves need it: install it (pip install nvidia-cusolver, or NVIDIA's package "
              "libcusolver-13-0)",
    .symbols = cusolver_symbols,
    .symbol_count = COUNT(cusolver_symbols),
};

static void find_cusolver(void)
{
    cusolver_library.sibling = path_of_cublas();
    find_library(&cusolver_library);
    if (cusolver_library.path[0] == '\0') {
        return;
    }
    cusolver_version(&cusolver.version);
    snprintf(cusolver.library, sizeof cusolver.library, "%s", cusolver_library.path);
}

const tchi_cusolver *tchi_cusolver_open(const char **reason)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    return is_found(&once, find_cusolver, &cusolver_library, reason) ? &cusolver : NULL;
}

/* --- NVRTC ------------------------------------------------------------------------------------------------------- */

static tchi_nvrtc nvrtc;
static tchi_nvrtc_status (*nvrtc_version)(int *major, int *minor);

static const symbol nvrtc_symbols[] = {
    {"nvrtcVersion", &nvrtc_version, 0},
    {"nvrtcGetErrorString", &nvrtc.get_error_string, 0},
    {"nvrtcGetNumSupportedArchs", &nvrtc.get_num_supported_archs, 0},
    {"nvrtcGetSupportedArchs", &nvrtc.get_supported_archs, 0},
    {"nvrtcCreateProgram", &nvrtc.create_program, 0},
    {"nvrtcDestroyProgram", &nvrtc.destroy_program, 0},
    {"nvrtcAddNameExpression", &nvrtc.add_name_expression, 0},
    {"nvrtcCompileProgram", &nvrtc.compile_program, 0},
    {"nvrtcGetLoweredName", &nvrtc.get_lowered_name, 0},
    {"nvrtcGetProgramLogSize", &nvrtc.get_program_log_size, 0},
    {"nvrtcGetProgramLog", &nvrtc.get_program_log, 0},
    {"nvrtcGetCUBINSize", &nvrtc.get_cubin_size, 0},
    {"nvrtcGetCUBIN", &nvrtc.get_cubin, 0},
    {"nvrtcGetPTXSize", &nvrtc.get_ptx_size, 0},
    {"nvrtcGetPTX", &nvrtc.get_ptx, 0},
};

static library nvrtc_library = {
    .title = "NVRTC",
    .variable = "TORCHIUM_NVRTC",
    .sonames = {"libnvrtc.so.13", "libnvrtc.so.12"},
    .pip_folders = {"cu13/lib", "cuda_nvrtc/lib"},
    .advice = "custom kernels are compiled by it: install it (pip install nvidia-cuda-nvrtc nvidia-cuda-runtime, or "
              "NVIDIA's package cuda-nvrtc-dev-13-0)",
    .symbols = nvrtc_symbols,
    .symbol_count = COUNT(nvrtc_symbols),
};

/* NVRTC opens a second library by name, which is found only if it is loaded already or in the system's search path, not
 * in pip's folders. NVRTC reports a missing one itself. */
static void load_builtins(void)
{
    char folder[PATH_MAX];
    char path[PATH_MAX + 64];
    if (folder_of(nvrtc_library.path, folder)) {
        snprintf(path, sizeof path, "%s/libnvrtc-builtins.so.%d.%d", folder, nvrtc.major, nvrtc.minor);
        nvrtc.builtins = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
}

/* Stores folder/sub in `headers` if it contains CUDA's headers. */
static int headers_in(char headers[512], const char *folder, const char *sub)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s/cuda_fp16.h", folder, sub);
    if (folder[0] != '/' || length <= 0 || (size_t)length >= sizeof path || access(path, R_OK) != 0) {
        return 0;
    }
    length = snprintf(headers, 512, "%s/%s", folder, sub);
    if (length >= 512) {
        headers[0] = '\0';
    }
    return headers[0] != '\0';
}

/* The user's toolkit, then the headers of the NVRTC that was found: of a toolkit, or of pip's packages. */
static void find_headers(const char *nvrtc_path, char headers[512])
{
    char folder[PATH_MAX];
    const char *named = secure_getenv("TORCHIUM_CUDA_PATH");
    headers[0] = '\0';
    if (named != NULL && headers_in(headers, named, "include")) {
        return;
    }
    if (folder_of(nvrtc_path, folder) &&
        (headers_in(headers, folder, "../include") || headers_in(headers, folder, "../../cuda_runtime/include"))) {
        return;
    }
    headers_in(headers, "/usr/local/cuda", "include");
}

static void find_nvrtc(library *lib, char path[512], char headers[512])
{
    lib->sibling = path_of_cublas();
    find_library(lib);
    if (lib->path[0] != '\0') {
        snprintf(path, 512, "%s", lib->path);
        find_headers(path, headers);
    }
}

static library nvrtc_seen;
static tchi_nvrtc_files nvrtc_files;

static void locate_nvrtc(void)
{
    nvrtc_seen = nvrtc_library;
    nvrtc_seen.locate_only = 1;
    find_nvrtc(&nvrtc_seen, nvrtc_files.library, nvrtc_files.headers);
}

const tchi_nvrtc_files *tchi_nvrtc_locate(const char **reason)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    return is_found(&once, locate_nvrtc, &nvrtc_seen, reason) ? &nvrtc_files : NULL;
}

static void open_nvrtc(void)
{
    find_nvrtc(&nvrtc_library, nvrtc.library, nvrtc.headers);
    if (nvrtc_library.path[0] != '\0') {
        nvrtc_version(&nvrtc.major, &nvrtc.minor);
        load_builtins();
    }
}

const tchi_nvrtc *tchi_nvrtc_open(const char **reason)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    tchi_nvrtc_locate(NULL); /* the copy that it looks with is made before anything is found */
    return is_found(&once, open_nvrtc, &nvrtc_library, reason) ? &nvrtc : NULL;
}
