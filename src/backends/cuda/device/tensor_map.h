/* TMA descriptors of matrices for sm_90, created on the host and passed to kernels by value. They contain the pointer:
 * a descriptor belongs to one launch. */
#ifndef TCHI_CUDA_TENSOR_MAP_H
#define TCHI_CUDA_TENSOR_MAP_H

#include <cudaTypedefs.h>

#include "backends/cuda/cuda.h"

TCH_BEGIN_DECLS

/* Elements of a box row, half as many of float32: 128 bytes, swizzled in shared memory so that chunk c of row r is at c
 * ^ (r % 8). */
#define TCHI_CUDA_BOX_COLS 64

/* Whether TMA supports a batch of bfloat16 or float16 (`bytes` 2), or of float32 (4): rows and matrices aligned to 16
 * bytes. */
int tchi_cuda_tensor_map_supported(const tch_matrices *m, int bytes);

/* Describes it as cols by rows by batch, to be copied in boxes of 128 bytes and `box_rows` rows. */
tch_status tchi_cuda_tensor_map(const tch_matrices *m, int box_rows, CUtensorMap *map);

TCH_END_DECLS

#endif
