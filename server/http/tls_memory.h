/* tls_memory.h: makes GMP wait for memory. GnuTLS computes with GMP, which would abort the process as soon as malloc()
 * fails. */
#ifndef TLS_MEMORY_H
#define TLS_MEMORY_H

/* Makes GMP, the arithmetic library of GnuTLS, wait up to TLS_MEMORY_WAIT_MS when malloc() fails, because other
 * requests may end and free memory. Call this before any TLS handshake. It does nothing in a process without GMP. */
void tls_memory_wait(void);

#endif
