/* page.h: pages for browsers: GET / shows /v1/info and refreshes itself,
 * GET /docs shows /openapi.json and sends requests. */
#ifndef PAGE_H
#define PAGE_H

#include <stddef.h>

#include "server/work/request.h"

enum page { PAGE_INDEX, PAGE_DOCS, PAGE_COUNT };

/* text/html; charset=utf-8, malloc'ed, NUL-ended, *length bytes without the NUL; NULL when out of memory.
 * From any thread. */
char *page_write(enum page page, size_t *length);

/* The value of the Content-Security-Policy header that goes with it. */
const char *page_csp(enum page page);

/* GET / and GET /docs. Any thread may call them. */
void page_answer_index(struct request *request, struct answer *answer);
void page_answer_docs(struct request *request, struct answer *answer);

#endif
