/* Where a command computes: a context on the chosen device and one on the CPU, with the tensors commands need. */
#ifndef CLI_WORKPLACE_H
#define CLI_WORKPLACE_H

#include <torchium/torchium.h>

#include "try.h"

typedef struct workplace {
    tch_context *device; /* what is measured runs here */
    tch_context *host;   /* inputs are made and results looked at here */
} workplace;

tch_status workplace_open(const char *device, workplace *place);
void workplace_close(workplace *place);

/* A tensor [batch, rows, cols] of the context's device with undefined contents. */
tch_status workplace_matrices(tch_context *context, tch_dtype dtype, int64_t batch, int64_t rows, int64_t cols,
                              tch_tensor **tensor);

/* A tensor [count] with undefined contents. */
tch_status workplace_vector(tch_context *context, tch_dtype dtype, int64_t count, tch_tensor **tensor);

/* Matrix `index` of a contiguous batch [batch, rows, cols], as a tensor [rows, cols] that shares its memory. */
tch_tensor workplace_slice(const tch_tensor *batch, int64_t index);

/* Fills an output with NaN: whatever a call fails to write will show. */
tch_status workplace_poison(const workplace *place, tch_tensor *output);

/* A copy on the host: of int32 as it is, of everything else as float64. */
tch_status workplace_fetch(const workplace *place, const tch_tensor *tensor, tch_tensor **host);

/* The entry `index` of a tensor that workplace_fetch made. */
double workplace_entry(const tch_tensor *host, int64_t index);

#endif
