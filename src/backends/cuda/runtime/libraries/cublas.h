/* The cuBLAS functions and enumerations in use, declared here: the library is opened at run time (see libraries.c), so
 * that building needs none of its headers and a process shares the cuBLAS of PyTorch. Names must match the binary
 * interface of cuBLAS 12 and 13. cuBLAS is column-major. */
#ifndef TCHI_CUDA_CUBLAS_H
#define TCHI_CUDA_CUBLAS_H

#include <cuda_runtime_api.h>
#include <library_types.h> /* cudaDataType */
#include <stddef.h>
#include <stdint.h>

#include <torchium/export.h>
#include <torchium/status.h>

typedef struct tchi_cublas_context *tchi_cublas_handle;

typedef int tchi_cublas_status; /* 0 is success */

typedef enum tchi_cublas_operation { TCHI_CUBLAS_N = 0, TCHI_CUBLAS_T = 1 } tchi_cublas_operation;
typedef enum tchi_cublas_side { TCHI_CUBLAS_LEFT = 0, TCHI_CUBLAS_RIGHT = 1 } tchi_cublas_side;
typedef enum tchi_cublas_fill { TCHI_CUBLAS_LOWER = 0, TCHI_CUBLAS_UPPER = 1 } tchi_cublas_fill;
typedef enum tchi_cublas_diagonal { TCHI_CUBLAS_NON_UNIT = 0, TCHI_CUBLAS_UNIT = 1 } tchi_cublas_diagonal;
typedef enum tchi_cublas_pointer_mode {
    TCHI_CUBLAS_SCALARS_ON_HOST = 0,
    TCHI_CUBLAS_SCALARS_ON_DEVICE = 1
} tchi_cublas_pointer_mode;
typedef enum tchi_cublas_math {
    TCHI_CUBLAS_MATH_DEFAULT = 0,         /* float32 products in float32, never in TF32 */
    TCHI_CUBLAS_MATH_FULL_REDUCTIONS = 16 /* sums of half-precision products are never rounded to half in between */
} tchi_cublas_math;
/* The type in which products are accumulated; alpha and beta are of the same. */
typedef enum tchi_cublas_compute {
    TCHI_CUBLAS_COMPUTE_F32 = 68,
    TCHI_CUBLAS_COMPUTE_F64 = 70,
    TCHI_CUBLAS_COMPUTE_TF32 = 77 /* float32 operands may be rounded to TF32; on GPUs without it, the same as F32 */
} tchi_cublas_compute;
typedef enum tchi_cublas_algorithm { TCHI_CUBLAS_ALGORITHM_DEFAULT = -1 } tchi_cublas_algorithm;

/* Fields are cuBLAS's names without the prefix; sizes are 64-bit throughout. */
typedef struct tchi_cublas {
    tchi_cublas_status (*create)(tchi_cublas_handle *handle);
    tchi_cublas_status (*destroy)(tchi_cublas_handle handle);
    /* Also resets the workspace: set it again afterwards. */
    tchi_cublas_status (*set_stream)(tchi_cublas_handle handle, cudaStream_t stream);
    tchi_cublas_status (*set_workspace)(tchi_cublas_handle handle, void *workspace, size_t bytes);
    tchi_cublas_status (*set_math_mode)(tchi_cublas_handle handle, tchi_cublas_math mode);
    tchi_cublas_status (*set_pointer_mode)(tchi_cublas_handle handle, tchi_cublas_pointer_mode mode);
    const char *(*get_status_string)(tchi_cublas_status status);

    /* C = alpha op(A) op(B) + beta C, op(A) m by k, op(B) k by n; strides in elements. */
    tchi_cublas_status (*gemm_strided_batched_ex)(tchi_cublas_handle handle, tchi_cublas_operation trans_a,
                                                  tchi_cublas_operation trans_b, int64_t m, int64_t n, int64_t k,
                                                  const void *alpha, const void *a, cudaDataType a_type, int64_t lda,
                                                  long long stride_a, const void *b, cudaDataType b_type, int64_t ldb,
                                                  long long stride_b, const void *beta, void *c, cudaDataType c_type,
                                                  int64_t ldc, long long stride_c, int64_t batch,
                                                  tchi_cublas_compute compute, tchi_cublas_algorithm algorithm);
    /* op(A) X = alpha B (left) or X op(A) = alpha B (right), A triangular; X, m by n, overwrites B. [0] is for float32,
     * [1] for float64; batched ones take device arrays of pointers. */
    tchi_cublas_status (*trsm[2])(tchi_cublas_handle handle, tchi_cublas_side side, tchi_cublas_fill uplo,
                                  tchi_cublas_operation trans, tchi_cublas_diagonal diag, int64_t m, int64_t n,
                                  const void *alpha, const void *a, int64_t lda, void *b, int64_t ldb);
    tchi_cublas_status (*trsm_batched[2])(tchi_cublas_handle handle, tchi_cublas_side side, tchi_cublas_fill uplo,
                                          tchi_cublas_operation trans, tchi_cublas_diagonal diag, int64_t m, int64_t n,
                                          const void *alpha, void *const a[], int64_t lda, void *const b[], int64_t ldb,
                                          int64_t batch);

    int version;       /* major * 10000 + minor * 100 + patch */
    char library[512]; /* the file that was opened */
} tchi_cublas;

TCH_BEGIN_DECLS

/* The functions, looked up once; NULL with *reason (which may be NULL) set if there is no cuBLAS. Thread-safe. */
const tchi_cublas *tchi_cublas_open(const char **reason);

/* TCH_OK, or a status with the message "what: cuBLAS's text". */
tch_status tchi_cublas_check(tchi_cublas_status status, const char *what);

#define TCHI_CUBLAS_TRY(call, what) TCHI_TRY(tchi_cublas_check((call), (what)))

TCH_END_DECLS

#endif
