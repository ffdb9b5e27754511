/* Data sets for training: a table of float32 features with one integer label per row, in host memory. Functions that
 * can fail return false with a message in `error`, and leave nothing to free. */
#ifndef CLI_DATASET_H
#define CLI_DATASET_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct dataset {
    int64_t rows, cols;
    bool images; /* columns are pixels, with one scale */
    int32_t classes;
    float *features; /* rows by cols, contiguous */
    int32_t *labels; /* 0 to classes - 1 */
} dataset;

typedef struct dataset_error {
    char text[512]; /* the problem, its place and a remedy */
} dataset_error;

/* Reads a CSV file. Features are numbers; labels are any text, and classes are ordered by value if all are numbers,
 * otherwise alphabetically. `label` is the label's column, by its name in the header or its number from 1; NULL: the
 * last. The separator is the most frequent of comma, semicolon, tab and bar in the first line, which is data if all its
 * cells except the label are numbers. Fields may be quoted ("a ""b"", c"), lines end in LF or CRLF, empty lines are
 * skipped. Missing, non-numeric and infinite features are errors. */
bool dataset_read_csv(const char *path, const char *label, dataset *data, dataset_error *error);

/* Draws digits: `count` images from number `first` on, with pixels from 0 to 1. Image i and its label depend only on
 * the seed and i, so disjoint ranges give disjoint sets. Clean ones have no clutter, uneven light or noise. */
enum { DIGITS_SIZE = 20 }; /* pixels, width and height */
bool digits_draw(int64_t first, int64_t count, uint64_t seed, bool clean, dataset *data, dataset_error *error);

/* Splits the rows in a random order that depends only on the seed: round(test_fraction * rows) go to `test`, at least
 * one to each. `all` is unchanged. */
bool dataset_split(const dataset *all, double test_fraction, uint64_t seed, dataset *train, dataset *test,
                   dataset_error *error);

/* Standardizes every column to mean 0 and variance 1 in `train`, and `test` (may be NULL) with the same shift and
 * scale. Constant columns become 0. All pixels of images have one scale. */
void dataset_standardize(dataset *train, dataset *test);

/* A random order of 0 to rows - 1 that depends only on the seed. */
void dataset_order(int64_t rows, uint64_t seed, int64_t *order);

/* Copies rows order[0] to order[count - 1]. */
void dataset_gather(const dataset *data, const int64_t *order, int64_t count, float *features, int32_t *labels);

/* Frees everything; the data set is then empty. */
void dataset_release(dataset *data);

/* --- for constructors of data sets -------------------------------------------------------------------------------- */

/* Allocates by the fields rows, cols and classes; features and labels are undefined. False, with the size in the
 * message, if out of memory. */
bool dataset_allocate(dataset *data, dataset_error *error);

/* Opens a file for reading. Pipes, devices and folders are rejected without blocking. NULL with the message. */
FILE *dataset_open(const char *path, dataset_error *error);

/* Sets the message, printf-style, and returns false. */
bool dataset_fail(dataset_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Random bits of a seed and a counter: SplitMix64. */
uint64_t dataset_bits(uint64_t seed, uint64_t counter);

#endif
