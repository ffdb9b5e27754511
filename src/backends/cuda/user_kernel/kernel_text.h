/* NVRTC's input besides a user's source, and the format of images. */
#ifndef TCHI_CUDA_KERNEL_TEXT_H
#define TCHI_CUDA_KERNEL_TEXT_H

#include <stdint.h>

#include "backends/cuda/runtime/libraries/nvrtc.h"

/* An image: this header, the lowered and the user's name, each NUL-terminated, and from a multiple of 16 bytes the
 * code. */
#define TCHI_CUDA_IMAGE_MAGIC "TCHCUDA1"

typedef enum tchi_cuda_code { TCHI_CUDA_CODE_CUBIN = 0, TCHI_CUDA_CODE_PTX = 1 } tchi_cuda_code;

typedef struct tchi_cuda_image {
    char magic[8];
    uint32_t code; /* a tchi_cuda_code */
    uint32_t lowered_bytes;
    uint32_t name_bytes;
    uint32_t code_offset;
    uint64_t code_bytes; /* to the end of the image; of PTX with its NUL */
} tchi_cuda_image;

/* The array exported by the text after the source: the number of parameters, and the numbers of each. */
#define TCHI_CUDA_SIGNATURE "tchi_signature"

/* --- kernel_headers.c -------------------------------------------------------------------------------------------- */

/* Before every source: names that nvcc has without an #include but NVRTC lacks. */
extern const char tchi_cuda_kernel_prelude[];

/* Common C library headers, as far as meaningful on a GPU. */
enum { TCHI_CUDA_HEADERS = 15 };
extern const char *const tchi_cuda_header_names[TCHI_CUDA_HEADERS];
extern const char *const tchi_cuda_header_texts[TCHI_CUDA_HEADERS];

/* --- kernel_build.c ---------------------------------------------------------------------------------------------- */

/* Compilation target: machine code for the GPU or, if NVRTC does not know it yet, PTX for the newest known one, which
 * the driver compiles. */
typedef struct tchi_cuda_target {
    tchi_cuda_code code;
    int32_t number;   /* 90 for compute capability 9.0 */
    int32_t specific; /* with the instructions that only this architecture has: sm_90a */
} tchi_cuda_target;

/* `known`: the architectures NVRTC knows, ascending. Returns 0 if the GPU is older than all of them. */
int tchi_cuda_choose_target(int32_t major, int32_t minor, int32_t count, const int *known, tchi_cuda_target *target);

#endif
