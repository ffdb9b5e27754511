/* The folder of the cache: which one it is, and whether it can be trusted. */
#ifndef TCHI_KERNEL_FOLDER_H
#define TCHI_KERNEL_FOLDER_H

#include <limits.h>

#include <torchium/status.h>

/* The name, from the environment. */
tch_status tchi_cache_folder_name(char name[PATH_MAX]);

/* Made where it is not there, and opened: a folder, not a link to one, of this user, that nobody else can write to. */
tch_status tchi_cache_folder_open(const char *name, int *folder);

#endif
