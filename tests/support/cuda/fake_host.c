/* See fake_host.h. */
#include "fake_host.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cuda/cuda.h"

#include "support/testing.h"

fake_host_record fake_host = {.allocations_left = -1};

static tch_status record(tch_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fake_host.message, sizeof fake_host.message, format, arguments);
    va_end(arguments);
    return status;
}

static void *host_allocate(size_t bytes, size_t alignment)
{
    (void)alignment;
    if (fake_host.allocations_left == 0) {
        return NULL;
    }
    fake_host.allocations_left -= fake_host.allocations_left > 0;
    fake_host.bytes += (int64_t)bytes;
    return malloc(bytes);
}

static void host_release(void *pointer, size_t bytes)
{
    fake_host.bytes -= (int64_t)bytes;
    free(pointer);
}

static const tch_backend_host host = {sizeof host, record, host_allocate, host_release, NULL};
const tch_backend_host *tchi_cuda_host = &host;

void tchi_cuda_staging_destroy(tchi_cuda_staging *staging)
{
    (void)staging;
}

void fake_host_expect(const char *wanted)
{
    CHECK(strstr(fake_host.message, wanted) != NULL, "expected \"%s\" in: %s", wanted, fake_host.message);
}
