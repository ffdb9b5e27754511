/* Custom kernels: one CUDA C source, run on the GPU or on the CPU.
 *
 *     static const char source[] = "__global__ void halve(float *x, int n)\n"
 *                                  "{\n"
 *                                  "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
 *                                  "    if (i < n) x[i] *= 0.5f;\n"
 *                                  "}\n";
 *     tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
 *     config.source = source, config.name = "halve";
 *     tch_kernel *kernel;
 *     tch_kernel_compile(ctx, &config, &kernel);
 *     tch_kernel_argument arguments[] = {TCH_ARGUMENT_TENSOR(&x), TCH_ARGUMENT_INT(n)};
 *     tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT((n + 255) / 256, 256);
 *     tch_kernel_launch(kernel, &shape, 2, arguments);
 *     tch_kernel_destroy(kernel);
 *
 * For a GPU, NVRTC, NVIDIA's compiler library, compiles the source to machine code for that GPU; nvcc is not needed.
 * For the CPU the system's C++ compiler compiles it after a prelude that implements CUDA: blocks run in parallel, the
 * threads of a block in turn, and __shared__, __syncthreads() and warp shuffles work. Compiled kernels are cached on
 * disk, see tch_kernel_cache_folder.
 *
 * Sources are C++17 without the standard library. Both devices have cuda_fp16.h's __half, cuda_bf16.h's __nv_bfloat16,
 * the fixed-width integers, CUDA's mathematical functions, atomics, warp votes and shuffles, and __CUDA_ARCH__, which
 * is 0 on the CPU. For features without a CPU implementation (inline PTX, cooperative groups, textures, dynamic
 * parallelism, tensor cores) the compiler reports an error with the line.
 *
 * A kernel belongs to its context. A launch never synchronizes on a GPU and can be captured in a CUDA graph. */
#ifndef TORCHIUM_KERNEL_H
#define TORCHIUM_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/status.h>
#include <torchium/tensor.h>

typedef struct tch_kernel tch_kernel;

/* === Compiling ==================================================================================================== */

typedef struct tch_kernel_config {
    size_t struct_size;
    const char *source; /* the text; NULL: read from `path` */
    const char *path;   /* of a .cu file; with a source, only for messages */
    const char *name;   /* of the __global__ function: "halve", "space::halve", or of a template "scale<float, 4>" */
    int32_t option_count;
    /* -DNAME, -DNAME=VALUE, -UNAME, -IFOLDER, -std=c++14/17/20, --use_fast_math, -O0 to -O3. Any other is an error that
     * names it, so that one list serves both compilers. */
    const char *const *options;
    int32_t include_count;
    const char *const *includes; /* folders to search for #include "...", after the folder of `path` */
    int32_t use_cache;           /* 1: use the cache on disk */
    char *log;                   /* receives the compiler's output with warnings; NULL, or log_size bytes */
    size_t log_size;
} tch_kernel_config;
#define TCH_KERNEL_CONFIG_INIT                                                                                         \
    {                                                                                                                  \
        sizeof(tch_kernel_config), NULL, NULL, NULL, 0, NULL, 0, NULL, 1, NULL, 0                                      \
    }

TCH_BEGIN_DECLS

/* TCH_ERR_INVALID_ARGUMENT with the compiler's messages, in lines of `source`, if it does not compile or has no such
 * kernel; TCH_ERR_UNAVAILABLE, with what to install, without a compiler. */
TCH_API tch_status tch_kernel_compile(tch_context *context, const tch_kernel_config *config, tch_kernel **kernel);

/* Waits for the device. NULL is allowed. */
TCH_API void tch_kernel_destroy(tch_kernel *kernel);

TCH_END_DECLS

/* === Launching ==================================================================================================== */

typedef enum tch_argument_kind {
    TCH_ARGUMENT_KIND_TENSOR = 0, /* a pointer to its first element; on the kernel's device */
    TCH_ARGUMENT_KIND_INT = 1,    /* for bool and any integer parameter whose range contains it */
    TCH_ARGUMENT_KIND_REAL = 2,   /* for double, float, __half and __nv_bfloat16 parameters */
    TCH_ARGUMENT_KIND_BYTES = 3   /* a struct by value, of the parameter's size */
} tch_argument_kind;

typedef struct tch_kernel_argument {
    tch_argument_kind kind;
    const tch_tensor *tensor; /* NULL gives the kernel a NULL pointer */
    int64_t integer;
    double real;
    const void *bytes;
    size_t size;
} tch_kernel_argument;
#define TCH_ARGUMENT_TENSOR(t)                                                                                         \
    {                                                                                                                  \
        TCH_ARGUMENT_KIND_TENSOR, (t), 0, 0.0, NULL, 0                                                                 \
    }
#define TCH_ARGUMENT_INT(i)                                                                                            \
    {                                                                                                                  \
        TCH_ARGUMENT_KIND_INT, NULL, (i), 0.0, NULL, 0                                                                 \
    }
#define TCH_ARGUMENT_REAL(r)                                                                                           \
    {                                                                                                                  \
        TCH_ARGUMENT_KIND_REAL, NULL, 0, (r), NULL, 0                                                                  \
    }
#define TCH_ARGUMENT_BYTES(p, n)                                                                                       \
    {                                                                                                                  \
        TCH_ARGUMENT_KIND_BYTES, NULL, 0, 0.0, (p), (n)                                                                \
    }

typedef struct tch_kernel_shape {
    size_t struct_size;
    int64_t grid[3];      /* blocks; with a 0 nothing is launched */
    int64_t block[3];     /* threads of a block, each at least 1, their product at most 1024 */
    int64_t shared_bytes; /* dynamic shared memory */
} tch_kernel_shape;
#define TCH_KERNEL_SHAPE_INIT(blocks, threads)                                                                         \
    {                                                                                                                  \
        sizeof(tch_kernel_shape), {(blocks), 1, 1}, {(threads), 1, 1}, 0                                               \
    }

/* The type of a kernel's parameter, from the compiler. */
typedef enum tch_parameter_class {
    TCH_PARAMETER_POINTER = 0,
    TCH_PARAMETER_INT = 1,
    TCH_PARAMETER_UINT = 2, /* bool too */
    TCH_PARAMETER_REAL = 3, /* double, float, __half, __nv_bfloat16 */
    TCH_PARAMETER_OTHER = 4
} tch_parameter_class;

typedef struct tch_kernel_parameter {
    tch_parameter_class what;
    int32_t size;                /* in bytes */
    tch_parameter_class pointee; /* of a pointer; OTHER for void and structs */
    int32_t pointee_size;        /* 0 for void */
    int32_t is_const;            /* a pointer to const */
    int32_t is_brain;            /* __nv_bfloat16, or a pointer to it */
} tch_kernel_parameter;

typedef struct tch_kernel_info {
    size_t struct_size;
    int32_t parameters;
    int32_t registers;         /* per thread; 0 on the CPU */
    int64_t shared_bytes;      /* static shared memory per block */
    int64_t local_bytes;       /* local memory per thread: register spills and arrays */
    int32_t max_threads;       /* per block, for this kernel */
    int32_t suggested_threads; /* per block, for the highest occupancy */
    int32_t suggested_blocks;  /* of that size, the fewest that fill the device */
    int32_t from_cache;        /* 1: loaded from the cache, not compiled */
} tch_kernel_info;
#define TCH_KERNEL_INFO_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_kernel_info), 0, 0, 0, 0, 0, 0, 0, 0                                                                \
    }

TCH_BEGIN_DECLS

/* Arguments are checked against the kernel's parameters before the launch: their number; a tensor for each pointer and
 * for nothing else, whose dtype matches the pointee (float32 for float, int32 for int and unsigned, any for void and
 * structs); numbers in the range of the parameter's type, so that a finite one does not become infinite. A tensor may
 * have any strides: the kernel gets the address of its first element. CUDA's limits on the shape hold on the CPU too:
 * grids of 2^31 - 1 by 65535 by 65535 blocks, blocks of 1024 by 1024 by 64 threads. */
TCH_API tch_status tch_kernel_launch(tch_kernel *kernel, const tch_kernel_shape *shape, int32_t count,
                                     const tch_kernel_argument *arguments);

TCH_API tch_status tch_kernel_get_info(const tch_kernel *kernel, tch_kernel_info *info);
TCH_API tch_status tch_kernel_get_parameter(const tch_kernel *kernel, int32_t index, tch_kernel_parameter *parameter);
TCH_API const char *tch_kernel_name(const tch_kernel *kernel);

/* === The cache ==================================================================================================== */

/* $TORCHIUM_CACHE, or torchium/kernels in $XDG_CACHE_HOME or ~/.cache: a folder with access for its owner only, which
 * is not used if another user owns it or can write to it. An entry's name is a hash of the source, the options, the
 * architecture and the compiler. Sources that include files are not cached, see docs/kernels.md. The string is valid
 * until the thread's next such call. Without a usable folder: NULL, with a message, and nothing is cached. */
TCH_API const char *tch_kernel_cache_folder(void);

/* Limits the cache's size, removing the least recently used entries. The default is $TORCHIUM_CACHE_SIZE in MiB, or 256
 * MiB. 0 empties and disables the cache. */
TCH_API tch_status tch_kernel_cache_limit(int64_t bytes);

TCH_END_DECLS

#endif
