/* Which C++ compiler, and the line that names it and the processor in the cache's keys. The compiler
 * is not started for that line: its file's size and time change with its version, and are known in microseconds. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#else
#include <sys/auxv.h>
#endif

#include "core/sha256.h"
#include "kernel.h"

static int is_program(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0 && S_ISREG(about.st_mode) && access(path, X_OK) == 0;
}

/* A name with a slash is a path, any other is looked for in $PATH; its empty entries, which mean the current folder,
 * are passed over. A program that has more rights than its caller sees no $PATH, and so has no compiler. */
static int find_program(const char *name, char path[TCHI_PATH_SIZE])
{
    if (strchr(name, '/') != NULL) {
        return snprintf(path, TCHI_PATH_SIZE, "%s", name) < TCHI_PATH_SIZE && is_program(path);
    }
    const char *folder = secure_getenv("PATH");
    while (folder != NULL && *folder != '\0') {
        size_t length = strcspn(folder, ":");
        if (length > 0 && snprintf(path, TCHI_PATH_SIZE, "%.*s/%s", (int)length, folder, name) < TCHI_PATH_SIZE &&
            is_program(path)) {
            return 1;
        }
        folder += length + (folder[length] == ':');
    }
    return 0;
}

tch_status tchi_cpu_find_compiler(char path[TCHI_PATH_SIZE])
{
    const char *wanted = secure_getenv("TORCHIUM_CXX");
    if (wanted != NULL && *wanted != '\0') {
        if (find_program(wanted, path)) {
            return TCH_OK;
        }
        return tchi_cpu_host()->fail(TCH_ERR_UNAVAILABLE,
                                     "TORCHIUM_CXX is \"%.200s\", which is not a program: it must be the name or the "
                                     "path of a C++ compiler, without options",
                                     wanted);
    }
    const char *const names[] = {secure_getenv("CXX"), "c++", "g++", "clang++"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i] != NULL && *names[i] != '\0' && find_program(names[i], path)) {
            return TCH_OK;
        }
    }
    return tchi_cpu_host()->fail(TCH_ERR_UNAVAILABLE,
                                 "no C++ compiler was found (looked for $TORCHIUM_CXX, $CXX, c++, g++ and clang++ in "
                                 "PATH): install g++ (Debian: apt-get install g++) or set TORCHIUM_CXX");
}

/* All that -march=native looks at. */
static void describe_processor(char *text, size_t size)
{
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0, model = 0, basic[2] = {0, 0}, more[3] = {0, 0, 0}, newest = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        model = a, basic[0] = c, basic[1] = d;
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        more[0] = b, more[1] = c, more[2] = d;
    }
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
        newest = a;
    }
    snprintf(text, size, "x86-64 %x.%x.%x.%x.%x.%x.%x", model, basic[0], basic[1], more[0], more[1], more[2], newest);
#else
    snprintf(text, size, "cpu %lx.%lx", getauxval(AT_HWCAP), getauxval(AT_HWCAP2));
#endif
}

static unsigned long hash_text(unsigned long hash, const char *text)
{
    uint8_t digest[TCHI_SHA256_BYTES];
    tchi_sha256(text, strlen(text), digest);
    for (int byte = 0; byte < 8; byte++) {
        hash = hash * 31 + digest[byte];
    }
    return hash;
}

/* An image also depends on the texts around a source and on where the linker looks for libraries, which NVIDIA's
 * container images set. */
static unsigned long hash_surroundings(void)
{
    const char *libraries = getenv("LIBRARY_PATH");
    unsigned long hash = hash_text(0, libraries != NULL ? libraries : "");
    for (int i = 0; i < TCHI_CPU_PARTS; i++) {
        hash = hash_text(hash, tchi_cpu_parts[i].text);
    }
    return hash;
}

/* Variables with which a compiler reads other headers, parts of itself or options. */
static int environment_counts(void)
{
    static const char *const names[] = {"CPATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX",
                                        "CCC_OVERRIDE_OPTIONS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value != NULL && value[0] != '\0') {
            return 1;
        }
    }
    return 0;
}

tch_status tchi_cpu_kernel_compiler(void *state, char *text, size_t size)
{
    char path[TCHI_PATH_SIZE], real[TCHI_PATH_SIZE * 4], processor[128];
    struct stat about;
    tch_status status = tchi_cpu_find_compiler(path);
    if (status != TCH_OK) {
        return status;
    }
    if (realpath(path, real) == NULL || stat(real, &about) != 0) {
        return tchi_cpu_host()->fail(TCH_ERR_UNAVAILABLE, "the C++ compiler %.200s cannot be read", path);
    }
    describe_processor(processor, sizeof processor);
    snprintf(text, size, "%s %.300s %lld %lld.%09ld around %lx", processor, real, (long long)about.st_size,
             (long long)about.st_mtim.tv_sec, about.st_mtim.tv_nsec, hash_surroundings());
    if (environment_counts()) {
        text[0] = '\0';
    }
    return TCH_OK;
}
