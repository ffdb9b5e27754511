/* Whole files in memory: sources and cache entries. */
#ifndef TCHI_KERNEL_FILE_H
#define TCHI_KERNEL_FILE_H

#include <stddef.h>

#include <torchium/status.h>

/* The largest source. */
#define TCHI_SOURCE_MOST ((size_t)16 << 20)

typedef struct tchi_file {
    char *text; /* `bytes` of them, then a NUL */
    size_t bytes;
} tchi_file;

/* The text of the file `path`. TCH_ERR_IO where it cannot be read or is no file, TCH_ERR_INVALID_ARGUMENT where it is
 * larger than TCHI_SOURCE_MOST or has a NUL. */
tch_status tchi_file_read(const char *path, tchi_file *file);

/* The first `bytes` of what is open as `descriptor` into `text`; false where there are fewer. */
int tchi_file_fill(int descriptor, void *text, size_t bytes);

/* All of `bytes` to what is open as `descriptor`; false where that fails. */
int tchi_file_write(int descriptor, const void *text, size_t bytes);

void tchi_file_release(tchi_file *file);

#endif
