/* Inverse roots of factors by a kernel of the user's: one block of threads for each matrix. What surrounds the root,
 * damping, scale and certificate, is the library's own, so that a kernel has one thing to do and nothing to be trusted
 * with. */
#include "user_kernel.h"

#include <stdio.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/list.h"
#include "core/status.h"

enum { SCRATCH_MATRICES = 4, USUAL_THREADS = 256 };

/* --- a launch ---------------------------------------------------------------------------------------------------- */

/* Who takes a root: the custom kernel with its shape. */
static tch_status take(void *user, int32_t root, const tch_matrices *m, const tch_matrices *x, void *scratch)
{
    tchi_user_kernel *own = user;
    const tch_kernel *kernel = own->kernel[tchi_user_kernel_index(m->type)];
    int32_t n = (int32_t)m->rows;
    const void *arguments[] = {&m->data, &x->data, &scratch, &n, &root};
    tch_kernel_run run = {.grid = {m->batch, 1, 1},
                          .block = {own->threads, 1, 1},
                          .shared_bytes = own->shared_bytes,
                          .arguments = arguments};
    own->launches++;
    return kernel->context->backend->kernel->launch(kernel->context->state, kernel->handle, &run);
}

tchi_user_root tchi_user_kernel_root_of(tchi_user_kernel *own)
{
    return (tchi_user_root){take, own, SCRATCH_MATRICES};
}

bool tchi_user_kernel_roots(const tchi_factor_batch *factor_batch, int64_t factor)
{
    return factor_batch->own_root && factor_batch->own[factor] <= TCHI_USER_KERNEL_LATEST &&
           factor_batch->failures[factor] == 0;
}

int64_t tchi_user_kernel_root_bytes(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch)
{
    const tchi_user_root size_only = {NULL, NULL, SCRATCH_MATRICES};
    return tchi_inverse_root_by_bytes(optimizer->context, &size_only, factor_batch->real, factor_batch->n,
                                      factor_batch->root);
}

/* --- its parameters ---------------------------------------------------------------------------------------------- */

static bool points_to(const tch_kernel_parameter *p, int32_t size, bool read_only)
{
    return p->what == TCH_PARAMETER_POINTER && p->pointee == TCH_PARAMETER_REAL && p->pointee_size == size &&
           (read_only || !p->is_const);
}

static bool is_int(const tch_kernel_parameter *p)
{
    return (p->what == TCH_PARAMETER_INT || p->what == TCH_PARAMETER_UINT) && p->size == (int32_t)sizeof(int32_t);
}

/* (const T *, T *, T *, int, int), T being float or double. */
static tch_status check_parameters(const tch_kernel *kernel, tch_scalar *real)
{
    const tch_kernel_parameter *p = kernel->parameters;
    int32_t size = kernel->info.parameters == 5 ? p[0].pointee_size : 0;
    if ((size != (int32_t)sizeof(float) && size != (int32_t)sizeof(double)) || !points_to(&p[0], size, true) ||
        !points_to(&p[1], size, false) || !points_to(&p[2], size, false) || !is_int(&p[3]) || !is_int(&p[4])) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "kernel %.200s has other parameters than a root gets: expected (const float *factors, float "
                         "*roots, float *scratch, int n, int root), or the same with double",
                         kernel->name);
    }
    *real = size == (int32_t)sizeof(double) ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
    return TCH_OK;
}

static tch_status check_threads(const tch_kernel *kernel, int32_t *threads)
{
    int32_t most = kernel->info.max_threads;
    if (*threads == 0) {
        *threads = most < USUAL_THREADS ? most : USUAL_THREADS;
    }
    if (*threads > most) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "threads is %d, expected at most %d for kernel %.200s", *threads,
                         most, kernel->name);
    }
    return TCH_OK;
}

/* --- the check --------------------------------------------------------------------------------------------------- */

enum { TRIED = 2 }; /* matrices at once: a kernel that knows only of block 0 fails */

/* Condition numbers of 1000, which is what relative damping by 1/1000 makes of matrices with a null space. */
#define TRIED_DAMPING 1e-3

typedef struct trial {
    tch_tensor *b, *a, *x, *residual, *report;
} trial;

static void release_trial(trial *t)
{
    tch_tensor *const tensors[] = {t->b, t->a, t->x, t->residual, t->report};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        tch_tensor_destroy(tensors[i]);
    }
}

static tch_status take_trial(tch_context *context, const tchi_factor_batch *f, trial *t)
{
    int64_t shape[3] = {TRIED, f->n, f->n};
    tch_dtype dtype = f->real == TCH_SCALAR_F64 ? TCH_FLOAT64 : TCH_FLOAT32;
    TCHI_TRY(tch_tensor_create(context, dtype, 3, shape, TCH_CONTIGUOUS, &t->b));
    TCHI_TRY(tch_tensor_create(context, dtype, 3, shape, TCH_CONTIGUOUS, &t->a));
    TCHI_TRY(tch_tensor_create(context, dtype, 3, shape, TCH_CONTIGUOUS, &t->x));
    TCHI_TRY(tch_tensor_create(context, TCH_FLOAT64, 1, shape, TCH_CONTIGUOUS, &t->residual));
    return tch_tensor_create(context, TCH_INT32, 1, shape, TCH_CONTIGUOUS, &t->report);
}

/* A = B B', B of random numbers between -1 and 1 and three quarters full, so that A has a null space. */
static tch_status fill_trial(tch_context *context, const tchi_factor_batch *f, const trial *t)
{
    int64_t count = TRIED * f->n * f->n;
    int64_t shape[3] = {TRIED, f->n, f->n};
    uint64_t seed = 0x9E3779B97F4A7C15u ^ (uint64_t)f->n;
    float *numbers = NULL;
    size_t bytes = (size_t)count * sizeof *numbers;
    TCHI_TRY(tchi_host_take(bytes, "the check of a kernel", &numbers));
    for (int64_t i = 0; i < count; i++) {
        numbers[i] = 4 * (i % f->n) < 3 * f->n ? tchi_user_kernel_random(&seed) : 0.0F;
    }
    tch_tensor host = tch_tensor_view(numbers, TCH_FLOAT32, 3, shape);
    tch_status status = tch_tensor_copy(context, t->b, &host);
    tchi_host_release(numbers, bytes);
    TCHI_TRY(status);
    return tch_gram(context, 1.0, t->b, 0, 0.0, t->a);
}

static tch_status judge(tch_context *context, const tchi_user_kernel *own, const tchi_factor_batch *f, const trial *t,
                        double *worst)
{
    int64_t shape[1] = {TRIED};
    double residuals[TRIED];
    int32_t flags[TRIED];
    tch_tensor to_residuals = tch_tensor_view(residuals, TCH_FLOAT64, 1, shape);
    tch_tensor to_flags = tch_tensor_view(flags, TCH_INT32, 1, shape);
    TCHI_TRY(tch_tensor_copy(context, &to_residuals, t->residual));
    TCHI_TRY(tch_tensor_copy(context, &to_flags, t->report));
    for (int i = 0; i < TRIED; i++) {
        *worst = tchi_user_kernel_worse(*worst, residuals[i]);
    }
    for (int i = 0; i < TRIED; i++) {
        if (flags[i] != TCH_REPORT_OK) {
            return tchi_fail(TCH_ERR_NUMERIC,
                             "kernel %.200s: its root %d of random %lld by %lld matrices is off by %.3g in the "
                             "certificate, which is above the tolerance",
                             own->kernel[tchi_user_kernel_index(f->real)]->name, f->root, (long long)f->n,
                             (long long)f->n, residuals[i]);
        }
    }
    return TCH_OK;
}

double tchi_user_kernel_root_tolerance(const tch_optimizer *optimizer, const tchi_user_kernel *own,
                                       const tchi_factor_batch *factor_batch)
{
    return own->tolerance > 0.0 ? own->tolerance : tchi_group_at(optimizer, factor_batch->group)->config.root_tolerance;
}

static tch_status run_trial(tch_optimizer *o, tchi_user_kernel *own, const tchi_factor_batch *f, trial *t)
{
    tch_root_config how = TCH_ROOT_CONFIG_INIT;
    tchi_user_root root = tchi_user_kernel_root_of(own);
    double worst = 0.0;
    how.relative_eps = TRIED_DAMPING;
    how.tolerance = tchi_user_kernel_root_tolerance(o, own, f);
    TCHI_TRY(take_trial(o->context, f, t));
    TCHI_TRY(fill_trial(o->context, f, t));
    TCHI_TRY(tchi_inverse_root_by(o->context, &root, t->a, f->root, &how, t->x, t->residual, t->report, NULL));
    tch_status status = judge(o->context, own, f, t, &worst);
    own->worst = tchi_user_kernel_worse(own->worst, worst);
    return status;
}

static tch_status try_factor_batch(tch_optimizer *o, tchi_user_kernel *own, const tchi_factor_batch *f, bool *passed)
{
    trial t = {0};
    tch_status status = run_trial(o, own, f, &t);
    tch_status after = o->context->backend->device->synchronize(o->context->state);
    release_trial(&t);
    TCHI_TRY(after);
    *passed = status == TCH_OK;
    return *passed || tchi_user_kernel_finds(o, own, status) ? TCH_OK : status;
}

/* --- all of it --------------------------------------------------------------------------------------------------- */

/* An earlier factor batch of the same size and root, and of the same tolerance; -1 where there is none. */
static int32_t same_before(const tch_optimizer *o, const tchi_user_kernel *own, int32_t index)
{
    const tchi_factor_batch *f = tchi_factor_batch_at(o, index);
    for (int32_t i = 0; i < index; i++) {
        const tchi_factor_batch *other = tchi_factor_batch_at(o, i);
        if (other->n == f->n && other->root == f->root && other->real == f->real &&
            tchi_user_kernel_root_tolerance(o, own, other) == tchi_user_kernel_root_tolerance(o, own, f)) {
            return i;
        }
    }
    return -1;
}

/* Whether a factor batch is the kernel's to try; if not, the reason is kept. */
static bool is_meant(tchi_user_kernel *own, const tchi_factor_batch *f, tch_scalar real)
{
    char reason[256];
    if (f->real != real) {
        snprintf(reason, sizeof reason, "factors of float%d: the kernel's pointers are to float%d",
                 f->real == TCH_SCALAR_F64 ? 64 : 32, real == TCH_SCALAR_F64 ? 64 : 32);
    } else if (own->most_size > 0 && f->n > own->most_size) {
        snprintf(reason, sizeof reason, "factors of %lld by %lld: most_size is %lld", (long long)f->n, (long long)f->n,
                 (long long)own->most_size);
    } else {
        return true;
    }
    tchi_user_kernel_explain(own, reason);
    return false;
}

static tch_status try_all(tch_optimizer *o, tchi_user_kernel *own, tch_scalar real, bool *passed)
{
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        const tchi_factor_batch *f = tchi_factor_batch_at(o, i);
        int32_t before = same_before(o, own, i);
        if (before >= 0) {
            passed[i] = passed[before];
        } else if (is_meant(own, f, real)) {
            TCHI_TRY(try_factor_batch(o, own, f, &passed[i]));
        }
        *(passed[i] ? &own->served : &own->left) += f->count;
    }
    return TCH_OK;
}

static tch_status compile(const tchi_user_kernel_request *request, tchi_user_kernel *own, tch_scalar *real)
{
    tch_kernel *kernel = NULL;
    TCHI_TRY(tch_kernel_compile(request->optimizer->context, request->asked->kernel, &kernel));
    own->kernel[1] = kernel;
    TCHI_TRY(check_parameters(kernel, real));
    if (*real == TCH_SCALAR_F64) {
        own->kernel[0] = kernel;
        own->kernel[1] = NULL;
    }
    return check_threads(kernel, &own->threads);
}

static void drop_kernel(tchi_user_kernel *own)
{
    for (int i = 0; i < 2; i++) {
        tch_kernel_destroy(own->kernel[i]);
        own->kernel[i] = NULL;
    }
}

tch_status tchi_user_kernel_root_make(const tchi_user_kernel_request *request, tchi_user_kernel *own, bool *passed)
{
    tch_optimizer *o = request->optimizer;
    tch_scalar real = TCH_SCALAR_COUNT; /* of no factor batch, where there is no kernel */
    tch_status status = compile(request, own, &real);
    if (status != TCH_OK && !tchi_user_kernel_finds(o, own, status)) {
        return status;
    }
    if (status == TCH_OK) {
        TCHI_TRY(try_all(o, own, real, passed));
    } else {
        for (int32_t i = 0; i < o->factor_batches.count; i++) {
            own->left += tchi_factor_batch_at(o, i)->count;
        }
    }
    if (own->served == 0) {
        tchi_user_kernel_explain(own, "the optimizer has no factors");
        drop_kernel(own);
    }
    return TCH_OK;
}
