/* Process groups: the ranks among which an optimizer divides its work and state.
 *
 * The library has no transport. A group is a table of collectives: callbacks (tch_comm_create), NCCL, loaded at run
 * time (tch_comm_create_nccl), or MPI, by a header compiled with the program's mpi.h (comm_mpi.h).
 *
 * Every rank of a group makes the same calls in the same order. A group serves one optimizer at a time, from one
 * thread. */
#ifndef TORCHIUM_COMM_H
#define TORCHIUM_COMM_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/status.h>

typedef struct tch_comm tch_comm;

/* Bytes and offsets that one rank exchanges with each rank, itself included, in one all_to_all; contiguous, in the
 * order of ranks. */
typedef struct tch_comm_counts {
    const int64_t *send_offsets, *send_bytes, *receive_offsets, *receive_bytes; /* [ranks] */
} tch_comm_counts;

/* The collectives of a group, on memory of the context that uses it. `stream` is that context's stream (a
 * cudaStream_t), on which work is queued in order; NULL on the CPU, where a collective is complete when it returns. A
 * status other than TCH_OK ends the step and marks the optimizer failed. */
typedef struct tch_comm_ops {
    size_t struct_size;
    /* receive[r * bytes .. (r + 1) * bytes) = send of rank r */
    tch_status (*all_gather)(void *user, const void *send, void *receive, int64_t bytes, void *stream);
    tch_status (*all_to_all)(void *user, const void *send, void *receive, const tch_comm_counts *counts, void *stream);
    /* values[k] = its maximum over all ranks */
    tch_status (*reduce_max)(void *user, int32_t *values, int32_t count, void *stream);
    /* OPTIONAL: the first asynchronous error since the last call. Never waits. */
    tch_status (*check)(void *user);
    /* OPTIONAL: aborts pending collectives of this rank, so that nothing waits for failed ranks. */
    void (*abort)(void *user);
    /* OPTIONAL: the group is destroyed. */
    void (*release)(void *user);
} tch_comm_ops;

typedef struct tch_comm_config {
    size_t struct_size;
    const char *name; /* in messages; NULL for "group" */
    int32_t rank, size;
    const tch_comm_ops *ops; /* copied */
    void *user;
    int64_t bucket_bytes; /* exchanges are split into at most eight buckets of at least this size, to overlap
                             communication with computation; 0: 64 MiB */
    int64_t span_bytes;   /* replicated parameters of at least this size with elementwise updates have their state
                             sharded; 0: 4 MiB */
} tch_comm_config;
#define TCH_COMM_CONFIG_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_comm_config), NULL, 0, 1, NULL, NULL, 0, 0                                                          \
    }

TCH_BEGIN_DECLS

/* A group over the caller's callbacks. */
TCH_API tch_status tch_comm_create(const tch_comm_config *config, tch_comm **comm);

/* NULL is allowed. Destroy optimizers that use it first. */
TCH_API void tch_comm_destroy(tch_comm *comm);

TCH_API int32_t tch_comm_rank(const tch_comm *comm); /* -1 for NULL */
TCH_API int32_t tch_comm_size(const tch_comm *comm); /* 0 for NULL */

/* Collectives so far, and the bytes this rank sent to others. */
typedef struct tch_comm_traffic {
    size_t struct_size;
    int64_t collectives;
    int64_t bytes;
} tch_comm_traffic;
#define TCH_COMM_TRAFFIC_INIT                                                                                          \
    {                                                                                                                  \
        sizeof(tch_comm_traffic), 0, 0                                                                                 \
    }
TCH_API tch_status tch_comm_get_traffic(const tch_comm *comm, tch_comm_traffic *traffic);

/* === NCCL ========================================================================================================= */

/* One rank creates an id and sends it to the others by any means; then all call tch_comm_create_nccl, each with a
 * context on its own GPU. Uses the file that TORCHIUM_NCCL names, or the NCCL that the process has loaded, or
 * libnccl.so.2. Asynchronous errors are reported at the next step. */
#define TCH_NCCL_ID_BYTES 128
TCH_API tch_status tch_comm_nccl_id(char id[TCH_NCCL_ID_BYTES]);
TCH_API tch_status tch_comm_create_nccl(tch_context *context, const char id[TCH_NCCL_ID_BYTES], int32_t rank,
                                        int32_t size, tch_comm **comm);

typedef struct tch_comm_nccl_config {
    size_t struct_size;
    const char *name; /* in messages; NULL for "NCCL" */
    double timeout_s; /* half an hour by default; 0: waits for a missing rank without limit */
} tch_comm_nccl_config;
#define TCH_COMM_NCCL_CONFIG_INIT                                                                                      \
    {                                                                                                                  \
        sizeof(tch_comm_nccl_config), NULL, 1800.0                                                                     \
    }

/* The same with options; `config` NULL: the defaults.
 *
 * With a timeout the communicator is non-blocking (NCCL 2.14 or later) and a thread watches it. If the ranks do not
 * connect, a collective does not start, no queued collective completes within timeout_s, NCCL reports an error, or a
 * rank of the same machine gives up or dies, the communicator is aborted: its kernels on the GPU end, waits for the GPU
 * return, and the current or next call of the group returns TCH_ERR_COMM with the group, the operation and the reason.
 * The state is then undefined: load a checkpoint.
 *
 * The timeout of a collective starts when it is queued and includes earlier work on the same stream: choose more than
 * the longest computation between two collectives. With an older NCCL host calls may block without limit,
 * initialization above all. Collectives captured in a CUDA graph are not watched. */
TCH_API tch_status tch_comm_create_nccl_with(tch_context *context, const char id[TCH_NCCL_ID_BYTES], int32_t rank,
                                             int32_t size, const tch_comm_nccl_config *config, tch_comm **comm);

TCH_END_DECLS

#endif
