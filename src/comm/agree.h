/* Ranks that load a checkpoint together. */
#ifndef TCHI_COMM_AGREE_H
#define TCHI_COMM_AGREE_H

#include "comm/comm.h"

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
