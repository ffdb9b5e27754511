/* The names of an older cuSOLVER, without the batched eigenvalues, for the search for the library. It says that it is
 * version 11.6.5. */
#define FUNCTION(name)                                                                                                 \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return 0;                                                                                                      \
    }

FUNCTION(cusolverDnCreate)
FUNCTION(cusolverDnDestroy)
FUNCTION(cusolverDnSetStream)
FUNCTION(cusolverDnCreateParams)
FUNCTION(cusolverDnDestroyParams)
FUNCTION(cusolverDnXsyevd_bufferSize)
FUNCTION(cusolverDnXsyevd)
FUNCTION(cusolverDnXpotrf_bufferSize)
FUNCTION(cusolverDnXpotrf)
FUNCTION(cusolverDnSpotrfBatched)
FUNCTION(cusolverDnDpotrfBatched)

int cusolverGetVersion(int *version)
{
    *version = 11605;
    return 0;
}
