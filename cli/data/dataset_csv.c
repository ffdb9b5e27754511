/* CSV files as data sets: which line is a header, which column holds the labels, what the classes are. Whatever is
 * wrong is reported with its line and column. */
#include "dataset_csv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csv_table.h"

#define MOST_CLASSES 100000

/* --- columns ----------------------------------------------------------------------------------------------------- */

static const char *cell_at(const csv_table *t, int64_t row, int64_t col)
{
    return t->cells[row * t->cols + col];
}

static bool is_number(const char *text, double *value)
{
    char *end;
    *value = strtod(text, &end);
    return end != text && *end == '\0';
}

/* The column with this number, counted from 1 in the text and from 0 here; -1 where the text is no such number. */
static int64_t numbered_column(const csv_table *t, const char *text)
{
    int64_t number = 0;
    if (text[0] == '\0' || text[strspn(text, "0123456789")] != '\0') {
        return -1;
    }
    for (; *text != '\0' && number <= t->cols; text++) {
        number = 10 * number + (*text - '0');
    }
    return number <= t->cols ? number - 1 : -1;
}

/* A number from 1 to the number of columns, or a name of the header; -1 after an error. */
static int64_t label_column(const csv_table *t, const char *label, bool header, dataset_error *error)
{
    if (label == NULL) {
        return t->cols - 1;
    }
    for (int64_t j = 0; header && j < t->cols; j++) {
        if (strcmp(cell_at(t, 0, j), label) == 0) {
            return j;
        }
    }
    int64_t column = numbered_column(t, label);
    if (column >= 0) {
        return column;
    }
    dataset_fail(error, "%.300s: no column is called '%.60s'%s; columns also have the numbers 1 to %lld", t->path,
                 label, header ? "" : " (there is no header)", (long long)t->cols);
    return -1;
}

/* A first line is a header if one of its cells, those of the label left aside, is no number. */
static bool has_header(const csv_table *t, const char *label)
{
    double value;
    int64_t skipped = label != NULL ? numbered_column(t, label) : t->cols - 1;
    for (int64_t j = 0; j < t->cols; j++) {
        if (j != skipped && !is_number(cell_at(t, 0, j), &value) && *cell_at(t, 0, j) != '\0') {
            return true;
        }
    }
    return false;
}

static bool fail_cell(const csv_table *t, int64_t row, int64_t col, bool header, const char *what, dataset_error *error)
{
    const char *name = header ? cell_at(t, 0, col) : "";
    return dataset_fail(error, "%.300s, line %lld, column %lld%s%.40s%s: %s", t->path, (long long)t->lines[row],
                        (long long)col + 1, *name != '\0' ? " (" : "", name, *name != '\0' ? ")" : "", what);
}

static bool read_feature(const csv_table *t, int64_t row, int64_t col, bool header, float *out, dataset_error *error)
{
    const char *text = cell_at(t, row, col);
    char what[120];
    double value;
    if (*text == '\0') {
        return fail_cell(t, row, col, header, "the cell is empty; fill it in or drop the row", error);
    }
    if (!is_number(text, &value)) {
        snprintf(what, sizeof what, "'%.40s' is not a number", text);
        return fail_cell(t, row, col, header, what, error);
    }
    if (!isfinite((float)value)) {
        snprintf(what, sizeof what, "'%.40s' is not finite in float32", text);
        return fail_cell(t, row, col, header, what, error);
    }
    *out = (float)value;
    return true;
}

/* --- labels ------------------------------------------------------------------------------------------------------ */

typedef struct label_entry {
    const char *text;
    double value;
    int64_t row;
} label_entry;

static int compare_text(const void *a, const void *b)
{
    return strcmp(((const label_entry *)a)->text, ((const label_entry *)b)->text);
}

/* Numbers by value, and by text where 1 and 1.0 are one value: they are then one class. */
static int compare_value(const void *a, const void *b)
{
    double x = ((const label_entry *)a)->value;
    double y = ((const label_entry *)b)->value;
    return x < y ? -1 : x > y;
}

/* Sorted entries that compare equal get one class; returns the number of classes. */
static int64_t number_classes(const dataset *data, const label_entry *entries,
                              int (*compare)(const void *, const void *))
{
    int64_t class = 0;
    for (int64_t i = 0; i < data->rows; i++) {
        class += i > 0 && compare(&entries[i - 1], &entries[i]) != 0;
        data->labels[entries[i].row] = (int32_t) class;
    }
    return class + 1;
}

static bool sort_labels(const csv_table *t, dataset *data, label_entry *entries, dataset_error *error)
{
    bool numbers = true;
    for (int64_t i = 0; i < data->rows; i++) {
        numbers = is_number(entries[i].text, &entries[i].value) && isfinite(entries[i].value) && numbers;
    }
    int (*compare)(const void *, const void *) = numbers ? compare_value : compare_text;
    qsort(entries, (size_t)data->rows, sizeof *entries, compare);
    int64_t count = number_classes(data, entries, compare);
    if (count > MOST_CLASSES) {
        return dataset_fail(error, "%.300s: the label column has %lld different values: is it the right column?",
                            t->path, (long long)count);
    }
    data->classes = (int32_t)count;
    return true;
}

static bool read_labels(const csv_table *t, int64_t col, bool header, dataset *data, dataset_error *error)
{
    label_entry *entries = malloc((size_t)data->rows * sizeof *entries);
    bool good = entries != NULL;
    if (!good) {
        dataset_fail(error, "%.300s: out of memory for %lld labels", t->path, (long long)data->rows);
    }
    for (int64_t i = 0; good && i < data->rows; i++) {
        const char *text = cell_at(t, i + header, col);
        entries[i] = (label_entry){text, 0, i};
        if (*text == '\0') {
            good = fail_cell(t, i + header, col, header, "the label is missing", error);
        }
    }
    good = good && sort_labels(t, data, entries, error);
    free(entries);
    return good;
}

/* --- all together ------------------------------------------------------------------------------------------------ */

static bool fill_features(const csv_table *t, int64_t label, bool header, dataset *data, dataset_error *error)
{
    for (int64_t i = 0; i < data->rows; i++) {
        float *out = data->features + i * data->cols;
        for (int64_t j = 0; j < t->cols; j++) {
            if (j != label && !read_feature(t, i + header, j, header, out++, error)) {
                return false;
            }
        }
    }
    return read_labels(t, label, header, data, error);
}

static bool convert_table(const csv_table *t, const char *label, dataset *data, dataset_error *error)
{
    bool header = has_header(t, label);
    int64_t column = label_column(t, label, header, error);
    if (column < 0) {
        return false;
    }
    if (t->rows == header) {
        return dataset_fail(error, "%.300s: has a header and no data", t->path);
    }
    *data = (dataset){.rows = t->rows - header, .cols = t->cols - 1};
    if (!dataset_allocate(data, error)) {
        return false;
    }
    bool good = fill_features(t, column, header, data, error);
    if (!good) {
        dataset_release(data);
    }
    return good;
}

bool dataset_read_csv(const char *path, const char *label, dataset *data, dataset_error *error)
{
    csv_table table;
    *data = (dataset){0};
    bool good = csv_table_read(path, &table, error) && convert_table(&table, label, data, error);
    csv_table_release(&table);
    return good;
}
