/* attention.h: the content types of routes whose bodies contain tensors, and the schemas of their requests and answers.
 * A route whose operation a device computes (work/job.h) has no handler. */
#ifndef ROUTES_ATTENTION_H
#define ROUTES_ATTENTION_H

#include "proto-json/proto.h"
#include "server/routes/json.h"
#include "server/routes/route.h"

/* The content types of a route whose bodies contain tensors. */
extern const struct route_body attention_bodies[];

/* Writes the schemas of all operations as members of components/schemas, such as ForwardProblem, ForwardRequest and
 * ForwardAnswer. */
void attention_put_schemas(struct json *j, const proto_limits *limits);

/* Writes the names of the dtypes in this set (bits of attn_dtype) as elements of an array. */
void attention_put_dtypes(struct json *j, unsigned dtypes);

#endif
