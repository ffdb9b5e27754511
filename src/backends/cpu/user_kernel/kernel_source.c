/* What no macro can make C++ of: "extern __shared__ T name[]", an array of no size, becomes a pointer to the block's
 * dynamic shared memory. Lines stay lines, so that messages name the right ones. */
#define _GNU_SOURCE /* memmem */
#include <stdio.h>
#include <string.h>

#include "kernel.h"
#include "kernel_tokens.h"

/* Room for what is put in: a few words for each array. */
#define WORDS_BYTES 64

typedef struct writer {
    char *out;
    size_t used;
    const char *from; /* what of the source has not been copied */
} writer;

static void put_text(writer *w, const char *text, size_t size)
{
    memcpy(w->out + w->used, text, size);
    w->used += size;
}

/* The source up to `at`, then `text` in the place of what lies between there and `to`, of which newlines remain. */
static void replace_text(writer *w, const char *at, const char *to, const char *text)
{
    put_text(w, w->from, (size_t)(at - w->from));
    put_text(w, text, strlen(text));
    for (; at < to; at++) {
        if (*at == '\n') {
            put_text(w, "\n", 1);
        }
    }
    w->from = to;
}

/* --- dynamic shared memory --------------------------------------------------------------------------------------- */

/* A declaration "extern __shared__ T name[]...;": the numbers of its tokens, each larger than the one before. */
typedef struct shared_array {
    size_t words[2];
    size_t name, bracket, end;
} shared_array;

static int is_either(const tchi_token *token)
{
    return tchi_token_is(token, "extern") || tchi_token_is(token, "__shared__");
}

/* No declaration has either word again: the search ends there, so that no part of a source is searched many times. */
static int read_shared_array(const tchi_kernel_tokens *t, size_t i, shared_array *array)
{
    const tchi_token *list = t->list;
    if (i + 1 >= t->count || !is_either(&list[i]) || !is_either(&list[i + 1]) ||
        tchi_token_same(&list[i], &list[i + 1])) {
        return 0;
    }
    *array = (shared_array){{i, i + 1}, 0, 0, 0};
    for (size_t k = i + 2; k < t->count && array->end == 0 && !is_either(&list[k]); k++) {
        if (tchi_token_is(&list[k], ";")) {
            array->end = k;
        } else if (array->bracket == 0 && tchi_token_is(&list[k], "[") && k + 1 < t->count &&
                   tchi_token_is(&list[k + 1], "]")) {
            array->name = k - 1;
            array->bracket = k;
        }
    }
    return array->end != 0 && array->name > i + 1 && list[array->name].kind == TCHI_TOKEN_WORD;
}

/* Outside functions the pointer belongs to each thread of the CPU; inside it is a variable like any other. */
static void write_shared_array(writer *w, const tchi_kernel_tokens *t, const shared_array *array, int outside)
{
    const tchi_token *list = t->list;
    const tchi_token *first = &list[array->words[0]], *second = &list[array->words[1]], *name = &list[array->name];
    replace_text(w, first->at, first->at + first->size, outside ? "static thread_local" : "");
    replace_text(w, second->at, second->at + second->size, "");
    replace_text(w, name->at, name->at, "(*");
    replace_text(w, name->at + name->size, name->at + name->size, ")");
    replace_text(w, list[array->bracket].at, list[array->bracket + 1].at + 1, "");
    replace_text(w, list[array->end].at, list[array->end].at, " = tchi::dynamic_shared()");
}

static int opens_namespace(const tchi_kernel_tokens *t, size_t brace)
{
    for (size_t back = 1; back <= 8 && back <= brace; back++) {
        const tchi_token *token = &t->list[brace - back];
        if (tchi_token_is(token, "namespace") || (token->kind == TCHI_TOKEN_TEXT && back == 1)) {
            return 1; /* namespace a::b {, extern "C" { */
        }
        if (token->kind != TCHI_TOKEN_WORD && !tchi_token_is(token, ":")) {
            return 0;
        }
    }
    return 0;
}

static int rewrite_shared(const tchi_kernel_tokens *t, writer *w)
{
    int dynamic = 0, inside = 0; /* braces, but for those of namespaces around everything */
    for (size_t i = 0; i < t->count; i++) {
        shared_array array;
        if (tchi_token_is(&t->list[i], "{")) {
            inside += inside > 0 || !opens_namespace(t, i);
        } else if (tchi_token_is(&t->list[i], "}")) {
            inside -= inside > 0;
        } else if (read_shared_array(t, i, &array)) {
            write_shared_array(w, t, &array, inside == 0);
            dynamic = 1;
            i = array.end;
        }
    }
    return dynamic;
}

/* --- kernels and other functions --------------------------------------------------------------------------------- */

/* The last name of "space::scale<float, 4>". */
static tchi_token last_name(const char *name)
{
    size_t end = strcspn(name, "<");
    while (end > 0 && name[end - 1] == ' ') {
        end--;
    }
    size_t first = end;
    while (first > 0 && name[first - 1] != ':' && name[first - 1] != ' ') {
        first--;
    }
    return (tchi_token){name + first, end - first, TCHI_TOKEN_WORD};
}

/* The words that matter since the last statement ended. */
typedef struct declaration {
    int is_global, is_void;
} declaration;

static void note_token(declaration *d, const tchi_token *token)
{
    if (tchi_token_is(token, ";") || tchi_token_is(token, "{") || tchi_token_is(token, "}")) {
        *d = (declaration){0, 0};
    }
    d->is_global |= tchi_token_is(token, "__global__");
    d->is_void |= tchi_token_is(token, "void");
}

/* To a C++ compiler __global__ is no word: a function that lacks it would run here and not on a GPU. Where the function
 * is not seen, or a macro may have made it, the compiler decides. */
static int lacks_global(const tchi_kernel_tokens *t, const char *name)
{
    tchi_token wanted = last_name(name);
    declaration before = {0, 0};
    int seen = 0;
    for (size_t i = 0; i + 1 < t->count; i++) {
        const tchi_token *token = &t->list[i];
        if (token->kind == TCHI_TOKEN_DIRECTIVE) {
            if (memmem(token->at, token->size, "__global__", 10) != NULL) {
                return 0;
            }
        } else if (tchi_token_same(token, &wanted) && tchi_token_is(&t->list[i + 1], "(")) {
            if (before.is_global) {
                return 0;
            }
            seen |= before.is_void;
        }
        note_token(&before, token);
    }
    return seen;
}

/* --- the whole --------------------------------------------------------------------------------------------------- */

tch_status tchi_cpu_source_prepare(const tch_kernel_text *text, tchi_cpu_source *source)
{
    const tch_backend_host *host = tchi_cpu_host();
    tchi_kernel_tokens tokens;
    size_t words = 0, length = strlen(text->source);
    if (tchi_kernel_tokens_read(text->source, &tokens) != 0) {
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory for a source of %zu characters", length);
    }
    if (lacks_global(&tokens, text->name)) {
        tchi_kernel_tokens_free(&tokens);
        return host->fail(TCH_ERR_INVALID_ARGUMENT,
                          "%.200s is not a kernel: it is declared without __global__ in %.200s", text->name,
                          text->file);
    }
    for (size_t i = 0; i < tokens.count; i++) {
        words += tchi_token_is(&tokens.list[i], "extern");
    }
    source->size = length + words * WORDS_BYTES + 1;
    source->text = host->allocate(source->size, 1);
    if (source->text == NULL) {
        tchi_kernel_tokens_free(&tokens);
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory for a source of %zu characters", length);
    }
    writer w = {source->text, 0, text->source};
    source->dynamic = rewrite_shared(&tokens, &w);
    put_text(&w, w.from, strlen(w.from) + 1);
    tchi_kernel_tokens_free(&tokens);
    return TCH_OK;
}
