/* Memory of a device and batches of matrices in it, from values on the host and back. */
#ifndef SUPPORT_DEVICE_MATRICES_H
#define SUPPORT_DEVICE_MATRICES_H

#include "core/context.h"

#define GUARD 2048 /* elements before and behind the matrices of a batch */

/* Whether the CPU replaces a GPU, which wants small cases. */
bool device_is_emulated(void);

void *device_copy(tch_context *context, const void *bytes, int64_t count);
/* Every byte 0xff: NaN, or -1. */
void *device_poison(tch_context *context, int64_t count);
/* In memory of the test. */
void *device_fetch(tch_context *context, const void *device, int64_t count);
void device_release(tch_context *context, const void *device, int64_t count);

/* Matrices of float32 or float64: values, row-major, rounded to the type; NULL, and gaps between rows, are NaN. */
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

/* --- batches between guards -------------------------------------------------------------------------------------- */

/* Matrices with gaps behind their rows, a row that belongs to none between them, and guards around all: every bit of
 * these is set. The image on the host begins like that as a whole. */
typedef struct batch {
    tch_matrices m;
    tch_dtype dtype; /* of a plane; split matrices have two: numbers to nearest, and what that leaves of them */
    int64_t planes;
    unsigned char *image; /* what was put there, guards included */
    char *memory;
    int64_t bytes;
} batch;

/* Rows `gap` elements apart. Nothing is sent yet. */
batch batch_make(tch_context *context, tch_scalar type, int64_t count, int64_t rows, int64_t cols, int64_t gap);
void batch_drop(tch_context *context, const batch *b);
void batch_send(tch_context *context, const batch *b);
/* The image as it is on the device. */
void *batch_fetch(tch_context *context, const batch *b);

/* The place of an element in an image; planes 2 z and 2 z + 1 of split matrices are those of matrix z. */
static inline int64_t batch_place(const batch *b, int64_t plane, int64_t i, int64_t j)
{
    return GUARD + plane * b->m.stride + i * b->m.ld + j;
}
void *batch_element(const batch *b, void *image, int64_t plane, int64_t i, int64_t j);
double batch_decode(const batch *b, const void *image, int64_t z, int64_t i, int64_t j);
static inline double batch_get(const batch *b, const void *image, int64_t z, int64_t i, int64_t j)
{
    return b->m.type == TCH_SCALAR_F32 ? (double)((const float *)image)[batch_place(b, z, i, j)]
                                       : batch_decode(b, image, z, i, j);
}
/* In the batch's own image. */
void batch_put(const batch *b, int64_t z, int64_t i, int64_t j, double number);
/* Normal numbers times `magnitude`. */
void batch_fill(const batch *b, double magnitude, uint64_t stream);

/* Every bit that is not of a matrix is what it was. */
void batch_check_guards(const batch *b, const void *after);
/* On the device: the bits of the largest float32 of each matrix. */
void *batch_largest(tch_context *context, const batch *b);

#endif
