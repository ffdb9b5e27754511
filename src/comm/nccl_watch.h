/* Watches what a communicator of NCCL has queued on a GPU. NCCL's kernels wait on the stream for other ranks, and the
 * host learns of a rank that is gone only where it waits for the GPU, for ever; so a thread looks on from beside.
 *
 * Behind a collective an event is recorded. As long as one after the other is reached there is progress; when none is
 * for the time that was given, the thread calls `lost`, once. */
#ifndef TCHI_NCCL_WATCH_H
#define TCHI_NCCL_WATCH_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <torchium/status.h>

#define TCHI_WATCHED 8 /* collectives; where more are queued, the last event stands for all that follow */

/* CUDA's driver, for events: opened at run time, as NCCL is. */
typedef struct tchi_watch_driver {
    int (*event_create)(void **event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_destroy)(void *event);
    int (*get_context)(void **context);
    int (*set_context)(void *context);
    int (*is_capturing)(void *stream, int *status);
} tchi_watch_driver;

typedef struct tchi_watch {
    tchi_watch_driver driver;
    double timeout_s;
    /* Called on the thread, under the lock: whether all is well, and what to do when it is not. */
    bool (*look)(void *user);
    void (*lost)(void *user, const char *operation);
    void *user;
    pthread_mutex_t lock; /* the user's to make: of all that follows, and of what the user keeps under it */
    pthread_cond_t stop;
    pthread_t thread;
    bool runs, stopping;
    void *context; /* of CUDA */
    void *events[TCHI_WATCHED];
    const char *operations[TCHI_WATCHED];
    int32_t first, count; /* those that have not been reached */
    double since;         /* of the latest progress */
} tchi_watch;

/* Seconds of a clock that only goes forward. */
double tchi_watch_now(void);

/* Begins to watch; the calling thread has CUDA's context. Close it also where this fails. */
tch_status tchi_watch_open(tchi_watch *watch);
void tchi_watch_close(tchi_watch *watch);

/* A collective has been queued. Under the lock. */
void tchi_watch_note(tchi_watch *watch, const char *operation, void *stream);

#endif
