/* Rectangles of a sharded tensor. Elements of the whole are numbered in row-major order; a rectangle is a sequence of
 * equally long runs of them. So a rectangle of [10, 18] can be read from rectangles of [10, 3, 3, 2], which has the
 * same elements. */
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

/* Whether it is inside, and the elements of the whole can be numbered. */
bool tchi_slice_is_sound(const tchi_slice *slice);

int64_t tchi_slice_count(const tchi_slice *slice);

/* The same elements in the same order: equal except for sizes of 1, or one merges dimensions of the other. */
bool tchi_slice_same_whole(const tchi_slice *a, const tchi_slice *b);

bool tchi_slice_equal(const tchi_slice *a, const tchi_slice *b);

/* Whether two rectangles of one whole share an element. */
bool tchi_slice_overlap(const tchi_slice *a, const tchi_slice *b);

/* Calls visit for all runs common to `from` and `to`: `count` elements, contiguous in both, from `in_from` and `in_to`
 * on, in ascending order. *shared is their total. */
typedef tch_status (*tchi_slice_visit)(void *user, int64_t in_from, int64_t in_to, int64_t count);
tch_status tchi_slice_meet(const tchi_slice *from, const tchi_slice *to, tchi_slice_visit visit, void *user,
                           int64_t *shared);

#endif
