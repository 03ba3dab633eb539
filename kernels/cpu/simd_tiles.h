/* simd_tiles.h: softmax and gradient of one tile, written with the vector functions of a simd_v*.h. One file for each
 * compute type includes it, such as simd_avx2.c, simd_avx512.c (operands f32) and simd_bf16.c (operands bf16). The file
 * first defines how an operand is written:
 *
 *   STEP                    number of vectors that one store to an operand A takes: 1 for f32, 2 for bf16
 *   put_row(A, lda, x, n)   writes the first n elements of x[STEP] to a row of A; with bf16, zeros follow
 *   struct pair             the elements of V_LANES columns in two neighbouring rows, in the operand's type
 *   make_pair(x0, x1)       makes a pair from a vector of each row
 *   put_pair_a(), put_pair_b()   write the first `rows` rows of a pair to an operand A or B
 *
 * Gradients are computed for pairs of rows, because in a bf16 operand B, rows 2 i and 2 i + 1 of a column are
 * neighbours in memory. */

/* softmax() finds the maxima of BLOCK rows, then computes the exponentials of the same rows. 16 rows of 256 columns
 * stay in the L1 cache meanwhile. */
enum { BLOCK = 16 };

VEC vf load_or(const float *p, int n, vf otherwise)
{
    return n >= V_LANES ? v_load(p) : n > 0 ? v_select(v_first(n), v_load_n(p, n), otherwise) : otherwise;
}

/* Finds the largest element s of a row (or the largest -s, if `flip` is true). Lane n of the result is the maximum of
 * columns n, n + V_LANES, n + 2 V_LANES, ... */
VEC vf row_max(const float *s, int cols, bool flip)
{
    const vf none = v_set(-INFINITY), sign = v_set(flip ? -1.0f : 1.0f);
    vf a0 = none, a1 = none;
    int j = 0;
    for (; !flip && j + 2 * V_LANES <= cols; j += 2 * V_LANES) {
        a0 = v_max(v_load(s + j), a0), a1 = v_max(v_load(s + j + V_LANES), a1);
    }
    for (; !flip && j + V_LANES <= cols; j += V_LANES) a0 = v_max(v_load(s + j), a0);
    for (; j < cols; j += V_LANES) {
        const int n = cols - j < V_LANES ? cols - j : V_LANES;
        a0 = v_max(v_select(v_first(n), v_mul(sign, v_load_n(s + j, n)), none), a0);
    }
    return v_max(a0, a1);
}

/* Computes P = exp2(c S - base) of one row, and stores P, or, if `dropped` is true, P times drop. Returns the sums of P
 * before drop, one sum in each lane. */
VEC vf row_exp(bool dropped, int cols, const float *s, vf c, vf base, vf least, const float *drop, OPERAND *p,
               int64_t ldp)
{
    vf sum[2] = { v_zero(), v_zero() }, x[STEP];
    int j = 0;
    for (; j + STEP * V_LANES <= cols; j += STEP * V_LANES) {
#pragma GCC unroll 2
        for (int i = 0; i < STEP; i++) {
            /* the subtraction is not fused with the multiplication, so that the largest score gives exactly 1 */
            x[i] = v_exp2_from(v_sub(v_mul(v_load(s + j + i * V_LANES), c), base), least);
            sum[i] = v_add(sum[i], x[i]);
            if (dropped) x[i] = v_mul(x[i], v_load(drop + j + i * V_LANES));
        }
        put_row(p + j, ldp, x, STEP * V_LANES);
    }
    if (j < cols) {
#pragma GCC unroll 2
        for (int i = 0; i < STEP; i++) {
            const int n = cols - j - i * V_LANES;
            const vf t = v_sub(v_mul(load_or(s + j + i * V_LANES, n, v_zero()), c), base);
            x[i] = v_exp2_from(v_select(v_first(n < 0 ? 0 : n > V_LANES ? V_LANES : n), t, v_set(-INFINITY)), least);
            sum[i] = v_add(sum[i], x[i]);
            if (dropped) x[i] = v_mul(x[i], load_or(drop + j + i * V_LANES, n, v_zero()));
        }
        put_row(p + j, ldp, x, cols - j);
    }
    return STEP == 2 ? v_add(sum[0], sum[1]) : sum[0];
}

/* Computes P of `count` rows, at most 4, and adds their sums to l. A constant count keeps the sums in registers. */
VEC void rows_exp(bool dropped, const int count, int cols, const float *S, int64_t lds, float c, const float *base,
                  float least, float *l, const float *drop, OPERAND *P, int64_t ldp)
{
    vf sum[4] = { v_zero(), v_zero(), v_zero(), v_zero() };
    float sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
        sum[i] = row_exp(dropped, cols, S + i * lds, v_set(c), v_set(base[i]), v_set(least),
                         dropped ? drop + i * lds : NULL, P + i * ldp, ldp);
    const v4 all = v_hsum4(sum[0], sum[1], sum[2], sum[3]);
    if (count == 4) {
        v4_store(l, v4_add(v4_load(l), all));
        return;
    }
    v4_store(sums, all);
    for (int i = 0; i < count; i++) l[i] += sums[i];
}

VEC bool softmax_as(bool dropped, int rows, int cols, const float *S, int64_t lds, float c, float *m, float *l,
                    float *rescale, OPERAND *P, int64_t ldp, const float *drop, float least)
{
    bool any = false;
    for (int r0 = 0; r0 < rows; r0 += BLOCK) {
        const int block = rows - r0 < BLOCK ? rows - r0 : BLOCK;
        float base[BLOCK] = { 0 };
        for (int r = 0; r < block; r += 4) {
            vf max[4];
            for (int i = 0; i < 4; i++) max[i] = row_max(S + (r0 + (r + i < block ? r + i : r)) * lds, cols, c < 0);
            v4_store(base + r, v_hmax4(max[0], max[1], max[2], max[3]));
        }
        for (int r = 0; r < block; r += V_LANES) {
            const int n = block - r < V_LANES ? block - r : V_LANES, at = r0 + r;
            const vf old = v_load_n(m + at, n), none = v_set(-INFINITY);
            /* The largest score gives the largest product with |c|, because rounding keeps the order of products. If
             * the product is NaN, v_max() returns the old maximum, but the sum over the row still becomes NaN. */
            const vf now = v_max(v_mul(v_load(base + r), v_set(fabsf(c))), old);
            /* The maximum is -inf while all keys so far are hidden; 0 replaces it, because -inf - -inf would be NaN. */
            const vf from = v_select(v_less(none, now), now, v_zero());
            const vf shift = v_select(v_less(old, now), v_exp2_from(v_sub(old, from), v_set(SIMD_EXP2_LEAST)),
                                      v_set(1.0f));
            any |= v_any(v_and(v_first(n), v_less(shift, v_set(1.0f))));
            v_store_n(m + at, now, n);
            v_store(base + r, from);
            v_store_n(rescale + at, shift, n);
            v_store_n(l + at, v_mul(v_load_n(l + at, n), shift), n);
        }
        for (int r = 0; r < block; r += 4) {
            const int64_t at = r0 + r;
            const float *drops = dropped ? drop + at * lds : NULL;
            if (block - r >= 4)
                rows_exp(dropped, 4, cols, S + at * lds, lds, c, base + r, least, l + at, drops, P + at * ldp, ldp);
            else
                rows_exp(dropped, block - r, cols, S + at * lds, lds, c, base + r, least, l + at, drops, P + at * ldp,
                         ldp);
        }
    }
    return any;
}

static bool softmax(int rows, int cols, const float *S, int64_t lds, float c, float *m, float *l, float *rescale,
                    void *P, int64_t ldp, const float *drop, float least)
{
    if (drop) return softmax_as(true, rows, cols, S, lds, c, m, l, rescale, P, ldp, drop, least);
    return softmax_as(false, rows, cols, S, lds, c, m, l, rescale, P, ldp, NULL, least);
}

/* ---- Gradient of the scores -------------------------------------------------------------------------------------- */

/* Computes P * drop and dS (the gradient of S) for one vector of columns in one row. */
VEC void gradient_vector(bool plain, const struct simd_gradient *g, int64_t at, int n, vf c, vf lse2, vf delta, vf *P,
                         vf *dS)
{
    const vf s = n == V_LANES ? v_load(g->S + at) : v_load_n(g->S + at, n);
    const vf dP = n == V_LANES ? v_load(g->dP + at) : v_load_n(g->dP + at, n);
    vf p = v_exp2_from(v_fms(s, c, lse2), v_set(g->least));
    if (n < V_LANES) p = v_select(v_first(n), p, v_zero());
    vf kept = p, rest = v_sub(dP, delta);
    if (!plain && g->drop) {
        const vf drop = v_load_n(g->drop + at, n);
        rest = v_fms(v_mul(dP, drop), v_set(g->drop_scale), delta);
        kept = v_mul(p, drop);
    }
    /* dP may be NaN or infinite where P is 0; dZ must be 0 there */
    vf dZ = v_mul_unless_zero(p, rest);
    if (!plain && g->dZ) v_store_n(g->dZ + at, dZ, n);
    /* `cap` (the derivative of softcap) of a hidden score may be NaN; dS must be 0 there, as dZ is */
    if (!plain && g->cap) dZ = v_mul_unless_zero(dZ, v_load_n(g->cap + at, n));
    *P = kept;
    *dS = dZ;
}

/* Computes gradients of scores for the 32 columns of one panel. It goes over pairs of rows from top to bottom, because
 * the operands have this order in memory. `whole` is true if all columns exist and every operand is wanted, as in most
 * tiles of large problems. */
VEC void gradient_panel(bool plain, bool whole, const struct simd_gradient *g, int j0)
{
    const int64_t panel = j0 / SIMD_PANEL;
    OPERAND *P_b = g->P_b ? (OPERAND *)g->P_b + panel * g->P_ldb : NULL;
    OPERAND *dS_b = g->dS_b ? (OPERAND *)g->dS_b + panel * g->dS_ldb : NULL;
    OPERAND *dS_a = g->dS_a ? (OPERAND *)g->dS_a + j0 : NULL;
    const vf c = v_set(g->c);
    for (int r = 0; r < g->rows; r += 2) {
        const int two = g->rows - r < 2 ? 1 : 2;
        const vf lse0 = v_set(g->lse2[r]), lse1 = v_set(g->lse2[r + two - 1]);
        const vf delta0 = v_set(g->delta[r]), delta1 = v_set(g->delta[r + two - 1]);
#pragma GCC unroll 4
        for (int j = 0; j < SIMD_PANEL; j += V_LANES) {
            const int left = g->cols - j0 - j, n = whole || left > V_LANES ? V_LANES : left < 0 ? 0 : left;
            const int64_t at = r * g->ld + j0 + j;
            vf P0 = v_zero(), dS0 = v_zero(), P1 = v_zero(), dS1 = v_zero();
            if (n > 0) gradient_vector(plain, g, at, n, c, lse0, delta0, &P0, &dS0);
            if (n > 0 && two == 2) gradient_vector(plain, g, at + g->ld, n, c, lse1, delta1, &P1, &dS1);
            const struct pair P = make_pair(P0, P1), dS = make_pair(dS0, dS1);
            if (whole || P_b) put_pair_b(P_b + pair_offset(r, j), g->P_ldb, P, two);
            if (whole || dS_b) put_pair_b(dS_b + pair_offset(r, j), g->dS_ldb, dS, two);
            if (whole || (dS_a && (n > 0 || PAD_ROWS > 0))) put_pair_a(dS_a + r * g->dS_lda + j, g->dS_lda, dS, n, two);
        }
    }
}

VEC void gradient_as(bool plain, const struct simd_gradient *g)
{
    OPERAND *P_b = g->P_b, *dS_b = g->dS_b;
    const bool all = plain && g->P_b && g->dS_a && g->dS_b;
    for (int j0 = 0; j0 < g->cols; j0 += SIMD_PANEL) {
        if (all && g->cols - j0 >= SIMD_PANEL) gradient_panel(plain, true, g, j0);
        else gradient_panel(plain, false, g, j0);
    }
    /* writes zeros behind the last pair of rows, up to a multiple of k_multiple */
    for (int r = (int)simd_round_up(g->rows, 2); r < (int)simd_round_up(g->rows, PAD_ROWS ? PAD_ROWS : 1); r += 2) {
        for (int j = 0; j < (int)simd_round_up(g->cols, SIMD_PANEL); j += V_LANES) {
            const struct pair zero = make_pair(v_zero(), v_zero());
            if (P_b) put_pair_b(P_b + j / SIMD_PANEL * g->P_ldb + pair_offset(r, j % SIMD_PANEL), g->P_ldb, zero, 2);
            if (dS_b)
                put_pair_b(dS_b + j / SIMD_PANEL * g->dS_ldb + pair_offset(r, j % SIMD_PANEL), g->dS_ldb, zero, 2);
        }
    }
}

static void gradient(const struct simd_gradient *g)
{
    if (g->drop || g->cap || g->dZ) gradient_as(false, g);
    else gradient_as(true, g);
}
