/* The words of a source, as far as they must be known to rewrite it: comments are left out, a directive is one token,
 * and punctuation comes one character at a time. */
#ifndef TCHI_CPU_KERNEL_TOKENS_H
#define TCHI_CPU_KERNEL_TOKENS_H

#include <stddef.h>
#include <string.h>

typedef enum tchi_token_kind {
    TCHI_TOKEN_WORD,
    TCHI_TOKEN_TEXT,
    TCHI_TOKEN_DIRECTIVE,
    TCHI_TOKEN_MARK
} tchi_token_kind;

typedef struct tchi_token {
    const char *at;
    size_t size;
    tchi_token_kind kind;
} tchi_token;

typedef struct tchi_kernel_tokens {
    tchi_token *list; /* of host->allocate */
    size_t count;
    size_t bytes;
} tchi_kernel_tokens;

/* Nonzero where memory is short. */
int tchi_kernel_tokens_read(const char *source, tchi_kernel_tokens *tokens);
void tchi_kernel_tokens_free(tchi_kernel_tokens *tokens);

static inline int tchi_token_is(const tchi_token *token, const char *text)
{
    return strlen(text) == token->size && memcmp(token->at, text, token->size) == 0;
}

static inline int tchi_token_same(const tchi_token *a, const tchi_token *b)
{
    return a->size == b->size && memcmp(a->at, b->at, a->size) == 0;
}

#endif
