/* verify.c: bounds for attn_verify(), which does the work (kernels/cpu/reference.c). */
#include "server/work/verify.h"

attn_status verify_check(const proto_item *item, attn_error *err)
{
    const attn_problem *p = &item->problem;
    if (p->op != ATTN_OP_FORWARD || p->out.rank == 0)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify", "verify: only the out of a forward can be verified");
    const attn_dims d = attn_dims_of(p);
    const int64_t total = d.H * (d.packed ? d.total_q : d.B * d.Sq); /* fits: q was checked */
    const int64_t rows = item->verify_rows < 0 || item->verify_rows > total ? total : item->verify_rows;
    int64_t head, work;
    if (__builtin_mul_overflow(d.Sk, d.D + d.Dv, &head) || head > VERIFY_MAX_HEAD_ELEMENTS)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify",
                         "verify: Sk * (D + Dv) is %lld, at most %lld can be verified", (long long)d.Sk * (d.D + d.Dv),
                         (long long)VERIFY_MAX_HEAD_ELEMENTS);
    if (__builtin_mul_overflow(rows, head, &work) || work > VERIFY_MAX_MULTIPLY_ADDS)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify", "verify: at most %lld of the %lld rows can be verified here",
                         (long long)(VERIFY_MAX_MULTIPLY_ADDS / head), (long long)total);
    return ATTN_OK;
}

void verify_job(struct job *job)
{
    for (int i = 0; i < job->call->count; i++) {
        const proto_item *item = &job->call->items[i];
        proto_result *result = &job->results[i];
        attn_verification found;
        if (result->error.status != ATTN_OK || item->verify_rows == 0) continue;
        if (attn_verify(&item->problem, item->verify_rows, &found, &result->error) != ATTN_OK) continue;
        result->verified = true;
        result->verification =
            (proto_verification){ .max_abs = found.max_abs, .relative = found.relative, .rows = found.rows };
    }
}
