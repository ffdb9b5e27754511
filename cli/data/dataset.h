/* Data sets for training: a table of float32 features with one integer label per row, in host memory. Functions that
 * can fail return false with a sentence in `error`, and then leave nothing to free. */
#ifndef CLI_DATASET_H
#define CLI_DATASET_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct dataset {
    int64_t rows, cols;
    bool images; /* columns are pixels, all on one scale */
    int32_t classes;
    float *features; /* rows by cols, without gaps */
    int32_t *labels; /* 0 to classes - 1 */
} dataset;

typedef struct dataset_error {
    char text[512]; /* what is wrong, where, and what to do about it */
} dataset_error;

/* Reads a CSV file (csv.c). Features are numbers; labels are any text, and the classes are the different ones: in the
 * order of their values where all are numbers, else alphabetical. `label` is the column of the labels, by its name in
 * the header or its number from 1; NULL is the last. The separator is the one of comma, semicolon, tab and bar that the
 * first line has most of; the first line is data where all its cells but the label are numbers. Fields may be quoted
 * ("a ""b"", c"), lines end in LF or CRLF, empty lines are skipped. Missing, non-numeric and infinite features are
 * refused. */
bool dataset_read_csv(const char *path, const char *label, dataset *data, dataset_error *error);

/* Draws digits (digits.c): `count` images from number `first` on, with pixels from 0 to 1. Image i and its label depend
 * on the seed and i alone, so that disjoint ranges give disjoint sets of one kind. Clean ones have no clutter, uneven
 * light or noise. */
enum { DIGITS_SIZE = 20 }; /* pixels, both ways */
bool digits_draw(int64_t first, int64_t count, uint64_t seed, bool clean, dataset *data, dataset_error *error);

/* Deals the rows out in a random order that depends on the seed alone: round(test_fraction * rows) of them to `test`,
 * at least one to each. `all` is left as it is. */
bool dataset_split(const dataset *all, double test_fraction, uint64_t seed, dataset *train, dataset *test,
                   dataset_error *error);

/* Shifts and scales every column to mean 0 and variance 1 in `train`, and `test` (may be NULL) by the same numbers.
 * Columns that are constant become 0. Images are scaled by one number for all of their pixels. */
void dataset_standardize(dataset *train, dataset *test);

/* A random order of 0 to rows - 1, from the seed alone. */
void dataset_order(int64_t rows, uint64_t seed, int64_t *order);

/* Rows order[0] to order[count - 1], one after the other. */
void dataset_gather(const dataset *data, const int64_t *order, int64_t count, float *features, int32_t *labels);

/* Frees everything and leaves an empty data set. */
void dataset_release(dataset *data);

/* --- for those who make data sets -------------------------------------------------------------------------------- */

/* Takes memory for the fields rows, cols and classes that are set: features and labels are undefined.
 * False, with the size in the message, when it is not to be had. */
bool dataset_allocate(dataset *data, dataset_error *error);

/* Opens a file to read. What is not a regular file, such as a pipe, a device or a folder, is refused without waiting
 * for it. NULL with the message. */
FILE *dataset_open(const char *path, dataset_error *error);

/* Sets the message, printf-style, and returns false. */
bool dataset_fail(dataset_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Bits that depend on the seed and the counter alone: SplitMix64. */
uint64_t dataset_bits(uint64_t seed, uint64_t counter);

#endif
