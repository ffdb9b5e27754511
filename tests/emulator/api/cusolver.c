/* cuSOLVER for the emulated device: eigenvalues by the tests' solver and Cholesky factors, column-major, computed in
 * double. */
#include "backends/cuda/runtime/libraries/cusolver.h"

#include "elements.h"
#include "support/linalg/reference.h"
#include "support/testing.h"

typedef tchi_cusolver_status status;

/* Exported with the type of its entry in the table of looked-up functions. */
#define EXPORT(member, name)                                                                                           \
    __attribute__((visibility("default"))) __typeof__(*((const tchi_cusolver *)NULL)->member) name

EXPORT(create, cusolverDnCreate);
EXPORT(destroy, cusolverDnDestroy);
EXPORT(set_stream, cusolverDnSetStream);
EXPORT(create_params, cusolverDnCreateParams);
EXPORT(destroy_params, cusolverDnDestroyParams);
EXPORT(xsyevd_buffer_size, cusolverDnXsyevd_bufferSize);
EXPORT(xsyevd, cusolverDnXsyevd);
EXPORT(xsyev_batched_buffer_size, cusolverDnXsyevBatched_bufferSize);
EXPORT(xsyev_batched, cusolverDnXsyevBatched);
EXPORT(xpotrf_buffer_size, cusolverDnXpotrf_bufferSize);
EXPORT(xpotrf, cusolverDnXpotrf);
EXPORT(potrf_batched[0], cusolverDnSpotrfBatched);
EXPORT(potrf_batched[1], cusolverDnDpotrfBatched);
__attribute__((visibility("default"))) status cusolverGetVersion(int *version);

struct tchi_cusolver_context {
    cudaStream_t stream;
};

status cusolverDnCreate(tchi_cusolver_handle *handle)
{
    *handle = calloc(1, sizeof **handle);
    return *handle != NULL ? 0 : 2;
}

status cusolverDnDestroy(tchi_cusolver_handle handle)
{
    free(handle);
    return 0;
}

status cusolverDnSetStream(tchi_cusolver_handle handle, cudaStream_t stream)
{
    handle->stream = stream;
    return 0;
}

status cusolverDnCreateParams(tchi_cusolver_params *params)
{
    *params = calloc(1, 16);
    return *params != NULL ? 0 : 2;
}

status cusolverDnDestroyParams(tchi_cusolver_params params)
{
    free(params);
    return 0;
}

status cusolverGetVersion(int *version)
{
    *version = 12000;
    return 0;
}

/* --- eigenvalues ------------------------------------------------------------------------------------------------- */

/* Required by the solver of support/linalg/reference.c. */
void *test_alloc(size_t bytes)
{
    void *memory = malloc(bytes > 0 ? bytes : 1);
    if (memory == NULL) {
        abort();
    }
    return memory;
}

void test_drop(void *memory)
{
    free(memory);
}

_Noreturn void test_fail(const char *file, int line, const char *format, ...)
{
    fprintf(stderr, "%s:%d: %s\n", file, line, format);
    abort();
}

static void read_triangle(double *a, const void *from, cudaDataType type, int64_t n, int64_t ld, tchi_cublas_fill uplo)
{
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < n; i++) {
            int inside = uplo == TCHI_CUBLAS_LOWER ? i >= j : i <= j;
            a[i * n + j] = load_element(from, type, inside ? i + j * ld : j + i * ld);
        }
    }
}

static int is_finite(const double *a, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(a[i])) {
            return 0;
        }
    }
    return 1;
}

typedef struct eigenproblem {
    tchi_cusolver_job job;
    tchi_cublas_fill uplo;
    cudaDataType type;
    int64_t n, ld, batch;
    void *a, *w;
    int *info;
} eigenproblem;

/* One matrix; info 1 if it is not finite. Eigenvectors are the columns of v, and of a. */
static void decompose_one(const eigenproblem *p, void *a, void *w, int *info)
{
    int64_t n = p->n;
    double *copy = test_alloc((size_t)(2 * n * n + n) * sizeof *copy);
    double *v = copy + n * n;
    double *values = v + n * n;
    read_triangle(copy, a, p->type, n, p->ld, p->uplo);
    *info = is_finite(copy, n * n) ? 0 : 1;
    if (*info == 0) {
        ref_eigh(n, copy, values, v);
    }
    for (int64_t j = 0; j < n && *info == 0; j++) {
        store_element(w, p->type, j, values[j]);
        for (int64_t i = 0; i < n && p->job == TCHI_CUSOLVER_VECTORS; i++) {
            store_element(a, p->type, i + j * p->ld, v[i * n + j]);
        }
    }
    test_drop(copy);
}

static void decompose_all(void *data)
{
    const eigenproblem *p = data;
    for (int64_t i = 0; i < p->batch; i++) {
        decompose_one(p, (char *)p->a + (size_t)(i * p->ld * p->n) * element_bytes(p->type),
                      (char *)p->w + (size_t)(i * p->n) * element_bytes(p->type), p->info + i);
    }
}

status cusolverDnXsyevd_bufferSize(tchi_cusolver_handle handle, tchi_cusolver_params params, tchi_cusolver_job job,
                                   tchi_cublas_fill uplo, int64_t n, cudaDataType a_type, const void *a, int64_t lda,
                                   cudaDataType w_type, const void *w, cudaDataType compute, size_t *device_bytes,
                                   size_t *host_bytes)
{
    *device_bytes = 64;
    *host_bytes = 64;
    return 0;
}

status cusolverDnXsyevd(tchi_cusolver_handle handle, tchi_cusolver_params params, tchi_cusolver_job job,
                        tchi_cublas_fill uplo, int64_t n, cudaDataType a_type, void *a, int64_t lda,
                        cudaDataType w_type, void *w, cudaDataType compute, void *device_buffer, size_t device_bytes,
                        void *host_buffer, size_t host_bytes, int *info)
{
    return cusolverDnXsyevBatched(handle, params, job, uplo, n, a_type, a, lda, w_type, w, compute, device_buffer,
                                  device_bytes, host_buffer, host_bytes, info, 1);
}

status cusolverDnXsyevBatched_bufferSize(tchi_cusolver_handle handle, tchi_cusolver_params params,
                                         tchi_cusolver_job job, tchi_cublas_fill uplo, int64_t n, cudaDataType a_type,
                                         const void *a, int64_t lda, cudaDataType w_type, const void *w,
                                         cudaDataType compute, size_t *device_bytes, size_t *host_bytes, int64_t batch)
{
    return cusolverDnXsyevd_bufferSize(handle, params, job, uplo, n, a_type, a, lda, w_type, w, compute, device_bytes,
                                       host_bytes);
}

status cusolverDnXsyevBatched(tchi_cusolver_handle handle, tchi_cusolver_params params, tchi_cusolver_job job,
                              tchi_cublas_fill uplo, int64_t n, cudaDataType a_type, void *a, int64_t lda,
                              cudaDataType w_type, void *w, cudaDataType compute, void *device_buffer,
                              size_t device_bytes, void *host_buffer, size_t host_bytes, int *info, int64_t batch)
{
    eigenproblem p = {job, uplo, a_type, n, lda, batch, a, w, info};
    emulator_submit(handle->stream, decompose_all, &p, sizeof p);
    return 0;
}

/* --- Cholesky factors -------------------------------------------------------------------------------------------- */

/* Element (i, j), i >= j, of the factor L as stored: L itself below the diagonal, or its transpose above. */
static int64_t factor_place(tchi_cublas_fill uplo, int64_t i, int64_t j, int64_t ld)
{
    return uplo == TCHI_CUBLAS_LOWER ? i + j * ld : j + i * ld;
}

/* 0, or the order of the first leading minor that is not positive. */
static int factor(tchi_cublas_fill uplo, int64_t n, cudaDataType type, void *a, int64_t ld)
{
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = j; i < n; i++) {
            double sum = load_element(a, type, factor_place(uplo, i, j, ld));
            for (int64_t k = 0; k < j; k++) {
                sum -= load_element(a, type, factor_place(uplo, i, k, ld)) *
                       load_element(a, type, factor_place(uplo, j, k, ld));
            }
            if (i == j && !(sum > 0.0)) {
                return (int)j + 1;
            }
            double pivot = i == j ? sqrt(sum) : sum / load_element(a, type, factor_place(uplo, j, j, ld));
            store_element(a, type, factor_place(uplo, i, j, ld), pivot);
        }
    }
    return 0;
}

/* One matrix, or a device array of pointers. */
typedef struct factors {
    tchi_cublas_fill uplo;
    cudaDataType type;
    int64_t n, ld, batch;
    void *a, *const *list;
    int *info;
} factors;

static void factor_all(void *data)
{
    const factors *f = data;
    for (int64_t i = 0; i < f->batch; i++) {
        f->info[i] = factor(f->uplo, f->n, f->type, f->list != NULL ? f->list[i] : f->a, f->ld);
    }
}

status cusolverDnXpotrf_bufferSize(tchi_cusolver_handle handle, tchi_cusolver_params params, tchi_cublas_fill uplo,
                                   int64_t n, cudaDataType a_type, const void *a, int64_t lda, cudaDataType compute,
                                   size_t *device_bytes, size_t *host_bytes)
{
    *device_bytes = 64;
    *host_bytes = 64;
    return 0;
}

status cusolverDnXpotrf(tchi_cusolver_handle handle, tchi_cusolver_params params, tchi_cublas_fill uplo, int64_t n,
                        cudaDataType a_type, void *a, int64_t lda, cudaDataType compute, void *device_buffer,
                        size_t device_bytes, void *host_buffer, size_t host_bytes, int *info)
{
    factors f = {uplo, a_type, n, lda, 1, a, NULL, info};
    emulator_submit(handle->stream, factor_all, &f, sizeof f);
    return 0;
}

status cusolverDnSpotrfBatched(tchi_cusolver_handle handle, tchi_cublas_fill uplo, int n, void *a[], int lda, int *info,
                               int batch)
{
    factors f = {uplo, CUDA_R_32F, n, lda, batch, NULL, a, info};
    emulator_submit(handle->stream, factor_all, &f, sizeof f);
    return 0;
}

status cusolverDnDpotrfBatched(tchi_cusolver_handle handle, tchi_cublas_fill uplo, int n, void *a[], int lda, int *info,
                               int batch)
{
    factors f = {uplo, CUDA_R_64F, n, lda, batch, NULL, a, info};
    emulator_submit(handle->stream, factor_all, &f, sizeof f);
    return 0;
}
