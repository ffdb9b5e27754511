/* Batches of float32 on a device, with guards around and between the matrices: all bits set, which is NaN. */
#ifndef SUPPORT_GUARDED_BATCH_H
#define SUPPORT_GUARDED_BATCH_H

#include "core/context.h"

#define GUARD 256 /* elements before and behind the matrices */

typedef struct batch {
    tch_matrices m;
    float *image; /* what was put there, guards included */
    char *memory;
    int64_t bytes;
} batch;

/* `gap` elements between rows. */
batch batch_make(tch_context *context, int64_t count, int64_t rows, int64_t cols, int64_t gap);
void batch_drop(tch_context *context, batch *b);
/* Of an element in an image. */
int64_t batch_place(const batch *b, int64_t z, int64_t i, int64_t j);
void batch_fill(const batch *b, double magnitude, uint64_t stream);
void batch_send(tch_context *context, const batch *b);
float *batch_fetch(tch_context *context, const batch *b);
/* Every bit that is not of a matrix is what it was. */
void batch_check_guards(const batch *b, const float *after);
/* On the device: the bits of the largest element of each matrix. */
void *batch_largest(tch_context *context, const batch *b);

#endif
