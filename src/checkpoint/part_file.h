/* A file that appears under its name complete or not at all: bytes go to a temporary file in the same folder, which is
 * renamed after all of them are synced.
 *
 *     tchi_part_file file;
 *     tchi_part_file_create(&file, path, NULL);
 *     tchi_part_file_write(&file, at, bytes, count); // in any order
 *     tchi_part_file_flush(&file);                   // syncs
 *     tchi_part_file_commit(&file);                  // renames
 *     tchi_part_file_close(&file);                   // after a failure too: removes an uncommitted file */
#ifndef TCHI_CHECKPOINT_PART_FILE_H
#define TCHI_CHECKPOINT_PART_FILE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <torchium/status.h>

#define TCHI_PART_PREFIX ".torchium-"
#define TCHI_PART_SUFFIX ".part"
#define TCHI_PART_DIGITS 16
#define TCHI_PART_SIZE (sizeof TCHI_PART_PREFIX + TCHI_PART_DIGITS + sizeof TCHI_PART_SUFFIX - 1)

/* Permissions of the replaced file, if any. */
typedef struct tchi_permissions {
    bool replaces;
    mode_t mode;
    gid_t group;
} tchi_permissions;

typedef struct tchi_part_file {
    const char *path;          /* the final path */
    const char *base;          /* the last part of it */
    char name[TCHI_PART_SIZE]; /* of the temporary file; "": none */
    int folder;                /* descriptors, or -1 */
    int file;
    tchi_permissions permissions;
} tchi_part_file;

/* After a failure there is nothing to close. `permissions`, or NULL: for a new path. Removes leftovers of killed
 * processes in the folder. */
tch_status tchi_part_file_create(tchi_part_file *part, const char *path, const tchi_permissions *permissions);
tch_status tchi_part_file_write(tchi_part_file *part, int64_t at, const void *bytes, int64_t count);
tch_status tchi_part_file_flush(tchi_part_file *part);
tch_status tchi_part_file_commit(tchi_part_file *part);
void tchi_part_file_close(tchi_part_file *part);

#endif
