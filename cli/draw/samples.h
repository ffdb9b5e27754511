/* A picture of a data set's first images, for people to look at. */
#ifndef CLI_SAMPLES_H
#define CLI_SAMPLES_H

#include "data/dataset.h"

/* The first rows * columns images side by side as a PNG file, ink dark on white, each of their pixels `zoom` pixels
 * wide. Features are taken to be from 0 to 1: call it before they are standardized. */
bool samples_write_png(const char *path, const dataset *data, int64_t rows, int64_t columns, int64_t zoom,
                       dataset_error *error);

#endif
