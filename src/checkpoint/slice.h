/* Rectangles of a tensor that is saved in shards. The elements of the whole are numbered row by row; a rectangle is a
 * number of runs of them, all of one length and one after the other. By those numbers a rectangle of [10, 18] is read
 * out of rectangles of [10, 3, 3, 2], which are the same elements. */
#ifndef TCHI_CHECKPOINT_SLICE_H
#define TCHI_CHECKPOINT_SLICE_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/status.h>

/* Sizes [start, start + size) of a tensor of `shape`. */
typedef struct tchi_slice {
    int32_t ndim;
    const int64_t *shape, *start, *size;
} tchi_slice;

/* Lies inside, and the elements of the whole can be numbered. */
bool tchi_slice_is_sound(const tchi_slice *slice);

int64_t tchi_slice_count(const tchi_slice *slice);

/* The same elements in the same order: equal but for sizes of 1, or one merges dimensions of the other. */
bool tchi_slice_same_whole(const tchi_slice *a, const tchi_slice *b);

bool tchi_slice_equal(const tchi_slice *a, const tchi_slice *b);

/* Whether two rectangles of one whole share an element. */
bool tchi_slice_overlap(const tchi_slice *a, const tchi_slice *b);

/* Calls visit for everything that `from` and `to` share: `count` elements, which follow each other in both, from the
 * element `in_from` of the one and `in_to` of the other on. In rising order of both. *shared is how many in all. */
typedef tch_status (*tchi_slice_visit)(void *user, int64_t in_from, int64_t in_to, int64_t count);
tch_status tchi_slice_meet(const tchi_slice *from, const tchi_slice *to, tchi_slice_visit visit, void *user,
                           int64_t *shared);

#endif
