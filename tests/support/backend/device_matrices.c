#include "device_matrices.h"

#include <float.h>

#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

bool device_is_emulated(void)
{
    return getenv("TORCHIUM_EMULATOR_CAPABILITY") != NULL;
}

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

typedef struct device_block {
    tch_release_op *release; /* its table may be gone: a test can have its own */
    void *state, *memory;
    int64_t bytes;
} device_block;

static void release_block(void *thing)
{
    const device_block *block = thing;
    block->release(block->state, block->memory, block->bytes);
}

void *device_copy(tch_context *context, const void *bytes, int64_t count)
{
    void *device = NULL;
    device_block *block = test_alloc(sizeof *block);
    CHECK_OK(context->backend->device->allocate(context->state, count > 0 ? count : 1, &device));
    *block = (device_block){context->backend->device->release, context->state, device, count > 0 ? count : 1};
    test_own(block, release_block);
    CHECK_OK(context->backend->device->copy_bytes(context->state, device, bytes, count, TCH_COPY_TO_DEVICE));
    return device;
}

void *device_poison(tch_context *context, int64_t count)
{
    char *image = test_alloc((size_t)count);
    memset(image, 0xff, (size_t)count);
    return device_copy(context, image, count);
}

void *device_fetch(tch_context *context, const void *device, int64_t count)
{
    void *image = test_alloc((size_t)count);
    CHECK_OK(context->backend->device->copy_bytes(context->state, image, device, count, TCH_COPY_TO_HOST));
    return image;
}

static int64_t bytes_of(const tch_matrices *m)
{
    return m->batch * m->stride * (m->type == TCH_SCALAR_F64 ? 8 : 4);
}

tch_matrices device_matrices(tch_context *context, tch_scalar type, int64_t batch, int64_t rows, int64_t cols,
                             int64_t gap, const double *values)
{
    tch_matrices m = {NULL, type, rows, cols, cols + gap, batch, rows * (cols + gap)};
    char *image = test_alloc((size_t)bytes_of(&m));
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

double *device_values(tch_context *context, const tch_matrices *m)
{
    char *image = device_fetch(context, m->data, bytes_of(m));
    double *values = test_alloc((size_t)(m->batch * m->rows * m->cols) * sizeof *values);
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
    return device_fetch(context, device, count * (int64_t)sizeof *device);
}

/* --- batches between guards -------------------------------------------------------------------------------------- */

static tch_dtype plane_type(tch_scalar type)
{
    static const tch_dtype types[TCH_SCALAR_COUNT] = {
        [TCH_SCALAR_F64] = {TCH_FLOAT, 64, 1},     [TCH_SCALAR_F32] = {TCH_FLOAT, 32, 1},
        [TCH_SCALAR_F16] = {TCH_FLOAT, 16, 1},     [TCH_SCALAR_BF16] = {TCH_BFLOAT, 16, 1},
        [TCH_SCALAR_BF16X2] = {TCH_BFLOAT, 16, 1},
    };
    return types[type];
}

batch batch_make(tch_context *context, tch_scalar type, int64_t count, int64_t rows, int64_t cols, int64_t gap)
{
    batch b = {.dtype = plane_type(type), .planes = type == TCH_SCALAR_BF16X2 ? 2 : 1};
    int64_t size = (int64_t)tch_dtype_size(b.dtype);
    b.m = (tch_matrices){NULL, type, rows, cols, cols + gap, count, (rows + 1) * (cols + gap)};
    b.bytes = (count * b.planes * b.m.stride + 2 * GUARD) * size;
    b.image = test_alloc((size_t)b.bytes);
    memset(b.image, 0xff, (size_t)b.bytes);
    b.memory = device_copy(context, b.image, b.bytes);
    b.m.data = b.memory + GUARD * size;
    return b;
}

void batch_send(tch_context *context, const batch *b)
{
    CHECK_OK(context->backend->device->copy_bytes(context->state, b->memory, b->image, b->bytes, TCH_COPY_TO_DEVICE));
}

void *batch_fetch(tch_context *context, const batch *b)
{
    return device_fetch(context, b->memory, b->bytes);
}

void *batch_element(const batch *b, void *image, int64_t plane, int64_t i, int64_t j)
{
    return (char *)image + batch_place(b, plane, i, j) * (int64_t)tch_dtype_size(b->dtype);
}

double batch_decode(const batch *b, const void *image, int64_t z, int64_t i, int64_t j)
{
    double sum = 0.0;
    for (int64_t plane = z * b->planes; plane < (z + 1) * b->planes; plane++) {
        sum += test_decode(b->dtype, batch_element(b, (void *)image, plane, i, j));
    }
    return sum;
}

void batch_put(const batch *b, int64_t z, int64_t i, int64_t j, double number)
{
    for (int64_t plane = z * b->planes; plane < (z + 1) * b->planes; plane++) {
        void *here = batch_element(b, b->image, plane, i, j);
        test_encode(b->dtype, number, here);
        number -= test_decode(b->dtype, here);
    }
}

void batch_fill(const batch *b, double magnitude, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    for (int64_t e = 0; e < b->m.batch * b->m.rows * b->m.cols; e++) {
        int64_t row = e / b->m.cols;
        batch_put(b, row / b->m.rows, row % b->m.rows, e % b->m.cols, magnitude * test_random_normal(&random));
    }
}

/* Compares a run of elements with the host image. */
static void check_unwritten(const batch *b, const void *after, int64_t from, int64_t to)
{
    size_t size = tch_dtype_size(b->dtype), byte = (size_t)(GUARD + from) * size;
    CHECK(memcmp((const char *)after + byte, b->image + byte, (size_t)(to - from) * size) == 0,
          "elements beside the matrices were written, of %lld to %lld", (long long)from, (long long)to);
}

void batch_check_guards(const batch *b, const void *after)
{
    int64_t end = b->m.batch * b->planes * b->m.stride;
    check_unwritten(b, after, -GUARD, 0);
    for (int64_t row = 0; row < end; row += b->m.ld) {
        bool unused = row % b->m.stride / b->m.ld >= b->m.rows;
        check_unwritten(b, after, row + (unused ? 0 : b->m.cols), row + b->m.ld);
    }
    check_unwritten(b, after, end, end + GUARD);
}

void *batch_largest(tch_context *context, const batch *b)
{
    float *largest = test_alloc((size_t)b->m.batch * sizeof *largest);
    for (int64_t z = 0; z < b->m.batch; z++) {
        largest[z] = 0.0F;
        for (int64_t e = 0; e < b->m.rows * b->m.cols; e++) {
            largest[z] = fmaxf(largest[z], fabsf((float)batch_get(b, b->image, z, e / b->m.cols, e % b->m.cols)));
        }
    }
    return device_copy(context, largest, b->m.batch * (int64_t)sizeof *largest);
}
