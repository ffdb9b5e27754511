/* The validated header of an open file. */
#ifndef TCHI_CHECKPOINT_HEADER_H
#define TCHI_CHECKPOINT_HEADER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <torchium/status.h>

#include "core/list.h"
#include "names.h"
#include "format.h"

/* One tensor of a file. */
typedef struct tchi_stored {
    const char *name;
    const tchi_file_type *type;
    int32_t ndim;
    int32_t file;       /* index of the file that contains it, for an index */
    int64_t first_size; /* index of its first size in `sizes` */
    int64_t begin;      /* offsets of its bytes from the end of the header */
    int64_t end;
    bool has_checksum;
    uint32_t checksum;  /* of those bytes */
    atomic_bool viewed; /* verified once: the only mutable state of an open file */
} tchi_stored;

typedef struct tchi_setting {
    const char *key;
    const char *value;
} tchi_setting;

typedef struct tchi_header {
    tchi_list tensors;        /* tchi_stored, in file order */
    tchi_list sizes;          /* int64_t: all shapes, concatenated */
    tchi_list settings;       /* tchi_setting */
    tchi_names names;         /* of tensors */
    tchi_names keys;          /* of settings */
    tchi_list noted;          /* tchi_setting: checksums of tensors, by name, as text */
    const char *noted_header; /* the header's own, or NULL */
    bool complete;            /* the header and every tensor have a checksum */
} tchi_header;

#define TCHI_HEADER_INIT                                                                                               \
    {                                                                                                                  \
        .tensors = {.item_size = sizeof(tchi_stored)}, .sizes = {.item_size = sizeof(int64_t)},                        \
        .settings = {.item_size = sizeof(tchi_setting)}, .noted = {                                                    \
            .item_size = sizeof(tchi_setting)                                                                          \
        }                                                                                                              \
    }

/* Parses and checks everything: afterwards the tensors cover the `data_bytes` after the header, each byte once, every
 * shape fits its bytes, and the header matches its checksum, if it has one. Names and texts point into `text`, which is
 * modified. Release the header even if this fails. */
tch_status tchi_header_read(tchi_header *header, const char *path, char *text, int64_t length, int64_t data_bytes);
void tchi_header_release(tchi_header *header);

/* --- checksums.c ------------------------------------------------------------------------------------------------- */

/* Whether the setting is a checksum, which is then stored separately. */
tch_status tchi_header_note(tchi_header *header, const char *path, const tchi_setting *setting, bool *is_checksum);

/* Assigns checksums to tensors and verifies that of the header. */
tch_status tchi_header_check(tchi_header *header, const char *path);

#endif
