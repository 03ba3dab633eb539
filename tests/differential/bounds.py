"""How far lse and the gradients of a right kernel may be from float64, by an analysis of its rounding errors.

The limits of kernels/README.md are shares of a tensor's largest number. They say nothing about sums that cancel, whose
result is smaller than the rounding errors of its terms. This file derives bounds on such errors.

The model is probabilistic error analysis (Higham and Mary, 2019). Each rounding has an independent error of mean 0
within a bound. In addition, all errors of a row may be equal, because equal numbers are rounded alike. Errors of
different rows are independent. If a result X changes by a_k e_k with an error e_k of at most eps_k, then sigma^2 = sum
(a_k eps_k)^2 bounds the variance of X (Hoeffding). Errors that are uniform within their bounds have a third of this
variance, so that SIGMAS = 4 times sigma is seven of their standard deviations. The factors a_k are computed from the
true numbers.

A kernel makes these errors, where i is a query, and j and l are keys. M is dropout's factor: 0, or 1 / (1 - p).

    b_ij    Error of the score: BLUR times the sum of its parts, |q| |k| scale + |bias| + slope distance, and BLUR
            times the lse that is subtracted from it. With a softcap, the part |q| |k| scale counts as at most 8 times
            the softcap.
    r_ij    Error of P_ij, which is the exponential of a number with the error b_ij. If the request has lse, P may
            become larger than 1:
                r = P (e^b - 1)
            If the kernel computes lse, lse is off by at most beta_i = ln(sum_l P_il e^b_il), which it reaches if the
            error of every score in the row is +b_il. P then stays a probability, except for the rounding of lse:
                r = P (e^(b + beta) - 1), at most e^(BLUR |lse|)
    u       Relative error of P and dS when they are rounded to the dtype of their products. A P of 1 is exact, because
            the largest exponential of a row is 1.
    t_i     Error of delta_i. It is 0 if the request has out. Otherwise let c_il = (r_il + u P_il) M_il (dout_i . v_l);
                t^2 = (sum_l c_il)^2 + sum_l c_il^2 + sum_e (u_out dout_ie out_ie)^2
            because out is the sum of P V, and may be rounded to its dtype before it is multiplied with dout.

The gradients of the scores are dZ = P g after the softcap, and dS = dZ (1 - tanh^2) before the softcap. In them,
g_ij = M_ij (dout_i . v_j) - delta_i, enlarged by BLUR times its terms. Therefore the errors are

    z_ij = r_ij g_ij,  s_ij = (1 - tanh^2) (r_ij + u P_ij) g_ij         errors of pairs
    (P_ij + r_ij) t_i                                                   an error of the row

and sigma^2 of each gradient is

    dq_i     scale^2 (sum_j (s_ij k_j)^2 + (sum_j s_ij k_j)^2 + (t_i sum_j (1 - tanh^2) (P + r)_ij k_j)^2)
    dk_j     scale^2 sum_i q_i^2 (s_ij^2 + ((1 - tanh^2) (P + r)_ij t_i)^2)       over all query heads of the group
    dv_j     sum_i ((r_ij + u P_ij) M_ij dout_i)^2                                over all query heads of the group
    dbias    sum of z_ij^2 + ((P + r)_ij t_i)^2 over the axes that bias is broadcast along
    dslope   sum_i (sum_j (z_ij distance_ij)^2 + (sum_j z_ij distance_ij)^2 + (t_i sum_j (P + r)_ij distance_ij)^2)
    dsink    sum_i ((p + r)_i t_i)^2 + (r_i delta_i)^2, where p = exp(sink - lse) and r is its error, as of P

These formulas leave out the sums in float32 and the last rounding of a result, for which differential.py has terms.

The error of lse is sum_j P_ij e_ij, where e_ij is the error of a score. A score S is the sum of D products p_d, which
are added one after the other in random order. The squares of the partial sums S_k add up to D (S^2 / 3 + sum p_d^2 /
6), and each S_k is rounded to 2^-24 of itself. A softcap reduces this error as it reduces a gradient:

    e^2 = 2^-48 ((1 - tanh^2)^2 scale^2 D (S^2 / 3 + sum p_d^2 / 6) + 4 (|scale S| + |bias| + slope distance)^2)
    SIGMAS sum_j P_ij e_ij                                                        bounds lse
"""
import numpy as np

import oracle

SIGMAS = 4
# Error of a score relative to its parts. A kernel rounds four times: the product, its sum with bias and distance, the
# conversion to base 2, and the difference with lse.
BLUR = 2.0 ** -22
# A bias above this size adds no rounding error. Either no product is large enough to change the bias, or the kernel
# computes the bias's row in double.
DROWNS = 1e37
MOST = 200.0       # largest exponent used: e^200 exceeds float32, and its square is still within float64
UNIT = {'float32': 2.0 ** -24, 'float16': 2.0 ** -11, 'bfloat16': 2.0 ** -8}


def grown(x):
    """Returns e^x - 1; for x above MOST a number that exceeds float32."""
    return np.expm1(np.minimum(x, MOST))


def blur_of_scores(p, x, b, h, exact):
    """Returns the errors b_ij of one head's scores (see the head of this file), without the error of lse. With `exact`,
    products have no rounding error."""
    parts = np.zeros_like(x.z) if exact else np.abs(x.q) @ np.abs(x.k).T * abs(x.scale)
    if p.get('softcap', 0) > 0:
        parts = np.minimum(parts, 8 * p['softcap'])
    return BLUR * (parts + added(p, x, b, h))


def added(p, x, b, h):
    """Returns |bias| + |slope| * distance for each pair of one head."""
    parts = np.zeros_like(x.z)
    if 'bias' in p:
        bias = np.abs(oracle.of_head(p['bias'], b, h, *x.z.shape))
        parts = parts + np.where(bias < DROWNS, bias, 0)
    if 'alibi_slopes' in p:
        m = p['alibi_slopes']
        parts = parts + np.abs(m[b, h] if m.ndim == 2 else m[h]) * x.distance
    return parts


def of_lse(p, exact):
    """Returns the bound of each lse: SIGMAS times its sigma."""
    bound = np.zeros_like(oracle.empty_answer(p)[1])
    for b, h, x in oracle.heads(p):
        if exact:
            products = rounded = np.zeros_like(x.z)
        else:
            products = np.abs(x.scale * (x.q @ x.k.T))
            rounded = x.scale ** 2 * x.q.shape[1] * ((x.q @ x.k.T) ** 2 / 3 + x.q ** 2 @ (x.k ** 2).T / 6) * np.square(x.slope)
        if p.get('softcap', 0) > 0:
            products = np.minimum(products, 8 * p['softcap'])
        e = 2.0 ** -24 * np.sqrt(rounded + 4 * (products + added(p, x, b, h)) ** 2)
        bound[x.lse_at] = SIGMAS * (x.P * np.where(x.sees, e, 0)).sum(1)
    return bound


class Errors:
    """The errors of the probabilities P (r) and of delta (t) in the rows of one head, and what they consist of. The
    head of this file defines r and t."""

    def __init__(self, p, x, b, h, dtype, out_dtype, given, exact):
        out, self.P, top, rest, empty = x.statistics(p)
        P, u, lse = self.P, UNIT[dtype], np.where(empty, 0, top + rest)
        rounding = np.where(P == 1, 0, u * P)
        lse_blur = BLUR * np.where(np.abs(lse) < oracle.LSE_MOST, np.abs(lse), 0)
        blur = blur_of_scores(p, x, b, h, exact) + lse_blur[:, None]
        self.sink = np.where(empty | (x.sink == -np.inf), 0, np.exp(np.where(empty, 0, x.sink - top - rest)))
        sink_blur = lse_blur + BLUR * (abs(x.sink) if abs(x.sink) < DROWNS else 0)
        own = ~(given & (np.abs(lse) < oracle.LSE_MOST))  # rows whose lse the kernel computes itself
        beta = np.where(own, np.log1p((P * grown(blur)).sum(1) + self.sink * grown(sink_blur)), 0)
        most = np.where(own, np.exp(lse_blur), np.inf)
        self.r = np.where(P > 0, np.minimum(P * grown(blur + beta[:, None]), most[:, None]), 0)
        self.r_sink = np.minimum(self.sink * grown(sink_blur + beta), most)
        dout = p['dout'][x.rows]
        self.delta = (dout * out).sum(1) - (p['dlse'][x.lse_at] if 'dlse' in p else 0)
        dP = x.M * (dout @ x.v.T)
        g = dP - self.delta[:, None]
        blur_of_delta = BLUR * ((np.abs(dout) * np.abs(out)).sum(1) + (np.abs(p['dlse'][x.lse_at]) if 'dlse' in p else 0))
        self.delta = np.abs(self.delta) + blur_of_delta
        self.g = g + np.copysign(BLUR * x.M * (np.abs(dout) @ np.abs(x.v).T) + blur_of_delta[:, None], g)
        c = (self.r + rounding) * dP
        self.t = np.sqrt(c.sum(1) ** 2 + (c ** 2).sum(1) + ((UNIT[out_dtype] * dout * out) ** 2).sum(1)) * (not given)
        self.z, self.s = self.r * self.g, x.slope * (self.r + u * P) * self.g
        self.Pr, self.dv = P + self.r, (self.r + rounding) * x.M


def of_gradients(p, dtype, out_dtype, given, exact):
    """Returns {gradient: SIGMAS times the sigma of each of its numbers}. `given`: the request contains out and lse;
    otherwise the kernel computes them."""
    g = {n: np.zeros(p[n[1:]].shape) for n in ('dq', 'dk', 'dv')}
    g.update({'d' + n: np.zeros(p[n].shape) for n in ('sinks', 'bias', 'alibi_slopes') if n in p})
    for b, h, x in oracle.heads(p):
        e = Errors(p, x, b, h, dtype, out_dtype, given, exact)
        t, capped = e.t[:, None], x.slope * e.Pr
        g['dq'][x.rows] = x.scale ** 2 * (e.s ** 2 @ x.k ** 2 + (e.s @ x.k) ** 2 + (t * (capped @ x.k)) ** 2)
        g['dk'][x.keys] += x.scale ** 2 * (e.s ** 2 + (capped * t) ** 2).T @ x.q ** 2
        g['dv'][x.keys] += (e.dv ** 2).T @ p['dout'][x.rows] ** 2
        Z = e.z ** 2 + (e.Pr * t) ** 2
        if 'dbias' in g:
            whole = g['dbias'][b if p['bias'].shape[0] > 1 else 0, h if p['bias'].shape[1] > 1 else 0]
            if whole.shape[0] > 1:
                whole[:Z.shape[0], :Z.shape[1]] += Z
            else:
                whole[:, :Z.shape[1]] += Z.sum(0)
        if 'dalibi_slopes' in g:
            far = e.z * x.distance
            at = (b, h) if p['alibi_slopes'].ndim == 2 else h
            g['dalibi_slopes'][at] += (far ** 2).sum() + (far.sum(1) ** 2).sum() + ((e.t * (e.Pr * x.distance).sum(1)) ** 2).sum()
        if 'dsinks' in g:
            g['dsinks'][h] += (((e.sink + e.r_sink) * e.t) ** 2 + (e.r_sink * e.delta) ** 2).sum()
    return {n: SIGMAS * np.sqrt(s) for n, s in g.items()}
