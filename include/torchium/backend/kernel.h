/* Operations table, chapter 7: custom kernels. A backend without it compiles none.
 *
 * An image is what a compiler made, in the backend's own form. It can be kept on disk and loaded later, when it may be
 * damaged. src/kernel has the one caller of each entry: compilers, loaders and launches have nothing in common between
 * backends. */
#ifndef TORCHIUM_BACKEND_KERNEL_H
#define TORCHIUM_BACKEND_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/kernel.h>
#include <torchium/status.h>

/* What is compiled. All of it has been checked: the name is an expression of identifiers, ::, <>, commas and numbers,
 * options are of those that kernel.h lists. */
typedef struct tch_kernel_text {
    const char *source;
    const char *file; /* for messages */
    const char *name;
    int32_t option_count;
    const char *const *options;
    int32_t include_count;
    const char *const *includes;
} tch_kernel_text;

/* Memory of host->allocate: what a compiler made, in the backend's own form, which can be kept on disk and loaded
 * later. */
typedef struct tch_kernel_image {
    void *data;
    size_t bytes;
} tch_kernel_image;

/* One launch: arguments are pointers to values of the parameters' sizes. */
typedef struct tch_kernel_run {
    int64_t grid[3], block[3];
    int64_t shared_bytes;
    const void *const *arguments;
} tch_kernel_run;

/* Everything about compiler and device that an image depends on, as one line for the cache's key; empty where a line
 * cannot say it, and then nothing is cached. Asked for every kernel, those in the cache too: no compiler should be
 * opened for it. UNAVAILABLE, with what to install, where there is none. */
typedef tch_status tch_kernel_compiler_op(void *state, char *text, size_t size);
/* Compiles. What the compiler says goes to `log`, cut off at its end with a NUL; where it fails, INVALID_ARGUMENT. */
typedef tch_status tch_kernel_build_op(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log,
                                       size_t log_size);
/* Loads an image and fills info, and parameters up to `room` of them. A damaged image is TCH_ERR_IO, and nothing else
 * has happened. */
typedef tch_status tch_kernel_load_op(void *state, const tch_kernel_image *image, void **kernel, tch_kernel_info *info,
                                      int32_t room, tch_kernel_parameter *parameters);
typedef void tch_kernel_unload_op(void *state, void *kernel);
/* Queued as everything is. */
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
