/* cuSOLVER for the emulated device: eigenvalues by Jacobi's rotations, which are as exact as any, and Cholesky factors,
 * in double whatever the matrices are, column-major. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cuda/runtime/libraries/cusolver.h"

#include "elements.h"

typedef tchi_cusolver_status status;

/* Exported as the type of its place in the table of functions that are looked up. */
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
EXPORT(spotrf_batched, cusolverDnSpotrfBatched);
EXPORT(dpotrf_batched, cusolverDnDpotrfBatched);
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

/* What a rotation that makes a[p][q] zero is: Golub and Van Loan, Matrix Computations, section 8.5. */
static void rotation(double pp, double pq, double qq, double *c, double *s)
{
    double tau = (qq - pp) / (2.0 * pq);
    double t = tau >= 0.0 ? 1.0 / (tau + sqrt(1.0 + tau * tau)) : -1.0 / (-tau + sqrt(1.0 + tau * tau));
    *c = 1.0 / sqrt(1.0 + t * t);
    *s = t * *c;
}

/* Two rows of n numbers: x = c x - s y, y = s x + c y. */
static void rotate(double *x, double *y, int64_t n, double c, double s)
{
    for (int64_t i = 0; i < n; i++) {
        double left = x[i];
        double right = y[i];
        x[i] = c * left - s * right;
        y[i] = s * left + c * right;
    }
}

static void annihilate(double *a, double *v, int64_t n, int64_t p, int64_t q)
{
    double c;
    double s;
    rotation(a[p * n + p], a[p * n + q], a[q * n + q], &c, &s);
    rotate(a + p * n, a + q * n, n, c, s);
    for (int64_t i = 0; i < n; i++) {
        double left = a[i * n + p];
        double right = a[i * n + q];
        a[i * n + p] = c * left - s * right;
        a[i * n + q] = s * left + c * right;
    }
    a[p * n + q] = a[q * n + p] = 0.0;
    rotate(v + p * n, v + q * n, n, c, s);
}

/* One sweep over all pairs; whether any was worth a rotation. */
static int sweep(double *a, double *v, int64_t n, double least)
{
    int rotated = 0;
    for (int64_t p = 0; p < n; p++) {
        for (int64_t q = p + 1; q < n; q++) {
            double size = sqrt(fabs(a[p * n + p])) * sqrt(fabs(a[q * n + q]));
            double off = fabs(a[p * n + q]);
            if (off > least && off > 1e-17 * size) {
                annihilate(a, v, n, p, q);
                rotated = 1;
            }
        }
    }
    return rotated;
}

static double norm_of(const double *a, int64_t count)
{
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
        sum += a[i] * a[i];
    }
    return sqrt(sum);
}

typedef struct eigenpair {
    double value;
    int64_t row;
} eigenpair;

static int compare(const void *x, const void *y)
{
    double left = ((const eigenpair *)x)->value;
    double right = ((const eigenpair *)y)->value;
    return (left > right) - (left < right);
}

/* The rows of v are the vectors. */
static void diagonalize(double *a, double *v, int64_t n)
{
    double least = norm_of(a, n * n) * 1e-17;
    for (int64_t i = 0; i < n * n; i++) {
        v[i] = i % (n + 1) == 0 ? 1.0 : 0.0;
    }
    for (int sweeps = 0; sweeps < 30 && sweep(a, v, n, least); sweeps++) {
    }
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

static void write_pairs(const eigenpair *order, const double *v, void *a, void *w, cudaDataType type, int64_t n,
                        int64_t ld, tchi_cusolver_job job)
{
    for (int64_t j = 0; j < n; j++) {
        store_element(w, type, j, order[j].value);
        for (int64_t i = 0; i < n && job == TCHI_CUSOLVER_VECTORS; i++) {
            store_element(a, type, i + j * ld, v[order[j].row * n + i]);
        }
    }
}

typedef struct eigenproblem {
    tchi_cusolver_job job;
    tchi_cublas_fill uplo;
    cudaDataType type;
    int64_t n, ld, batch;
    void *a, *w;
    int *info;
} eigenproblem;

/* One matrix; info 1 where its numbers are not finite. */
static void decompose_one(const eigenproblem *p, void *a, void *w, int *info)
{
    int64_t n = p->n;
    size_t count = (size_t)(n * n + 1);
    double *copy = malloc(count * sizeof *copy);
    double *v = malloc(count * sizeof *v);
    eigenpair *order = malloc((size_t)(n + 1) * sizeof *order);
    if (copy == NULL || v == NULL || order == NULL) {
        abort();
    }
    read_triangle(copy, a, p->type, n, p->ld, p->uplo);
    *info = is_finite(copy, n * n) ? 0 : 1;
    if (*info == 0) {
        diagonalize(copy, v, n);
        for (int64_t i = 0; i < n; i++) {
            order[i] = (eigenpair){copy[i * n + i], i};
        }
        qsort(order, (size_t)n, sizeof *order, compare);
        write_pairs(order, v, a, w, p->type, n, p->ld, p->job);
    }
    free(copy);
    free(v);
    free(order);
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

/* Element (i, j), i >= j, of the factor L where it is stored: L itself below, or its transpose above. */
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

/* One matrix, or a list of them on the device. */
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

status cusolverDnSpotrfBatched(tchi_cusolver_handle handle, tchi_cublas_fill uplo, int n, float *a[], int lda,
                               int *info, int batch)
{
    factors f = {uplo, CUDA_R_32F, n, lda, batch, NULL, (void *const *)a, info};
    emulator_submit(handle->stream, factor_all, &f, sizeof f);
    return 0;
}

status cusolverDnDpotrfBatched(tchi_cusolver_handle handle, tchi_cublas_fill uplo, int n, double *a[], int lda,
                               int *info, int batch)
{
    factors f = {uplo, CUDA_R_64F, n, lda, batch, NULL, (void *const *)a, info};
    emulator_submit(handle->stream, factor_all, &f, sizeof f);
    return 0;
}
