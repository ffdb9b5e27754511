/* The memory of a gradient as rectangles, for operations that treat every element alike and do not care in which order:
 * the search for infinities, the division by a scale. */
#ifndef TCHI_RECTANGLES_H
#define TCHI_RECTANGLES_H

#include <torchium/backend.h>
#include <torchium/tensor.h>

/* How many rectangles the tensor takes: 1 for a dense one, 0 for NULL and for one without elements. */
int64_t tchi_rectangle_count(const tch_tensor *tensor);

/* Writes them, with `grad` pointing to each; returns how many. */
int64_t tchi_list_rectangles(const tch_tensor *tensor, tch_rect *rects);

#endif
