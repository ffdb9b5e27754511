/* Groups inside the library: collectives that are counted, name the group when they fail, and are no-ops for a single
 * rank. */
#ifndef TCHI_COMM_H
#define TCHI_COMM_H

#include <torchium/comm.h>

#include "core/context.h"

/* The context's stream, NULL on the CPU. Reductions are queued there, other collectives on the given stream. */
void *tchi_comm_stream(tch_context *context);
tch_status tchi_comm_all_gather(tch_comm *comm, const void *send, void *receive, int64_t bytes, void *stream);
tch_status tchi_comm_all_to_all(tch_comm *comm, const void *send, void *receive, const tch_comm_counts *counts,
                                void *stream);
tch_status tchi_comm_reduce_max(tch_comm *comm, tch_context *context, int32_t *values, int32_t count);

/* Every agreement of ranks is a reduction of this many numbers, so that one who does something else, or refuses, is
 * found out and not waited for. Numbers come in pairs with their complements: equal on all ranks if they remain so. A
 * step has a first number of 0 or more; whatever else ranks do, a negative one. */
enum { TCHI_AGREED = 8 };
#define TCHI_REFUSED INT32_MIN

/* The same for host numbers; synchronizes. With device memory, a failure before the collective leaves the other
 * ranks waiting; with host memory nothing can fail. */
tch_status tchi_comm_largest(tch_comm *comm, tch_context *context, int32_t values[TCHI_AGREED]);

tch_status tchi_comm_check(tch_comm *comm);

int64_t tchi_comm_bucket_bytes(const tch_comm *comm);
int64_t tchi_comm_span_bytes(const tch_comm *comm);

/* Ends the group: every later collective fails. */
void tchi_comm_abort(tch_comm *comm);

/* --- ranks that load a checkpoint together ------------------------------------------------------------------------ */

typedef struct tchi_loading {
    tch_comm *comm; /* NULL: one process */
    tch_context *context;
    const char *function;  /* for messages */
    const int64_t *counts; /* equal on all ranks: steps, observations */
    int64_t count;
} tchi_loading;

/* A barrier that fails on all ranks if it fails on one: every rank passes the status of its part. A failed rank gets
 * its own error; the others get `otherwise`. */
tch_status tchi_loading_agree(const tchi_loading *loading, tch_status status, const char *otherwise);

#endif
