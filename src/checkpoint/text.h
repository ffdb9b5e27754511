/* Text of files and messages: UTF-8 without control characters, and numbers independent of the locale. */
#ifndef TCHI_CHECKPOINT_TEXT_H
#define TCHI_CHECKPOINT_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the character at `text`, or 0 for invalid UTF-8: a stray or missing continuation byte, an overlong form, a
 * surrogate, or above U+10FFFF. `room`: available bytes. */
int tchi_utf8_length(const char *text, int64_t room);

/* Writes a character of at most U+FFFF or from a surrogate pair; returns its bytes. */
int tchi_utf8_encode(uint32_t character, char *text);

bool tchi_utf8_is_valid(const char *text);

/* A name for a message: truncated with "...", control characters replaced by '?'. tchi_quote(name).text lives until the
 * end of the full expression. */
#define TCHI_QUOTE_SIZE 120
typedef struct tchi_quoted {
    char text[TCHI_QUOTE_SIZE];
} tchi_quoted;
tchi_quoted tchi_quote(const char *name);

#define TCHI_NUMBER_SIZE 32

/* Seventeen digits, which identify a double. */
const char *tchi_number_text(double value, char text[TCHI_NUMBER_SIZE]);

/* False unless the whole text is one number. */
bool tchi_number_parse(const char *text, double *value);
bool tchi_integer_parse(const char *text, int64_t *value);

#endif
