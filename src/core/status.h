/* How the inside of the library reports failures: one function that records the message, and the check. */
#ifndef TCHI_STATUS_H
#define TCHI_STATUS_H

#include <torchium/status.h>

/* Records the thread's message, printf-style, and returns `status`, so that `return tchi_fail(...)` is one line. */
tch_status tchi_fail(tch_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Returns from the enclosing function when the call failed. */
#define TCHI_TRY(call)                                                                                                 \
    do {                                                                                                               \
        tch_status tchi_try_status = (call);                                                                           \
        if (tchi_try_status != TCH_OK) {                                                                               \
            return tchi_try_status;                                                                                    \
        }                                                                                                              \
    } while (0)

#endif
