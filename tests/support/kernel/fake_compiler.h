/* A compiler that only pretends, in front of the CPU's backend: it makes an image of the source's text at once and
 * writes down what it was asked. With it the tests see what the library does around a compiler. For tests that are
 * INTERNAL. */
#ifndef TORCHIUM_TESTS_FAKE_COMPILER_H
#define TORCHIUM_TESTS_FAKE_COMPILER_H

#include <torchium/backend.h>

#define FAKE_SOURCE "__global__ void f() {}\n"
#define FAKE_VALUES 64
#define FAKE_VALUE_SIZE 64

typedef struct fake_compiler {
    /* what a test sets */
    char line[64];      /* of kernel_compiler; empty: there is none */
    size_t image_bytes; /* of an image: at least this many */
    int32_t parameter_count;
    tch_kernel_parameter parameters[FAKE_VALUES];
    int32_t max_threads;
    int refuses_load; /* images count as damaged */

    /* what it saw */
    int builds, loads, unloads, launches;
    char asked[8192]; /* file, name, options and includes of the latest build, a line each */
    tch_kernel_run run;
    unsigned char values[FAKE_VALUES][FAKE_VALUE_SIZE];
} fake_compiler;

extern fake_compiler fake;

/* A context of the CPU with this compiler; *state of a cmocka fixture. The cache is a fresh folder, "cache" below the
 * test's own. */
int fake_compiler_open(void **state);
int fake_compiler_close(void **state);

#define WITH_COMPILER(test) TEST_WITH(test, fake_compiler_open, fake_compiler_close)

/* The same with the compiler of the device under test. */
int real_compiler_open(void **state);
#define WITH_REAL_COMPILER(test) TEST_WITH(test, real_compiler_open, fake_compiler_close)

/* A parameter, for the list. */
tch_kernel_parameter fake_number(tch_parameter_class what, int32_t size);
tch_kernel_parameter fake_pointer(tch_parameter_class pointee, int32_t size);

/* A config of this source, and the kernel "f". */
tch_kernel_config fake_config(const char *source);

/* A kernel of this name in FAKE_SOURCE. */
tch_kernel *fake_kernel(tch_context *context, const char *name);

/* Compiles, destroys, and checks that the info and the compiler agree on whether it came from the cache: 0 where it
 * did, 1 where it was compiled. */
int fake_compile(tch_context *context, tch_kernel_config *config);
int fake_compile_text(tch_context *context, const char *source);

/* The folder that is the cache, and the name of its only entry in it, or NULL where there is not exactly one. */
const char *fake_cache(void);
const char *fake_cache_entry(void);
/* How many files it has whose names end so; -1 where there is no folder. */
int fake_cache_count(const char *suffix);

/* Removes a folder and everything in it. */
void fake_remove_tree(const char *path);

#endif
