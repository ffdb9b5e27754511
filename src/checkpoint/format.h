/* The element types of safetensors files, what every file of this library says of itself, and the limits of the
 * format. */
#ifndef TCHI_CHECKPOINT_FORMAT_H
#define TCHI_CHECKPOINT_FORMAT_H

#include <stdint.h>

#include <torchium/tensor.h>

typedef struct tchi_file_type {
    const char *name; /* in the file */
    int32_t bits;     /* of one element; those below 8 are packed */
    tch_dtype dtype;  /* in DLPack's numbers */
} tchi_file_type;

/* NULL for a name or a type that the format does not have. */
const tchi_file_type *tchi_file_type_named(const char *name);
const tchi_file_type *tchi_file_type_of(tch_dtype dtype);

/* Bytes of the little-endian length before the header. */
#define TCHI_PREFIX_BYTES 8

/* What the format's own library accepts, in bytes. */
#define TCHI_MOST_HEADER_BYTES 100000000

/* The member of the header that holds the settings. */
#define TCHI_SETTINGS_NAME "__metadata__"

/* What the name of an index ends with. */
#define TCHI_INDEX_ENDING ".index.json"

/* Settings of the library's own. The version counts changes after which an older reader would misunderstand. */
#define TCHI_FORMAT_KEY "format"
#define TCHI_FORMAT_NAME "torchium"
#define TCHI_LIBRARY_PREFIX "torchium."
#define TCHI_FORMAT_VERSION_KEY "torchium.format_version"
#define TCHI_FORMAT_VERSION 1
#define TCHI_FORMAT_VERSION_TEXT "1" /* the same as text */
#define TCHI_LIBRARY_VERSION_KEY "torchium.version"

/* Checksums are kept among the settings, but are none: see checksums.h. */
#define TCHI_CHECKSUM_KEY "torchium.crc32c"        /* of settings and tensors as the header has them */
#define TCHI_CHECKSUM_PREFIX TCHI_CHECKSUM_KEY "/" /* and the name of a tensor: of its bytes */
#define TCHI_CHECKSUM_DIGITS 8                     /* hexadecimal, small letters */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files hold little-endian numbers, which are not swapped");

#endif
