/* Element types of safetensors files, this library's settings, and limits of the format. */
#ifndef TCHI_CHECKPOINT_FORMAT_H
#define TCHI_CHECKPOINT_FORMAT_H

#include <stdint.h>

#include <torchium/tensor.h>

typedef struct tchi_file_type {
    const char *name; /* in the file */
    int32_t bits;     /* of one element; types below 8 are packed */
    tch_dtype dtype;  /* DLPack's code */
} tchi_file_type;

/* NULL for an unknown name or type. */
const tchi_file_type *tchi_file_type_named(const char *name);
const tchi_file_type *tchi_file_type_of(tch_dtype dtype);

/* Bytes of the little-endian length before the header. */
#define TCHI_PREFIX_BYTES 8

/* The limit of the format's own library, in bytes. */
#define TCHI_MOST_HEADER_BYTES 100000000

/* The header's member with the settings. */
#define TCHI_SETTINGS_NAME "__metadata__"

/* The suffix of an index. */
#define TCHI_INDEX_ENDING ".index.json"

/* Settings of the library. The version is incremented by changes that an older reader would misinterpret. */
#define TCHI_FORMAT_KEY "format"
#define TCHI_FORMAT_NAME "torchium"
#define TCHI_LIBRARY_PREFIX "torchium."
#define TCHI_FORMAT_VERSION_KEY "torchium.format_version"
#define TCHI_FORMAT_VERSION 1
#define TCHI_FORMAT_VERSION_TEXT "1" /* the same as text */
#define TCHI_LIBRARY_VERSION_KEY "torchium.version"

/* Checksums are stored as settings but not reported as such: see checksums.h. */
#define TCHI_CHECKSUM_KEY "torchium.crc32c"        /* of settings and tensors as the header has them */
#define TCHI_CHECKSUM_PREFIX TCHI_CHECKSUM_KEY "/" /* followed by the name of a tensor: of its bytes */
#define TCHI_CHECKSUM_DIGITS 8                     /* lowercase hexadecimal */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files hold little-endian numbers, which are not swapped");

#endif
