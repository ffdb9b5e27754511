/* Host memory for a backend, from the library's allocator. */
#ifndef TCHI_BACKENDS_HOST_MEMORY_H
#define TCHI_BACKENDS_HOST_MEMORY_H

#include <string.h>

#include <torchium/backend.h>

/* Zeroed, in *(void **)pointer; `what` it is for goes into the message. */
static inline tch_status tchi_backend_take(const tch_backend_host *host, size_t bytes, const char *what, void *pointer)
{
    void *memory = host->allocate(bytes, 64);
    memcpy(pointer, &memory, sizeof memory);
    if (memory == NULL) {
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for %s", bytes, what);
    }
    memset(memory, 0, bytes);
    return TCH_OK;
}

#endif
