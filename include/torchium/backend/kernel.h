/* Operations table, chapter 7: custom kernels. A backend without it does not support them.
 *
 * An image is a compiled kernel in the backend's format, which the library caches on disk; a cached image may be
 * damaged. Each entry has one caller, in src/kernel. */
#ifndef TORCHIUM_BACKEND_KERNEL_H
#define TORCHIUM_BACKEND_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/kernel.h>
#include <torchium/status.h>

/* A source to compile, validated: the name consists of identifiers, ::, <>, commas and numbers; options are among those
 * that torchium/kernel.h lists. */
typedef struct tch_kernel_text {
    const char *source;
    const char *file; /* for messages */
    const char *name;
    int32_t option_count;
    const char *const *options;
    int32_t include_count;
    const char *const *includes;
} tch_kernel_text;

/* A compiled kernel, in memory of host->allocate. */
typedef struct tch_kernel_image {
    void *data;
    size_t bytes;
} tch_kernel_image;

/* One launch; `arguments` point to values of the parameters' sizes. */
typedef struct tch_kernel_run {
    int64_t grid[3], block[3];
    int64_t shared_bytes;
    const void *const *arguments;
} tch_kernel_run;

/* Everything about compiler and device that an image depends on, as one line for the cache's key; if empty, nothing is
 * cached. Also called for cached kernels, so it should not start the compiler. UNAVAILABLE, with what to install,
 * without a compiler. */
typedef tch_status tch_kernel_compiler_op(void *state, char *text, size_t size);
/* Compiles; INVALID_ARGUMENT if the compiler fails. `log` receives its output, truncated and NUL-terminated. */
typedef tch_status tch_kernel_build_op(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log,
                                       size_t log_size);
/* Loads an image and fills `info` and up to `room` parameters. TCH_ERR_IO, without side effects, for a damaged
 * image. */
typedef tch_status tch_kernel_load_op(void *state, const tch_kernel_image *image, void **kernel, tch_kernel_info *info,
                                      int32_t room, tch_kernel_parameter *parameters);
typedef void tch_kernel_unload_op(void *state, void *kernel);
/* Queues the kernel on the state's stream. */
typedef tch_status tch_kernel_launch_op(void *state, void *kernel, const tch_kernel_run *run);

typedef struct tch_kernel_ops {
    /* REQUIRED */
    tch_kernel_compiler_op *compiler;
    tch_kernel_build_op *build;
    tch_kernel_load_op *load;
    tch_kernel_unload_op *unload;
    tch_kernel_launch_op *launch;
} tch_kernel_ops;

#endif
