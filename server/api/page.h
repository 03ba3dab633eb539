/* page.h: GET /: a page for browsers that shows /v1/info and refreshes itself. */
#ifndef PAGE_H
#define PAGE_H

#include <stddef.h>

/* text/html; charset=utf-8, malloc'ed, NUL-ended, *length bytes without the NUL; NULL when out of memory. From any thread. */
char *page_write(size_t *length);

/* The value of the Content-Security-Policy header that goes with it. */
extern const char page_csp[];

#endif
