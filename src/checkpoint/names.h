/* A hash table from names to numbers, for tensors and settings. The hash has a random key, so that a hostile file
 * cannot cause collisions. */
#ifndef TCHI_CHECKPOINT_NAMES_H
#define TCHI_CHECKPOINT_NAMES_H

#include <stdint.h>

#include <torchium/status.h>

typedef struct tchi_name {
    const char *name; /* owned by the caller; NULL in a free slot */
    uint64_t hash;
    int64_t number;
} tchi_name;

typedef struct tchi_names {
    tchi_name *slots;
    int64_t room; /* 0 or a power of two, at least twice `count` */
    int64_t count;
    uint64_t key; /* drawn with the first name */
} tchi_names;

/* The number of a name, or -1. */
int64_t tchi_names_find(const tchi_names *names, const char *name);

/* Reserves a slot, so that adding cannot fail. */
tch_status tchi_names_reserve(tchi_names *names);

/* Adds a new name by reference. */
tch_status tchi_names_add(tchi_names *names, const char *name, int64_t number);

void tchi_names_release(tchi_names *names);

#endif
