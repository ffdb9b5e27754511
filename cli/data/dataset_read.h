/* Data sets from files of either kind. */
#ifndef CLI_DATASET_READ_H
#define CLI_DATASET_READ_H

#include "dataset.h"
#include "dataset_csv.h"

/* Reads a CSV or an IDX file, whichever the first bytes say. `options` is for CSV, may be NULL. */
bool dataset_read(const char *path, const csv_options *options, dataset *data, dataset_error *error);

#endif
