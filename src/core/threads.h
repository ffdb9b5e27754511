/* How many threads the CPU may use: one number for the process. */
#ifndef TCHI_THREADS_H
#define TCHI_THREADS_H

#include <stdint.h>

int32_t tchi_num_threads(void);

#endif
