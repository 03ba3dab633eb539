/* verify.c: bounds for attn_verifier, which does the work (kernels/cpu/reference.c). */
#include "server/work/verify.h"

attn_status verify_check(const proto_item *item, int64_t *left, attn_error *err)
{
    const attn_problem *p = &item->problem;
    if (p->op != ATTN_OP_FORWARD || p->out.rank == 0)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify", "verify: only the out of a forward can be verified");
    const attn_dims d = attn_dims_of(p);
    const int64_t total = d.H * (d.packed ? d.total_q : d.B * d.Sq); /* fits: q was checked */
    const int64_t rows = item->verify_rows < 0 || item->verify_rows > total ? total : item->verify_rows;
    const int64_t heads = d.B * d.H; /* each head that has such a row is made ready once, at the price of a row */
    int64_t head, work;
    if (__builtin_mul_overflow(d.Sk, d.D + d.Dv, &head) || head > VERIFY_MAX_HEAD_ELEMENTS)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify",
                         "verify: Sk * (D + Dv) is %lld, at most %lld can be verified", (long long)d.Sk * (d.D + d.Dv),
                         (long long)VERIFY_MAX_HEAD_ELEMENTS);
    if (__builtin_mul_overflow(rows, head, &work) || work > VERIFY_MAX_MULTIPLY_ADDS)
        return attn_fail(err, ATTN_UNSUPPORTED, "/verify", "verify: at most %lld of the %lld rows can be verified here",
                         (long long)(VERIFY_MAX_MULTIPLY_ADDS / head), (long long)total);
    work += (rows < heads ? rows : heads) * head; /* fits: both are at most 2^30 */
    if (work > *left && *left < VERIFY_MAX_MULTIPLY_ADDS)
        return attn_fail(
            err, ATTN_UNSUPPORTED, "/verify",
            "verify: takes %lld multiply-adds, and the problems before it leave %lld of the %lld of a body",
            (long long)work, (long long)*left, (long long)VERIFY_MAX_MULTIPLY_ADDS);
    *left = work > *left ? 0 : *left - work;
    return ATTN_OK;
}
