/* Shared by the examples: a check that exits, where a real program would handle the error, and points on the arms of a
 * spiral, for a small network to classify. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <torchium/torchium.h>

static inline void must(tch_status status)
{
    if (status != TCH_OK) {
        fprintf(stderr, "%s: %s\n", tch_status_name(status), tch_last_error());
        exit(1);
    }
}

static inline tch_tensor *create_tensor(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape)
{
    tch_tensor *tensor;
    must(tch_tensor_create(context, dtype, ndim, shape, TCH_CONTIGUOUS, &tensor));
    return tensor;
}

/* A copy on the device of a tensor in this program's memory. */
static inline tch_tensor *send_tensor(tch_context *context, const tch_tensor *host)
{
    tch_tensor *tensor = create_tensor(context, host->dtype, host->ndim, host->shape);
    must(tch_tensor_copy(context, tensor, host));
    return tensor;
}

enum { SPIRAL_ROWS = 900, SPIRAL_ARMS = 3 };

/* Points [SPIRAL_ROWS, 2] on the context's device, and which arm each is on. */
static inline void create_spirals(tch_context *context, tch_tensor **points, tch_tensor **arms)
{
    static float numbers[2 * SPIRAL_ROWS];
    static int32_t classes[SPIRAL_ROWS];
    int64_t shape[] = {SPIRAL_ROWS, 2};
    for (int i = 0; i < SPIRAL_ROWS; i++) {
        float radius = 0.05f + 0.95f * (float)i / SPIRAL_ROWS;
        float angle = 4.0f * radius + 2.0944f * (float)(i % SPIRAL_ARMS);
        numbers[2 * i] = radius * cosf(angle);
        numbers[2 * i + 1] = radius * sinf(angle);
        classes[i] = i % SPIRAL_ARMS;
    }
    tch_tensor host_points = tch_tensor_view(numbers, TCH_FLOAT32, 2, shape);
    tch_tensor host_arms = tch_tensor_view(classes, TCH_INT32, 1, shape);
    *points = send_tensor(context, &host_points);
    *arms = send_tensor(context, &host_arms);
}

#endif
