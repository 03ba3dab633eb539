/* tls_memory.c: makes GMP (the arithmetic library of GnuTLS) wait while memory is short. attnd is not linked with GMP,
 * so the function that sets GMP's memory functions is looked up at run time. */
#include "server/http/tls_memory.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "server/base/limits.h"

static void *wait_for(void *old, size_t bytes)
{
    for (int ms = 0; ms <= TLS_MEMORY_WAIT_MS; ms += TLS_MEMORY_STEP_MS) {
        void *memory = realloc(old, bytes > 0 ? bytes : 1);
        if (memory) return memory;
        usleep(TLS_MEMORY_STEP_MS * 1000);
    }
    fprintf(stderr, "attnd: no memory for %zu bytes of a TLS handshake for %d ms, and GMP goes on with nothing else\n",
            bytes, TLS_MEMORY_WAIT_MS);
    abort();
}

static void *gmp_malloc(size_t bytes)
{
    return wait_for(NULL, bytes);
}

static void *gmp_realloc(void *memory, size_t old_bytes, size_t bytes)
{
    (void)old_bytes;
    return wait_for(memory, bytes);
}

static void gmp_free(void *memory, size_t bytes)
{
    (void)bytes;
    free(memory);
}

void tls_memory_wait(void)
{
    typedef void function(void *(*)(size_t), void *(*)(void *, size_t, size_t), void (*)(void *, size_t));
    void *found = dlsym(RTLD_DEFAULT, "__gmp_set_memory_functions");
    if (found) (*(function **)&found)(gmp_malloc, gmp_realloc, gmp_free);
}
