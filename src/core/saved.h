/* What optimizers and KFAC share: options as rows of a table, with their ranges and their settings in checkpoints, and
 * checks of a file before its state is loaded. */
#ifndef TCHI_SAVED_H
#define TCHI_SAVED_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/checkpoint.h>

/* --- options ------------------------------------------------------------------------------------------------------ */

typedef enum tchi_option_type { TCHI_REAL, TCHI_INT32, TCHI_INT64 } tchi_option_type; /* enumerations are int32_t */

enum {
    TCHI_STEP = 1,    /* may change between steps */
    TCHI_BELOW = 2,   /* `most` is excluded */
    TCHI_LOCAL = 4,   /* how a step is computed here: loading keeps the current value */
    TCHI_OPTIONAL = 8 /* missing in files of earlier versions: loading keeps the current value */
};

typedef struct tchi_option {
    const char *key;  /* in checkpoints */
    const char *name; /* of the field */
    size_t offset;
    tchi_option_type type;
    int32_t flags;
    double least, most;
    const char *range; /* for messages */
} tchi_option;

typedef struct tchi_options {
    const char *owner; /* for messages */
    const tchi_option *rows;
    int32_t count;
} tchi_options;

double tchi_option_value(const tchi_option *option, const void *config);

/* Checks the ranges of all options. */
tch_status tchi_options_check(const tchi_options *options, const char *function, const void *config);

/* Checks that `next` differs from `now` only in options that may change between steps. */
tch_status tchi_options_check_change(const tchi_options *options, const void *now, const void *next);

/* Settings with keys prefix + key. Loading checks ranges. */
tch_status tchi_options_save(const tchi_options *options, const void *config, tch_checkpoint_writer *writer,
                             const char *prefix);
tch_status tchi_options_load(const tchi_options *options, void *config, const tch_checkpoint *file, const char *prefix);

/* --- names and tensors -------------------------------------------------------------------------------------------- */

#define TCHI_PREFIX_SIZE 192                   /* bytes of a prefix with its end */
#define TCHI_SAVED_NAME (3 * TCHI_PREFIX_SIZE) /* and of what follows it */

/* "prefix/name" */
const char *tchi_saved_name(char text[TCHI_SAVED_NAME], const char *prefix, const char *name);

/* `file`, called `what`, is not NULL, and the prefix has a valid length. */
tch_status tchi_saved_check_arguments(const char *function, const void *file, const char *what, const char *prefix);

/* The file has a state of this kind under the prefix. */
tch_status tchi_saved_check_kind(const tch_checkpoint *file, const char *prefix, const char *kind);

/* The file has a tensor of this name, shape and type. */
tch_status tchi_saved_check(const tch_checkpoint *file, const char *name, const tch_tensor *tensor);
tch_status tchi_saved_missing(const char *name);

#endif
