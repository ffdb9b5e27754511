/* Rewrites what macros cannot: "extern __shared__ T name[]" becomes a pointer to the block's dynamic shared memory.
 * Line numbers are preserved for messages. */
#define _GNU_SOURCE /* memmem */
#include <ctype.h>
#include <string.h>

#include "kernel.h"

/* --- tokens ------------------------------------------------------------------------------------------------------ */

#define RAW_MARK_MOST 16

/* Tokens of a source, as far as rewriting needs them: comments are skipped, a directive is one token, and punctuation
 * is one character each. */
typedef enum token_kind { TOKEN_WORD, TOKEN_TEXT, TOKEN_DIRECTIVE, TOKEN_MARK } token_kind;

typedef struct token {
    const char *at;
    size_t size;
    token_kind kind;
} token;

typedef struct token_list {
    token *list; /* of host->allocate */
    size_t count;
    size_t bytes;
} token_list;

static int token_is(const token *token, const char *text)
{
    return strlen(text) == token->size && memcmp(token->at, text, token->size) == 0;
}

static int token_same(const token *a, const token *b)
{
    return a->size == b->size && memcmp(a->at, b->at, a->size) == 0;
}

static int is_word(char c)
{
    return isalnum((unsigned char)c) || c == '_' || (unsigned char)c >= 0x80;
}

static const char *skip_comment(const char *p)
{
    if (p[1] == '/') {
        return p + strcspn(p, "\n");
    }
    const char *end = strchr(p + 2, '*'); /* AddressSanitizer's strstr scans the whole text each time */
    while (end != NULL && end[1] != '/') {
        end = strchr(end + 1, '*');
    }
    return end != NULL ? end + 2 : p + strlen(p);
}

static const char *end_of_text(const char *p)
{
    char quote = *p++;
    while (*p != '\0' && *p != quote && *p != '\n') {
        p += *p == '\\' && p[1] != '\0' ? 2 : 1;
    }
    return *p == quote ? p + 1 : p;
}

/* R"mark( ... )mark", `p` at the quote. A longer mark is not a raw string to a compiler. */
static const char *end_of_raw_text(const char *p)
{
    size_t mark = 0;
    while (mark <= RAW_MARK_MOST && p[1 + mark] != '\0' && strchr("() \\\t\v\f\n", p[1 + mark]) == NULL) {
        mark++;
    }
    if (mark > RAW_MARK_MOST || p[1 + mark] != '(') {
        return end_of_text(p);
    }
    const char *end = p + 1 + mark;
    while ((end = strchr(end, ')')) != NULL) {
        if (strncmp(end + 1, p + 1, mark) == 0 && end[1 + mark] == '"') {
            return end + mark + 2;
        }
        end++;
    }
    return p + strlen(p);
}

static const char *end_of_directive(const char *p)
{
    while (*p != '\0' && *p != '\n') {
        p += *p == '\\' && p[1] != '\0' ? 2 : 1;
    }
    return p;
}

/* An apostrophe inside a number is a digit separator. */
static const char *end_of_word(const char *p)
{
    int number = isdigit((unsigned char)*p);
    while (is_word(*p) || (number && (*p == '.' || (*p == '\'' && is_word(p[1]))))) {
        p++;
    }
    return p;
}

static const char *next_token(const char *p, int line_start, token *token)
{
    const char *end = p + 1;
    token->kind = TOKEN_MARK;
    if (*p == '#' && line_start) {
        token->kind = TOKEN_DIRECTIVE;
        end = end_of_directive(p);
    } else if (*p == 'R' && p[1] == '"') {
        token->kind = TOKEN_TEXT;
        end = end_of_raw_text(p + 1);
    } else if (*p == '"' || *p == '\'') {
        token->kind = TOKEN_TEXT;
        end = end_of_text(p);
    } else if (is_word(*p)) {
        token->kind = TOKEN_WORD;
        end = end_of_word(p);
    }
    token->at = p;
    token->size = (size_t)(end - p);
    return end;
}

/* What is not C++ is reported by the compiler. */
static tch_status read_tokens(const char *source, token_list *tokens)
{
    tokens->count = 0;
    tokens->bytes = (strlen(source) + 1) * sizeof *tokens->list;
    TCHI_TRY(tchi_backend_take(tchi_cpu_host(), tokens->bytes, "the tokens of a kernel's source", &tokens->list));
    int line_start = 1;
    for (const char *p = source; *p != '\0';) {
        if (isspace((unsigned char)*p)) {
            line_start |= *p++ == '\n';
        } else if (*p == '/' && (p[1] == '/' || p[1] == '*')) {
            p = skip_comment(p);
        } else {
            p = next_token(p, line_start, &tokens->list[tokens->count++]);
            line_start = 0;
        }
    }
    return TCH_OK;
}

/* --- rewriting --------------------------------------------------------------------------------------------------- */

/* Room for insertions per array. */
#define WORDS_BYTES 64

typedef struct writer {
    char *out;
    size_t used;
    const char *from; /* source not yet copied */
} writer;

static void put_text(writer *w, const char *text, size_t size)
{
    memcpy(w->out + w->used, text, size);
    w->used += size;
}

/* Copies the source up to `at`, then replaces [at, to) by `text`, keeping newlines. */
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

static int is_either(const token *token)
{
    return token_is(token, "extern") || token_is(token, "__shared__");
}

/* A declaration has neither word again: stopping there keeps the search linear. */
static int read_shared_array(const token_list *t, size_t i, shared_array *array)
{
    const token *list = t->list;
    if (i + 1 >= t->count || !is_either(&list[i]) || !is_either(&list[i + 1]) || token_same(&list[i], &list[i + 1])) {
        return 0;
    }
    *array = (shared_array){{i, i + 1}, 0, 0, 0};
    for (size_t k = i + 2; k < t->count && array->end == 0 && !is_either(&list[k]); k++) {
        if (token_is(&list[k], ";")) {
            array->end = k;
        } else if (array->bracket == 0 && token_is(&list[k], "[") && k + 1 < t->count && token_is(&list[k + 1], "]")) {
            array->name = k - 1;
            array->bracket = k;
        }
    }
    return array->end != 0 && array->name > i + 1 && list[array->name].kind == TOKEN_WORD;
}

/* Outside functions the pointer is thread_local; inside it is an ordinary variable. */
static void write_shared_array(writer *w, const token_list *t, const shared_array *array, int outside)
{
    const token *list = t->list;
    const token *first = &list[array->words[0]], *second = &list[array->words[1]], *name = &list[array->name];
    replace_text(w, first->at, first->at + first->size, outside ? "static thread_local" : "");
    replace_text(w, second->at, second->at + second->size, "");
    replace_text(w, name->at, name->at, "(*");
    replace_text(w, name->at + name->size, name->at + name->size, ")");
    replace_text(w, list[array->bracket].at, list[array->bracket + 1].at + 1, "");
    replace_text(w, list[array->end].at, list[array->end].at, " = tchi::dynamic_shared()");
}

static int opens_namespace(const token_list *t, size_t brace)
{
    for (size_t back = 1; back <= 8 && back <= brace; back++) {
        const token *token = &t->list[brace - back];
        if (token_is(token, "namespace") || (token->kind == TOKEN_TEXT && back == 1)) {
            return 1; /* namespace a::b {, extern "C" { */
        }
        if (token->kind != TOKEN_WORD && !token_is(token, ":")) {
            return 0;
        }
    }
    return 0;
}

static int rewrite_shared(const token_list *t, writer *w)
{
    int dynamic = 0, inside = 0; /* braces, except of enclosing namespaces */
    for (size_t i = 0; i < t->count; i++) {
        shared_array array;
        if (token_is(&t->list[i], "{")) {
            inside += inside > 0 || !opens_namespace(t, i);
        } else if (token_is(&t->list[i], "}")) {
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
static token last_name(const char *name)
{
    size_t end = strcspn(name, "<");
    while (end > 0 && name[end - 1] == ' ') {
        end--;
    }
    size_t first = end;
    while (first > 0 && name[first - 1] != ':' && name[first - 1] != ' ') {
        first--;
    }
    return (token){name + first, end - first, TOKEN_WORD};
}

/* Keywords since the last statement ended. */
typedef struct declaration {
    int is_global, is_void;
} declaration;

static void note_token(declaration *d, const token *token)
{
    if (token_is(token, ";") || token_is(token, "{") || token_is(token, "}")) {
        *d = (declaration){0, 0};
    }
    d->is_global |= token_is(token, "__global__");
    d->is_void |= token_is(token, "void");
}

/* The CPU's compiler ignores __global__, so a function without it would run here but not on a GPU. If the function is
 * not visible, or a macro may have declared it, the compiler decides. */
static int lacks_global(const token_list *t, const char *name)
{
    token target = last_name(name);
    declaration before = {0, 0};
    int seen = 0;
    for (size_t i = 0; i + 1 < t->count; i++) {
        const token *token = &t->list[i];
        if (token->kind == TOKEN_DIRECTIVE) {
            if (memmem(token->at, token->size, "__global__", 10) != NULL) {
                return 0;
            }
        } else if (token_same(token, &target) && token_is(&t->list[i + 1], "(")) {
            if (before.is_global) {
                return 0;
            }
            seen |= before.is_void;
        }
        note_token(&before, token);
    }
    return seen;
}

/* --- the whole source -------------------------------------------------------------------------------------------- */

static tch_status rewrite_source(const tch_kernel_text *text, const token_list *tokens, tchi_cpu_source *source)
{
    const tch_backend_host *host = tchi_cpu_host();
    size_t words = 0, length = strlen(text->source);
    if (lacks_global(tokens, text->name)) {
        return host->fail(TCH_ERR_INVALID_ARGUMENT,
                          "%.200s is not a kernel: it is declared without __global__ in %.200s", text->name,
                          text->file);
    }
    for (size_t i = 0; i < tokens->count; i++) {
        words += token_is(&tokens->list[i], "extern");
    }
    source->size = length + words * WORDS_BYTES + 1;
    TCHI_TRY(tchi_backend_take(host, source->size, "a kernel's source", &source->text));
    writer w = {source->text, 0, text->source};
    source->dynamic = rewrite_shared(tokens, &w);
    put_text(&w, w.from, strlen(w.from) + 1);
    return TCH_OK;
}

tch_status tchi_cpu_source_prepare(const tch_kernel_text *text, tchi_cpu_source *source)
{
    token_list tokens;
    TCHI_TRY(read_tokens(text->source, &tokens));
    tch_status status = rewrite_source(text, &tokens, source);
    tchi_cpu_host()->release(tokens.list, tokens.bytes);
    return status;
}
