/* Tables of fixed capacity, printed when complete, so that columns are only as wide as necessary. */
#include "table.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

void table_start(table *t, const char *header)
{
    memset(t, 0, sizeof *t);
    while (*header != '\0' && t->columns < TABLE_COLUMNS) {
        size_t length = strcspn(header, "|");
        snprintf(t->header[t->columns++], TABLE_CELL, "%.*s", (int)length, header);
        header += length + (header[length] == '|');
    }
}

void table_row(table *t)
{
    if (t->rows == TABLE_ROWS) {
        table_print(t);
    }
    memset(t->cells[t->rows++], 0, sizeof t->cells[0]);
}

void table_set(table *t, int column, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(t->cells[t->rows - 1][column], TABLE_CELL, format, arguments);
    va_end(arguments);
}

static bool aligns_left(const table *t, int column)
{
    return column == 0 || t->header[column][0] == '<';
}

static const char *column_title(const table *t, int column)
{
    return t->header[column] + (t->header[column][0] == '<');
}

/* 0 for an empty column. */
static int column_width(const table *t, int column)
{
    size_t widest = 0;
    for (int i = 0; i < t->rows; i++) {
        size_t length = strlen(t->cells[i][column]);
        widest = length > widest ? length : widest;
    }
    size_t header = strlen(column_title(t, column));
    return (int)(widest > 0 && widest < header ? header : widest);
}

/* One line, without trailing spaces. */
static void print_line(const table *t, const int *widths, bool header, int row)
{
    int pending = 0;
    for (int j = 0; j < t->columns; j++) {
        if (widths[j] == 0) {
            continue;
        }
        const char *cell = header ? column_title(t, j) : t->cells[row][j];
        int length = (int)strlen(cell), blank = widths[j] - length;
        pending += 2 + (aligns_left(t, j) ? 0 : blank);
        if (length > 0) {
            printf("%*s%s", pending, "", cell);
            pending = 0;
        }
        pending += aligns_left(t, j) ? blank : 0;
    }
    putchar('\n');
}

void table_print(table *t)
{
    int widths[TABLE_COLUMNS] = {0};
    for (int j = 0; j < t->columns; j++) {
        widths[j] = column_width(t, j);
    }
    print_line(t, widths, true, 0);
    for (int i = 0; i < t->rows; i++) {
        print_line(t, widths, false, i);
    }
    t->rows = 0;
}
