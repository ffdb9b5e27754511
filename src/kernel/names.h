/* What a caller may name: kernels, options, folders. These texts reach compilers, so nothing passes that is not
 * understood here character by character. */
#ifndef TCHI_KERNEL_NAMES_H
#define TCHI_KERNEL_NAMES_H

#include <stdbool.h>

#include <torchium/status.h>

/* "halve", "space::halve", "scale<float, 4>": identifiers, ::, and template arguments that are such names, words like
 * "unsigned int", or numbers. */
tch_status tchi_check_kernel_name(const char *name);

/* One of the options that kernel.h lists. The folder of an -I is not looked at here. */
tch_status tchi_check_kernel_option(const char *option, int index);

/* True where the text has no control characters, and so can stand in a line of a message or a directive. */
bool tchi_is_printable(const char *text);

#endif
