/* A growing array in host memory. Items move when it grows, so refer to them by index. */
#ifndef TCHI_LIST_H
#define TCHI_LIST_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/status.h>

typedef struct tchi_list {
    void *items;
    size_t item_size; /* bytes of one: set when the list is made */
    int64_t count;
    int64_t room; /* items that fit in the memory there is */
} tchi_list;

/* Adds a copy of `item` at the end. */
tch_status tchi_list_add(tchi_list *list, const void *item);

/* Reserves room for `count` items in total. */
tch_status tchi_list_reserve(tchi_list *list, int64_t count);

/* Appends a zeroed item, for which there must be room, and returns it. */
void *tchi_list_extend(tchi_list *list);

/* Frees the array; the list is then empty. */
void tchi_list_release(tchi_list *list);

/* Zeroed host memory in *(void **)pointer; `what` goes into the message. 0 bytes give NULL. */
tch_status tchi_host_take(size_t bytes, const char *what, void *pointer);

/* base + bytes for a base that may be NULL: C does not define NULL + 0. */
static inline char *tchi_offset(void *base, int64_t bytes)
{
    return base == NULL ? NULL : (char *)base + bytes;
}

#endif
