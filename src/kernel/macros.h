/* The text between prelude and user source: the macros of the options, and a #line directive that makes messages name
 * the user's file. Macros are not passed on the compiler's command line, where they would change the prelude and system
 * headers: -DT=float breaks every template. */
#ifndef TCHI_KERNEL_MACROS_H
#define TCHI_KERNEL_MACROS_H

#include <stdbool.h>
#include <stddef.h>

#include <torchium/backend.h>

/* -DNAME, -DNAME=VALUE or -UNAME. */
bool tchi_option_is_macro(const char *option);

/* A macro that is also passed on the command line, for assert() of the compiler's headers. */
bool tchi_option_is_for_both(const char *option);

/* Writes the options' macros to `room` of tchi_macro_bytes bytes. */
size_t tchi_macro_bytes(const tch_kernel_text *text);
void tchi_macros_write(const tch_kernel_text *text, char *room, size_t size);

/* Escapes a file name for a #line directive, in `room` of tchi_quoted_bytes bytes. */
size_t tchi_quoted_bytes(const char *file);
void tchi_quoted_write(const char *file, char *room);

#endif
