/* An open file. */
#ifndef TCHI_CHECKPOINT_READER_H
#define TCHI_CHECKPOINT_READER_H

#include <sys/stat.h>

#include <torchium/checkpoint.h>

#include "header.h"
#include "shards.h"

/* Without a file yet. */
tch_status tchi_checkpoint_make(const char *path, tch_checkpoint **checkpoint);

/* A file, or an index: then `header` has the tensors and settings of all its files, and `files` their bytes. */
struct tch_checkpoint {
    int file;   /* descriptor, or -1 if opened on demand by tchi_descriptor_borrow */
    char *text; /* the header as read; names and settings point into it */
    int64_t text_bytes;
    int64_t data_begin; /* offset of the tensors in the file */
    dev_t device;       /* device and inode */
    ino_t inode;
    tchi_header header;
    tchi_shards shards;
    tchi_list files; /* tch_checkpoint *: of an index */
    char *map;       /* mapping of the file, or NULL */
    int64_t map_bytes;
    int map_error; /* errno, if NULL */
    char *path;    /* for messages; in the block of the struct */
    size_t block_bytes;
};

/* The file that contains the tensor: this one, or one of the index. */
const tch_checkpoint *tchi_checkpoint_file(const tch_checkpoint *checkpoint, const tchi_stored *stored);

/* The sizes of a tensor; NULL for a scalar. */
const int64_t *tchi_checkpoint_sizes(const tch_checkpoint *checkpoint, const tchi_stored *stored);

/* Verifies a tensor's checksum, once. */
tch_status tchi_checkpoint_verify_once(const tch_checkpoint *checkpoint, tchi_stored *stored);

/* Whether `out` can be written: in host memory, or on the context's device. */
tch_status tchi_checkpoint_check_out(const char *function, const tch_context *context, const tch_tensor *out);

/* Opens a regular file; the descriptor is set even after a failure. */
tch_status tchi_open_file(const char *path, int *file, struct stat *status);

/* A descriptor of a file, for some reads. An index may have more files than a process may open: beyond half of the
 * limit, files are reopened by path, and must be unchanged. */
tch_status tchi_descriptor_borrow(const tch_checkpoint *file, int *descriptor);
void tchi_descriptor_return(const tch_checkpoint *file, int descriptor);

/* Reads `count` bytes from `offset` on. Fails if the file was truncated. */
tch_status tchi_checkpoint_bytes(int file, const char *path, int64_t offset, void *to, int64_t count);

/* --- index.c ----------------------------------------------------------------------------------------------------- */

/* Whether a path is that of an index, by its name. */
bool tchi_is_index(const char *path);

/* A parsed index. */
typedef struct tchi_index_text {
    char *text; /* names point into it */
    int64_t bytes;
    int file;         /* the index file, open until released */
    tchi_list map;    /* which tensor is in which file */
    tchi_list files;  /* const char *: unique file names */
    tchi_names names; /* of files */
} tchi_index_text;

/* Opens only the index. Release it even after a failure. */
tch_status tchi_index_read(const char *path, tchi_index_text *index, struct stat *status);
void tchi_index_release(tchi_index_text *index);

/* Reads the index, opens its files, and merges their tensors and settings. *replaced is set if a file was missing
 * because another save has replaced the index. */
tch_status tchi_index_open(tch_checkpoint *checkpoint, bool *replaced);

/* For writing an index: adds a file with its tensors, the first of each name, and after the last file the settings. */
tch_status tchi_index_add(tch_checkpoint *index, const char *path);
tch_status tchi_index_finish(tch_checkpoint *checkpoint);

#endif
