/* See device_matrices.h. */
#include "device_matrices.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "support/testing.h"

double device_roundoff(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? DBL_EPSILON / 2 : FLT_EPSILON / 2;
}

const char *device_type_name(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? "float64" : "float32";
}

void device_round(tch_scalar type, int64_t count, double *values)
{
    for (int64_t k = 0; type == TCH_SCALAR_F32 && k < count; k++) {
        values[k] = (double)(float)values[k];
    }
}

void *device_copy(tch_context *context, const void *bytes, int64_t count)
{
    void *device = NULL;
    CHECK_OK(context->backend->device->allocate(context->state, count > 0 ? count : 1, &device));
    CHECK_OK(context->backend->device->copy_bytes(context->state, device, bytes, count, TCH_COPY_TO_DEVICE));
    return device;
}

void *device_poison(tch_context *context, int64_t count)
{
    char *image = test_alloc((size_t)count + 1);
    memset(image, 0xff, (size_t)count);
    return device_copy(context, image, count);
}

void device_release(tch_context *context, void *device, int64_t count)
{
    context->backend->device->release(context->state, device, count > 0 ? count : 1);
}

static int64_t bytes_of(const tch_matrices *m)
{
    return m->batch * m->stride * (m->type == TCH_SCALAR_F64 ? 8 : 4);
}

tch_matrices device_matrices(tch_context *context, tch_scalar type, int64_t batch, int64_t rows, int64_t cols,
                             int64_t gap, const double *values)
{
    tch_matrices m = {NULL, type, rows, cols, cols + gap, batch, rows * (cols + gap)};
    char *image = test_alloc((size_t)bytes_of(&m) + 1);
    memset(image, 0xff, (size_t)bytes_of(&m));
    for (int64_t k = 0; values != NULL && k < batch * rows * cols; k++) {
        int64_t at = k / cols * m.ld + k % cols;
        if (type == TCH_SCALAR_F64) {
            ((double *)image)[at] = values[k];
        } else {
            ((float *)image)[at] = (float)values[k];
        }
    }
    m.data = device_copy(context, image, bytes_of(&m));
    return m;
}

void device_matrices_drop(tch_context *context, tch_matrices *m)
{
    device_release(context, m->data, bytes_of(m));
}

double *device_values(tch_context *context, const tch_matrices *m)
{
    char *image = test_alloc((size_t)bytes_of(m) + 1);
    double *values = test_alloc((size_t)(m->batch * m->rows * m->cols) * sizeof *values + 1);
    CHECK_OK(context->backend->device->copy_bytes(context->state, image, m->data, bytes_of(m), TCH_COPY_TO_HOST));
    for (int64_t at = 0; at < m->batch * m->rows * m->ld; at++) {
        double value = m->type == TCH_SCALAR_F64 ? ((double *)image)[at] : (double)((float *)image)[at];
        if (at % m->ld < m->cols) {
            values[at / m->ld * m->cols + at % m->ld] = value;
        } else {
            CHECK(isnan(value), "a gap between rows was written");
        }
    }
    return values;
}

int32_t *device_integers(tch_context *context, const int32_t *device, int64_t count)
{
    int32_t *values = test_alloc((size_t)count * sizeof *values + 1);
    CHECK_OK(context->backend->device->copy_bytes(context->state, values, device, count * (int64_t)sizeof *values,
                                                  TCH_COPY_TO_HOST));
    return values;
}
