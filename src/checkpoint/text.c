#include "text.h"

#include <errno.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- UTF-8 ------------------------------------------------------------------------------------------------------- */

static bool continues(unsigned char byte)
{
    return (byte & 0xc0) == 0x80;
}

/* The second byte has all restrictions: E0 and F0 exclude overlong forms, ED excludes surrogates, F4 ends at
 * U+10FFFF. */
static bool second_is_allowed(unsigned char first, unsigned char second)
{
    switch (first) {
    case 0xe0:
        return second >= 0xa0 && second <= 0xbf;
    case 0xed:
        return second >= 0x80 && second <= 0x9f;
    case 0xf0:
        return second >= 0x90 && second <= 0xbf;
    case 0xf4:
        return second >= 0x80 && second <= 0x8f;
    default:
        return continues(second);
    }
}

int tchi_utf8_length(const char *text, int64_t room)
{
    const unsigned char *byte = (const unsigned char *)text;
    if (room < 1) {
        return 0;
    }
    int length = byte[0] < 0x80                      ? 1
                 : byte[0] >= 0xc2 && byte[0] < 0xe0 ? 2
                 : byte[0] >= 0xe0 && byte[0] < 0xf0 ? 3
                 : byte[0] >= 0xf0 && byte[0] < 0xf5 ? 4
                                                     : 0;
    if (length > room || (length > 1 && !second_is_allowed(byte[0], byte[1]))) {
        return 0;
    }
    for (int i = 2; i < length; i++) {
        if (!continues(byte[i])) {
            return 0;
        }
    }
    return length;
}

int tchi_utf8_encode(uint32_t character, char *text)
{
    if (character < 0x80) {
        text[0] = (char)character;
        return 1;
    }
    int length = character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (int i = length - 1; i > 0; i--) {
        text[i] = (char)(0x80 | (character & 0x3f));
        character >>= 6;
    }
    text[0] = (char)(lead[length] | character);
    return length;
}

bool tchi_utf8_is_valid(const char *text)
{
    int64_t room = (int64_t)strlen(text);
    while (room > 0) {
        int length = tchi_utf8_length(text, room);
        if (length == 0) {
            return false;
        }
        text += length;
        room -= length;
    }
    return true;
}

tchi_quoted tchi_quote(const char *name)
{
    tchi_quoted quoted;
    static const char rest[] = "...";
    int64_t room = (int64_t)strlen(name);
    size_t used = 0;
    while (room > 0) {
        int length = tchi_utf8_length(name, room);
        int bytes = length > 0 ? length : 1;
        if (used + (size_t)bytes + sizeof rest > TCHI_QUOTE_SIZE) {
            memcpy(quoted.text + used, rest, sizeof rest);
            return quoted;
        }
        bool plain = length > 0 && (unsigned char)name[0] >= 0x20 && name[0] != 0x7f;
        memcpy(quoted.text + used, plain ? name : "?", plain ? (size_t)bytes : 1);
        used += plain ? (size_t)bytes : 1;
        name += bytes;
        room -= bytes;
    }
    quoted.text[used] = '\0';
    return quoted;
}

/* --- numbers ----------------------------------------------------------------------------------------------------- */

/* printf and strtod use the decimal point of the locale: the thread switches to the C locale for the call. */
const char *tchi_number_text(double value, char text[TCHI_NUMBER_SIZE])
{
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    locale_t before = uselocale(plain);
    snprintf(text, TCHI_NUMBER_SIZE, "%.17g", value);
    uselocale(before);
    freelocale(plain);
    return text;
}

/* strtod also accepts leading white space. */
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
