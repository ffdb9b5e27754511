/* Reads and writes whole files: sources and cache entries. */
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

/* The text of a file. TCH_ERR_IO if it is unreadable or not a regular file, TCH_ERR_INVALID_ARGUMENT if it is larger
 * than TCHI_SOURCE_MOST or contains a NUL. */
tch_status tchi_file_read(const char *path, tchi_file *file);

/* Reads `bytes`; false if there are fewer. */
int tchi_file_fill(int descriptor, void *text, size_t bytes);

/* Writes all `bytes`; false on failure. */
int tchi_file_write(int descriptor, const void *text, size_t bytes);

void tchi_file_release(tchi_file *file);

#endif
