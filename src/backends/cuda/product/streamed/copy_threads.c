/* Threads that copy between pageable and page-locked memory: one alone reaches about 10 GB/s, a fraction of the link's
 * throughput. A copy is divided into parts. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "streamed.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>

/* Threads besides the caller. Memory is usually saturated by six in all. */
#define MOST_THREADS 5

/* Minimum size of a part that is worth waking a thread. */
#define LEAST_PART (INT64_C(256) << 10)

struct tchi_copy_threads {
    pthread_t thread[MOST_THREADS];
    int count;
    pthread_mutex_t lock;
    pthread_cond_t work; /* there are parts to copy, or it is time to exit */
    pthread_cond_t done; /* the last part of the copy is done */
    tchi_rows rows;
    int64_t parts, next, finished;
    int end;
};

/* Part `index` of `parts`: a range of rows, or, with fewer rows than parts, a range of columns of all of them. */
static void copy_part(const tchi_rows *r, int64_t index, int64_t parts)
{
    int by_rows = r->rows >= parts;
    int64_t total = by_rows ? r->rows : r->width;
    int64_t from = total / parts * index + (index < total % parts ? index : total % parts);
    int64_t size = total / parts + (index < total % parts);
    int64_t first = by_rows ? from : 0;
    int64_t last = by_rows ? from + size : r->rows;
    int64_t skip = by_rows ? 0 : from;
    int64_t width = by_rows ? r->width : size;
    if (width == r->to_pitch && width == r->from_pitch) {
        memcpy(r->to + first * width, r->from + first * width, (size_t)(width * (last - first)));
        return;
    }
    for (int64_t i = first; i < last; i++) {
        memcpy(r->to + i * r->to_pitch + skip, r->from + i * r->from_pitch + skip, (size_t)width);
    }
}

/* Copies parts until none is left. The lock is held on entry and exit. */
static void copy_parts(tchi_copy_threads *t)
{
    while (t->next < t->parts) {
        int64_t index = t->next++;
        tchi_rows rows = t->rows;
        int64_t parts = t->parts;
        pthread_mutex_unlock(&t->lock);
        copy_part(&rows, index, parts);
        pthread_mutex_lock(&t->lock);
        if (++t->finished == t->parts) {
            pthread_cond_signal(&t->done);
        }
    }
}

static void *serve_copies(void *argument)
{
    tchi_copy_threads *t = argument;
    pthread_mutex_lock(&t->lock);
    while (!t->end) {
        copy_parts(t);
        if (!t->end) {
            pthread_cond_wait(&t->work, &t->lock);
        }
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

void tchi_copy_threads_run(tchi_copy_threads *t, const tchi_rows *rows)
{
    if (rows->rows < 1 || rows->width < 1) {
        return;
    }
    int64_t most = 4 * (t->count + 1);
    int64_t parts = rows->width * rows->rows / LEAST_PART;
    pthread_mutex_lock(&t->lock);
    t->rows = *rows;
    t->next = 0;
    t->finished = 0;
    t->parts = parts < 1 ? 1 : parts > most ? most : parts;
    if (t->parts > 1) {
        pthread_cond_broadcast(&t->work);
    }
    copy_parts(t);
    while (t->finished < t->parts) {
        pthread_cond_wait(&t->done, &t->lock);
    }
    pthread_mutex_unlock(&t->lock);
}

/* --- creation and destruction ------------------------------------------------------------------------------------ */

/* Blocks all signals, which belong to the program's threads. Fewer threads are acceptable. */
static void start_threads(tchi_copy_threads *t)
{
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    cpu_set_t set; /* half of the processors available to this process, including the caller's */
    int processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 2;
    int target = processors / 2 - 1 < MOST_THREADS ? processors / 2 - 1 : MOST_THREADS;
    while (t->count < target && pthread_create(&t->thread[t->count], NULL, serve_copies, t) == 0) {
        t->count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

tchi_copy_threads *tchi_copy_threads_create(void)
{
    tchi_copy_threads *t = tchi_cuda_host->allocate(sizeof *t, _Alignof(tchi_copy_threads));
    if (t == NULL) {
        return NULL;
    }
    memset(t, 0, sizeof *t);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->work, NULL);
    pthread_cond_init(&t->done, NULL);
    start_threads(t);
    return t;
}

void tchi_copy_threads_destroy(tchi_copy_threads *t)
{
    if (t == NULL) {
        return;
    }
    pthread_mutex_lock(&t->lock);
    t->end = 1;
    pthread_cond_broadcast(&t->work);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; i < t->count; i++) {
        pthread_join(t->thread[i], NULL);
    }
    pthread_cond_destroy(&t->done);
    pthread_cond_destroy(&t->work);
    pthread_mutex_destroy(&t->lock);
    tchi_cuda_host->release(t, sizeof *t);
}
