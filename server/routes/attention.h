/* attention.h: routes whose bodies are tensors: their content types, and the schemas of what they take and answer. The
 * work behind these routes is a job (work/job.h), so they have no handler. */
#ifndef ROUTES_ATTENTION_H
#define ROUTES_ATTENTION_H

#include "proto-json/proto.h"
#include "server/routes/json.h"
#include "server/routes/route.h"

/* The content types of such a route. The answer has the body's type, or one that Accept prefers. */
extern const struct route_body attention_bodies[];

/* Writes the schemas of all operations as members of components/schemas: ForwardProblem, ForwardRequest,
 * ForwardAnswer, ... */
void attention_put_schemas(struct json *j, const proto_limits *limits);

/* Writes the names of the dtypes in this set (bits of attn_dtype) as elements of an array. */
void attention_put_dtypes(struct json *j, unsigned dtypes);

#endif
