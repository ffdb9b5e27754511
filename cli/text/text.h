/* Untrusted text (cells and names of files, settings of checkpoints, the environment) on its way to a
 * terminal, which would obey some of it. */
#ifndef CLI_TEXT_H
#define CLI_TEXT_H

#include <stdint.h>
#include <stdio.h>

/* Bytes of the UTF-8 character at `text`, with its code, or 0 when it is no UTF-8. */
int text_character(const char *text, uint32_t *code);

/* `text` with everything a terminal might obey spelled out: controls as \x1b, marks that turn the direction of writing
 * as \u202e, bytes that are no UTF-8 as \xff. What does not fit is cut off behind "...". Returns `shown`. */
enum { TEXT_SHOWN = 4096 };
const char *text_show(const char *text, char shown[TEXT_SHOWN]);

/* Prints `text` as one word that a shell reads back to the same bytes; plain where it needs no quotes. */
void text_print_word(FILE *out, const char *text);

#endif
