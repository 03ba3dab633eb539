/* head_rules.h: the rules by which the server may refuse a request because of its head, before the server reads the
 * body. The head is well-formed HTTP (http_head.h checks that). */
#ifndef HEAD_RULES_H
#define HEAD_RULES_H

#include "server/http/http_head.h"
#include "server/http/exchange.h"

/* Decides whether a web page of another origin (site) sent the request, and whether that page may read the answer. Sets
 * the exchange's members cors and preflight. Call this before head_rules_check(). */
void head_rules_origin(struct request *request, const struct http_head *head);

/* Finds the route of the request, its account (token) and the format of its body. If the head breaks a rule, the
 * request fails. The error's text says what arrived and what is expected, and often gives a hint. */
void head_rules_check(struct request *request, const struct http_head *head);

#endif
