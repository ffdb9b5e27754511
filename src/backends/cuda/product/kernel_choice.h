/* Which kernel computes which product: a table printed by `torchium info --kernels`. Independent of CUDA, so the
 * command can link it. */
#ifndef TCHI_CUDA_KERNEL_CHOICE_H
#define TCHI_CUDA_KERNEL_CHOICE_H

#include <torchium/backend.h>

TCH_BEGIN_DECLS

/* The rows of the table. */
typedef enum tchi_kernel {
    TCHI_SYMMETRIC_F64,
    TCHI_SYMMETRIC_PINGPONG,
    TCHI_SYMMETRIC_PINGPONG_SPLIT,
    TCHI_SYMMETRIC_WGMMA,
    TCHI_SYMMETRIC_MMA_128,
    TCHI_SYMMETRIC_MMA_64,
    TCHI_SYMMETRIC_CUBLAS,
    TCHI_SYMMETRIC_ANY,
    TCHI_FACTOR_PINGPONG,
    TCHI_FACTOR_CUBLAS,
    TCHI_TWO_SIDED_TRANSPOSED,
    TCHI_TWO_SIDED_CUBLAS,
    TCHI_SPLIT_PRODUCT,
    TCHI_SPLIT_CUBLAS,
    TCHI_NORMS_WGMMA,
    TCHI_NORMS_FP16,
    TCHI_NORMS_MMA,
    TCHI_NORMS_PLAIN,
    TCHI_GRAM_NORMS_WGMMA,
    TCHI_GRAM_NORMS_SPLIT,
    TCHI_CROSS_MMA,
    TCHI_CROSS_PLAIN,
    TCHI_KERNEL_COUNT
} tchi_kernel;

typedef struct tchi_kernel_row {
    const char *operation, *kernel;
    int32_t major, last_major;    /* of the compute capability, both included */
    int32_t a, c;                 /* sets of types, a bit for each tch_scalar */
    int32_t side, multiple;       /* the rows and columns of C are at least `side`, and multiples of `multiple` */
    int32_t aligned;              /* alignment of every row of A in bytes */
    int32_t tile_rows, tile_cols; /* of C; square ones cover its lower triangle, if it is symmetric */
    int32_t share;                /* C has at least (multiprocessors / share) tiles, where `share` is not 0 */
} tchi_kernel_row;

extern const tchi_kernel_row tchi_kernel_rows[TCHI_KERNEL_COUNT];

/* Whether the row's conditions hold for A and C; C is NULL if the result is not a matrix. */
int tchi_kernel_fits(tchi_kernel kernel, int major, int processors, const tch_matrices *a, const tch_matrices *c);

TCH_END_DECLS

#endif
