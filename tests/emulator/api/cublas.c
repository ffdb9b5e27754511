/* cuBLAS for the emulated device (src/backends/cuda/runtime/libraries/cublas.h), by plain column-major loops. Sums are
 * in double, at least as accurate as cuBLAS. */
#include <stdlib.h>
#include <string.h>

#include "backends/cuda/runtime/libraries/cublas.h"

#include "elements.h"

typedef tchi_cublas_status status;

/* Exported with the type of its entry in the table of looked-up functions. */
#define EXPORT(member, name)                                                                                           \
    __attribute__((visibility("default"))) __typeof__(*((const tchi_cublas *)NULL)->member) name

EXPORT(create, cublasCreate_v2);
EXPORT(destroy, cublasDestroy_v2);
EXPORT(set_stream, cublasSetStream_v2);
EXPORT(set_workspace, cublasSetWorkspace_v2);
EXPORT(set_math_mode, cublasSetMathMode);
EXPORT(set_pointer_mode, cublasSetPointerMode_v2);
EXPORT(get_status_string, cublasGetStatusString);
EXPORT(gemm_strided_batched_ex, cublasGemmStridedBatchedEx_64);
EXPORT(trsm[0], cublasStrsm_v2_64);
EXPORT(trsm[1], cublasDtrsm_v2_64);
EXPORT(trsm_batched[0], cublasStrsmBatched_64);
EXPORT(trsm_batched[1], cublasDtrsmBatched_64);
__attribute__((visibility("default"))) status cublasGetProperty(libraryPropertyType type, int *value);

/* --- handles ----------------------------------------------------------------------------------------------------- */

struct tchi_cublas_context {
    cudaStream_t stream;
    tchi_cublas_pointer_mode mode;
};

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
    handle->stream = stream;
    return 0;
}

status cublasSetWorkspace_v2(tchi_cublas_handle handle, void *workspace, size_t bytes)
{
    return 0;
}

status cublasSetMathMode(tchi_cublas_handle handle, tchi_cublas_math mode)
{
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

/* --- products ---------------------------------------------------------------------------------------------------- */

/* Of a batch: a stride in elements, or a device array of pointers. */
typedef struct matrix {
    const void *data;
    const void *const *list;
    int64_t stride;
    cudaDataType type;
    int64_t ld;
    tchi_cublas_operation op;
} matrix;

static void *matrix_at(const matrix *m, int64_t i)
{
    return m->list != NULL ? (void *)m->list[i] : (char *)m->data + (size_t)(i * m->stride) * element_bytes(m->type);
}

/* op(M) as a dense array of doubles, the contraction contiguous: rows by depth for A, columns by depth for B. */
static double *spread(const matrix *m, int64_t i, int64_t lines, int64_t depth, int is_left)
{
    const void *data = matrix_at(m, i);
    double *out = malloc((size_t)(lines * depth + 1) * sizeof *out);
    int along_columns = (m->op == TCHI_CUBLAS_N) == is_left; /* element (line, k) is at line + k ld */
    if (out == NULL) {
        abort();
    }
    for (int64_t line = 0; line < lines; line++) {
        for (int64_t k = 0; k < depth; k++) {
            out[line * depth + k] = load_element(data, m->type, along_columns ? line + k * m->ld : k + line * m->ld);
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

static double read_scalar(const void *at, tchi_cublas_compute compute)
{
    return compute == TCHI_CUBLAS_COMPUTE_F64 ? *(const double *)at : *(const float *)at;
}

/* Host scalars are read when the function is called, device scalars when the work is executed. */
typedef struct scalar {
    const void *device;
    double host;
} scalar;

static scalar make_scalar(tchi_cublas_handle handle, const void *at, tchi_cublas_compute compute)
{
    return handle->mode == TCHI_CUBLAS_SCALARS_ON_DEVICE ? (scalar){at, 0.0} : (scalar){NULL, read_scalar(at, compute)};
}

typedef struct product {
    int64_t m, n, k, batch;
    scalar alpha, beta;
    tchi_cublas_compute compute;
    matrix a, b, c;
} product;

static void multiply_one(const product *p, int64_t number, double alpha, double beta)
{
    double *a = spread(&p->a, number, p->m, p->k, 1);
    double *b = spread(&p->b, number, p->n, p->k, 0);
    void *c = matrix_at(&p->c, number);
    for (int64_t j = 0; j < p->n; j++) {
        for (int64_t i = 0; i < p->m; i++) {
            double old = beta == 0.0 ? 0.0 : beta * load_element(c, p->c.type, i + j * p->c.ld);
            double sum = alpha == 0.0 ? 0.0 : alpha * dot(a + i * p->k, b + j * p->k, p->k);
            store_element(c, p->c.type, i + j * p->c.ld, sum + old);
        }
    }
    free(a);
    free(b);
}

static void multiply_all(void *data)
{
    const product *p = data;
    double alpha = p->alpha.device != NULL ? read_scalar(p->alpha.device, p->compute) : p->alpha.host;
    double beta = p->beta.device != NULL ? read_scalar(p->beta.device, p->compute) : p->beta.host;
    for (int64_t i = 0; i < p->batch; i++) {
        multiply_one(p, i, alpha, beta);
    }
}

status cublasGemmStridedBatchedEx_64(tchi_cublas_handle handle, tchi_cublas_operation trans_a,
                                     tchi_cublas_operation trans_b, int64_t m, int64_t n, int64_t k, const void *alpha,
                                     const void *a, cudaDataType a_type, int64_t lda, long long stride_a, const void *b,
                                     cudaDataType b_type, int64_t ldb, long long stride_b, const void *beta, void *c,
                                     cudaDataType c_type, int64_t ldc, long long stride_c, int64_t batch,
                                     tchi_cublas_compute compute, tchi_cublas_algorithm algorithm)
{
    product p = {.m = m, .n = n, .k = k, .batch = batch, .compute = compute};
    p.alpha = make_scalar(handle, alpha, compute);
    p.beta = make_scalar(handle, beta, compute);
    p.a = (matrix){a, NULL, stride_a, a_type, lda, trans_a};
    p.b = (matrix){b, NULL, stride_b, b_type, ldb, trans_b};
    p.c = (matrix){c, NULL, stride_c, c_type, ldc, TCHI_CUBLAS_N};
    emulator_submit(handle->stream, multiply_all, &p, sizeof p);
    return 0;
}

/* --- triangular solves ------------------------------------------------------------------------------------------- */

typedef struct triangle {
    tchi_cublas_side side;
    tchi_cublas_fill uplo;
    tchi_cublas_operation trans;
    tchi_cublas_diagonal diag;
    int64_t m, n, batch;
    double alpha;
    matrix a, b;
} triangle;

/* Element (i, j) of the matrix of a solve from the left: op(A), or op(A)' for a solve from the right. */
static double triangle_at(const triangle *t, const void *a, int64_t i, int64_t j)
{
    int transposed = (t->trans == TCHI_CUBLAS_T) != (t->side == TCHI_CUBLAS_RIGHT);
    return load_element(a, t->a.type, transposed ? j + i * t->a.ld : i + j * t->a.ld);
}

/* X overwrites B. From the right, X op(A) = B is op(A)' X' = B'. */
static void solve_one(const triangle *t, const void *a, void *b)
{
    int right = t->side == TCHI_CUBLAS_RIGHT;
    int transposed = (t->trans == TCHI_CUBLAS_T) != right;
    int lower = (t->uplo == TCHI_CUBLAS_LOWER) != transposed;
    int64_t size = right ? t->n : t->m;
    int64_t lines = right ? t->m : t->n;
    int64_t ld = t->b.ld;
    for (int64_t line = 0; line < lines; line++) {
        for (int64_t step = 0; step < size; step++) {
            int64_t i = lower ? step : size - 1 - step;
            int64_t at = right ? line + i * ld : i + line * ld;
            double sum = t->alpha * load_element(b, t->b.type, at);
            for (int64_t j = lower ? 0 : i + 1; j < (lower ? i : size); j++) {
                sum -= triangle_at(t, a, i, j) * load_element(b, t->b.type, right ? line + j * ld : j + line * ld);
            }
            store_element(b, t->b.type, at, t->diag == TCHI_CUBLAS_UNIT ? sum : sum / triangle_at(t, a, i, i));
        }
    }
}

static void solve_all(void *data)
{
    const triangle *t = data;
    for (int64_t i = 0; i < t->batch; i++) {
        solve_one(t, matrix_at(&t->a, i), matrix_at(&t->b, i));
    }
}

#define SOLVES(real, wide, name)                                                                                       \
    status cublas##name##trsm_v2_64(tchi_cublas_handle handle, tchi_cublas_side side, tchi_cublas_fill uplo,           \
                                    tchi_cublas_operation trans, tchi_cublas_diagonal diag, int64_t m, int64_t n,      \
                                    const void *alpha, const void *a, int64_t lda, void *b, int64_t ldb)               \
    {                                                                                                                  \
        triangle t = {side, uplo, trans, diag, m, n, 1, *(const real *)alpha, {a, .type = wide}, {b, .type = wide}};   \
        t.a.ld = lda;                                                                                                  \
        t.b.ld = ldb;                                                                                                  \
        emulator_submit(handle->stream, solve_all, &t, sizeof t);                                                      \
        return 0;                                                                                                      \
    }                                                                                                                  \
    status cublas##name##trsmBatched_64(tchi_cublas_handle handle, tchi_cublas_side side, tchi_cublas_fill uplo,       \
                                        tchi_cublas_operation trans, tchi_cublas_diagonal diag, int64_t m, int64_t n,  \
                                        const void *alpha, void *const a[], int64_t lda, void *const b[], int64_t ldb, \
                                        int64_t batch)                                                                 \
    {                                                                                                                  \
        triangle t = {                                                                                                 \
            side, uplo, trans, diag, m, n, batch, *(const real *)alpha, {NULL, .type = wide}, {NULL, .type = wide}};   \
        t.a.list = (const void *const *)a;                                                                             \
        t.a.ld = lda;                                                                                                  \
        t.b.list = (const void *const *)b;                                                                             \
        t.b.ld = ldb;                                                                                                  \
        emulator_submit(handle->stream, solve_all, &t, sizeof t);                                                      \
        return 0;                                                                                                      \
    }
SOLVES(float, CUDA_R_32F, S)
SOLVES(double, CUDA_R_64F, D)
