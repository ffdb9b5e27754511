/* A fake compiler over the CPU backend: its image is the source's text, and it records its input. Tests what the
 * library does around a compiler. For INTERNAL tests. */
#ifndef TORCHIUM_TESTS_FAKE_COMPILER_H
#define TORCHIUM_TESTS_FAKE_COMPILER_H

#include <torchium/backend.h>

#define FAKE_SOURCE "__global__ void f() {}\n"
#define FAKE_VALUES 64
#define FAKE_VALUE_SIZE 64

typedef struct fake_compiler {
    /* set by tests */
    char line[64];      /* of kernel_compiler; empty: none available */
    size_t image_bytes; /* minimum size of an image */
    int32_t parameter_count;
    tch_kernel_parameter parameters[FAKE_VALUES];
    int32_t max_threads;
    int refuses_load; /* images count as damaged */

    /* recorded */
    int builds, loads, unloads, launches;
    char asked[8192]; /* file, name, options and includes of the latest build, one per line */
    tch_kernel_run run;
    unsigned char values[FAKE_VALUES][FAKE_VALUE_SIZE];
} fake_compiler;

extern fake_compiler fake;

/* A CPU context with this compiler; *state of a cmocka fixture. The cache is a fresh folder, "cache", in the test's
 * folder. */
int fake_compiler_open(void **state);
int fake_compiler_close(void **state);

#define WITH_COMPILER(test) TEST_WITH(test, fake_compiler_open, fake_compiler_close)

/* The same with the compiler of the device under test. */
int real_compiler_open(void **state);
#define WITH_REAL_COMPILER(test) TEST_WITH(test, real_compiler_open, fake_compiler_close)

tch_kernel_parameter fake_number(tch_parameter_class what, int32_t size);
tch_kernel_parameter fake_pointer(tch_parameter_class pointee, int32_t size);

/* A config with this source and the kernel "f". */
tch_kernel_config fake_config(const char *source);

/* A kernel of this name in FAKE_SOURCE. */
tch_kernel *fake_kernel(tch_context *context, const char *name);

/* Compiles, destroys, and checks that the info and the compiler agree on a cache hit (0) or a compilation (1). */
int fake_compile(tch_context *context, tch_kernel_config *config);
int fake_compile_text(tch_context *context, const char *source);

/* The cache folder, and the name of its entry, or NULL unless there is exactly one. */
const char *fake_cache(void);
const char *fake_cache_entry(void);
/* The number of its files with this suffix; -1 if it does not exist. */
int fake_cache_count(const char *suffix);

/* Removes a folder and everything in it. */
void fake_remove_tree(const char *path);

#endif
