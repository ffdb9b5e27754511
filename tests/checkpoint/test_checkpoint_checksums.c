/* Checksums: every implementation computes CRC-32C; every changed bit of a file is detected; and files whose checksums
 * are missing, wrong, or copied by a program that changed the rest. The reference is the definition, bit by bit. */
#include <fcntl.h>
#include <unistd.h>

#include "checkpoint/crc32c.h"
#include "core/cpu_features.h"
#include "support/files.h"
#include "support/messages.h"
#include "support/random.h"
#include "support/testing.h"

/* --- the sum ----------------------------------------------------------------------------------------------------- */

static uint32_t reference(const unsigned char *bytes, int64_t count)
{
    uint32_t crc = 0xffffffff;
    for (int64_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int k = 0; k < 8; k++) {
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
        }
    }
    return ~crc;
}

typedef uint32_t (*sum_function)(uint32_t crc, const void *bytes, int64_t count);

static int sums(sum_function list[3])
{
    int count = 0;
    list[count++] = tchi_crc32c;
    list[count++] = tchi_crc32c_plain;
    if (tchi_cpu_has_crc32c()) {
        list[count++] = tchi_crc32c_fast;
    }
    return count;
}

/* The catalogs' check value, and the examples of RFC 3720, B.4. */
TEST(known_sums)
{
    unsigned char bytes[4][32] = {{0}};
    static const uint32_t expected[4] = {0x8a9136aa, 0x62a8ab43, 0x46dd794e, 0x113fdb5c};
    sum_function list[3];
    for (int i = 0; i < 32; i++) {
        bytes[1][i] = 0xff;
        bytes[2][i] = (unsigned char)i;
        bytes[3][i] = (unsigned char)(31 - i);
    }
    for (int k = 0; k < sums(list); k++) {
        test_case("way %d", k);
        CHECK(list[k](0, "123456789", 9) == 0xe3069283, "the check value is %08x", list[k](0, "123456789", 9));
        CHECK(list[k](0, NULL, 0) == 0 && list[k](0x12345678, NULL, 0) == 0x12345678, "no bytes change the sum");
        for (int i = 0; i < 4; i++) {
            CHECK(list[k](0, bytes[i], 32) == expected[i], "example %d is %08x", i, list[k](0, bytes[i], 32));
        }
    }
}

/* Lengths around those where the algorithm changes, at any address, in one part and in two. */
TEST(sums_are_the_reference)
{
    enum { MOST = 110000, ROUNDS = 400 };
    static const int64_t near[] = {0, 8, 256, 16384, 49152, 98304};
    sum_function list[3];
    test_random random = test_random_stream(1);
    unsigned char *bytes = test_alloc(MOST + 16);
    for (int i = 0; i < MOST + 16; i++) {
        bytes[i] = (unsigned char)test_random_bits(&random);
    }
    for (int round = 0; round < ROUNDS; round++) {
        int64_t from = (int64_t)(test_random_bits(&random) % 16);
        int64_t count = near[round % 6] + (int64_t)(test_random_bits(&random) % 40);
        int64_t cut = (int64_t)(test_random_bits(&random) % (uint64_t)(count + 1));
        uint32_t expected = reference(bytes + from, count);
        for (int k = 0; k < sums(list); k++) {
            test_case("way %d: %lld bytes from %lld on, cut at %lld", k, (long long)count, (long long)from,
                      (long long)cut);
            uint32_t whole = list[k](0, bytes + from, count);
            uint32_t parts = list[k](list[k](0, bytes + from, cut), bytes + from + cut, count - cut);
            CHECK(whole == expected && parts == expected, "%08x and %08x, expected %08x", whole, parts, expected);
        }
    }
}

/* --- one bit ----------------------------------------------------------------------------------------------------- */

/* A small file with everything: types, ranks, an empty tensor, settings of each kind, an escaped name. */
static const struct {
    const char *name;
    tch_dtype dtype;
    int32_t ndim;
    int64_t shape[2];
} tensors[] = {
    {"layer/real", {TCH_FLOAT, 64, 1}, 2, {2, 3}}, {"counts", {TCH_INT, 64, 1}, 0, {0}},
    {"narrow", {TCH_FLOAT, 32, 1}, 1, {3}},        {"half \"\n", {TCH_BFLOAT, 16, 1}, 2, {1, 2}},
    {"nothing", {TCH_INT, 32, 1}, 1, {0}},
};

/* The contents of a file: the bytes of all tensors, 64 of each, and the settings. */
typedef struct content {
    char bytes[TEST_COUNT(tensors)][64];
    double number;
    int64_t integer;
    char text[64];
} content;

static tch_tensor tensor_of(content *c, size_t i)
{
    return tch_tensor_view(c->bytes[i], tensors[i].dtype, tensors[i].ndim, (int64_t *)tensors[i].shape);
}

static content random_content(uint64_t stream)
{
    test_random random = test_random_stream(stream);
    content c;
    memset(&c, 0, sizeof c);
    for (size_t i = 0; i < TEST_COUNT(tensors); i++) {
        tch_tensor t = tensor_of(&c, i);
        for (size_t k = 0; k < (size_t)tch_tensor_numel(&t) * tch_dtype_size(t.dtype); k++) {
            c.bytes[i][k] = (char)test_random_bits(&random);
        }
    }
    c.number = test_random_normal(&random);
    c.integer = (int64_t)(test_random_bits(&random) >> 40);
    snprintf(c.text, sizeof c.text, "text %llx", (unsigned long long)test_random_bits(&random));
    return c;
}

/* A file, or an index with a file. */
static void write_content(content *c, const char *path, int32_t checksums)
{
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK_OK(tch_checkpoint_writer_set_checksums(writer, checksums));
    for (size_t i = 0; i < TEST_COUNT(tensors); i++) {
        tch_tensor t = tensor_of(c, i);
        CHECK_OK(tch_checkpoint_writer_add(writer, tensors[i].name, &t));
    }
    CHECK_OK(tch_checkpoint_writer_set_number(writer, "number", c->number));
    CHECK_OK(tch_checkpoint_writer_set_integer(writer, "integer", c->integer));
    CHECK_OK(tch_checkpoint_writer_set_text(writer, "text", c->text));
    CHECK_OK(strstr(path, ".index.json") != NULL ? tch_checkpoint_writer_save_sharded(writer, NULL, NULL, path)
                                                 : tch_checkpoint_writer_save(writer, NULL, path));
}

/* By view, by copy, or into a layout that needs a buffer. */
enum { BY_VIEW, BY_COPY, BY_COLUMNS, WAYS };

static tch_status take_tensor(const tch_checkpoint *checkpoint, int way, content *c, size_t i)
{
    tch_tensor view;
    tch_tensor out = tensor_of(c, i);
    if (way != BY_VIEW) {
        char turned[64] = {0};
        bool by_columns = way == BY_COLUMNS && i == 0;
        out.data = by_columns ? turned : out.data;
        out.strides = by_columns ? (int64_t[]){1, 2} : NULL;
        tch_status status = tch_checkpoint_read(checkpoint, NULL, tensors[i].name, &out);
        for (int k = 0; by_columns && k < 6; k++) {
            memcpy(c->bytes[0] + 8 * k, turned + 8 * (k / 3 + 2 * (k % 3)), 8);
        }
        return status;
    }
    tch_status status = tch_checkpoint_view(checkpoint, tensors[i].name, &view);
    bool same = status == TCH_OK && view.ndim == out.ndim && tch_dtype_equal(view.dtype, out.dtype) &&
                tch_tensor_numel(&view) == tch_tensor_numel(&out);
    if (same && tch_tensor_numel(&view) > 0) {
        memcpy(out.data, view.data, (size_t)tch_tensor_numel(&view) * tch_dtype_size(view.dtype));
    }
    return same ? TCH_OK : TCH_ERR_SHAPE;
}

/* Reads everything in the file in one mode; false on any error. */
static bool take(const char *path, int way, content *c)
{
    tch_checkpoint *checkpoint = NULL;
    memset(c, 0, sizeof *c);
    if (tch_checkpoint_open(path, &checkpoint) != TCH_OK) {
        return false;
    }
    const char *text = tch_checkpoint_text(checkpoint, "text");
    bool taken = text != NULL && tch_checkpoint_number(checkpoint, "number", &c->number) == TCH_OK &&
                 tch_checkpoint_integer(checkpoint, "integer", &c->integer) == TCH_OK;
    for (size_t i = 0; taken && i < TEST_COUNT(tensors); i++) {
        taken = take_tensor(checkpoint, way, c, i) == TCH_OK;
    }
    snprintf(c->text, sizeof c->text, "%s", text == NULL ? "" : text);
    tch_checkpoint_close(checkpoint);
    return taken;
}

/* The number of single-bit changes of a file that change what `path`, the file or its index, returns. */
static int silent_changes(const content *expected, const char *path, const char *name, int *refused)
{
    int64_t bytes;
    int silent = 0;
    char *content_of = test_file_read(name, &bytes);
    int file = open(name, O_WRONLY);
    *refused = 0;
    for (int64_t bit = 0; bit < 8 * bytes; bit++) {
        content got;
        char turned = (char)(content_of[bit / 8] ^ 1 << bit % 8);
        CHECK(pwrite(file, &turned, 1, bit / 8) == 1, "the test cannot change its file");
        for (int way = 0; way < WAYS; way++) {
            bool taken = take(path, way, &got);
            *refused += !taken;
            silent += taken && memcmp(&got, expected, sizeof got) != 0;
        }
        CHECK(pwrite(file, &content_of[bit / 8], 1, bit / 8) == 1, "the test cannot change its file");
    }
    close(file);
    return silent;
}

/* The only file in an index. */
static const char *file_of_index(const char *path)
{
    int64_t bytes;
    char *text = test_file_read(path, &bytes);
    const char *name = strstr(text, "whole-");
    CHECK(name != NULL, "the index has no file");
    return test_path(strtok((char *)name, "\""));
}

/* Without checksums the same search finds undetected changes. */
TEST(no_bit_changes_unseen)
{
    content c = random_content(10);
    content got;
    int refused;
    const char *const paths[] = {test_path("whole"), test_path("whole.safetensors.index.json")};
    for (int i = 0; i < 2; i++) {
        test_case("%s", paths[i]);
        write_content(&c, paths[i], 1);
        for (int way = 0; way < WAYS; way++) {
            CHECK(take(paths[i], way, &got) && memcmp(&got, &c, sizeof c) == 0, "the file is not read back: %s",
                  tch_last_error());
        }
        int silent = silent_changes(&c, paths[i], i == 0 ? paths[i] : file_of_index(paths[i]), &refused);
        CHECK(silent == 0 && refused > 0, "%d changes of one bit came through", silent);
    }
    write_content(&c, paths[0], 0);
    CHECK(silent_changes(&c, paths[0], paths[0], &refused) > 0, "the test finds no change at all");
}

static void check_differs(tch_status status, const char *path, const char *name)
{
    CHECK(status == TCH_ERR_IO, "gave %s", tch_status_name(status));
    CHECK(strstr(tch_last_error(), path) != NULL && strstr(tch_last_error(), name) != NULL &&
              strstr(tch_last_error(), "CRC-32C") != NULL,
          "said %s", tch_last_error());
}

/* Larger than what is summed at once, and changed near its end: every mode names the tensor and the file. */
TEST(the_tensor_is_named)
{
    enum { SIZE = 100003 };
    static float values[SIZE];
    static float got[SIZE];
    int64_t size = SIZE;
    int64_t bytes;
    const char *path = test_path("named");
    tch_tensor t = tch_tensor_view(values, TCH_FLOAT32, 1, &size);
    tch_tensor out = tch_tensor_view(got, TCH_FLOAT32, 1, &size);
    tch_tensor view;
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK_OK(tch_checkpoint_writer_add(writer, "first", &t));
    CHECK_OK(tch_checkpoint_writer_add(writer, "second", &t));
    CHECK_OK(tch_checkpoint_writer_save(writer, NULL, path));
    char *file = test_file_read(path, &bytes);
    file[bytes - 4 * SIZE - 3] ^= 16;
    test_file_write(path, file, bytes);
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    check_differs(tch_checkpoint_read(checkpoint, NULL, "first", &out), path, "first");
    check_differs(tch_checkpoint_view(checkpoint, "first", &view), path, "first");
    check_differs(tch_checkpoint_view(checkpoint, "first", &view), path, "first");
    check_differs(tch_checkpoint_verify(checkpoint, "first"), path, "first");
    check_differs(tch_checkpoint_verify(checkpoint, NULL), path, "first");
    CHECK_OK(tch_checkpoint_verify(checkpoint, "second"));
    CHECK_OK(tch_checkpoint_read(checkpoint, NULL, "second", &out));
    CHECK_OK(tch_checkpoint_view(checkpoint, "second", &view));
    test_check_refused(tch_checkpoint_verify(checkpoint, "third"), TCH_ERR_INVALID_ARGUMENT, "name");
    test_check_refused(tch_checkpoint_verify(NULL, NULL), TCH_ERR_INVALID_ARGUMENT, "checkpoint");
}

/* --- with and without -------------------------------------------------------------------------------------------- */

static void check_has(const char *path, int32_t expected)
{
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    CHECK(tch_checkpoint_has_checksums(checkpoint) == expected, "expected %d", expected);
    CHECK_OK(tch_checkpoint_verify(checkpoint, NULL));
}

TEST(files_say_whether_they_have_them)
{
    content c = random_content(20);
    content got;
    const char *path = test_path("with");
    write_content(&c, path, 1);
    check_has(path, 1);
    write_content(&c, path, 0);
    check_has(path, 0);
    CHECK(take(path, 1, &got) && memcmp(&got, &c, sizeof c) == 0, "a file without checksums is not read back");
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK_OK(tch_checkpoint_writer_save(writer, NULL, path));
    check_has(path, 1);
    test_check_refused(tch_checkpoint_writer_set_checksums(writer, 2), TCH_ERR_INVALID_ARGUMENT, "checksums");
    test_check_refused(tch_checkpoint_writer_set_checksums(NULL, 1), TCH_ERR_INVALID_ARGUMENT, "writer");
    test_safetensors_write(path, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4);
    check_has(path, 0);
    CHECK(tch_checkpoint_has_checksums(NULL) == 0, "nothing has checksums");
}

/* --- other programs' files --------------------------------------------------------------------------------------- */

/* Two tensors over the bytes 0 to 7 and 8 to 19, hand-written with checksums by the manual's rule. */
#define A "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
#define B "\"b\":{\"dtype\":\"F32\",\"shape\":[3,1],\"data_offsets\":[8,20]}"
#define C "\"c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[20,24]}"

typedef struct by_hand {
    char own[80], a[80], b[80]; /* members of the settings */
} by_hand;

static by_hand sums_by_hand(void)
{
    by_hand h;
    unsigned char bytes[20];
    char words[256];
    for (int i = 0; i < 20; i++) {
        bytes[i] = (unsigned char)i;
    }
    unsigned a = reference(bytes, 8);
    unsigned b = reference(bytes + 8, 12);
    int length = snprintf(words, sizeof words, "k%cv%cna%cme%ctwo%ca%cF32%c2%c%c%08x%cb%cF32%c3%c1%c%c%08x%c", 0, 0, 1,
                          0, 0, 0, 0, 0, 0, a, 0, 0, 0, 0, 0, 0, b, 0);
    snprintf(h.a, sizeof h.a, "\"torchium.crc32c/a\":\"%08x\"", a);
    snprintf(h.b, sizeof h.b, "\"torchium.crc32c/b\":\"%08x\"", b);
    snprintf(h.own, sizeof h.own, "\"torchium.crc32c\":\"%08x\"", reference((unsigned char *)words, length));
    return h;
}

#define SETTINGS "\"k\":\"v\",\"na\\u0001me\":\"two\""

static const char *made_path;

/* Opens a file with this header over `bytes` data bytes. */
static tch_status open_made(int64_t data_bytes, tch_checkpoint **checkpoint, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static tch_status open_made(int64_t data_bytes, tch_checkpoint **checkpoint, const char *format, ...)
{
    char header[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(header, sizeof header, format, arguments);
    va_end(arguments);
    test_case("%s", header);
    *checkpoint = NULL;
    made_path = test_path("made");
    test_safetensors_write(made_path, header, -1, data_bytes);
    return tch_checkpoint_open(made_path, checkpoint);
}

/* By address, since arguments are evaluated in any order, and another one opens the checkpoint. */
static void check_good(tch_status status, tch_checkpoint **opened, int32_t complete)
{
    tch_checkpoint *checkpoint = *opened;
    CHECK(status == TCH_OK, "gave %s: %s", tch_status_name(status), tch_last_error());
    CHECK(tch_checkpoint_has_checksums(checkpoint) == complete, "expected %d", complete);
    CHECK(tch_checkpoint_key_count(checkpoint) == 2, "%d settings", (int)tch_checkpoint_key_count(checkpoint));
    CHECK(tch_checkpoint_text(checkpoint, "torchium.crc32c") == NULL, "a checksum is a setting");
    CHECK_OK(tch_checkpoint_verify(checkpoint, NULL));
    tch_checkpoint_close(checkpoint);
}

static void check_bad(tch_status status, tch_checkpoint *const *checkpoint, const char *message)
{
    CHECK(status == TCH_ERR_IO && *checkpoint == NULL, "gave %s", tch_status_name(status));
    CHECK(strstr(tch_last_error(), message) != NULL && strstr(tch_last_error(), made_path) != NULL,
          "said \"%s\", expected \"%s\"", tch_last_error(), message);
}

/* Allowed for other writers: order, spelling, additional tensors. */
TEST(what_others_may_change)
{
    tch_checkpoint *c = NULL;
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    by_hand h = sums_by_hand();
    check_good(open_made(20, &c, "{\"__metadata__\":{" SETTINGS ",%s,%s,%s}," A "," B "}", h.own, h.a, h.b), &c, 1);
    check_good(open_made(20, &c, "{" B ",\"__metadata__\":{%s,%s,\"na\\u0001me\":\"two\",%s,\"k\":\"v\"}," A "}", h.b,
                         h.own, h.a),
               &c, 1);
    check_good(open_made(20, &c,
                         "{ \"__metadata__\" : {\"\\u006b\":\"\\u0076\",\"na\\u0001me\":\"two\",%s,%s,%s}," A "," B
                         "} ",
                         h.a, h.b, h.own),
               &c, 1);
    tch_status status =
        open_made(24, &c, "{\"__metadata__\":{" SETTINGS ",%s,%s,%s}," A "," B "," C "}", h.own, h.a, h.b);
    CHECK(status == TCH_OK, "a tensor without a checksum: %s", tch_last_error());
    CHECK_OK(tch_checkpoint_get_info(c, tch_checkpoint_find(c, "c"), &info));
    CHECK(info.has_checksum == 0, "there is none");
    CHECK_OK(tch_checkpoint_get_info(c, tch_checkpoint_find(c, "b"), &info));
    CHECK(info.has_checksum == 1, "there is one");
    check_good(status, &c, 0);
    check_good(open_made(20, &c, "{\"__metadata__\":{" SETTINGS "}," A "," B "}"), &c, 0);
}

TEST(what_others_may_not_change)
{
    tch_checkpoint *c = NULL;
    by_hand h = sums_by_hand();
#define MADE(settings, tensors) "{\"__metadata__\":{" settings ",%s,%s,%s}," tensors "}", h.own, h.a, h.b
    check_bad(open_made(20, &c, MADE("\"k\":\"w\",\"na\\u0001me\":\"two\"", A "," B)), &c,
              "are not those that were written");
    check_bad(open_made(20, &c, MADE("\"k\":\"v\"", A "," B)), &c, "are not those that were written");
    check_bad(open_made(20, &c, MADE(SETTINGS ",\"x\":\"\"", A "," B)), &c, "are not those that were written");
    check_bad(open_made(8, &c, MADE(SETTINGS, A)), &c, "there is a checksum of \"b\", but no such tensor");
    check_bad(open_made(20, &c, MADE(SETTINGS, A ",\"b\":{\"dtype\":\"F32\",\"shape\":[1,3],\"data_offsets\":[8,20]}")),
              &c, "are not those that were written");
    check_bad(open_made(20, &c, MADE(SETTINGS, A ",\"b\":{\"dtype\":\"I32\",\"shape\":[3,1],\"data_offsets\":[8,20]}")),
              &c, "are not those that were written");
#undef MADE
    check_bad(open_made(20, &c, "{\"__metadata__\":{" SETTINGS ",%s,%s}," A "," B "}", h.a, h.b), &c,
              "none of the header");
    check_bad(open_made(20, &c, "{\"__metadata__\":{" SETTINGS ",%s,%s}," A "," B "}", h.own, h.a), &c,
              "are not those that were written");
    check_bad(open_made(20, &c, "{\"__metadata__\":{" SETTINGS ",%s,%s,%s,%s}," A "," B "}", h.own, h.a, h.b, h.a), &c,
              "the checksum of \"a\" occurs twice");
    check_bad(open_made(20, &c, "{\"__metadata__\":{" SETTINGS ",%s,%s,%s,%s}," A "," B "}", h.own, h.a, h.b, h.own),
              &c, "\"torchium.crc32c\" occurs twice");
    check_bad(open_made(8, &c, "{\"__metadata__\":{%s,\"torchium.crc32c/a\":\"12345\"}," A "}", h.own), &c,
              "the checksum of a is \"12345\", expected 8");
    check_bad(open_made(8, &c, "{\"__metadata__\":{%s,\"torchium.crc32c/a\":\"+1234567\"}," A "}", h.own), &c,
              "expected 8");
    check_bad(open_made(8, &c, "{\"__metadata__\":{\"torchium.crc32c\":\"1234567G\"}," A "}"), &c,
              "the checksum of the header is \"1234567G\"");
}

/* Offsets exchanged between tensors of equal shape: only the tensors' checksums detect it. */
TEST(exchanged_places_are_seen)
{
    float values[2][2] = {{1, 2}, {3, 4}};
    float got[2];
    int64_t size = 2;
    int64_t bytes;
    const char *path = test_path("exchanged");
    tch_tensor out = tch_tensor_view(got, TCH_FLOAT32, 1, &size);
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    for (int i = 0; i < 2; i++) {
        tch_tensor t = tch_tensor_view(values[i], TCH_FLOAT32, 1, &size);
        CHECK_OK(tch_checkpoint_writer_add(writer, i == 0 ? "a" : "b", &t));
    }
    test_checkpoint_save(writer, NULL, path);
    char *file = test_file_read(path, &bytes);
    char *text = test_alloc((size_t)bytes + 1);
    memcpy(text, file, (size_t)bytes);
    text[bytes] = '\0';
    char *first = strstr(text + 8, "[0,8]");
    char *second = strstr(text + 8, "[8,16]");
    CHECK(first != NULL && second != NULL && first < second, "the file is not as it was");
    memcpy(file + (first - text), "[8,16]", 6);
    memmove(file + (first - text) + 6, text + (first - text) + 5, (size_t)(second - first - 5));
    memcpy(file + (second - text) + 1, "[0,8]", 5);
    test_file_write(path, file, bytes);
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    check_differs(tch_checkpoint_read(checkpoint, NULL, "a", &out), path, "\"a\"");
    check_differs(tch_checkpoint_read(checkpoint, NULL, "b", &out), path, "\"b\"");
}

TEST_MAIN(test_folder_make, test_folder_remove)
