/* Tests check only the argument's name in messages, never the wording. */
#include "messages.h"

#include <ctype.h>

#include "testing.h"

static bool is_word_character(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

/* Characters that follow the argument `a` and not the article. */
static bool follows_a_name(const char *rest)
{
    static const char *const follow[] = {" is", " has ", " and ", " are ", " must ", " in ", " [", ":", ",", ";", "."};
    for (size_t i = 0; i < sizeof follow / sizeof follow[0]; i++) {
        if (strncmp(rest, follow[i], strlen(follow[i])) == 0) {
            return true;
        }
    }
    return *rest == '\0';
}

bool test_names_argument(const char *message, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = strstr(message, name); at != NULL; at = strstr(at + 1, name)) {
        bool starts = at == message || !is_word_character(at[-1]);
        bool ends = !is_word_character(at[length]);
        bool first = at == message || (at - message >= 2 && at[-2] == ':');
        if (starts && ends && (strcmp(name, "a") != 0 || first || follows_a_name(at + 1))) {
            return true;
        }
    }
    return false;
}

void test_check_refused(tch_status got, tch_status expected, const char *argument)
{
    CHECK(got == expected, "gave %s, expected %s (%s)", tch_status_name(got), tch_status_name(expected),
          got == TCH_OK ? "no message" : tch_last_error());
    CHECK(test_names_argument(tch_last_error(), argument), "the message does not name %s: %s", argument,
          tch_last_error());
}
