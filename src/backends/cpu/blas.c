/* Finds and opens OpenBLAS. It is opened at run time rather than linked for two reasons that were both measured:
 * the OpenMP build is wanted wherever it is installed beside others (one thread pool, and no threads inside threads),
 * and an OpenBLAS older than the processor falls back to its 2004 kernels, six times slower, unless it is told before
 * its first use which kernels to run. See docs/decisions/0004-openblas.md. */
#define _GNU_SOURCE
#include "blas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cpu_features.h"

#ifndef TCHI_BLAS_PATH
#define TCHI_BLAS_PATH "" /* the library found when Torchium was configured */
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static tchi_blas table;
static char failure[1024];

typedef struct symbol {
    const char *name;
    void *slot; /* a function pointer in the table */
} symbol;

/* ISO C has no conversion from void* to a function pointer; POSIX promises that the representation fits. */
static int bind(void *library, const symbol *symbols, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *address = dlsym(library, symbols[i].name);
        if (address == NULL) {
            snprintf(failure, sizeof failure, "it has no function %s", symbols[i].name);
            return 0;
        }
        memcpy(symbols[i].slot, &address, sizeof address);
    }
    return 1;
}

static int bind_all(void *library)
{
    tchi_blas_f32 *s = &table.f32;
    tchi_blas_f64 *d = &table.f64;
    const symbol symbols[] = {
        {"cblas_sgemm", &s->gemm}, {"cblas_dgemm", &d->gemm}, {"cblas_ssyrk", &s->syrk}, {"cblas_dsyrk", &d->syrk},
        {"cblas_strsm", &s->trsm}, {"cblas_dtrsm", &d->trsm}, {"ssyevd_", &s->syevd},    {"dsyevd_", &d->syevd},
        {"spotrf_", &s->potrf},    {"dpotrf_", &d->potrf},    {"spotri_", &s->potri},    {"dpotri_", &d->potri},
        {"strtri_", &s->trtri},    {"dtrtri_", &d->trtri},
    };
    return bind(library, symbols, sizeof symbols / sizeof symbols[0]);
}

/* The kernels worth having on this processor, by OpenBLAS's names, or NULL when its own choice is as good. */
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

/* Makes a library that nobody has used yet choose its kernels again. OpenBLAS reads the name from the environment and
 * nowhere else, so the variable is set for the length of the call. */
static void choose_core(void *library, int we_are_first)
{
    char *(*corename)(void) = NULL;
    void (*quit)(void) = NULL;
    void (*init)(void) = NULL;
    const symbol symbols[] = {{"openblas_get_corename", &corename}};
    if (!bind(library, symbols, 1)) {
        return;
    }
    snprintf(table.core, sizeof table.core, "%s", corename());
    const char *better = better_core(table.core);
    if (better == NULL || getenv("OPENBLAS_CORETYPE") != NULL) {
        return;
    }
    const symbol dynamic[] = {{"gotoblas_dynamic_quit", &quit}, {"gotoblas_dynamic_init", &init}};
    if (!we_are_first || !bind(library, dynamic, 2)) {
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

static void describe(void *library)
{
    char *(*config)(void) = NULL;
    int (*parallel)(void) = NULL;
    const symbol texts[] = {{"openblas_get_config", &config}, {"openblas_get_parallel", &parallel}};
    if (bind(library, texts, 2)) {
        snprintf(table.config, sizeof table.config, "%s", config());
        table.threading = (tchi_blas_threading)parallel();
    }
    const symbol threads[] = {{"openblas_set_num_threads", &table.set_num_threads}};
    if (!bind(library, threads, 1)) {
        table.set_num_threads = NULL;
    }
}

/* RTLD_NOLOAD answers whether somebody else in the process already uses the library. */
static int open_library(const char *name)
{
    void *already = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    void *library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    if (already != NULL) {
        dlclose(already);
    }
    if (library == NULL) {
        snprintf(failure, sizeof failure, "%s", dlerror());
        return 0;
    }
    if (!bind_all(library)) {
        dlclose(library);
        return 0;
    }
    snprintf(table.library, sizeof table.library, "%s", name);
    choose_core(library, already == NULL);
    describe(library);
    return 1;
}

static void open_first_that_works(void)
{
    const char *asked = getenv("TORCHIUM_BLAS");
    if (asked != NULL && asked[0] != '\0') {
        char why[512];
        if (open_library(asked)) {
            return;
        }
        snprintf(why, sizeof why, "%.500s", failure);
        snprintf(failure, sizeof failure, "cannot use the library that TORCHIUM_BLAS names: %s", why);
        return;
    }
    const char *const names[] = {TCHI_BLAS_PATH, "libopenblas.so.0", "libopenblas.so"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (names[i][0] != '\0' && open_library(names[i])) {
            return;
        }
    }
    snprintf(failure, sizeof failure,
             "no OpenBLAS was found (tried %s, libopenblas.so.0, libopenblas.so); install it (Debian and Ubuntu: "
             "apt-get install libopenblas0-openmp) or give its path in TORCHIUM_BLAS",
             TCHI_BLAS_PATH[0] != '\0' ? TCHI_BLAS_PATH : "none from configuration");
}

const tchi_blas *tchi_blas_open(const char **reason)
{
    pthread_once(&once, open_first_that_works);
    if (table.library[0] == '\0') {
        if (reason != NULL) {
            *reason = failure;
        }
        return NULL;
    }
    return &table;
}
