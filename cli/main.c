/* The command `torchium`: finds a command in a table and runs it. A new command is a line in that table and a file;
 * commands use only the public interface. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <torchium/torchium.h>

#include "commands.h"
#include "terminal/options.h"
#include "terminal/output.h"

typedef struct command {
    const char *name;
    const char *summary;
    int (*run)(int argc, char **argv);
} command;

static const command commands[] = {
    {"info", "this installation, and the devices it can use", command_info},
    {"train", "trains a network with one optimizer or several, and compares them", command_train},
    {"bench", "times the operations against the limits of this machine", command_bench},
};
enum { COMMANDS = sizeof commands / sizeof commands[0] };

static int print_help(void)
{
    puts("usage: torchium COMMAND [options]\n\n"
         "Second-order optimization of neural networks.\n\n"
         "commands:");
    for (int i = 0; i < COMMANDS; i++) {
        printf("  %-8s %s\n", commands[i].name, commands[i].summary);
    }
    puts("  help     help on a command: torchium help COMMAND\n\n"
         "options:\n"
         "  --version\n"
         "  --help\n\n"
         "Exit status: 0 done, 1 failed, 2 wrong usage; an interrupted run exits by its signal.");
    return CLI_OK;
}

static const command *find_command(const char *name)
{
    for (int i = 0; i < COMMANDS; i++) {
        if (strcmp(commands[i].name, name) == 0) {
            return &commands[i];
        }
    }
    return NULL;
}

static int report_unknown(const char *name)
{
    const char *names[COMMANDS + 3] = {[COMMANDS] = "help", "--help", "--version"};
    for (int i = 0; i < COMMANDS; i++) {
        names[i] = commands[i].name;
    }
    const char *what = name[0] == '-' ? "option" : "command";
    const char *nearest = options_nearest(name, names, COMMANDS + 3);
    if (nearest != NULL) {
        return output_usage("", "unknown %s '%s'; did you mean 'torchium %s'?", what, name, nearest);
    }
    return output_usage("", "unknown %s '%s'", what, name);
}

static int run_help(int argc, char **argv)
{
    char option[] = "--help";
    char *arguments[] = {option, NULL};
    if (argc == 0) {
        return print_help();
    }
    if (argc > 1) {
        return output_usage("", "help takes one command: torchium help %s", argv[0]);
    }
    const command *found = find_command(argv[0]);
    return found != NULL ? found->run(1, arguments) : report_unknown(argv[0]);
}

static int dispatch(int argc, char **argv)
{
    const char *name = argv[0];
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        return run_help(argc - 1, argv + 1);
    }
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        printf("torchium %s\n", tch_version());
        return CLI_OK;
    }
    const command *found = find_command(name);
    return found != NULL ? found->run(argc - 1, argv + 1) : report_unknown(name);
}

/* A file opened later would get the descriptor of a closed standard stream, and a GPU's driver keeps files open: output
 * would be written to them. Opened for reading, the stream fails to write, which is reported. */
static void occupy_standard_streams(void)
{
    int file = 0;
    while (file >= 0 && file <= STDERR_FILENO) {
        file = open("/dev/null", O_RDONLY);
    }
    if (file >= 0) {
        close(file);
    }
}

/* A command that was stopped by a signal ends by that signal, so that the parent process can tell. */
static int end_by_signal(int status)
{
    if (status > CLI_SIGNAL) {
        signal(status - CLI_SIGNAL, SIG_DFL);
        raise(status - CLI_SIGNAL);
    }
    return status;
}

int main(int argc, char **argv)
{
    occupy_standard_streams();
    signal(SIGXFSZ, SIG_IGN); /* writes beyond the limit return an error */
    if (argc < 2) {
        return output_usage("", "a command is missing; 'torchium info' is a good first one");
    }
    int status = dispatch(argc - 1, argv + 1);
    return end_by_signal(output_finish("", status));
}
