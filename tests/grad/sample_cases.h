/* Convolutions, embeddings and normalization layers for tests of per-sample gradients: sizes 0 and 1, edges of tiles,
 * every kind of padding, 1 to 3 dimensions. */
#ifndef TORCHIUM_TESTS_SAMPLE_CASES_H
#define TORCHIUM_TESTS_SAMPLE_CASES_H

#include <torchium/grad.h>

typedef struct conv_size {
    int32_t dims;
    int64_t shape[5];
    int64_t outputs, groups;
    int64_t kernel[3], stride[3], dilation[3], before[3], after[3];
    tch_padding padding;
} conv_size;

static const conv_size convolutions[] = {
    {1, {3, 2, 7}, 3, 1, {3}, {0}, {0}, {0}, {0}, TCH_PADDING_ZEROS},
    {1, {2, 4, 65}, 6, 2, {5}, {2}, {3}, {4}, {3}, TCH_PADDING_ZEROS},
    {1, {2, 3, 300}, 2, 1, {290}, {3}, {0}, {1}, {0}, TCH_PADDING_ZEROS},
    {1, {2, 3, 9}, 3, 3, {3}, {1}, {2}, {3}, {4}, TCH_PADDING_CIRCULAR},
    {2, {3, 3, 5, 6}, 4, 1, {3, 2}, {1, 1}, {1, 1}, {1, 0}, {1, 1}, TCH_PADDING_ZEROS},
    {2, {2, 4, 8, 8}, 8, 4, {3, 3}, {2, 1}, {1, 2}, {2, 1}, {0, 3}, TCH_PADDING_ZEROS},
    {2, {2, 6, 7, 5}, 6, 6, {3, 3}, {0, 0}, {0, 0}, {1, 1}, {1, 1}, TCH_PADDING_ZEROS},
    {2, {2, 3, 6, 7}, 6, 3, {1, 1}, {0, 0}, {0, 0}, {0, 0}, {0, 0}, TCH_PADDING_ZEROS},
    {2, {3, 17, 4, 4}, 5, 1, {1, 1}, {2, 2}, {0, 0}, {0, 0}, {0, 0}, TCH_PADDING_ZEROS},
    {2, {2, 2, 4, 5}, 3, 1, {3, 3}, {1, 2}, {1, 1}, {3, 2}, {2, 4}, TCH_PADDING_REFLECT},
    {2, {2, 2, 4, 5}, 2, 2, {3, 3}, {2, 1}, {2, 1}, {6, 2}, {2, 7}, TCH_PADDING_REPLICATE},
    {2, {2, 2, 4, 5}, 3, 1, {3, 3}, {1, 1}, {1, 2}, {4, 5}, {1, 3}, TCH_PADDING_CIRCULAR},
    {2, {1, 3, 8, 8}, 4, 1, {8, 8}, {0, 0}, {0, 0}, {0, 0}, {0, 0}, TCH_PADDING_ZEROS},
    {2, {2, 1, 20, 20}, 2, 1, {17, 17}, {3, 3}, {0, 0}, {0, 0}, {0, 0}, TCH_PADDING_ZEROS},
    {3, {2, 2, 4, 3, 5}, 3, 1, {2, 3, 2}, {1, 1, 1}, {1, 1, 1}, {0, 1, 0}, {1, 1, 0}, TCH_PADDING_ZEROS},
    {3, {2, 4, 5, 4, 6}, 4, 2, {2, 2, 3}, {2, 1, 2}, {1, 2, 1}, {1, 1, 2}, {2, 0, 1}, TCH_PADDING_REFLECT},
    {3, {1, 2, 3, 4, 3}, 2, 2, {3, 1, 2}, {1, 1, 1}, {1, 1, 2}, {1, 2, 3}, {2, 0, 1}, TCH_PADDING_CIRCULAR},
    {3, {0, 2, 3, 4, 3}, 2, 1, {3, 1, 2}, {1, 1, 1}, {1, 1, 1}, {1, 0, 0}, {0, 0, 0}, TCH_PADDING_ZEROS},
};

typedef enum token_mix { TOKENS_ANY, TOKENS_EQUAL, TOKENS_OUTSIDE } token_mix;

typedef struct kind_size {
    tch_layer_kind kind;
    int32_t ndim; /* of the input */
    int64_t shape[5];
    int64_t rows, cols, padding; /* EMBEDDING */
    token_mix mix;
    int32_t normalized; /* LAYER_NORM, RMS_NORM */
    int64_t groups;     /* GROUP_NORM */
    double mean;        /* of the inputs, with standard deviation 1 */
} kind_size;

/* clang-format off */
#define EMBEDDING(ndim, rows, cols, padding, mix, ...)                                                                 \
    {TCH_LAYER_EMBEDDING, ndim, {__VA_ARGS__}, rows, cols, padding, mix, 0, 0, 0.0}
#define NORM(kind, ndim, normalized, groups, mean, ...)                                                                \
    {TCH_LAYER_##kind, ndim, {__VA_ARGS__}, 0, 0, 0, TOKENS_ANY, normalized, groups, mean}
/* clang-format on */

static const kind_size kinds[] = {
    EMBEDDING(2, 5, 4, -1, TOKENS_ANY, 3, 7),
    EMBEDDING(2, 1, 1, -1, TOKENS_ANY, 2, 1),
    EMBEDDING(2, 1, 3, 0, TOKENS_ANY, 2, 4), /* the only row is padding */
    EMBEDDING(2, 11, 65, 3, TOKENS_ANY, 4, 33),
    EMBEDDING(2, 300, 17, -1, TOKENS_ANY, 1, 130),
    EMBEDDING(1, 70000, 3, 69999, TOKENS_ANY, 5),
    EMBEDDING(3, 9, 257, -1, TOKENS_ANY, 2, 3, 4),
    EMBEDDING(2, 6, 5, 2, TOKENS_OUTSIDE, 3, 19),
    EMBEDDING(2, 7, 33, -1, TOKENS_EQUAL, 3, 65),
    EMBEDDING(2, 5, 4, -1, TOKENS_ANY, 0, 3),
    EMBEDDING(2, 5, 4, -1, TOKENS_ANY, 3, 0),
    NORM(LAYER_NORM, 3, 1, 0, 0.5, 3, 5, 17),
    NORM(LAYER_NORM, 2, 1, 0, 0.5, 4, 1),
    NORM(LAYER_NORM, 4, 2, 0, 0.0, 2, 3, 4, 5),
    NORM(LAYER_NORM, 4, 3, 0, 0.0, 3, 3, 4, 5),
    NORM(LAYER_NORM, 5, 1, 0, -2.0, 2, 2, 3, 2, 7),
    NORM(LAYER_NORM, 3, 1, 0, 1e4, 2, 9, 300),
    NORM(LAYER_NORM, 3, 1, 0, 0.0, 0, 4, 3),
    NORM(LAYER_NORM, 3, 1, 0, 0.0, 3, 0, 4),
    NORM(LAYER_NORM, 2, 1, 0, 0.0, 1, 768),
    NORM(RMS_NORM, 3, 1, 0, 0.5, 3, 5, 17),
    NORM(RMS_NORM, 2, 1, 0, 0.0, 5, 1),
    NORM(RMS_NORM, 4, 2, 0, 3.0, 2, 3, 5, 3),
    NORM(RMS_NORM, 3, 1, 0, 1e4, 2, 2, 257),
    NORM(RMS_NORM, 2, 1, 0, 0.0, 0, 6),
    NORM(GROUP_NORM, 3, 0, 1, 0.5, 3, 6, 5),
    NORM(GROUP_NORM, 3, 0, 2, 0.5, 3, 6, 5),
    NORM(GROUP_NORM, 4, 0, 6, 0.0, 2, 6, 3, 4),
    NORM(GROUP_NORM, 2, 0, 2, 0.0, 3, 4),
    NORM(GROUP_NORM, 2, 0, 4, 0.0, 3, 4), /* one element per group: normalized to 0 */
    NORM(GROUP_NORM, 4, 0, 2, 1.0, 2, 4, 1, 1),
    NORM(GROUP_NORM, 5, 0, 3, -1.0, 2, 6, 3, 5, 2),
    NORM(GROUP_NORM, 3, 0, 3, 1e4, 2, 3, 300),
    NORM(GROUP_NORM, 3, 0, 2, 0.0, 2, 4, 0),
    NORM(GROUP_NORM, 3, 0, 1, 0.0, 0, 4, 5),
};

#endif
