/* An open file. */
#ifndef TCHI_CHECKPOINT_READER_H
#define TCHI_CHECKPOINT_READER_H

#include <torchium/checkpoint.h>

#include "header.h"

struct tch_checkpoint {
    int file;   /* descriptor */
    char *text; /* the header as read; names and settings point into it */
    int64_t text_bytes;
    int64_t data_begin; /* where the tensors' bytes begin in the file */
    tchi_header header;
    char *map; /* the whole file; NULL where it cannot be mapped */
    int64_t map_bytes;
    int map_error; /* errno, where it cannot */
    char *path;    /* for messages; shares the block of the struct */
    size_t block_bytes;
};

/* Whether these are the bytes that were written: `found` is what they sum up to. Always so for a tensor without a
 * checksum. */
tch_status tchi_checkpoint_compare(const tch_checkpoint *checkpoint, const tchi_stored *stored, uint32_t found);

/* `count` bytes of the file from `offset` on. Fails when the file has become shorter. */
tch_status tchi_checkpoint_bytes(int file, const char *path, int64_t offset, void *to, int64_t count);

#endif
