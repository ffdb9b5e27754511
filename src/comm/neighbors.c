#define _GNU_SOURCE /* F_OFD_SETLK */
#include "neighbors.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { NOT_HERE, HERE, LEFT, GAVE_UP };
enum { MOST_RANKS = 3072 };

typedef struct tchi_neighbor_page {
    char why[512]; /* of the first that gave up */
    atomic_int gives_up;
    atomic_uchar states[MOST_RANKS];
} tchi_neighbor_page;

static void name_file(char name[64], const unsigned char *id, size_t bytes)
{
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ id[i]) * 0x100000001B3u;
    }
    snprintf(name, 64, "/dev/shm/torchium-%016llx", (unsigned long long)hash);
}

static struct flock lock_of(int32_t rank)
{
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

void tchi_neighbors_open(tchi_neighbors *neighbors, const void *id, size_t bytes, int32_t rank, int32_t size)
{
    struct flock lock = lock_of(rank);
    void *page = MAP_FAILED;
    *neighbors = (tchi_neighbors){.file = -1, .rank = rank, .size = size};
    name_file(neighbors->name, id, bytes);
    if (size > 1 && size <= MOST_RANKS) {
        neighbors->file = open(neighbors->name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    }
    if (neighbors->file >= 0 && ftruncate(neighbors->file, sizeof *neighbors->page) == 0 &&
        fcntl(neighbors->file, F_OFD_SETLK, &lock) == 0) {
        page = mmap(NULL, sizeof *neighbors->page, PROT_READ | PROT_WRITE, MAP_SHARED, neighbors->file, 0);
    }
    if (page == MAP_FAILED) {
        tchi_neighbors_close(neighbors);
        return;
    }
    neighbors->page = page;
    neighbors->page->states[rank] = HERE;
}

void tchi_neighbors_met(const tchi_neighbors *neighbors)
{
    if (neighbors->page != NULL) {
        (void)unlink(neighbors->name);
    }
}

void tchi_neighbors_close(tchi_neighbors *neighbors)
{
    if (neighbors->page != NULL) {
        unsigned char here = HERE;
        atomic_compare_exchange_strong(&neighbors->page->states[neighbors->rank], &here, LEFT);
        munmap(neighbors->page, sizeof *neighbors->page);
    }
    if (neighbors->file >= 0) {
        close(neighbors->file);
    }
    neighbors->page = NULL;
    neighbors->file = -1;
}

void tchi_neighbors_give_up(const tchi_neighbors *neighbors, const char *why)
{
    int none = 0;
    tchi_neighbor_page *page = neighbors->page;
    if (page != NULL && atomic_compare_exchange_strong(&page->gives_up, &none, 1)) {
        snprintf(page->why, sizeof page->why, "rank %d gave up: %s", neighbors->rank, why);
        page->states[neighbors->rank] = GAVE_UP;
    }
}

/* The lock of a process is released when it ends, however it ends. */
static bool has_died(const tchi_neighbors *neighbors, int32_t rank)
{
    struct flock lock = lock_of(rank);
    return neighbors->page->states[rank] == HERE && fcntl(neighbors->file, F_OFD_GETLK, &lock) == 0 &&
           lock.l_type == F_UNLCK && neighbors->page->states[rank] == HERE;
}

bool tchi_neighbors_lost(const tchi_neighbors *neighbors, char *why, size_t size)
{
    for (int32_t r = 0; neighbors->page != NULL && r < neighbors->size; r++) {
        if (neighbors->page->states[r] == GAVE_UP) {
            snprintf(why, size, "%s", neighbors->page->why);
            return true;
        }
        if (r != neighbors->rank && has_died(neighbors, r)) {
            snprintf(why, size, "rank %d has ended without leaving the group", r);
            return true;
        }
    }
    return false;
}
