/* Text as files and messages want it: UTF-8, and nothing that a terminal would obey. */
#ifndef TCHI_CHECKPOINT_UTF8_H
#define TCHI_CHECKPOINT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the character at `text`, or 0 when it is no UTF-8: a stray or missing continuation, a longer form than the
 * shortest, half a surrogate pair, or above U+10FFFF. `room` is how many bytes there are. */
int tchi_utf8_length(const char *text, int64_t room);

/* Writes a character of at most U+FFFF or from a surrogate pair; returns its bytes. */
int tchi_utf8_encode(uint32_t character, char *text);

bool tchi_utf8_is_valid(const char *text);

/* A name for a message: what does not fit is cut off behind "...", control characters become '?'. */
#define TCHI_QUOTE_SIZE 120
const char *tchi_quote(const char *name, char quoted[TCHI_QUOTE_SIZE]);

#endif
