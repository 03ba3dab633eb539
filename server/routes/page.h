/* page.h: pages for browsers. GET / shows the data of /v1/info and refreshes itself. GET /docs shows the OpenAPI
 * document and sends requests. */
#ifndef PAGE_H
#define PAGE_H

#include <stddef.h>

#include "server/work/request.h"

enum page { PAGE_INDEX, PAGE_DOCS, PAGE_COUNT };

/* Writes a page of the type text/html; charset=utf-8. Returns a text of *length bytes, followed by a NUL, which the
 * caller frees. Returns NULL when out of memory. Any thread may call this. */
char *page_write(enum page page, size_t *length);

const char *page_csp(enum page page);

void page_answer_index(struct request *request, struct answer *answer);
void page_answer_docs(struct request *request, struct answer *answer);

#endif
