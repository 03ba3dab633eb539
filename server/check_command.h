/* check_command.h: the command `attnd check FILE.safetensors` says, without a server, what is wrong with a kernel's
 * results. */
#ifndef CHECK_COMMAND_H
#define CHECK_COMMAND_H

/* Runs the command; argv[0] is "check". Exit status:
 *
 *   0    the results in the file match the exact ones, or differ only by rounding
 *   1    the results are wrong
 *   64   the arguments are wrong
 *   65   the file cannot be read or is not understood */
int check_command_main(int argc, char **argv);

#endif
