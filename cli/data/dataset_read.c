/* Finds out which reader a file is for. */
#include "dataset_read.h"

#include <stdio.h>

#include "dataset_idx.h"

/* IDX files begin with two zero bytes, which no text does; gzip has a number of its own. */
bool dataset_read(const char *path, const csv_options *options, dataset *data, dataset_error *error)
{
    unsigned char start[2] = {1, 1};
    *data = (dataset){0};
    FILE *file = dataset_open(path, error);
    if (file == NULL) {
        return false;
    }
    size_t got = fread(start, 1, sizeof start, file);
    fclose(file);
    if (got == sizeof start && ((start[0] == 0 && start[1] == 0) || (start[0] == 0x1f && start[1] == 0x8b))) {
        return dataset_read_idx(path, NULL, data, error);
    }
    return dataset_read_csv(path, options, data, error);
}
