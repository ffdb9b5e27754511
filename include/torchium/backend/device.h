/* Operations table, chapter 1: devices, the state of a context, memory. Every backend has it.
 *
 * A state is what one context has of its own: a stream, handles of libraries. Each of its operations, here and in the
 * other chapters, takes it as the first argument. A public call of the library is framed by `begin` and `end`; the
 * calls may be nested. Work is queued on the state's stream and done in that order; only `synchronize`, copies to the
 * host and what says so wait for the device.
 *
 * Memory comes from `allocate` alone; no other operation allocates. Operations that need scratch are given it by the
 * caller, as large as `scratch_bytes` says, and may leave anything in it. */
#ifndef TORCHIUM_BACKEND_DEVICE_H
#define TORCHIUM_BACKEND_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/device.h>
#include <torchium/status.h>

typedef enum tch_copy_kind { TCH_COPY_DEVICE = 0, TCH_COPY_TO_DEVICE = 1, TCH_COPY_TO_HOST = 2 } tch_copy_kind;

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

/* Devices that can be used now; 0 with a sentence in `reason` when none. */
typedef int32_t tch_device_count_op(char *reason, size_t reason_size);
/* Fills everything but struct_size. */
typedef tch_status tch_device_info_op(int32_t index, tch_device_info *info);
/* One line on the libraries it runs on. */
typedef void tch_describe_op(char *text, size_t text_size);
/* The state of one context: a stream, library handles. */
typedef tch_status tch_state_create_op(int32_t index, void **state);
typedef void tch_state_destroy_op(void *state);
/* Called first in every public call on the context: makes the device current, and fixes what must not change until the
 * call is over (the CPU's thread count, for which scratch is measured). */
typedef tch_status tch_begin_op(void *state);
/* Called last in every public call whose `begin` succeeded: gives back what that took, such as the caller's current
 * device. Calls may be nested. */
typedef void tch_end_op(void *state);
/* NULL is the default stream. */
typedef tch_status tch_set_stream_op(void *state, void *stream);
typedef void *tch_get_stream_op(void *state);
/* Waits, and reports what failed since the last wait. */
typedef tch_status tch_synchronize_op(void *state);
/* Named ranges for a profiler's timeline, nested; `name` is a literal. */
typedef void tch_range_push_op(void *state, const char *name);
typedef void tch_range_pop_op(void *state);

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* Aligned to at least 256 bytes; TCH_ERR_OUT_OF_MEMORY with the sizes in the message. */
typedef tch_status tch_allocate_op(void *state, int64_t bytes, void **pointer);
typedef void tch_release_op(void *state, void *pointer, int64_t bytes);
typedef tch_status tch_memory_info_op(void *state, int64_t *total, int64_t *free);
/* Plain bytes. Copies to the host wait until they are done. */
typedef tch_status tch_copy_bytes_op(void *state, void *dst, const void *src, int64_t bytes, tch_copy_kind kind);
typedef tch_status tch_zero_bytes_op(void *state, void *dst, int64_t bytes);
/* dst[k] = values[k], from the host, without anything of the caller's being read later; count <= 64. */
typedef tch_status tch_store_numbers_op(void *state, double *dst, const double *values, int32_t count);
/* Bytes of the device that the host will want later, without a wait now. The four of them are there together.
 * `readback_post` queues a copy of `bytes`, at most those it was made for, and `readback_wait` waits for the latest one
 * that was posted, not for what was queued behind it: *data points to them, and is NULL where nothing was posted, or
 * where the stream is being captured and nothing can be waited for. A post while capturing does nothing. */
typedef tch_status tch_readback_create_op(void *state, int64_t bytes, void **readback);
typedef tch_status tch_readback_post_op(void *state, void *readback, const void *src, int64_t bytes);
typedef tch_status tch_readback_wait_op(void *state, void *readback, const void **data);
/* Called also outside begin and end; NULL is allowed. */
typedef void tch_readback_destroy_op(void *state, void *readback);
/* A second stream, for what may run beside the state's own, and events that order the two. The five of them are there
 * together. The stream is made at the first call and is the state's. */
typedef tch_status tch_side_stream_op(void *state, void **stream);
typedef tch_status tch_event_create_op(void *state, void **event);
/* On the second stream where `side` is set, otherwise on the state's own. */
typedef tch_status tch_event_record_op(void *state, void *event, int32_t side);
/* What is queued there from now on waits for the event as it was last recorded. */
typedef tch_status tch_event_wait_op(void *state, void *event, int32_t side);
/* Called also outside begin and end; NULL is allowed. */
typedef void tch_event_destroy_op(void *state, void *event);
/* Bytes of scratch for one of the operations that need it, on matrices of this type and size. */
typedef int64_t tch_scratch_bytes_op(void *state, tch_scratch_for operation, tch_scalar type, int64_t rows,
                                     int64_t cols, int64_t batch, int64_t extra);

typedef struct tch_device_ops {
    /* REQUIRED */
    tch_device_count_op *count;
    tch_device_info_op *info;
    tch_describe_op *describe;
    tch_state_create_op *state_create;
    tch_state_destroy_op *state_destroy;
    tch_begin_op *begin;
    tch_set_stream_op *set_stream;
    tch_get_stream_op *get_stream;
    tch_synchronize_op *synchronize;
    tch_allocate_op *allocate;
    tch_release_op *release;
    tch_memory_info_op *memory_info;
    tch_copy_bytes_op *copy_bytes;
    tch_zero_bytes_op *zero_bytes;
    tch_store_numbers_op *store_numbers;
    tch_scratch_bytes_op *scratch_bytes;
    /* OPTIONAL: may be NULL, and the library does without or composes the result */
    tch_end_op *end;
    tch_range_push_op *range_push;
    tch_range_pop_op *range_pop;
    tch_readback_create_op *readback_create;
    tch_readback_post_op *readback_post;
    tch_readback_wait_op *readback_wait;
    tch_readback_destroy_op *readback_destroy;
    tch_side_stream_op *side_stream;
    tch_event_create_op *event_create;
    tch_event_record_op *event_record;
    tch_event_wait_op *event_wait;
    tch_event_destroy_op *event_destroy;
} tch_device_ops;

#endif
