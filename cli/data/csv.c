/* CSV files as data sets. A file is read into memory at once and split in place: cells become strings in the text, rows
 * entries of a list. Then the header, the label's column and the classes are determined. Errors name the line and
 * column. */
#include "dataset.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MOST_CLASSES = 100000 };

/* A limit above any plausible data set. */
#define MOST_CELLS ((int64_t)1 << 31)

typedef struct csv_table {
    const char *path; /* for messages */
    char *text;       /* the whole file, ending in NUL */
    size_t size;
    char separator;
    int64_t rows, cols;
    char **cells;   /* rows by cols, into `text` */
    int64_t *lines; /* each row's line number in the file, from 1 */
    int64_t room;   /* room of the two lists */
} csv_table;

static void release_table(csv_table *t)
{
    free(t->text);
    free(t->cells);
    free(t->lines);
    *t = (csv_table){0};
}

/* --- the file ---------------------------------------------------------------------------------------------------- */

static bool read_stream(FILE *file, csv_table *t, dataset_error *error)
{
    struct stat facts;
    if (fstat(fileno(file), &facts) != 0) {
        dataset_fail(error, "%.300s: %s", t->path, strerror(errno));
        return false;
    }
    t->size = (size_t)facts.st_size;
    t->text = malloc(t->size + 1);
    if (t->text == NULL) {
        dataset_fail(error, "%.300s: out of memory for a file of %zu bytes", t->path, t->size);
        return false;
    }
    if (fread(t->text, 1, t->size, file) != t->size) {
        return dataset_fail(error, "%.300s: cannot be read to its end", t->path);
    }
    t->text[t->size] = '\0';
    const char *zero = memchr(t->text, '\0', t->size);
    if (zero != NULL) {
        return dataset_fail(error, "%.300s: is not text: byte %lld is zero (a file in UTF-16 must be saved as UTF-8)",
                            t->path, (long long)(zero - t->text) + 1);
    }
    return true;
}

static bool read_file(csv_table *t, dataset_error *error)
{
    FILE *file = dataset_open(t->path, error);
    if (file == NULL) {
        return false;
    }
    bool good = read_stream(file, t, error);
    fclose(file);
    return good;
}

/* The most frequent separator in the first line, outside quotes. */
static char guess_separator(const char *text)
{
    static const char usual[] = ",;\t|";
    int64_t counts[4] = {0};
    bool quoted = false;
    int best = 0;
    for (; *text != '\0' && (quoted || *text != '\n'); text++) {
        const char *found = quoted ? NULL : strchr(usual, *text);
        quoted = quoted != (*text == '"');
        if (found != NULL) {
            counts[found - usual]++;
        }
    }
    for (int i = 1; i < 4; i++) {
        best = counts[i] > counts[best] ? i : best;
    }
    return usual[best];
}

/* --- cells ------------------------------------------------------------------------------------------------------- */

/* The parser's position. */
typedef struct csv_cursor {
    char *at;
    int64_t line;
} csv_cursor;

/* A quoted field: "" is one quote, and line ends are part of it. NULL if it is unterminated or followed by text. */
static char *cut_quoted(const csv_table *t, csv_cursor *c, dataset_error *error)
{
    int64_t first_line = c->line;
    char *start = c->at;
    char *to = start;
    const char *from = start + 1;
    for (; *from != '\0'; from++) {
        if (*from == '"' && from[1] != '"') {
            break;
        }
        from += *from == '"';
        c->line += *from == '\n';
        *to++ = *from;
    }
    if (*from == '\0') {
        dataset_fail(error, "%.300s, line %lld: a quoted field is never closed", t->path, (long long)first_line);
        return NULL;
    }
    from++;
    if (*from != t->separator && *from != '\r' && *from != '\n' && *from != '\0') {
        dataset_fail(error, "%.300s, line %lld: text follows a closing quote", t->path, (long long)c->line);
        return NULL;
    }
    c->at = start + (from - start);
    /* The caller terminates the field after it has read the next character. */
    memset(to, '\0', (size_t)(from - to));
    return start;
}

static char *cut_plain(const csv_table *t, csv_cursor *c)
{
    char *start = c->at;
    while (*c->at != '\0' && *c->at != t->separator && *c->at != '\n') {
        c->at++;
    }
    return start;
}

static char *trim_cell(char *cell, char *end)
{
    while (end > cell && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\r')) {
        *--end = '\0';
    }
    while (*cell == ' ' || *cell == '\t') {
        cell++;
    }
    return cell;
}

/* The next cell of a line; *more is set if the line has another. NULL after an error. */
static char *cut_cell(const csv_table *t, csv_cursor *c, bool *more, dataset_error *error)
{
    bool quoted = *c->at == '"';
    char *cell = quoted ? cut_quoted(t, c, error) : cut_plain(t, c);
    if (cell == NULL) {
        return NULL;
    }
    char *end = c->at;
    if (quoted && *c->at == '\r') {
        c->at++;
    }
    *more = *c->at == t->separator;
    c->line += *c->at == '\n';
    c->at += *c->at != '\0';
    *end = '\0';
    return quoted ? cell : trim_cell(cell, end);
}

static bool is_empty_line(const char *at)
{
    return *at == '\n' || (*at == '\r' && at[1] == '\n');
}

static bool skip_empty_lines(csv_cursor *c)
{
    while (is_empty_line(c->at)) {
        c->at += *c->at == '\r' ? 2 : 1;
        c->line++;
    }
    return *c->at != '\0' && !(*c->at == '\r' && c->at[1] == '\0');
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

/* Bounds the number of rows by the size of the file: a row has at least a byte for each column. */
static bool make_room(csv_table *t, dataset_error *error)
{
    if (t->rows < t->room) {
        return true;
    }
    int64_t room = t->room == 0 ? 1024 : 2 * t->room;
    int64_t most = (int64_t)t->size / t->cols + 1;
    room = room < most ? room : most;
    if (room > MOST_CELLS / t->cols) {
        room = MOST_CELLS / t->cols;
    }
    if (room <= t->rows) {
        return dataset_fail(error, "%.300s: has more than %lld cells", t->path, (long long)MOST_CELLS);
    }
    void *cells = realloc(t->cells, (size_t)(room * t->cols) * sizeof *t->cells);
    if (cells != NULL) {
        t->cells = cells;
    }
    void *lines = realloc(t->lines, (size_t)room * sizeof *t->lines);
    if (lines != NULL) {
        t->lines = lines;
    }
    if (cells == NULL || lines == NULL) {
        return dataset_fail(error, "%.300s: out of memory at row %lld", t->path, (long long)t->rows);
    }
    t->room = room;
    return true;
}

/* Counts separators of the first line outside quotes. */
static int64_t count_columns(const char *text, char separator)
{
    int64_t count = 1;
    bool quoted = false;
    for (; *text != '\0' && (quoted || *text != '\n'); text++) {
        quoted = quoted != (*text == '"');
        count += !quoted && *text == separator;
    }
    return count;
}

static bool cut_row(csv_table *t, csv_cursor *c, dataset_error *error)
{
    int64_t line = c->line;
    bool more = true;
    int64_t found = 0;
    if (!make_room(t, error)) {
        return false;
    }
    while (more) {
        char *cell = cut_cell(t, c, &more, error);
        if (cell == NULL) {
            return false;
        }
        if (found < t->cols) {
            t->cells[t->rows * t->cols + found] = cell;
        }
        found++;
    }
    if (found != t->cols) {
        return dataset_fail(error, "%.300s, line %lld: has %lld columns, the first line has %lld", t->path,
                            (long long)line, (long long)found, (long long)t->cols);
    }
    t->lines[t->rows++] = line;
    return true;
}

static bool cut_rows(csv_table *t, dataset_error *error)
{
    static const char mark[] = "\xef\xbb\xbf"; /* byte order mark */
    csv_cursor c = {t->text + (strncmp(t->text, mark, 3) == 0 ? 3 : 0), 1};
    if (!skip_empty_lines(&c)) {
        return dataset_fail(error, "%.300s: is empty", t->path);
    }
    t->separator = guess_separator(c.at);
    t->cols = count_columns(c.at, t->separator);
    if (t->cols < 2) {
        return dataset_fail(error,
                            "%.300s, line %lld: has one column, expected features and a label; is '%c' the separator?",
                            t->path, (long long)c.line, t->separator == '\t' ? ' ' : t->separator);
    }
    while (skip_empty_lines(&c)) {
        if (!cut_row(t, &c, error)) {
            return false;
        }
    }
    return true;
}

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

/* The column with this number, counted from 1 in the text and from 0 here; -1 if the text is not such a number. */
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

/* A column number, from 1, or a name of the header; -1 after an error. */
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

/* The first line is a header if one of its cells, except the label's, is not a number. */
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

/* Compares numbers by value: 1 and 1.0 are one class. */
static int compare_value(const void *a, const void *b)
{
    double x = ((const label_entry *)a)->value;
    double y = ((const label_entry *)b)->value;
    return x < y ? -1 : x > y;
}

/* Equal sorted entries get one class; returns the number of classes. */
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

/* --- reading ------------------------------------------------------------------------------------------------------ */

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
    csv_table table = {.path = path};
    *data = (dataset){0};
    bool good = read_file(&table, error) && cut_rows(&table, error) && convert_table(&table, label, data, error);
    release_table(&table);
    return good;
}
