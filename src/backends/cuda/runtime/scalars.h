/* Sizes of element types and their names in CUDA's libraries, for the host side. Kernels use elements.cuh. */
#ifndef TCHI_CUDA_SCALARS_H
#define TCHI_CUDA_SCALARS_H

#include <library_types.h> /* cudaDataType */

#include <torchium/backend.h>

/* Bytes of an element of a float type. */
static inline int64_t tchi_cuda_scalar_size(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? 8 : type == TCH_SCALAR_F32 ? 4 : 2;
}

static inline cudaDataType tchi_cuda_data_type(tch_scalar type)
{
    switch (type) {
    case TCH_SCALAR_F64:
        return CUDA_R_64F;
    case TCH_SCALAR_F16:
        return CUDA_R_16F;
    case TCH_SCALAR_BF16:
        return CUDA_R_16BF;
    default:
        return CUDA_R_32F;
    }
}

/* Where matrix `index` of a batch begins. */
static inline void *tchi_cuda_matrix_at(const tch_matrices *x, int64_t index)
{
    return (char *)x->data + index * x->stride * tchi_cuda_scalar_size(x->type);
}

#endif
