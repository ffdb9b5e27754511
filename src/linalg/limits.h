/* Sizes the libraries below can take: their integers have 32 bits. */
#ifndef TCHI_LIMITS_H
#define TCHI_LIMITS_H

#include <stdint.h>

#include <torchium/tensor.h>

#define TCHI_MOST_SIZE INT32_MAX

/* Rows and columns of one matrix fit in 32 bits; a batch may be as large as it likes. */
tch_status tchi_check_matrix_size(const tch_tensor *tensor, const char *name);

#endif
