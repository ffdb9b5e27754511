/* The number of CPU threads, one for the process, and fork-safe initialization. */
#ifndef TCHI_THREADS_H
#define TCHI_THREADS_H

#include <stdatomic.h>
#include <stdint.h>

int32_t tchi_num_threads(void);

/* Forks on other threads wait between the two calls. A child forked while a library is being opened would inherit an
 * inconsistent dynamic loader and crash or hang. May be nested. */
void tchi_fork_hold(void);
void tchi_fork_release(void);

/* Runs `body` at the first call with this flag, between these two. */
void tchi_once(atomic_bool *done, void (*body)(void));

#endif
