/* Text as files and messages want it: UTF-8, nothing that a terminal would obey, and numbers as text, the same in every
 * locale. */
#ifndef TCHI_CHECKPOINT_TEXT_H
#define TCHI_CHECKPOINT_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the character at `text`, or 0 when it is no UTF-8: a stray or missing continuation, a longer form than the
 * shortest, half a surrogate pair, or above U+10FFFF. `room` is how many bytes there are. */
int tchi_utf8_length(const char *text, int64_t room);

/* Writes a character of at most U+FFFF or from a surrogate pair; returns its bytes. */
int tchi_utf8_encode(uint32_t character, char *text);

bool tchi_utf8_is_valid(const char *text);

/* A name for a message: what does not fit is cut off behind "...", control characters become '?'. Its `text` lives as
 * long as the expression that tchi_quote(name).text is part of. */
#define TCHI_QUOTE_SIZE 120
typedef struct tchi_quoted {
    char text[TCHI_QUOTE_SIZE];
} tchi_quoted;
tchi_quoted tchi_quote(const char *name);

#define TCHI_NUMBER_SIZE 32

/* Seventeen digits, which single out one double. */
const char *tchi_number_text(double value, char text[TCHI_NUMBER_SIZE]);

/* False when the whole text is not one number. */
bool tchi_number_parse(const char *text, double *value);
bool tchi_integer_parse(const char *text, int64_t *value);

#endif
