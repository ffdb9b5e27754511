/* A module that wraps the real one next to the library, with `allocate` and `release` replaced in a copy of its table
 * so that allocations can fail. The library needs no test hooks. */
#define _GNU_SOURCE
#include "failing_backend.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <torchium/backend.h>

#include "table_copy.h"

static const tch_backend *real;
static tch_backend_host library;
static bool (*asked)(void *user);
static void *asked_user;
static atomic_llong blocks;

void failing_backend_watch(bool (*refuses)(void *user), void *user);
long long failing_backend_blocks(void);

void failing_backend_watch(bool (*refuses)(void *user), void *user)
{
    asked_user = user;
    asked = refuses;
}

long long failing_backend_blocks(void)
{
    return atomic_load(&blocks);
}

static tch_status watched_allocate(void *state, int64_t bytes, void **pointer)
{
    if (asked != NULL && asked(asked_user)) {
        return library.fail(TCH_ERR_OUT_OF_MEMORY, "the test refuses %lld bytes of device memory", (long long)bytes);
    }
    tch_status status = real->device->allocate(state, bytes, pointer);
    atomic_fetch_add(&blocks, status == TCH_OK);
    return status;
}

static void watched_release(void *state, void *pointer, int64_t bytes)
{
    atomic_fetch_sub(&blocks, 1);
    real->device->release(state, pointer, bytes);
}

/* The real module's entry point, in the library's folder. */
static tch_backend_entry *find_entry(const tch_backend_host *host, char *reason, size_t reason_size)
{
    void *inside;
    Dl_info info;
    char path[PATH_MAX];
    tch_backend_entry *entry = NULL;
    memcpy(&inside, &host->fail, sizeof inside);
    if (dladdr(inside, &info) == 0) {
        return NULL;
    }
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash == NULL ? 0 : (int)(slash - info.dli_fname) + 1;
    snprintf(path, sizeof path, "%.*slibtorchium_cuda.so", folder, info.dli_fname);
    void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *address = module == NULL ? NULL : dlsym(module, TCH_BACKEND_ENTRY);
    if (address == NULL) {
        snprintf(reason, reason_size, "%s", dlerror());
        return NULL;
    }
    memcpy(&entry, &address, sizeof entry);
    return entry;
}

const tch_backend *torchium_backend_entry(uint32_t abi, const tch_backend_host *host, char *reason, size_t reason_size)
{
    static table_copy table;
    tch_backend_entry *entry = find_entry(host, reason, reason_size);
    real = entry == NULL ? NULL : entry(abi, host, reason, reason_size);
    if (real == NULL) {
        return NULL;
    }
    library = *host;
    table_copy_make(&table, real);
    table.device.allocate = watched_allocate;
    table.device.release = watched_release;
    return &table.backend;
}
