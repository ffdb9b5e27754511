/* cuBLAS for the emulated device: what src/backends/cuda/runtime/libraries/cublas.h declares, by plain loops,
 * column-major as cuBLAS is. Sums are kept in double, so that results are at least as exact as cuBLAS's. */
#include <stdlib.h>
#include <string.h>

#include "backends/cuda/runtime/libraries/cublas.h"
#include "cuda/halves.h"

#define EXPORT __attribute__((visibility("default")))

typedef tchi_cublas_status status;

/* --- handles ----------------------------------------------------------------------------------------------------- */

struct tchi_cublas_context {
    tchi_cublas_pointer_mode mode; /* host and device memory are one, so nothing depends on it */
};

EXPORT status cublasCreate_v2(tchi_cublas_handle *handle);
EXPORT status cublasDestroy_v2(tchi_cublas_handle handle);
EXPORT status cublasSetStream_v2(tchi_cublas_handle handle, cudaStream_t stream);
EXPORT status cublasSetWorkspace_v2(tchi_cublas_handle handle, void *workspace, size_t bytes);
EXPORT status cublasSetMathMode(tchi_cublas_handle handle, tchi_cublas_math mode);
EXPORT status cublasSetPointerMode_v2(tchi_cublas_handle handle, tchi_cublas_pointer_mode mode);
EXPORT const char *cublasGetStatusString(status s);
EXPORT status cublasGetProperty(libraryPropertyType type, int *value);

status cublasCreate_v2(tchi_cublas_handle *handle)
{
    *handle = calloc(1, sizeof **handle);
    return *handle != NULL ? 0 : 3;
}

status cublasDestroy_v2(tchi_cublas_handle handle)
{
    free(handle);
    return 0;
}

status cublasSetStream_v2(tchi_cublas_handle handle, cudaStream_t stream)
{
    (void)handle, (void)stream;
    return 0;
}

status cublasSetWorkspace_v2(tchi_cublas_handle handle, void *workspace, size_t bytes)
{
    (void)handle, (void)workspace, (void)bytes;
    return 0;
}

status cublasSetMathMode(tchi_cublas_handle handle, tchi_cublas_math mode)
{
    (void)handle, (void)mode;
    return 0;
}

status cublasSetPointerMode_v2(tchi_cublas_handle handle, tchi_cublas_pointer_mode mode)
{
    handle->mode = mode;
    return 0;
}

const char *cublasGetStatusString(status s)
{
    return s == 0 ? "success" : s == 3 ? "out of memory" : "not supported by the emulated cuBLAS";
}

status cublasGetProperty(libraryPropertyType type, int *value)
{
    *value = type == MAJOR_VERSION ? 13 : 0;
    return 0;
}

/* --- elements ---------------------------------------------------------------------------------------------------- */

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static uint16_t to_f16(float x)
{
    uint32_t sign = bits_of(x) >> 16 & 0x8000u;
    uint32_t size = bits_of(x) & 0x7FFFFFFFu;
    uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3F000000u;
    uint32_t normal = (size + 0xFFFu + (size >> 13 & 1u) - 0x38000000u) >> 13;
    uint32_t rounded = size < 0x38800000u ? small : size >= 0x477FF000u ? 0x7C00u : normal;
    return (uint16_t)(size > 0x7F800000u ? 0x7FFFu : sign | rounded);
}

static uint16_t to_bf16(float x)
{
    uint32_t bits = bits_of(x);
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static size_t size_of(cudaDataType type)
{
    return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2;
}

static double load(const void *data, cudaDataType type, int64_t i)
{
    switch (type) {
    case CUDA_R_64F:
        return ((const double *)data)[i];
    case CUDA_R_32F:
        return ((const float *)data)[i];
    case CUDA_R_16F:
        return from_f16(((const uint16_t *)data)[i]);
    default:
        return float_of((uint32_t)((const uint16_t *)data)[i] << 16);
    }
}

static void store(void *data, cudaDataType type, int64_t i, double value)
{
    switch (type) {
    case CUDA_R_64F:
        ((double *)data)[i] = value;
        break;
    case CUDA_R_32F:
        ((float *)data)[i] = (float)value;
        break;
    case CUDA_R_16F:
        ((uint16_t *)data)[i] = to_f16((float)value);
        break;
    default:
        ((uint16_t *)data)[i] = to_bf16((float)value);
    }
}

/* --- products ---------------------------------------------------------------------------------------------------- */

typedef struct matrix {
    const void *data;
    cudaDataType type;
    int64_t ld;
    tchi_cublas_operation op;
} matrix;

/* op(M) as a dense array of doubles, the contraction contiguous: rows by depth for A, columns by depth for B. */
static double *spread(const matrix *m, int64_t lines, int64_t depth, int is_left)
{
    double *out = malloc((size_t)(lines * depth + 1) * sizeof *out);
    int along_columns = (m->op == TCHI_CUBLAS_N) == is_left; /* element (line, k) is at line + k ld */
    for (int64_t i = 0; out != NULL && i < lines; i++) {
        for (int64_t k = 0; k < depth; k++) {
            out[i * depth + k] = load(m->data, m->type, along_columns ? i + k * m->ld : k + i * m->ld);
        }
    }
    return out;
}

static double dot(const double *x, const double *y, int64_t n)
{
    double sums[4] = {0.0, 0.0, 0.0, 0.0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        for (int j = 0; j < 4; j++) {
            sums[j] += x[i + j] * y[i + j];
        }
    }
    for (; i < n; i++) {
        sums[0] += x[i] * y[i];
    }
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}

typedef struct product {
    int64_t m, n, k;
    double alpha, beta;
    matrix a, b;
    void *c;
    cudaDataType c_type;
    int64_t ldc;
} product;

static status multiply(const product *p)
{
    double *a = spread(&p->a, p->m, p->k, 1);
    double *b = spread(&p->b, p->n, p->k, 0);
    int good = a != NULL && b != NULL;
    for (int64_t j = 0; good && j < p->n; j++) {
        for (int64_t i = 0; i < p->m; i++) {
            double old = p->beta == 0.0 ? 0.0 : p->beta * load(p->c, p->c_type, i + j * p->ldc);
            double sum = p->alpha == 0.0 ? 0.0 : p->alpha * dot(a + i * p->k, b + j * p->k, p->k);
            store(p->c, p->c_type, i + j * p->ldc, sum + old);
        }
    }
    free(a);
    free(b);
    return good ? 0 : 3;
}

static double scalar(const void *at, tchi_cublas_compute compute)
{
    return compute == TCHI_CUBLAS_COMPUTE_F64 ? *(const double *)at : *(const float *)at;
}

EXPORT status cublasGemmStridedBatchedEx_64(tchi_cublas_handle handle, tchi_cublas_operation trans_a,
                                            tchi_cublas_operation trans_b, int64_t m, int64_t n, int64_t k,
                                            const void *alpha, const void *a, cudaDataType a_type, int64_t lda,
                                            long long stride_a, const void *b, cudaDataType b_type, int64_t ldb,
                                            long long stride_b, const void *beta, void *c, cudaDataType c_type,
                                            int64_t ldc, long long stride_c, int64_t batch, tchi_cublas_compute compute,
                                            tchi_cublas_algorithm algorithm);

status cublasGemmStridedBatchedEx_64(tchi_cublas_handle handle, tchi_cublas_operation trans_a,
                                     tchi_cublas_operation trans_b, int64_t m, int64_t n, int64_t k, const void *alpha,
                                     const void *a, cudaDataType a_type, int64_t lda, long long stride_a, const void *b,
                                     cudaDataType b_type, int64_t ldb, long long stride_b, const void *beta, void *c,
                                     cudaDataType c_type, int64_t ldc, long long stride_c, int64_t batch,
                                     tchi_cublas_compute compute, tchi_cublas_algorithm algorithm)
{
    product p = {m,
                 n,
                 k,
                 scalar(alpha, compute),
                 scalar(beta, compute),
                 {NULL, a_type, lda, trans_a},
                 {NULL, b_type, ldb, trans_b},
                 NULL,
                 c_type,
                 ldc};
    status result = 0;
    (void)handle, (void)algorithm;
    for (int64_t i = 0; i < batch && result == 0; i++) {
        p.a.data = (const char *)a + (size_t)(i * stride_a) * size_of(a_type);
        p.b.data = (const char *)b + (size_t)(i * stride_b) * size_of(b_type);
        p.c = (char *)c + (size_t)(i * stride_c) * size_of(c_type);
        result = multiply(&p);
    }
    return result;
}

EXPORT status cublasGemmBatchedEx_64(tchi_cublas_handle handle, tchi_cublas_operation trans_a,
                                     tchi_cublas_operation trans_b, int64_t m, int64_t n, int64_t k, const void *alpha,
                                     const void *const a[], cudaDataType a_type, int64_t lda, const void *const b[],
                                     cudaDataType b_type, int64_t ldb, const void *beta, void *const c[],
                                     cudaDataType c_type, int64_t ldc, int64_t batch, tchi_cublas_compute compute,
                                     tchi_cublas_algorithm algorithm);

status cublasGemmBatchedEx_64(tchi_cublas_handle handle, tchi_cublas_operation trans_a, tchi_cublas_operation trans_b,
                              int64_t m, int64_t n, int64_t k, const void *alpha, const void *const a[],
                              cudaDataType a_type, int64_t lda, const void *const b[], cudaDataType b_type, int64_t ldb,
                              const void *beta, void *const c[], cudaDataType c_type, int64_t ldc, int64_t batch,
                              tchi_cublas_compute compute, tchi_cublas_algorithm algorithm)
{
    status result = 0;
    for (int64_t i = 0; i < batch && result == 0; i++) {
        result = cublasGemmStridedBatchedEx_64(handle, trans_a, trans_b, m, n, k, alpha, a[i], a_type, lda, 0, b[i],
                                               b_type, ldb, 0, beta, c[i], c_type, ldc, 0, 1, compute, algorithm);
    }
    return result;
}

/* --- triangular solves ------------------------------------------------------------------------------------------- */

typedef struct triangle {
    tchi_cublas_side side;
    tchi_cublas_fill uplo;
    tchi_cublas_operation trans;
    tchi_cublas_diagonal diag;
    int64_t m, n;
    double alpha;
    cudaDataType type;
    int64_t lda, ldb;
} triangle;

/* Element (i, j) of the matrix that is solved with from the left: op(A), or op(A)' for a solve from the right. */
static double triangle_at(const triangle *t, const void *a, int64_t i, int64_t j)
{
    int turned = (t->trans == TCHI_CUBLAS_T) != (t->side == TCHI_CUBLAS_RIGHT);
    return load(a, t->type, turned ? j + i * t->lda : i + j * t->lda);
}

/* X takes B's place. From the right, X op(A) = B is op(A)' X' = B'. */
static void solve(const triangle *t, const void *a, void *b)
{
    int right = t->side == TCHI_CUBLAS_RIGHT;
    int turned = (t->trans == TCHI_CUBLAS_T) != right;
    int lower = (t->uplo == TCHI_CUBLAS_LOWER) != turned;
    int64_t size = right ? t->n : t->m;
    int64_t lines = right ? t->m : t->n;
    for (int64_t line = 0; line < lines; line++) {
        for (int64_t step = 0; step < size; step++) {
            int64_t i = lower ? step : size - 1 - step;
            int64_t at = right ? line + i * t->ldb : i + line * t->ldb;
            double sum = t->alpha * load(b, t->type, at);
            for (int64_t j = lower ? 0 : i + 1; j < (lower ? i : size); j++) {
                sum -= triangle_at(t, a, i, j) * load(b, t->type, right ? line + j * t->ldb : j + line * t->ldb);
            }
            store(b, t->type, at, t->diag == TCHI_CUBLAS_UNIT ? sum : sum / triangle_at(t, a, i, i));
        }
    }
}

#define SOLVES(real, wide, name)                                                                                       \
    EXPORT status cublas##name##trsm_v2_64(tchi_cublas_handle handle, tchi_cublas_side side, tchi_cublas_fill uplo,    \
                                           tchi_cublas_operation trans, tchi_cublas_diagonal diag, int64_t m,          \
                                           int64_t n, const real *alpha, const real *a, int64_t lda, real *b,          \
                                           int64_t ldb);                                                               \
    status cublas##name##trsm_v2_64(tchi_cublas_handle handle, tchi_cublas_side side, tchi_cublas_fill uplo,           \
                                    tchi_cublas_operation trans, tchi_cublas_diagonal diag, int64_t m, int64_t n,      \
                                    const real *alpha, const real *a, int64_t lda, real *b, int64_t ldb)               \
    {                                                                                                                  \
        triangle t = {side, uplo, trans, diag, m, n, *alpha, wide, lda, ldb};                                          \
        (void)handle;                                                                                                  \
        solve(&t, a, b);                                                                                               \
        return 0;                                                                                                      \
    }                                                                                                                  \
    EXPORT status cublas##name##trsmBatched_64(                                                                        \
        tchi_cublas_handle handle, tchi_cublas_side side, tchi_cublas_fill uplo, tchi_cublas_operation trans,          \
        tchi_cublas_diagonal diag, int64_t m, int64_t n, const real *alpha, const real *const a[], int64_t lda,        \
        real *const b[], int64_t ldb, int64_t batch);                                                                  \
    status cublas##name##trsmBatched_64(tchi_cublas_handle handle, tchi_cublas_side side, tchi_cublas_fill uplo,       \
                                        tchi_cublas_operation trans, tchi_cublas_diagonal diag, int64_t m, int64_t n,  \
                                        const real *alpha, const real *const a[], int64_t lda, real *const b[],        \
                                        int64_t ldb, int64_t batch)                                                    \
    {                                                                                                                  \
        triangle t = {side, uplo, trans, diag, m, n, *alpha, wide, lda, ldb};                                          \
        (void)handle;                                                                                                  \
        for (int64_t i = 0; i < batch; i++) {                                                                          \
            solve(&t, a[i], b[i]);                                                                                     \
        }                                                                                                              \
        return 0;                                                                                                      \
    }
SOLVES(float, CUDA_R_32F, S)
SOLVES(double, CUDA_R_64F, D)
