/* Recognizes a kernel that is one grid-stride loop,
 *
 *     for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) ...
 *
 * and nothing else. Run thread after thread it would stride through memory, 10 to 80 times slower than in order. Where
 * no iteration depends on its thread the order is free, and each block takes a contiguous range of [0, n) instead.
 *
 * An iteration could depend on its thread by the four index words, which therefore appear nowhere else; by leaving the
 * loop; and by a variable that outlasts it. The loop variable and the parameters are the only such variables, and the
 * rewritten kernel declares them const: where it does not compile, the source is compiled as it is. Macros could hide
 * any of this, so sources with macros are left alone. */
#include "kernel_tokens.h"

typedef struct matcher {
    const tchi_token *end;
    const tchi_token *words[5]; /* what the digits of a pattern stand for */
} matcher;

/* Loop patterns: 1 is the loop variable, 2 its bound, 3 and 4 names that are given to the place and the span. */
static const char *const loops[] = {
    "for ( T 1 = P ; 1 < 2 ; 1 + = S )",
    "T 3 = P ; T 4 = S ; for ( T 1 = 3 ; 1 < 2 ; 1 + = 4 )",
    "T 3 = P ; for ( T 1 = 3 ; 1 < 2 ; 1 + = S )",
    "T 4 = S ; for ( T 1 = P ; 1 < 2 ; 1 + = 4 )",
};
static const char *const types[] = {"int",     "unsigned", "long",     "size_t",  "const",
                                    "int64_t", "int32_t",  "uint32_t", "uint64_t"};
static const char *const places[] = {
    "blockIdx . x * blockDim . x + threadIdx . x",
    "blockDim . x * blockIdx . x + threadIdx . x",
    "threadIdx . x + blockIdx . x * blockDim . x",
    "threadIdx . x + blockDim . x * blockIdx . x",
};
static const char *const spans[] = {"blockDim . x * gridDim . x", "gridDim . x * blockDim . x"};

#define COUNT(list) (sizeof(list) / sizeof *(list))

static int is_one_of(const tchi_token *token, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (tchi_token_is(token, words[i])) {
            return 1;
        }
    }
    return 0;
}

static const tchi_token *match(matcher *m, const tchi_token *at, const char *pattern);

static const tchi_token *match_any(matcher *m, const tchi_token *at, const char *const *patterns, size_t count)
{
    const tchi_token *behind = NULL;
    for (size_t i = 0; i < count && behind == NULL; i++) {
        behind = match(m, at, patterns[i]);
    }
    return behind;
}

static const tchi_token *match_word(matcher *m, const tchi_token *at, int digit)
{
    if (m->words[digit] == NULL && at->kind == TCHI_TOKEN_WORD) {
        m->words[digit] = at;
    }
    return m->words[digit] != NULL && tchi_token_same(at, m->words[digit]) ? at + 1 : NULL;
}

/* Tokens with spaces between: T is an integer type, P and S are the two sums, a digit is a word, the same throughout.
 * Returns the token behind the match, or NULL. */
static const tchi_token *match(matcher *m, const tchi_token *at, const char *pattern)
{
    for (; at != NULL && *pattern != '\0'; pattern += *pattern == ' ') {
        size_t size = strcspn(pattern, " ");
        const tchi_token *from = at;
        if (at == m->end) {
            return NULL;
        }
        if (*pattern == 'P') {
            at = match_any(m, at, places, COUNT(places));
        } else if (*pattern == 'S') {
            at = match_any(m, at, spans, COUNT(spans));
        } else if (*pattern == 'T') {
            for (; at < m->end && is_one_of(at, types, COUNT(types)); at++) {
            }
            at = at > from ? at : NULL;
        } else if (*pattern >= '1' && *pattern <= '4') {
            at = match_word(m, at, *pattern - '0');
        } else {
            at = at->size == size && memcmp(at->at, pattern, size) == 0 ? at + 1 : NULL;
        }
        pattern += size;
    }
    return at;
}

static int names(const tchi_token *at, const tchi_token *end, const tchi_token *word)
{
    while (word != NULL && at < end && !tchi_token_same(at, word)) {
        at++;
    }
    return word != NULL && at < end;
}

static int count_of(const tchi_token *at, const tchi_token *end, const char *word)
{
    int count = 0;
    for (; at < end; at++) {
        count += tchi_token_is(at, word);
    }
    return count;
}

static int has_macros(const tchi_kernel_tokens *t)
{
    static const char *const harmless[] = {"#include <cuda_fp16.h>", "#include <cuda_bf16.h>", "#include <stdint.h>",
                                           "#pragma unroll"};
    for (size_t i = 0; i < t->count; i++) {
        if (t->list[i].kind == TCHI_TOKEN_DIRECTIVE && !is_one_of(&t->list[i], harmless, COUNT(harmless))) {
            return 1;
        }
    }
    return 0;
}

/* From the opening bracket at `at` to behind the one that closes it; NULL where none does. */
static const tchi_token *behind(const tchi_token *at, const tchi_token *end, const char *open, const char *close)
{
    int depth = 0;
    for (; at < end; at++) {
        depth += tchi_token_is(at, open) - tchi_token_is(at, close);
        if (depth == 0) {
            return at + 1;
        }
    }
    return NULL;
}

/* The body is one statement, in braces or without any other, up to `end`, and does not leave the loop. */
static int is_whole_body(const tchi_token *at, const tchi_token *end)
{
    static const char *const leaves[] = {"return", "break", "goto", "static"};
    if (at >= end || (tchi_token_is(at, "{") ? behind(at, end, "{", "}") != end
                                             : count_of(at, end, ";") != 1 || !tchi_token_is(end - 1, ";"))) {
        return 0;
    }
    for (; at < end; at++) {
        if (is_one_of(at, leaves, COUNT(leaves))) {
            return 0;
        }
    }
    return 1;
}

int tchi_find_stride_loop(const tchi_kernel_tokens *t, tchi_stride_loop *loop)
{
    static const char *const counted[] = {"__global__", "threadIdx", "blockIdx", "gridDim", "blockDim"};
    const tchi_token *end = t->list + t->count, *at = t->list;
    for (size_t i = 0; i < COUNT(counted); i++) {
        if (count_of(t->list, end, counted[i]) != (i == 4 ? 2 : 1)) {
            return 0;
        }
    }
    while (at < end && !tchi_token_is(at, "__global__")) {
        at++;
    }
    while (at < end && !tchi_token_is(at, "(")) {
        at++;
    }
    const tchi_token *open = behind(at, end, "(", ")");
    const tchi_token *close =
        open != NULL && open < end && tchi_token_is(open, "{") ? behind(open, end, "{", "}") : NULL;
    if (close == NULL || has_macros(t) ||
        count_of(at, open, "<") + count_of(at, open, "[") + count_of(at, open, "=") > 0) {
        return 0;
    }
    for (size_t i = 0; i < COUNT(loops); i++) {
        matcher m = {.end = close - 1};
        const tchi_token *body = match(&m, open + 1, loops[i]);
        if (body != NULL) {
            const tchi_token *first = open + 1;
            while (!tchi_token_is(first, "for")) {
                first++;
            }
            *loop = (tchi_stride_loop){at, open, first, body, m.words[1], m.words[2]};
            return is_whole_body(body, close - 1) && !names(body, close, m.words[3]) && !names(body, close, m.words[4]);
        }
    }
    return 0;
}
