/* Small sharded or replicated models: shapes, placements, initial values, gradients, and one rank's part of them. */
#ifndef TORCHIUM_TESTS_PLACED_MODEL_H
#define TORCHIUM_TESTS_PLACED_MODEL_H

#include <stdbool.h>

#include <torchium/torchium.h>

#include "support/comm/pretend_group.h"

enum { PLACED_MOST = 14, PLACED_STEPS = 10, PLACED_ELEMENTS = 12288 };

typedef struct placed_shape {
    int32_t ndim;
    int64_t size[4];
    int32_t elementwise, batch_dims, cut_count;
    int64_t cuts[3];
} placed_shape;

int64_t placed_count(const placed_shape *shape);

/* The shards of a parameter, in `shards`. Returns their number, 0 if replicated. */
typedef int32_t (*placed_how)(const placed_shape *shape, int32_t ranks, tch_shard *shards);

int32_t placed_replicated(const placed_shape *shape, int32_t ranks, tch_shard *shards);
int32_t placed_by_rows(const placed_shape *shape, int32_t ranks, tch_shard *shards);
int32_t placed_flat(const placed_shape *shape, int32_t ranks, tch_shard *shards);       /* rows, in vectors */
int32_t placed_by_columns(const placed_shape *shape, int32_t ranks, tch_shard *shards); /* rows where there are none */

/* Rows over one side of a mesh, and columns over the other, or replicated. */
int32_t placed_by_both(const placed_shape *shape, int32_t ranks, tch_shard *shards);
int32_t placed_in_replicas(const placed_shape *shape, int32_t ranks, tch_shard *shards);

tch_shard placed_whole(const placed_shape *shape, int32_t rank);

/* Dimension k in `parts` parts of equal length, the last ones shorter or empty, as in torch.chunk. */
void placed_cut(tch_shard *shard, int32_t k, int32_t parts, int32_t part);

/* Values shared by all ranks of a test; released by the program, not by a test. */
typedef struct placed_numbers {
    double *start[PLACED_MOST], *gradient[PLACED_STEPS][PLACED_MOST];
} placed_numbers;

void placed_numbers_open(placed_numbers *numbers, uint64_t stream, int32_t count, const placed_shape *shapes,
                         int32_t steps);
void placed_numbers_close(placed_numbers *numbers);

/* Storage for every parameter, owned by the test; each byte is `poison`. */
void placed_room(double **room, int32_t count, const placed_shape *shapes, int poison);

/* Between a tensor and float64 on the host; empty tensors are skipped. */
void placed_move(tch_context *context, tch_tensor *tensor, double *values, bool to_device);

typedef struct placed_config {
    const placed_shape *shapes;
    int32_t count;
    placed_how place;
    tch_dtype dtype;
    const char *prefix; /* of the names */
    double *const *start;
} placed_config;

/* One rank's part. */
typedef struct placed_model {
    const placed_shape *shapes;
    int32_t count;
    tch_tensor *parameter[PLACED_MOST], *gradient[PLACED_MOST];
    tch_shard own[PLACED_MOST], shards[PLACED_MOST][PRETEND_MOST];
    tch_placement placement[PLACED_MOST];
    tch_parameter entries[PLACED_MOST];
    char names[PLACED_MOST][16];
} placed_model;

void placed_open(placed_model *model, const placed_config *config, tch_context *context, int32_t rank, int32_t ranks);
void placed_close(placed_model *model);

/* The rank's part of a parameter as a rectangle, also if it is in a vector. */
tch_tensor placed_part(const placed_model *model, int32_t parameter);

/* Copies the rank's part of a parameter's values. Elements outside the tensor, of an invalid shard, are 0. */
void placed_take(const placed_model *model, int32_t parameter, const double *whole, double *part);

/* The current parameters, copied to `end`. */
void placed_read(const placed_model *model, tch_context *context, double *const *end);

#endif
