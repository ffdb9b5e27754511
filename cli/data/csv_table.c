/* CSV files are read once into memory and cut up in place: cells become strings inside the text, each row an entry in a
 * list. Whatever is wrong is reported with the line at which an editor would show it. */
#include "csv_table.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* More than any data set that a multilayer network should see; less than would exhaust a machine by mistake. */
#define MOST_CELLS ((int64_t)1 << 31)

void csv_table_release(csv_table *t)
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
        return dataset_fail(error, "%.300s: %s", t->path, strerror(errno));
    }
    t->size = (size_t)facts.st_size;
    t->text = malloc(t->size + 1);
    if (t->text == NULL) {
        return dataset_fail(error, "%.300s: out of memory for a file of %zu bytes", t->path, t->size);
    }
    if (fread(t->text, 1, t->size, file) != t->size) {
        return dataset_fail(error, "%.300s: cannot be read to its end", t->path);
    }
    t->text[t->size] = '\0';
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
    if (!good) {
        return false;
    }
    const char *zero = memchr(t->text, '\0', t->size);
    if (zero != NULL) {
        return dataset_fail(error, "%.300s: is not text: byte %lld is zero (a file in UTF-16 must be saved as UTF-8)",
                            t->path, (long long)(zero - t->text) + 1);
    }
    return true;
}

/* The one of the usual separators that the first line has most of, outside quotes. */
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

/* Where cutting stands. */
typedef struct csv_cursor {
    char *at;
    int64_t line;
} csv_cursor;

/* A quoted field: "" stands for one quote, line ends belong to it. NULL when it never ends or goes on after its end. */
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
    /* The end of the field is set by the caller, after it has looked at what follows. */
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

/* The next cell of a line; *more says whether the line has another. NULL after an error. */
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

/* A row takes a byte for each of its columns but the last, which may be the end of the file: so the size of the file
 * bounds the rows, and a wide line does not ask for memory that the file could not fill. */
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

/* Separators of the first line tell how many columns there are; quotes are heeded. */
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
    static const char mark[] = "\xef\xbb\xbf"; /* some programs begin UTF-8 with it */
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

bool csv_table_read(const char *path, csv_table *table, dataset_error *error)
{
    *table = (csv_table){.path = path};
    return read_file(table, error) && cut_rows(table, error);
}
