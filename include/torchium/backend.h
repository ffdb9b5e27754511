/* The operations table: the one seam between algorithms and devices. For authors of backends.
 *
 * Everything above this table (src/linalg, the optimizers) is written once and never asks which device it runs on;
 * everything below it implements these operations for one kind of device. The operations are at the level of
 * mathematics, over whole batches, and stand in seven chapters, each a header with its rules at the top. `device` and
 * `matrix` are there in every backend; any other may be NULL, and what needs it then says so. In a chapter that is
 * there, entries are
 *   REQUIRED              every backend has them;
 *   OPTIONAL              may be NULL: the library composes the result from required ones;
 *   OPTIONAL, NO DEFAULT  may be NULL: what needs it is then not offered, or done another way.
 *
 * Rules for all operations: arguments have been validated; sizes may be zero; work is queued on the state's stream and
 * nothing waits for the device unless said so; nothing allocates, except `allocate` and `state_create`; scratch is
 * given by the caller, as large as `scratch_bytes` says. Outputs do not overlap inputs unless an entry allows it. On
 * failure an operation returns a status after calling host->fail with a message.
 *
 * Every entry has a function type (tch_gemm_op), so that a backend declares its functions by it: `static tch_gemm_op
 * gemm;`.
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

/* Raised whenever the table or a struct it uses changes; a module built for another number is refused. */
#define TCH_BACKEND_ABI 27u

/* The name of the function that a module exports. */
#define TCH_BACKEND_ENTRY "torchium_backend_entry"

/* What the library offers to a backend. */
typedef struct tch_backend_host {
    size_t struct_size;
    /* Records the message of tch_last_error, printf-style, and returns `status`. */
    tch_status (*fail)(tch_status status, const char *format, ...);
    /* Host memory through the library's allocator. */
    void *(*allocate)(size_t bytes, size_t alignment);
    void (*release)(void *pointer, size_t bytes);
    /* The CPU's table, for a backend whose memory the host reads: it may take any chapter or entry from it. NULL when
     * the CPU's own is asked for. */
    const struct tch_backend *cpu;
} tch_backend_host;

typedef struct tch_backend {
    uint32_t abi;      /* TCH_BACKEND_ABI */
    size_t table_size; /* sizeof(tch_backend) */
    const char *name;  /* "cpu", "cuda" */
    int32_t device_type;
    int32_t priority;    /* "auto" takes the available backend with the highest */
    int32_t host_memory; /* 1: its memory can be read by the host, and operations are done when they return */

    const tch_device_ops *device;
    const tch_matrix_ops *matrix;
    const tch_update_ops *update;       /* or NULL */
    const tch_sample_ops *sample;       /* or NULL */
    const tch_network_ops *network;     /* or NULL */
    const tch_recording_ops *recording; /* or NULL */
    const tch_kernel_ops *kernel;       /* or NULL */
} tch_backend;

/* Returns the module's table, or NULL with a sentence in `reason` when it cannot work. */
typedef const tch_backend *tch_backend_entry(uint32_t abi, const tch_backend_host *host, char *reason,
                                             size_t reason_size);

TCH_BEGIN_DECLS

/* For a module to define; the library itself has none. */
TCH_API tch_backend_entry torchium_backend_entry;

TCH_END_DECLS

#endif
