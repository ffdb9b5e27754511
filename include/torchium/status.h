/* Status codes and error messages.
 *
 * Every call that can fail returns a tch_status. TCH_OK is zero, so `if (tch_...(...))` reads as "if it failed". When a
 * call fails, tch_last_error() describes it: what failed, which argument (its name, shape, type and device), what was
 * expected and what to do. Messages are per thread.
 *
 * After a caller's error (TCH_ERR_INVALID_ARGUMENT to TCH_ERR_UNSUPPORTED) nothing has been written: arguments are
 * checked before the first write. After other errors each function documents its outputs. */
#ifndef TORCHIUM_STATUS_H
#define TORCHIUM_STATUS_H

#include <torchium/export.h>

/* X(enumerator, text): the enum here, and names and texts in status.c. */
#define TCH_STATUS_LIST(X)                                                                                             \
    X(TCH_OK, "success")                                                                                               \
    X(TCH_ERR_INVALID_ARGUMENT, "an argument is missing or outside its range")                                         \
    X(TCH_ERR_SHAPE, "shapes do not match")                                                                            \
    X(TCH_ERR_DTYPE, "unsupported element type")                                                                       \
    X(TCH_ERR_DEVICE, "a tensor is on another device than the context")                                                \
    X(TCH_ERR_LAYOUT, "unsupported strides, alignment or overlap")                                                     \
    X(TCH_ERR_UNAVAILABLE, "the device or backend is not available on this machine")                                   \
    X(TCH_ERR_UNSUPPORTED, "the backend does not support the operation")                                               \
    X(TCH_ERR_OUT_OF_MEMORY, "out of memory")                                                                          \
    X(TCH_ERR_NUMERIC, "not finite, not positive definite, or no convergence")                                         \
    X(TCH_ERR_BACKEND, "the device or one of its libraries failed")                                                    \
    X(TCH_ERR_IO, "reading or writing a file failed")                                                                  \
    X(TCH_ERR_INTERNAL, "an internal check failed; please report it")                                                  \
    X(TCH_ERR_COMM, "a group of processes failed, or its ranks disagree")

#define TCH_STATUS_ENUMERATOR(name, text) name,
typedef enum tch_status { TCH_STATUS_LIST(TCH_STATUS_ENUMERATOR) TCH_STATUS_COUNT } tch_status;
#undef TCH_STATUS_ENUMERATOR

TCH_BEGIN_DECLS

/* "TCH_ERR_SHAPE" for TCH_ERR_SHAPE; "unknown status" for an invalid one. */
TCH_API const char *tch_status_name(tch_status status);

/* A general description of the status; tch_last_error() is specific. */
TCH_API const char *tch_status_text(tch_status status);

/* The message of this thread's latest failed call, or "". Valid until the next failure. */
TCH_API const char *tch_last_error(void);

/* Clears this thread's message. */
TCH_API void tch_clear_error(void);

TCH_END_DECLS

#endif
