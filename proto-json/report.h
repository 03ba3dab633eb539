/* report.h: a judge's result (what is wrong with a client's outputs) as JSON, for the answer of a check and for the
 * command `attnd check`. */
#ifndef PROTO_REPORT_H
#define PROTO_REPORT_H

#include "kernels/judge/judge.h"
#include "text/text.h"

/* The members of an answer that report a judge's result, in order. */
enum { REPORT_MEMBERS = 8 };
typedef struct report_member {
    const char *name;
    void (*put)(struct text *t, const judge_result *result);
} report_member;
extern const report_member report_members[REPORT_MEMBERS];

/* Writes a double as JSON; NaN and infinities become strings. */
void report_put_double(struct text *t, double x);

#endif
