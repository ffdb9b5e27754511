/* The data of a session, on the host and on the device. */
#ifndef CLI_TRAIN_DATA_H
#define CLI_TRAIN_DATA_H

#include <stdint.h>

#include <torchium/torchium.h>

#include "data/dataset.h"
#include "plan.h"
#include "try.h"

/* Rows and labels on the device. */
typedef struct train_rows {
    tch_tensor *inputs; /* [rows, cols] float32 */
    tch_tensor *labels; /* [rows] int32 */
} train_rows;

/* Consecutive rows of a train_rows: views, with the shapes they point to. Not to be copied. */
typedef struct train_batch {
    int64_t input_shape[2], label_shape[1];
    tch_tensor inputs, labels;
} train_batch;

typedef struct train_data {
    dataset train, test;  /* host memory, standardized */
    int64_t outputs;      /* of the network: the classes, or the columns for an autoencoder */
    uint64_t fingerprint; /* of the rows as read */
    train_rows test_rows; /* on the device */
    train_rows sample;    /* training rows for the measured loss, at most TRAIN_SAMPLE */
    train_rows epoch;     /* the training rows in the order of epoch `epoch_number` */
    int64_t epoch_number; /* -1 initially */
    int64_t *order;
    float *features; /* staging buffer of one epoch */
    int32_t *labels;
} train_data;
enum { TRAIN_SAMPLE = 4096 };

/* Common to all runs of a session. */
typedef struct train_setup {
    train_plan plan;
    train_data data;
    tch_context *context;
    tch_tensor *totals; /* to which calls of the network add */
} train_setup;

/* Reads or draws the data set and splits it. CLI_OK, or the status of a reported error. */
int train_data_load(const train_plan *plan, train_data *data);
int train_data_upload(tch_context *context, train_data *data);
void train_data_release(train_data *data);

/* A view of `count` rows from `first` on. */
void train_data_view(const train_rows *rows, int64_t first, int64_t count, train_batch *batch);

/* The batch of a step, from 0. The order of an epoch depends only on the seed and its number, so that a run can resume
 * at any step. An incomplete last batch is dropped. */
tch_status train_data_batch(tch_context *context, train_data *data, const train_plan *plan, int64_t step,
                            train_batch *batch);

#endif
