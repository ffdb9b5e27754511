/* Data sets from CSV files. */
#ifndef CLI_DATASET_CSV_H
#define CLI_DATASET_CSV_H

#include "dataset.h"

/* Features are numbers; labels are any text, and the classes are the different ones: in the order of their values where
 * all are numbers, else alphabetical. `label` is the column of the labels, by its name in the header or its number from
 * 1; NULL is the last. The separator is the one of comma, semicolon, tab and bar that the first line has most of; the
 * first line is data where all its cells but the label are numbers. Fields may be quoted ("a ""b"", c"), lines end in
 * LF or CRLF, empty lines are skipped. Missing, non-numeric and infinite features are refused with their line and
 * column. */
bool dataset_read_csv(const char *path, const char *label, dataset *data, dataset_error *error);

#endif
