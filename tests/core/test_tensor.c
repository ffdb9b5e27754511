/* Tensors: the layout shared with DLPack, creation, queries, copies with conversion, and fills. */
#include "support/elements.h"
#include "support/messages.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

/* DLPack's structures as in its specification. */
struct dl_device {
    int32_t device_type; /* an enum with int32_t behind it */
    int32_t device_id;
};

struct dl_data_type {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct dl_tensor {
    void *data;
    struct dl_device device;
    int32_t ndim;
    struct dl_data_type dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
};

TEST(layout_is_dltensors)
{
    assert_int_equal(sizeof(tch_tensor), 48);
    assert_int_equal(sizeof(tch_tensor), sizeof(struct dl_tensor));
    assert_int_equal(_Alignof(tch_tensor), _Alignof(struct dl_tensor));
    assert_int_equal(offsetof(tch_tensor, device), offsetof(struct dl_tensor, device));
    assert_int_equal(offsetof(tch_tensor, ndim), offsetof(struct dl_tensor, ndim));
    assert_int_equal(offsetof(tch_tensor, dtype), offsetof(struct dl_tensor, dtype));
    assert_int_equal(offsetof(tch_tensor, shape), offsetof(struct dl_tensor, shape));
    assert_int_equal(offsetof(tch_tensor, strides), offsetof(struct dl_tensor, strides));
    assert_int_equal(offsetof(tch_tensor, byte_offset), offsetof(struct dl_tensor, byte_offset));
    assert_int_equal(sizeof(tch_device), sizeof(struct dl_device));
    assert_int_equal(offsetof(tch_device, index), offsetof(struct dl_device, device_id));
    assert_int_equal(sizeof(tch_dtype), sizeof(struct dl_data_type));
    assert_int_equal(offsetof(tch_dtype, bits), offsetof(struct dl_data_type, bits));
    assert_int_equal(offsetof(tch_dtype, lanes), offsetof(struct dl_data_type, lanes));
    assert_int_equal(TCH_DEVICE_CPU, 1);
    assert_int_equal(TCH_DEVICE_CUDA, 2);
    assert_int_equal(TCH_DEVICE_CUDA_HOST, 3);
    assert_int_equal(TCH_INT, 0);
    assert_int_equal(TCH_UINT, 1);
    assert_int_equal(TCH_FLOAT, 2);
    assert_int_equal(TCH_BFLOAT, 4);
}

TEST(a_dltensor_is_accepted_as_it_is)
{
    tch_context *context = *state;
    float from[6] = {1, 2, 3, 4, 5, 6};
    float to[6] = {0};
    int64_t shape[2] = {2, 3};
    struct dl_tensor foreign = {from, {1, 0}, 2, {2, 32, 1}, shape, NULL, 0};
    tch_tensor src;
    memcpy(&src, &foreign, sizeof src);
    tch_tensor *middle = NULL;
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &middle));
    CHECK_OK(tch_tensor_copy(context, middle, &src));
    tch_tensor dst = tch_tensor_view(to, TCH_FLOAT32, 2, shape);
    CHECK_OK(tch_tensor_copy(context, &dst, middle));
    CHECK_OK(tch_context_synchronize(context));
    assert_memory_equal(from, to, sizeof from);
    tch_tensor_destroy(middle);
}

static const tch_dtype dtypes[] = {{TCH_FLOAT, 64, 1},  {TCH_FLOAT, 32, 1}, {TCH_FLOAT, 16, 1},
                                   {TCH_BFLOAT, 16, 1}, {TCH_INT, 32, 1},   {TCH_INT, 64, 1}};
#define DTYPES (sizeof dtypes / sizeof dtypes[0])

TEST(dtypes_have_sizes_and_names)
{
    static const size_t sizes[] = {8, 4, 2, 2, 4, 8};
    static const char *const names[] = {"float64", "float32", "float16", "bfloat16", "int32", "int64"};
    for (size_t i = 0; i < DTYPES; i++) {
        assert_int_equal(tch_dtype_size(dtypes[i]), sizes[i]);
        assert_string_equal(tch_dtype_name(dtypes[i]), names[i]);
        for (size_t j = 0; j < DTYPES; j++) {
            assert_int_equal(tch_dtype_equal(dtypes[i], dtypes[j]), i == j);
        }
    }
    const tch_dtype strange[] = {{TCH_FLOAT, 8, 1}, {TCH_FLOAT, 32, 2}, {TCH_UINT, 32, 1}, {9, 32, 1}, {0, 0, 0}};
    for (size_t i = 0; i < TEST_COUNT(strange); i++) {
        assert_int_equal(tch_dtype_size(strange[i]), 0);
        assert_string_equal(tch_dtype_name(strange[i]), "unknown");
    }
}

static int64_t numel(int32_t ndim, int64_t *shape)
{
    tch_tensor t = tch_tensor_view(NULL, TCH_FLOAT32, ndim, shape);
    return tch_tensor_numel(&t);
}

TEST(elements_are_counted)
{
    assert_int_equal(numel(0, NULL), 1);
    assert_int_equal(numel(1, (int64_t[]){7}), 7);
    assert_int_equal(numel(3, (int64_t[]){2, 3, 4}), 24);
    assert_int_equal(numel(3, (int64_t[]){2, 0, 4}), 0);
    assert_int_equal(numel(2, (int64_t[]){2, -1}), -1);
    assert_int_equal(numel(2, (int64_t[]){-1, -1}), -1);
    assert_int_equal(numel(2, (int64_t[]){INT64_MAX, 1}), INT64_MAX);
    assert_int_equal(numel(2, (int64_t[]){INT64_MAX, 2}), -1);
    assert_int_equal(numel(3, (int64_t[]){1LL << 32, 1LL << 31, 2}), -1);
    assert_int_equal(numel(3, (int64_t[]){INT64_MAX, INT64_MAX, 0}), 0);
    assert_int_equal(numel(-1, (int64_t[]){1}), -1);
    assert_int_equal(numel(TCH_MAX_RANK + 1, (int64_t[]){1, 1, 1, 1, 1, 1, 1, 1, 1}), -1);
    assert_int_equal(numel(2, NULL), -1);
    assert_int_equal(tch_tensor_numel(NULL), -1);
}

static bool contiguous(int32_t ndim, int64_t *shape, int64_t *strides)
{
    tch_tensor t = tch_tensor_view(NULL, TCH_FLOAT32, ndim, shape);
    t.strides = strides;
    return tch_tensor_is_contiguous(&t);
}

TEST(contiguity_is_recognized)
{
    int64_t shape[] = {2, 3, 4};
    assert_true(contiguous(3, shape, NULL));
    assert_true(contiguous(3, shape, (int64_t[]){12, 4, 1}));
    assert_false(contiguous(3, shape, (int64_t[]){13, 4, 1}));
    assert_false(contiguous(3, shape, (int64_t[]){12, 1, 3}));
    assert_false(contiguous(3, shape, (int64_t[]){0, 4, 1}));
    assert_false(contiguous(1, (int64_t[]){3}, (int64_t[]){-1}));
    assert_true(contiguous(3, (int64_t[]){1, 3, 1}, (int64_t[]){99, 1, 77}));
    assert_true(contiguous(0, NULL, NULL));
    assert_false(tch_tensor_is_contiguous(NULL));
}

static double *read_owned(tch_context *context, const tch_tensor *t)
{
    int64_t count = tch_tensor_numel(t);
    size_t size = tch_dtype_size(t->dtype);
    unsigned char *bytes = test_alloc((size_t)count * size);
    double *values = test_alloc((size_t)count * sizeof *values);
    tch_tensor flat = *t;
    flat.ndim = 1;
    flat.shape = &count;
    flat.strides = NULL;
    tch_tensor host = tch_tensor_view(bytes, t->dtype, 1, &count);
    CHECK_OK(tch_tensor_copy(context, &host, &flat));
    CHECK_OK(tch_context_synchronize(context));
    for (int64_t i = 0; i < count; i++) {
        values[i] = test_decode(t->dtype, bytes + (size_t)i * size);
    }
    return values;
}

/* The pool reuses memory, so a first tensor is filled with ones for the second to inherit. */
TEST(created_tensors_are_zero_and_aligned)
{
    tch_context *context = *state;
    const int64_t shape[] = {3, 5, 7};
    for (size_t i = 0; i < DTYPES; i++) {
        tch_tensor *t = NULL;
        test_case("%s", tch_dtype_name(dtypes[i]));
        for (int round = 0; round < 2; round++) {
            CHECK_OK(tch_tensor_create(context, dtypes[i], 3, shape, TCH_CONTIGUOUS, &t));
            CHECK((uintptr_t)t->data % 64 == 0 && t->byte_offset % 64 == 0, "memory is not aligned to 64 bytes");
            CHECK(tch_dtype_equal(t->dtype, dtypes[i]) && t->ndim == 3, "wrong dtype or rank");
            CHECK(memcmp(t->shape, shape, sizeof shape) == 0, "wrong shape");
            CHECK(tch_tensor_is_contiguous(t), "not contiguous");
            CHECK(t->device.type == tch_context_device(context).type, "wrong device");
            double *values = read_owned(context, t);
            for (int j = 0; j < 105; j++) {
                CHECK(values[j] == 0.0, "element %d is %g", j, values[j]);
            }
            CHECK_OK(tch_tensor_fill(context, t, 1.0));
            tch_tensor_destroy(t);
        }
    }
}

TEST(channels_last_strides)
{
    tch_context *context = *state;
    tch_tensor *t = NULL;
    const int64_t image[] = {2, 3, 4, 5};
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 4, image, TCH_CHANNELS_LAST, &t));
    assert_memory_equal(t->shape, image, sizeof image);
    assert_memory_equal(t->strides, ((const int64_t[]){60, 1, 15, 3}), 4 * sizeof(int64_t));
    assert_false(tch_tensor_is_contiguous(t));
    tch_tensor_destroy(t);
    const int64_t video[] = {2, 3, 4, 5, 6};
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT16, 5, video, TCH_CHANNELS_LAST, &t));
    assert_memory_equal(t->strides, ((const int64_t[]){360, 1, 90, 18, 3}), 5 * sizeof(int64_t));
    tch_tensor_destroy(t);
}

TEST(scalars_and_empty_tensors)
{
    tch_context *context = *state;
    tch_tensor *t = NULL;
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT64, 0, NULL, TCH_CONTIGUOUS, &t));
    assert_int_equal(tch_tensor_numel(t), 1);
    CHECK_OK(tch_tensor_fill(context, t, 3.5));
    double *value = read_owned(context, t);
    assert_true(value[0] == 3.5);
    tch_tensor_destroy(t);
    const int64_t empty[] = {3, 0, 2};
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 3, empty, TCH_CONTIGUOUS, &t));
    assert_int_equal(tch_tensor_numel(t), 0);
    CHECK_OK(tch_tensor_check(t, "t"));
    CHECK_OK(tch_tensor_fill(context, t, 1.0));
    tch_tensor_destroy(t);
    tch_tensor_destroy(NULL);
}

/* Values on both sides of every rounding decision: ties, the largest, subnormal, overflowing, and not finite. */
/* clang-format off */
static const double delicate[] = {
    0.0, -0.0, 1.0, -1.0, 1.0 / 3.0, 65504.0, 65519.0, 65520.0,
    -65536.0, 0x1p-24, 0x1p-25, 0x1.8p-25, 0x1p-14, 0x1.ffcp-15, 1e-300, 3.0e38,
    3.39e38, 3.4e38, 1e39, 1e300, INFINITY, 1.00390625, 1.01171875, 0x1.002p0,
    0x1.006p0, 0x1.000001p0, 0x1.000003p0, -2.5, 0x1p-126, 0x1p-133, 0x1p-134, 0x1.8p-133,
    0x1p-149, 0x1p-150, 2047.5, 2048.5, 0x1.00100000001p0, 0x1.01000000001p0, 0x1.003fffffp0, 0x1.02ffffffp0,
    NAN, -NAN,
};
/* clang-format on */
#define DELICATE ((int64_t)(sizeof delicate / sizeof delicate[0]))

static bool same_number(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

/* Integers are indices and flags: copied unchanged, and never converted. */
TEST(integers_keep_their_type)
{
    tch_context *context = *state;
    const int64_t shape[] = {5};
    const double values[] = {0.0, -7.0, 2147483647.0, -2147483648.0, 12.0};
    const tch_dtype kinds[] = {TCH_INT32, TCH_INT64, TCH_FLOAT64};
    for (int from = 0; from < 3; from++) {
        for (int to = 0; to < 3; to++) {
            test_case("%s to %s", tch_dtype_name(kinds[from]), tch_dtype_name(kinds[to]));
            test_tensor *src = test_tensor_make(context, kinds[from], 1, shape, LAYOUT_STEPPED);
            test_tensor *dst = test_tensor_make(context, kinds[to], 1, shape, LAYOUT_OFFSET);
            test_tensor_write(src, values);
            tch_status status = tch_tensor_copy(context, &dst->tensor, &src->tensor);
            CHECK(status == (from == to ? TCH_OK : TCH_ERR_DTYPE), "gave %s", tch_status_name(status));
            double *got = test_tensor_read(dst);
            for (int i = 0; i < 5 && from == to; i++) {
                CHECK(got[i] == values[i], "%.0f became %.0f", values[i], got[i]);
            }
            if (from != to) {
                test_tensor_check_unchanged(dst, "dst");
            }
        }
    }
}

/* One side of a copy. */
typedef struct side {
    tch_context *context;
    tch_dtype dtype;
    test_layout layout;
} side;

/* `values` may be NULL: any values. Conversion rounds once, to nearest even. */
static void copy_one(tch_context *context, int32_t ndim, const int64_t *shape, side from, side to, const double *values)
{
    test_case("rank %d, %s %s to %s %s", ndim, tch_dtype_name(from.dtype), test_layout_name(from.layout),
              tch_dtype_name(to.dtype), test_layout_name(to.layout));
    size_t mark = test_mark();
    test_tensor *src = test_tensor_make(from.context, from.dtype, ndim, shape, from.layout);
    test_tensor *dst = test_tensor_make(to.context, to.dtype, ndim, shape, to.layout);
    if (values != NULL) {
        test_tensor_write(src, values);
    } else {
        test_tensor_draw(src, 11);
    }
    CHECK_OK(tch_tensor_copy(context, &dst->tensor, &src->tensor));
    test_tensor_check_written(dst, "dst");
    test_tensor_check_unchanged(src, "src");
    const double *source = test_tensor_read(src);
    const double *got = test_tensor_read(dst);
    for (int64_t i = 0; i < src->count; i++) {
        double expected = test_round(to.dtype, source[i]);
        CHECK(same_number(got[i], expected), "%a became %a, expected %a", source[i], got[i], expected);
        CHECK(values == NULL || same_number(source[i], test_round(from.dtype, values[i])), "the source is %a",
              source[i]);
    }
    test_release_since(mark);
}

TEST(copies_convert)
{
    const int64_t shape[] = {DELICATE};
    for (size_t i = 0; i < 16; i++) {
        const side from = {*state, dtypes[i / 4], LAYOUT_OFFSET}, to = {*state, dtypes[i % 4], LAYOUT_STEPPED};
        copy_one(*state, 1, shape, from, to, delicate);
    }
}

static const int64_t shapes[][5] = {{1}, {70}, {1, 1}, {33, 65}, {3, 17, 5}, {2, 3, 8, 9}, {2, 1, 3, 4, 5}};
static const int32_t ranks[] = {1, 1, 2, 2, 3, 4, 5};

TEST(copies_follow_any_strides)
{
    static const tch_dtype types[] = {{TCH_FLOAT, 32, 1}, {TCH_BFLOAT, 16, 1}};
    for (size_t s = 0; s < 2 * TEST_COUNT(ranks); s++) {
        for (int from = 0; from <= LAYOUT_EXPANDED; from++) {
            for (int to = 0; to < LAYOUT_COUNT; to++) {
                copy_one(*state, ranks[s / 2], shapes[s / 2], (side){*state, types[s % 2], (test_layout)from},
                         (side){*state, types[s % 2], (test_layout)to}, NULL);
            }
        }
    }
    copy_one(*state, 2, (const int64_t[]){1000, 1000}, (side){*state, TCH_FLOAT64, LAYOUT_ROW_GAPS},
             (side){*state, TCH_FLOAT64, LAYOUT_TRANSPOSED}, NULL);
}

/* A tensor with negative strides extends below its first element, and a copy into that memory is an overlap. */
TEST(backwards_tensors_overlap_below_their_start)
{
    tch_context *context = *state;
    const int64_t whole[] = {8};
    int64_t four[] = {4};
    int64_t backwards[] = {-1};
    test_tensor *t = test_tensor_make(context, TCH_FLOAT64, 1, whole, LAYOUT_CONTIGUOUS);
    tch_tensor src = t->tensor;
    src.shape = four;
    src.strides = backwards;
    src.byte_offset += 5 * sizeof(double);
    tch_tensor dst = t->tensor;
    dst.shape = four;
    dst.byte_offset -= 1 * sizeof(double); /* elements -1 to 2, while src has 2 to 5 */
    assert_int_equal(tch_tensor_copy(context, &dst, &src), TCH_ERR_LAYOUT);
    test_tensor_check_unchanged(t, "the block");
    dst.byte_offset += 7 * sizeof(double); /* 6 to 9: adjacent */
    CHECK_OK(tch_tensor_copy(context, &dst, &src));
}

/* --- between host memory and the device ------------------------------------------------------------------------- */

static tch_context *host; /* of the CPU */

static int open_host(void **state)
{
    return tch_context_create("cpu", &host) == TCH_OK ? test_open_context(state) : -1;
}

static int close_host(void **state)
{
    int closed = test_close_context(state);
    tch_context_destroy(host);
    return closed;
}

/* From a contiguous host tensor to a device tensor, and back. */
static void cross_both_ways(tch_context *context, tch_dtype type, int32_t ndim, const int64_t *shape, side device,
                            const double *values)
{
    const side on_host = {host, type, LAYOUT_CONTIGUOUS};
    device.context = context;
    copy_one(context, ndim, shape, on_host, device, values);
    copy_one(context, ndim, shape, device, on_host, values);
}

TEST(crossings_convert)
{
    const int64_t shape[] = {DELICATE};
    for (size_t i = 0; i < 16; i++) {
        cross_both_ways(*state, dtypes[i / 4], 1, shape, (side){NULL, dtypes[i % 4], LAYOUT_CONTIGUOUS}, delicate);
        cross_both_ways(*state, dtypes[i / 4], 1, shape, (side){NULL, dtypes[i % 4], LAYOUT_STEPPED}, delicate);
    }
}

/* Small integers are exact in every type, so that only their positions can be wrong. */
static void fill_whole_numbers(double *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        values[i] = (double)(i * 37 % 251);
    }
}

TEST(crossings_follow_any_strides)
{
    static const tch_dtype types[][2] = {{{TCH_FLOAT, 64, 1}, {TCH_FLOAT, 32, 1}},
                                         {{TCH_BFLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}},
                                         {{TCH_INT, 64, 1}, {TCH_INT, 64, 1}}};
    double values[33 * 65];
    fill_whole_numbers(values, 33 * 65);
    for (size_t s = 0; s < TEST_COUNT(ranks); s++) {
        for (int k = 0; k < 3 * LAYOUT_COUNT; k++) {
            const side device = {NULL, types[k % 3][1], (test_layout)(k / 3)};
            cross_both_ways(*state, types[k % 3][0], ranks[s], shapes[s], device, values);
        }
    }
}

/* From a chunk that splits a row to several rows at a time. */
TEST(crossings_fit_a_small_workspace)
{
    tch_context *context = *state;
    const int64_t limits[] = {512, 700, 2000, 9000};
    for (size_t i = 0; i < TEST_COUNT(limits); i++) {
        CHECK_OK(tch_context_set_workspace_limit(context, limits[i]));
        crossings_follow_any_strides(state);
    }
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
}

/* 72 MiB, more than one chunk, with no limit set. */
TEST(large_crossings_go_in_chunks)
{
    tch_context *context = *state;
    int64_t shape[] = {3, (int64_t)3 << 20};
    int64_t count = shape[0] * shape[1];
    double *values = test_alloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++) {
        values[i] = (double)i;
    }
    tch_tensor view = tch_tensor_view(values, TCH_FLOAT64, 2, shape);
    tch_tensor *t = NULL;
    tch_memory_info before = TCH_MEMORY_INFO_INIT, after = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &t));
    CHECK_OK(tch_memory_get_info(context, &before));
    CHECK_OK(tch_tensor_copy(context, t, &view));
    CHECK_OK(tch_memory_get_info(context, &after));
    CHECK(after.allocated - before.allocated <= (int64_t)64 << 20, "the workspace grew by %lld bytes",
          (long long)(after.allocated - before.allocated));
    memset(values, 0xff, (size_t)count * sizeof *values);
    CHECK_OK(tch_tensor_copy(context, &view, t));
    for (int64_t i = 0; i < count; i++) {
        CHECK(values[i] == (double)i, "element %lld is %g", (long long)i, values[i]);
    }
    tch_tensor_destroy(t);
}

/* If scratch cannot be allocated nothing is written; copies that need none succeed. */
TEST(crossings_without_scratch)
{
    tch_context *context = *state;
    const int64_t shape[] = {5, 7};
    test_tensor *from = test_tensor_make(host, TCH_FLOAT64, 2, shape, LAYOUT_CONTIGUOUS);
    test_tensor *same = test_tensor_make(context, TCH_FLOAT64, 2, shape, LAYOUT_OFFSET);
    test_tensor *other = test_tensor_make(context, TCH_FLOAT32, 2, shape, LAYOUT_TRANSPOSED);
    test_tensor_draw(from, 12);
    CHECK_OK(tch_context_set_workspace_limit(context, 1));
    CHECK_OK(tch_tensor_copy(context, &same->tensor, &from->tensor));
    CHECK_OK(tch_tensor_copy(context, &from->tensor, &same->tensor));
    tch_status there = tch_tensor_copy(context, &other->tensor, &from->tensor);
    tch_status back = test_on_cpu() ? TCH_OK : tch_tensor_copy(context, &from->tensor, &other->tensor);
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
    if (test_on_cpu()) {
        CHECK(there == TCH_OK, "the CPU needs no scratch, and gave %s", tch_status_name(there));
    } else {
        CHECK(there == TCH_ERR_OUT_OF_MEMORY, "gave %s", tch_status_name(there));
        CHECK(back == TCH_ERR_OUT_OF_MEMORY, "gave %s", tch_status_name(back));
        test_tensor_check_unchanged(other, "dst");
    }
    test_tensor_check_unchanged(from, "the host's tensor");
}

/* The host's side must be contiguous: a device rejects others, naming the tensor. */
TEST(strided_host_tensors)
{
    tch_context *context = *state;
    const int64_t shape[] = {4, 4};
    test_tensor *strided = test_tensor_make(host, TCH_FLOAT32, 2, shape, LAYOUT_TRANSPOSED);
    test_tensor *t = test_tensor_make(context, TCH_FLOAT32, 2, shape, LAYOUT_CONTIGUOUS);
    test_tensor_draw(strided, 13);
    if (test_on_cpu()) {
        CHECK_OK(tch_tensor_copy(context, &t->tensor, &strided->tensor));
    } else {
        test_check_refused(tch_tensor_copy(context, &t->tensor, &strided->tensor), TCH_ERR_LAYOUT, "src");
        test_check_refused(tch_tensor_copy(context, &strided->tensor, &t->tensor), TCH_ERR_LAYOUT, "dst");
        test_tensor_check_unchanged(t, "dst");
    }
    test_tensor_check_unchanged(strided, "the host's tensor");
}

TEST(fills_round_and_stay_inside)
{
    tch_context *context = *state;
    const int64_t shape[] = {2, 3, 9};
    const double value = 1.0 / 3.0;
    for (size_t d = 0; d < 4; d++) {
        for (int layout = 0; layout < LAYOUT_COUNT; layout++) {
            test_case("%s %s", tch_dtype_name(dtypes[d]), test_layout_name((test_layout)layout));
            test_tensor *t = test_tensor_make(context, dtypes[d], 3, shape, (test_layout)layout);
            CHECK_OK(tch_tensor_fill(context, &t->tensor, value));
            test_tensor_check_written(t, "tensor");
            double *got = test_tensor_read(t);
            for (int64_t i = 0; i < t->count; i++) {
                CHECK(got[i] == test_round(dtypes[d], value), "element %d is %a", (int)i, got[i]);
            }
        }
    }
}

TEST_MAIN(open_host, close_host)
