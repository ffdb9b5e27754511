/* Ctrl-C. The handler only sets a flag, which the loop looks at between steps; a second signal finds the flag set and
 * does what it would have done without us. */
#define _POSIX_C_SOURCE 200809L
#include <signal.h>

#include "train.h"

static volatile sig_atomic_t asked;

static void on_signal(int number)
{
    if (asked) {
        signal(number, SIG_DFL);
        raise(number);
    }
    asked = 1;
}

void train_stop_watch(void)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    asked = 0;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool train_stop_asked(void)
{
    return asked != 0;
}
