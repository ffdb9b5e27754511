/* Malicious files: each is rejected with the reason, without leaks. And unusual but valid files, which open. */
#include <unistd.h>

#include "support/files.h"
#include "support/messages.h"
#include "support/testing.h"

#define F32(name, shape, begin, end)                                                                                   \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

typedef struct bad_file {
    const char *header;
    int64_t data_bytes;
    const char *message; /* part of the message */
} bad_file;

static const bad_file bad_files[] = {
    /* not an object */
    {"", 0, "begins with '{'"},
    {" {}", 0, "begins with '{'"},
    {"null", 0, "begins with '{'"},
    {"{", 0, "expected a string, the header ends"},
    {"{} x", 0, "expected the end of the header, found 'x'"},
    /* JSON, but not quite */
    {"{a:1}", 0, "expected a string, found 'a'"},
    {"{" F32("a", "[1]", 0, 4) ",}", 4, "expected a string, found '}'"},
    {"{" F32("a", "[1]", 0, 4) " " F32("b", "[1]", 4, 8) "}", 8, "expected '}', found '\"'"},
    {"{\"a\" {}}", 0, "expected ':', found '{'"},
    {"{\"a", 0, "a string does not end"},
    {"{\"a\":", 0, "expected '{', the header ends"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}", 4, "expected '}', the header ends"},
    {"{" F32("a", "[1,]", 0, 4) "}", 4, "expected a nonnegative integer, found ']'"},
    {"{/**/}", 0, "expected a string, found '/'"},
    /* strings */
    {"{\"\x01\":{}}", 0, "control character 0x01"},
    {"{\"\\x41\":{}}", 0, "an escape that JSON does not have"},
    {"{\"\\u12", 0, "four hexadecimal digits"},
    {"{\"a\\u0000b\":{}}", 0, "contains NUL"},
    {"{\"\\ud800\":{}}", 0, "half a surrogate pair"},
    {"{\"\\ud800\\u0041\":{}}", 0, "half a surrogate pair"},
    {"{\"\xff\":{}}", 0, "not UTF-8"},
    {"{\"\xc0\xaf\":{}}", 0, "not UTF-8"},
    {"{\"\xe0\x80\xaf\":{}}", 0, "not UTF-8"},
    {"{\"\xed\xa0\x80\":{}}", 0, "not UTF-8"},
    {"{\"\xf4\x90\x80\x80\":{}}", 0, "not UTF-8"},
    {"{\"\xe9\x87", 0, "not UTF-8"},
    /* members of a tensor */
    {"{\"a\":[]}", 0, "expected '{', found '['"},
    {"{\"a\":{}}", 0, "expected a string, found '}'"},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "\"a\" has no \"dtype\""},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "\"a\" has no \"shape\""},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "\"a\" has no \"data_offsets\""},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "\"dtype\" twice"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4, "the unknown member \"x\""},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":[[[[[[[[", 4, "the unknown member \"x\""},
    {"{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "no element type is called \"f32\""},
    {"{\"a\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "expected a string, found '3'"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4, "expected '[', found '1'"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "expected ',', found ']'"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4, "expected ']', found ','"},
    /* numbers */
    {"{" F32("a", "[-1]", 0, 4) "}", 4, "nonnegative integer, found '-'"},
    {"{" F32("a", "[1.0]", 0, 4) "}", 4, "expected ']', found '.'"},
    {"{" F32("a", "[01]", 0, 4) "}", 4, "begins with 0"},
    {"{" F32("a", "[\"1\"]", 0, 4) "}", 4, "found '\"'"},
    {"{" F32("a", "[9223372036854775808]", 0, 4) "}", 4, "above 2^63 - 1"},
    {"{" F32("a", "[1]", 0, 18446744073709551620) "}", 4, "above 2^63 - 1"},
    /* shapes and bytes */
    {"{" F32("a", "[4294967296,4294967296]", 0, 0) "}", 0, "does not give a whole number of bytes below 2^63"},
    {"{" F32("a", "[4294967296,4294967296,0]", 0, 0) "}", 0, "does not give a whole number of bytes below 2^63"},
    {"{" F32("a", "[4611686018427387905]", 0, 4) "}", 4, "does not give a whole number of bytes below 2^63"},
    {"{" F32("a", "[2]", 0, 4) "}", 4, "has 8 bytes by its shape and 4 by its offsets"},
    {"{" F32("a", "[0]", 0, 4) "}", 4, "has 0 bytes by its shape and 4 by its offsets"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, "does not give a whole number of bytes"},
    {"{" F32("a", "[1]", 4, 0) "}", 4, "is at bytes 4 to 0 of 4"},
    {"{" F32("a", "[1]", 0, 4) "}", 3, "is at bytes 0 to 4 of 3"},
    {"{" F32("a", "[1]", 9223372036854775803, 9223372036854775807) "}", 4, "is at bytes"},
    {"{" F32("a", "[1]", 4, 8) "}", 8, "begins at byte 4, and what precedes it ends at 0"},
    {"{" F32("a", "[1]", 0, 4) "," F32("b", "[1]", 8, 12) "}", 12, "begins at byte 8, and what precedes it ends at 4"},
    {"{" F32("a", "[2]", 0, 8) "," F32("b", "[1]", 4, 8) "}", 8, "begins at byte 4, and what precedes it ends at 8"},
    {"{" F32("a", "[1]", 0, 4) "," F32("b", "[1]", 0, 4) "}", 4, "begins at byte 0, and what precedes it ends at 4"},
    {"{" F32("a", "[1]", 0, 4) "}", 5, "the last 1 bytes belong to no tensor"},
    /* names */
    {"{" F32("a", "[1]", 0, 4) "," F32("a", "[1]", 4, 8) "}", 8, "two tensors are called \"a\""},
    {"{" F32("a", "[1]", 0, 4) "," F32("\\u0061", "[1]", 4, 8) "}", 8, "two tensors are called \"a\""},
    /* settings */
    {"{\"__metadata__\":null}", 0, "expected '{', found 'n'"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "expected a string, found '1'"},
    {"{\"__metadata__\":{\"a\":\"b\",}}", 0, "expected a string, found '}'"},
    {"{\"__metadata__\":{\"a\":\"b\",\"a\":\"c\"}}", 0, "the setting \"a\" occurs twice"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "\"__metadata__\" occurs twice"},
    {"{\"__metadata__\":{\"format\":\"torchium\"}}", 0, "torchium.format_version is \"missing\""},
    {"{\"__metadata__\":{\"format\":\"torchium\",\"torchium.format_version\":\"new\"}}", 0, "is \"new\""},
    {"{\"__metadata__\":{\"format\":\"torchium\",\"torchium.format_version\":\"2\"}}", 0,
     "written by a later Torchium"},
    /* shards */
    {"{\"__metadata__\":{\"torchium.shard/w[0:2]\":\"4;0\"}}", 0, "there is no such tensor"},
    {"{\"__metadata__\":{\"torchium.shard/w[0:2]\":\"4\"}," F32("w[0:2]", "[2]", 0, 8) "}", 8, "does not fit"},
    {"{\"__metadata__\":{\"torchium.shard/w[0:2]\":\"4;3\"}," F32("w[0:2]", "[2]", 0, 8) "}", 8, "does not fit"},
    {"{\"__metadata__\":{\"torchium.shard/w[0:2]\":\"1;0\"}," F32("w[0:2]", "[2]", 0, 8) "}", 8, "does not fit"},
    {"{\"__metadata__\":{\"torchium.shard/w[0:2]\":\"4;-0\"}," F32("w[0:2]", "[2]", 0, 8) "}", 8, "does not fit"},
    {"{\"__metadata__\":{\"torchium.shard/w[0:2]\":\"99999999999999999999;9223372036854775807\"}," F32("w[0:2]", "[2]",
                                                                                                       0, 8) "}",
     8, "does not fit"},
    {"{\"__metadata__\":{\"torchium.shard/w[0:2]\":\"4;1\"}," F32("w[0:2]", "[2]", 0, 8) "}", 8, "in its name"},
    {"{\"__metadata__\":{\"torchium.shard/[0:2]\":\"4;0\"}," F32("[0:2]", "[2]", 0, 8) "}", 8, "in its name"},
    {"{\"__metadata__\":{\"torchium.shard/w[0:1]\":\"4;0\",\"torchium.shard/w[1:2]\":\"5;1\"}," F32(
         "w[0:1]", "[1]", 0, 4) "," F32("w[1:2]", "[1]", 4, 8) "}",
     8, "of another whole"},
};
#define BAD_FILES ((int)(sizeof bad_files / sizeof bad_files[0]))

static void check_refused(const char *path, const char *message)
{
    tch_checkpoint *checkpoint = NULL;
    tch_status status = tch_checkpoint_open(path, &checkpoint);
    CHECK(status == TCH_ERR_IO && checkpoint == NULL, "gave %s", tch_status_name(status));
    CHECK(strstr(tch_last_error(), message) != NULL, "said \"%s\", expected \"%s\"", tch_last_error(), message);
    CHECK(strstr(tch_last_error(), path) != NULL, "does not name the file: %s", tch_last_error());
}

TEST(bad_headers_are_refused)
{
    const char *path = test_path("bad");
    for (int i = 0; i < BAD_FILES; i++) {
        test_case("%s", bad_files[i].header);
        test_safetensors_write(path, bad_files[i].header, -1, bad_files[i].data_bytes);
        check_refused(path, bad_files[i].message);
    }
}

TEST(bad_lengths_are_refused)
{
    const char *path = test_path("length");
    static const char header[] = "{" F32("a", "[1]", 0, 4) "}";
    test_safetensors_write(path, header, 0, 4);
    check_refused(path, "begins with '{'");
    test_safetensors_write(path, header, 1, 4);
    check_refused(path, "the header ends");
    test_safetensors_write(path, header, (int64_t)sizeof header + 100, 4);
    check_refused(path, "cut short");
    test_safetensors_write(path, header, 100000001, 4);
    check_refused(path, "more than the 100000000 allowed");
    test_safetensors_write(path, header, INT64_MAX, 4);
    check_refused(path, "more than the 100000000 allowed");
    for (int64_t bytes = 0; bytes < 8; bytes++) {
        test_file_write(path, "\xff\xff\xff\xff\xff\xff\xff", bytes);
        check_refused(path, "too few");
    }
    test_file_write(path, "\xff\xff\xff\xff\xff\xff\xff\xff", 8);
    check_refused(path, "more than the 100000000 allowed");
}

/* Every truncation of a file, down to nothing. */
TEST(cut_files_are_refused)
{
    int64_t bytes;
    const char *whole = test_path("whole");
    const char *cut = test_path("cut");
    test_safetensors_write(whole, "{\"__metadata__\":{\"k\":\"v\"}," F32("a", "[2]", 0, 8) "}  ", -1, 8);
    char *content = test_file_read(whole, &bytes);
    for (int64_t i = 0; i < bytes; i++) {
        tch_checkpoint *checkpoint = NULL;
        test_case("%d bytes of %d", (int)i, (int)bytes);
        test_file_write(cut, content, i);
        tch_status status = tch_checkpoint_open(cut, &checkpoint);
        CHECK(status == TCH_ERR_IO && checkpoint == NULL, "gave %s", tch_status_name(status));
    }
}

TEST(what_is_no_file_is_refused)
{
    check_refused(test_path("absent"), "No such file");
    check_refused(test_path("."), "it is a folder, expected a file");
    check_refused("/dev/zero", "it is a device");
    check_refused("", "No such file");
}

/* A terminal would interpret control characters of a malicious name. */
TEST(messages_are_harmless)
{
    const char *path = test_path("harmless");
    static char header[4096];
    test_safetensors_write(path, "{" F32("\\u001b[31m\\u007f", "[2]", 0, 4) "}", -1, 4);
    check_refused(path, "\"?[31m?\" has 8 bytes");
    snprintf(header, sizeof header, "{\"%02000d\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 0);
    test_safetensors_write(path, header, -1, 4);
    check_refused(path, "000...\" has 8 bytes");
}

TEST(unusual_files_open)
{
    static const bad_file files[] = {
        {"{}", 0, NULL},
        {"{ \t\r\n}", 0, NULL},
        {"{}        ", 0, NULL},
        {"{\"__metadata__\":{}}", 0, NULL},
        {"{\"__metadata__\":{\"format\":\"pt\",\"torchium.format_version\":\"99\"}}", 0, NULL},
        {"{" F32("", "[1]", 0, 4) "}", 4, NULL},
        {"{" F32("b", "[1]", 4, 8) "," F32("a", "[1]", 0, 4) "}", 8, NULL},
        {"{" F32("a", "[1]", 0, 4) "," F32("e", "[0,9]", 4, 4) "," F32("f", "[0]", 0, 0) "}", 4, NULL},
        {"{" F32("a", "[0,9223372036854775807,9223372036854775807]", 0, 0) "}", 0, NULL},
        {"{\"a\":{\"data_offsets\":[0,4],\"shape\":[ 1 , 1 ],\"dtype\":\"\\u0046\\u00332\"}}", 4, NULL},
    };
    const char *path = test_path("unusual");
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        test_case("%s", files[i].header);
        test_safetensors_write(path, files[i].header, -1, files[i].data_bytes);
        (void)test_checkpoint_open(path);
    }
}

static void check_described(const tch_checkpoint *checkpoint, const char *name, const char *type, int64_t bytes)
{
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    CHECK_OK(tch_checkpoint_get_info(checkpoint, tch_checkpoint_find(checkpoint, name), &info));
    assert_string_equal(info.name, name);
    assert_string_equal(info.type, type);
    assert_int_equal(info.bytes, bytes);
}

/* The length misaligns the last tensor. */
static const char foreign[] = "{\"u\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
                              "\"q\":{\"dtype\":\"F8_E4M3\",\"shape\":[2],\"data_offsets\":[3,5]},"
                              "\"h\":{\"dtype\":\"F4\",\"shape\":[2,1],\"data_offsets\":[5,6]},"
                              "\"c\":{\"dtype\":\"C64\",\"shape\":[],\"data_offsets\":[6,14]},"
                              "\"n\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[14,18]},"
                              "\"o\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[18,22]}} ";
_Static_assert((8 + sizeof foreign - 1 + 18) % 4 != 0, "the last tensor is aligned");

/* Unsupported types and ranks are described but not read. */
TEST(foreign_tensors_are_listed)
{
    tch_tensor t = {0};
    const char *path = test_path("foreign");
    test_safetensors_write(path, foreign, -1, 22);
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    check_described(checkpoint, "u", "U8", 3);
    check_described(checkpoint, "q", "F8_E4M3", 2);
    check_described(checkpoint, "h", "F4", 1);
    check_described(checkpoint, "c", "C64", 8);
    check_described(checkpoint, "n", "F32", 4);
    static const char *const unreadable[] = {"u", "q", "h", "c"};
    for (int i = 0; i < 4; i++) {
        test_check_refused(tch_checkpoint_view(checkpoint, unreadable[i], &t), TCH_ERR_DTYPE, unreadable[i]);
        test_check_refused(tch_checkpoint_read(checkpoint, NULL, unreadable[i], &t), TCH_ERR_DTYPE, unreadable[i]);
    }
    test_check_refused(tch_checkpoint_view(checkpoint, "n", &t), TCH_ERR_SHAPE, "n");
    test_check_refused(tch_checkpoint_view(checkpoint, "o", &t), TCH_ERR_LAYOUT, "o");
    unsigned char bytes[4] = {0};
    float value;
    tch_tensor out = tch_tensor_view(&value, TCH_FLOAT32, 0, NULL);
    CHECK_OK(tch_checkpoint_read(checkpoint, NULL, "o", &out));
    memcpy(bytes, &value, 4);
    assert_memory_equal(bytes, ((const unsigned char[]){18, 19, 20, 21}), 4);
}

/* A file truncated while open: reading fails without crashing the process. */
TEST(cutting_an_open_file)
{
    float values[2] = {0};
    int64_t shape[] = {2};
    const char *path = test_path("shrinking");
    tch_tensor out = tch_tensor_view(values, TCH_FLOAT32, 1, shape);
    test_safetensors_write(path, "{" F32("a", "[2]", 0, 8) "}", -1, 8);
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    CHECK(truncate(path, 40) == 0, "the test cannot cut its file");
    tch_status status = tch_checkpoint_read(checkpoint, NULL, "a", &out);
    CHECK(status == TCH_ERR_IO && strstr(tch_last_error(), "cut short") != NULL, "gave %s", tch_status_name(status));
}

TEST_MAIN(test_folder_make, test_folder_remove)
