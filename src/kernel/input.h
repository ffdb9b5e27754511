/* A caller's config, checked, in the form that backends and the cache take. */
#ifndef TCHI_KERNEL_INPUT_H
#define TCHI_KERNEL_INPUT_H

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

/* Release it also after a failure. */
tch_status tchi_kernel_input_make(tchi_kernel_input *input, const tch_kernel_config *config);
void tchi_kernel_input_release(tchi_kernel_input *input);

#endif
