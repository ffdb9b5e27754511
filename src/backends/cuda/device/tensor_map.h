/* Descriptions of matrices for the tensor memory accelerator of sm_90, made on the host and handed to kernels by value.
 * The pointer in them is fixed: a description belongs to one launch. */
#ifndef TCHI_CUDA_TENSOR_MAP_H
#define TCHI_CUDA_TENSOR_MAP_H

#include <cudaTypedefs.h>

#include "backends/cuda/cuda.h"

TCH_BEGIN_DECLS

/* Elements of a row in a box, of float32 half as many: 128 bytes, which lie in shared memory with chunk c of row r at
 * place c ^ (r % 8). */
#define TCHI_CUDA_BOX_COLS 64

/* Whether the accelerator can describe a batch of bfloat16 or float16 (`bytes` 2), or one of float32 (4): rows and
 * matrices begin at multiples of 16 bytes. */
int tchi_cuda_tensor_map_supported(const tch_matrices *m, int bytes);

/* Describes it as cols by rows by batch, to be copied in boxes of 128 bytes and `box_rows` rows. */
tch_status tchi_cuda_tensor_map(const tch_matrices *m, int box_rows, CUtensorMap *map);

TCH_END_DECLS

#endif
