/* The content of a writer until it saves. */
#ifndef TCHI_CHECKPOINT_WRITER_H
#define TCHI_CHECKPOINT_WRITER_H

#include <stdbool.h>

#include <torchium/checkpoint.h>

#include "core/list.h"
#include "names.h"
#include "part_file.h"
#include "format.h"

/* A tensor to write. It moves when the list grows, so `tensor` does not point to `shape` and `strides`: use
 * tchi_added_tensor. */
typedef struct tchi_added {
    char *name;
    const tchi_file_type *type;
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK];
    int64_t strides[TCH_MAX_RANK];
} tchi_added;

/* A setting to write, as text. */
typedef struct tchi_set {
    char *key;
    char *value;
} tchi_set;

struct tch_checkpoint_writer {
    tchi_list tensors;  /* tchi_added */
    tchi_list settings; /* tchi_set */
    tchi_names names;   /* of tensors */
    tchi_names keys;    /* of settings */
    int64_t bytes;      /* of all tensors */
    bool checksums;     /* are written */
};

/* The tensor with its shape and strides. */
tch_tensor tchi_added_tensor(const tchi_added *added);

/* Writes and syncs the checkpoint, for tchi_part_file_commit to rename. After a failure there is nothing to close. */
tch_status tchi_writer_write(const tch_checkpoint_writer *writer, tch_context *context, const char *path,
                             const tchi_permissions *permissions, tchi_part_file *file);

#endif
