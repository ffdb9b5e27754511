/* Element types and views used by all chapters of the operations table. */
#ifndef TORCHIUM_BACKEND_TYPES_H
#define TORCHIUM_BACKEND_TYPES_H

#include <stdint.h>

/* Element types inside the table. */
typedef enum tch_scalar {
    TCH_SCALAR_F64 = 0,
    TCH_SCALAR_F32 = 1,
    TCH_SCALAR_F16 = 2,
    TCH_SCALAR_BF16 = 3,
    TCH_SCALAR_I32 = 4,
    TCH_SCALAR_I64 = 5,
    TCH_SCALAR_BF16X2 = 6, /* split, see tch_matrices; only in scratch and where an entry allows it */
    TCH_SCALAR_COUNT = 7
} tch_scalar;

/* A batch of row-major matrices: element (i, j) of matrix b is at data[b * stride + i * ld + j]. Inputs may have a
 * stride of 0, which repeats one matrix.
 *
 * The split type TCH_SCALAR_BF16X2 represents a number as the sum of two bfloat16, its rounding and the rounding of the
 * remainder: 17 bits, multiplied by three bfloat16 products. Matrix b is two contiguous planes: the high parts at
 * (bfloat16 *)data + 2 * b * stride + i * ld + j, the low parts `stride` elements after them. */
typedef struct tch_matrices {
    void *data;
    tch_scalar type;
    int64_t rows, cols;
    int64_t ld;
    int64_t batch;
    int64_t stride;
} tch_matrices;

/* An array of any rank, for copies: strides in elements. */
typedef struct tch_array {
    void *data;
    tch_scalar type;
    int32_t rank; /* at most TCH_MAX_RANK */
    const int64_t *shape;
    const int64_t *strides;
} tch_array;

#endif
