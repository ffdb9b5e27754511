/* Backend modules: shared objects opened at run time. */
#ifndef TCHI_LOADER_H
#define TCHI_LOADER_H

/* Looks for modules under TORCHIUM_BACKEND_PATH and beside the library, and adds each to the registry. */
void tchi_load_modules(void);

#endif
