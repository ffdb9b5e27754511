/* The list of backends: the CPU's, and the modules the loader found, each with the reason when it cannot be used. */
#ifndef TCHI_REGISTRY_H
#define TCHI_REGISTRY_H

#include <torchium/backend.h>

/* The table of the backend for a device type, or NULL with the thread's message set to why there is none. */
const tch_backend *tchi_registry_find(int32_t device_type);

/* Adds an entry while the registry is being filled; used by loader.c and src/backends/built_in.c only. `table` is NULL
 * for a backend that cannot be used, and `reason` then says why. */
void tchi_registry_add(const tch_backend *table, const char *name, const char *library, const char *reason);

/* loader.c: looks for modules under TORCHIUM_BACKEND_PATH and beside the library, and adds each. */
void tchi_load_modules(void);

/* Whether an entry of this name exists already. */
int tchi_registry_has(const char *name);

/* Defined in src/backends: adds the backends that are part of the library and returns the CPU's table, which modules
 * may build on. */
const tch_backend *tchi_add_built_in(const tch_backend_host *host);

/* What backends get from the library. */
const tch_backend_host *tchi_registry_host(void);

#endif
