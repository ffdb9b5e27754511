/* A file that appears under its name whole or not at all: bytes go to a temporary file in the same folder, which takes
 * the name when all of them are on the disk.
 *
 *     tchi_part_file file;
 *     tchi_part_file_create(&file, path, NULL);
 *     tchi_part_file_write(&file, at, bytes, count); // in any order, as often as needed
 *     tchi_part_file_flush(&file);                   // all bytes are on the disk
 *     tchi_part_file_commit(&file);                  // under its name
 *     tchi_part_file_close(&file);                   // after a failure too: removes what was not committed
 */
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

/* Those of the file that is replaced, if any. */
typedef struct tchi_permissions {
    bool replaces;
    mode_t mode;
    gid_t group;
} tchi_permissions;

typedef struct tchi_part_file {
    const char *path;          /* where it shall appear */
    const char *base;          /* the last part of it */
    char name[TCHI_PART_SIZE]; /* of the temporary file; "" when there is none */
    int folder;                /* descriptors, or -1 */
    int file;
    tchi_permissions permissions;
} tchi_part_file;

/* On failure there is nothing to close. `permissions`, or NULL, are for a path that does not exist yet. Removes what
 * processes that were killed left in the folder. */
tch_status tchi_part_file_create(tchi_part_file *part, const char *path, const tchi_permissions *permissions);
tch_status tchi_part_file_write(tchi_part_file *part, int64_t at, const void *bytes, int64_t count);
tch_status tchi_part_file_flush(tchi_part_file *part);
tch_status tchi_part_file_commit(tchi_part_file *part);
void tchi_part_file_close(tchi_part_file *part);

#endif
