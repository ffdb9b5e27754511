/* Checks of rejected calls: the status, a message that names the argument, and nothing written. */
#ifndef TORCHIUM_TESTS_MESSAGES_H
#define TORCHIUM_TESTS_MESSAGES_H

#include <stdbool.h>

#include <torchium/status.h>

/* True if the message names this argument: as a whole word, and for "a" not as the article. */
bool test_names_argument(const char *message, const char *name);

/* Fails the test unless `got` is `expected` and this thread's message names the argument. */
void test_check_refused(tch_status got, tch_status expected, const char *argument);

#endif
