/* healthcheck.h: `attnd healthcheck [URL]`: does a running attnd take work? For Docker's HEALTHCHECK and shell
 * scripts, so that an image needs no curl. */
#ifndef HEALTHCHECK_H
#define HEALTHCHECK_H

/* argv[0] is "healthcheck"; argv[1], where given, is a URL ("http://127.0.0.1:8080/readyz"), an address as --listen
 * takes it ("[::1]:8080", "unix:/run/attnd.sock") or --help. Without it the first address of ATTND_LISTEN is asked,
 * else 127.0.0.1:8080; a wildcard address (0.0.0.0, [::]) is asked through loopback. The default path is /readyz.
 * TLS is not spoken: for https:// (and without a URL where ATTND_TLS_CERT is set) any TLS record in answer to a
 * ClientHello counts as healthy. Prints one line (stdout when healthy, stderr otherwise) and returns the exit
 * status: 0 for an answer of 200 to 299 within 5 s, 1 for anything else, 64 for arguments it does not understand.
 * Starts no thread. In main(): if (argc > 1 && strcmp(argv[1], "healthcheck") == 0) return healthcheck_main(argc -
 * 1, argv + 1); */
int healthcheck_main(int argc, char **argv);

#endif
