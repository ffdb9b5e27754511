/* Untrusted text (cells and names of files, settings of checkpoints, the environment) for display on a terminal. */
#ifndef CLI_TEXT_H
#define CLI_TEXT_H

#include <stdint.h>
#include <stdio.h>

/* Number of bytes of the UTF-8 character at `text`, with its code; 0 if it is invalid. */
int text_character(const char *text, uint32_t *code);

/* `text` with escapes for all that a terminal interprets: controls as \x1b, bidirectional marks as \u202e, invalid
 * UTF-8 as \xff. Truncated text ends in "...". Returns `shown`. */
enum { TEXT_SHOWN = 4096 };
const char *text_show(const char *text, char shown[TEXT_SHOWN]);

/* Prints `text` as one word of a shell, quoted only if necessary. */
void text_print_word(FILE *out, const char *text);

#endif
