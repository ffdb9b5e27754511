/* An older cuSOLVER, version 11.6.5, without batched eigenvalues, for tests of the library search. */
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
