/* Reading a source into tokens. Nothing here fails but for memory: what is no C++ is told by the compiler. */
#include <ctype.h>

#include "kernel.h"
#include "kernel_tokens.h"

#define RAW_MARK_MOST 16

static int is_word(char c)
{
    return isalnum((unsigned char)c) || c == '_' || (unsigned char)c >= 0x80;
}

static const char *skip_comment(const char *p)
{
    if (p[1] == '/') {
        return p + strcspn(p, "\n");
    }
    const char *end = strchr(p + 2, '*'); /* strstr of AddressSanitizer looks at the whole text each time */
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

/* R"mark( ... )mark", `p` at the quote. A mark has at most 16 characters; what has more is no raw text to a
 * compiler. */
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

/* An apostrophe inside a number parts its digits. */
static const char *end_of_word(const char *p)
{
    int number = isdigit((unsigned char)*p);
    while (is_word(*p) || (number && (*p == '.' || (*p == '\'' && is_word(p[1]))))) {
        p++;
    }
    return p;
}

static const char *next_token(const char *p, int line_start, tchi_token *token)
{
    const char *end = p + 1;
    token->kind = TCHI_TOKEN_MARK;
    if (*p == '#' && line_start) {
        token->kind = TCHI_TOKEN_DIRECTIVE;
        end = end_of_directive(p);
    } else if (*p == 'R' && p[1] == '"') {
        token->kind = TCHI_TOKEN_TEXT;
        end = end_of_raw_text(p + 1);
    } else if (*p == '"' || *p == '\'') {
        token->kind = TCHI_TOKEN_TEXT;
        end = end_of_text(p);
    } else if (is_word(*p)) {
        token->kind = TCHI_TOKEN_WORD;
        end = end_of_word(p);
    }
    token->at = p;
    token->size = (size_t)(end - p);
    return end;
}

int tchi_kernel_tokens_read(const char *source, tchi_kernel_tokens *tokens)
{
    tokens->count = 0;
    tokens->bytes = (strlen(source) + 1) * sizeof *tokens->list;
    tokens->list = tchi_cpu_host()->allocate(tokens->bytes, _Alignof(tchi_token));
    if (tokens->list == NULL) {
        return -1;
    }
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
    return 0;
}

void tchi_kernel_tokens_free(tchi_kernel_tokens *tokens)
{
    tchi_cpu_host()->release(tokens->list, tokens->bytes);
}
