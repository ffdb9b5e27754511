/* Reads a command's options and prints its help from one table. Numbers must be whole words in range: "--n 25O" is an
 * error. */
#include "options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "output.h"

enum { LONGEST_NAME = 32, MOST_NAMES = 32 };

/* The edit distance (insert, delete, replace), for words below LONGEST_NAME. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t row[LONGEST_NAME + 1];
    size_t length = strlen(b);
    for (size_t j = 0; j <= length; j++) {
        row[j] = j;
    }
    for (size_t i = 0; a[i] != '\0'; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < length; j++) {
            size_t replaced = diagonal + (a[i] != b[j]);
            size_t shifted = (row[j] < row[j + 1] ? row[j] : row[j + 1]) + 1;
            diagonal = row[j + 1];
            row[j + 1] = replaced < shifted ? replaced : shifted;
        }
    }
    return row[length];
}

const char *options_nearest(const char *word, const char *const *names, size_t count)
{
    const char *nearest = NULL;
    size_t least = strlen(word) / 3 + 1; /* one edit in a short word, more in a long one */
    if (strlen(word) > LONGEST_NAME) {
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        size_t distance = strlen(names[i]) > LONGEST_NAME ? LONGEST_NAME : edit_distance(word, names[i]);
        if (distance <= least) {
            least = distance - (distance > 0);
            nearest = names[i];
        }
    }
    return nearest;
}

/* "--seed N" */
static const char *left_side(const option_spec *spec, char text[64])
{
    snprintf(text, 64, "%s%s%s", spec->name, spec->value ? " " : "", spec->value ? spec->value : "");
    return text;
}

static void print_help(const option_table *table)
{
    char left[64];
    int width = 16;
    for (size_t i = 0; i < table->count; i++) {
        int length = (int)strlen(left_side(&table->specs[i], left));
        width = length > width ? length : width;
    }
    printf("usage: torchium %s%s\n\n%s\n", table->command, table->count ? " [options]" : "", table->description);
    printf("\noptions:\n");
    for (size_t i = 0; i < table->count; i++) {
        const option_spec *spec = &table->specs[i];
        printf("  %-*s %s\n", width, left_side(spec, left), spec->help);
    }
    printf("  %-*s %s\n", width, "--help", "this text");
}

static options_result report_wrong_name(const option_table *table, const char *word)
{
    const char *names[MOST_NAMES];
    size_t count = 0;
    for (; count < table->count && count < MOST_NAMES; count++) {
        names[count] = table->specs[count].name;
    }
    const char *nearest = options_nearest(word, names, count);
    if (word[0] != '-') {
        output_usage(table->command, "unexpected argument '%s'", word);
    } else if (nearest != NULL) {
        output_usage(table->command, "unknown option '%s'; did you mean '%s'?", word, nearest);
    } else {
        output_usage(table->command, "unknown option '%s'", word);
    }
    return OPTIONS_WRONG;
}

/* The spec that `word` names, with or without "=value" at its end, or NULL. */
static const option_spec *find_option(const option_table *table, const char *word, const char **value)
{
    size_t length = strcspn(word, "=");
    for (size_t i = 0; i < table->count; i++) {
        const option_spec *spec = &table->specs[i];
        if (strlen(spec->name) == length && strncmp(spec->name, word, length) == 0) {
            *value = word[length] == '=' ? word + length + 1 : NULL;
            return spec;
        }
    }
    return NULL;
}

/* strtol and strtod also accept white space, "nan", "inf" and "0x10". */
static bool looks_like_number(const char *text)
{
    return text[0] != '\0' && text[strspn(text, "+-.0123456789eE")] == '\0';
}

static bool read_integer(const option_spec *spec, const char *text)
{
    char *end = NULL;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (!looks_like_number(text) || *end != '\0' || errno != 0) {
        return false;
    }
    if ((double)number < spec->least || (double)number > spec->most) {
        return false;
    }
    *(int64_t *)spec->target = number;
    return true;
}

static bool read_real(const option_spec *spec, const char *text)
{
    char *end = NULL;
    double number = strtod(text, &end);
    if (!looks_like_number(text) || *end != '\0' || !isfinite(number)) {
        return false;
    }
    if (number < spec->least || number > spec->most) {
        return false;
    }
    *(double *)spec->target = number;
    return true;
}

static options_result report_wrong_number(const option_table *table, const option_spec *spec, const char *text)
{
    if (spec->kind == OPTION_INTEGER) {
        output_usage(table->command, "%s must be an integer from %.0f to %.0f, not '%s'", spec->name, spec->least,
                     spec->most, text);
    } else {
        output_usage(table->command, "%s must be a number from %.15g to %.15g, not '%s'", spec->name, spec->least,
                     spec->most, text);
    }
    return OPTIONS_WRONG;
}

static options_result store_value(const option_table *table, const option_spec *spec, const char *text)
{
    bool good = true;
    if (text != NULL && text[0] == '\0' && strcmp(spec->value, "FILE") == 0) {
        output_usage(table->command, "%s must be a file name, not ''", spec->name);
        return OPTIONS_WRONG;
    }
    switch (spec->kind) {
    case OPTION_FLAG:
        *(bool *)spec->target = true;
        break;
    case OPTION_INTEGER:
        good = read_integer(spec, text);
        break;
    case OPTION_REAL:
        good = read_real(spec, text);
        break;
    case OPTION_TEXT:
        *(const char **)spec->target = text;
        break;
    }
    return good ? OPTIONS_GO : report_wrong_number(table, spec, text);
}

options_result options_read(const option_table *table, int argc, char **argv)
{
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help(table);
            return OPTIONS_HELPED;
        }
        const char *value = NULL;
        const option_spec *spec = find_option(table, argv[i], &value);
        if (spec == NULL) {
            return report_wrong_name(table, argv[i]);
        }
        if (spec->kind == OPTION_FLAG && value != NULL) {
            output_usage(table->command, "%s takes no value", spec->name);
            return OPTIONS_WRONG;
        }
        if (spec->kind != OPTION_FLAG && value == NULL) {
            value = ++i < argc ? argv[i] : NULL;
        }
        if (spec->kind != OPTION_FLAG && value == NULL) {
            output_usage(table->command, "%s needs a value: %s %s", spec->name, spec->name, spec->value);
            return OPTIONS_WRONG;
        }
        if (store_value(table, spec, value) != OPTIONS_GO) {
            return OPTIONS_WRONG;
        }
    }
    return OPTIONS_GO;
}
