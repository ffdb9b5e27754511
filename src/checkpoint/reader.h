/* An open file. */
#ifndef TCHI_CHECKPOINT_READER_H
#define TCHI_CHECKPOINT_READER_H

#include <sys/stat.h>

#include <torchium/checkpoint.h>

#include "header.h"
#include "shards.h"

/* Without a file yet. */
tch_status tchi_checkpoint_make(const char *path, tch_checkpoint **checkpoint);

/* A file, or an index of several: then `header` has the tensors and settings of all, and `files` their bytes. */
struct tch_checkpoint {
    int file;   /* descriptor, or -1 where it is opened as needed: tchi_descriptor_borrow */
    char *text; /* the header as read; names and settings point into it */
    int64_t text_bytes;
    int64_t data_begin; /* where the tensors' bytes begin in the file */
    dev_t device;       /* which file it is */
    ino_t inode;
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

/* Compares a tensor with its checksum, unless that was done before. */
tch_status tchi_checkpoint_verify_once(const tch_checkpoint *checkpoint, tchi_stored *stored);

/* Whether `out` can be written: in host memory, or on the context's device. */
tch_status tchi_checkpoint_check_out(const char *function, const tch_context *context, const tch_tensor *out);

/* Opens what must be a regular file; a descriptor that was opened is there also after a failure. */
tch_status tchi_open_file(const char *path, int *file, struct stat *status);

/* A descriptor of a file, for some reads. An index may have more files than a process may open: those that would take
 * more than half of its descriptors are opened again by their path, and must still be the same. */
tch_status tchi_descriptor_borrow(const tch_checkpoint *file, int *descriptor);
void tchi_descriptor_return(const tch_checkpoint *file, int descriptor);

/* `count` bytes of the file from `offset` on. Fails when the file has become shorter. */
tch_status tchi_checkpoint_bytes(int file, const char *path, int64_t offset, void *to, int64_t count);

/* --- index.c ----------------------------------------------------------------------------------------------------- */

/* Whether a path is that of an index, by its name. */
bool tchi_is_index(const char *path);

/* What an index says. */
typedef struct tchi_index_text {
    char *text; /* names point into it */
    int64_t bytes;
    int file;         /* the index itself, open until it is released */
    tchi_list map;    /* which tensor is in which file */
    tchi_list files;  /* const char *: names of files, each once */
    tchi_names names; /* of files */
} tchi_index_text;

/* Opens no file but the index. Release also when it fails. */
tch_status tchi_index_read(const char *path, tchi_index_text *index, struct stat *status);
void tchi_index_release(tchi_index_text *index);

/* Reads the index, opens its files, and puts their tensors and settings together. *replaced is set where a file was
 * missing and another index has taken the place of this one since. */
tch_status tchi_index_open(tch_checkpoint *checkpoint, bool *replaced);

/* For an index that is to be written: adds a file with its tensors, of one name the first, and after the last file the
 * settings. */
tch_status tchi_index_add(tch_checkpoint *index, const char *path);
tch_status tchi_index_finish(tch_checkpoint *checkpoint);

#endif
