/* The ranks of a group on one machine. Collectives do not tell a rank that another has given up or died: its kernels
 * wait on. A file in shared memory, which each rank locks while it is in the group, does. */
#ifndef TCHI_NEIGHBORS_H
#define TCHI_NEIGHBORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct tchi_neighbors {
    struct tchi_neighbor_page *page; /* NULL: there is no such file, and nothing is seen */
    int file;
    int32_t rank, size;
    char name[64];
} tchi_neighbors;

/* The id is the same on all ranks and differs between groups. The file has a name until `met`: all have opened it. */
void tchi_neighbors_open(tchi_neighbors *neighbors, const void *id, size_t bytes, int32_t rank, int32_t size);
void tchi_neighbors_met(const tchi_neighbors *neighbors);
void tchi_neighbors_close(tchi_neighbors *neighbors);

/* Tells the others, whose next look returns the reason. */
void tchi_neighbors_give_up(const tchi_neighbors *neighbors, const char *why);

/* Whether a rank of this machine has given up or died, and why. */
bool tchi_neighbors_lost(const tchi_neighbors *neighbors, char *why, size_t size);

#endif
