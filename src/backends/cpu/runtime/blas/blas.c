/* Finds and opens OpenBLAS at run time: pip installs one next to the Python package, a system has several builds, and
 * an OpenBLAS older than the processor falls back to its 2004 kernels, six times slower, unless told before its first
 * use which kernels to use. A build with its own thread pool is limited to one thread for the whole process;
 * parallel_blas.h divides large calls among the library's threads instead. See docs/decisions/0004-openblas.md. */
#define _GNU_SOURCE
#include "blas.h"

#include <dlfcn.h>
#include <limits.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include <torchium/device.h>

#include "core/cpu_features.h"
#include "core/status.h"
#include "core/threads.h"

#ifndef TCHI_BLAS_PATH
#define TCHI_BLAS_PATH "" /* the library found when Torchium was configured */
#endif

#define NOT_THERE "no such file"
#define PIP_LIBRARY "scipy_openblas32/lib/libscipy_openblas.so" /* the layout of pip's packages */

static atomic_bool opened_once; /* the others change before it is set, under tchi_fork_hold */
static tchi_blas table;
static char failure[1024];
static char named[PATH_MAX]; /* by tch_set_openblas_file, or empty */

/* --- binding ---------------------------------------------------------------------------------------------------- */

typedef struct symbol {
    const char *name;
    void *slot; /* a function pointer in the table */
} symbol;

/* An opened library and the prefix of its symbols: PyPI builds have one, so that several OpenBLAS can coexist in a
 * process. */
typedef struct opened {
    void *handle;
    const char *prefix;
} opened;

static void *find_symbol(const opened *library, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, "%s%s", library->prefix, name);
    return dlsym(library->handle, full);
}

/* ISO C has no conversion from void* to a function pointer; POSIX promises that the representation fits. */
static int bind_symbols(const opened *library, const symbol *symbols, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *address = find_symbol(library, symbols[i].name);
        if (address == NULL) {
            snprintf(failure, sizeof failure, "it has no function %s%s", library->prefix, symbols[i].name);
            return 0;
        }
        memcpy(symbols[i].slot, &address, sizeof address);
    }
    return 1;
}

static int bind_library(opened *library)
{
    tchi_blas_f32 *s = &table.f32;
    tchi_blas_f64 *d = &table.f64;
    const symbol symbols[] = {
        {"cblas_sgemm", &s->gemm}, {"cblas_dgemm", &d->gemm}, {"cblas_ssyrk", &s->syrk}, {"cblas_dsyrk", &d->syrk},
        {"cblas_strsm", &s->trsm}, {"cblas_dtrsm", &d->trsm}, {"spotrf_", &s->potrf},    {"dpotrf_", &d->potrf},
        {"strtri_", &s->trtri},    {"dtrtri_", &d->trtri},
    };
    library->prefix = "scipy_";
    if (find_symbol(library, symbols[0].name) == NULL) {
        library->prefix = "";
    }
    return bind_symbols(library, symbols, sizeof symbols / sizeof symbols[0]);
}

/* --- kernels ---------------------------------------------------------------------------------------------------- */

/* OpenBLAS's name of the best kernels for this processor, or NULL if its own choice is as good. */
static const char *better_core(const char *core)
{
    static const char *const wide[] = {"SkylakeX", "Cooperlake", "SapphireRapids", "Zen", "Haswell", "Excavator"};
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) {
        if (strcasecmp(core, wide[i]) == 0) {
            return NULL;
        }
    }
    if (tchi_cpu_has_avx512()) {
        return "SkylakeX";
    }
    return tchi_cpu_has_avx2() ? "Haswell" : NULL;
}

/* Makes an unused library choose its kernels again. OpenBLAS reads the name only from the environment, so the variable
 * is set during the call. */
static void choose_core(const opened *library, int we_are_first)
{
    char *(*corename)(void) = NULL;
    void (*quit)(void) = NULL;
    void (*init)(void) = NULL;
    const symbol names[] = {{"openblas_get_corename", &corename}};
    if (!bind_symbols(library, names, 1)) {
        return;
    }
    snprintf(table.core, sizeof table.core, "%s", corename());
    const char *better = better_core(table.core);
    if (better == NULL || getenv("OPENBLAS_CORETYPE") != NULL) {
        return;
    }
    const symbol dynamic[] = {{"gotoblas_dynamic_quit", &quit}, {"gotoblas_dynamic_init", &init}};
    if (!we_are_first || !bind_symbols(library, dynamic, 2)) {
        snprintf(table.note, sizeof table.note,
                 "this OpenBLAS does not know the processor and runs its %s kernels; start the program with "
                 "OPENBLAS_CORETYPE=%s in the environment",
                 table.core, better);
        return;
    }
    setenv("OPENBLAS_CORETYPE", better, 1);
    quit();
    init();
    unsetenv("OPENBLAS_CORETYPE");
    snprintf(table.note, sizeof table.note, "this OpenBLAS does not know the processor (it chose %s); told to run %s",
             table.core, better);
    snprintf(table.core, sizeof table.core, "%s", corename());
}

/* --- opening ---------------------------------------------------------------------------------------------------- */

/* Queries the library. Returns 0 with the reason if it cannot be used. */
static int read_build_info(const opened *library)
{
    char *(*config)(void) = NULL;
    int (*parallel)(void) = NULL;
    void (*set_num_threads)(int) = NULL;
    const symbol texts[] = {{"openblas_get_config", &config}, {"openblas_get_parallel", &parallel}};
    table.threading = TCHI_BLAS_SEQUENTIAL;
    snprintf(table.version, sizeof table.version, "of unknown version");
    if (bind_symbols(library, texts, 2)) {
        if (strstr(config(), "USE64BITINT") != NULL) {
            snprintf(failure, sizeof failure, "its integers have 64 bits, expected 32");
            return 0;
        }
        (void)sscanf(config(), "OpenBLAS %31s", table.version);
        table.threading = (tchi_blas_threading)parallel();
    }
    const symbol threads[] = {{"openblas_set_num_threads", &set_num_threads}};
    if (table.threading == TCHI_BLAS_PTHREADS && bind_symbols(library, threads, 1)) {
        set_num_threads(1);
    }
    return 1;
}

/* An OpenMP build uses the OpenMP runtime it was loaded with. If a wheel carries a different one for our loops, neither
 * runtime knows the parallel regions of the other. */
static int shares_our_runtime(const opened *library)
{
    int (*ours)(void) = omp_in_parallel;
    void *theirs = dlsym(library->handle, "omp_in_parallel");
    return memcmp(&ours, &theirs, sizeof theirs) == 0;
}

static void remark_on_threads(const opened *library, int we_are_first)
{
    if (table.threading == TCHI_BLAS_PTHREADS && !we_are_first) {
        snprintf(table.note, sizeof table.note, "others in this process use it too, and are held at one thread");
    }
    if (table.threading == TCHI_BLAS_OPENMP && !shares_our_runtime(library)) {
        snprintf(table.note, sizeof table.note,
                 "it uses another OpenMP runtime than Torchium and starts threads inside threads, which is slow; "
                 "pip install scipy-openblas32");
    }
}

/* dlerror() without its leading file name. */
static void keep_loader_answer(const char *name)
{
    const char *why = dlerror();
    size_t length = strlen(name);
    why = why != NULL ? why : "the loader does not say why";
    if (strncmp(why, name, length) == 0 && strncmp(why + length, ": ", 2) == 0) {
        why += length + 2;
        why = strstr(why, "No such file") != NULL ? NOT_THERE : why;
    }
    snprintf(failure, sizeof failure, "%s", why);
}

/* RTLD_NOLOAD tells whether the process has already loaded the library. */
static int open_library(const char *name, const char *origin)
{
    void *already = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    opened library = {dlopen(name, RTLD_LAZY | RTLD_LOCAL), ""};
    if (already != NULL) {
        dlclose(already);
    }
    if (library.handle == NULL) {
        keep_loader_answer(name);
        return 0;
    }
    if (!bind_library(&library) || !read_build_info(&library)) {
        dlclose(library.handle);
        return 0;
    }
    choose_core(&library, already == NULL);
    if (table.note[0] == '\0') {
        remark_on_threads(&library, already == NULL);
    }
    snprintf(table.library, sizeof table.library, "%s", name);
    table.origin = origin;
    return 1;
}

/* --- searching -------------------------------------------------------------------------------------------------- */

/* In a wheel our library is SITE/torchium/lib/libtorchium.so, and pip puts OpenBLAS next to the package. Elsewhere
 * nothing is searched: in a build tree or /usr/local/lib the neighbors are unrelated. */
static void find_next_to_package(char *path, size_t size)
{
    static const char anchor = 0;
    static const char package[] = "/torchium/lib";
    char folder[PATH_MAX];
    Dl_info info;
    path[0] = '\0';
    if (dladdr(&anchor, &info) == 0 || realpath(info.dli_fname, folder) == NULL) {
        return;
    }
    *strrchr(folder, '/') = '\0';
    size_t length = strlen(folder), tail = sizeof package - 1;
    if (length > tail && strcmp(folder + length - tail, package) == 0) {
        snprintf(path, size, "%.*s/%s", (int)(length - tail), folder, PIP_LIBRARY);
    }
}

typedef struct candidate {
    const char *name;
    const char *origin;
} candidate;

/* Adds "name: reason" to the list of attempts, and a note on an existing but unusable file. */
static void note_failure(const char *name, char *tried, size_t size)
{
    size_t used = strlen(tried);
    snprintf(tried + used, size - used, "%s%.200s: %.120s", used > 0 ? ", " : "", name, failure);
    if (strcmp(failure, NOT_THERE) != 0 && table.passed_over[0] == '\0') {
        snprintf(table.passed_over, sizeof table.passed_over, "%.200s was passed over: %.120s", name, failure);
    }
}

static void open_first_of(const candidate *candidates, size_t count)
{
    char tried[700] = "";
    const char *last = "";
    for (size_t i = 0; i < count; i++) {
        const char *name = candidates[i].name;
        if (name[0] == '\0' || strcmp(name, last) == 0) {
            continue;
        }
        if (open_library(name, candidates[i].origin)) {
            return;
        }
        note_failure(name, tried, sizeof tried);
        last = name;
    }
    snprintf(failure, sizeof failure,
             "no OpenBLAS was found (tried %s); install it (pip install scipy-openblas32, or on Debian and Ubuntu "
             "apt-get install libopenblas0-openmp) or give its path in TORCHIUM_BLAS",
             tried);
}

static void open_asked(const char *asked)
{
    char why[512];
    if (open_library(asked, "TORCHIUM_BLAS")) {
        return;
    }
    snprintf(why, sizeof why, "%.500s", failure);
    snprintf(failure, sizeof failure,
             "cannot use the library that TORCHIUM_BLAS names, %.300s: %s; give the path of an "
             "OpenBLAS, or unset the variable",
             asked, why);
}

static const char *origin_of(const char *path, const char *otherwise)
{
    return strstr(path, PIP_LIBRARY) != NULL ? "pip's scipy-openblas32" : otherwise;
}

static void open_first_that_works(void)
{
    const char *asked = secure_getenv("TORCHIUM_BLAS");
    if (asked != NULL && asked[0] != '\0') {
        open_asked(asked);
        return;
    }
    char neighbor[2 * PATH_MAX];
    find_next_to_package(neighbor, sizeof neighbor);
    const candidate candidates[] = {
        {neighbor, origin_of(neighbor, "")},
        {named, origin_of(named, "named by the program")},
        {TCHI_BLAS_PATH, origin_of(TCHI_BLAS_PATH, "the system's, found when Torchium was built")},
        {"libopenblas.so.0", "the system's"},
        {"libopenblas.so", "the system's"},
    };
    open_first_of(candidates, sizeof candidates / sizeof candidates[0]);
}

const tchi_blas *tchi_blas_open(const char **reason)
{
    tchi_once(&opened_once, open_first_that_works);
    if (table.library[0] == '\0') {
        if (reason != NULL) {
            *reason = failure;
        }
        return NULL;
    }
    return &table;
}

tch_status tch_set_openblas_file(const char *path)
{
    if (path == NULL || path[0] != '/' || strlen(path) >= sizeof named) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_set_openblas_file: path is '%.200s', expected an absolute one of at most %d characters",
                         path != NULL ? path : "(null)", (int)sizeof named - 1);
    }
    tchi_fork_hold();
    snprintf(named, sizeof named, "%s", path);
    tchi_fork_release();
    return TCH_OK;
}
