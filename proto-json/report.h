/* report.h: writes as JSON what is wrong with a client's outputs, for the answer to a check request and for the command
 * `attnd check`. */
#ifndef PROTO_REPORT_H
#define PROTO_REPORT_H

#include "kernels/judge/judge.h"
#include "text/text.h"

/* The JSON members of a report about a client's outputs, in the order of the answer. */
enum { REPORT_MEMBERS = 8 };
typedef struct report_member {
    const char *name;
    void (*put)(struct text *t, const judge_result *result);
} report_member;
extern const report_member report_members[REPORT_MEMBERS];

/* Writes a double as JSON; NaN and infinities become strings. */
void report_put_double(struct text *t, double x);

#endif
