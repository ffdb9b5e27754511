/* Which OpenBLAS is loaded, and the error if there is none. blas.c is compiled into this program with an invalid
 * configured path, and LD_LIBRARY_PATH has files that are not libraries, so that the system's OpenBLAS does not matter.
 * OpenBLAS is loaded once per process: every case has its own child. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torchium/device.h>

#include "backends/cpu/runtime/blas/blas.h"
#include "support/testing.h"

/* Fails in a child: says which text lacks what, and exits. */
static void expect(const char *text, const char *part)
{
    if (strstr(text, part) == NULL) {
        fprintf(stderr, "'%s' is not in: %s\n", part, text);
        _exit(1);
    }
}

static const tchi_blas *opened(void)
{
    const char *reason = "";
    const tchi_blas *blas = tchi_blas_open(&reason);
    if (blas == NULL) {
        fprintf(stderr, "not opened: %s\n", reason);
        _exit(1);
    }
    return blas;
}

static const char *refused(void)
{
    const char *reason = "";
    if (tchi_blas_open(&reason) != NULL) {
        fprintf(stderr, "opened\n");
        _exit(1);
    }
    return reason;
}

/* --- cases ------------------------------------------------------------------------------------------------------ */

static void named_one(void)
{
    tch_set_openblas_file(FAKE_OPENBLAS);
    const tchi_blas *blas = opened();
    expect(blas->library, FAKE_OPENBLAS);
    expect(blas->origin, "named by the program");
    expect(blas->version, "9.8.7");
    void *library = dlopen(FAKE_OPENBLAS, RTLD_LAZY | RTLD_NOLOAD);
    void *address = dlsym(library, "scipy_openblas_get_num_threads");
    int (*threads)(void);
    memcpy(&threads, &address, sizeof threads);
    if (blas->threading != TCHI_BLAS_PTHREADS || threads() != 1) {
        fprintf(stderr, "not held at one thread\n");
        _exit(1);
    }
}

static void variable_first(void)
{
    setenv("TORCHIUM_BLAS", FAKE_OPENBLAS, 1);
    tch_set_openblas_file("/no/such/file");
    expect(opened()->origin, "TORCHIUM_BLAS");
}

static void variable_that_leads_nowhere(void)
{
    setenv("TORCHIUM_BLAS", "/no/such/file", 1);
    tch_set_openblas_file(FAKE_OPENBLAS);
    const char *reason = refused();
    expect(reason, "TORCHIUM_BLAS names, /no/such/file: no such file");
    expect(reason, "unset the variable");
}

static void nothing_at_all(void)
{
    tch_set_openblas_file("/no/such/file");
    const char *reason = refused();
    expect(reason, "tried /no/such/file: no such file, " TCHI_BLAS_PATH ": no such file, libopenblas.so.0: ");
    expect(reason, ", libopenblas.so: ");
    expect(reason, "pip install scipy-openblas32");
    expect(reason, "TORCHIUM_BLAS");
}

/* A library of 64-bit integers would read adjacent memory as part of an argument. */
static void wide_integers(void)
{
    setenv("FAKE_OPENBLAS", "OpenBLAS 9.8.7 USE64BITINT", 1);
    tch_set_openblas_file(FAKE_OPENBLAS);
    expect(refused(), FAKE_OPENBLAS ": its integers have 64 bits, expected 32");
}

static void relative_path(void)
{
    if (tch_set_openblas_file("libopenblas.so") != TCH_ERR_INVALID_ARGUMENT ||
        tch_set_openblas_file(NULL) != TCH_ERR_INVALID_ARGUMENT) {
        _exit(1);
    }
}

static void *open_on_thread(void *argument)
{
    (void)opened();
    return argument;
}

/* A child forked while another thread loads the library finds it loaded. */
static void fork_while_it_is_opened(void)
{
    int ends[2], status = -1;
    char text[16];
    pthread_t thread;
    tch_set_openblas_file(FAKE_OPENBLAS);
    bool began = pipe(ends) == 0 && snprintf(text, sizeof text, "%d", ends[1]) > 0 &&
                 setenv("FAKE_OPENBLAS_PIPE", text, 1) == 0 &&
                 pthread_create(&thread, NULL, open_on_thread, NULL) == 0 && read(ends[0], text, 1) == 1;
    pid_t child = began ? fork() : -1;
    if (child == 0) {
        alarm(20); /* a lock held by the other thread would never be released */
        expect(opened()->version, "9.8.7");
        _exit(0);
    }
    if (child < 0 || pthread_join(thread, NULL) != 0 || waitpid(child, &status, 0) != child || status != 0) {
        fprintf(stderr, "the child ended with status %d\n", status);
        _exit(1);
    }
}

typedef struct search {
    const char *name;
    void (*body)(void);
} search;

static const search searches[] = {
    {"named_one", named_one},
    {"variable_first", variable_first},
    {"variable_that_leads_nowhere", variable_that_leads_nowhere},
    {"nothing_at_all", nothing_at_all},
    {"wide_integers", wide_integers},
    {"relative_path", relative_path},
    {"fork_while_it_is_opened", fork_while_it_is_opened},
};

static int status_of_child(void (*body)(void))
{
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        unsetenv("TORCHIUM_BLAS");
        setenv("FAKE_OPENBLAS", "OpenBLAS 9.8.7 DYNAMIC_ARCH", 1);
        body();
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

TEST(every_search_ends_as_it_should)
{
    for (size_t i = 0; i < sizeof searches / sizeof searches[0]; i++) {
        int status = status_of_child(searches[i].body);
        CHECK(status == 0, "%s: status %d", searches[i].name, status);
    }
}

TEST_MAIN(NULL, NULL)
