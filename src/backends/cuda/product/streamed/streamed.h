/* Transfers for streamed products: two streams besides the state's, and for pageable host memory a ring of page-locked
 * chunks each way, filled and emptied by a few threads. Used by one product at a time; created on demand and kept by
 * the state. */
#ifndef TCHI_CUDA_STREAMED_H
#define TCHI_CUDA_STREAMED_H

#include "backends/cuda/cuda.h"

/* A chunk takes 0.3 ms on a link of 55 GB/s, vs 20 us for waking threads and queueing a copy. Reasoned. */
#define TCHI_STAGING_CHUNKS 4
#define TCHI_STAGING_CHUNK_BYTES (INT64_C(16) << 20)

/* Events of one slot of a tile on the device. */
typedef struct tchi_slot_events {
    cudaEvent_t filled;  /* on the inward stream: its tile has arrived */
    cudaEvent_t used;    /* on the state's stream: the product that read or wrote it is done */
    cudaEvent_t drained; /* on the outward stream: its tile has left */
} tchi_slot_events;

typedef struct tchi_staging_ring {
    char *memory;                            /* page-locked, NULL until needed */
    cudaEvent_t copied[TCHI_STAGING_CHUNKS]; /* the device's copy from or to the chunk is done */
    int64_t next;                            /* chunks used so far; the next one is this modulo their number */
} tchi_staging_ring;

/* The threads: see copy_threads.c. */
typedef struct tchi_copy_threads tchi_copy_threads;

struct tchi_cuda_staging {
    cudaStream_t in, out;
    cudaEvent_t start;
    tchi_slot_events slots[3][2]; /* of A, B, C */
    tchi_staging_ring inward, outward;
    tchi_copy_threads *threads;
};

/* Rows of `width` bytes at two places with a pitch each, in bytes. */
typedef struct tchi_rows {
    char *to;
    int64_t to_pitch;
    const char *from;
    int64_t from_pitch;
    int64_t width, rows;
} tchi_rows;

/* NULL if out of memory. As many threads as the processors allow, possibly none: the caller copies too. */
tchi_copy_threads *tchi_copy_threads_create(void);
void tchi_copy_threads_destroy(tchi_copy_threads *threads);
/* Returns after the copy. */
void tchi_copy_threads_run(tchi_copy_threads *threads, const tchi_rows *rows);

/* Creates the staging of a state: streams, events, and the requested rings. After a failure the parts created so far
 * are kept for a retry. */
tch_status tchi_cuda_staging_ready(tchi_cuda_state *state, int ring_in, int ring_out);

/* The device's copy of rows, on `stream`. */
tch_status tchi_cuda_staging_copy(const tchi_rows *rows, cudaStream_t stream);

/* From host memory to the device through the next chunk of the ring: waits for the chunk, not for the copy. */
tch_status tchi_cuda_staging_send(tchi_cuda_staging *staging, const tchi_rows *rows);

/* The two steps of a copy to the host. The first queues the copy to the next chunk, *chunk; the second waits for it and
 * copies on to `to`. At most TCHI_STAGING_CHUNKS can be pending. */
tch_status tchi_cuda_staging_fetch(tchi_cuda_staging *staging, const tchi_rows *rows, int64_t *chunk);
tch_status tchi_cuda_staging_deliver(tchi_cuda_staging *staging, const tchi_rows *rows, int64_t chunk);

/* --- streamed_plan.c: how a product is cut into tiles ------------------------------------------------------------ */

/* Slots per operand on the device, so that one can be filled or emptied while the other is in use. */
#define TCHI_STREAM_SLOTS 2

/* The tiles of one operand in storage order. */
typedef struct tchi_stream_tiles {
    int64_t rows, cols;
    int64_t ld;    /* of a tile on the device, in elements */
    int64_t bytes; /* of a slot */
    int32_t slots; /* 0: used in place. 1: a single resident tile. 2: tiles are transferred */
} tchi_stream_tiles;

typedef struct tchi_stream_plan {
    int64_t m, n, k;           /* sizes of the product */
    int64_t tile[3];           /* tiles of m, n and k */
    int32_t columns_outermost; /* traversal of the result's tiles: column by column, else row by row */
    tchi_stream_tiles a, b, c;
    int64_t sum_bytes; /* of a float32 tile that accumulates a half type's result, if k is divided; or 0 */
    int64_t bytes;     /* total scratch */
    int64_t traffic;   /* bytes that cross the link, both ways */
} tchi_stream_plan;

/* The plan with the least traffic with at most `budget` of scratch, and of those the one with the shortest start and
 * end. Returns 0 if none fits, with the size of the smallest in plan->bytes. */
int tchi_stream_plan_make(const tch_streamed_product *product, int64_t budget, tchi_stream_plan *plan);

#endif
