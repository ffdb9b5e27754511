/* Groups of processes that train one model together: what an optimizer divides its work among.
 *
 * The library has no transport of its own. A group is a small table of collectives, and there are three ways to get
 * one: from functions of the caller's (tch_comm_create), over NCCL, which is opened at run time (tch_comm_create_nccl),
 * and over MPI, by a header that is compiled with the program's own mpi.h (comm_mpi.h).
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

/* What one rank sends to and receives from each rank, itself included, in one all_to_all: bytes, and where they begin.
 * One rank's follow those of the rank before without a gap. */
typedef struct tch_comm_counts {
    const int64_t *send_offsets, *send_bytes, *receive_offsets, *receive_bytes; /* one for each rank */
} tch_comm_counts;

/* The collectives of a group. Memory is that of the context the group is used with. `stream` is its stream (a
 * cudaStream_t on a GPU): work is queued there, behind what is queued and before what follows; with the CPU it is NULL,
 * and a collective is done when it returns. A status other than TCH_OK ends the step, and the optimizer with it. */
typedef struct tch_comm_ops {
    size_t struct_size;
    /* receive[r * bytes .. (r + 1) * bytes) = what rank r sends, for every r. */
    tch_status (*all_gather)(void *user, const void *send, void *receive, int64_t bytes, void *stream);
    tch_status (*all_to_all)(void *user, const void *send, void *receive, const tch_comm_counts *counts, void *stream);
    /* values[k] = its largest on any rank. */
    tch_status (*reduce_max)(void *user, int32_t *values, int32_t count, void *stream);
    /* OPTIONAL: what went wrong since the last call. Never waits. */
    tch_status (*check)(void *user);
    /* OPTIONAL: ends what is under way on this rank, so that nothing waits for ranks that are gone. */
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
    int64_t bucket_bytes; /* what travels goes in parts of this size or more, at most eight, so that one is under way
                             while the next is worked on; 0: 64 MiB */
    int64_t span_bytes;   /* parameters of this size or more that every rank has, and that are updated element by
                             element, have their state divided too; 0: 4 MiB */
} tch_comm_config;
#define TCH_COMM_CONFIG_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_comm_config), NULL, 0, 1, NULL, NULL, 0, 0                                                          \
    }

TCH_BEGIN_DECLS

/* A group from functions of the caller's. */
TCH_API tch_status tch_comm_create(const tch_comm_config *config, tch_comm **comm);

/* NULL is allowed. Optimizers that use it are destroyed before. */
TCH_API void tch_comm_destroy(tch_comm *comm);

TCH_API int32_t tch_comm_rank(const tch_comm *comm); /* -1 for NULL */
TCH_API int32_t tch_comm_size(const tch_comm *comm); /* 0 for NULL */

/* What went through the group so far: for measuring. Bytes are those that leave this rank. */
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

/* One rank makes an id and hands it to the others by any means; then all of them call tch_comm_create_nccl, each with
 * a context on its own GPU. The NCCL that the process has loaded is used, otherwise libnccl.so.2; where TORCHIUM_NCCL
 * names a file, that one. Errors that NCCL finds later are reported at the next step. */
#define TCH_NCCL_ID_BYTES 128
TCH_API tch_status tch_comm_nccl_id(char id[TCH_NCCL_ID_BYTES]);
TCH_API tch_status tch_comm_create_nccl(tch_context *context, const char id[TCH_NCCL_ID_BYTES], int32_t rank,
                                        int32_t size, tch_comm **comm);

typedef struct tch_comm_nccl_config {
    size_t struct_size;
    const char *name; /* in messages; NULL for "NCCL" */
    double timeout_s; /* 0: a rank that is gone is waited for */
} tch_comm_nccl_config;
#define TCH_COMM_NCCL_CONFIG_INIT                                                                                      \
    {                                                                                                                  \
        sizeof(tch_comm_nccl_config), NULL, 0.0                                                                        \
    }

/* The same with options; `config` NULL: the defaults.
 *
 * With a time set the communicator does not block (NCCL 2.14 and later), and a thread looks on from beside. When the
 * ranks do not meet within timeout_s, when a collective does not begin within it, when no collective that is queued
 * ends for so long, or as soon as NCCL itself reports an error, the communicator is aborted: kernels that wait on the
 * GPU end, so that waits for the GPU return, and the call under way, or the next one of the group, is
 * TCH_ERR_COMM with the group, the operation and the reason. What the step left behind is not to be used: load a
 * checkpoint.
 *
 * The time counts from when a collective is queued, and what is queued before it on the same stream counts too: take
 * more than the longest stretch of work between two collectives. With an earlier NCCL calls of the host may block
 * without end, the meeting of the ranks first of all. Collectives that are captured in a CUDA graph are not watched. */
TCH_API tch_status tch_comm_create_nccl_with(tch_context *context, const char id[TCH_NCCL_ID_BYTES], int32_t rank,
                                             int32_t size, const tch_comm_nccl_config *config, tch_comm **comm);

TCH_END_DECLS

#endif
