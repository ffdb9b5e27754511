/* The checksums of a file, for writing and for reading. A tensor has the CRC-32C of its bytes, and the header that of
 * its settings and of the tensors that have one: sorted, so that a program that lists them in another order changes
 * nothing. docs/checkpoints.md has the rule for authors of other readers. */
#ifndef TCHI_CHECKPOINT_CHECKSUMS_H
#define TCHI_CHECKPOINT_CHECKSUMS_H

#include <stdint.h>

#include "format.h"

/* What the header's checksum covers: a setting, or a tensor. */
typedef struct tchi_covered {
    const char *name;  /* or key */
    const char *value; /* of a setting; NULL for a tensor, which has the rest */
    const tchi_file_type *type;
    int32_t ndim;
    const int64_t *sizes;
    uint32_t checksum;
} tchi_covered;

/* Sorts the items, all different, and sums them. */
uint32_t tchi_header_checksum(tchi_covered *items, int64_t count);

/* Bytes that are summed right after they are read, so that they are found in the cache:
 * five times what tchi_crc32c_fast works on at once. */
#define TCHI_SUMMED_BYTES ((int64_t)240 << 10)

#endif
