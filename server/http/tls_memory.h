/* tls_memory.h: GnuTLS computes with GMP, which aborts the process where malloc() gives it nothing. */
#ifndef TLS_MEMORY_H
#define TLS_MEMORY_H

/* Makes GMP wait for memory, up to TLS_MEMORY_WAIT_MS; requests that end meanwhile give memory back. Call it before any
 * handshake. It does nothing where this process has no GMP. */
void tls_memory_wait(void);

#endif
