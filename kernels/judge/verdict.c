/* verdict.c: computes the error, the limit and the verdict of each tensor of the caller. */
#include "kernels/judge/state.h"

#include <math.h>

/* Returns half the distance from x to the next larger number of the dtype (half a unit in the last place). */
static double half_ulp(attn_dtype dtype, double x)
{
    static const int bits[ATTN_DTYPE_COUNT] = { [ATTN_F32] = 24, [ATTN_F16] = 11, [ATTN_BF16] = 8, [ATTN_F8E4M3] = 4 };
    static const int least[ATTN_DTYPE_COUNT] = {
        [ATTN_F32] = -126, [ATTN_F16] = -14, [ATTN_BF16] = -126, [ATTN_F8E4M3] = -6
    };
    int exponent;
    if (x == 0) return 0;
    (void)frexp(x, &exponent);
    if (exponent - 1 < least[dtype]) exponent = least[dtype] + 1;
    return ldexp(0.5, exponent - bits[dtype]);
}

static double allowed(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? 1e-6 : dtype == ATTN_F16 ? 1e-5 : dtype == ATTN_BF16 ? 1e-4 : 1e-3;
}

/* Returns the factor by which the measured error of correct kernels is multiplied, for dbias, dsinks or dslopes with
 * `count` elements. The factor is 1 for 64 elements or more. With fewer elements, the largest measured error is the
 * largest of a few random numbers, and another correct kernel often has a much larger error. */
static double scatter(int64_t count)
{
    return count == 0 || count >= 64 ? 1 : 1 + 2 * (1 / sqrt((double)count) - 1 / sqrt(64));
}

/* Returns the factor by which the measured errors of correct kernels are multiplied to get a limit. The errors were
 * measured in only `emulated` of the `compared` rows. The largest of n independent errors grows with n like
 * sqrt(log(n)), if their distribution is normal. Errors within a row are not independent, so the factor also has a
 * margin for large errors that the measured rows may miss. */
static double unseen(attn_dtype dtype, int64_t emulated, int64_t compared)
{
    const double margin = dtype == ATTN_F32 ? 2 : 1.25;
    return margin * sqrt(log(fmax(2, (double)compared)) / log(fmax(2, (double)emulated)));
}

void verdict_decide(struct judge *j)
{
    j->verdict = JUDGE_MATCH;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const attn_tensor_id id = frame_tensors[which];
        judge_tensor *const t = &j->tensor[which];
        if (!state_is_given(j, id)) continue;
        const attn_dtype dtype = j->results[id].dtype;
        const double largest = j->largest[which];
        t->max_abs = difference_worst(&j->now[which]);
        t->relative = t->max_abs == 0 ? 0 : largest > 0 ? t->max_abs / largest : INFINITY;
        const int64_t columns = attn_max64(1, frame_columns(&j->frame, id));
        const double noise = j->noise[which].most * (j->emulated ? unseen(j->p.q.dtype, j->noise[which].count / columns,
                                                                          j->now[which].count / columns)
                                                                 : 1);
        t->explained = fmax(noise, half_ulp(dtype, largest));
        if (which >= FRAME_KEY_TENSORS) t->explained *= scatter(j->sum_elements[which]);
        t->limit = (which < 2 ? 2 : 3) * t->explained + allowed(dtype);
        if (id == ATTN_T_lse)
            t->limit = 2e-5 + 1e-6 * j->largest_score + (dtype == ATTN_F32 ? 0 : 2 * half_ulp(dtype, largest));
        if (id == ATTN_T_lse) t->limit = fmax(t->limit, 2 * noise);
        t->of = j->now[which].count;
        t->verdict = t->max_abs <= 2 * j->once[which] ? JUDGE_MATCH
                     : t->max_abs <= t->limit         ? JUDGE_ROUNDING
                                                      : JUDGE_MISMATCH;
        if (t->verdict > j->verdict) j->verdict = t->verdict;
        if (t->verdict == JUDGE_MISMATCH) j->wrong |= 1u << which;
    }
}
