/* Kernels for norms and squares of per-sample gradients on CUDA; sample_norms.cu chooses among them, and the benchmark
 * times each. A norm kernel stores the contribution of tile i of sample b to the squared norm in parts[b tiles + i], in
 * float64; they are summed afterwards in that order. In Gram form a norm is a sum of terms <a_s, a_t> <g_s, g_t> of
 * both signs; `sizes` is NULL or receives, in the same places, the sums of their absolute values, which show
 * cancellation.
 *
 * With `bias` A has an additional column of ones for the gradient of the bias. In Gram form it adds 1 to every
 * <a_s, a_t> at no cost; in tile form it would add a row of tiles, so sums over positions are used instead. Positions
 * that pad a tile have G = 0, so a 1 there has no effect. */
#ifndef TCHI_CUDA_SAMPLE_NORMS_H
#define TCHI_CUDA_SAMPLE_NORMS_H

#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"

#define TCHI_SAMPLE_PLAIN_TILE 64

/* --- norms ------------------------------------------------------------------------------------------------------- */

typedef enum tchi_norms_form {
    TCHI_NORMS_GRAM, /* <A A', G G'>, Gram matrices over positions */
    TCHI_NORMS_TILES /* |G' A|^2, tile by tile */
} tchi_norms_form;

/* Any type. */
tch_status tchi_cuda_sample_norms_plain(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        bool gram, bool bias, double *parts, double *sizes, int64_t *tiles);
/* Tile form of the listed matrices only, with their usual indices in `parts`; the length of the list is on the
 * device. */
tch_status tchi_cuda_sample_norms_listed(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                         bool bias, const int32_t *list, const int32_t *count, double *parts,
                                         int64_t *tiles);
/* Half types, and float32 rounded to TF32, by mma.sync: sm_80 and newer. */
tch_status tchi_cuda_sample_norms_mma(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                      tchi_norms_form form, bool bias, double *parts, double *sizes, int64_t *tiles);
#define TCHI_NORMS_TILE_COLS 256

/* Tile form of half types by wgmma, tiles of 128 by 256: sm_90, with rows aligned to 16 bytes. */
bool tchi_cuda_sample_norms_wgmma_supported(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g);
tch_status tchi_cuda_sample_norms_wgmma(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        double *parts, int64_t *tiles);

/* Gram kernels of float32 for sm_90: tiles of 128 by 128, k-tiles of 32 elements per row. */
#define TCHI_GRAM_TILE 128
#define TCHI_GRAM_DEPTH 32
#define TCHI_GRAM_KTILE_BYTES (TCHI_GRAM_TILE * TCHI_GRAM_DEPTH * 4)

/* Gram form of float32 by wgmma, for sm_90 and rows aligned to 16 bytes: rounded to TF32, or with split operands at the
 * accuracy of float32, which uses cuBLAS's workspace if there is one. */
bool tchi_cuda_sample_norms_gram_supported(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g);
tch_status tchi_cuda_sample_norms_wgmma_gram(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                             bool bias, double *parts, double *sizes, int64_t *tiles);
tch_status tchi_cuda_sample_norms_split(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        bool bias, double *parts, double *sizes, int64_t *tiles);

/* The parts of tiles. */
typedef struct tchi_norms_parts {
    const double *parts;
    int64_t tiles;                         /* per matrix */
    int64_t groups;                        /* matrices per sample */
    const uint32_t *largest_a, *largest_g; /* of scaled copies (fp16_copy.h), or NULL */
} tchi_norms_parts;

/* norms[i] += scale times the sum of the parts of sample i. */
tch_status tchi_cuda_sample_norms_add(const tchi_cuda_state *state, int64_t samples, const tchi_norms_parts *parts,
                                      double scale, double *norms);

/* Tile form of float32, or of half types with unaligned rows, by wgmma on copies in the workspace, including the sum:
 * norms[i] += scale |gradient|^2. */
bool tchi_cuda_sample_norms_fp16_supported(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                           int64_t groups);
tch_status tchi_cuda_sample_norms_fp16(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                       int64_t groups, double scale, double *norms, double *parts);

/* --- squares ----------------------------------------------------------------------------------------------------- */

tch_status tchi_cuda_sample_squares_plain(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                          double scale, double beta, const tch_matrices *out);
#endif
