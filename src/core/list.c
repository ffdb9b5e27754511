/* An array that grows by doubling. */
#include "list.h"

#include <stdalign.h>
#include <string.h>

#include "allocator.h"
#include "status.h"

#define FIRST_ROOM 16

tch_status tchi_host_take(size_t bytes, const char *what, void *pointer)
{
    void *memory = bytes == 0 ? NULL : tchi_host_allocate(bytes, alignof(max_align_t));
    if (memory == NULL && bytes > 0) {
        return tchi_fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for %s", bytes, what);
    }
    if (memory != NULL) {
        memset(memory, 0, bytes);
    }
    memcpy(pointer, &memory, sizeof memory);
    return TCH_OK;
}

tch_status tchi_list_reserve(tchi_list *list, int64_t count)
{
    if (count <= list->room) {
        return TCH_OK;
    }
    int64_t room = list->room > 0 ? 2 * list->room : FIRST_ROOM;
    room = room < count ? count : room;
    size_t bytes = (size_t)room * list->item_size;
    void *items = tchi_host_allocate(bytes, alignof(max_align_t));
    if (items == NULL) {
        return tchi_fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for a list", bytes);
    }
    if (list->count > 0) {
        memcpy(items, list->items, (size_t)list->count * list->item_size);
    }
    tchi_host_release(list->items, (size_t)list->room * list->item_size);
    list->items = items;
    list->room = room;
    return TCH_OK;
}

tch_status tchi_list_add(tchi_list *list, const void *item)
{
    TCHI_TRY(tchi_list_reserve(list, list->count + 1));
    memcpy((char *)list->items + (size_t)list->count * list->item_size, item, list->item_size);
    list->count++;
    return TCH_OK;
}

void *tchi_list_extend(tchi_list *list)
{
    void *item = (char *)list->items + (size_t)list->count++ * list->item_size;
    memset(item, 0, list->item_size);
    return item;
}

void tchi_list_release(tchi_list *list)
{
    tchi_host_release(list->items, (size_t)list->room * list->item_size);
    list->items = NULL;
    list->count = list->room = 0;
}
