/* The operations table: the interface between algorithms and devices, for authors of backends.
 *
 * The code above this table (src/linalg, the optimizers) is device-independent; a backend implements the table for one
 * kind of device. Its operations are mathematical, work on whole batches, and are grouped in seven chapters, each a
 * header that begins with its rules. Every backend has `device` and `matrix`; any other chapter may be NULL, and
 * functions that need it then return TCH_ERR_UNSUPPORTED. Entries of a chapter are
 *   REQUIRED              in every backend;
 *   OPTIONAL              may be NULL: the library composes the result from required ones;
 *   OPTIONAL, NO DEFAULT  may be NULL: functions that need it are unsupported or use another method.
 *
 * Rules for all operations: arguments have been validated; sizes may be zero; work is queued on the state's stream, and
 * nothing waits for the device except where stated; only `allocate` and `state_create` allocate; the caller provides
 * scratch of `scratch_bytes`. Outputs do not overlap inputs unless an entry allows it. An operation that fails calls
 * host->fail with a message and returns the status.
 *
 * Every entry has a function type, with which a backend can declare its function: `static tch_gemm_op gemm;`.
 *
 * docs/adding-a-backend.md walks through a new one. */
#ifndef TORCHIUM_BACKEND_H
#define TORCHIUM_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/backend/device.h>
#include <torchium/backend/kernel.h>
#include <torchium/backend/matrix.h>
#include <torchium/backend/network.h>
#include <torchium/backend/recording.h>
#include <torchium/backend/sample.h>
#include <torchium/backend/types.h>
#include <torchium/backend/update.h>
#include <torchium/export.h>
#include <torchium/status.h>

/* Incremented with every change of the table or of a struct it uses; modules with another number are not loaded. */
#define TCH_BACKEND_ABI 27u

/* The name of the function that a module exports. */
#define TCH_BACKEND_ENTRY "torchium_backend_entry"

/* Functions of the library for backends. */
typedef struct tch_backend_host {
    size_t struct_size;
    /* Records the message of tch_last_error, printf-style, and returns `status`. */
    tch_status (*fail)(tch_status status, const char *format, ...);
    /* Host memory through the library's allocator. */
    void *(*allocate)(size_t bytes, size_t alignment);
    void (*release)(void *pointer, size_t bytes);
    /* The CPU's table, from which a backend whose memory the host can read may take chapters and entries. NULL while
     * the CPU's own is loaded. */
    const struct tch_backend *cpu;
} tch_backend_host;

typedef struct tch_backend {
    uint32_t abi;      /* TCH_BACKEND_ABI */
    size_t table_size; /* sizeof(tch_backend) */
    const char *name;  /* "cpu", "cuda" */
    int32_t device_type;
    int32_t priority;    /* "auto" selects the available backend with the highest */
    int32_t host_memory; /* 1: the host can read its memory, and operations are complete when they return */

    const tch_device_ops *device;
    const tch_matrix_ops *matrix;
    const tch_update_ops *update;       /* or NULL */
    const tch_sample_ops *sample;       /* or NULL */
    const tch_network_ops *network;     /* or NULL */
    const tch_recording_ops *recording; /* or NULL */
    const tch_kernel_ops *kernel;       /* or NULL */
} tch_backend;

/* Returns the module's table, or NULL if it cannot be used, with a sentence in `reason`. */
typedef const tch_backend *tch_backend_entry(uint32_t abi, const tch_backend_host *host, char *reason,
                                             size_t reason_size);

TCH_BEGIN_DECLS

/* Defined by modules, not by the library. */
TCH_API tch_backend_entry torchium_backend_entry;

TCH_END_DECLS

#endif
