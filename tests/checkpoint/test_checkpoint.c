/* Successful checkpoints: bitwise round trips from every layout into every other, by copy and by view; and the file's
 * contents. */
#include <unistd.h>

#include "support/files.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

static const tch_dtype dtypes[] = {{TCH_FLOAT, 64, 1},  {TCH_FLOAT, 32, 1}, {TCH_FLOAT, 16, 1},
                                   {TCH_BFLOAT, 16, 1}, {TCH_INT, 32, 1},   {TCH_INT, 64, 1}};
#define DTYPES (sizeof dtypes / sizeof dtypes[0])

/* Saves one tensor and opens the file. */
static tch_checkpoint *through_file(tch_context *context, const char *name, const tch_tensor *tensor)
{
    const char *path = test_path("one.safetensors");
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK_OK(tch_checkpoint_writer_add(writer, name, tensor));
    test_checkpoint_save(writer, context, path);
    return test_checkpoint_open(path);
}

/* Integers that every type represents, but not -1, which is poison. */
static void fill(test_tensor *t, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    double *values = test_alloc((size_t)t->count * sizeof *values);
    for (int64_t i = 0; i < t->count; i++) {
        uint64_t bits = test_random_bits(&random);
        values[i] = (double)(bits % 126 + 2) * (bits >> 63 != 0 ? 1.0 : -1.0);
    }
    test_tensor_write(t, values);
}

static void check_equal(const test_tensor *got, const test_tensor *expected)
{
    double *a = test_tensor_read(got);
    double *b = test_tensor_read(expected);
    CHECK(memcmp(a, b, (size_t)got->count * sizeof *a) == 0, "the elements differ");
}

/* The view, copied to the device in another layout, equals the tensor. */
static void check_view(tch_context *context, const tch_checkpoint *checkpoint, const test_tensor *expected)
{
    tch_tensor view;
    CHECK_OK(tch_checkpoint_view(checkpoint, "t", &view));
    CHECK(tch_dtype_equal(view.dtype, expected->tensor.dtype) && view.ndim == expected->tensor.ndim, "another tensor");
    test_tensor *copy = test_tensor_make(context, view.dtype, view.ndim, expected->shape, LAYOUT_OFFSET);
    CHECK_OK(tch_tensor_copy(context, &copy->tensor, &view));
    check_equal(copy, expected);
}

static void round_trip(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape, test_layout from,
                       test_layout to)
{
    test_case("%s rank %d, %s to %s", tch_dtype_name(dtype), ndim, test_layout_name(from), test_layout_name(to));
    size_t mark = test_mark();
    test_tensor *src = test_tensor_make(context, dtype, ndim, shape, from);
    test_tensor *dst = test_tensor_make(context, dtype, ndim, shape, to);
    fill(src, 1);
    tch_checkpoint *checkpoint = through_file(context, "t", &src->tensor);
    CHECK_OK(tch_checkpoint_read(checkpoint, context, "t", &dst->tensor));
    test_tensor_check_unchanged(src, "src");
    test_tensor_check_written(dst, "dst");
    check_equal(dst, src);
    check_view(context, checkpoint, src);
    test_release_since(mark);
}

TEST(every_type_and_layout)
{
    static const int64_t shape[] = {3, 5, 7};
    for (size_t d = 0; d < DTYPES; d++) {
        for (int layout = 0; layout < LAYOUT_COUNT; layout++) {
            round_trip(*state, dtypes[d], 3, shape, (test_layout)layout, LAYOUT_CONTIGUOUS);
            round_trip(*state, dtypes[d], 3, shape, LAYOUT_CONTIGUOUS, (test_layout)layout);
        }
        round_trip(*state, dtypes[d], 3, shape, LAYOUT_EXPANDED, LAYOUT_TRANSPOSED);
    }
}

TEST(every_rank)
{
    static const int64_t shape[TCH_MAX_RANK] = {2, 3, 1, 2, 4, 1, 3, 2};
    for (int32_t ndim = 0; ndim <= TCH_MAX_RANK; ndim++) {
        for (int layout = 0; layout < LAYOUT_COUNT; layout++) {
            round_trip(*state, TCH_FLOAT32, ndim, shape, (test_layout)layout, LAYOUT_CONTIGUOUS);
            round_trip(*state, TCH_FLOAT16, ndim, shape, LAYOUT_CONTIGUOUS, (test_layout)layout);
        }
    }
}

TEST(channels_last)
{
    tch_context *context = *state;
    int64_t shape[] = {2, 3, 4, 5};
    float values[120];
    float back[120];
    for (int i = 0; i < 120; i++) {
        values[i] = (float)i / 7.0f;
    }
    tch_tensor *image = NULL;
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 4, shape, TCH_CHANNELS_LAST, &image));
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT32, 4, shape);
    CHECK_OK(tch_tensor_copy(context, image, &host));
    tch_checkpoint *checkpoint = through_file(context, "image", image);
    CHECK_OK(tch_tensor_fill(context, image, NAN));
    CHECK_OK(tch_checkpoint_read(checkpoint, context, "image", image));
    tch_tensor out = tch_tensor_view(back, TCH_FLOAT32, 4, shape);
    CHECK_OK(tch_tensor_copy(context, &out, image));
    CHECK_OK(tch_context_synchronize(context));
    assert_memory_equal(back, values, sizeof values);
    tch_tensor view;
    CHECK_OK(tch_checkpoint_view(checkpoint, "image", &view));
    assert_memory_equal(view.data, values, sizeof values);
    tch_tensor_destroy(image);
}

/* Larger than the buffer: by rows, by parts of a row, and with a first dimension of 1. */
TEST(large_tensors_go_in_chunks)
{
    round_trip(*state, TCH_FLOAT64, 2, (const int64_t[]){1500, 1501}, LAYOUT_TRANSPOSED, LAYOUT_ROW_GAPS);
    round_trip(*state, TCH_FLOAT64, 2, (const int64_t[]){2, 2100001}, LAYOUT_ROW_GAPS, LAYOUT_CONTIGUOUS);
    round_trip(*state, TCH_INT64, 4, (const int64_t[]){1, 1, 1100001, 2}, LAYOUT_CONTIGUOUS, LAYOUT_STEPPED);
}

/* Host memory is read and written directly, in any context and without one. */
TEST(host_tensors_need_no_context)
{
    tch_context *contexts[] = {NULL, *state};
    double values[2][6] = {{1, 2, 3, 4, 5, 6}};
    int64_t shape[] = {2, 3};
    int64_t columns[] = {1, 2};
    for (int i = 0; i < 2; i++) {
        tch_tensor src = tch_tensor_view(values[0], TCH_FLOAT64, 2, shape);
        tch_tensor dst = tch_tensor_view(values[1], TCH_FLOAT64, 2, shape);
        src.strides = columns;
        memset(values[1], 0, sizeof values[1]);
        tch_checkpoint *checkpoint = through_file(contexts[i], "t", &src);
        CHECK_OK(tch_checkpoint_read(checkpoint, contexts[i], "t", &dst));
        assert_memory_equal(values[1], ((const double[]){1, 3, 5, 2, 4, 6}), sizeof values[1]);
        dst.strides = columns;
        CHECK_OK(tch_checkpoint_read(checkpoint, contexts[i], "t", &dst));
        assert_memory_equal(values[1], values[0], sizeof values[1]);
    }
}

TEST(empty_tensors)
{
    static const int64_t shapes[][3] = {{0}, {3, 0, 2}, {0, 0, 0}};
    static const int32_t ranks[] = {1, 3, 3};
    tch_context *context = *state;
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    char name[8];
    for (int i = 0; i < 3; i++) {
        tch_tensor t = tch_tensor_view(NULL, TCH_FLOAT64, ranks[i], (int64_t *)shapes[i]);
        snprintf(name, sizeof name, "%d", i);
        CHECK_OK(tch_checkpoint_writer_add(writer, name, &t));
    }
    const char *path = test_path("empty");
    CHECK_OK(tch_checkpoint_writer_save(writer, context, path));
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    assert_int_equal(tch_checkpoint_count(checkpoint), 3);
    for (int i = 0; i < 3; i++) {
        tch_tensor t = tch_tensor_view(NULL, TCH_FLOAT64, ranks[i], (int64_t *)shapes[i]);
        tch_tensor view;
        snprintf(name, sizeof name, "%d", i);
        CHECK_OK(tch_checkpoint_read(checkpoint, context, name, &t));
        CHECK_OK(tch_checkpoint_view(checkpoint, name, &view));
        CHECK_OK(tch_tensor_check(&view, "view"));
        CHECK(view.ndim == ranks[i] && tch_tensor_numel(&view) == 0, "%s has elements", name);
    }
}

TEST(a_file_of_nothing)
{
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    const char *path = test_path("nothing");
    CHECK_OK(tch_checkpoint_writer_save(writer, *state, path));
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    assert_int_equal(tch_checkpoint_count(checkpoint), 0);
    assert_int_equal(tch_checkpoint_find(checkpoint, "t"), -1);
    assert_null(tch_checkpoint_name(checkpoint, 0));
    assert_string_equal(tch_checkpoint_text(checkpoint, "format"), "torchium");
    assert_string_equal(tch_checkpoint_text(checkpoint, "torchium.version"), TCH_VERSION_STRING);
    int64_t version;
    CHECK_OK(tch_checkpoint_integer(checkpoint, "torchium.format_version", &version));
    assert_int_equal(version, 1);
    tch_checkpoint_writer_destroy(NULL);
    tch_checkpoint_close(NULL);
}

static const char *const odd_names[] = {
    "a",
    " ",
    "optimizer/layer1.weight/factor.0.0",
    "quote \" backslash \\ slash /",
    "tab\tnewline\nbell\a",
    "\x7f",
    "gr\303\266\303\237e", /* octal ends after three digits, while \x would include the e */
    "\xe9\x87\x8d\xe3\x81\xbf",
    "\xf0\x9f\x94\xa5",
    "{\"dtype\":",
    "%s%n",
    "format",
};
#define ODD_NAMES ((int64_t)(sizeof odd_names / sizeof odd_names[0]))

TEST(any_name_and_any_text)
{
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    const char *path = test_path("names");
    float values[ODD_NAMES];
    for (int64_t i = 0; i < ODD_NAMES; i++) {
        values[i] = (float)i;
        tch_tensor t = tch_tensor_view(&values[i], TCH_FLOAT32, 0, NULL);
        CHECK_OK(tch_checkpoint_writer_add(writer, odd_names[i], &t));
        if (strcmp(odd_names[i], "format") != 0) {
            CHECK_OK(tch_checkpoint_writer_set_text(writer, odd_names[i], odd_names[ODD_NAMES - 1 - i]));
        }
    }
    CHECK_OK(tch_checkpoint_writer_save(writer, *state, path));
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    for (int64_t i = 0; i < ODD_NAMES; i++) {
        tch_tensor view;
        test_case("name %d", (int)i);
        CHECK_OK(tch_checkpoint_view(checkpoint, odd_names[i], &view));
        CHECK(*(const float *)view.data == (float)i, "another tensor");
        assert_string_equal(tch_checkpoint_name(checkpoint, tch_checkpoint_find(checkpoint, odd_names[i])),
                            odd_names[i]);
        if (strcmp(odd_names[i], "format") != 0) {
            assert_string_equal(tch_checkpoint_text(checkpoint, odd_names[i]), odd_names[ODD_NAMES - 1 - i]);
        }
    }
    assert_int_equal(tch_checkpoint_key_count(checkpoint), ODD_NAMES - 1 + 3);
    for (int64_t i = 0; i < tch_checkpoint_key_count(checkpoint); i++) {
        assert_non_null(tch_checkpoint_text(checkpoint, tch_checkpoint_key(checkpoint, i)));
    }
    assert_null(tch_checkpoint_key(checkpoint, -1));
    assert_null(tch_checkpoint_key(checkpoint, ODD_NAMES + 2));
}

/* Alternating types: the file must order tensors so that each is aligned. */
TEST(a_thousand_tensors)
{
    enum { COUNT = 1000 };
    static int64_t values[COUNT][4];
    static int64_t sizes[COUNT];
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    const char *path = test_path("thousand");
    char name[64];
    for (int i = 0; i < COUNT; i++) {
        memset(values[i], i, sizeof values[i]);
        sizes[i] = i % 5;
        snprintf(name, sizeof name, "optimizer/layer%d.weight/factor.0.%d", i / 2, i % 2);
        tch_tensor t = tch_tensor_view(values[i], dtypes[(size_t)i % DTYPES], 1, &sizes[i]);
        CHECK_OK(tch_checkpoint_writer_add(writer, name, &t));
    }
    test_checkpoint_save(writer, *state, path);
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    assert_int_equal(tch_checkpoint_count(checkpoint), COUNT);
    for (int i = 0; i < COUNT; i++) {
        tch_tensor view;
        snprintf(name, sizeof name, "optimizer/layer%d.weight/factor.0.%d", i / 2, i % 2);
        test_case("%s", name);
        CHECK_OK(tch_checkpoint_view(checkpoint, name, &view));
        CHECK_OK(tch_tensor_check(&view, "view"));
        CHECK(view.shape[0] == sizes[i] && tch_dtype_equal(view.dtype, dtypes[(size_t)i % DTYPES]), "another tensor");
        size_t bytes = (size_t)sizes[i] * tch_dtype_size(view.dtype);
        CHECK(bytes == 0 || memcmp(view.data, values[i], bytes) == 0, "other elements");
    }
}

TEST(numbers_come_back_exactly)
{
    static const double numbers[] = {0.0,      -0.0,      0.1, 1.0 / 3.0, -1e-300, 0x1p-1074, 0x1.fffffffffffffp1023,
                                     INFINITY, -INFINITY, 1e23};
    static const int64_t integers[] = {0, -1, 42, INT64_MAX, INT64_MIN, (int64_t)1 << 53};
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    const char *path = test_path("numbers");
    char key[16];
    for (int i = 0; i < 10; i++) {
        snprintf(key, sizeof key, "number %d", i);
        CHECK_OK(tch_checkpoint_writer_set_number(writer, key, numbers[i]));
    }
    for (int i = 0; i < 6; i++) {
        snprintf(key, sizeof key, "integer %d", i);
        CHECK_OK(tch_checkpoint_writer_set_integer(writer, key, -7));
        CHECK_OK(tch_checkpoint_writer_set_integer(writer, key, integers[i]));
    }
    CHECK_OK(tch_checkpoint_writer_set_number(writer, "nan", NAN));
    test_checkpoint_save(writer, *state, path);
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    double number;
    int64_t integer;
    for (int i = 0; i < 10; i++) {
        snprintf(key, sizeof key, "number %d", i);
        CHECK_OK(tch_checkpoint_number(checkpoint, key, &number));
        CHECK(memcmp(&number, &numbers[i], sizeof number) == 0, "%a became %a", numbers[i], number);
    }
    for (int i = 0; i < 6; i++) {
        snprintf(key, sizeof key, "integer %d", i);
        CHECK_OK(tch_checkpoint_integer(checkpoint, key, &integer));
        assert_true(integer == integers[i]);
    }
    CHECK_OK(tch_checkpoint_number(checkpoint, "nan", &number));
    assert_true(isnan(number));
    CHECK_OK(tch_checkpoint_number(checkpoint, "integer 2", &number));
    assert_true(number == 42.0);
}

TEST(saving_again)
{
    int32_t value = 1;
    int32_t got = 0;
    int64_t bytes[3];
    char *content[3];
    const char *path = test_path("again");
    tch_tensor t = tch_tensor_view(&value, TCH_INT32, 0, NULL);
    tch_tensor out = tch_tensor_view(&got, TCH_INT32, 0, NULL);
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK_OK(tch_checkpoint_writer_add(writer, "t", &t));
    CHECK_OK(tch_checkpoint_writer_save(writer, *state, path));
    content[0] = test_file_read(path, &bytes[0]);
    CHECK_OK(tch_checkpoint_writer_save(writer, *state, path));
    content[1] = test_file_read(path, &bytes[1]);
    CHECK(bytes[0] == bytes[1] && memcmp(content[0], content[1], (size_t)bytes[0]) == 0,
          "the same is written differently");
    tch_checkpoint *old = test_checkpoint_open(path);
    value = 2;
    CHECK_OK(tch_checkpoint_writer_save(writer, *state, path));
    content[2] = test_file_read(path, &bytes[2]);
    CHECK(content[2][bytes[2] - 4] == 2, "the new value is not in the file");
    tch_tensor view;
    CHECK_OK(tch_checkpoint_view(old, "t", &view));
    CHECK_OK(tch_checkpoint_read(old, *state, "t", &out));
    CHECK(got == 1 && *(const int32_t *)view.data == 1, "an open checkpoint changed");
}

/* The exact bytes, to detect changes of the format. The header's checksum depends on the version: see
 * test_checkpoint_checksums.c. */
TEST(the_file_is_as_documented)
{
    static const char header[] = "{\"__metadata__\":{\"format\":\"torchium\",\"torchium.format_version\":\"1\","
                                 "\"torchium.version\":\"" TCH_VERSION_STRING "\",\"step\":\"7\","
                                 "\"torchium.crc32c\":\"????????\",\"torchium.crc32c/wide\":\"a642e961\","
                                 "\"torchium.crc32c/narrow\":\"86fb4376\"},"
                                 "\"wide\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},"
                                 "\"narrow\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[8,12]}}";
    uint16_t narrow[] = {0x3f80, 0x4000};
    double wide = 1.0;
    int64_t shape[] = {1, 2};
    tch_tensor tensors[] = {tch_tensor_view(narrow, TCH_BFLOAT16, 2, shape),
                            tch_tensor_view(&wide, TCH_FLOAT64, 0, NULL)};
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK_OK(tch_checkpoint_writer_add(writer, "narrow", &tensors[0]));
    CHECK_OK(tch_checkpoint_writer_add(writer, "wide", &tensors[1]));
    CHECK_OK(tch_checkpoint_writer_set_integer(writer, "step", 7));
    test_checkpoint_save(writer, *state, test_path("bytes"));
    int64_t bytes;
    char *content = test_file_read(test_path("bytes"), &bytes);
    int64_t padded = ((int64_t)sizeof header - 1 + 7) / 8 * 8;
    assert_int_equal(bytes, 8 + padded + 12);
    assert_int_equal((unsigned char)content[0] + 256 * (unsigned char)content[1], padded);
    assert_memory_equal(content + 2, "\0\0\0\0\0\0", 6);
    const char *own = strchr(header, '?');
    memset(content + 8 + (own - header), '?', 8);
    assert_memory_equal(content + 8, header, sizeof header - 1);
    for (int64_t i = (int64_t)sizeof header - 1; i < padded; i++) {
        assert_int_equal(content[8 + i], ' ');
    }
    assert_memory_equal(content + 8 + padded, &wide, 8);
    assert_memory_equal(content + 8 + padded + 8, narrow, 4);
}

TEST(no_temporary_file_is_left)
{
    assert_int_equal(test_leftover_count(), 0);
}

TEST_MAIN(test_open_context_and_folder, test_close_context_and_folder)
