/* The names of cuBLAS without the arithmetic, for the search for the library. It says that it is version 13.7.9. */
#define FUNCTION(name)                                                                                                 \
    int name(void);                                                                                                    \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return 0;                                                                                                      \
    }

FUNCTION(cublasDestroy_v2)
FUNCTION(cublasSetStream_v2)
FUNCTION(cublasSetWorkspace_v2)
FUNCTION(cublasSetMathMode)
FUNCTION(cublasSetPointerMode_v2)
FUNCTION(cublasGetStatusString)
FUNCTION(cublasGemmStridedBatchedEx_64)
FUNCTION(cublasGemmBatchedEx_64)
FUNCTION(cublasStrsm_v2_64)
FUNCTION(cublasDtrsm_v2_64)
FUNCTION(cublasStrsmBatched_64)
FUNCTION(cublasDtrsmBatched_64)

int cublasCreate_v2(const void **handle);

int cublasCreate_v2(const void **handle)
{
    static const char somewhere;
    *handle = &somewhere;
    return 0;
}

int cublasGetProperty(int type, int *value);

int cublasGetProperty(int type, int *value)
{
    static const int version[] = {13, 7, 9};
    *value = version[type];
    return 0;
}
