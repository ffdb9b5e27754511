/* Everything that a source includes, so that a cache entry's name depends on it. */
#ifndef TCHI_KERNEL_INCLUDES_H
#define TCHI_KERNEL_INCLUDES_H

#include <stdbool.h>
#include <stddef.h>

#include "core/sha256.h"
#include "input.h"

/* A directive that includes something, as tchi_include_next finds them in a text. */
typedef struct tchi_include {
    bool known;  /* false: only the compiler can say what it includes */
    bool quoted; /* "name", not <name> */
    char name[1024];
} tchi_include;

/* The first such directive at or after *at, which moves behind it; false where there is none. */
bool tchi_include_next(const char **at, tchi_include *include);

/* Adds the names and texts of everything that the input includes, directly or not, and that lies in its folders. What
 * does not belongs to the compiler, whose version is part of the key anyway. *known is false where that cannot be told.
 * */
tch_status tchi_includes_add(tchi_sha256_state *hash, const tchi_kernel_input *input, bool *known);

/* A part of a key: label and contents, each behind its length, so that no two lists of parts look the same. */
void tchi_key_add(tchi_sha256_state *hash, const char *label, const void *bytes, size_t count);

#endif
