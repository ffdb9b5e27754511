/* Bytes that somebody else chose, opened as a checkpoint. LLVMFuzzerTestOneInput is the entry that libFuzzer and its
 * kin call:
 *
 *     clang -fsanitize=fuzzer,address,undefined -DCHECKPOINT_FUZZ_ENTRY_ONLY ...
 *
 * Without that macro the file is a program that changes good files at random for a number of rounds, its argument. What
 * is looked for: crashes, reads outside the file or the memory, and files that open but contradict themselves. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <torchium/torchium.h>

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, tch_last_error());             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Both ways to a tensor give the same bytes, and as many as its description says; or both say that they are not those
 * of its checksum. */
static void check_tensor(const tch_checkpoint *checkpoint, const tch_checkpoint_info *info)
{
    if (tch_dtype_size(info->dtype) == 0 || info->ndim > TCH_MAX_RANK) {
        return;
    }
    void *memory = malloc(info->bytes > 0 ? (size_t)info->bytes : 1);
    tch_tensor out = tch_tensor_view(memory, info->dtype, info->ndim, (int64_t *)info->shape);
    REQUIRE(memory != NULL);
    REQUIRE(tch_tensor_numel(&out) * (int64_t)tch_dtype_size(info->dtype) == info->bytes);
    tch_status status = tch_checkpoint_read(checkpoint, NULL, info->name, &out);
    REQUIRE(status == TCH_OK || (status == TCH_ERR_IO && info->has_checksum));
    REQUIRE(tch_checkpoint_verify(checkpoint, info->name) == status);
    tch_tensor view;
    tch_status viewed = tch_checkpoint_view(checkpoint, info->name, &view);
    REQUIRE(viewed == status || viewed == TCH_ERR_LAYOUT);
    status = viewed;
    REQUIRE(status != TCH_OK || info->bytes == 0 || memcmp(view.data, memory, (size_t)info->bytes) == 0);
    free(memory);
}

static void check_settings(const tch_checkpoint *checkpoint)
{
    for (int64_t i = 0; i < tch_checkpoint_key_count(checkpoint); i++) {
        const char *key = tch_checkpoint_key(checkpoint, i);
        double number;
        int64_t integer;
        REQUIRE(key != NULL && tch_checkpoint_text(checkpoint, key) != NULL);
        (void)tch_checkpoint_number(checkpoint, key, &number);
        (void)tch_checkpoint_integer(checkpoint, key, &integer);
    }
}

/* Returns the bytes of all tensors. */
static int64_t check_tensors(const tch_checkpoint *checkpoint)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < tch_checkpoint_count(checkpoint); i++) {
        tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
        REQUIRE(tch_checkpoint_get_info(checkpoint, i, &info) == TCH_OK);
        REQUIRE(tch_checkpoint_find(checkpoint, info.name) == i);
        check_tensor(checkpoint, &info);
        bytes += info.bytes;
    }
    return bytes;
}

/* The bytes as a file that is in no folder. */
static int as_file(const uint8_t *bytes, size_t count)
{
    int file = memfd_create("checkpoint", MFD_CLOEXEC);
    REQUIRE(file >= 0);
    REQUIRE(count == 0 || write(file, bytes, count) == (ssize_t)count);
    return file;
}

/* A rectangle of a tensor that some files have in shards. */
static void check_shards(const tch_checkpoint *checkpoint)
{
    static const int64_t shape[] = {2, 2};
    static const int64_t start[] = {0, 1};
    int64_t size[] = {2, 1};
    float values[2];
    tch_tensor out = tch_tensor_view(values, TCH_FLOAT32, 2, size);
    (void)tch_checkpoint_read_shard(checkpoint, NULL, "w", shape, start, &out);
}

static int opened;

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    char path[64];
    tch_checkpoint *checkpoint = NULL;
    int file = as_file(bytes, count);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    tch_clear_error();
    tch_status status = tch_checkpoint_open(path, &checkpoint);
    REQUIRE(status == TCH_OK || (status == TCH_ERR_IO && checkpoint == NULL && tch_last_error()[0] != '\0'));
    if (status == TCH_OK) {
        REQUIRE(check_tensors(checkpoint) < (int64_t)count);
        check_settings(checkpoint);
        check_shards(checkpoint);
        tch_status verified = tch_checkpoint_verify(checkpoint, NULL);
        REQUIRE(verified == TCH_OK || verified == TCH_ERR_IO);
        tch_checkpoint_close(checkpoint);
        opened++;
    }
    close(file);
    return 0;
}

#ifndef CHECKPOINT_FUZZ_ENTRY_ONLY

#define MOST_BYTES 4096
#define DEFAULT_ROUNDS 100000

static uint64_t random_state;

/* splitmix64 */
static uint64_t random_bits(void)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static size_t random_below(size_t count)
{
    return count == 0 ? 0 : (size_t)(random_bits() % count);
}

static const char *const seeds[] = {
    "{}",
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}",
    "{\"__metadata__\":{\"format\":\"torchium\",\"torchium.format_version\":\"1\",\"step\":\"12\",\"lr\":\"0.5\"},"
    "\"b\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},"
    "\"c\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[8,12]},"
    "\"e\":{\"dtype\":\"I64\",\"shape\":[0],\"data_offsets\":[12,12]},"
    "\"q\":{\"dtype\":\"F4\",\"shape\":[24],\"data_offsets\":[12,24]}}   ",
    "{\"__metadata__\":{\"torchium.crc32c\":\"420467de\",\"torchium.crc32c/a\":\"42709aea\",\"k\":\"v\"},"
    "\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
    "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[16,24]}}",
    "{\"__metadata__\":{\"torchium.shard/w[0:1,0:2]\":\"2,2;0,0\",\"torchium.shard/w[1:2,0:2]\":\"2,2;1,0\"},"
    "\"w[0:1,0:2]\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
    "\"w[1:2,0:2]\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[8,16]},"
    "\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[16,24]}}",
    "{\"\\u00e9\\ud83d\\udd25\\n\":{\"shape\":[3,1,1,1,1,1,1,1,1],\"dtype\":\"I64\",\"data_offsets\":[0,24]}}",
};
#define SEEDS (sizeof seeds / sizeof seeds[0])
#define DATA_BYTES 24

static const char *const chunks[] = {
    "\"",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "0",
    "1",
    "-",
    "24",
    "9223372036854775807",
    "18446744073709551615",
    "\\u0000",
    "\\ud800",
    "\\",
    "\xff",
    "\xed\xa0\x80",
    "F32",
    "F6_E2M3",
    "\"a\"",
    "\"dtype\"",
    "\"shape\":[1]",
    "\"data_offsets\":[0,4]",
    "\"__metadata__\":{}",
    "\"torchium.crc32c/b\":\"00000000\"",
    " ",
    "null",
    "1e3",
    "w[0:1,0:2]",
    "2,2;0,0",
    ";",
};
#define CHUNKS (sizeof chunks / sizeof chunks[0])

typedef struct input {
    uint8_t bytes[MOST_BYTES];
    size_t count;
} input;

static void put_length(input *in, uint64_t length)
{
    for (int i = 0; i < 8; i++) {
        in->bytes[i] = (uint8_t)(length >> (8 * i));
    }
}

static input seed_input(const char *header)
{
    input in = {.count = 8 + strlen(header) + DATA_BYTES};
    memcpy(in.bytes + 8, header, strlen(header));
    put_length(&in, strlen(header));
    return in;
}

/* Opens a gap, or closes one, at `at`. */
static void move_rest(input *in, size_t at, size_t from)
{
    size_t rest = in->count - from;
    if (at + rest <= MOST_BYTES) {
        memmove(in->bytes + at, in->bytes + from, rest);
        in->count = at + rest;
    }
}

static void insert(input *in, size_t at, const char *text)
{
    size_t length = strlen(text);
    if (in->count + length <= MOST_BYTES) {
        move_rest(in, at + length, at);
        memcpy(in->bytes + at, text, length);
    }
}

static void change(input *in)
{
    size_t at = random_below(in->count + 1);
    size_t end = at + random_below(in->count - at + 1 < 12 ? in->count - at + 1 : 12);
    switch (random_below(6)) {
    case 0: /* one bit */
        in->bytes[random_below(in->count)] ^= (uint8_t)(1U << random_below(8));
        break;
    case 1: /* one byte */
        in->bytes[random_below(in->count)] = (uint8_t)random_bits();
        break;
    case 2: /* a few bytes less */
        move_rest(in, at, end);
        break;
    case 3: /* a few bytes twice */
        move_rest(in, end, at);
        break;
    case 4: /* another number */
        insert(in, at, chunks[7 + random_below(6)]);
        break;
    default:
        insert(in, at, chunks[random_below(CHUNKS)]);
    }
}

/* Most changes fall into the header; where its length is set right again they get past the first check. */
static void one_round(void)
{
    input in = seed_input(seeds[random_below(SEEDS)]);
    size_t changes = 1 + random_below(4);
    for (size_t i = 0; i < changes && in.count > 0; i++) {
        change(&in);
    }
    if (in.count >= 8 + DATA_BYTES && random_below(4) != 0) {
        put_length(&in, in.count - 8 - DATA_BYTES);
    }
    LLVMFuzzerTestOneInput(in.bytes, in.count);
}

int main(int argc, char **argv)
{
    const char *seed = getenv("TORCHIUM_TEST_SEED");
    long rounds = argc > 1 ? strtol(argv[1], NULL, 10) : DEFAULT_ROUNDS;
    random_state = seed != NULL ? strtoull(seed, NULL, 0) : 1;
    for (size_t i = 0; i < SEEDS; i++) {
        input in = seed_input(seeds[i]);
        in.count -= strcmp(seeds[i], "{}") == 0 ? DATA_BYTES : 0;
        LLVMFuzzerTestOneInput(in.bytes, in.count);
    }
    REQUIRE(opened == (int)SEEDS);
    for (long i = 0; i < rounds; i++) {
        one_round();
    }
    printf("%ld changed files, of which %d opened\n", rounds, opened - (int)SEEDS);
    return 0;
}

#endif
