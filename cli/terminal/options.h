/* Options of a command: one table to read them and to print the help. */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum option_kind {
    OPTION_FLAG,    /* target is a bool, set to true */
    OPTION_INTEGER, /* target is an int64_t */
    OPTION_REAL,    /* target is a double */
    OPTION_TEXT     /* target is a const char* into argv */
} option_kind;

typedef struct option_spec {
    const char *name;  /* "--seed" */
    const char *value; /* the value's name in the help, NULL for a flag */
    option_kind kind;
    void *target;
    double least, most; /* accepted range, inclusive */
    const char *help;
} option_spec;

typedef struct option_table {
    const char *command;     /* "bench" */
    const char *description; /* for the help */
    const option_spec *specs;
    size_t count;
} option_table;

typedef enum options_result { OPTIONS_GO, OPTIONS_HELPED, OPTIONS_WRONG } options_result;

/* Reads argv[0 .. argc-1], all after the command's name. OPTIONS_HELPED: --help was printed. OPTIONS_WRONG: the error
 * was reported. */
options_result options_read(const option_table *table, int argc, char **argv);

/* The name nearest to `word`, or NULL if none is within a typing error. */
const char *options_nearest(const char *word, const char *const *names, size_t count);

#endif
