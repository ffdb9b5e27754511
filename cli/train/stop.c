/* Ctrl-C and its relatives. The handler only notes the signal, which the loop looks at between steps; a second signal
 * finds the note and does what it would have done without us. */
#define _POSIX_C_SOURCE 200809L
#include "stop.h"

#include <signal.h>
#include <stddef.h>

static volatile sig_atomic_t asked; /* by this signal, or 0 */

static void on_signal(int number)
{
    if (asked) {
        signal(number, SIG_DFL);
        raise(number);
    }
    asked = number;
}

/* Who started us may have had a signal ignored, as nohup does with SIGHUP and a shell with SIGINT for its background:
 * then it stays ignored. */
static void watch_signal(int number)
{
    struct sigaction before, action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    if (sigaction(number, NULL, &before) == 0 && before.sa_handler != SIG_IGN) {
        sigaction(number, &action, NULL);
    }
}

void train_stop_watch(void)
{
    asked = 0;
    watch_signal(SIGINT);
    watch_signal(SIGTERM);
    watch_signal(SIGHUP);
}

int train_stop_asked(void)
{
    return asked;
}
