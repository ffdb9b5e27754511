/* Operations table, chapter 1: devices, the state of a context, memory. Every backend has it.
 *
 * A state is what one context has of its own: a stream, handles of libraries. Each of its operations, here and in the
 * other chapters, takes it as the first argument. A public call of the library is framed by `begin` and `end`; the
 * calls may be nested. Work is queued on the state's stream and done in that order; only `synchronize`, copies to the
 * host and what says so wait for the device.
 *
 * Memory comes from `allocate` alone; no other operation allocates. Operations that need scratch are given it by the
 * caller, as large as `scratch_bytes` says, and may leave anything in it.
 *
 * Most of these entries have one caller, the registry, the pool or the context: only the device's own runtime can do
 * what they do. */
#ifndef TORCHIUM_BACKEND_DEVICE_H
#define TORCHIUM_BACKEND_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/device.h>
#include <torchium/status.h>

typedef enum tch_copy_kind {
    TCH_COPY_DEVICE = 0,
    TCH_COPY_TO_DEVICE = 1, /* from page-locked memory, src may be read later, in stream order */
    TCH_COPY_TO_HOST = 2,   /* returns when the bytes are there */
    TCH_COPY_NUMBERS = 3    /* to the device: at most 64 float64, all read from the host before the call returns */
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

/* Devices that can be used now; 0 with a sentence in `reason` when none. `libraries`, if not NULL, receives one line on
 * the libraries the backend runs on, with or without a device. */
typedef int32_t tch_device_count_op(char *reason, size_t reason_size, char *libraries, size_t libraries_size);
/* Fills everything but struct_size. */
typedef tch_status tch_device_info_op(int32_t index, tch_device_info *info);
/* The state of one context: a stream, library handles. */
typedef tch_status tch_state_create_op(int32_t index, void **state);
typedef void tch_state_destroy_op(void *state);
/* Called first in every public call on the context: makes the device current, and fixes what must not change until the
 * call is over (the CPU's thread count, for which scratch is measured). */
typedef tch_status tch_begin_op(void *state);
/* Called last in every public call whose `begin` succeeded: gives back what that took, such as the caller's current
 * device. Calls may be nested. */
typedef void tch_end_op(void *state);
/* Makes *stream the state's stream if `set` is 1 (NULL is the default stream); otherwise stores the current one
 * there. */
typedef tch_status tch_stream_op(void *state, int32_t set, void **stream);
/* Waits, and reports what failed since the last wait. */
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
/* Bytes of the device that the host needs later, without a wait now. `readback_post` queues a copy of `bytes`, the same
 * number each time; *event is NULL at the first call, which creates it. While the stream is being captured it copies
 * nothing. `readback_wait` waits for the latest copy, not for work queued after it; *data points to the bytes, or is
 * NULL if nothing was posted or the stream is being captured. */
typedef tch_status tch_readback_post_op(void *state, void **event, const void *src, int64_t bytes);
typedef tch_status tch_readback_wait_op(void *state, void *event, const void **data);
/* A second stream for concurrent work; the state owns it. `side_begin` returns the stream, which waits for everything
 * queued on the state's stream so far. `side_mark` records what is queued on the second stream so far in *event, which
 * is created if it is NULL, and the state's stream waits for that in `side_join`; without an event nothing waits. */
typedef tch_status tch_side_begin_op(void *state, void **stream);
typedef tch_status tch_side_mark_op(void *state, void **event);
typedef tch_status tch_side_join_op(void *state, void *event);
/* Of a readback or of side_mark. Called also outside begin and end; NULL is allowed. */
typedef void tch_event_destroy_op(void *state, void *event);
/* Bytes of scratch for one of the operations that need it, on matrices of this type and size. */
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
    /* OPTIONAL: may be NULL, and the library does without or composes the result; the readback_ two, the side_ three
     * and event_destroy come together */
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
