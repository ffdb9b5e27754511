/* What stands between a prelude and the user's source: the macros of the options as lines, and the #line directive that
 * gives messages the user's own file. Macros are not left to a compiler's command line, where they would change our
 * texts and the compiler's headers too: -DT=float there breaks every template. */
#ifndef TCHI_KERNEL_MACROS_H
#define TCHI_KERNEL_MACROS_H

#include <stdbool.h>
#include <stddef.h>

#include <torchium/backend.h>

/* -DNAME, -DNAME=VALUE or -UNAME. */
bool tchi_option_is_macro(const char *option);

/* A macro that the command line gets as well: assert() of the compiler's headers asks for it. */
bool tchi_option_is_for_both(const char *option);

/* The options' macros, one after the other, in `room` of tchi_macro_bytes bytes. */
size_t tchi_macro_bytes(const tch_kernel_text *text);
void tchi_macros_write(const tch_kernel_text *text, char *room, size_t size);

/* A file's name as the text between the quotes of a #line directive, in `room` of tchi_quoted_bytes bytes. */
size_t tchi_quoted_bytes(const char *file);
void tchi_quoted_write(const char *file, char *room);

#endif
