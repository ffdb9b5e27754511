/* Parts of a matrix on their way between host and device: a tile is a block, and a block that goes through page-locked
 * memory is cut into chunks that fit there. */
#ifndef TCHI_CUDA_STREAMED_BLOCKS_H
#define TCHI_CUDA_STREAMED_BLOCKS_H

#include "staging.h"

/* A part of a matrix, as it is stored. */
typedef struct tchi_block {
    int64_t row, col, rows, cols;
} tchi_block;

static inline int64_t tchi_at_most(int64_t size, int64_t limit)
{
    return size < limit ? size : limit;
}

/* The part of op(X) at (row, col) in the order of storage. */
static inline tchi_block tchi_block_stored(int64_t row, int64_t rows, int64_t col, int64_t cols, int32_t transpose)
{
    return transpose ? (tchi_block){col, row, cols, rows} : (tchi_block){row, col, rows, cols};
}

/* Columns and rows of a chunk: whole rows of the block where one fits in a chunk. */
static inline tchi_block tchi_chunk_shape(const tchi_block *b, int64_t size)
{
    int64_t cols = tchi_at_most(b->cols, TCHI_STAGING_CHUNK_BYTES / size);
    int64_t rows = tchi_at_most(b->rows, TCHI_STAGING_CHUNK_BYTES / (cols * size));
    return (tchi_block){0, 0, rows, cols};
}

static inline int64_t tchi_chunk_count(const tchi_block *b, int64_t size)
{
    if (b->rows == 0 || b->cols == 0) {
        return 0;
    }
    tchi_block shape = tchi_chunk_shape(b, size);
    return (b->rows + shape.rows - 1) / shape.rows * ((b->cols + shape.cols - 1) / shape.cols);
}

/* Where chunk `index` of block b begins inside the block, and its size. */
static inline tchi_block tchi_chunk_at(const tchi_block *b, int64_t size, int64_t index)
{
    tchi_block shape = tchi_chunk_shape(b, size);
    int64_t across = (b->cols + shape.cols - 1) / shape.cols;
    tchi_block p = {index / across * shape.rows, index % across * shape.cols, 0, 0};
    p.rows = tchi_at_most(shape.rows, b->rows - p.row);
    p.cols = tchi_at_most(shape.cols, b->cols - p.col);
    return p;
}

#endif
