/* A validated config, as backends and the cache use it. */
#ifndef TCHI_KERNEL_INPUT_H
#define TCHI_KERNEL_INPUT_H

#include <stdbool.h>

#include <torchium/backend.h>
#include <torchium/kernel.h>

#include "core/list.h"
#include "file.h"

typedef struct tchi_kernel_input {
    tch_kernel_text text; /* points into the rest, and into the config */
    tchi_file file;       /* empty where the caller gave the text */
    tchi_list options;    /* const char *: without the -I */
    tchi_list includes;   /* const char *: absolute, owned */
} tchi_kernel_input;

/* These texts reach compilers, so they are validated character by character. */

/* "halve", "space::halve", "scale<float, 4>": identifiers, ::, and template arguments that are such names, words like
 * "unsigned int", or numbers. */
tch_status tchi_check_kernel_name(const char *name);

/* One of the options that kernel.h lists. The folder of -I is checked elsewhere. */
tch_status tchi_check_kernel_option(const char *option, int index);

/* Whether the text has no control characters and can stand in a message or directive. */
bool tchi_is_printable(const char *text);

/* Release it also after a failure. */
tch_status tchi_kernel_input_make(tchi_kernel_input *input, const tch_kernel_config *config);
void tchi_kernel_input_release(tchi_kernel_input *input);

#endif
