/* A CSV file cut into cells: strings inside the file's own text, in rows of equal length. */
#ifndef CLI_CSV_TABLE_H
#define CLI_CSV_TABLE_H

#include <stddef.h>

#include "dataset.h"

typedef struct csv_table {
    const char *path; /* for messages */
    char *text;       /* the whole file, ending in a zero byte */
    size_t size;
    char separator;
    int64_t rows, cols;
    char **cells;   /* rows by cols, into `text` */
    int64_t *lines; /* the line in the file of each row, from 1 */
    int64_t room;   /* of rows in the two lists */
} csv_table;

/* Reads the file. The table is to be released in either case. */
bool csv_table_read(const char *path, csv_table *table, dataset_error *error);
void csv_table_release(csv_table *table);

#endif
