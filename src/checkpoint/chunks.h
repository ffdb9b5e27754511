/* Elements of tensors packed into a buffer or out of it. */
#ifndef TCHI_CHECKPOINT_CHUNKS_H
#define TCHI_CHECKPOINT_CHUNKS_H

#include <stdbool.h>

#include "core/tensor.h"

/* Copies elements between host memory and contiguous row-major order. */
void tchi_pack(const tch_tensor *tensor, char *packed);
void tchi_unpack(const tch_tensor *tensor, const char *packed);

/* Whether the tensor's memory equals the bytes in a file. */
bool tchi_is_plain(const tch_tensor *tensor);

/* The size of staging buffers; reasoned, not tuned: a disk of 5 GB/s writes it in 3 ms, a thousand times the cost of a
 * system call or of starting a copy. */
#define TCHI_BUFFER_BYTES ((int64_t)16 << 20)

/* Upper bound of the buffer for this tensor; 0 if it needs none. */
int64_t tchi_buffer_bytes(const tch_tensor *tensor);

#endif
