/* The header's checksum: see checksums.h. Each item is a row of words, each word ended by NUL, which no word
 * contains. */
#include "checksums.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"
#include "format.h"

#define WORD_SIZE 32 /* of a number */

/* Settings before tensors, each by the bytes of their names. */
static int in_order(const void *a, const void *b)
{
    const tchi_covered *x = a;
    const tchi_covered *y = b;
    bool kinds_differ = (x->value == NULL) != (y->value == NULL);
    return kinds_differ ? (x->value == NULL) - (y->value == NULL) : strcmp(x->name, y->name);
}

static uint32_t add_word(uint32_t crc, const char *word)
{
    return tchi_crc32c(crc, word, (int64_t)strlen(word) + 1);
}

/* Sizes end with an empty word. */
static uint32_t add_tensor(uint32_t crc, const tchi_covered *tensor)
{
    char word[WORD_SIZE];
    crc = add_word(crc, tensor->type->name);
    for (int32_t i = 0; i < tensor->ndim; i++) {
        snprintf(word, sizeof word, "%lld", (long long)tensor->sizes[i]);
        crc = add_word(crc, word);
    }
    crc = add_word(crc, "");
    snprintf(word, sizeof word, "%0*x", TCHI_CHECKSUM_DIGITS, (unsigned)tensor->checksum);
    return add_word(crc, word);
}

uint32_t tchi_header_checksum(tchi_covered *items, int64_t count)
{
    uint32_t crc = 0;
    if (count > 1) {
        qsort(items, (size_t)count, sizeof *items, in_order);
    }
    for (int64_t i = 0; i < count; i++) {
        crc = add_word(crc, items[i].name);
        crc = items[i].value != NULL ? add_word(crc, items[i].value) : add_tensor(crc, &items[i]);
    }
    return crc;
}

bool tchi_checksum_parse(const char *text, uint32_t *checksum)
{
    size_t digits = strspn(text, "0123456789abcdef");
    if (digits != TCHI_CHECKSUM_DIGITS || text[digits] != '\0') {
        return false;
    }
    *checksum = (uint32_t)strtoul(text, NULL, 16);
    return true;
}
