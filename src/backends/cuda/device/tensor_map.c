/* Tensor maps, encoded by a driver function that is looked up by name: the module does not link with the driver
 * library. */
#include "tensor_map.h"

#include <pthread.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static PFN_cuTensorMapEncodeTiled_v12000 encode;

/* Leaves `encode` NULL if the driver is older than the function. */
static void find_encode(void)
{
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) {
        memcpy(&encode, &function, sizeof encode);
    } else {
        cudaGetLastError();
    }
}

/* Sizes and strides have limits of 2^32 elements and 2^40 bytes. */
int tchi_cuda_tensor_map_supported(const tch_matrices *m, int bytes)
{
    const int64_t most = (int64_t)1 << 31;
    int unit = 16 / bytes; /* elements in 16 bytes */
    int typed = bytes == 4 ? m->type == TCH_SCALAR_F32 : m->type == TCH_SCALAR_BF16 || m->type == TCH_SCALAR_F16;
    int aligned = (uintptr_t)m->data % 16 == 0 && m->ld % unit == 0 && (m->batch == 1 || m->stride % unit == 0);
    int inside = m->rows < most && m->cols < most && m->batch < most && m->ld < most * 128 && m->stride < most * 128;
    int distinct = m->batch == 1 || m->stride > 0;
    return typed && aligned && inside && distinct && m->rows > 0 && m->cols > 0 && m->batch > 0;
}

tch_status tchi_cuda_tensor_map(const tch_matrices *m, int box_rows, CUtensorMap *map)
{
    pthread_once(&once, find_encode);
    if (encode == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_BACKEND, "the driver has no cuTensorMapEncodeTiled, expected CUDA 12.0");
    }
    int64_t stride = m->batch == 1 ? m->ld : m->stride; /* any valid value, for a single matrix */
    const cuuint64_t sizes[] = {(cuuint64_t)m->cols, (cuuint64_t)m->rows, (cuuint64_t)m->batch};
    const cuuint32_t bytes = m->type == TCH_SCALAR_F32 ? 4 : 2;
    const cuuint64_t strides[] = {(cuuint64_t)m->ld * bytes, (cuuint64_t)stride * bytes};
    const cuuint32_t box[] = {TCHI_CUDA_BOX_COLS * 2 / bytes, (cuuint32_t)box_rows, 1};
    const cuuint32_t every[] = {1, 1, 1};
    CUtensorMapDataType type = m->type == TCH_SCALAR_F32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                               : m->type == TCH_SCALAR_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    /* 256-byte promotion reads beyond rows that are not multiples of it: n = 1000, k = 1544 took 116 us vs 99. */
    CUtensorMapL2promotion promotion =
        strides[0] % 256 == 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    CUresult result = encode(map, type, 3, m->data, sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        return tchi_cuda_host->fail(TCH_ERR_BACKEND, "cuTensorMapEncodeTiled: error %d of the driver", (int)result);
    }
    return TCH_OK;
}
