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
 * On a GPU the source goes to NVRTC, NVIDIA's compiler as a library, which makes machine code for that very GPU; no
 * nvcc is needed. On the CPU it goes to the system's C++ compiler, behind a prelude that supplies what CUDA does:
 * blocks are divided among threads, the threads of a block take turns, and __shared__, __syncthreads() and the shuffles
 * of a warp work. What was compiled is kept on disk, see tch_kernel_cache_folder.
 *
 * Sources are C++17 without the standard library. Both devices have cuda_fp16.h's __half, cuda_bf16.h's __nv_bfloat16,
 * the fixed-width integers, CUDA's mathematical functions, atomics, warp votes and shuffles, and __CUDA_ARCH__, which
 * is 0 on the CPU. What the CPU cannot do (inline PTX, cooperative groups, textures, dynamic parallelism, tensor cores)
 * is refused by the compiler, with the line.
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
    const char *source; /* the text, or NULL: then `path` is read */
    const char *path;   /* of a .cu file; with a source, only its name in messages */
    const char *name;   /* of the __global__ function: "halve", "space::halve", or of a template "scale<float, 4>" */
    int32_t option_count;
    /* -DNAME, -DNAME=VALUE, -UNAME, -IFOLDER, -std=c++14/17/20, --use_fast_math, -O0 to -O3; others are refused by
     * name, so that one list serves both compilers. */
    const char *const *options;
    int32_t include_count;
    const char *const *includes; /* folders in which #include "..." is looked for, after that of a file that is read */
    int32_t use_cache;           /* 1: look on disk first, and keep what was compiled */
    char *log;                   /* what the compiler said, warnings too; NULL, or log_size bytes */
    size_t log_size;
} tch_kernel_config;
#define TCH_KERNEL_CONFIG_INIT                                                                                         \
    {                                                                                                                  \
        sizeof(tch_kernel_config), NULL, NULL, NULL, 0, NULL, 0, NULL, 1, NULL, 0                                      \
    }

TCH_BEGIN_DECLS

/* TCH_ERR_INVALID_ARGUMENT with the compiler's words, at the user's own lines, where the source does not compile or has
 * no such kernel; TCH_ERR_UNAVAILABLE, with what to install, where there is no compiler. */
TCH_API tch_status tch_kernel_compile(tch_context *context, const tch_kernel_config *config, tch_kernel **kernel);

/* Waits for the device. NULL is allowed. */
TCH_API void tch_kernel_destroy(tch_kernel *kernel);

TCH_END_DECLS

/* === Launching ==================================================================================================== */

typedef enum tch_argument_kind {
    TCH_ARGUMENT_KIND_TENSOR = 0, /* a pointer to its first element; on the kernel's device */
    TCH_ARGUMENT_KIND_INT = 1,    /* for any integer parameter that holds the number, and bool */
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
    int64_t grid[3];      /* blocks; 0 in one of them launches nothing */
    int64_t block[3];     /* threads of a block, at most 1024 in all, and at least 1 each */
    int64_t shared_bytes; /* dynamic shared memory */
} tch_kernel_shape;
#define TCH_KERNEL_SHAPE_INIT(blocks, threads)                                                                         \
    {                                                                                                                  \
        sizeof(tch_kernel_shape), {(blocks), 1, 1}, {(threads), 1, 1}, 0                                               \
    }

/* What a parameter of a kernel is, as the compiler knows it. */
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
    int32_t is_const;            /* a pointer to what is only read */
    int32_t is_brain;            /* __nv_bfloat16, or a pointer to it */
} tch_kernel_parameter;

typedef struct tch_kernel_info {
    size_t struct_size;
    int32_t parameters;
    int32_t registers;         /* of a thread; 0 on the CPU */
    int64_t shared_bytes;      /* static shared memory of a block */
    int64_t local_bytes;       /* of a thread: what did not fit into registers */
    int32_t max_threads;       /* of a block, for this kernel */
    int32_t suggested_threads; /* of a block, for the most threads under way at once */
    int32_t suggested_blocks;  /* the fewest that fill the device with them */
    int32_t from_cache;        /* it was not compiled this time */
} tch_kernel_info;
#define TCH_KERNEL_INFO_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_kernel_info), 0, 0, 0, 0, 0, 0, 0, 0                                                                \
    }

TCH_BEGIN_DECLS

/* Arguments are compared with the kernel's parameters before anything happens: their number, a tensor for every pointer
 * and only there, of elements as wide as what it points to and of their kind (float32 for float, int32 for int and
 * unsigned, any for void and for structs, which are often several elements at once), numbers that fit: a finite one
 * does not become infinite. A tensor may have any strides: the kernel gets the address of its first element. A shape is
 * held to CUDA's limits on the CPU too: grids of 2^31 - 1 by 65535 by 65535 blocks, blocks of 1024 by 1024 by 64
 * threads. */
TCH_API tch_status tch_kernel_launch(tch_kernel *kernel, const tch_kernel_shape *shape, int32_t count,
                                     const tch_kernel_argument *arguments);

TCH_API tch_status tch_kernel_get_info(const tch_kernel *kernel, tch_kernel_info *info);
TCH_API tch_status tch_kernel_get_parameter(const tch_kernel *kernel, int32_t index, tch_kernel_parameter *parameter);
TCH_API const char *tch_kernel_name(const tch_kernel *kernel);

/* === The cache ==================================================================================================== */

/* $TORCHIUM_CACHE, or torchium/kernels in $XDG_CACHE_HOME, or in ~/.cache: a folder that is made for its owner alone,
 * and not used where it is another's or others may write to it. An entry's name is a hash of the source, the options,
 * the architecture and the compiler. A source that includes files is compiled each time, as docs/kernels.md says. The
 * text is good until the thread's next such call. NULL, with a message, where there is no folder that can be used: then
 * everything is compiled anew. */
TCH_API const char *tch_kernel_cache_folder(void);

/* Entries that were used longest ago are removed until the rest fits; 256 MiB unless said otherwise here or, in MiB, by
 * $TORCHIUM_CACHE_SIZE. 0 removes everything and keeps nothing. */
TCH_API tch_status tch_kernel_cache_limit(int64_t bytes);

TCH_END_DECLS

#endif
