/* Recognizing a kernel that is one grid-stride loop,
 *
 *     for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) ...
 *
 * and nothing else. On a GPU neighboring threads take neighboring elements at once; a CPU that ran thread after thread
 * would stride through memory instead. Where the turns are independent the order does not matter, and the library takes
 * neighbors one after another.
 *
 * It must be certain: nothing of a turn may reach the next one of its thread, or see which thread it is. So the loop is
 * all there is in the kernel, its variable and the parameters are never changed, no reference to anything is taken, the
 * words threadIdx, blockIdx, blockDim and gridDim stand nowhere else, and macros that could hide any of this are
 * absent. Everything else runs thread after thread. */
#include "kernel_tokens.h"

#define LONG_WORD 48 /* longer ones would not fit into the loops that take the place of this one */

/* Every word of the loop is looked for among the parameters: 64 of them, the most there are, have fewer tokens. */
#define PARAMETER_TOKENS_MOST 1024

/* A place in the tokens that only moves over what is expected. */
typedef struct cursor {
    const tchi_token *at, *end;
} cursor;

static int accept(cursor *c, const char *text)
{
    if (c->at == c->end || !tchi_token_is(c->at, text)) {
        return 0;
    }
    c->at++;
    return 1;
}

static int accept_all(cursor *c, const char *const *words)
{
    cursor trial = *c;
    for (; *words != NULL; words++) {
        if (!accept(&trial, *words)) {
            return 0;
        }
    }
    *c = trial;
    return 1;
}

static const tchi_token *accept_word(cursor *c)
{
    return c->at != c->end && c->at->kind == TCHI_TOKEN_WORD ? c->at++ : NULL;
}

/* --- the two sums ------------------------------------------------------------------------------------------------ */

#define X ".", "x"

static int accept_place(cursor *c)
{
    static const char *const forms[][12] = {
        {"blockIdx", X, "*", "blockDim", X, "+", "threadIdx", X, NULL},
        {"blockDim", X, "*", "blockIdx", X, "+", "threadIdx", X, NULL},
        {"threadIdx", X, "+", "blockIdx", X, "*", "blockDim", X, NULL},
        {"threadIdx", X, "+", "blockDim", X, "*", "blockIdx", X, NULL},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (accept_all(c, forms[i])) {
            return 1;
        }
    }
    return 0;
}

static int accept_span(cursor *c)
{
    static const char *const forms[][8] = {
        {"blockDim", X, "*", "gridDim", X, NULL},
        {"gridDim", X, "*", "blockDim", X, NULL},
    };
    return accept_all(c, forms[0]) || accept_all(c, forms[1]);
}

/* --- the kernel -------------------------------------------------------------------------------------------------- */

/* `type name = ` of an integer type; the type's words lie side by side from `type` to `name`. */
static int accept_declared(cursor *c, const tchi_token **type, const tchi_token **name)
{
    static const char *const types[] = {"int",     "unsigned", "long",     "size_t",
                                        "int64_t", "int32_t",  "uint32_t", "uint64_t"};
    *type = c->at;
    for (size_t i = 0; i < sizeof types / sizeof *types;) {
        i = accept(c, types[i]) ? 0 : i + 1;
    }
    *name = c->at > *type ? accept_word(c) : NULL;
    return *name != NULL && accept(c, "=");
}

/* The names that declarations before the loop give to the two sums; NULL where there are none. */
typedef struct sums {
    const tchi_token *place, *span;
} sums;

static void accept_sums(cursor *c, sums *named)
{
    const tchi_token *type, *name;
    for (;;) {
        cursor trial = *c;
        accept(&trial, "const");
        if (!accept_declared(&trial, &type, &name)) {
            return;
        }
        if (accept_place(&trial)) {
            named->place = name;
        } else if (accept_span(&trial)) {
            named->span = name;
        } else {
            return;
        }
        if (!accept(&trial, ";")) {
            return;
        }
        *c = trial;
    }
}

static int accept_same(cursor *c, const tchi_token *word)
{
    if (word == NULL || c->at == c->end || !tchi_token_same(c->at, word)) {
        return 0;
    }
    c->at++;
    return 1;
}

static int accept_header(cursor *c, const sums *named, tchi_stride_loop *loop)
{
    const tchi_token *type;
    loop->from = c->at != c->end ? c->at->at : NULL;
    if (!accept(c, "for") || !accept(c, "(") || !accept_declared(c, &type, &loop->variable) ||
        !(accept_place(c) || accept_same(c, named->place)) || !accept(c, ";")) {
        return 0;
    }
    loop->type = type->at;
    loop->type_size = (size_t)(loop->variable->at - type->at);
    if (!accept_same(c, loop->variable) || !accept(c, "<") || (loop->bound = accept_word(c)) == NULL ||
        !accept(c, ";") || !accept_same(c, loop->variable) || !accept(c, "+") || !accept(c, "=") ||
        !(accept_span(c) || accept_same(c, named->span)) || !accept(c, ")")) {
        return 0;
    }
    loop->to = c->at[-1].at + 1;
    return 1;
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

/* --- what must not be there -------------------------------------------------------------------------------------- */

static int is_one_of(const tchi_token *token, const char *const *words)
{
    for (; *words != NULL; words++) {
        if (tchi_token_is(token, *words)) {
            return 1;
        }
    }
    return 0;
}

/* Barriers, shuffles, votes and the like begin with two underscores, and so do a few words that are harmless. */
static int may_wait(const tchi_token *token)
{
    static const char *const harmless[] = {
        "__global__",      "__device__",        "__host__",     "__restrict__",     "__restrict",
        "__forceinline__", "__launch_bounds__", "__constant__", "__half",           "__nv_bfloat16",
        "__half2float",    "__float2half",      "__ldg",        "__bfloat162float", "__float2bfloat16",
        "__expf",          "__fdividef",        "__logf",       "__powf",           NULL};
    return token->size > 2 && token->at[0] == '_' && token->at[1] == '_' && !is_one_of(token, harmless);
}

/* In the whole source: waiting, shared memory, references and addresses, macros, a second kernel. */
static int is_plain(const tchi_kernel_tokens *t)
{
    static const char *const unwanted[] = {"__shared__", "goto",    "asm",     "__asm__",
                                           "volatile",   "mutable", "clock64", NULL};
    static const char *const headers[] = {"#include <cuda_fp16.h>", "#include <cuda_bf16.h>", "#include <stdint.h>",
                                          "#pragma unroll", NULL};
    int kernels = 0;
    for (size_t i = 0; i < t->count; i++) {
        const tchi_token *token = &t->list[i];
        kernels += tchi_token_is(token, "__global__");
        int pair = tchi_token_is(token, "&") && i + 1 < t->count && t->list[i + 1].at == token->at + 1 &&
                   tchi_token_is(&t->list[i + 1], "&");
        if (token->kind == TCHI_TOKEN_DIRECTIVE ? !is_one_of(token, headers) : is_one_of(token, unwanted)) {
            return 0;
        }
        if (token->kind == TCHI_TOKEN_WORD && may_wait(token)) {
            return 0;
        }
        if (tchi_token_is(token, "&") && !pair) {
            return 0;
        }
        i += pair;
    }
    return kernels == 1;
}

/* Each of the four words as often as the loop needs it. */
static int has_no_other_index(const tchi_kernel_tokens *t)
{
    static const char *const names[] = {"threadIdx", "blockIdx", "gridDim", "blockDim"};
    int found[4] = {0};
    for (size_t i = 0; i < t->count; i++) {
        for (int k = 0; k < 4; k++) {
            found[k] += tchi_token_is(&t->list[i], names[k]);
        }
    }
    return found[0] == 1 && found[1] == 1 && found[2] == 1 && found[3] == 2;
}

/* ++x, x++, x = 1, x += 1 and their like; x.y too, where a part could be changed. Marks are one character each. */
static int is_changed(const tchi_token *word, const tchi_token *end)
{
    const tchi_token *next = word + 1;
    if ((tchi_token_is(word - 1, "+") && tchi_token_is(word - 2, "+")) ||
        (tchi_token_is(word - 1, "-") && tchi_token_is(word - 2, "-"))) {
        return 1;
    }
    if (next + 1 >= end) {
        return 0;
    }
    if (tchi_token_is(next, ".") || (tchi_token_is(next, "=") && !tchi_token_is(next + 1, "="))) {
        return 1;
    }
    if ((tchi_token_is(next, "+") && tchi_token_is(next + 1, "+")) ||
        (tchi_token_is(next, "-") && tchi_token_is(next + 1, "-"))) {
        return 1;
    }
    static const char *const before_equals[] = {"+", "-", "*", "/", "%", "|", "^", NULL};
    if (is_one_of(next, before_equals) && tchi_token_is(next + 1, "=")) {
        return 1;
    }
    return (tchi_token_is(next, "<") || tchi_token_is(next, ">")) && tchi_token_same(next, next + 1) &&
           tchi_token_is(next + 2, "=");
}

static int names(const tchi_token *from, const tchi_token *to, const tchi_token *word)
{
    for (; from < to; from++) {
        if (from->kind == TCHI_TOKEN_WORD && tchi_token_same(from, word)) {
            return 1;
        }
    }
    return 0;
}

/* The turns: nothing that leaves the loop, or outlasts a turn. Parameters stand between `from` and `to`. */
static int is_independent(cursor body, const tchi_token *from, const tchi_token *to, const sums *named,
                          const tchi_stride_loop *loop)
{
    static const char *const unwanted[] = {"return", "break", "static", "thread_local", NULL};
    for (const tchi_token *token = body.at; token < body.end; token++) {
        if (token->kind != TCHI_TOKEN_WORD) {
            continue;
        }
        int kept = tchi_token_same(token, loop->variable) || names(from, to, token);
        if (is_one_of(token, unwanted) || (kept && is_changed(token, body.end))) {
            return 0;
        }
        if ((named->place != NULL && tchi_token_same(token, named->place)) ||
            (named->span != NULL && tchi_token_same(token, named->span))) {
            return 0;
        }
    }
    return 1;
}

/* --- all together ------------------------------------------------------------------------------------------------ */

int tchi_find_stride_loop(const tchi_kernel_tokens *t, tchi_stride_loop *loop)
{
    const tchi_token *end = t->list + t->count, *at = t->list;
    if (!is_plain(t) || !has_no_other_index(t)) {
        return 0;
    }
    while (at < end && !tchi_token_is(at, "__global__")) {
        at++;
    }
    while (at < end && !tchi_token_is(at, "(")) {
        at++;
    }
    const tchi_token *parameters = at, *open = behind(at, end, "(", ")");
    const tchi_token *close =
        open != NULL && open < end && tchi_token_is(open, "{") ? behind(open, end, "{", "}") : NULL;
    if (close == NULL || open - parameters > PARAMETER_TOKENS_MOST) {
        return 0;
    }
    cursor c = {open + 1, close - 1};
    sums named = {NULL, NULL};
    accept_sums(&c, &named);
    if (!accept_header(&c, &named, loop)) {
        return 0;
    }
    /* One statement: a block, or up to the first semicolon where no other statement begins. */
    const tchi_token *last = c.at < c.end && tchi_token_is(c.at, "{") ? behind(c.at, c.end, "{", "}") : NULL;
    if (last == NULL) {
        static const char *const keywords[] = {"for", "if", "while", "do", "switch", "else", NULL};
        for (last = c.at; last < c.end && !tchi_token_is(last, ";") && !is_one_of(last, keywords); last++) {
        }
        last = last < c.end && tchi_token_is(last, ";") ? last + 1 : NULL;
    }
    int short_names = loop->variable->size < LONG_WORD && loop->bound->size < LONG_WORD && loop->type_size < LONG_WORD;
    int one_line = memchr(loop->type, '\n', loop->type_size) == NULL; /* it is written several times */
    return last == c.end && short_names && one_line && is_independent(c, parameters, open, &named, loop);
}
