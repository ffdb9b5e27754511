/* The thread count. The default is OpenMP's, which knows OMP_NUM_THREADS and the cores this process may run on. */
#include "threads.h"

#include <omp.h>
#include <stdatomic.h>

#include <torchium/device.h>

#include "status.h"

#define MOST_THREADS 1024

static atomic_int chosen; /* 0: the default */

int32_t tchi_num_threads(void)
{
    int count = atomic_load(&chosen);
    return count > 0 ? count : omp_get_max_threads();
}

int32_t tch_get_num_threads(void)
{
    return tchi_num_threads();
}

tch_status tch_set_num_threads(int32_t count)
{
    if (count < 1 || count > MOST_THREADS) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_set_num_threads: count is %d, expected 1 to %d", count,
                         MOST_THREADS);
    }
    atomic_store(&chosen, count);
    return TCH_OK;
}
