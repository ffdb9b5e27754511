/* The data of a session: read or drawn, split, and copied to the device once per epoch; batches are views, without
 * copies. */
#include "data.h"

#include <stdlib.h>
#include <string.h>

#include "terminal/output.h"

/* --samples may exceed the memory, and the system may overcommit. There are three copies: the rows, those of an epoch,
 * and those on the device. */
static int check_samples(const train_plan *plan)
{
    tch_context *host = NULL;
    tch_memory_info memory = TCH_MEMORY_INFO_INIT;
    double needed = 3.0 * (double)plan->samples * (DIGITS_SIZE * DIGITS_SIZE + 1) * sizeof(float);
    char need[32], available[32];
    if (plan->data != NULL) {
        return CLI_OK;
    }
    bool known = tch_context_create("cpu", &host) == TCH_OK && tch_memory_get_info(host, &memory) == TCH_OK;
    tch_context_destroy(host);
    if (!known) {
        return output_fail_library("train");
    }
    if (needed <= (double)memory.free) {
        return CLI_OK;
    }
    return output_fail("train", "--samples %lld needs about %s, and this machine has %s free", (long long)plan->samples,
                       output_bytes(needed, need), output_bytes((double)memory.free, available));
}

static bool read_rows(const train_plan *plan, dataset *all, dataset_error *error)
{
    if (plan->data != NULL) {
        return dataset_read_csv(plan->data, plan->label_column, all, error);
    }
    return digits_draw(0, plan->samples, (uint64_t)plan->seed, plan->autoencode, all, error);
}

static uint64_t fingerprint_of(const dataset *data)
{
    uint64_t hash = dataset_bits((uint64_t)data->rows, (uint64_t)data->cols);
    for (int64_t i = 0; i < data->rows * data->cols; i++) {
        uint32_t bits;
        memcpy(&bits, &data->features[i], sizeof bits);
        hash = dataset_bits(hash, bits);
    }
    for (int64_t i = 0; i < data->rows; i++) {
        hash = dataset_bits(hash, (uint64_t)data->labels[i]);
    }
    return hash;
}

/* Host memory of an epoch. */
static bool allocate_epoch(train_data *data)
{
    size_t rows = (size_t)data->train.rows, cols = (size_t)data->train.cols;
    data->epoch_number = -1;
    data->order = malloc(rows * sizeof *data->order);
    data->features = malloc(rows * cols * sizeof *data->features);
    data->labels = malloc(rows * sizeof *data->labels);
    return data->order != NULL && data->features != NULL && data->labels != NULL;
}

int train_data_load(const train_plan *plan, train_data *data)
{
    dataset all = {0};
    dataset_error error = {""};
    *data = (train_data){.epoch_number = -1};
    int status = check_samples(plan);
    if (status != CLI_OK) {
        return status;
    }
    if (!read_rows(plan, &all, &error)) {
        return output_fail("train", "%s", error.text);
    }
    data->fingerprint = fingerprint_of(&all);
    bool one_class = !plan->autoencode && all.classes < 2;
    bool dealt =
        !one_class && dataset_split(&all, plan->test_fraction, (uint64_t)plan->seed, &data->train, &data->test, &error);
    dataset_release(&all);
    if (one_class) {
        return output_fail("train", "all rows have the same label: there is nothing to classify");
    }
    if (!dealt) {
        return output_fail("train", "%s", error.text);
    }
    data->outputs = plan->autoencode ? data->train.cols : data->train.classes;
    dataset_standardize(&data->train, &data->test);
    if (!allocate_epoch(data)) {
        train_data_release(data);
        return output_fail("train", "out of memory for a second copy of %lld rows of %lld numbers",
                           (long long)data->train.rows, (long long)data->train.cols);
    }
    return CLI_OK;
}

/* --- on the device ----------------------------------------------------------------------------------------------- */

static void destroy_rows(train_rows *rows)
{
    tch_tensor_destroy(rows->inputs);
    tch_tensor_destroy(rows->labels);
    *rows = (train_rows){NULL, NULL};
}

static tch_status create_rows(tch_context *context, int64_t count, int64_t cols, train_rows *rows)
{
    const int64_t shape[] = {count, cols};
    CLI_TRY(tch_tensor_create_uninitialized(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &rows->inputs));
    return tch_tensor_create_uninitialized(context, TCH_INT32, 1, shape, TCH_CONTIGUOUS, &rows->labels);
}

static tch_status fill_rows(tch_context *context, float *features, int32_t *labels, train_rows *rows)
{
    tch_tensor inputs = tch_tensor_view(features, TCH_FLOAT32, 2, rows->inputs->shape);
    tch_tensor classes = tch_tensor_view(labels, TCH_INT32, 1, rows->labels->shape);
    CLI_TRY(tch_tensor_copy(context, rows->inputs, &inputs));
    return tch_tensor_copy(context, rows->labels, &classes);
}

int train_data_upload(tch_context *context, train_data *data)
{
    const dataset *train = &data->train, *test = &data->test;
    int64_t sample = train->rows < TRAIN_SAMPLE ? train->rows : TRAIN_SAMPLE; /* in random order */
    if (create_rows(context, test->rows, test->cols, &data->test_rows) ||
        create_rows(context, sample, train->cols, &data->sample) ||
        create_rows(context, train->rows, train->cols, &data->epoch) ||
        fill_rows(context, test->features, test->labels, &data->test_rows) ||
        fill_rows(context, train->features, train->labels, &data->sample)) {
        return output_fail_library("train");
    }
    return CLI_OK;
}

void train_data_release(train_data *data)
{
    destroy_rows(&data->test_rows);
    destroy_rows(&data->sample);
    destroy_rows(&data->epoch);
    free(data->order);
    free(data->features);
    free(data->labels);
    data->order = NULL, data->features = NULL, data->labels = NULL;
    dataset_release(&data->train);
    dataset_release(&data->test);
}

void train_data_view(const train_rows *rows, int64_t first, int64_t count, train_batch *batch)
{
    int64_t cols = rows->inputs->shape[1];
    batch->input_shape[0] = batch->label_shape[0] = count;
    batch->input_shape[1] = cols;
    batch->inputs = *rows->inputs;
    batch->inputs.shape = batch->input_shape;
    batch->inputs.strides = NULL;
    batch->inputs.byte_offset += (uint64_t)(first * cols) * sizeof(float);
    batch->labels = *rows->labels;
    batch->labels.shape = batch->label_shape;
    batch->labels.strides = NULL;
    batch->labels.byte_offset += (uint64_t)first * sizeof(int32_t);
}

static tch_status load_epoch(tch_context *context, train_data *data, uint64_t seed, int64_t number)
{
    if (data->epoch_number == number) {
        return TCH_OK;
    }
    dataset_order(data->train.rows, dataset_bits(seed, (uint64_t)number), data->order);
    dataset_gather(&data->train, data->order, data->train.rows, data->features, data->labels);
    data->epoch_number = -1;
    tch_status status = fill_rows(context, data->features, data->labels, &data->epoch);
    data->epoch_number = status ? -1 : number;
    return status;
}

tch_status train_data_batch(tch_context *context, train_data *data, const train_plan *plan, int64_t step,
                            train_batch *batch)
{
    int64_t batches = data->train.rows / plan->batch;
    tch_status status = load_epoch(context, data, (uint64_t)plan->seed, step / batches);
    train_data_view(&data->epoch, step % batches * plan->batch, plan->batch, batch);
    return status;
}
