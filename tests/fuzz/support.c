/* Linked to every target, with libFuzzer and with driver.c. */
#define _GNU_SOURCE
#include "fuzz.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

__attribute__((weak)) void fuzz_repair(uint8_t *bytes, size_t count)
{
}

void fuzz_repair_safetensors(uint8_t *bytes, size_t count, size_t data_bytes)
{
    if (count < 8 + data_bytes) {
        return;
    }
    uint64_t length = count - 8 - data_bytes;
    for (int i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(length >> (8 * i));
    }
}

tch_context *fuzz_context(void)
{
    static tch_context *context;
    if (context == NULL) {
        REQUIRE(tch_context_create("cpu", &context) == TCH_OK);
    }
    return context;
}

/* --- files ------------------------------------------------------------------------------------------------------- */

static void overwrite(int file, const uint8_t *bytes, size_t count)
{
    REQUIRE(ftruncate(file, (off_t)count) == 0);
    REQUIRE(count == 0 || pwrite(file, bytes, count, 0) == (ssize_t)count);
}

const char *fuzz_file(int which, const uint8_t *bytes, size_t count)
{
    static int files[2] = {-1, -1};
    static char paths[2][32];
    if (files[which] < 0) {
        files[which] = memfd_create("input", MFD_CLOEXEC);
        REQUIRE(files[which] >= 0);
        snprintf(paths[which], sizeof paths[which], "/proc/self/fd/%d", files[which]);
    }
    overwrite(files[which], bytes, count);
    return paths[which];
}

char *fuzz_text(const uint8_t *bytes, size_t count)
{
    char *text = malloc(count + 1);
    REQUIRE(text != NULL);
    memcpy(text, bytes, count);
    text[count] = '\0';
    return text;
}

/* --- a folder ---------------------------------------------------------------------------------------------------- */

static char folder[64];

void fuzz_empty_folder(void)
{
    DIR *entries = opendir(folder);
    for (const struct dirent *e = entries == NULL ? NULL : readdir(entries); e != NULL; e = readdir(entries)) {
        if (unlinkat(dirfd(entries), e->d_name, 0) != 0) {
            (void)unlinkat(dirfd(entries), e->d_name, AT_REMOVEDIR);
        }
    }
    if (entries != NULL) {
        closedir(entries);
    }
}

static void remove_folder(void)
{
    fuzz_empty_folder();
    (void)rmdir(folder);
}

const char *fuzz_folder(void)
{
    if (folder[0] == '\0') {
        const char *parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        snprintf(folder, sizeof folder, "%s/torchium-fuzz-XXXXXX", parent);
        REQUIRE(mkdtemp(folder) != NULL);
        atexit(remove_folder);
    }
    return folder;
}

void fuzz_write(const char *name, int *descriptor, const uint8_t *bytes, size_t count)
{
    if (*descriptor < 0) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/%s", fuzz_folder(), name);
        *descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        REQUIRE(*descriptor >= 0);
    }
    overwrite(*descriptor, bytes, count);
}

/* --- libFuzzer --------------------------------------------------------------------------------------------------- */

#ifdef FUZZ_WITH_LIBFUZZER
size_t LLVMFuzzerMutate(uint8_t *bytes, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t size, size_t room, unsigned seed)
{
    size = LLVMFuzzerMutate(bytes, size, room);
    if (seed % 4 != 0) {
        fuzz_repair(bytes, size);
    }
    return size;
}
#endif
