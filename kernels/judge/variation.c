/* variation.c: variation_of(), which makes the variation without a mistake (correct attention). */
#include "kernels/judge/variation.h"

variation variation_of(const attn_problem *p)
{
    variation v = { .g = attn_geometry_of(p), .q_column = 1, .k_column = 1, .v_column = 1 };
    v.bias_factor = v.alibi_factor = v.lse_factor = v.dq_factor = v.dk_factor = v.sink_weight = 1;
    v.dropout_p = p->dropout_p;
    v.seed = p->seed;
    v.only_member = -1;
    return v;
}
