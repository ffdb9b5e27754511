/* Tensor maps: the arguments of cuTensorMapEncodeTiled in the emulator's format, read by device/hopper.cuh. */
#ifndef EMULATOR_CUDA_TYPEDEFS_H
#define EMULATOR_CUDA_TYPEDEFS_H

#include <stdint.h>

typedef uint64_t cuuint64_t;
typedef uint32_t cuuint32_t;
typedef enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 } CUresult;
typedef enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9
} CUtensorMapDataType;
typedef enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE } CUtensorMapInterleave;
typedef enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B = 3 } CUtensorMapSwizzle;
typedef enum CUtensorMapL2promotion {
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
} CUtensorMapL2promotion;
typedef enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE } CUtensorMapFloatOOBfill;

/* Three dimensions, the first along a row; sizes and boxes in elements, strides of the others in bytes. */
typedef struct CUtensorMap {
    char *address;
    int64_t sizes[3], strides[2];
    int32_t box[3];
    int32_t element_bytes, known;
} CUtensorMap;

typedef CUresult (*PFN_cuTensorMapEncodeTiled_v12000)(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                                      void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                                      const cuuint32_t *box, const cuuint32_t *every,
                                                      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                                      CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

#endif
