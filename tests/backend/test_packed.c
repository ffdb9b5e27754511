/* Packed storage of symmetric matrices, through the operation table: `pack` copies the lower triangle row by row,
 * bitwise or rounding float32 to bfloat16, and does not read above it; `unpack` writes both triangles; neither writes
 * outside its result. Sizes around a tile, rows with gaps, more matrices than a grid has rows. */
#include "support/backend/device_matrices.h"
#include "support/random.h"
#include "support/testing.h"

typedef struct packed_case {
    int64_t n, gap, batch;
} packed_case;

static const packed_case cases[] = {{1, 0, 1},  {2, 1, 3},   {31, 0, 2},  {32, 0, 5},    {33, 3, 2},    {64, 0, 1},
                                    {65, 7, 3}, {100, 0, 4}, {257, 5, 2}, {1, 0, 70000}, {3, 2, 65537}, {7, 0, 0}};

/* Types of matrices and of packed storage. */
typedef struct packed_types {
    tch_scalar full, kept;
    int64_t full_size, kept_size;
} packed_types;

static const packed_types types[] = {{TCH_SCALAR_F32, TCH_SCALAR_F32, 4, 4},
                                     {TCH_SCALAR_F64, TCH_SCALAR_F64, 8, 8},
                                     {TCH_SCALAR_F32, TCH_SCALAR_BF16, 4, 2}};

/* Device memory and its initial contents. */
typedef struct memory {
    unsigned char *there, *image;
    int64_t bytes;
} memory;

/* A finite float32 of any magnitude, every second one at or next to the midpoint of two bfloat16. */
static uint32_t near_the_middle(test_random *random)
{
    static const uint32_t low[] = {0x0000, 0x7FFF, 0x8000, 0x8001};
    uint64_t bits = test_random_bits(random);
    uint32_t exponent = (uint32_t)(bits >> 33) % 254;
    uint32_t value = ((uint32_t)bits & 0x807FFFFFu) | exponent << 23;
    return bits >> 63 ? (value & 0xFFFF0000u) | low[bits >> 61 & 3] : value;
}

static uint16_t rounded_to_even(uint32_t bits)
{
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static memory make_memory(tch_context *context, int64_t elements, int64_t size, bool finite, test_random *random)
{
    memory m = {.bytes = (elements + 2 * GUARD) * size};
    m.image = test_alloc((size_t)m.bytes);
    for (int64_t i = 0; i < m.bytes; i++) {
        m.image[i] = (unsigned char)test_random_bits(random);
    }
    for (int64_t i = 0; finite && i < m.bytes / 4; i++) {
        uint32_t bits = near_the_middle(random);
        memcpy(m.image + 4 * i, &bits, sizeof bits);
    }
    m.there = device_copy(context, m.image, m.bytes);
    return m;
}

static void check_memory(tch_context *context, const memory *m, const char *what)
{
    CHECK(memcmp(device_fetch(context, m->there, m->bytes), m->image, (size_t)m->bytes) == 0,
          "%s: other bits than expected", what);
}

/* Converts one element. */
static void expect_element(const packed_types *t, unsigned char *full, unsigned char *kept, bool unpacks)
{
    if (t->kept != TCH_SCALAR_BF16) {
        memcpy(unpacks ? full : kept, unpacks ? kept : full, (size_t)t->full_size);
        return;
    }
    uint32_t bits;
    uint16_t half;
    memcpy(&bits, full, sizeof bits);
    memcpy(&half, kept, sizeof half);
    half = unpacks ? half : rounded_to_even(bits);
    bits = unpacks ? (uint32_t)half << 16 : bits;
    memcpy(full, &bits, sizeof bits);
    memcpy(kept, &half, sizeof half);
}

/* The expected images: packed lower triangles, or both triangles unpacked. */
static void expect_triangles(const tch_matrices *x, const packed_types *t, unsigned char *full, unsigned char *packed,
                             bool unpacks)
{
    for (int64_t b = 0, k = 0; b < x->batch; b++) {
        for (int64_t i = 0; i < x->rows; i++) {
            for (int64_t j = 0; j <= i; j++, k++) {
                unsigned char *lower = full + (GUARD + b * x->stride + i * x->ld + j) * t->full_size;
                unsigned char *upper = full + (GUARD + b * x->stride + j * x->ld + i) * t->full_size;
                unsigned char *kept = packed + (GUARD + k) * t->kept_size;
                expect_element(t, lower, kept, unpacks);
                if (unpacks) {
                    expect_element(t, upper, kept, true);
                }
            }
        }
    }
}

static void go_and_come_back(tch_context *context, const packed_case *c, const packed_types *t, uint64_t seed)
{
    const tch_matrix_ops *matrix = context->backend->matrix;
    test_random random = test_random_stream(seed);
    bool finite = t->kept == TCH_SCALAR_BF16;
    tch_matrices x = {NULL, t->full, c->n, c->n, c->n + c->gap, c->batch, c->n * (c->n + c->gap) + c->gap};
    memory full = make_memory(context, c->batch * x.stride, t->full_size, finite, &random);
    memory packed = make_memory(context, c->batch * (c->n * (c->n + 1) / 2), t->kept_size, false, &random);
    x.data = full.there + GUARD * t->full_size;
    CHECK_OK(matrix->pack(context->state, &x, t->kept, packed.there + GUARD * t->kept_size, 0));
    expect_triangles(&x, t, full.image, packed.image, false);
    check_memory(context, &full, "pack, what it reads");
    check_memory(context, &packed, "pack");
    full = make_memory(context, c->batch * x.stride, t->full_size, false, &random);
    x.data = full.there + GUARD * t->full_size;
    CHECK_OK(matrix->pack(context->state, &x, t->kept, packed.there + GUARD * t->kept_size, 1));
    expect_triangles(&x, t, full.image, packed.image, true);
    check_memory(context, &packed, "unpack, what it reads");
    check_memory(context, &full, "unpack");
}

TEST(triangles_go_and_come_back)
{
    for (int k = 0; k < (int)(TEST_COUNT(cases) * TEST_COUNT(types)); k++) {
        const packed_case *c = &cases[k / (int)TEST_COUNT(types)];
        const packed_types *t = &types[k % (int)TEST_COUNT(types)];
        if (c->batch > 1000 && getenv("TORCHIUM_EMULATOR_LOG") != NULL) {
            continue; /* a block is many fibers on an emulated device */
        }
        test_case("%lld x %lld, %lld bytes, kept in %lld", (long long)c->batch, (long long)c->n,
                  (long long)t->full_size, (long long)t->kept_size);
        go_and_come_back(*state, c, t, (uint64_t)k);
    }
}

TEST_MAIN(test_open_context, test_close_context)
