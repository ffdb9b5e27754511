/* Batches of matrices on a device, of float32 or float64, from values on the host and back. */
#ifndef SUPPORT_DEVICE_MATRICES_H
#define SUPPORT_DEVICE_MATRICES_H

#include "core/context.h"

void *device_copy(tch_context *context, const void *bytes, int64_t count);
/* Every byte 0xff: NaN, or -1. */
void *device_poison(tch_context *context, int64_t count);
void device_release(tch_context *context, void *device, int64_t count);

/* Values, row-major, rounded to the type; NULL, and gaps between rows, are NaN. */
tch_matrices device_matrices(tch_context *context, tch_scalar type, int64_t batch, int64_t rows, int64_t cols,
                             int64_t gap, const double *values);
void device_matrices_drop(tch_context *context, tch_matrices *m);
/* Row-major values, and a check that nothing was written between the rows. */
double *device_values(tch_context *context, const tch_matrices *m);
int32_t *device_integers(tch_context *context, const int32_t *device, int64_t count);

double device_roundoff(tch_scalar type);
const char *device_type_name(tch_scalar type);
/* As the type holds them. */
void device_round(tch_scalar type, int64_t count, double *values);

#endif
