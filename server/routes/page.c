/* page.c: the pages at / and /docs, for browsers: index.html and docs.html, embedded in the program.
 *
 * They contain no external asset and no text from clients. The script of index.html fetches /v1/info every two seconds,
 * and that of docs.html fetches /openapi.json once. The Content-Security-Policy allows their style and script by
 * SHA-256; after an edit of a page a test fails and prints the new hashes. */
#include "server/routes/page.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Embeds index.html and docs.html in the program. */
__asm__(".pushsection .rodata\n"
        "page_index: .incbin \"server/routes/index.html\"\n"
        ".byte 0\n"
        "page_docs: .incbin \"server/routes/docs.html\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const char page_index[] __attribute__((visibility("hidden")));
extern const char page_docs[] __attribute__((visibility("hidden")));

static const char mark[] = "@VERSION@";

/* A Content-Security-Policy that allows only the page's own style and script, data: images, and requests to this
 * server. */
#define CSP(style, script)                \
    "default-src 'none'; "                \
    "style-src 'sha256-" style "'; "      \
    "script-src 'sha256-" script "'; "    \
    "connect-src 'self'; img-src data:; " \
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

static const struct {
    const char *text, *csp;
} pages[PAGE_COUNT] = {
    [PAGE_INDEX] = { page_index, CSP("EAgkTpFG9gQpUNn2CwnwmKrOgFVQwWeSz3qNds9VTlQ=",
                                     "OoM3Ahk2W5xZpyzjSUnw7/urF0KuUHrZTKqA+RMo8LM=") },
    [PAGE_DOCS] = { page_docs, CSP("W3ZpOW0OhpfqXiupMg4HCMmQCM0NjJFtO3ThLOIcMaA=",
                                   "8ensVOaaLQWcClloHYRQaBuajcplpkbgFdB0lmdG8KA=") },
};

char *page_write(enum page page, size_t *length)
{
    const char *text = pages[page].text, *rest = strstr(text, mark);
    assert(rest != NULL);
    const size_t before = (size_t)(rest - text);
    char *written = malloc(strlen(text) + sizeof ATTND_VERSION);
    if (written == NULL) return NULL;
    memcpy(written, text, before);
    *length = (size_t)(stpcpy(stpcpy(written + before, ATTND_VERSION), rest + sizeof mark - 1) - written);
    return written;
}

const char *page_csp(enum page page)
{
    return pages[page].csp;
}

static void answer_html(enum page page, struct answer *answer)
{
    answer->status = 200;
    answer->content_type = "text/html; charset=utf-8";
    answer->csp = page_csp(page);
    answer->body = page_write(page, &answer->length);
}

void page_answer_index(struct request *request, struct answer *answer)
{
    (void)request;
    answer_html(PAGE_INDEX, answer);
}

void page_answer_docs(struct request *request, struct answer *answer)
{
    (void)request;
    answer_html(PAGE_DOCS, answer);
}
