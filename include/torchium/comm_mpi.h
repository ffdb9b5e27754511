/* A group over MPI, for contexts on the CPU. Header-only: compiled with the program's mpi.h, it works with any MPI, and
 * libtorchium does not depend on one.
 *
 *     MPI_Init(&argc, &argv);
 *     tch_comm *comm;
 *     tch_comm_create_mpi(MPI_COMM_WORLD, &comm);
 *
 * The communicator is duplicated, so that the program's messages cannot match the optimizer's. If a process dies,
 * mpiexec ends the others. */
#ifndef TORCHIUM_COMM_MPI_H
#define TORCHIUM_COMM_MPI_H

#include <limits.h>
#include <stdlib.h>

#include <mpi.h>

#include <torchium/comm.h>

/* Messages are counted in units of 16 bytes, so that MPI's int counts reach 32 GiB. */
#define TCH_MPI_UNIT 16

typedef struct tch_mpi_group {
    MPI_Comm comm;
    MPI_Datatype unit;
    int size;
    int *counts; /* 4 for each rank */
} tch_mpi_group;

static inline tch_status tch_mpi_status(int result)
{
    return result == MPI_SUCCESS ? TCH_OK : TCH_ERR_COMM;
}

static inline tch_status tch_mpi_all_gather(void *user, const void *send, void *receive, int64_t bytes, void *stream)
{
    tch_mpi_group *g = (tch_mpi_group *)user;
    if (stream != NULL || bytes % TCH_MPI_UNIT != 0 || bytes / TCH_MPI_UNIT > INT_MAX) {
        return TCH_ERR_UNSUPPORTED; /* GPU memory, or a message too large */
    }
    int count = (int)(bytes / TCH_MPI_UNIT);
    return tch_mpi_status(MPI_Allgather(send, count, g->unit, receive, count, g->unit, g->comm));
}

static inline tch_status tch_mpi_all_to_all(void *user, const void *send, void *receive, const tch_comm_counts *counts,
                                            void *stream)
{
    tch_mpi_group *g = (tch_mpi_group *)user;
    const int64_t *lists[4] = {counts->send_bytes, counts->send_offsets, counts->receive_bytes,
                               counts->receive_offsets};
    for (int i = 0; i < 4 * g->size; i++) {
        int64_t bytes = lists[i / g->size][i % g->size];
        if (stream != NULL || bytes % TCH_MPI_UNIT != 0 || bytes / TCH_MPI_UNIT > INT_MAX) {
            return TCH_ERR_UNSUPPORTED;
        }
        g->counts[i] = (int)(bytes / TCH_MPI_UNIT);
    }
    const int *c = g->counts;
    return tch_mpi_status(
        MPI_Alltoallv(send, c, c + g->size, g->unit, receive, c + 2 * g->size, c + 3 * g->size, g->unit, g->comm));
}

static inline tch_status tch_mpi_reduce_max(void *user, int32_t *values, int32_t count, void *stream)
{
    tch_mpi_group *g = (tch_mpi_group *)user;
    return stream != NULL ? TCH_ERR_UNSUPPORTED
                          : tch_mpi_status(MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_INT32_T, MPI_MAX, g->comm));
}

static inline void tch_mpi_release(void *user)
{
    tch_mpi_group *g = (tch_mpi_group *)user;
    MPI_Type_free(&g->unit);
    MPI_Comm_free(&g->comm);
    free(g->counts);
    free(g);
}

/* Collective over the communicator. Destroy the group before MPI_Finalize. */
static inline tch_status tch_comm_create_mpi(MPI_Comm comm, tch_comm **group)
{
    static const tch_comm_ops ops = {
        sizeof(tch_comm_ops), tch_mpi_all_gather, tch_mpi_all_to_all, tch_mpi_reduce_max, NULL, NULL, tch_mpi_release};
    tch_comm_config config = TCH_COMM_CONFIG_INIT;
    int rank = 0;
    tch_mpi_group *g = (tch_mpi_group *)calloc(1, sizeof *g);
    MPI_Comm_rank(comm, &rank);
    if (g != NULL) {
        MPI_Comm_size(comm, &g->size);
        g->counts = (int *)calloc(4 * (size_t)g->size, sizeof *g->counts);
    }
    if (g == NULL || g->counts == NULL || MPI_Comm_dup(comm, &g->comm) != MPI_SUCCESS) {
        free(g == NULL ? NULL : g->counts);
        free(g);
        return TCH_ERR_OUT_OF_MEMORY;
    }
    MPI_Comm_set_errhandler(g->comm, MPI_ERRORS_RETURN);
    MPI_Type_contiguous(TCH_MPI_UNIT, MPI_BYTE, &g->unit);
    MPI_Type_commit(&g->unit);
    config.name = "MPI";
    config.rank = rank;
    config.size = g->size;
    config.ops = &ops;
    config.user = g;
    tch_status status = tch_comm_create(&config, group);
    if (status != TCH_OK) {
        tch_mpi_release(g);
    }
    return status;
}

#endif
