/* The names of an OpenBLAS from PyPI without the arithmetic, for the search for the library. It has threads of its own,
 * and says of itself what FAKE_OPENBLAS in the environment says. */
#include <stdlib.h>

#define FUNCTION(name)                                                                                                 \
    int name(void);                                                                                                    \
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
FUNCTION(scipy_spotri_)
FUNCTION(scipy_dpotri_)
FUNCTION(scipy_strtri_)
FUNCTION(scipy_dtrtri_)

static int threads = 8;

const char *scipy_openblas_get_config(void);
int scipy_openblas_get_parallel(void);
int scipy_openblas_get_num_threads(void);
void scipy_openblas_set_num_threads(int count);

const char *scipy_openblas_get_config(void)
{
    return getenv("FAKE_OPENBLAS");
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
