/* healthcheck.h: the command `attnd healthcheck [URL]`, for Docker's HEALTHCHECK and shell scripts, so that an image
 * needs no curl. */
#ifndef HEALTHCHECK_H
#define HEALTHCHECK_H

/* argv[0] is "healthcheck". argv[1] may be a URL ("http://127.0.0.1:8080/readyz"), an address in the form of --listen
 * ("[::1]:8080", "unix:/run/attnd.sock"), or --help. Without argv[1] the target is the first address of ATTND_LISTEN
 * or, if that is not set, 127.0.0.1:8080. A wildcard address (0.0.0.0, [::]) is reached through loopback. The default
 * path is /readyz. The command does not speak TLS. For https:// (and for ATTND_TLS_CERT without a URL) any TLS record
 * after a ClientHello counts as healthy.
 *
 * Prints one line (on stdout if healthy, else on stderr) and returns the exit status: 0 for an answer of 200 to 299
 * within 5 s, 64 for wrong arguments, 1 for anything else. It starts no thread. In main():
 *     if (argc > 1 && strcmp(argv[1], "healthcheck") == 0) return healthcheck_main(argc - 1, argv + 1); */
int healthcheck_main(int argc, char **argv);

#endif
