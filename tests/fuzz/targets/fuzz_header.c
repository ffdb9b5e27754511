/* A header, without the file around it: the JSON reader, and every check that stands between a header and the tensors
 * it describes; the types of elements and the characters of names, without the header around them. */
#include <string.h>

#include "checkpoint/header.h"
#include "checkpoint/types.h"
#include "checkpoint/utf8.h"
#include "fuzz.h"

/* The tensors cover the data, each byte once, in their order. */
static void check_places(const tchi_header *header, int64_t data_bytes)
{
    const tchi_stored *tensors = header->tensors.items;
    int64_t at = 0;
    for (int64_t i = 0; i < header->tensors.count; i++) {
        REQUIRE(tensors[i].begin == at && tensors[i].end >= at);
        REQUIRE(tchi_file_type_of(tensors[i].type->dtype) == tensors[i].type);
        REQUIRE(tensors[i].ndim >= 0 && tensors[i].first_size + tensors[i].ndim <= header->sizes.count);
        at = tensors[i].end;
    }
    REQUIRE(at == data_bytes);
}

static void read_header(const uint8_t *bytes, size_t count, int64_t data_bytes)
{
    tchi_header header;
    char *text = malloc(count > 0 ? count : 1); /* it is written to, and has no end but its length */
    REQUIRE(text != NULL);
    memcpy(text, bytes, count);
    memset(&header, 0, sizeof header);
    tch_clear_error();
    fuzz_faults_begin(fuzz_hash(bytes, count));
    tch_status status = tchi_header_read(&header, "a file", text, (int64_t)count, data_bytes);
    bool faulted = fuzz_faults_end();
    REQUIRE(status == TCH_OK || status == TCH_ERR_IO || (status == TCH_ERR_OUT_OF_MEMORY && faulted));
    REQUIRE(status == TCH_OK || tch_last_error()[0] != '\0');
    if (status == TCH_OK) {
        check_places(&header, data_bytes);
    }
    tchi_header_release(&header);
    free(text);
}

static bool has_controls(const char *text)
{
    for (; *text != '\0'; text++) {
        if ((unsigned char)*text < ' ' || *text == 0x7f) {
            return true;
        }
    }
    return false;
}

/* What a message shows of a name is a text that fits it, whatever the name is; a good and short name stays. */
static void check_text(const uint8_t *bytes, size_t count)
{
    char quoted[TCHI_QUOTE_SIZE];
    char *text = fuzz_text(bytes, count);
    bool good = tchi_utf8_is_valid(text);
    REQUIRE(tchi_utf8_length(text, 0) == 0);
    REQUIRE(tchi_quote(text, quoted) == quoted && strlen(quoted) < TCHI_QUOTE_SIZE && tchi_utf8_is_valid(quoted));
    REQUIRE(!good || strlen(text) >= 100 || has_controls(text) || strcmp(text, quoted) == 0);
    free(text);
}

/* A type that the format has is the one that was asked for. */
static void check_type(const uint8_t *bytes)
{
    tch_dtype asked = {.code = bytes[0] % 20, .bits = (uint8_t)(1U << bytes[1] % 8), .lanes = bytes[2] % 3};
    const tchi_file_type *type = tchi_file_type_of(asked);
    REQUIRE(type == NULL || (tch_dtype_equal(type->dtype, asked) && tchi_file_type_named(type->name) == type));
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    check_text(bytes, count);
    if (count >= 3) {
        check_type(bytes);
    }
    read_header(bytes, count, 24);
    read_header(bytes, count, 0);
    return 0;
}
