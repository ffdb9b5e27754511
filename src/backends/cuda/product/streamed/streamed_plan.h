/* How a streamed product is cut into tiles: arithmetic alone, so that it can be tested without a device. */
#ifndef TCHI_CUDA_STREAMED_PLAN_H
#define TCHI_CUDA_STREAMED_PLAN_H

#include <torchium/backend.h>

/* Copies of a tile that the device holds, so that one can be filled or emptied while the other is worked on. */
#define TCHI_STREAM_SLOTS 2

/* The tiles of one operand, in the order in which it is stored. */
typedef struct tchi_stream_tiles {
    int64_t rows, cols;
    int64_t ld;    /* of a tile on the device, in elements */
    int64_t bytes; /* of a slot */
    int32_t slots; /* 0: used where it lies. 1: a single tile, which stays. 2: tiles come and go */
} tchi_stream_tiles;

typedef struct tchi_stream_plan {
    int64_t m, n, k;           /* sizes of the product */
    int64_t tile[3];           /* tiles of m, n and k */
    int32_t columns_outermost; /* of the result's tiles: one column of tiles after the other, else row after row */
    tchi_stream_tiles a, b, c;
    int64_t sum_bytes; /* of a float32 tile in which a half type's result is added up, where k is cut; or 0 */
    int64_t bytes;     /* of scratch in all */
    int64_t traffic;   /* bytes that cross the link, both ways */
} tchi_stream_plan;

/* The plan with the least traffic whose scratch is at most `budget`, and among those the one that starts and ends
 * soonest. Returns 0, with the bytes of the smallest plan in plan->bytes, where none fits. */
int tchi_stream_plan_make(const tch_streamed_product *product, int64_t budget, tchi_stream_plan *plan);

#endif
