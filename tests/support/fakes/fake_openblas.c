/* PyPI's OpenBLAS without the arithmetic, for tests of the library search. It has its own threads, and reports the
 * configuration string FAKE_OPENBLAS of the environment once initialized. With FAKE_OPENBLAS_PIPE, a file descriptor,
 * it writes a byte there when initialization begins, which then takes 0.2 seconds. */
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define FUNCTION(name)                                                                                                 \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return 0;                                                                                                      \
    }

FUNCTION(scipy_cblas_sgemm)
FUNCTION(scipy_cblas_dgemm)
FUNCTION(scipy_cblas_ssyrk)
FUNCTION(scipy_cblas_dsyrk)
FUNCTION(scipy_cblas_strsm)
FUNCTION(scipy_cblas_dtrsm)
FUNCTION(scipy_ssyevd_)
FUNCTION(scipy_dsyevd_)
FUNCTION(scipy_spotrf_)
FUNCTION(scipy_dpotrf_)
FUNCTION(scipy_strtri_)
FUNCTION(scipy_dtrtri_)

static int threads = 8;

static const char *config = "half initialized";

__attribute__((constructor)) static void initialize(void)
{
    const char *file = getenv("FAKE_OPENBLAS_PIPE");
    if (file != NULL && write((int)strtol(file, NULL, 10), "", 1) == 1) {
        nanosleep(&(struct timespec){0, 200000000}, NULL);
    }
    config = getenv("FAKE_OPENBLAS");
}

const char *scipy_openblas_get_config(void)
{
    return config;
}

int scipy_openblas_get_parallel(void)
{
    return 1;
}

int scipy_openblas_get_num_threads(void)
{
    return threads;
}

void scipy_openblas_set_num_threads(int count)
{
    threads = count;
}
