/* Tensors: descriptors of memory that the caller owns.
 *
 * A tch_tensor has exactly the layout of DLPack's DLTensor, so a pointer to one can be used as the other. Describe
 * your own memory by filling in the fields (tch_tensor_view helps), or allocate from a context's pool with
 * tch_tensor_create. Sizes are int64_t; strides count elements, and NULL strides mean row-major without gaps. */
#ifndef TORCHIUM_TENSOR_H
#define TORCHIUM_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <torchium/context.h>
#include <torchium/device.h>
#include <torchium/export.h>
#include <torchium/status.h>

#define TCH_MAX_RANK 8

/* DLPack's type codes. */
typedef enum tch_dtype_code { TCH_INT = 0, TCH_UINT = 1, TCH_FLOAT = 2, TCH_BFLOAT = 4 } tch_dtype_code;

/* An element type: laid out as DLPack's DLDataType. */
typedef struct tch_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} tch_dtype;

static const tch_dtype TCH_FLOAT64 = {TCH_FLOAT, 64, 1};
static const tch_dtype TCH_FLOAT32 = {TCH_FLOAT, 32, 1};
static const tch_dtype TCH_FLOAT16 = {TCH_FLOAT, 16, 1};
static const tch_dtype TCH_BFLOAT16 = {TCH_BFLOAT, 16, 1};
static const tch_dtype TCH_INT32 = {TCH_INT, 32, 1};
static const tch_dtype TCH_INT64 = {TCH_INT, 64, 1};

typedef struct tch_tensor {
    void *data;           /* start of the allocation */
    tch_device device;    /* of the memory */
    int32_t ndim;         /* 0 is a scalar */
    tch_dtype dtype;      /* element type */
    int64_t *shape;       /* ndim sizes */
    int64_t *strides;     /* ndim strides in elements, or NULL */
    uint64_t byte_offset; /* from data to the first element */
} tch_tensor;

typedef enum tch_memory_format {
    TCH_CONTIGUOUS = 0,   /* row-major without gaps */
    TCH_CHANNELS_LAST = 1 /* rank 4 or 5 [N, C, ...] stored as [N, ..., C] */
} tch_memory_format;

TCH_BEGIN_DECLS

/* --- operations ------------------------------------------------------------------------------------------------- */

/* A zero-filled tensor with memory of the context's pool, aligned to at least 64 bytes. Destroy it when done. */
TCH_API tch_status tch_tensor_create(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                                     tch_memory_format format, tch_tensor **tensor);

/* The same, uninitialized. */
TCH_API tch_status tch_tensor_create_uninitialized(tch_context *context, tch_dtype dtype, int32_t ndim,
                                                   const int64_t *shape, tch_memory_format format, tch_tensor **tensor);

/* Frees a tensor made by tch_tensor_create, before or after its context. NULL is allowed. Only for these
 * tensors. */
TCH_API void tch_tensor_destroy(tch_tensor *tensor);

/* A contiguous tensor over the caller's memory on the CPU. `shape` is kept by reference: it must outlive the view. For
 * memory of a GPU set `device` of the result to {TCH_DEVICE_CUDA, N}. */
TCH_API tch_tensor tch_tensor_view(void *data, tch_dtype dtype, int32_t ndim, int64_t *shape);

/* dst = src, element by element; any strides. Float types convert into each other, rounding to nearest even; integers
 * are copied to their own type only. The tensors must not overlap.
 *
 * With a context on a GPU one side may be in host memory and must then be contiguous; a strided or converting copy goes
 * through at most 64 MiB of the context's workspace. A copy to the host synchronizes. A copy from pageable memory
 * returns when `src` may be modified again; one from page-locked memory (TCH_DEVICE_CUDA_HOST, or registered with CUDA)
 * is queued, and `src` must not change until it has run. For two tensors in host memory use a CPU context. */
TCH_API tch_status tch_tensor_copy(tch_context *context, tch_tensor *dst, const tch_tensor *src);

/* Sets every element, rounding `value` to the tensor's type. */
TCH_API tch_status tch_tensor_fill(tch_context *context, tch_tensor *tensor, double value);

/* --- queries ---------------------------------------------------------------------------------------------------- */

/* Bytes of one element, or 0 for a type the library does not know. */
TCH_API size_t tch_dtype_size(tch_dtype dtype);

/* "float32" and so on, or "unknown". */
TCH_API const char *tch_dtype_name(tch_dtype dtype);

TCH_API bool tch_dtype_equal(tch_dtype a, tch_dtype b);

/* Number of elements; -1 if the shape is invalid or the number does not fit in 63 bits. */
TCH_API int64_t tch_tensor_numel(const tch_tensor *tensor);

/* True when the elements lie in row-major order without gaps. */
TCH_API bool tch_tensor_is_contiguous(const tch_tensor *tensor);

/* Checks the description itself: rank, sizes, type, pointer, alignment of the first element. `name` goes into the
 * message. Every function of the library does this to each tensor it is given. */
TCH_API tch_status tch_tensor_check(const tch_tensor *tensor, const char *name);

TCH_END_DECLS

#endif
