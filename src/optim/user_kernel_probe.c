/* The check of an update by a function of the user's: one launch over random elements, whose results must be finite
 * and, where a tolerance was given, what the built-in makes of the same elements. The numbers of the probe are its own
 * and not the group's: a learning rate of 1e-6 would hide any mistake behind rounding. */
#include "user_kernel.h"

#include <math.h>
#include <string.h>

#include "core/allocator.h"
#include "core/list.h"
#include "core/status.h"
#include "core/tensor.h"

#include "elementwise.h"
#include "method.h"

enum { ELEMENTS = 3000 + 1, ARRAYS = 5 }; /* more than a chunk, and odd; p, g, and the three states */

#define STEP 7.0

static const tch_hyper probe_hyper = {
    .lr = 0.1, .beta1 = 0.9, .beta2 = 0.98, .eps = 1e-3, .weight_decay = 0.2, .momentum = 0.8, .dampening = 0.1};

static const char *const names[ARRAYS] = {"p", "g", "m", "v", "vmax"};

float tchi_user_kernel_random(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*seed >> 32) * 0x1p-31F;
}

double tchi_user_kernel_worse(double a, double b)
{
    return isnan(a) || a > b ? a : b;
}

/* The probe's elements on the host in double, and where they lie on the device. */
typedef struct probe {
    double before[ARRAYS][ELEMENTS], own[ARRAYS][ELEMENTS], built_in[ARRAYS][ELEMENTS];
    bool has[ARRAYS];
    char *memory; /* on the device: hyper, clock, and the arrays */
    tch_scalar real;
} probe;

static int64_t array_bytes(const probe *p)
{
    return (ELEMENTS * tchi_scalar_size(p->real) + 255) / 256 * 256;
}

static char *array_at(const probe *p, int index)
{
    return p->memory + 512 + index * array_bytes(p);
}

/* v and vmax are what averages of squares can be. */
static void fill(probe *p, const tchi_elementwise *elementwise, const tch_optim_config *config)
{
    uint64_t seed = 12345;
    for (int i = 0; i < ELEMENTS; i++) {
        for (int k = 0; k < ARRAYS; k++) {
            p->before[k][i] = (double)tchi_user_kernel_random(&seed);
        }
        p->before[3][i] = (double)(float)(p->before[3][i] * p->before[3][i]);
        p->before[4][i] = p->before[3][i] + (i % 2 == 0 ? 0.25 : 0.0);
    }
    const char *moments[TCHI_MOMENTS] = {NULL};
    elementwise->moments(config, moments);
    p->has[0] = p->has[1] = true;
    for (int k = 0; k < TCHI_MOMENTS; k++) {
        p->has[2 + k] = moments[k] != NULL;
    }
}

/* --- to the device and back -------------------------------------------------------------------------------------- */

/* An array as it lies on the device. */
typedef union image {
    double wide[ELEMENTS];
    float narrow[ELEMENTS];
} image;

static tch_status send(const tch_context *context, const probe *p, bool momentum)
{
    const tch_backend *t = context->backend;
    image array;
    tch_hyper hyper = probe_hyper;
    tch_clock clock = {
        .step = STEP, .correction1 = 1.0 - pow(hyper.beta1, STEP), .correction2 = 1.0 - pow(hyper.beta2, STEP)};
    hyper.momentum = momentum ? hyper.momentum : 0.0;
    TCHI_TRY(t->device->copy_bytes(context->state, p->memory, &hyper, sizeof hyper, TCH_COPY_TO_DEVICE));
    TCHI_TRY(t->device->copy_bytes(context->state, p->memory + 256, &clock, sizeof clock, TCH_COPY_TO_DEVICE));
    for (int k = 0; k < ARRAYS; k++) {
        for (int i = 0; i < ELEMENTS; i++) {
            if (p->real == TCH_SCALAR_F64) {
                array.wide[i] = p->before[k][i];
            } else {
                array.narrow[i] = (float)p->before[k][i];
            }
        }
        TCHI_TRY(t->device->copy_bytes(context->state, array_at(p, k), &array, ELEMENTS * tchi_scalar_size(p->real),
                                       TCH_COPY_TO_DEVICE));
    }
    return TCH_OK;
}

static tch_status receive(const tch_context *context, const probe *p, double to[ARRAYS][ELEMENTS])
{
    image array;
    for (int k = 0; k < ARRAYS; k++) {
        TCHI_TRY(context->backend->device->copy_bytes(context->state, &array, array_at(p, k),
                                                      ELEMENTS * tchi_scalar_size(p->real), TCH_COPY_TO_HOST));
        for (int i = 0; i < ELEMENTS; i++) {
            to[k][i] = p->real == TCH_SCALAR_F64 ? array.wide[i] : (double)array.narrow[i];
        }
    }
    return TCH_OK;
}

static tch_update update_of(const probe *p, tch_rect *rect)
{
    *rect = (tch_rect){.param = array_at(p, 0),
                       .grad = array_at(p, 1),
                       .clock = (const tch_clock *)(p->memory + 256),
                       .rows = 1,
                       .cols = ELEMENTS,
                       .stride = ELEMENTS,
                       .factor = 1.0};
    for (int k = 0; k < 3; k++) {
        rect->state[k] = p->has[2 + k] ? array_at(p, 2 + k) : NULL;
    }
    return (tch_update){.rects = rect,
                        .count = 1,
                        .real = p->real,
                        .param_type = p->real,
                        .grad_type = p->real,
                        .block_type = p->real,
                        .hyper = (const tch_hyper *)p->memory};
}

/* --- the verdict ------------------------------------------------------------------------------------------------- */

static tch_status check_finite(const probe *p, const char *name)
{
    for (int k = 0; k < ARRAYS; k++) {
        for (int i = 0; i < ELEMENTS && p->has[k]; i++) {
            if (!isfinite(p->own[k][i])) {
                return tchi_fail(TCH_ERR_NUMERIC,
                                 "%.200s: its check gives %s = %g from p = %g, g = %g, m = %g, v = %g, vmax = %g", name,
                                 names[k], p->own[k][i], p->before[0][i], p->before[1][i], p->before[2][i],
                                 p->before[3][i], p->before[4][i]);
            }
        }
    }
    return TCH_OK;
}

/* The largest difference, relative to the most that the built-in changes an element by. */
static double difference(const probe *p, int k)
{
    double most = 0.0;
    double change = 0.0;
    for (int i = 0; i < ELEMENTS; i++) {
        most = tchi_user_kernel_worse(fabs(p->own[k][i] - p->built_in[k][i]), most);
        change = fmax(change, fabs(p->built_in[k][i] - p->before[k][i]));
    }
    return change > 0.0 ? most / change : most;
}

static tch_status compare(const probe *p, tchi_user_kernel *own, const char *name)
{
    for (int k = 0; k < ARRAYS; k++) {
        double d = p->has[k] ? difference(p, k) : 0.0;
        own->worst = tchi_user_kernel_worse(own->worst, d);
        if (own->tolerance > 0.0 && !(d <= own->tolerance)) {
            return tchi_fail(TCH_ERR_NUMERIC,
                             "%.200s: its check differs from the built-in in %s by %.3g of what an update changes, "
                             "which is above the tolerance of %g",
                             name, names[k], d, own->tolerance);
        }
    }
    return TCH_OK;
}

/* --- all of it --------------------------------------------------------------------------------------------------- */

static tch_status run(tch_optimizer *o, tchi_user_kernel *own, int32_t group, const char *name, probe *p)
{
    tch_rect rect;
    fill(p, o->method->elementwise, &tchi_group_at(o, group)->config);
    tch_update update = update_of(p, &rect);
    TCHI_TRY(send(o->context, p, p->has[2]));
    TCHI_TRY(tchi_user_kernel_update(o, own, group, &update));
    TCHI_TRY(receive(o->context, p, p->own));
    TCHI_TRY(check_finite(p, name));
    TCHI_TRY(send(o->context, p, p->has[2]));
    TCHI_TRY(tchi_elementwise_built_in(o, group, &update));
    TCHI_TRY(receive(o->context, p, p->built_in));
    return compare(p, own, name);
}

tch_status tchi_user_kernel_update_probe(tch_optimizer *optimizer, tchi_user_kernel *own, int32_t group,
                                         tch_scalar real, const char *name)
{
    probe *p = NULL;
    void *memory = NULL;
    TCHI_TRY(tchi_host_take(sizeof *p, "the check of a kernel", &p));
    p->real = real;
    tch_status status = tchi_pool_allocate(optimizer->context->pool, 512 + ARRAYS * array_bytes(p), &memory);
    p->memory = memory;
    if (status == TCH_OK) {
        status = run(optimizer, own, group, name, p);
    }
    tchi_pool_free(optimizer->context->pool, memory);
    tchi_host_release(p, sizeof *p);
    return status;
}
