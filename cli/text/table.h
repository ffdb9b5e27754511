/* Text tables with columns as wide as their widest cell. */
#ifndef CLI_TABLE_H
#define CLI_TABLE_H

enum { TABLE_COLUMNS = 12, TABLE_ROWS = 64, TABLE_CELL = 40 };

typedef struct table {
    int columns, rows;
    char header[TABLE_COLUMNS][TABLE_CELL];
    char cells[TABLE_ROWS][TABLE_COLUMNS][TABLE_CELL];
} table;

/* `header` names the columns, separated by '
 * '. The first column is left-aligned, the others are right-aligned unless their name begins with '<'. */
void table_start(table *t, const char *header);

/* Begins a row of empty cells. Full tables (TABLE_ROWS) are printed and cleared. */
void table_row(table *t);

/* Sets a cell of the latest row, printf-style. */
void table_set(table *t, int column, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Prints the table, indented by two, without empty columns, and clears it. */
void table_print(table *t);

#endif
