/* A header, without the file around it: the JSON reader, and every check that stands between a header and the tensors
 * it describes. */
#include <string.h>

#include "checkpoint/header.h"
#include "fuzz.h"

/* The tensors cover the data, each byte once, in their order. */
static void check_places(const tchi_header *header, int64_t data_bytes)
{
    const tchi_stored *tensors = header->tensors.items;
    int64_t at = 0;
    for (int64_t i = 0; i < header->tensors.count; i++) {
        REQUIRE(tensors[i].begin == at && tensors[i].end >= at);
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
    tch_status status = tchi_header_read(&header, "a file", text, (int64_t)count, data_bytes);
    REQUIRE(status == TCH_OK || (status == TCH_ERR_IO && tch_last_error()[0] != '\0'));
    if (status == TCH_OK) {
        check_places(&header, data_bytes);
    }
    tchi_header_release(&header);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    read_header(bytes, count, 24);
    read_header(bytes, count, 0);
    return 0;
}
