/* Elements of the matrices that cuBLAS and cuSOLVER are given, as doubles. */
#ifndef EMULATOR_ELEMENTS_H
#define EMULATOR_ELEMENTS_H

#include <stddef.h>
#include <string.h>

#include <library_types.h>

#include "cuda/halves.h"

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint16_t to_f16(float x)
{
    uint32_t sign = bits_of(x) >> 16 & 0x8000u;
    uint32_t size = bits_of(x) & 0x7FFFFFFFu;
    uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3F000000u;
    uint32_t normal = (size + 0xFFFu + (size >> 13 & 1u) - 0x38000000u) >> 13;
    uint32_t rounded = size < 0x38800000u ? small : size >= 0x477FF000u ? 0x7C00u : normal;
    return (uint16_t)(size > 0x7F800000u ? 0x7FFFu : sign | rounded);
}

static inline uint16_t to_bf16(float x)
{
    uint32_t bits = bits_of(x);
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static inline size_t element_bytes(cudaDataType type)
{
    return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2;
}

static inline double load_element(const void *data, cudaDataType type, int64_t i)
{
    switch (type) {
    case CUDA_R_64F:
        return ((const double *)data)[i];
    case CUDA_R_32F:
        return ((const float *)data)[i];
    case CUDA_R_16F:
        return from_f16(((const uint16_t *)data)[i]);
    default:
        return float_of((uint32_t)((const uint16_t *)data)[i] << 16);
    }
}

static inline void store_element(void *data, cudaDataType type, int64_t i, double value)
{
    switch (type) {
    case CUDA_R_64F:
        ((double *)data)[i] = value;
        break;
    case CUDA_R_32F:
        ((float *)data)[i] = (float)value;
        break;
    case CUDA_R_16F:
        ((uint16_t *)data)[i] = to_f16((float)value);
        break;
    default:
        ((uint16_t *)data)[i] = to_bf16((float)value);
    }
}

#endif
