/* How large the stacks of a block's threads must be. The compiler tells for every function that it did not inline; a
 * chain of calls has each of them once at most, unless a kernel calls itself, so that their sum is enough. Stacks cost
 * only what is touched of them: a sum that is too large does no harm. */
#include "kernel.h"

#include <stdlib.h>
#include <string.h>

/* For what is called and not compiled here: waiting, and the C library's mathematical functions. */
#define OTHERS_BYTES 32768
#define LEAST_BYTES 65536
#define MOST_BYTES (TCHI_CPU_LOCAL_MOST + OTHERS_BYTES)

/* "file:line:column:function \t bytes \t qualifiers"; the function may be anything. Where the compiler knows no bound
 * the stack becomes the largest there is. */
static void read_line(const char *line, size_t length, tchi_stack_use *use)
{
    const char *tabs[2] = {NULL, NULL}; /* the last two */
    for (size_t i = 0; i < length; i++) {
        if (line[i] == '\t') {
            tabs[0] = tabs[1];
            tabs[1] = line + i;
        }
    }
    if (tabs[0] == NULL) {
        return;
    }
    uint64_t bytes = strtoull(tabs[0] + 1, NULL, 10);
    size_t words = (size_t)(line + length - tabs[1] - 1);
    int bounded = memchr(tabs[1] + 1, ',', words) != NULL || strncmp(tabs[1] + 1, "static", 6) == 0;
    use->largest = bytes > use->largest ? bytes : use->largest;
    use->stack_bytes = !bounded || bytes > MOST_BYTES ? MOST_BYTES : use->stack_bytes + bytes;
    use->stack_bytes = use->stack_bytes > MOST_BYTES ? MOST_BYTES : use->stack_bytes;
}

tchi_stack_use tchi_stack_use_read(const char *lines)
{
    tchi_stack_use use = {0, lines != NULL ? OTHERS_BYTES : MOST_BYTES};
    while (lines != NULL && *lines != '\0') {
        size_t length = strcspn(lines, "\n");
        read_line(lines, length, &use);
        lines += length + (lines[length] == '\n');
    }
    use.stack_bytes = use.stack_bytes < LEAST_BYTES ? LEAST_BYTES : use.stack_bytes;
    return use;
}
