/* score.h: how the options of ATTN_SCORE_OPTION_MAP change a score. It is the only definition, for C and CUDA.
 *
 *     s = scale * q . k      ->  attn_score_of()  ->  + bias, ALiBi, saturation  ->  softmax
 *
 * Code that computes scores one by one calls attn_score_of(): the reference and the CPU's kernel "double"
 * (cpu/reference.c), the CPU's code for rows in double (cpu/exact.c), and the general kernels of CUDA (score() of
 * cuda/common/args.cuh). An option that is added to attn_score_of() works in all of these at once. A fast kernel has
 * its own expressions for the options that it supports, and gets no problem that uses another option.
 *
 * C computes in double, which defines correct results. CUDA computes in float, and in double where a score exceeds the
 * range of float. CUDA's struct head_args has the options as floats. A file that needs scores of full precision has its
 * own attn_score_options_as<double> instead. */
#ifndef ATTN_SCORE_H
#define ATTN_SCORE_H

#include <math.h>

#include "tiles.h"

#ifdef __cplusplus
/* a file that computes scores in double defines ATTN_SCORES_IN_DOUBLE before it includes score.h */
#ifdef ATTN_SCORES_IN_DOUBLE
typedef double attn_option_value;
#else
typedef float attn_option_value;
#endif
#define ATTN_OF_REALS template <typename attn_real, typename attn_any_options>
ATTN_HD float attn_tanh(float x)
{
    return tanhf(x);
}
ATTN_HD double attn_tanh(double x)
{
    return tanh(x);
}
#else
typedef double attn_real, attn_option_value;
typedef struct attn_score_options attn_any_options;
#define ATTN_OF_REALS
#define attn_tanh tanh
#endif

#define X(name, id, least, most, rule, meaning) attn_option_value name;
#ifdef __cplusplus
template <typename attn_option_value> struct attn_score_options_as {
    ATTN_SCORE_OPTION_MAP(X)
};
typedef attn_score_options_as<attn_option_value> attn_score_options;
#else
typedef struct attn_score_options {
    ATTN_SCORE_OPTION_MAP(X)
} attn_score_options;
#endif
#undef X

ATTN_HD attn_score_options attn_score_options_of(const attn_geometry *g)
{
    attn_score_options o;
#define X(name, id, least, most, rule, meaning) o.name = (attn_option_value)g->name;
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    return o;
}

/* Applies the options in *o, such as softcap, to s, which is scale times the dot product of query i and key j of
 * sequence `q`. Returns the resulting score. *derivative becomes the derivative of the score with respect to s; a
 * backward multiplies by it. */
ATTN_OF_REALS ATTN_HD attn_real attn_score_of(const attn_any_options *o, const attn_sequence *q, int64_t i, int64_t j,
                                              attn_real s, attn_real *derivative)
{
    /* softcap does not use these arguments; a future option that depends on the positions of query and key would */
    (void)q, (void)i, (void)j;
    *derivative = 1;
    if (o->softcap > 0) {
        const attn_real t = attn_tanh(s / (attn_real)o->softcap);
        *derivative = 1 - t * t;
        s = (attn_real)o->softcap * t;
    }
    return s;
}

#endif
