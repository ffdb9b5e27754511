/* Finding #include without being a preprocessor. It may find more than the compiler does, in comments or in branches
 * that are not taken: that costs a needless dependency. It must never find less, and therefore remembers nothing from
 * one line to the next that an unusual string or comment could confuse. */
#include "includes.h"

#include <string.h>

/* Between a # and its word, comments included. Where there is more, which nobody writes, the compiler has to say what
 * it means: the search goes on right behind the #, and would otherwise go over long comments again and again. */
#define BLANKS_MOST 1024

/* The next character, behind the ends of lines that a backslash takes away. */
static const char *join(const char *at)
{
    while (*at == '\\') {
        const char *end = at + 1 + strspn(at + 1, " \t\r");
        if (*end != '\n') {
            break;
        }
        at = end + 1;
    }
    return at;
}

static const char *step(const char *at)
{
    return *at == '\0' ? at : join(at + 1);
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\v' || c == '\f' || c == '\r';
}

/* Behind a comment, whose first two characters `at` has, or where *left steps end. */
static const char *skip_comment(const char *at, int *left)
{
    at = step(step(at));
    while (*at != '\0' && !(*at == '*' && *step(at) == '/') && --*left > 0) {
        at = step(at);
    }
    return step(step(at));
}

/* Behind blanks and comments, which may have several lines; NULL where there are more than BLANKS_MOST. */
static const char *skip_blanks(const char *at)
{
    int left = BLANKS_MOST;
    while (left > 0) {
        if (is_blank(*at)) {
            at = step(at);
            left--;
        } else if (*at == '/' && *step(at) == '*') {
            at = skip_comment(at, &left);
            left--;
        } else {
            return at;
        }
    }
    return NULL;
}

/* Letters up to the end of a word; cut off where there are more than fit, and then no word that we know. */
static const char *take_word(const char *at, char *word, size_t size)
{
    size_t used = 0;
    while ((*at >= 'a' && *at <= 'z') || *at == '_') {
        if (used + 1 < size) {
            word[used++] = *at;
        }
        at = step(at);
    }
    word[used] = '\0';
    return at;
}

/* `at` may be NULL: then only the compiler knows. */
static void take_name(const char *at, tchi_include *include)
{
    char close = at == NULL ? '\0' : *at == '"' ? '"' : *at == '<' ? '>' : '\0';
    size_t used = 0;
    include->quoted = close == '"';
    include->known = false;
    if (close == '\0') {
        return;
    }
    for (at = step(at); *at != '\0' && *at != '\n' && *at != close && used + 1 < sizeof include->name; at = step(at)) {
        include->name[used++] = *at;
    }
    include->name[used] = '\0';
    include->known = *at == close;
}

/* Whether what follows a # includes something, or may do so. */
static bool take_directive(const char *at, tchi_include *include)
{
    char word[16];
    include->known = false;
    at = skip_blanks(at);
    if (at == NULL) {
        return true;
    }
    at = take_word(at, word, sizeof word);
    if (strcmp(word, "include") == 0) {
        take_name(skip_blanks(at), include);
        return true;
    }
    return strcmp(word, "include_next") == 0 || strcmp(word, "import") == 0 || strcmp(word, "embed") == 0;
}

/* A # begins a directive where nothing but blanks and comments stand before it. The end of a comment is all that is
 * looked for: what begins one may lie lines above. A %: is another spelling of #. The search goes on right behind the
 * #, since what was taken for a comment there may be none. */
bool tchi_include_next(const char **at, tchi_include *include)
{
    bool fresh = true;
    bool found = false;
    const char *p = join(*at);
    while (*p != '\0' && !found) {
        const char *next = step(p);
        bool pair = (*p == '%' && *next == ':') || (*p == '*' && *next == '/');
        bool begins = fresh && (*p == '#' || (pair && *p == '%'));
        fresh = *p == '\n' || (pair && *p == '*') || (fresh && is_blank(*p));
        p = pair ? step(next) : next;
        found = begins && take_directive(p, include);
    }
    *at = p;
    return found;
}
