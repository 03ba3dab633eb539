/* head_rules.h: the rules by which the head of a well-formed HTTP message may be refused, before its body is read. This
 * file uses no sockets. */
#ifndef HEAD_RULES_H
#define HEAD_RULES_H

#include "server/http/http_head.h"
#include "server/http/exchange.h"

/* Decides whether a page of another origin sent the request and may read the answer: sets the exchange's cors and
 * preflight. Call this before head_rules_check(). */
void head_rules_origin(struct request *request, const struct http_head *head);

/* Finds the route, the caller and the body's parser. On an error the request fails; the text says what arrived, what is
 * expected, and a hint. */
void head_rules_check(struct request *request, const struct http_head *head);

#endif
