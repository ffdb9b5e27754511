/* Which architecture a kernel is compiled for, by the GPU and by what NVRTC knows. A decision over numbers alone, so
 * that it can be tested for GPUs and compilers that are not at hand. */
#include "kernel_text.h"

/* From Hopper on an architecture has instructions of its own, which its successors lack: code for the very GPU may use
 * them. */
enum { FIRST_SPECIFIC = 90 };

int tchi_cuda_choose_target(int32_t major, int32_t minor, int32_t count, const int *known, tchi_cuda_target *target)
{
    int32_t gpu = 10 * major + minor;
    int32_t nearest = 0;
    for (int32_t i = 0; i < count; i++) {
        if (known[i] <= gpu && known[i] > nearest) {
            nearest = known[i];
        }
    }
    target->number = nearest;
    target->code = nearest == gpu ? TCHI_CUDA_CODE_CUBIN : TCHI_CUDA_CODE_PTX;
    target->specific = nearest == gpu && gpu >= FIRST_SPECIFIC;
    return nearest != 0;
}
