/* pass.c: computes the tiles of a problem with one variation (a mistake, or none) or with the roundings of a correct
 * kernel. It sums up how far these results are from the caller's results or from the truth (float64 results). */
#include "kernels/judge/state.h"

#include <math.h>
#include <string.h>

#include "kernels/judge/emulate.h"

/* The ways in which correct kernels order and round their work. The judge imitates them to measure how far correct
 * results may be from the truth (float64 results). */
static const struct emulation emulations[EFFORT_EMULATIONS] = {
    { 128, false, false, false }, { 64, true, false, true },  { 32, false, false, true },
    { 256, true, false, false },  { 128, false, true, true }, { 16, true, false, false },
};

void pass_begin(struct judge *j, struct frame *frame, const variation *v, const int64_t *list, int64_t count)
{
    j->pass =
        (struct pass){ .v = *v, .frame = frame, .list = list, .count = count, .hk = -1, .b = -1, .emulation = -1 };
    if (!list) j->pass.count = frame->count + frame->key_count - frame->read_count;
    j->pass.by_units = list != NULL && units_are_sampled(j);
    j->pass.sums = list == NULL && frame->whole;
    j->in_pass = true;
    if (j->some.dbias) memset(j->some.dbias, 0, (size_t)j->sum_elements[5] * sizeof(double));
    if (j->some.dsinks) memset(j->some.dsinks, 0, (size_t)j->sum_elements[6] * sizeof(double));
    if (j->some.dslopes) memset(j->some.dslopes, 0, (size_t)j->sum_elements[7] * sizeof(double));
}

/* Returns the index in struct truth (float64 results) of the row that belongs to head h and to the first query of tile
 * t; -1: struct truth does not have this row. */
int64_t pass_kept_row(const struct frame *f, const struct tile *t, int64_t h)
{
    const int64_t own = t->hk * f->g.group + t->n;
    if (h == own) return t->row;
    const int64_t at = f->row_of_head[t->b * f->g.dims.H + h];
    return at < 0 ? -1 : at + t->first;
}

/* Stores or compares `count` computed rows of result `which`. The rows begin `ld` numbers apart in memory. PHASE_TRUTH
 * stores them as the truth (float64 results). Other phases add up how far they differ from the caller's rows, or from
 * the truth. */
static void settle_rows(struct judge *j, int which, int64_t b, int64_t h, int64_t first, int64_t count, int64_t kept,
                        const double *values, int64_t ld)
{
    struct pass *const pass = &j->pass;
    const attn_tensor_id id = frame_tensors[which];
    const int64_t columns = frame_columns(pass->frame, id);
    double *const truth = pass->frame == &j->frame && kept >= 0 ? frame_kept(&j->truth, id) : NULL;
    const bool swapped = pass->v.swapped >> id & 1;
    if (j->phase == PHASE_TRUTH) {
        for (int64_t r = 0; r < count && truth; r++)
            memcpy(truth + (kept + r) * columns, values + r * ld, (size_t)columns * sizeof *values);
        return;
    }
    if (!state_is_given(j, id)) return;
    for (int64_t r = 0; r < count; r++)
        for (int64_t e = 0; e < columns; e++) {
            const double value = values[r * ld + e];
            int64_t at;
            if (pass->sizes && truth) difference_add(&pass->size[which], value, truth[(kept + r) * columns + e]);
            if (pass->against_truth && truth)
                difference_add(&pass->found[which], value, truth[(kept + r) * columns + e]);
            else if (!pass->against_truth)
                difference_add(&pass->found[which], frame_got(pass->frame, id, swapped, b, h, first + r, e, &at),
                               value);
        }
}

/* Stores or compares dk and dv of the keys `first` to first + count - 1 of a key/value head, after all of its tiles of
 * queries. PHASE_TRUTH stores them as the truth (float64 results). Other phases compare them with the caller's or with
 * the truth. `kept` is the index of key `first` in struct truth. */
void pass_settle_keys(struct judge *j, int64_t b, int64_t hk, int64_t first, int64_t count, int64_t kept)
{
    struct pass *const pass = &j->pass;
    struct compute *const c = &pass->frame->c;
    const int64_t exist = attn_clamp64(c->s.Sk - first, 0, count);
    const int64_t start = pass->v.one_sequence ? 0 : frame_first_key(pass->frame, b);
    double *const dK = c->dK + first * c->D, *const dV = c->dV + first * c->Dv;
    memset(dK + exist * c->D, 0, (size_t)((count - exist) * c->D) * sizeof *dK);
    memset(dV + exist * c->Dv, 0, (size_t)((count - exist) * c->Dv) * sizeof *dV);
    for (int64_t n = 0; n < count * c->D && pass->v.rounding == CUT_RESULTS; n++)
        dK[n] = compute_cut(pass->v.round_dtype, dK[n]);
    for (int64_t n = 0; n < count * c->Dv && pass->v.rounding == CUT_RESULTS; n++)
        dV[n] = compute_cut(pass->v.round_dtype, dV[n]);
    if (pass->emulation >= 0) {
        emulate_round(state_is_given(j, ATTN_T_dk) ? j->results[ATTN_T_dk].dtype : ATTN_F32, dK, count * c->D);
        emulate_round(state_is_given(j, ATTN_T_dv) ? j->results[ATTN_T_dv].dtype : ATTN_F32, dV, count * c->Dv);
    }
    settle_rows(j, 3, b, hk, start + first, count, kept, dK, c->D);
    settle_rows(j, 4, b, hk, start + first, count, kept, dV, c->Dv);
}

/* Stores or compares dk and dv of all keys of tile t's key/value head. */
void pass_settle_head(struct judge *j, const struct tile *t)
{
    const bool all = j->pass.v.one_sequence;
    const struct frame *const f = j->pass.frame;
    pass_settle_keys(j, t->b, t->hk, 0, all ? f->g.dims.total_k : frame_key_room(f, t->b), all ? -1 : t->line);
}

/* Stores or compares dk and dv of a tile of keys that no query reads. They are 0, whatever mistake the pass
 * computes. */
void pass_settle_unread(struct judge *j, const struct key_tile *t)
{
    static const double zeros[ATTN_MAX_HEAD_DIM];
    const int64_t first = frame_first_key(j->pass.frame, t->b) + t->first;
    settle_rows(j, 3, t->b, t->hk, first, t->count, t->line, zeros, 0);
    settle_rows(j, 4, t->b, t->hk, first, t->count, t->line, zeros, 0);
}

/* Replaces out and lse of a tile by the truth (float64 results). A pass (a run over tiles) calls this function if its
 * out and lse must be correct: for a mistake that is only in the backward, and for most tiles of keys. */
void pass_take_right_forward(struct judge *j, const struct compute_rows *rows, int64_t kept)
{
    struct compute *const c = &j->pass.frame->c;
    for (int64_t r = 0; r < rows->count && kept >= 0; r++) {
        memcpy(c->out + r * c->Dv, j->truth.out + (kept + r) * j->frame.g.dims.Dv,
               (size_t)j->frame.g.dims.Dv * sizeof *c->out);
        c->lse[r] = c->top[r] = j->truth.lse[kept + r];
        c->rest[r] = 0;
    }
}

static struct compute_sums sums_of(struct judge *j)
{
    struct truth *const t = j->phase == PHASE_TRUTH ? &j->truth : &j->some;
    if (!j->pass.sums) return (struct compute_sums){ 0 };
    return (struct compute_sums){ t->dbias, t->dsinks, t->dslopes };
}

/* Loads the keys and values of head hk of sequence b, if they are not loaded yet. Sets the range of keys for which
 * scores are computed to all keys of the sequence. */
void pass_take_keys(struct judge *j, int64_t b, int64_t hk)
{
    struct pass *const pass = &j->pass;
    struct frame *const f = pass->frame;
    if (pass->v.one_sequence) b = 0;
    f->c.lo = 0, f->c.hi = f->c.s.Sk;
    if (pass->hk == hk && pass->b == b) return;
    compute_keys(&f->c, &pass->v, b, hk);
    if (pass->emulation >= 0) emulate_keys(&f->c, f->scratch);
    pass->hk = hk, pass->b = b;
}

/* Computes tile t with the mistake of the pass, or with the roundings that the pass imitates: out, lse and, in a
 * backward, the wanted gradients. */
void pass_compute_tile(struct judge *j, const struct tile *t, enum compute_wanted wanted)
{
    struct pass *const pass = &j->pass;
    struct frame *const f = pass->frame;
    struct compute *const c = &f->c;
    const bool backward = f->p.op == ATTN_OP_BACKWARD;
    /* with some mistakes, a key/value head is read by other query heads than it should be; dk and dv are sums over the
     * query heads that read it */
    const bool of_keys = backward && wanted & COMPUTE_DK_DV;
    const int64_t h = of_keys ? variation_member_of(&pass->v, t->hk, t->n) : t->hk * f->g.group + t->n;
    const struct compute_rows rows = { t->b, h, t->first, t->count };
    const int64_t kept = pass_kept_row(f, t, h), first = frame_first_row(f, t->b) + t->first;
    const struct compute_sums sums = sums_of(j);
    pass_take_keys(j, t->b, variation_head_of(&pass->v, h));
    if (pass->emulation >= 0) emulate_rows(c, &emulations[pass->emulation], &pass->v, &rows, f->scratch);
    else compute_rows(c, &pass->v, &rows);
    if (pass->alone) pass_take_right_forward(j, &rows, kept);
    settle_rows(j, 0, t->b, h, first, t->count, kept, c->out, c->Dv);
    settle_rows(j, 1, t->b, h, first, t->count, kept, c->lse, 1);
    if (!backward) return;
    if (pass->emulation >= 0) emulate_gradients(c, &pass->v, &rows, &sums, wanted, f->scratch);
    else compute_gradients(c, &pass->v, &rows, &sums, wanted);
    if (pass->emulation >= 0 && state_is_given(j, ATTN_T_dq))
        emulate_round(j->results[ATTN_T_dq].dtype, c->dq, t->count * c->D);
    settle_rows(j, 2, t->b, h, first, t->count, kept, c->dq, c->D);
}

/* Returns what a kernel with the pass's mistake would write in place of `value`, an element of the truth (float64
 * results). */
static double converted(const struct judge *j, attn_tensor_id id, double value, double lse, bool exists)
{
    const variation *const v = &j->pass.v;
    const bool empty = exists && lse == -INFINITY;
    switch ((int)id) {
    case ATTN_T_out: return empty && v->empty_out != EMPTY_RIGHT ? (v->empty_out == EMPTY_NAN ? NAN : INFINITY) : value;
    case ATTN_T_lse:
        return empty && v->empty_lse != EMPTY_RIGHT ? (v->empty_lse == EMPTY_NAN ? NAN : INFINITY)
                                                    : value * v->lse_factor;
    case ATTN_T_dq: return value * v->dq_factor;
    case ATTN_T_dk: return value * v->dk_factor;
    default: return value;
    }
}

/* Updates three figures of result `which` in PHASE_COMPARE, for the caller's number `got` and the truth (float64
 * result) `value`: the largest truth, the largest error of rounding a truth to the result's dtype, and the number of
 * NaN that should not be NaN. */
static void measure(struct judge *j, int which, double got, double value)
{
    if (isfinite(value)) {
        j->largest[which] = fmax(j->largest[which], fabs(value));
        const double once = fabs(compute_rounded(j->results[frame_tensors[which]].dtype, value) - value);
        if (isfinite(once)) j->once[which] = fmax(j->once[which], once);
    }
    if (isnan(got) && !isnan(value)) j->tensor[which].nan++;
}

/* Compares rows of the caller's tensor with rows of the truth (float64 results). Before the comparison, converted()
 * changes the truth as the pass's mistake would. */
static void convert_rows(struct judge *j, int64_t unit, int which, int64_t b, int64_t h, int64_t first, int64_t count,
                         int64_t kept, int64_t exist)
{
    struct pass *const pass = &j->pass;
    const attn_tensor_id id = frame_tensors[which];
    const int64_t columns = frame_columns(pass->frame, id);
    const double *const truth = frame_kept(&j->truth, id);
    const bool swapped = pass->v.swapped >> id & 1;
    struct difference found = { 0 };
    if (!state_is_given(j, id)) return;
    for (int64_t r = 0; r < count; r++)
        for (int64_t e = 0; e < columns; e++) {
            int64_t at;
            const double lse = which < FRAME_ROW_TENSORS ? j->truth.lse[kept + r] : 0;
            const double value = converted(j, id, truth[(kept + r) * columns + e], lse, r < exist);
            const double got = frame_got(pass->frame, id, swapped, b, h, first + r, e, &at);
            difference_add(&found, got, value);
            if (j->phase == PHASE_COMPARE) measure(j, which, got, value);
        }
    difference_join(&pass->found[which], &found);
    if (j->phase == PHASE_COMPARE) units_note(&j->worst[which], unit, difference_worst(&found));
}

/* Compares the caller's out, lse and dq of a tile of queries with the truth (float64 results), after converted() has
 * changed the truth as the pass's mistake would. */
void pass_convert_rows(struct judge *j, int64_t tile)
{
    const struct frame *const f = &j->frame;
    const struct tile *const t = &f->tiles[tile];
    const attn_sequence s = attn_sequence_of(&f->g, t->b);
    const int64_t h = t->hk * f->g.group + t->n, first = frame_first_row(f, t->b) + t->first;
    const int64_t exist = attn_clamp64(s.Sq - t->first, 0, t->count);
    for (int which = 0; which < FRAME_ROW_TENSORS; which++)
        if (which < 2 || f->p.op == ATTN_OP_BACKWARD)
            convert_rows(j, tile, which, t->b, h, first, t->count, t->row, exist);
}

/* Compares the caller's dk and dv of a tile of keys with the truth (float64 results), after converted() has changed the
 * truth as the pass's mistake would. */
void pass_convert_keys(struct judge *j, int64_t key_tile)
{
    const struct frame *const f = &j->frame;
    const struct key_tile *const t = &f->key_tiles[key_tile];
    const int64_t unit = f->count + key_tile, first = frame_first_key(f, t->b) + t->first;
    convert_rows(j, unit, 3, t->b, t->hk, first, t->count, t->line, 0);
    convert_rows(j, unit, 4, t->b, t->hk, first, t->count, t->line, 0);
}

/* Compares dbias, dsinks and dslopes with the caller's results (or with the truth) at the end of a pass over all tiles.
 * Before the last tile these sums over rows are not complete. */
void pass_settle_sums(struct judge *j)
{
    struct pass *const pass = &j->pass;
    const struct truth *const from = pass->converts ? &j->truth : &j->some;
    for (int which = 5; which < FRAME_TENSORS && pass->sums && j->phase != PHASE_TRUTH; which++) {
        const attn_tensor_id id = frame_tensors[which];
        const double *const value = frame_kept(from, id), *const truth = frame_kept(&j->truth, id);
        if (!state_is_given(j, id) || !value) continue;
        for (int64_t n = 0; n < j->sum_elements[which]; n++) {
            const double got = pass->against_truth ? truth[n] : attn_load(j->results[id].dtype, j->results[id].data, n);
            difference_add(&pass->found[which], got, pass->emulation >= 0 ? (float)value[n] : value[n]);
            if (j->phase == PHASE_COMPARE) measure(j, which, got, value[n]);
        }
    }
}
