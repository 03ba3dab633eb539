/* tls_memory.h: GnuTLS computes with GMP, which aborts the process when malloc() fails. This makes GMP wait for memory
 * first. */
#ifndef TLS_MEMORY_H
#define TLS_MEMORY_H

/* Makes GMP wait for memory, up to TLS_MEMORY_WAIT_MS, because requests that end meanwhile release memory. Call this
 * before any handshake. It does nothing in a process without GMP. */
void tls_memory_wait(void);

#endif
