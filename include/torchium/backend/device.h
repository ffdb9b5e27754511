/* Operations table, chapter 1: devices, the state of a context, memory. Every backend has it.
 *
 * A state is a context's stream and library handles. Every operation of all chapters takes it as the first argument.
 * Each public call of the library is enclosed in `begin` and `end`, which may be nested. Work is queued on the state's
 * stream and runs in that order; only `synchronize`, copies to the host and entries that say so wait for the device.
 *
 * Only `allocate` allocates memory. The caller provides scratch of `scratch_bytes`, whose contents are undefined before
 * and after an operation.
 *
 * Most of these entries have one caller: the registry, the pool or the context. */
#ifndef TORCHIUM_BACKEND_DEVICE_H
#define TORCHIUM_BACKEND_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/device.h>
#include <torchium/status.h>

typedef enum tch_copy_kind {
    TCH_COPY_DEVICE = 0,
    TCH_COPY_TO_DEVICE = 1, /* from page-locked memory src may be read later, in stream order */
    TCH_COPY_TO_HOST = 2,   /* synchronizes */
    TCH_COPY_NUMBERS = 3    /* to the device: at most 64 float64, read from the host before the call returns */
} tch_copy_kind;

/* Operations that need scratch, for `scratch_bytes`. */
typedef enum tch_scratch_for {
    TCH_SCRATCH_EIGH = 0,
    TCH_SCRATCH_LARGEST_EIGENVALUE = 1,
    TCH_SCRATCH_SHIFTED_INVERSE = 2, /* `extra` is the number of poles */
    TCH_SCRATCH_ROOT_RESIDUAL = 3,
    TCH_SCRATCH_SPD_SOLVE = 4, /* `cols` is the number of columns of B */
    TCH_SCRATCH_GRAFT = 5,     /* `rows` elements in all, `batch` rectangles */
    TCH_SCRATCH_CHOLESKY_INVERSE = 6,
    TCH_SCRATCH_SAMPLE_NORMS = 7,   /* `rows` positions, `cols` of A, `extra` of G, `batch` samples */
    TCH_SCRATCH_SAMPLE_SQUARES = 8, /* the same */
    TCH_SCRATCH_SAMPLE_SUMS = 9,    /* `rows` positions, `cols` columns, `batch` samples */
    TCH_SCRATCH_TOKENS = 10,     /* of the token_ operations: `rows` samples, `cols` positions of the tokens, `extra` V,
                                `batch` columns d */
    TCH_SCRATCH_NORMALIZED = 11, /* `rows` positions, `cols` features or channels, `batch` samples */
    TCH_SCRATCH_BLOCK_DOTS = 12, /* `rows` and `cols` of X */
    TCH_SCRATCH_PAIR_DOTS = 13   /* `rows`, `cols` and `batch` of X */
} tch_scratch_for;

/* --- devices and state ------------------------------------------------------------------------------------------- */

/* The number of usable devices; if 0, `reason` receives a sentence. `libraries`, if not NULL, receives one line that
 * lists the libraries that the backend uses, with or without a device. */
typedef int32_t tch_device_count_op(char *reason, size_t reason_size, char *libraries, size_t libraries_size);
/* Fills everything but struct_size. */
typedef tch_status tch_device_info_op(int32_t index, tch_device_info *info);
/* The state of one context: a stream, library handles. */
typedef tch_status tch_state_create_op(int32_t index, void **state);
typedef void tch_state_destroy_op(void *state);
/* Called first in every public call on the context: makes the device current and fixes what must not change during the
 * call, such as the CPU's thread count, on which scratch depends. */
typedef tch_status tch_begin_op(void *state);
/* Called last in every public call whose `begin` succeeded; restores the caller's current device. */
typedef void tch_end_op(void *state);
/* If `set` is 1 sets the state's stream to *stream (NULL: the default stream), otherwise *stream to the state's. */
typedef tch_status tch_stream_op(void *state, int32_t set, void **stream);
/* Synchronizes and returns errors since the last synchronization. */
typedef tch_status tch_synchronize_op(void *state);
/* Begins a range on a profiler's timeline; `name` is a literal. NULL ends the innermost one. */
typedef void tch_range_op(void *state, const char *name);

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* Aligned to at least 256 bytes; TCH_ERR_OUT_OF_MEMORY with the sizes in the message. */
typedef tch_status tch_allocate_op(void *state, int64_t bytes, void **pointer);
typedef void tch_release_op(void *state, void *pointer, int64_t bytes);
typedef tch_status tch_memory_info_op(void *state, int64_t *total, int64_t *free);
/* Plain bytes. */
typedef tch_status tch_copy_bytes_op(void *state, void *dst, const void *src, int64_t bytes, tch_copy_kind kind);
typedef tch_status tch_zero_bytes_op(void *state, void *dst, int64_t bytes);
/* An asynchronous copy to the host. `readback_post` queues a copy of `bytes`, the same number each time; *event is NULL
 * at the first call, which creates it. While the stream is captured it does nothing. `readback_wait` waits for the
 * latest copy, not for work queued after it; *data points to the bytes, or is NULL if nothing was posted or the stream
 * is captured. */
typedef tch_status tch_readback_post_op(void *state, void **event, const void *src, int64_t bytes);
typedef tch_status tch_readback_wait_op(void *state, void *event, const void **data);
/* A second stream for concurrent work, owned by the state. `side_begin` returns it, ordered after everything queued on
 * the state's stream so far. `side_mark` records the work queued on it so far in *event, created if NULL; `side_join`
 * makes the state's stream wait for the event, and does nothing if that is NULL. */
typedef tch_status tch_side_begin_op(void *state, void **stream);
typedef tch_status tch_side_mark_op(void *state, void **event);
typedef tch_status tch_side_join_op(void *state, void *event);
/* Destroys an event of a readback or of side_mark. Also called outside `begin` and `end`; NULL is allowed. */
typedef void tch_event_destroy_op(void *state, void *event);
/* Scratch bytes of an operation on matrices of this type and size. */
typedef int64_t tch_scratch_bytes_op(void *state, tch_scratch_for operation, tch_scalar type, int64_t rows,
                                     int64_t cols, int64_t batch, int64_t extra);

typedef struct tch_device_ops {
    /* REQUIRED */
    tch_device_count_op *count;
    tch_device_info_op *info;
    tch_state_create_op *state_create;
    tch_state_destroy_op *state_destroy;
    tch_begin_op *begin;
    tch_stream_op *stream;
    tch_synchronize_op *synchronize;
    tch_allocate_op *allocate;
    tch_release_op *release;
    tch_memory_info_op *memory_info;
    tch_copy_bytes_op *copy_bytes;
    tch_zero_bytes_op *zero_bytes;
    tch_scratch_bytes_op *scratch_bytes;
    /* OPTIONAL: the library works without them, or composes the result. readback_*, side_* and event_destroy all exist
     * or are all NULL */
    tch_end_op *end;
    tch_range_op *range;
    tch_readback_post_op *readback_post;
    tch_readback_wait_op *readback_wait;
    tch_side_begin_op *side_begin;
    tch_side_mark_op *side_mark;
    tch_side_join_op *side_join;
    tch_event_destroy_op *event_destroy;
} tch_device_ops;

#endif
