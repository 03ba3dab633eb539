/* head_rules.h: what the head of a sound HTTP message may be refused for, before its body is read. No sockets. */
#ifndef HEAD_RULES_H
#define HEAD_RULES_H

#include "server/http/http_head.h"
#include "server/http/exchange.h"

/* Pages of other origins: sets the exchange's cors and preflight. Call it before head_rules_check(). */
void head_rules_origin(struct request *request, const struct http_head *head);

/* Finds the route, the caller and the body's parser; or fails the request with what came,
 * what is wanted and a hint. */
void head_rules_check(struct request *request, const struct http_head *head);

#endif
