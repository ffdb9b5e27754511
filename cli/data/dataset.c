/* Data sets in memory: allocation, random orders, splits, scaling. Random numbers depend only on a seed and a counter,
 * so every machine gets the same rows. */
#define _POSIX_C_SOURCE 200809L
#include "dataset.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool dataset_fail(dataset_error *error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return false;
}

uint64_t dataset_bits(uint64_t seed, uint64_t counter)
{
    uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

bool dataset_allocate(dataset *data, dataset_error *error)
{
    const int64_t most = INT64_MAX / 16;
    bool countable = data->cols == 0 || data->rows <= most / data->cols;
    if (countable) {
        data->features = malloc((size_t)(data->rows * data->cols) * sizeof *data->features + 1);
        data->labels = malloc((size_t)data->rows * sizeof *data->labels + 1);
    }
    if (!countable || data->features == NULL || data->labels == NULL) {
        double bytes = 4.0 * (double)data->rows * ((double)data->cols + 1.0);
        dataset_fail(error, "out of memory: a data set of %lld rows and %lld columns needs %.3g bytes",
                     (long long)data->rows, (long long)data->cols, bytes);
        dataset_release(data);
        return false;
    }
    return true;
}

void dataset_release(dataset *data)
{
    free(data->features);
    free(data->labels);
    *data = (dataset){0};
}

/* --- orders and splits ------------------------------------------------------------------------------------------- */

/* Fisher-Yates; the bias of the remainder is below rows / 2^64. */
void dataset_order(int64_t rows, uint64_t seed, int64_t *order)
{
    for (int64_t i = 0; i < rows; i++) {
        order[i] = i;
    }
    for (int64_t i = rows - 1; i > 0; i--) {
        int64_t j = (int64_t)(dataset_bits(seed, (uint64_t)i) % (uint64_t)(i + 1));
        int64_t kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

void dataset_gather(const dataset *data, const int64_t *order, int64_t count, float *features, int32_t *labels)
{
    for (int64_t i = 0; i < count; i++) {
        const float *row = data->features + order[i] * data->cols;
        memcpy(features + i * data->cols, row, (size_t)data->cols * sizeof *row);
        labels[i] = data->labels[order[i]];
    }
}

/* Copies the rows of an order. */
static bool select_rows(const dataset *all, const int64_t *order, int64_t count, dataset *part, dataset_error *error)
{
    *part = (dataset){.rows = count, .cols = all->cols, .images = all->images, .classes = all->classes};
    if (!dataset_allocate(part, error)) {
        return false;
    }
    dataset_gather(all, order, count, part->features, part->labels);
    return true;
}

bool dataset_split(const dataset *all, double test_fraction, uint64_t seed, dataset *train, dataset *test,
                   dataset_error *error)
{
    *train = *test = (dataset){0};
    if (!(test_fraction > 0 && test_fraction < 1)) {
        return dataset_fail(error, "the fraction of rows to test with is %g, expected more than 0 and less than 1",
                            test_fraction);
    }
    if (all->rows < 2) {
        return dataset_fail(error, "%lld rows cannot be split into rows to train and rows to test with",
                            (long long)all->rows);
    }
    int64_t *order = malloc((size_t)all->rows * sizeof *order);
    if (order == NULL) {
        return dataset_fail(error, "out of memory: %zu bytes for an order of rows", (size_t)all->rows * sizeof *order);
    }
    int64_t tested = (int64_t)llround(test_fraction * (double)all->rows);
    tested = tested < 1 ? 1 : tested > all->rows - 1 ? all->rows - 1 : tested;
    dataset_order(all->rows, seed, order);
    bool good = select_rows(all, order, tested, test, error) &&
                select_rows(all, order + tested, all->rows - tested, train, error);
    free(order);
    if (!good) {
        dataset_release(train);
        dataset_release(test);
    }
    return good;
}

/* --- scaling ----------------------------------------------------------------------------------------------------- */

typedef struct scaling {
    double mean, factor;
} scaling;

/* Standardizes columns [first, first + count) together. The mean is subtracted before squaring, so that a large mean
 * loses no digits; the rest of a constant column is rounding, and is set to 0. */
static scaling measure_columns(const dataset *data, int64_t first, int64_t count)
{
    double n = (double)data->rows * (double)count;
    double sum = 0;
    double squares = 0;
    for (int64_t i = 0; i < data->rows; i++) {
        for (int64_t j = first; j < first + count; j++) {
            sum += (double)data->features[i * data->cols + j];
        }
    }
    double mean = sum / n;
    for (int64_t i = 0; i < data->rows; i++) {
        for (int64_t j = first; j < first + count; j++) {
            double d = (double)data->features[i * data->cols + j] - mean;
            squares += d * d;
        }
    }
    double deviation = sqrt(squares / n);
    return (scaling){mean, deviation > 1e-7 * fabs(mean) ? 1.0 / deviation : 0.0};
}

static void rescale_columns(dataset *data, int64_t first, int64_t count, scaling by)
{
    for (int64_t i = 0; i < data->rows; i++) {
        for (int64_t j = first; j < first + count; j++) {
            float *value = &data->features[i * data->cols + j];
            *value = (float)(((double)*value - by.mean) * by.factor);
        }
    }
}

void dataset_standardize(dataset *train, dataset *test)
{
    int64_t together = train->images ? train->cols : 1;
    for (int64_t first = 0; first < train->cols && train->rows > 0; first += together) {
        scaling by = measure_columns(train, first, together);
        rescale_columns(train, first, together, by);
        if (test != NULL) {
            rescale_columns(test, first, together, by);
        }
    }
}

/* --- files ------------------------------------------------------------------------------------------------------- */

static const char *kind_of(const struct stat *facts)
{
    return S_ISDIR(facts->st_mode)    ? "a folder"
           : S_ISFIFO(facts->st_mode) ? "a pipe"
           : S_ISSOCK(facts->st_mode) ? "a socket"
                                      : "a device";
}

/* O_NONBLOCK: opening a pipe must not block; a socket cannot be opened. */
FILE *dataset_open(const char *path, dataset_error *error)
{
    struct stat facts;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    int problem = errno;
    bool known = (file >= 0 ? fstat(file, &facts) : stat(path, &facts)) == 0;
    FILE *stream = file >= 0 && known && S_ISREG(facts.st_mode) ? fdopen(file, "rb") : NULL;
    if (stream != NULL) {
        return stream;
    }
    if (known && !S_ISREG(facts.st_mode)) {
        dataset_fail(error, "%.300s: is not a regular file but %s", path, kind_of(&facts));
    } else {
        dataset_fail(error, "%.300s: %s", path, strerror(file < 0 ? problem : errno));
    }
    if (file >= 0) {
        close(file);
    }
    return NULL;
}
