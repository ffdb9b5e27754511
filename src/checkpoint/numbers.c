/* Numbers as text. printf and strtod take the decimal point from the locale of the program, and a checkpoint must not:
 * the thread is in the C locale for as long as the call takes. */
#include "numbers.h"

#include <errno.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>

const char *tchi_number_text(double value, char text[TCHI_NUMBER_SIZE])
{
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    locale_t before = uselocale(plain);
    snprintf(text, TCHI_NUMBER_SIZE, "%.17g", value);
    uselocale(before);
    freelocale(plain);
    return text;
}

/* Of the forms strtod reads, those that begin with white space are left out. */
static bool begins_as_number(char c)
{
    return c > ' ';
}

bool tchi_number_parse(const char *text, double *value)
{
    char *end = NULL;
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    locale_t before = uselocale(plain);
    double parsed = strtod(text, &end);
    uselocale(before);
    freelocale(plain);
    if (!begins_as_number(text[0]) || *end != '\0') {
        return false;
    }
    *value = parsed;
    return true;
}

bool tchi_integer_parse(const char *text, int64_t *value)
{
    char *end = NULL;
    errno = 0;
    long long parsed = strtoll(text, &end, 10);
    if (!begins_as_number(text[0]) || *end != '\0' || errno != 0) {
        return false;
    }
    *value = parsed;
    return true;
}
