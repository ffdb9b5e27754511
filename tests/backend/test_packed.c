/* Packed storage of symmetric matrices, through the operations table: `pack` moves the bits of the lower triangle, row
 * after row, whatever they mean, and reads nothing above it; `unpack` writes both triangles; neither writes beside its
 * result. Sizes around a tile, rows with gaps between them, more matrices than a grid has rows. */
#include <stdlib.h>
#include <string.h>

#include "core/context.h"
#include "support/random.h"
#include "support/testing.h"

#define GUARD 64 /* elements before and behind */

typedef struct packed_case {
    int64_t n, gap, batch;
} packed_case;

static const packed_case cases[] = {{1, 0, 1},  {2, 1, 3},   {31, 0, 2},  {32, 0, 5},    {33, 3, 2},    {64, 0, 1},
                                    {65, 7, 3}, {100, 0, 4}, {257, 5, 2}, {1, 0, 70000}, {3, 2, 65537}, {7, 0, 0}};

/* Memory of the device and what was put there. */
typedef struct memory {
    unsigned char *there, *image;
    int64_t bytes;
} memory;

static memory make(tch_context *context, int64_t elements, int64_t size, test_random *random)
{
    memory m = {.bytes = (elements + 2 * GUARD) * size};
    void *there = NULL;
    m.image = test_alloc((size_t)m.bytes);
    for (int64_t i = 0; i < m.bytes; i++) {
        m.image[i] = (unsigned char)test_random_bits(random);
    }
    CHECK_OK(context->backend->device->allocate(context->state, m.bytes, &there));
    m.there = there;
    CHECK_OK(context->backend->device->copy_bytes(context->state, there, m.image, m.bytes, TCH_COPY_TO_DEVICE));
    return m;
}

static void check(tch_context *context, const memory *m, const char *what)
{
    unsigned char *got = test_alloc((size_t)m->bytes);
    CHECK_OK(context->backend->device->copy_bytes(context->state, got, m->there, m->bytes, TCH_COPY_TO_HOST));
    CHECK(memcmp(got, m->image, (size_t)m->bytes) == 0, "%s: other bits than expected", what);
}

static void drop(tch_context *context, const memory *m)
{
    context->backend->device->release(context->state, m->there, m->bytes);
}

/* The lower triangle of every matrix, in the images: to the packed one, or back to both triangles. */
static void expect(const tch_matrices *x, int64_t size, unsigned char *full, unsigned char *packed, bool unpacks)
{
    for (int64_t b = 0, k = 0; b < x->batch; b++) {
        for (int64_t i = 0; i < x->rows; i++) {
            for (int64_t j = 0; j <= i; j++, k++) {
                unsigned char *lower = full + (GUARD + b * x->stride + i * x->ld + j) * size;
                unsigned char *upper = full + (GUARD + b * x->stride + j * x->ld + i) * size;
                unsigned char *kept = packed + (GUARD + k) * size;
                memcpy(unpacks ? lower : kept, unpacks ? kept : lower, (size_t)size);
                if (unpacks) {
                    memcpy(upper, kept, (size_t)size);
                }
            }
        }
    }
}

static void triangles_go_and_come_back(void **state)
{
    tch_context *context = *state;
    const tch_matrix_ops *matrix = context->backend->matrix;
    for (int k = 0; k < 2 * (int)TEST_COUNT(cases); k++) {
        const packed_case *c = &cases[k / 2];
        if (c->batch > 1000 && getenv("TORCHIUM_EMULATOR_LOG") != NULL) {
            continue; /* a block is many fibers on the emulated device */
        }
        tch_scalar type = k % 2 == 0 ? TCH_SCALAR_F32 : TCH_SCALAR_F64;
        int64_t size = k % 2 == 0 ? 4 : 8;
        test_random random = test_random_stream((uint64_t)k);
        test_case("%lld x %lld, %lld bytes", (long long)c->batch, (long long)c->n, (long long)size);
        tch_matrices x = {NULL, type, c->n, c->n, c->n + c->gap, c->batch, c->n * (c->n + c->gap) + c->gap};
        memory full = make(context, c->batch * x.stride, size, &random);
        memory packed = make(context, c->batch * (c->n * (c->n + 1) / 2), size, &random);
        x.data = full.there + GUARD * size;
        CHECK_OK(matrix->pack(context->state, &x, packed.there + GUARD * size));
        expect(&x, size, full.image, packed.image, false);
        check(context, &full, "pack, what it reads");
        check(context, &packed, "pack");
        drop(context, &full);
        full = make(context, c->batch * x.stride, size, &random);
        x.data = full.there + GUARD * size;
        CHECK_OK(matrix->unpack(context->state, packed.there + GUARD * size, &x));
        expect(&x, size, full.image, packed.image, true);
        check(context, &packed, "unpack, what it reads");
        check(context, &full, "unpack");
        drop(context, &full);
        drop(context, &packed);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(triangles_go_and_come_back)};
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
