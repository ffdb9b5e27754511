/* Sizes the libraries below can take, whose integers have 32 bits, and numbers that a type can hold. */
#ifndef TCHI_LIMITS_H
#define TCHI_LIMITS_H

#include <stdint.h>

#include <torchium/backend.h>
#include <torchium/tensor.h>

#define TCHI_MOST_SIZE INT32_MAX

/* The largest number that is still finite when it is rounded to this type. */
double tchi_most_number(tch_scalar type);

/* Rows and columns of one matrix fit in 32 bits; a batch may be as large as it likes. */
tch_status tchi_check_matrix_size(const tch_tensor *tensor, const char *name);

#endif
