/* The commands. Each gets the arguments after its name and returns an exit status of output.h. */
#ifndef CLI_COMMANDS_H
#define CLI_COMMANDS_H

int command_info(int argc, char **argv);
int command_train(int argc, char **argv);
int command_bench(int argc, char **argv);

#endif
