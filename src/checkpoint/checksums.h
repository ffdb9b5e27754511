/* The checksums of a file. A tensor has the CRC-32C of its bytes, and the header that of its settings and of the
 * tensors with a checksum, sorted, so that a program may list them in another order. docs/checkpoints.md has the rule
 * for authors of other readers. */
#ifndef TCHI_CHECKPOINT_CHECKSUMS_H
#define TCHI_CHECKPOINT_CHECKSUMS_H

#include <stdint.h>

#include "format.h"

/* What the header's checksum covers: a setting, or a tensor. */
typedef struct tchi_covered {
    const char *name;  /* or key */
    const char *value; /* of a setting; NULL for a tensor, which has the fields below */
    const tchi_file_type *type;
    int32_t ndim;
    const int64_t *sizes;
    uint32_t checksum;
} tchi_covered;

/* Sorts the items, which are unique, and sums them. */
uint32_t tchi_header_checksum(tchi_covered *items, int64_t count);

/* Bytes to sum after each read, while they are cached: five times the unit of tchi_crc32c_fast. */
#define TCHI_SUMMED_BYTES ((int64_t)240 << 10)

#endif
