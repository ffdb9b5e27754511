/* See guarded_batch.h. */
#include "guarded_batch.h"

#include <math.h>
#include <string.h>

#include "support/random.h"
#include "support/testing.h"

batch batch_make(tch_context *context, int64_t count, int64_t rows, int64_t cols, int64_t gap)
{
    batch b = {.m = {NULL, TCH_SCALAR_F32, rows, cols, cols + gap, count, (rows + 1) * (cols + gap)}};
    void *memory = NULL;
    b.bytes = (count * b.m.stride + 2 * GUARD) * 4;
    b.image = test_alloc((size_t)b.bytes);
    memset(b.image, 0xff, (size_t)b.bytes);
    CHECK_OK(context->backend->device->allocate(context->state, b.bytes, &memory));
    b.memory = memory;
    b.m.data = b.memory + (ptrdiff_t)GUARD * 4;
    return b;
}

void batch_drop(tch_context *context, batch *b)
{
    context->backend->device->release(context->state, b->memory, b->bytes);
}

int64_t batch_place(const batch *b, int64_t z, int64_t i, int64_t j)
{
    return GUARD + z * b->m.stride + i * b->m.ld + j;
}

void batch_send(tch_context *context, const batch *b)
{
    CHECK_OK(context->backend->device->copy_bytes(context->state, b->memory, b->image, b->bytes, TCH_COPY_TO_DEVICE));
}

float *batch_fetch(tch_context *context, const batch *b)
{
    float *image = test_alloc((size_t)b->bytes);
    CHECK_OK(context->backend->device->copy_bytes(context->state, image, b->memory, b->bytes, TCH_COPY_TO_HOST));
    return image;
}

void batch_fill(const batch *b, double magnitude, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    for (int64_t e = 0; e < b->m.batch * b->m.rows * b->m.cols; e++) {
        int64_t row = e / b->m.cols;
        float *here = b->image + batch_place(b, row / b->m.rows, row % b->m.rows, e % b->m.cols);
        *here = (float)(magnitude * test_random_normal(&random));
    }
}

void batch_check_guards(const batch *c, const float *after)
{
    for (int64_t e = 0; e < c->bytes / 4; e++) {
        int64_t inside = e - GUARD;
        bool between = inside < 0 || inside >= c->m.batch * c->m.stride || inside % c->m.ld >= c->m.cols ||
                       inside % c->m.stride / c->m.ld >= c->m.rows;
        CHECK(!between || memcmp(after + e, c->image + e, 4) == 0, "element %lld beside the matrices was written",
              (long long)inside);
    }
}

void *batch_largest(tch_context *context, const batch *a)
{
    const int64_t bytes = a->m.batch * (int64_t)sizeof(float);
    float *largest = test_alloc((size_t)bytes);
    void *there = NULL;
    for (int64_t z = 0; z < a->m.batch; z++) {
        largest[z] = 0.0F;
        for (int64_t e = 0; e < a->m.rows * a->m.cols; e++) {
            largest[z] = fmaxf(largest[z], fabsf(a->image[batch_place(a, z, e / a->m.cols, e % a->m.cols)]));
        }
    }
    CHECK_OK(context->backend->device->allocate(context->state, bytes, &there));
    CHECK_OK(context->backend->device->copy_bytes(context->state, there, largest, bytes, TCH_COPY_TO_DEVICE));
    return there;
}
