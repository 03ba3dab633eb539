/* check_command.h: the command `attnd check FILE.safetensors` says, without a server, what is wrong with a kernel's
 * results. */
#ifndef CHECK_COMMAND_H
#define CHECK_COMMAND_H

/* Runs the command; argv[0] is "check". Exit status: 0 the results match, or differ by rounding; 1 they are wrong;
 * 64 wrong arguments; 65 a file that cannot be read or is not understood. */
int check_command_main(int argc, char **argv);

#endif
