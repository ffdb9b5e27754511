/* The built-in data set: the digits 0 to 9 as a pen draws them, bent, tilted, smeared and noisy. */
#ifndef CLI_DIGITS_H
#define CLI_DIGITS_H

#include "dataset.h"

enum { DIGITS_SIZE = 20 }; /* pixels, both ways */

/* `count` images from number `first` on. Image i depends on the seed and i alone, so that disjoint ranges give disjoint
 * sets of one kind: [0, n) to train with and [n, n + m) to test. Its label is drawn too. Pixels are from 0 to 1. */
bool digits_draw(int64_t first, int64_t count, uint64_t seed, dataset *data, dataset_error *error);

#endif
