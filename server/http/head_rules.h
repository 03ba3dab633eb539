/* head_rules.h: the rules by which the head of a well-formed HTTP request may be refused, before its body is read. This
 * file uses no sockets. */
#ifndef HEAD_RULES_H
#define HEAD_RULES_H

#include "server/http/http_head.h"
#include "server/http/exchange.h"

/* Decides whether a page of another origin sent the request and may read the answer. Sets the exchange's members cors
 * and preflight. Call this before head_rules_check(). */
void head_rules_origin(struct request *request, const struct http_head *head);

/* Finds the route, the account and the body's parser. If a rule is broken, the request fails with a text that says what
 * arrived and what is expected, and often gives a hint. */
void head_rules_check(struct request *request, const struct http_head *head);

#endif
