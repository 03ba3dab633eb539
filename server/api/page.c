/* page.c: the page at /, for browsers.
 *
 * It is index.html, which the assembler puts into the program, with the version in the place of a mark: no external asset,
 * nothing that a client sent. Its script fetches /v1/info every two seconds and writes texts (never HTML) into it. Script
 * and style run by their SHA-256 in the Content-Security-Policy; after an edit the failing test says the new hashes. */
#include "server/api/page.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* (The Makefile knows that this file depends on index.html.) */
__asm__(".pushsection .rodata\n"
        "page_text: .incbin \"server/api/index.html\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const char page_text[] __attribute__((visibility("hidden"))); /* NUL-ended */

static const char mark[] = "@VERSION@";

const char page_csp[] = "default-src 'none'; "
                        "style-src 'sha256-/kDzXXp1ar2KeDkZESKSmqp2N4qruHgD3AJYUICoMw8='; "
                        "script-src 'sha256-Vm0VVsLya5VhyoPrBbExbGEvyMOgLVNhSCE/+eMD55c='; "
                        "connect-src 'self'; img-src data:; "
                        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

char *page_write(size_t *length)
{
    const char *rest = strstr(page_text, mark);
    assert(rest != NULL);
    const size_t before = (size_t)(rest - page_text);
    char *page = malloc(strlen(page_text) + sizeof ATTND_VERSION);
    if (page == NULL) return NULL;
    memcpy(page, page_text, before);
    *length = (size_t)(stpcpy(stpcpy(page + before, ATTND_VERSION), rest + sizeof mark - 1) - page);
    return page;
}
