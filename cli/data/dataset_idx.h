/* Data sets from IDX files, the format of MNIST. */
#ifndef CLI_DATASET_IDX_H
#define CLI_DATASET_IDX_H

#include "dataset.h"

/* Images and labels of unsigned bytes, as MNIST has them; pixels become 0 to 1. `labels_path` may be NULL where the
 * name of the images' file tells it: "train-images-idx3-ubyte" has "train-labels-idx1-ubyte" beside it. */
bool dataset_read_idx(const char *images_path, const char *labels_path, dataset *data, dataset_error *error);

#endif
