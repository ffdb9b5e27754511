/* Device memory, released after the test, and batches of matrices copied there from host values and back. */
#ifndef SUPPORT_DEVICE_MATRICES_H
#define SUPPORT_DEVICE_MATRICES_H

#include "core/context.h"

#define GUARD 2048 /* elements before and after the matrices of a batch */

/* Whether the device is emulated, which needs small cases. */
bool device_is_emulated(void);

void *device_copy(tch_context *context, const void *bytes, int64_t count);
/* Every byte 0xff: NaN, or -1. */
void *device_poison(tch_context *context, int64_t count);
/* In the test's memory. */
void *device_fetch(tch_context *context, const void *device, int64_t count);

/* Float32 or float64 matrices of row-major values, rounded to the type; NULL and the gaps between rows are NaN. */
tch_matrices device_matrices(tch_context *context, tch_scalar type, int64_t batch, int64_t rows, int64_t cols,
                             int64_t gap, const double *values);
/* Row-major values; fails the test if a gap was written. */
double *device_values(tch_context *context, const tch_matrices *m);
int32_t *device_integers(tch_context *context, const int32_t *device, int64_t count);

double device_roundoff(tch_scalar type);
const char *device_type_name(tch_scalar type);
/* Rounds values to the type. */
void device_round(tch_scalar type, int64_t count, double *values);

/* --- batches between guards -------------------------------------------------------------------------------------- */

/* Matrices with gaps after their rows, an unused row between them, and guards around all, with every bit set. The host
 * image is initialized like that as a whole. */
typedef struct batch {
    tch_matrices m;
    tch_dtype dtype; /* of a plane; split matrices have two: rounded to nearest, and the residual */
    int64_t planes;
    unsigned char *image; /* expected contents, guards included */
    char *memory;
    int64_t bytes;
} batch;

/* Rows `gap` elements apart. Nothing is copied yet. */
batch batch_make(tch_context *context, tch_scalar type, int64_t count, int64_t rows, int64_t cols, int64_t gap);
void batch_send(tch_context *context, const batch *b);
/* The image read back from the device. */
void *batch_fetch(tch_context *context, const batch *b);

/* The offset of an element in an image; planes 2 z and 2 z + 1 of split matrices are those of matrix z. */
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

/* Checks that every bit outside the matrices is unchanged. */
void batch_check_guards(const batch *b, const void *after);
/* On the device: the bits of the largest float32 of each matrix. */
void *batch_largest(tch_context *context, const batch *b);

#endif
