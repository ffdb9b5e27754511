/* The list of backends: the CPU's and the modules found by the loader, each with the reason if it is unavailable. */
#ifndef TCHI_REGISTRY_H
#define TCHI_REGISTRY_H

#include <torchium/backend.h>

/* The backend's table for a device type, or NULL with the thread's error message set. */
const tch_backend *tchi_registry_find(int32_t device_type);

/* Adds an entry while the registry is filled, by loader.c and src/backends/built_in.c only. For an unavailable backend
 * `table` is NULL and `reason` says why. */
void tchi_registry_add(const tch_backend *table, const char *name, const char *library, const char *reason);

/* loader.c: adds the modules of TORCHIUM_BACKEND_PATH and of the library's folder. */
void tchi_load_modules(void);

/* Whether an entry of this name exists already. */
int tchi_registry_has(const char *name);

/* Defined in src/backends: adds the built-in backends and returns the CPU's table, on which modules may build. */
const tch_backend *tchi_add_built_in(const tch_backend_host *host);

/* The library's services for backends. */
const tch_backend_host *tchi_registry_host(void);

#endif
