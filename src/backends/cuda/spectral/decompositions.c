/* Eigendecompositions and positive definite solves by cuSOLVER and cuBLAS. Both are column-major: symmetric matrices
 * are unaffected, eigenvector columns there are rows here, and right-hand sides B are B' there, solved from the right.
 * One function lays out scratch for both the call and its size. */
#include "backends/cuda/cuda.h"

#include "backends/cuda/runtime/scalars.h"
#include "core/arith.h"
#include "decompositions.h"

/* --- the solver and its memory ----------------------------------------------------------------------------------- */

/* Allocates scratch in 256-byte units; NULL while measuring, without a base. */
typedef struct carving {
    char *base;
    int64_t used;
} carving;

static void *carve(carving *from, int64_t bytes)
{
    void *chunk = from->base == NULL ? NULL : from->base + from->used;
    from->used += (bytes + 255) / 256 * 256;
    return chunk;
}

/* cuSOLVER, ready to work on the state's stream. */
static tch_status solver_ready(tchi_cuda_state *state, const tchi_cusolver **found)
{
    const char *reason = "cuSOLVER is missing";
    const tchi_cusolver *solver = *found = tchi_cusolver_open(&reason);
    if (solver == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_UNAVAILABLE, "eigendecompositions and solves need cuSOLVER: %s", reason);
    }
    if (state->solver == NULL) {
        TCHI_CUSOLVER_TRY(solver->create(&state->solver), "cusolverDnCreate");
    }
    if (state->solver_params == NULL) {
        TCHI_CUSOLVER_TRY(solver->create_params(&state->solver_params), "cusolverDnCreateParams");
    }
    TCHI_CUSOLVER_TRY(solver->set_stream(state->solver, state->stream), "cusolverDnSetStream");
    return TCH_OK;
}

/* Host memory for cuSOLVER. Queued work may still use the old one when it grows. */
static tch_status host_memory(tchi_cuda_state *state, size_t bytes)
{
    if (bytes <= state->solver_host_bytes) {
        return TCH_OK;
    }
    TCHI_CUDA_TRY(cudaStreamSynchronize(state->stream), "waiting before the solver's host memory grows");
    if (state->solver_host != NULL) {
        tchi_cuda_host->release(state->solver_host, state->solver_host_bytes);
    }
    state->solver_host_bytes = 0;
    state->solver_host = tchi_cuda_host->allocate(bytes, 64);
    if (state->solver_host == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_OUT_OF_MEMORY, "cuSOLVER needs %zu bytes of host memory", bytes);
    }
    state->solver_host_bytes = bytes;
    return TCH_OK;
}

/* Work buffers of a cuSOLVER call. */
typedef struct work_space {
    void *device;
    size_t device_bytes, host_bytes;
} work_space;

/* --- eigendecomposition ------------------------------------------------------------------------------------------ */

/* Matrices per batched call: cuSOLVER refuses 40000 of 3 by 3 and partly counts elements in 32 bits. */
#define EIGH_MOST_BATCH 16384
#define EIGH_MOST_ELEMENTS (INT64_C(1) << 30)

/* Batched vs one by one on an H200 in float32: 64 of n = 256: 3.5 vs 127 ms, 16 of 1024: 56 to 69 vs 170 ms, 4 of 2048:
 * 245 vs 98 ms. If the batched time is constant for batches that do not fill the device, which was not measured, one by
 * one is faster below about n / 150 matrices. */
#define EIGH_SIZE_PER_MATRIX 150

static int eigh_is_batched(const tchi_cusolver *solver, int64_t n, int64_t batch)
{
    return solver->xsyev_batched != NULL && solver->xsyev_batched_buffer_size != NULL &&
           batch >= n / EIGH_SIZE_PER_MATRIX;
}

typedef struct eigh_buffers {
    int batched;
    int64_t part;       /* matrices per call */
    void *values;       /* n per matrix, contiguous */
    int32_t *exponents; /* one per matrix */
    int32_t *info;
    double *defects; /* |V V' - I| of each matrix */
    double *rows;    /* to orthonormalize rows: 2 n per matrix */
    work_space work; /* of a call, and then V V' - I of its matrices */
} eigh_buffers;

/* Sizes do not depend on the data, but addresses are validated: passes cuBLAS's workspace for both. */
static tch_status eigh_work(const tchi_cuda_state *state, const tchi_cusolver *solver, tch_scalar type, int64_t n,
                            eigh_buffers *e)
{
    cudaDataType t = tchi_cuda_data_type(type);
    const void *any = state->blas_workspace;
    if (e->batched) {
        TCHI_CUSOLVER_TRY(solver->xsyev_batched_buffer_size(state->solver, state->solver_params, TCHI_CUSOLVER_VECTORS,
                                                            TCHI_CUBLAS_LOWER, n, t, any, n, t, any, t,
                                                            &e->work.device_bytes, &e->work.host_bytes, e->part),
                          "cusolverDnXsyevBatched_bufferSize");
    } else {
        TCHI_CUSOLVER_TRY(solver->xsyevd_buffer_size(state->solver, state->solver_params, TCHI_CUSOLVER_VECTORS,
                                                     TCHI_CUBLAS_LOWER, n, t, any, n, t, any, t, &e->work.device_bytes,
                                                     &e->work.host_bytes),
                          "cusolverDnXsyevd_bufferSize");
    }
    return TCH_OK;
}

static tch_status eigh_layout(tchi_cuda_state *state, const tchi_cusolver *solver, tch_scalar type, int64_t n,
                              int64_t batch, carving *scratch, eigh_buffers *e)
{
    int64_t most = tchi_max(tchi_min(EIGH_MOST_ELEMENTS / (n * n), EIGH_MOST_BATCH), 1);
    e->part = e->batched ? tchi_min(batch, most) : 1;
    TCHI_TRY(eigh_work(state, solver, type, n, e));
    e->values = carve(scratch, batch * n * tchi_cuda_scalar_size(type));
    e->exponents = carve(scratch, batch * (int64_t)sizeof *e->exponents);
    e->info = carve(scratch, batch * (int64_t)sizeof *e->info);
    e->defects = carve(scratch, batch * (int64_t)sizeof *e->defects);
    e->rows = carve(scratch, batch * 2 * n * (int64_t)sizeof *e->rows);
    e->work.device =
        carve(scratch, tchi_max((int64_t)e->work.device_bytes, e->part * n * n * tchi_cuda_scalar_size(type)));
    return host_memory(state, e->work.host_bytes);
}

/* Failures are reported by the decomposition itself, which repeats the query. */
int64_t tchi_cuda_eigh_scratch(tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t batch)
{
    const tchi_cusolver *solver;
    int64_t most = 0;
    if (n < 2 || batch < 1 || solver_ready(state, &solver) != TCH_OK) {
        return 0;
    }
    for (int batched = 0; batched <= eigh_is_batched(solver, n, batch); batched++) {
        eigh_buffers e = {.batched = batched};
        carving scratch = {0};
        if (eigh_layout(state, solver, type, n, batch, &scratch, &e) == TCH_OK && scratch.used > most) {
            most = scratch.used;
        }
    }
    return most;
}

/* `v`: the matrices of the call, from number `first` of the batch on. */
static tch_status eigh_call(const tchi_cuda_state *state, const tchi_cusolver *solver, const tch_matrices *v,
                            const eigh_buffers *e, int64_t first)
{
    cudaDataType t = tchi_cuda_data_type(v->type);
    void *w = (char *)e->values + first * v->rows * tchi_cuda_scalar_size(v->type);
    if (e->batched) {
        TCHI_CUSOLVER_TRY(solver->xsyev_batched(state->solver, state->solver_params, TCHI_CUSOLVER_VECTORS,
                                                TCHI_CUBLAS_LOWER, v->rows, t, v->data, v->ld, t, w, t, e->work.device,
                                                e->work.device_bytes, state->solver_host, e->work.host_bytes,
                                                e->info + first, v->batch),
                          "cusolverDnXsyevBatched");
    } else {
        TCHI_CUSOLVER_TRY(solver->xsyevd(state->solver, state->solver_params, TCHI_CUSOLVER_VECTORS, TCHI_CUBLAS_LOWER,
                                         v->rows, t, v->data, v->ld, t, w, t, e->work.device, e->work.device_bytes,
                                         state->solver_host, e->work.host_bytes, e->info + first),
                          "cusolverDnXsyevd");
    }
    return TCH_OK;
}

/* defects[first ...] = |V V' - I| of the matrices of a call: 2 n^3 operations per matrix. */
static tch_status measure_defects(tchi_cuda_state *state, const tch_matrices *v, const eigh_buffers *e, int64_t first)
{
    int64_t n = v->rows;
    tch_matrices gram = {e->work.device, v->type, n, n, n, v->batch, n * n};
    TCHI_TRY(tchi_cuda_combine(state, 1.0, 0.0, NULL, 0.0, NULL, &gram));
    TCHI_TRY(tchi_cuda_gemm(state, 1.0, v, 0, v, 1, -1.0, 0, &gram));
    return tchi_cuda_reduce(state, TCH_REDUCE_FROBENIUS, &gram, e->defects + first);
}

/* The batched call requires contiguous matrices; others run one by one. About 9 n^3 operations per matrix. cuSOLVER's
 * eigenvectors of equal eigenvalues may not be orthogonal, so they are checked and repaired if needed. Whether this can
 * be captured in a graph depends on cuSOLVER. */
tch_status tchi_cuda_eigh(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags, void *scratch)
{
    tchi_cuda_state *s = state;
    int64_t n = v->rows;
    if (n == 0 || v->batch == 0) {
        return TCH_OK;
    }
    if (n == 1) {
        return tchi_cuda_eigh_single(s, v, w, flags);
    }
    const tchi_cusolver *solver;
    TCHI_TRY(solver_ready(s, &solver));
    carving from = {.base = scratch};
    eigh_buffers e = {.batched = eigh_is_batched(solver, n, v->batch) && v->ld == n && v->stride == n * n};
    TCHI_TRY(eigh_layout(s, solver, v->type, n, v->batch, &from, &e));
    TCHI_TRY(tchi_cuda_eigh_prepare(s, v, e.exponents, flags));
    for (int64_t first = 0; first < v->batch; first += e.part) {
        tch_matrices part = *v;
        part.data = tchi_cuda_matrix_at(v, first);
        part.batch = tchi_min(v->batch - first, e.part);
        TCHI_TRY(eigh_call(s, solver, &part, &e, first));
        TCHI_TRY(measure_defects(s, &part, &e, first));
    }
    TCHI_TRY(tchi_cuda_eigh_finish(s, e.values, e.exponents, e.info, w, flags));
    return tchi_cuda_orthonormal_rows(s, v, e.values, e.defects, e.rows, flags);
}

/* --- positive definite solve ------------------------------------------------------------------------------------- */

/* Matrices per batched call: a grid dimension is at most 65535. */
#define SOLVE_MOST_BATCH 65535

/* Sequential factorizations keep the device busy from about n = 1000 on, so a large matrix is batched only with others.
 * Reasoned from the eigendecomposition's crossover, not measured. */
#define SOLVE_SIZE_PER_MATRIX 128

typedef struct solve_buffers {
    int batched;
    void **a_addresses, **b_addresses;
    int32_t *info;
    work_space work;
} solve_buffers;

static tch_status solve_layout(tchi_cuda_state *state, const tchi_cusolver *solver, tch_scalar type, int64_t n,
                               int64_t batch, carving *scratch, solve_buffers *s)
{
    cudaDataType t = tchi_cuda_data_type(type);
    if (!s->batched) {
        TCHI_CUSOLVER_TRY(solver->xpotrf_buffer_size(state->solver, state->solver_params, TCHI_CUBLAS_UPPER, n, t,
                                                     state->blas_workspace, n, t, &s->work.device_bytes,
                                                     &s->work.host_bytes),
                          "cusolverDnXpotrf_bufferSize");
    }
    s->a_addresses = carve(scratch, batch * (int64_t)sizeof *s->a_addresses);
    s->b_addresses = carve(scratch, batch * (int64_t)sizeof *s->b_addresses);
    s->info = carve(scratch, batch * (int64_t)sizeof *s->info);
    s->work.device = carve(scratch, (int64_t)s->work.device_bytes);
    return host_memory(state, s->work.host_bytes);
}

/* One by one needs the most: a layout unsupported by the batched call falls back to it. */
int64_t tchi_cuda_spd_solve_scratch(tchi_cuda_state *state, tch_scalar type, int64_t n, int64_t cols, int64_t batch)
{
    const tchi_cusolver *solver;
    solve_buffers s = {.batched = 0};
    carving scratch = {0};
    if (n < 1 || batch < 1 || solver_ready(state, &solver) != TCH_OK ||
        solve_layout(state, solver, type, n, batch, &scratch, &s) != TCH_OK) {
        return 0;
    }
    return scratch.used;
}

/* A = U' U in the column-major upper triangle, the row-major lower one. */
static tch_status factor_batch(const tchi_cuda_state *state, const tchi_cusolver *solver, const tch_matrices *a,
                               const solve_buffers *s, int64_t first, int64_t count)
{
    int n = (int)a->rows;
    int lda = (int)(n > 1 ? a->ld : 1);
    TCHI_CUSOLVER_TRY(solver->potrf_batched[a->type == TCH_SCALAR_F64](state->solver, TCHI_CUBLAS_UPPER, n,
                                                                       s->a_addresses + first, lda, s->info + first,
                                                                       (int)count),
                      "cusolverDn potrfBatched");
    return TCH_OK;
}

static tch_status factor_one(const tchi_cuda_state *state, const tchi_cusolver *solver, const tch_matrices *a,
                             const solve_buffers *s, int64_t index)
{
    cudaDataType t = tchi_cuda_data_type(a->type);
    TCHI_CUSOLVER_TRY(solver->xpotrf(state->solver, state->solver_params, TCHI_CUBLAS_UPPER, a->rows, t,
                                     tchi_cuda_matrix_at(a, index), a->rows > 1 ? a->ld : 1, t, s->work.device,
                                     s->work.device_bytes, state->solver_host, s->work.host_bytes, s->info + index),
                      "cusolverDnXpotrf");
    return TCH_OK;
}

static tch_status factor(const tchi_cuda_state *state, const tchi_cusolver *solver, const tch_matrices *a,
                         const solve_buffers *s)
{
    int64_t part = s->batched ? SOLVE_MOST_BATCH : 1;
    for (int64_t first = 0; first < a->batch; first += part) {
        int64_t count = tchi_min(a->batch - first, part);
        TCHI_TRY(s->batched ? factor_batch(state, solver, a, s, first, count) : factor_one(state, solver, a, s, first));
    }
    return TCH_OK;
}

/* X op(U) = B' for `count` matrices from `first` on; X overwrites B. */
static tch_status triangular_solve(const tchi_cuda_state *state, tchi_cublas_operation op, const tch_matrices *a,
                                   const tch_matrices *b, const solve_buffers *s, int64_t first, int64_t count)
{
    const tchi_cublas *blas = tchi_cublas_open(NULL);
    const int wide = a->type == TCH_SCALAR_F64;
    const double one = 1.0;
    const float one_f32 = 1.0F;
    const void *alpha = wide ? (const void *)&one : &one_f32;
    int64_t n = a->rows;
    int64_t lda = n > 1 ? a->ld : 1;
    int64_t ldb = n > 1 ? b->ld : b->cols;
    if (s->batched) {
        return tchi_cublas_check(blas->trsm_batched[wide](state->blas, TCHI_CUBLAS_RIGHT, TCHI_CUBLAS_UPPER, op,
                                                          TCHI_CUBLAS_NON_UNIT, b->cols, n, alpha,
                                                          s->a_addresses + first, lda, s->b_addresses + first, ldb,
                                                          count),
                                 "cublas trsmBatched");
    }
    return tchi_cublas_check(blas->trsm[wide](state->blas, TCHI_CUBLAS_RIGHT, TCHI_CUBLAS_UPPER, op,
                                              TCHI_CUBLAS_NON_UNIT, b->cols, n, alpha, tchi_cuda_matrix_at(a, first),
                                              lda, tchi_cuda_matrix_at(b, first), ldb),
                             "cublas trsm");
}

/* B' := B' U^-1 U'^-1 = B' A^-1. */
static tch_status solve_factored(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *b,
                                 const solve_buffers *s)
{
    int64_t part = s->batched ? SOLVE_MOST_BATCH : 1;
    for (int64_t first = 0; first < a->batch && b->cols > 0; first += part) {
        int64_t count = tchi_min(a->batch - first, part);
        TCHI_TRY(triangular_solve(state, TCHI_CUBLAS_N, a, b, s, first, count));
        TCHI_TRY(triangular_solve(state, TCHI_CUBLAS_T, a, b, s, first, count));
    }
    return TCH_OK;
}

/* n^3 / 3 + 2 n^2 cols operations per matrix. */
tch_status tchi_cuda_spd_solve(void *state, const tch_matrices *a, const double *shift, const tch_matrices *b,
                               int32_t *flags, void *scratch)
{
    tchi_cuda_state *st = state;
    if (a->rows == 0 || a->batch == 0) {
        return TCH_OK;
    }
    const tchi_cusolver *solver;
    TCHI_TRY(solver_ready(st, &solver));
    carving from = {.base = scratch};
    solve_buffers s = {.batched = a->batch > 1 && a->batch >= a->rows / SOLVE_SIZE_PER_MATRIX && a->ld <= INT32_MAX};
    TCHI_TRY(solve_layout(st, solver, a->type, a->rows, a->batch, &from, &s));
    TCHI_TRY(tchi_cuda_solve_prepare(st, a, shift, b, flags, s.a_addresses, s.b_addresses));
    TCHI_TRY(factor(st, solver, a, &s));
    TCHI_TRY(tchi_cuda_solve_verdict(st, a, s.info, flags));
    return solve_factored(st, a, b, &s);
}
