/* Elements of cuBLAS and cuSOLVER matrices, as doubles. */
#ifndef EMULATOR_ELEMENTS_H
#define EMULATOR_ELEMENTS_H

#include <library_types.h>

#include "support/elements.h"

static inline tch_dtype dtype_of(cudaDataType type)
{
    return type == CUDA_R_64F   ? TCH_FLOAT64
           : type == CUDA_R_32F ? TCH_FLOAT32
           : type == CUDA_R_16F ? TCH_FLOAT16
                                : TCH_BFLOAT16;
}

static inline size_t element_bytes(cudaDataType type)
{
    return dtype_of(type).bits / 8;
}

static inline double load_element(const void *data, cudaDataType type, int64_t i)
{
    return test_decode(dtype_of(type), (const char *)data + (size_t)i * element_bytes(type));
}

static inline void store_element(void *data, cudaDataType type, int64_t i, double value)
{
    test_encode(dtype_of(type), value, (char *)data + (size_t)i * element_bytes(type));
}

#endif
