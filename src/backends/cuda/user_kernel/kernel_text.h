/* What NVRTC is given beside a user's source, and the form in which what it made is kept. */
#ifndef TCHI_CUDA_KERNEL_TEXT_H
#define TCHI_CUDA_KERNEL_TEXT_H

#include <stdint.h>

#include "backends/cuda/runtime/libraries/nvrtc.h"

/* An image: this header, the lowered name and the user's, each with its NUL, and from a multiple of 16 bytes the
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

/* The array that the text behind the source exports: how many parameters there are, and the numbers of each. */
#define TCHI_CUDA_SIGNATURE "tchi_signature"

/* --- kernel_headers.c -------------------------------------------------------------------------------------------- */

/* Declared before every source: the names that nvcc has without an #include, and NVRTC has not. */
extern const char tchi_cuda_kernel_prelude[];

/* Headers of the C library that sources often name, as far as they mean something on a GPU. */
enum { TCHI_CUDA_HEADERS = 15 };
extern const char *const tchi_cuda_header_names[TCHI_CUDA_HEADERS];
extern const char *const tchi_cuda_header_texts[TCHI_CUDA_HEADERS];

/* --- kernel_build.c ---------------------------------------------------------------------------------------------- */

/* What to compile for: machine code for the GPU itself or, where NVRTC does not know the GPU yet, PTX for the newest
 * one that it knows, which the driver finishes. */
typedef struct tchi_cuda_target {
    tchi_cuda_code code;
    int32_t number;   /* 90 for compute capability 9.0 */
    int32_t specific; /* with the instructions that only this architecture has: sm_90a */
} tchi_cuda_target;

/* `known` are the architectures NVRTC knows, ascending. 0 where the GPU is older than all of them. */
int tchi_cuda_choose_target(int32_t major, int32_t minor, int32_t count, const int *known, tchi_cuda_target *target);

#endif
