/* tls_memory.h: GnuTLS computes with GMP, which aborts the process where malloc() gives it nothing. */
#ifndef TLS_MEMORY_H
#define TLS_MEMORY_H

/* From here on GMP's numbers wait for memory, up to TLS_MEMORY_WAIT_MS: requests end meanwhile and give theirs back.
 * Call it before any handshake. Without GMP in this process nothing happens. */
void tls_memory_wait(void);

#endif
