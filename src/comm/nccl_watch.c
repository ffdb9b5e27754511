#include "nccl_watch.h"

#include <dlfcn.h>
#include <string.h>
#include <time.h>

#include "core/status.h"

enum { CUDA_SUCCESS = 0, CUDA_NOT_READY = 600, CUDA_EVENT_DISABLE_TIMING = 2 };

double tchi_watch_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* --- the driver -------------------------------------------------------------------------------------------------- */

static tch_status find_driver(tchi_watch_driver *driver)
{
    const struct {
        const char *name;
        void *place;
    } symbols[] = {
        {"cuEventCreate", &driver->event_create},       {"cuEventRecord", &driver->event_record},
        {"cuEventQuery", &driver->event_query},         {"cuEventDestroy_v2", &driver->event_destroy},
        {"cuCtxGetCurrent", &driver->get_context},      {"cuCtxSetCurrent", &driver->set_context},
        {"cuStreamIsCapturing", &driver->is_capturing},
    };
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* never closed, like NCCL */
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *symbol = handle == NULL ? NULL : dlsym(handle, symbols[i].name);
        if (symbol == NULL) {
            return tchi_fail(TCH_ERR_UNAVAILABLE,
                             "timeout_s needs %s of NVIDIA's driver, libcuda.so.1, which was not found",
                             symbols[i].name);
        }
        memcpy(symbols[i].place, &symbol, sizeof symbol);
    }
    return TCH_OK;
}

/* --- looking ----------------------------------------------------------------------------------------------------- */

/* Drops completed events. CUDA errors are reported by the step. */
static void see_progress(tchi_watch *w)
{
    while (w->count > 0 && w->driver.event_query(w->events[w->first]) != CUDA_NOT_READY) {
        w->first = (w->first + 1) % TCHI_WATCHED;
        w->count--;
        w->since = tchi_watch_now();
    }
}

void tchi_watch_note(tchi_watch *watch, const char *operation, void *stream)
{
    int capturing = 0;
    if (!watch->runs || watch->driver.is_capturing(stream, &capturing) != CUDA_SUCCESS || capturing != 0) {
        return; /* work captured in a graph is not queued yet */
    }
    see_progress(watch);
    if (watch->count == 0) {
        watch->since = tchi_watch_now();
    }
    watch->count += watch->count < TCHI_WATCHED;
    int32_t last = (watch->first + watch->count - 1) % TCHI_WATCHED;
    watch->operations[last] = operation;
    (void)watch->driver.event_record(watch->events[last], stream);
}

/* False if nothing is left to watch. */
static bool look_once(tchi_watch *w)
{
    see_progress(w);
    if (!w->look(w->user)) {
        return false;
    }
    if (w->count > 0 && tchi_watch_now() - w->since > w->timeout_s) {
        w->lost(w->user, w->operations[w->first]);
        return false;
    }
    return true;
}

static struct timespec later(double seconds)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += (time_t)seconds;
    at.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    at.tv_sec += at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    return at;
}

/* Polls ten times per timeout, and at least ten times a second. */
static void *watch_thread(void *argument)
{
    tchi_watch *w = argument;
    double pause = w->timeout_s < 1.0 ? w->timeout_s / 10 : 0.1;
    (void)w->driver.set_context(w->context);
    pthread_mutex_lock(&w->lock);
    while (!w->stopping && look_once(w)) {
        struct timespec until = later(pause);
        while (!w->stopping && pthread_cond_timedwait(&w->stop, &w->lock, &until) == 0) {
        }
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* --- opening and closing ----------------------------------------------------------------------------------------- */

static tch_status open_events(tchi_watch *w)
{
    bool good = w->driver.get_context(&w->context) == CUDA_SUCCESS;
    for (int i = 0; i < TCHI_WATCHED && good; i++) {
        good = w->driver.event_create(&w->events[i], CUDA_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
    }
    return good ? TCH_OK : tchi_fail(TCH_ERR_COMM, "CUDA could not create the events that watch the communicator");
}

static tch_status start_thread(tchi_watch *w)
{
    pthread_condattr_t by_clock;
    pthread_condattr_init(&by_clock);
    pthread_condattr_setclock(&by_clock, CLOCK_MONOTONIC);
    pthread_cond_init(&w->stop, &by_clock);
    pthread_condattr_destroy(&by_clock);
    w->runs = pthread_create(&w->thread, NULL, watch_thread, w) == 0;
    if (!w->runs) {
        pthread_cond_destroy(&w->stop);
        return tchi_fail(TCH_ERR_OUT_OF_MEMORY, "no thread could be started to watch the communicator");
    }
    return TCH_OK;
}

tch_status tchi_watch_open(tchi_watch *watch)
{
    TCHI_TRY(find_driver(&watch->driver));
    TCHI_TRY(open_events(watch));
    return start_thread(watch);
}

void tchi_watch_close(tchi_watch *watch)
{
    if (watch->runs) {
        pthread_mutex_lock(&watch->lock);
        watch->stopping = true;
        pthread_cond_signal(&watch->stop);
        pthread_mutex_unlock(&watch->lock);
        pthread_join(watch->thread, NULL);
        pthread_cond_destroy(&watch->stop);
        watch->runs = false;
    }
    for (int i = 0; i < TCHI_WATCHED; i++) {
        if (watch->events[i] != NULL) {
            (void)watch->driver.event_destroy(watch->events[i]);
            watch->events[i] = NULL;
        }
    }
}
