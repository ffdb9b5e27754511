/* The functions of cuSOLVER's dense part in use, declared here and looked up at run time like cuBLAS's (see
 * libraries.c) by the first decomposition: without cuSOLVER everything else works. Matrices are column-major; types and
 * fills are cuBLAS's. */
#ifndef TCHI_CUDA_CUSOLVER_H
#define TCHI_CUDA_CUSOLVER_H

#include <cuda_runtime_api.h>
#include <library_types.h> /* cudaDataType */
#include <stddef.h>
#include <stdint.h>

#include <torchium/export.h>
#include <torchium/status.h>

#include "cublas.h"

typedef struct tchi_cusolver_context *tchi_cusolver_handle;
typedef struct tchi_cusolver_parameters *tchi_cusolver_params;

typedef int tchi_cusolver_status; /* 0 is success */

typedef enum tchi_cusolver_job { TCHI_CUSOLVER_VALUES = 0, TCHI_CUSOLVER_VECTORS = 1 } tchi_cusolver_job;

/* Fields are cuSOLVER's names without the prefix cusolverDn. Calls with a pair of buffers need at least the bytes of
 * their _buffer_size; `info` is on the device, one int per matrix: 0, or LAPACK's failure code. */
typedef struct tchi_cusolver {
    tchi_cusolver_status (*create)(tchi_cusolver_handle *handle);
    tchi_cusolver_status (*destroy)(tchi_cusolver_handle handle);
    tchi_cusolver_status (*set_stream)(tchi_cusolver_handle handle, cudaStream_t stream);
    tchi_cusolver_status (*create_params)(tchi_cusolver_params *params);
    tchi_cusolver_status (*destroy_params)(tchi_cusolver_params params);

    /* Eigenvalues, ascending, in w, and with TCHI_CUSOLVER_VECTORS eigenvectors in the columns of a. */
    tchi_cusolver_status (*xsyevd_buffer_size)(tchi_cusolver_handle handle, tchi_cusolver_params params,
                                               tchi_cusolver_job job, tchi_cublas_fill uplo, int64_t n,
                                               cudaDataType a_type, const void *a, int64_t lda, cudaDataType w_type,
                                               const void *w, cudaDataType compute, size_t *device_bytes,
                                               size_t *host_bytes);
    tchi_cusolver_status (*xsyevd)(tchi_cusolver_handle handle, tchi_cusolver_params params, tchi_cusolver_job job,
                                   tchi_cublas_fill uplo, int64_t n, cudaDataType a_type, void *a, int64_t lda,
                                   cudaDataType w_type, void *w, cudaDataType compute, void *device_buffer,
                                   size_t device_bytes, void *host_buffer, size_t host_bytes, int *info);
    /* Batched: matrix i at a + i * lda * n, its values at w + i * n. Both are NULL if cuSOLVER is too old. */
    tchi_cusolver_status (*xsyev_batched_buffer_size)(tchi_cusolver_handle handle, tchi_cusolver_params params,
                                                      tchi_cusolver_job job, tchi_cublas_fill uplo, int64_t n,
                                                      cudaDataType a_type, const void *a, int64_t lda,
                                                      cudaDataType w_type, const void *w, cudaDataType compute,
                                                      size_t *device_bytes, size_t *host_bytes, int64_t batch);
    tchi_cusolver_status (*xsyev_batched)(tchi_cusolver_handle handle, tchi_cusolver_params params,
                                          tchi_cusolver_job job, tchi_cublas_fill uplo, int64_t n, cudaDataType a_type,
                                          void *a, int64_t lda, cudaDataType w_type, void *w, cudaDataType compute,
                                          void *device_buffer, size_t device_bytes, void *host_buffer,
                                          size_t host_bytes, int *info, int64_t batch);

    /* Cholesky factors in place of the given triangle; the other is unchanged. */
    tchi_cusolver_status (*xpotrf_buffer_size)(tchi_cusolver_handle handle, tchi_cusolver_params params,
                                               tchi_cublas_fill uplo, int64_t n, cudaDataType a_type, const void *a,
                                               int64_t lda, cudaDataType compute, size_t *device_bytes,
                                               size_t *host_bytes);
    tchi_cusolver_status (*xpotrf)(tchi_cusolver_handle handle, tchi_cusolver_params params, tchi_cublas_fill uplo,
                                   int64_t n, cudaDataType a_type, void *a, int64_t lda, cudaDataType compute,
                                   void *device_buffer, size_t device_bytes, void *host_buffer, size_t host_bytes,
                                   int *info);
    /* For device arrays of pointers; [0] of float32, [1] of float64. */
    tchi_cusolver_status (*potrf_batched[2])(tchi_cusolver_handle handle, tchi_cublas_fill uplo, int n, void *a[],
                                             int lda, int *info, int batch);

    int version;       /* major * 1000 + minor * 100 + patch: 11701 is 11.7.1 */
    char library[512]; /* the file that was opened */
} tchi_cusolver;

TCH_BEGIN_DECLS

/* The functions, looked up once; NULL with *reason (which may be NULL) set if there is no cuSOLVER. Thread-safe. */
const tchi_cusolver *tchi_cusolver_open(const char **reason);

/* TCH_OK, or a status with the message "what: cuSOLVER's text". */
tch_status tchi_cusolver_check(tchi_cusolver_status status, const char *what);

#define TCHI_CUSOLVER_TRY(call, what) TCHI_TRY(tchi_cusolver_check((call), (what)))

TCH_END_DECLS

#endif
