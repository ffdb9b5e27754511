/* A process group whose ranks are threads: collectives over shared memory. Ranks can be late, or
 * lost at a given collective, like a killed process; the others then time out. */
#ifndef TORCHIUM_TESTS_PRETEND_GROUP_H
#define TORCHIUM_TESTS_PRETEND_GROUP_H

#include <pthread.h>
#include <stdbool.h>

#include <torchium/comm.h>
#include <torchium/context.h>

#define PRETEND_MOST 64

typedef struct pretend_group pretend_group;

typedef struct pretend_rank {
    pretend_group *group;
    int32_t rank;
    tch_comm *comm;       /* created on first use, destroyed by pretend_close */
    int64_t calls;        /* collectives so far */
    int64_t gone_at;      /* the call that never comes, counted from 1: the rank's function returns an error; 0: none */
    tch_context *context; /* whose memory is transferred; NULL for the CPU */
    const void *send;
    const tch_comm_counts *counts;
    int64_t bytes;
    int32_t numbers[8]; /* of a reduction */
} pretend_rank;

struct pretend_group {
    int32_t size;
    int32_t late; /* 1: ranks arrive at random times */
    double timeout_s;
    int64_t bucket_bytes, span_bytes; /* as in tch_comm_config */
    pthread_mutex_t lock;
    pthread_cond_t all_here;
    int32_t waiting;
    int64_t round;
    int32_t broken;
    int64_t mismatches; /* bytes that one rank sends beyond what the other expects */
    pretend_rank ranks[PRETEND_MOST];
};

void pretend_open(pretend_group *group, int32_t size);
void pretend_close(pretend_group *group);
tch_comm *pretend_comm(pretend_group *group, int32_t rank);

/* Uses this context for copies of GPU memory. */
void pretend_use(pretend_group *group, int32_t rank, tch_context *context);

/* Runs the task on all ranks concurrently and joins them. */
typedef void (*pretend_task)(tch_comm *comm, int32_t rank, void *user);
void pretend_run(pretend_group *group, pretend_task task, void *user);

#endif
