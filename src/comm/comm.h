/* A group as the library uses it: collectives that are counted, that name the group when they fail, and that do nothing
 * where there is one rank. */
#ifndef TCHI_COMM_H
#define TCHI_COMM_H

#include <torchium/comm.h>

#include "core/context.h"

/* The context's own stream, NULL on the CPU. Reductions are queued there, the others on the one that is given. */
void *tchi_comm_stream(tch_context *context);
tch_status tchi_comm_all_gather(tch_comm *comm, const void *send, void *receive, int64_t bytes, void *stream);
tch_status tchi_comm_all_to_all(tch_comm *comm, const void *send, void *receive, const tch_comm_counts *counts,
                                void *stream);
tch_status tchi_comm_reduce_max(tch_comm *comm, tch_context *context, int32_t *values, int32_t count);

/* The same for four numbers of the host; waits for them. Where it fails on the way to the collective the other ranks
 * wait: with memory of the host there is nothing that could. */
tch_status tchi_comm_largest(tch_comm *comm, tch_context *context, int32_t values[4]);

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
    const int64_t *counts; /* what every rank has read alike: steps, observations */
    int64_t count;
} tchi_loading;

/* Ranks go on together or not at all: each comes with what became of its own part, also one that has failed, so that
 * nobody waits. Its own error is what it gets back; `otherwise` says to the others what state they are in. */
tch_status tchi_loading_agree(const tchi_loading *loading, tch_status status, const char *otherwise);

#endif
