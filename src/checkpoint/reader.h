/* An open file. */
#ifndef TCHI_CHECKPOINT_READER_H
#define TCHI_CHECKPOINT_READER_H

#include <torchium/checkpoint.h>

#include "header.h"
#include "shards.h"

/* A file, or an index of several: then `header` has the tensors and settings of all, and `files` their bytes. */
struct tch_checkpoint {
    int file;   /* descriptor */
    char *text; /* the header or the index as read; names and settings point into it */
    int64_t text_bytes;
    int64_t data_begin; /* where the tensors' bytes begin in the file */
    tchi_header header;
    tchi_shards shards;
    tchi_list files; /* tch_checkpoint *: of an index */
    char *map;       /* the whole file; NULL where it cannot be mapped */
    int64_t map_bytes;
    int map_error; /* errno, where it cannot */
    char *path;    /* for messages; shares the block of the struct */
    size_t block_bytes;
};

/* The file that has the tensor's bytes: this one, or one of the index. */
const tch_checkpoint *tchi_checkpoint_file(const tch_checkpoint *checkpoint, const tchi_stored *stored);

/* The sizes of a tensor; NULL for a scalar. */
const int64_t *tchi_checkpoint_sizes(const tch_checkpoint *checkpoint, const tchi_stored *stored);

/* Whether these are the bytes that were written: `found` is what they sum up to. Always so for a tensor without a
 * checksum. */
tch_status tchi_checkpoint_compare(const tch_checkpoint *checkpoint, const tchi_stored *stored, uint32_t found);

/* Compares a tensor with its checksum, unless that was done before. */
tch_status tchi_checkpoint_verify_once(const tch_checkpoint *checkpoint, tchi_stored *stored);

/* Opens what must be a regular file; a descriptor that was opened is there also after a failure. */
tch_status tchi_open_file(const char *path, int *file, int64_t *bytes);

/* `count` bytes of the file from `offset` on. Fails when the file has become shorter. */
tch_status tchi_checkpoint_bytes(int file, const char *path, int64_t offset, void *to, int64_t count);

/* --- index.c ----------------------------------------------------------------------------------------------------- */

/* Whether a path is that of an index, by its name. */
bool tchi_is_index(const char *path);

/* Reads the index, opens its files, and puts their tensors and settings together. */
tch_status tchi_index_open(tch_checkpoint *checkpoint);

#endif
