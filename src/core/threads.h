/* How many threads the CPU may use: one number for the process; and initialization that a fork does not cut in two. */
#ifndef TCHI_THREADS_H
#define TCHI_THREADS_H

#include <stdatomic.h>
#include <stdint.h>

int32_t tchi_num_threads(void);

/* Between the two a fork on another thread waits. A child of a fork while a library is being opened would inherit a
 * dynamic loader in the middle of its work, and crash or hang. May be nested. */
void tchi_fork_hold(void);
void tchi_fork_release(void);

/* Runs `body` at the first call with this flag, between these two. */
void tchi_once(atomic_bool *done, void (*body)(void));

#endif
