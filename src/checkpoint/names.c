/* A hash table with open addressing. The hash is the name as a polynomial at a random point of the integers modulo 2^61
 * - 1: two names of n bytes collide for at most n of all points. */
#include "names.h"

#include <string.h>

#include "core/allocator.h"
#include "core/list.h"
#include "core/status.h"
#include "core/system.h"

#define FIRST_ROOM 32
#define PRIME (((uint64_t)1 << 61) - 1)

__extension__ typedef unsigned __int128 wide;

/* (a b + c) mod 2^61 - 1, for a and b below 2^61 and a small c: bits above 2^61 are added to the lowest. */
static uint64_t multiply_add(uint64_t a, uint64_t b, uint64_t c)
{
    wide product = (wide)a * b + c;
    uint64_t sum = (uint64_t)(product & PRIME) + (uint64_t)(product >> 61);
    return sum >= PRIME ? sum - PRIME : sum;
}

static uint64_t hash_of(uint64_t key, const char *name)
{
    uint64_t hash = 1;
    for (const unsigned char *at = (const unsigned char *)name; *at != '\0'; at++) {
        hash = multiply_add(hash, key, *at);
    }
    return hash;
}

/* The slot of the name, or the free slot for it. */
static tchi_name *slot_of(const tchi_names *names, const char *name, uint64_t hash)
{
    uint64_t mask = (uint64_t)names->room - 1;
    uint64_t at = hash & mask;
    while (names->slots[at].name != NULL &&
           (names->slots[at].hash != hash || strcmp(names->slots[at].name, name) != 0)) {
        at = (at + 1) & mask;
    }
    return &names->slots[at];
}

int64_t tchi_names_find(const tchi_names *names, const char *name)
{
    if (names->count == 0) {
        return -1;
    }
    const tchi_name *slot = slot_of(names, name, hash_of(names->key, name));
    return slot->name != NULL ? slot->number : -1;
}

static tch_status grow_slots(tchi_names *names)
{
    tchi_names larger = *names;
    larger.room = names->room > 0 ? 2 * names->room : FIRST_ROOM;
    if (names->room == 0) {
        larger.key = tchi_random_bits() % PRIME;
    }
    size_t bytes = (size_t)larger.room * sizeof *larger.slots;
    TCHI_TRY(tchi_host_take(bytes, "a checkpoint's names", &larger.slots));
    for (int64_t i = 0; i < names->room; i++) {
        const tchi_name *old = &names->slots[i];
        if (old->name != NULL) {
            *slot_of(&larger, old->name, old->hash) = *old;
        }
    }
    tchi_host_release(names->slots, (size_t)names->room * sizeof *names->slots);
    *names = larger;
    return TCH_OK;
}

tch_status tchi_names_reserve(tchi_names *names)
{
    return 2 * (names->count + 1) > names->room ? grow_slots(names) : TCH_OK;
}

tch_status tchi_names_add(tchi_names *names, const char *name, int64_t number)
{
    TCHI_TRY(tchi_names_reserve(names));
    uint64_t hash = hash_of(names->key, name);
    *slot_of(names, name, hash) = (tchi_name){name, hash, number};
    names->count++;
    return TCH_OK;
}

void tchi_names_release(tchi_names *names)
{
    tchi_host_release(names->slots, (size_t)names->room * sizeof *names->slots);
    *names = (tchi_names){0};
}
