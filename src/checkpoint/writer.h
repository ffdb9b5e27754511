/* What a writer holds until it saves. */
#ifndef TCHI_CHECKPOINT_WRITER_H
#define TCHI_CHECKPOINT_WRITER_H

#include <stdbool.h>

#include <torchium/checkpoint.h>

#include "core/list.h"
#include "names.h"
#include "part_file.h"
#include "types.h"

/* A tensor to be written. It moves when the list grows, so `tensor` does not point at `shape` and `strides`: take it by
 * tchi_added_tensor. */
typedef struct tchi_added {
    char *name;
    const tchi_file_type *type;
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK];
    int64_t strides[TCH_MAX_RANK];
} tchi_added;

/* A setting to be written, as text. */
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

/* Writes the checkpoint to the disk, for tchi_part_file_commit to give it its name. On failure there is nothing to
 * close. */
tch_status tchi_writer_write(const tch_checkpoint_writer *writer, tch_context *context, const char *path,
                             const tchi_permissions *permissions, tchi_part_file *file);

/* The settings that the library adds; `index` from 0 on. False past the last one. */
bool tchi_library_setting(int32_t index, const char **key, const char **value);

/* The file's beginning: the length of the header, then the header, filled up with spaces so that tensors begin at a
 * multiple of 8 bytes. `order` has the numbers of the tensors as they follow each other in the file. Its size does not
 * depend on the checksums, which are known only when the tensors have been written: `checksums` has one for each of
 * them in the same order, `header_checksum` is the header's; both are left aside where the writer writes none. */
tch_status tchi_header_bytes(const tch_checkpoint_writer *writer, const tchi_list *order, int64_t *bytes);
void tchi_header_text(const tch_checkpoint_writer *writer, const tchi_list *order, const uint32_t *checksums,
                      uint32_t header_checksum, char *text);

#endif
