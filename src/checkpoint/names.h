/* Which number a name has: a hash table, for tensors and for settings. A hostile file cannot choose names that collide:
 * the hash has a random key. */
#ifndef TCHI_CHECKPOINT_NAMES_H
#define TCHI_CHECKPOINT_NAMES_H

#include <stdint.h>

#include <torchium/status.h>

typedef struct tchi_name {
    const char *name; /* the owner's; NULL where the slot is free */
    uint64_t hash;
    int64_t number;
} tchi_name;

typedef struct tchi_names {
    tchi_name *slots;
    int64_t room; /* 0 or a power of two, at least twice `count` */
    int64_t count;
    uint64_t key; /* drawn when the first name comes */
} tchi_names;

/* The number of a name, or -1. */
int64_t tchi_names_find(const tchi_names *names, const char *name);

/* Room for one more, so that adding it cannot fail. */
tch_status tchi_names_reserve(tchi_names *names);

/* Adds a name that is not there yet. It is kept by reference. */
tch_status tchi_names_add(tchi_names *names, const char *name, int64_t number);

void tchi_names_release(tchi_names *names);

#endif
