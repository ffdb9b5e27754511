/* Injected out-of-memory and read errors (fuzz.h). The linker substitutes these functions for the C library's (--wrap)
 * in everything linked into the target, but not inside shared libraries. */
#define _GNU_SOURCE
#include "fuzz.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>

/* Calls until one fails; negative: none. Of the thread that armed it. */
static _Thread_local int left = -1;
static _Thread_local bool happened;
static _Thread_local int reading_error = EIO; /* or EINTR, after which reading continues */

static bool fails(int error)
{
    if (left < 0 || left-- > 0) {
        return false;
    }
    happened = true;
    errno = error;
    return true;
}

uint64_t fuzz_hash(const uint8_t *bytes, size_t count)
{
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3;
    }
    return hash ^ hash >> 32;
}

void fuzz_faults_begin(uint64_t hash)
{
    happened = false;
    reading_error = hash / 512 % 2 == 0 ? EIO : EINTR;
    left = hash % 16 == 0 ? (int)(hash / 16 % 32) : -1;
}

bool fuzz_faults_end(void)
{
    left = -1;
    return happened;
}

/* --- wrapped functions ------------------------------------------------------------------------------------------- */

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes)
{
    return fails(ENOMEM) ? NULL : __real_malloc(bytes);
}

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails(ENOMEM) ? NULL : __real_calloc(count, bytes);
}

void *__real_realloc(void *block, size_t bytes);
void *__wrap_realloc(void *block, size_t bytes)
{
    return fails(ENOMEM) ? NULL : __real_realloc(block, bytes);
}

int __real_posix_memalign(void **block, size_t alignment, size_t bytes);
int __wrap_posix_memalign(void **block, size_t alignment, size_t bytes)
{
    return fails(ENOMEM) ? ENOMEM : __real_posix_memalign(block, alignment, bytes);
}

size_t __real_fread(void *to, size_t size, size_t count, FILE *file);
size_t __wrap_fread(void *to, size_t size, size_t count, FILE *file)
{
    return fails(EIO) ? 0 : __real_fread(to, size, count, file);
}

int __real_fstat(int file, struct stat *facts);
int __wrap_fstat(int file, struct stat *facts)
{
    return fails(EIO) ? -1 : __real_fstat(file, facts);
}

ssize_t __real_pread(int file, void *to, size_t bytes, off_t at);
ssize_t __wrap_pread(int file, void *to, size_t bytes, off_t at)
{
    return fails(reading_error) ? -1 : __real_pread(file, to, bytes, at);
}

void *__real_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset)
{
    return fails(ENODEV) ? MAP_FAILED : __real_mmap(at, bytes, protection, flags, file, offset);
}
