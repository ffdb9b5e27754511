/* A group of processes whose ranks are threads of one: collectives over memory that all of them see. Ranks can be late,
 * fail at a collective of one's choice, or be gone, as a process that was killed is; then the others give up after a
 * while. */
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
    tch_comm *comm;       /* made when it is first asked for, and destroyed by pretend_close */
    int64_t calls;        /* collectives so far */
    int64_t fails_at;     /* the call that fails, counted from 1; 0: none */
    int64_t gone_at;      /* the call that never comes: the rank's function returns an error at once */
    tch_context *context; /* whose memory travels; NULL for the CPU's */
    const void *send;
    const tch_comm_counts *counts;
    int64_t bytes;
    int32_t numbers[8]; /* of a reduction */
} pretend_rank;

struct pretend_group {
    int32_t size;
    int32_t late; /* 1: ranks come at random times */
    double timeout_s;
    int64_t bucket_bytes, span_bytes; /* as in tch_comm_config */
    pthread_mutex_t lock;
    pthread_cond_t all_here;
    int32_t waiting;
    int64_t round;
    int32_t broken;
    int64_t mismatches; /* bytes that one rank sends and the other does not expect */
    pretend_rank ranks[PRETEND_MOST];
};

void pretend_open(pretend_group *group, int32_t size);
void pretend_close(pretend_group *group);
tch_comm *pretend_comm(pretend_group *group, int32_t rank);

/* Memory of a GPU travels by this context's copies. */
void pretend_use(pretend_group *group, int32_t rank, tch_context *context);

/* Runs the task as every rank at once and waits for all. */
typedef void (*pretend_task)(tch_comm *comm, int32_t rank, void *user);
void pretend_run(pretend_group *group, pretend_task task, void *user);

#endif
