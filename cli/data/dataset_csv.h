/* Data sets from CSV files. */
#ifndef CLI_DATASET_CSV_H
#define CLI_DATASET_CSV_H

#include "dataset.h"

typedef struct csv_options {
    char separator;    /* 0: of comma, semicolon, tab and bar the one most frequent in the first line */
    const char *label; /* column of the labels: its name in the header, or its number from 1; NULL is the last */
    bool no_header;    /* the first line holds data; otherwise it does if all its cells but the label are numbers */
} csv_options;

/* Features are numbers; labels are any text, and the classes are the different ones: in the order of their values where
 * all are numbers, else alphabetical. Fields may be quoted ("a ""b"", c"), lines end in LF or CRLF, empty lines are
 * passed over. Missing, non-numeric and infinite features are refused with their line and column. `options` may be
 * NULL. */
bool dataset_read_csv(const char *path, const csv_options *options, dataset *data, dataset_error *error);

#endif
