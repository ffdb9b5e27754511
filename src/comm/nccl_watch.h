/* Watches the work of an NCCL communicator on a GPU. NCCL's kernels wait on the stream for other ranks, and the host
 * would wait forever for a lost rank; so a thread polls events.
 *
 * An event is recorded after each collective. Completed events are progress; if there is none within the timeout, the
 * thread calls `lost`, once. */
#ifndef TCHI_NCCL_WATCH_H
#define TCHI_NCCL_WATCH_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <torchium/status.h>

#define TCHI_WATCHED 8 /* collectives; beyond that, the last event stands for all later ones */

/* CUDA's driver, for events, loaded at run time. */
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
    /* Called on the thread, under the lock: checks for errors, and handles a loss. */
    bool (*look)(void *user);
    void (*lost)(void *user, const char *operation);
    void *user;
    pthread_mutex_t lock; /* created by the user; protects all below, and the user's fields */
    pthread_cond_t stop;
    pthread_t thread;
    bool runs, stopping;
    void *context; /* of CUDA */
    void *events[TCHI_WATCHED];
    const char *operations[TCHI_WATCHED];
    int32_t first, count; /* pending events */
    double since;         /* of the latest progress */
} tchi_watch;

/* Seconds of a monotonic clock. */
double tchi_watch_now(void);

/* Starts the thread; the calling thread has CUDA's context. Close it also after a failure. */
tch_status tchi_watch_open(tchi_watch *watch);
void tchi_watch_close(tchi_watch *watch);

/* Notes a queued collective. Under the lock. */
void tchi_watch_note(tchi_watch *watch, const char *operation, void *stream);

#endif
