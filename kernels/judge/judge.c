/* judge.c: the order of a judge's work. See judge.h.
 *
 *   TRUTH      computes every tile in float64 and stores the results
 *   EMULATE    computes every tile with the roundings of right kernels: how far may a result be from the truth?
 *   COMPARE    compares the caller's results with the truth: errors, limits, verdict
 *   SAMPLE     chooses the tiles on which mistakes are tested, and sums up the errors there
 *   SINGLES    tests every mistake on the sample
 *   PAIRS      tests two mistakes at once, if no single mistake explains everything
 *   CONFIRM    tests the best explanations on all tiles
 *
 * A phase has one pass or several. A pass goes over tiles, and a step of a judge computes one tile. After PHASE_TRUTH
 * a pass stores only sums of differences.
 *
 * A mistake explains a tensor that is wrong where the results agree with what a kernel with that mistake gives:
 * the largest and the mean difference fall to a tenth, or the largest is within the limit. Tensors that
 * are right must stay within their limits. The score of a mistake orders explanations. It is the sum over the wrong
 * tensors of the logarithm of error left / error now, where an error is a root mean square plus the rounding of a
 * right kernel. */
#include "kernels/judge/judge.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/judge/emulate.h"
#include "kernels/judge/hypotheses.h"
#include "kernels/judge/judge_internal.h"

/* The most memory that a judge may take, besides the problem's. */
#define JUDGE_BYTES ((int64_t)512 << 20)

/* RATE: multiply-adds per second in double. PAIR: the exponential of a pair costs as much as so many multiply-adds.
 * EMULATION: an emulation takes so many times as long as the truth. */
#define JUDGE_RATE          8e9
#define JUDGE_RATE_PORTABLE 2e9
#define JUDGE_PAIR          100
#define JUDGE_EMULATION     2.5

#define JUDGE_PATTERN   0.5 /* a mistake of precision leaves less than this share of the mean error */
#define JUDGE_PAIR_GAIN 1.1 /* a second mistake divides what is left of the error by e to this power */

enum {
    EMULATIONS = 6,                /* number of emulations of a small problem */
    EMULATIONS_LARGE = 2,          /* number of emulations of any other problem */
    CANDIDATES = 2048,             /* the most candidates that a judge may have */
    PAIR_FIRSTS = 5,               /* the most mistakes that are the first of a pair */
    PAIR_SECONDS = 300,            /* the most mistakes that are the second of a pair */
    CONFIRMED = 8,                 /* the most explanations that are tested on all tiles */
    SMALL_MULTIPLY_ADDS = 1 << 24, /* a pass with at most so many multiply-adds takes all tiles, not a sample */
};

static const struct emulation emulations[EMULATIONS] = {
    { 128, false, false }, { 64, true, false },  { 32, false, false },
    { 256, true, false },  { 128, false, true }, { 16, true, false },
};

enum phase {
    PHASE_TRUTH,
    PHASE_EMULATE,
    PHASE_COMPARE,
    PHASE_SAMPLE,
    PHASE_SINGLES,
    PHASE_PAIRS,
    PHASE_CONFIRM,
    PHASE_DONE
};

/* A mistake: a row of hypotheses[], and which variant of it. */
struct mistake {
    int row, variant;
    bool alone; /* only the backward has the mistake */
};

struct candidate {
    struct mistake first, second; /* second.row < 0: the candidate is a single mistake */
    struct difference left[FRAME_TENSORS], size[FRAME_TENSORS];
    double score;                  /* less is better; 0: the mistake leaves the error as it is */
    unsigned explains;             /* the wrong tensors that the candidate explains, as bits of frame_tensors[] */
    bool breaks, confirmed, whole; /* whole: `left` was found on all tiles */
};

/* A pass computes tiles of a frame with one variation, and sums up their differences. */
struct pass {
    variation v;
    struct frame *frame;
    const int64_t *list; /* the tiles of the pass; NULL: all tiles */
    int64_t count, at;
    int64_t hk, b; /* the head and sequence whose keys are loaded; -1: none */
    bool converts; /* the pass changes numbers of the truth instead of computing anew */
    bool alone;
    int emulation;      /* index in emulations[]; -1: the pass computes without roundings */
    bool against_truth; /* the pass compares with the truth, not with the caller's results */
    bool sizes;         /* the pass also fills `size` */
    bool sums;          /* the pass takes all tiles, so dbias, dsinks and dslopes are complete */
    struct difference found[FRAME_TENSORS], size[FRAME_TENSORS]; /* size: differences of the pass from the truth */
};

struct judge {
    struct hypothesis_facts facts;
    attn_problem p;
    attn_tensor results[ATTN_TENSOR_COUNT];
    uint64_t given;
    struct frame frame, other; /* other: the same problem, read in the other layout */
    bool has_other;
    struct truth truth, some; /* some: dbias, dsinks and dslopes of the present pass */
    int64_t sum_elements[FRAME_TENSORS];

    enum phase phase;
    struct pass pass;
    bool in_pass;
    int index; /* number of the present pass in its phase */

    struct difference noise[FRAME_TENSORS], now[FRAME_TENSORS], now_sample[FRAME_TENSORS];
    double largest[FRAME_TENSORS], once[FRAME_TENSORS]; /* largest |truth|; largest error of rounding the truth once */
    double largest_score;
    judge_tensor tensor[FRAME_TENSORS];
    judge_verdict verdict;
    unsigned wrong; /* tensors beyond their limit, as bits of frame_tensors[] */

    int64_t *sample;
    int64_t sample_count;
    struct mistake trying;
    struct candidate *candidates;
    int candidate_count, singles;
    int firsts[PAIR_FIRSTS], first_count, seconds[PAIR_SECONDS], second_count;
    int confirm[CONFIRMED], confirm_count;
    bool tried[HYPOTHESES_MOST];
};

const char *judge_verdict_name(judge_verdict verdict)
{
    static const char *const names[] = {
#define X(id, name) name,
        JUDGE_VERDICT_MAP(X)
#undef X
    };
    return names[verdict];
}

const char *judge_code(int index)
{
    return index < hypotheses_count ? hypotheses[index].code : NULL;
}

/* ---- Cost -------------------------------------------------------------------------------------------------------- */

/* Returns the number of multiply-adds that the truth of all rows takes. */
static double multiply_adds(const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    double pairs = 0;
    for (int64_t b = 0; b < g.dims.B; b++) {
        const attn_sequence s = attn_sequence_of(&g, b);
        pairs += (double)attn_room_of(g.cu_q, g.dims.Sq, b) * (double)s.Sk;
    }
    const double each = (double)(g.dims.D + g.dims.Dv) * (p->op == ATTN_OP_BACKWARD ? 2.5 : 1) + JUDGE_PAIR;
    return pairs * (double)g.dims.H * each;
}

judge_cost judge_cost_of(const attn_problem *problem)
{
    const double rate = products_best() == &products_portable ? JUDGE_RATE_PORTABLE : JUDGE_RATE;
    const double truth = multiply_adds(problem) / rate;
    return (judge_cost){ .truth = truth * (1 + JUDGE_EMULATION * EMULATIONS_LARGE), .all = truth * hypotheses_count };
}

/* ---- A pass ------------------------------------------------------------------------------------------------------ */

static bool is_given(const struct judge *j, attn_tensor_id id)
{
    return j->given >> id & 1;
}

static void begin_pass(struct judge *j, struct frame *frame, const variation *v, const int64_t *list, int64_t count)
{
    j->pass = (struct pass){
        .v = *v, .frame = frame, .list = list, .count = list ? count : frame->count, .hk = -1, .b = -1, .emulation = -1
    };
    j->pass.sums = list == NULL && frame->whole;
    j->in_pass = true;
    if (j->some.dbias) memset(j->some.dbias, 0, (size_t)j->sum_elements[5] * sizeof(double));
    if (j->some.dsinks) memset(j->some.dsinks, 0, (size_t)j->sum_elements[6] * sizeof(double));
    if (j->some.dslopes) memset(j->some.dslopes, 0, (size_t)j->sum_elements[7] * sizeof(double));
}

/* Returns the row of the truth that is the first row of tile t, if head h computes the tile. Returns -1 if the truth
 * does not have that row. */
static int64_t kept_row(const struct frame *f, const struct tile *t, int64_t h)
{
    const int64_t own = t->hk * f->g.group + t->n;
    if (h == own) return t->row;
    const int64_t at = f->row_of_head[t->b * f->g.dims.H + h];
    return at < 0 ? -1 : at + t->first;
}

/* Takes `count` computed rows of a tensor, each of `ld` numbers. In PHASE_TRUTH it stores them in the truth; in other
 * phases it adds up their differences. */
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
    if (!is_given(j, id)) return;
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

/* Takes dk and dv of a key/value head when all tiles of that head have been computed. */
static void settle_keys(struct judge *j, const struct tile *t)
{
    struct pass *const pass = &j->pass;
    struct frame *const f = pass->frame;
    struct compute *const c = &f->c;
    const bool all = pass->v.one_sequence;
    const int64_t room = all ? f->g.dims.total_k : frame_key_room(f, t->b), first = all ? 0 : frame_first_key(f, t->b);
    memset(c->dK + c->s.Sk * c->D, 0, (size_t)(attn_max64(0, room - c->s.Sk) * c->D) * sizeof *c->dK);
    memset(c->dV + c->s.Sk * c->Dv, 0, (size_t)(attn_max64(0, room - c->s.Sk) * c->Dv) * sizeof *c->dV);
    if (pass->emulation >= 0) {
        const attn_dtype dk = is_given(j, ATTN_T_dk) ? j->results[ATTN_T_dk].dtype : ATTN_F32;
        const attn_dtype dv = is_given(j, ATTN_T_dv) ? j->results[ATTN_T_dv].dtype : ATTN_F32;
        emulate_round(dk, c->dK, room * c->D);
        emulate_round(dv, c->dV, room * c->Dv);
    }
    settle_rows(j, 3, t->b, t->hk, first, room, all ? -1 : t->line, c->dK, c->D);
    settle_rows(j, 4, t->b, t->hk, first, room, all ? -1 : t->line, c->dV, c->Dv);
}

/* Replaces out and lse of a tile by the truth. A pass calls it for a mistake that is in the backward alone. */
static void take_right_forward(struct judge *j, const struct compute_rows *rows, int64_t kept)
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

static void take_keys(struct judge *j, const struct tile *t, int64_t hk)
{
    struct pass *const pass = &j->pass;
    struct frame *const f = pass->frame;
    const int64_t b = pass->v.one_sequence ? 0 : t->b;
    if (pass->hk == hk && pass->b == b) return;
    compute_keys(&f->c, &pass->v, b, hk);
    if (pass->emulation >= 0) emulate_keys(&f->c, f->scratch);
    pass->hk = hk, pass->b = b;
}

/* Computes tile t with the pass's variation or emulation, and takes its results. */
static void compute_tile(struct judge *j, const struct tile *t)
{
    struct pass *const pass = &j->pass;
    struct frame *const f = pass->frame;
    struct compute *const c = &f->c;
    const bool backward = f->p.op == ATTN_OP_BACKWARD;
    const int64_t h = backward ? variation_member_of(&pass->v, t->hk, t->n) : t->hk * f->g.group + t->n;
    const struct compute_rows rows = { t->b, h, t->first, t->count };
    const int64_t kept = kept_row(f, t, h), first = frame_first_row(f, t->b) + t->first;
    const struct compute_sums sums = sums_of(j);
    take_keys(j, t, variation_head_of(&pass->v, h));
    if (pass->emulation >= 0) emulate_rows(c, &emulations[pass->emulation], &pass->v, &rows, f->scratch);
    else compute_rows(c, &pass->v, &rows);
    if (pass->alone) take_right_forward(j, &rows, kept);
    settle_rows(j, 0, t->b, h, first, t->count, kept, c->out, c->Dv);
    settle_rows(j, 1, t->b, h, first, t->count, kept, c->lse, 1);
    if (!backward) return;
    if (pass->emulation >= 0) emulate_gradients(c, &pass->v, &rows, &sums, f->scratch);
    else compute_gradients(c, &pass->v, &rows, &sums);
    if (pass->emulation >= 0 && is_given(j, ATTN_T_dq))
        emulate_round(j->results[ATTN_T_dq].dtype, c->dq, t->count * c->D);
    settle_rows(j, 2, t->b, h, first, t->count, kept, c->dq, c->D);
}

/* Returns a number of the truth, changed as the pass's variation changes it. */
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

/* Compares rows of the caller's tensor with rows of the truth, changed by converted(). */
static void convert_rows(struct judge *j, int which, int64_t b, int64_t h, int64_t first, int64_t count, int64_t kept,
                         int64_t exist)
{
    struct pass *const pass = &j->pass;
    const attn_tensor_id id = frame_tensors[which];
    const int64_t columns = frame_columns(pass->frame, id);
    const double *const truth = frame_kept(&j->truth, id);
    const bool swapped = pass->v.swapped >> id & 1;
    if (!is_given(j, id)) return;
    for (int64_t r = 0; r < count; r++)
        for (int64_t e = 0; e < columns; e++) {
            int64_t at;
            const double lse = which < FRAME_ROW_TENSORS ? j->truth.lse[kept + r] : 0;
            const double value = converted(j, id, truth[(kept + r) * columns + e], lse, r < exist);
            const double got = frame_got(pass->frame, id, swapped, b, h, first + r, e, &at);
            difference_add(&pass->found[which], got, value);
            if (j->phase != PHASE_COMPARE) continue;
            if (isfinite(value)) {
                j->largest[which] = fmax(j->largest[which], fabs(value));
                const double once = fabs(compute_rounded(j->results[id].dtype, value) - value);
                if (isfinite(once)) j->once[which] = fmax(j->once[which], once);
            }
            if (isnan(got) && !isnan(value)) j->tensor[which].nan++;
        }
}

static void convert_tile(struct judge *j, const struct tile *t, bool last_of_head)
{
    const struct frame *const f = &j->frame;
    const attn_sequence s = attn_sequence_of(&f->g, t->b);
    const int64_t h = t->hk * f->g.group + t->n, first = frame_first_row(f, t->b) + t->first;
    const int64_t exist = attn_clamp64(s.Sq - t->first, 0, t->count);
    for (int which = 0; which < FRAME_ROW_TENSORS; which++)
        if (which < 2 || f->p.op == ATTN_OP_BACKWARD) convert_rows(j, which, t->b, h, first, t->count, t->row, exist);
    if (!last_of_head || f->p.op != ATTN_OP_BACKWARD) return;
    convert_rows(j, 3, t->b, t->hk, frame_first_key(f, t->b), frame_key_room(f, t->b), t->line, 0);
    convert_rows(j, 4, t->b, t->hk, frame_first_key(f, t->b), frame_key_room(f, t->b), t->line, 0);
}

/* Compares dbias, dsinks and dslopes at the end of a pass over all tiles. */
static void settle_sums(struct judge *j)
{
    struct pass *const pass = &j->pass;
    const struct truth *const from = pass->converts ? &j->truth : &j->some;
    for (int which = 5; which < FRAME_TENSORS && pass->sums && j->phase != PHASE_TRUTH; which++) {
        const attn_tensor_id id = frame_tensors[which];
        const double *const value = frame_kept(from, id), *const truth = frame_kept(&j->truth, id);
        if (!is_given(j, id) || !value) continue;
        for (int64_t n = 0; n < j->sum_elements[which]; n++) {
            const double got = pass->against_truth ? truth[n] : attn_load(j->results[id].dtype, j->results[id].data, n);
            difference_add(&pass->found[which], got, pass->emulation >= 0 ? (float)value[n] : value[n]);
            if (j->phase != PHASE_COMPARE) continue;
            if (isfinite(value[n])) j->largest[which] = fmax(j->largest[which], fabs(value[n]));
            if (isnan(got) && !isnan(value[n])) j->tensor[which].nan++;
            const double once = fabs(compute_rounded(j->results[id].dtype, value[n]) - value[n]);
            if (isfinite(once)) j->once[which] = fmax(j->once[which], once);
        }
    }
}

/* Does the work of the pass's next tile. Returns true when the pass is over. */
static bool pass_step(struct judge *j)
{
    struct pass *const pass = &j->pass;
    if (pass->at < pass->count) {
        const struct frame *const f = pass->frame;
        const int64_t n = pass->list ? pass->list[pass->at] : pass->at;
        const struct tile *const t = &f->tiles[n];
        const bool more = n + 1 < f->count;
        const bool same_keys = more && t[1].hk == t->hk && (t[1].b == t->b || pass->v.one_sequence);
        const bool same_head = more && t[1].hk == t->hk && t[1].b == t->b;
        if (pass->converts) convert_tile(j, t, !same_head);
        else compute_tile(j, t);
        if (!pass->converts && !same_keys && f->p.op == ATTN_OP_BACKWARD) settle_keys(j, t);
        pass->at++;
    }
    if (pass->at < pass->count) return false;
    settle_sums(j);
    j->in_pass = false;
    return true;
}

/* ---- Verdict ----------------------------------------------------------------------------------------------------- */

/* Returns half the distance from x to the next number of the dtype. */
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

static double worst_of(const struct difference *d)
{
    return d->bad > 0 ? INFINITY : d->most;
}

static double mean_of(const struct difference *d)
{
    return d->count > 0 ? d->sum / (double)d->count : 0;
}

static void decide(struct judge *j)
{
    j->verdict = JUDGE_MATCH;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const attn_tensor_id id = frame_tensors[which];
        judge_tensor *const t = &j->tensor[which];
        if (!is_given(j, id)) continue;
        const attn_dtype dtype = j->results[id].dtype;
        const double largest = j->largest[which];
        t->max_abs = worst_of(&j->now[which]);
        t->relative = t->max_abs == 0 ? 0 : largest > 0 ? t->max_abs / largest : INFINITY;
        t->explained = fmax(j->noise[which].most, half_ulp(dtype, largest));
        t->limit = (which < 2 ? 2 : 3) * t->explained + allowed(dtype);
        if (id == ATTN_T_lse)
            t->limit = 2e-5 + 1e-6 * j->largest_score + (dtype == ATTN_F32 ? 0 : 2 * half_ulp(dtype, largest));
        if (id == ATTN_T_lse) t->limit = fmax(t->limit, 2 * j->noise[which].most);
        t->of = j->now[which].count;
        t->verdict = t->max_abs <= 2 * j->once[which] ? JUDGE_MATCH
                     : t->max_abs <= t->limit         ? JUDGE_ROUNDING
                                                      : JUDGE_MISMATCH;
        if (t->verdict > j->verdict) j->verdict = t->verdict;
        if (t->verdict == JUDGE_MISMATCH) j->wrong |= 1u << which;
    }
}

/* ---- Candidates -------------------------------------------------------------------------------------------------- */

static double root_mean_square(const struct judge *j, int which, const struct difference *d)
{
    const double bad = 10 * j->largest[which] + 1;
    if (d->count == 0) return 0;
    return sqrt((d->squares + (double)d->bad * bad * bad) / (double)d->count);
}

/* Does the mistake explain this tensor? now: the differences from the truth. left: the differences from what a kernel
 * with the mistake gives. */
static bool explains(const struct judge *j, int which, const struct difference *now, const struct difference *left)
{
    if (left->bad > now->bad / 10) return false;
    const bool tenth = left->most <= now->most / 10 && mean_of(left) <= mean_of(now) / 10;
    if (now->bad > 0 && now->most <= j->tensor[which].limit)
        return left->most <= fmax(j->tensor[which].limit, now->most);
    if (left->most <= j->tensor[which].limit)
        return root_mean_square(j, which, left) <= 0.7 * root_mean_square(j, which, now);
    return tenth;
}

/* Computes score, explains and breaks of a candidate whose differences are known. */
static void weigh(const struct judge *j, struct candidate *c)
{
    const struct difference *const now = c->whole ? j->now : j->now_sample;
    c->score = 0;
    c->explains = 0;
    c->breaks = false;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        if (!is_given(j, frame_tensors[which]) || c->left[which].count == 0) continue;
        const double noise = root_mean_square(j, which, &j->noise[which]) + 1e-300;
        if (j->wrong >> which & 1) {
            c->score += log((root_mean_square(j, which, &c->left[which]) + noise) /
                            (root_mean_square(j, which, &now[which]) + noise));
            if (now[which].count > 0 && explains(j, which, &now[which], &c->left[which])) c->explains |= 1u << which;
        } else if (worst_of(&c->left[which]) > fmax(j->tensor[which].limit, 3 * worst_of(&now[which])))
            c->breaks = true;
    }
}

static bool change(const struct judge *j, const struct mistake *m, variation *v, char words[HYPOTHESIS_WORDS])
{
    *words = '\0';
    return hypotheses[m->row].apply(&j->facts, m->variant, v, words);
}

/* Begins the pass that tests a candidate. Returns false if the candidate does not apply to the problem. */
static bool begin_candidate(struct judge *j, const struct candidate *c, bool whole)
{
    variation v = variation_of(&j->frame.p);
    char words[HYPOTHESIS_WORDS];
    if (!change(j, &c->first, &v, words)) return false;
    if (c->second.row >= 0 && !change(j, &c->second, &v, words)) return false;
    struct frame *frame = &j->frame;
    if (v.swapped_problem) {
        if (!j->has_other) return false;
        frame = &j->other;
        const variation of_other = variation_of(&j->other.p);
        v.g = of_other.g;
        whole = true;
    }
    if (j->sample_count == j->frame.count) whole = true;
    if (v.one_sequence && j->p.op == ATTN_OP_BACKWARD) whole = true;
    begin_pass(j, frame, &v, whole ? NULL : j->sample, j->sample_count);
    j->pass.alone = c->first.alone || c->second.alone;
    j->pass.sizes = hypotheses[c->first.row].of_size;
    j->pass.converts = hypotheses[c->first.row].converts && (c->second.row < 0 || hypotheses[c->second.row].converts);
    return true;
}

static void end_candidate(struct judge *j, struct candidate *c)
{
    memcpy(c->left, j->pass.found, sizeof c->left);
    memcpy(c->size, j->pass.size, sizeof c->size);
    c->whole = j->pass.list == NULL;
    weigh(j, c);
}

/* ---- Phases ------------------------------------------------------------------------------------------------------ */

static int emulation_count(const struct judge *j)
{
    return multiply_adds(&j->p) <= SMALL_MULTIPLY_ADDS ? EMULATIONS : EMULATIONS_LARGE;
}

/* Chooses the tiles on which mistakes are tested: all tiles of a cheap problem, otherwise evenly spread ones with the
 * first and the last. In a backward it chooses whole heads, from the first on. */
static void choose_sample(struct judge *j)
{
    const struct frame *const f = &j->frame;
    const double all = multiply_adds(&j->p) * (double)f->rows / (double)attn_max64(1, f->all_rows);
    const bool sums_alone = (j->wrong & ~0x1fu) && !(j->wrong & 0x1fu);
    int64_t wanted = (int64_t)((double)f->count * SMALL_MULTIPLY_ADDS / fmax(all, 1)) + 1;
    j->sample_count = 0;
    if (all <= SMALL_MULTIPLY_ADDS || sums_alone) wanted = f->count;
    if (f->p.op != ATTN_OP_BACKWARD) {
        wanted = attn_clamp64(wanted, attn_min64(f->count, 4), f->count);
        for (int64_t n = 0; n < wanted; n++)
            j->sample[j->sample_count++] = wanted == 1 ? 0 : n * (f->count - 1) / (wanted - 1);
        return;
    }
    for (int64_t n = 0; n < f->count; n++) {
        const bool begins = n == 0 || f->tiles[n].hk != f->tiles[n - 1].hk || f->tiles[n].b != f->tiles[n - 1].b;
        if (begins && j->sample_count >= wanted) break;
        j->sample[j->sample_count++] = n;
    }
}

/* Does one candidate explain all tensors that are wrong? */
static bool is_complete(const struct judge *j)
{
    for (int n = 0; n < j->candidate_count; n++)
        if (!j->candidates[n].breaks && j->candidates[n].explains == j->wrong && j->wrong) return true;
    return false;
}

/* Should this hypothesis be tested? Where all results are within their limits, only mistakes of precision are. A
 * hypothesis with of_size is tested only if results are beyond a limit and nothing explains them, because its test
 * takes long. */
static bool is_worth_trying(const struct judge *j, const struct hypothesis *h)
{
    if (h->of_size) return j->verdict == JUDGE_MISMATCH && !is_complete(j);
    return j->verdict == JUDGE_MISMATCH || h->of_pattern;
}

/* Begins the next single mistake: the next variant of the present hypothesis, or else the first variant of a later
 * hypothesis that is worth trying. False: none is left. */
static bool next_single(struct judge *j)
{
    struct mistake *const m = &j->trying;
    const bool backward = j->p.op == ATTN_OP_BACKWARD;
    for (; m->row < hypotheses_count; *m = (struct mistake){ .row = m->row + 1 }) {
        const struct hypothesis *const h = &hypotheses[m->row];
        const int copies = h->of_scores && backward ? 2 : 1; /* 2: also in the backward alone */
        const bool worth = m->variant > 0 || is_worth_trying(j, h);
        for (; worth && m->variant < h->variants * copies; m->variant++) {
            const struct candidate c = { .first = { m->row, m->variant % h->variants, m->variant >= h->variants },
                                         .second = { .row = -1 } };
            if (j->candidate_count == CANDIDATES || !begin_candidate(j, &c, false)) continue;
            j->candidates[j->candidate_count] = c;
            return true;
        }
        j->tried[m->row] = true;
    }
    return false;
}

static int by_score(const struct judge *j, int a, int b)
{
    return j->candidates[a].score < j->candidates[b].score ? -1 : j->candidates[a].score > j->candidates[b].score;
}

/* Inserts a candidate in a list of at most `most` candidates, which is sorted by score. */
static void insert(const struct judge *j, int *list, int *count, int most, int candidate)
{
    int at = *count;
    if (at < most) ++*count;
    else if (by_score(j, candidate, list[--at]) >= 0) return;
    for (; at > 0 && by_score(j, candidate, list[at - 1]) < 0; at--) list[at] = list[at - 1];
    list[at] = candidate;
}

/* Does the mistake remove over a fifth of the error of a wrong tensor? */
static bool removes_some(const struct judge *j, const struct candidate *c)
{
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const struct difference *const now = c->whole ? &j->now[which] : &j->now_sample[which], *const left =
                                                                                                    &c->left[which];
        if (!(j->wrong >> which & 1) || left->count == 0 || now->count == 0 || left->bad > now->bad) continue;
        if (left->bad < now->bad * 4 / 5 || left->most < 0.8 * now->most || mean_of(left) < 0.8 * mean_of(now) ||
            root_mean_square(j, which, left) < 0.8 * root_mean_square(j, which, now))
            return true;
    }
    return false;
}

/* Chooses the mistakes that pairs are made of. The first of a pair must remove a part of the error. The second may be
 * any mistake, because its part may be small beside the error of the first. */
static void choose_pairs(struct judge *j)
{
    int best[HYPOTHESES_MOST];
    j->first_count = j->second_count = 0;
    memset(best, -1, sizeof best);
    for (int n = 0; n < j->singles; n++) {
        const struct candidate *const c = &j->candidates[n];
        int *const of_row = &best[c->first.row];
        if (removes_some(j, c) && (*of_row < 0 || by_score(j, n, *of_row) < 0)) *of_row = n;
    }
    for (int row = 0; row < hypotheses_count; row++)
        if (best[row] >= 0) insert(j, j->firsts, &j->first_count, PAIR_FIRSTS, best[row]);
    if (is_complete(j)) j->first_count = 0;
    for (int n = 0; n < j->singles && j->second_count < PAIR_SECONDS; n++)
        if (!hypotheses[j->candidates[n].first.row].of_pattern) j->seconds[j->second_count++] = n;
}

static bool next_pair(struct judge *j)
{
    for (; j->index < j->first_count * j->second_count; j->index++) {
        const int a = j->firsts[j->index / j->second_count], b = j->seconds[j->index % j->second_count];
        const struct candidate c = { .first = j->candidates[a].first, .second = j->candidates[b].first };
        if (c.first.row == c.second.row || c.first.alone != c.second.alone) continue;
        if (j->candidate_count >= CANDIDATES || !begin_candidate(j, &c, false)) continue;
        j->candidates[j->candidate_count] = c;
        return true;
    }
    return false;
}

/* Returns the better (lower) score of the two mistakes of a pair, each tested alone. */
static double better_single(const struct judge *j, const struct candidate *pair)
{
    double best = 0;
    for (int n = 0; n < j->singles; n++) {
        const struct mistake *const m = &j->candidates[n].first;
        const bool one = m->row == pair->first.row && m->variant == pair->first.variant &&
                         m->alone == pair->first.alone;
        const bool other = m->row == pair->second.row && m->variant == pair->second.variant &&
                           m->alone == pair->second.alone;
        if ((one || other) && j->candidates[n].score < best) best = j->candidates[n].score;
    }
    return best;
}

/* Do the caller's errors have about the size and the spread of the errors that the mistake makes? */
static bool has_size(const struct judge *j, int which, const struct candidate *c, const struct difference *now)
{
    const double rms = root_mean_square(j, which, now), of = root_mean_square(j, which, &c->size[which]);
    const double spread = rms > 0 ? mean_of(now) / rms : 0, of_spread = of > 0 ? mean_of(&c->size[which]) / of : 0;
    return now->bad == 0 && rms > 4 * root_mean_square(j, which, &j->noise[which]) && of > rms / 1.5 &&
           of < rms * 1.5 && spread > of_spread / 1.25 && spread < of_spread * 1.25;
}

/* Is this candidate's mistake of precision found? With of_size, errors of its size must be in all tensors that are
 * wrong. */
static bool is_imprecise(const struct judge *j, const struct candidate *c)
{
    const bool by_size = hypotheses[c->first.row].of_size;
    bool any = false;
    /* Rounded sums of P V leave lse right. In float32 lse must be given and right, because many mistakes make errors of
     * that size. */
    if (by_size ? j->wrong >> 1 & 1 : c->breaks) return false;
    if (by_size && j->p.q.dtype == ATTN_F32 && j->p.op == ATTN_OP_FORWARD && !is_given(j, ATTN_T_lse)) return false;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const struct difference *const now = c->whole ? &j->now[which] : &j->now_sample[which], *const left =
                                                                                                    &c->left[which];
        if (!is_given(j, frame_tensors[which]) || left->count == 0) continue;
        if (by_size && (j->wrong >> which & 1)) {
            if (!has_size(j, which, c, now)) return false;
            any = true;
        } else if (!by_size && which != 1)
            any |= now->bad == 0 && left->bad == 0 && mean_of(now) > 0 && mean_of(left) < JUDGE_PATTERN * mean_of(now);
    }
    return any;
}

static bool is_explanation(const struct judge *j, const struct candidate *c)
{
    if (hypotheses[c->first.row].of_pattern && c->second.row < 0) return is_imprecise(j, c);
    if (c->breaks || c->explains == 0) return false;
    return c->second.row < 0 || c->score < better_single(j, c) - JUDGE_PAIR_GAIN;
}

static void choose_confirmed(struct judge *j)
{
    j->confirm_count = 0;
    for (int n = 0; n < j->candidate_count; n++)
        if (is_explanation(j, &j->candidates[n])) insert(j, j->confirm, &j->confirm_count, CONFIRMED, n);
}

static void enter(struct judge *j, enum phase phase)
{
    j->phase = phase;
    j->index = 0;
    j->in_pass = false;
}

/* Begins the next pass of the present phase. Returns false if the phase is over. */
static bool begin_in_phase(struct judge *j)
{
    const variation right = variation_of(&j->frame.p);
    switch (j->phase) {
    case PHASE_TRUTH: begin_pass(j, &j->frame, &right, NULL, 0); return true;
    case PHASE_EMULATE:
        begin_pass(j, &j->frame, &right, NULL, 0);
        j->pass.emulation = j->index;
        j->pass.against_truth = true;
        return true;
    case PHASE_COMPARE:
    case PHASE_SAMPLE:
        begin_pass(j, &j->frame, &right, j->phase == PHASE_SAMPLE ? j->sample : NULL, j->sample_count);
        j->pass.converts = true;
        return true;
    case PHASE_SINGLES: return next_single(j);
    case PHASE_PAIRS: return next_pair(j);
    case PHASE_CONFIRM:
        for (; j->index < j->confirm_count; j->index++) {
            struct candidate *const c = &j->candidates[j->confirm[j->index]];
            if (!c->whole && j->sample_count < j->frame.count && begin_candidate(j, c, true)) return true;
            c->confirmed = true;
        }
        return false;
    case PHASE_DONE: return false;
    }
    return false;
}

/* Enters the next phase when the present one has no more passes. */
static void leave_phase(struct judge *j)
{
    if (j->phase == PHASE_SINGLES) {
        j->singles = j->candidate_count;
        choose_pairs(j);
        enter(j, j->verdict == JUDGE_MISMATCH ? PHASE_PAIRS : PHASE_CONFIRM);
    } else if (j->phase == PHASE_PAIRS) enter(j, PHASE_CONFIRM);
    else enter(j, PHASE_DONE);
    if (j->phase == PHASE_CONFIRM) choose_confirmed(j);
}

/* Stores the results of a pass that is over. */
static void end_pass(struct judge *j)
{
    switch (j->phase) {
    case PHASE_TRUTH:
        for (int64_t n = 0; n < j->frame.rows; n++)
            if (isfinite(j->truth.lse[n])) j->largest_score = fmax(j->largest_score, fabs(j->truth.lse[n]));
        enter(j, PHASE_EMULATE);
        break;
    case PHASE_EMULATE:
        for (int which = 0; which < FRAME_TENSORS; which++)
            if (j->pass.found[which].most > j->noise[which].most || j->index == 0)
                j->noise[which] = j->pass.found[which];
        if (++j->index == emulation_count(j)) enter(j, PHASE_COMPARE);
        break;
    case PHASE_COMPARE:
        memcpy(j->now, j->pass.found, sizeof j->now);
        decide(j);
        if (j->verdict == JUDGE_MATCH) enter(j, PHASE_DONE);
        else {
            choose_sample(j);
            enter(j, PHASE_SAMPLE);
        }
        break;
    case PHASE_SAMPLE:
        memcpy(j->now_sample, j->pass.found, sizeof j->now_sample);
        if (j->sample_count == j->frame.count) memcpy(j->now_sample, j->now, sizeof j->now);
        enter(j, PHASE_SINGLES);
        break;
    case PHASE_SINGLES: end_candidate(j, &j->candidates[j->candidate_count++]), j->trying.variant++; break;
    case PHASE_PAIRS: end_candidate(j, &j->candidates[j->candidate_count++]), j->index++; break;
    case PHASE_CONFIRM:
        end_candidate(j, &j->candidates[j->confirm[j->index]]);
        j->candidates[j->confirm[j->index++]].confirmed = true;
        break;
    case PHASE_DONE: break;
    }
}

bool judge_step(judge *j)
{
    if (j->phase == PHASE_DONE) return true;
    if (!j->in_pass && !begin_in_phase(j)) leave_phase(j);
    else if (pass_step(j)) end_pass(j);
    return j->phase == PHASE_DONE;
}

bool judge_has_verdict(const judge *j)
{
    return j->phase > PHASE_COMPARE;
}

void judge_hurry(judge *j)
{
    struct frame *const f = &j->frame;
    if (j->phase != PHASE_TRUTH || j->pass.at == 0 || j->pass.at == f->count) return;
    int64_t count = j->pass.at;
    while (f->p.op == ATTN_OP_BACKWARD && count > 0 && f->tiles[count].hk == f->tiles[count - 1].hk &&
           f->tiles[count].b == f->tiles[count - 1].b)
        count--;
    if (count == 0) return; /* not even one key/value head is complete */
    f->count = j->pass.count = j->pass.at = count;
    f->whole = j->pass.sums = false;
    f->rows = f->tiles[count - 1].row + f->tiles[count - 1].count;
    for (int64_t n = 0; n < f->g.dims.B * f->g.dims.H; n++)
        if (f->row_of_head[n] >= f->rows) f->row_of_head[n] = -1;
    j->given &= ~(ATTN_TENSOR_BIT(dbias) | ATTN_TENSOR_BIT(dsinks) | ATTN_TENSOR_BIT(dalibi_slopes));
}

/* ---- Opening and closing ----------------------------------------------------------------------------------------- */

attn_status judge_check(const attn_problem *problem, const attn_tensor results[ATTN_TENSOR_COUNT], attn_error *err)
{
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const attn_tensor_id id = frame_tensors[which];
        const attn_tensor *const t = &results[id];
        const int64_t wanted = frame_elements(problem, id);
        int64_t elements;
        char member[64];
        if (t->rank == 0) continue;
        snprintf(member, sizeof member, "/%s/shape", attn_tensors[id].name);
        if (attn_shape_elements(t->rank, t->shape, &elements) && elements == wanted) continue;
        return attn_fail(err, ATTN_INVALID, member, "%s: has %lld elements, the problem's result has %lld",
                         attn_tensors[id].name, (long long)elements, (long long)wanted);
    }
    return ATTN_OK;
}

static void find_facts(struct judge *j)
{
    struct hypothesis_facts *const f = &j->facts;
    *f = (struct hypothesis_facts){ .p = &j->frame.p, .g = attn_geometry_of(&j->p), .given = j->given };
    const attn_dims *const d = &f->g.dims;
    f->backward = j->p.op == ATTN_OP_BACKWARD;
    f->mixes = attn_keys_are_packed(d) && d->total_k <= COMPUTE_MIXED_KEYS;
    for (int64_t b = 0; b < d->B; b++) {
        const attn_sequence s = attn_sequence_of(&f->g, b);
        f->most_q = attn_max64(f->most_q, s.Sq);
        f->most_k = attn_max64(f->most_k, s.Sk);
        f->uneven |= s.Sq != s.Sk;
        f->has_gaps |= f->g.seqlens_k && s.Sk < attn_room_of(f->g.cu_k, d->Sk, b);
        f->has_empty |= s.Sk == 0 || attn_keys_of(&f->g, &s, 0).hi == 0 || attn_keys_of(&f->g, &s, s.Sq - 1).lo >= s.Sk;
    }
    f->has_empty |= j->p.keep_mask.rank || j->p.bias.rank || j->p.mask_startend_rows.rank;
}

/* Opens the frame of the problem read in the other layout, where heads and rows change places. */
static bool open_other(struct judge *j)
{
    attn_problem other = j->p;
    attn_error ignored;
    other.layout = j->p.layout == ATTN_BSHD ? ATTN_BHSD : ATTN_BSHD;
    if (j->facts.g.dims.packed || j->p.page_table.rank || attn_check(&other, &ignored) != ATTN_OK) return true;
    if (j->facts.g.dims.H < 2 || j->facts.most_q < 2 || frame_bytes(&other, 1) > JUDGE_BYTES) return true;
    j->has_other = frame_open(&j->other, &other, j->results, 1);
    j->other.whole = false; /* dbias, dsinks and dslopes have other shapes there */
    return j->has_other;
}

static bool numbers(double **to, int64_t count)
{
    *to = calloc((size_t)count + 1, sizeof **to);
    return *to != NULL;
}

static bool take_memory(struct judge *j)
{
    const attn_dims *const d = &j->frame.g.dims;
    const int64_t rows = j->frame.rows, lines = j->frame.lines;
    const bool backward = j->p.op == ATTN_OP_BACKWARD;
    struct truth *const t = &j->truth, *const s = &j->some;
    for (int which = 5; which < FRAME_TENSORS && backward; which++)
        j->sum_elements[which] = frame_elements(&j->p, frame_tensors[which]);
    if (!is_given(j, ATTN_T_dbias)) j->sum_elements[5] = 0;
    const int64_t *const n = j->sum_elements;
    j->sample = calloc((size_t)j->frame.count + 1, sizeof *j->sample);
    j->candidates = calloc(CANDIDATES, sizeof *j->candidates);
    return j->sample && j->candidates && numbers(&t->out, rows * d->Dv) && numbers(&t->lse, rows) &&
           numbers(&t->dq, backward ? rows * d->D : 0) && numbers(&t->dk, lines * d->D) &&
           numbers(&t->dv, lines * d->Dv) && (n[5] == 0 || (numbers(&t->dbias, n[5]) && numbers(&s->dbias, n[5]))) &&
           (n[6] == 0 || (numbers(&t->dsinks, n[6]) && numbers(&s->dsinks, n[6]))) &&
           (n[7] == 0 || (numbers(&t->dslopes, n[7]) && numbers(&s->dslopes, n[7])));
}

/* Returns the share of the rows for which time and memory suffice. *bytes: the memory that this share takes. */
static double share_of(const attn_problem *p, double seconds, int64_t *bytes)
{
    const double third = seconds / 3, needs = judge_cost_of(p).truth, least = 1e-9;
    double share = needs <= third ? 1 : third / needs;
    while ((*bytes = frame_bytes(p, share)) > JUDGE_BYTES && share > least) share /= 2;
    if (*bytes > JUDGE_BYTES) *bytes = INT64_MAX;
    return share;
}

int64_t judge_bytes(const attn_problem *problem, double seconds)
{
    int64_t bytes;
    share_of(problem, seconds, &bytes);
    return bytes;
}

static attn_status choose_share(struct judge *j, double seconds, double *share, attn_error *err)
{
    int64_t bytes;
    *share = share_of(&j->p, seconds, &bytes);
    if (bytes != INT64_MAX) return ATTN_OK;
    return attn_fail(err, ATTN_TOO_LARGE, "",
                     "a check of this problem takes more than %lld bytes, even of a part of it",
                     (long long)JUDGE_BYTES);
}

attn_status judge_open(const attn_problem *problem, const attn_tensor results[ATTN_TENSOR_COUNT], double seconds,
                       judge **opened, attn_error *err)
{
    double share;
    attn_status status;
    struct judge *const j = calloc(1, sizeof *j);
    *opened = NULL;
    if (!j) goto no_memory;
    j->p = *problem;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const attn_tensor_id id = frame_tensors[which];
        j->results[id] = results[id];
        j->p.tensor[id] = (attn_tensor){ 0 };
        if (results[id].rank > 0) j->given |= UINT64_C(1) << id;
    }
    if ((status = judge_check(&j->p, j->results, err)) != ATTN_OK ||
        (status = choose_share(j, seconds, &share, err)) != ATTN_OK) {
        judge_close(j);
        return status;
    }
    if (!frame_open(&j->frame, &j->p, j->results, share) || !take_memory(j)) goto no_memory;
    find_facts(j);
    if (!open_other(j)) goto no_memory;
    *opened = j;
    return ATTN_OK;
no_memory:
    judge_close(j);
    return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to check results");
}

void judge_close(judge *j)
{
    if (!j) return;
    struct truth *const both[] = { &j->truth, &j->some };
    frame_close(&j->frame);
    frame_close(&j->other);
    for (size_t i = 0; i < 2; i++)
        for (int which = 0; which < FRAME_TENSORS; which++) free(frame_kept(both[i], frame_tensors[which]));
    free(j->sample);
    free(j->candidates);
    free(j);
}

/* ---- Report ------------------------------------------------------------------------------------------------------ */

/* Writes the sentence that describes the mistake. */
static void put_sentence(const struct judge *j, const struct mistake *m, char *text, size_t room)
{
    variation ignored = variation_of(&j->frame.p);
    char words[HYPOTHESIS_WORDS];
    const bool applies = change(j, m, &ignored, words);
    snprintf(text, room, "%s%s%s%s%s", hypotheses[m->row].says, m->alone ? " in the backward" : "",
             applies && *words ? " (" : "", words, *words ? ")" : "");
}

static judge_explanation explanation_of(const struct judge *j, const struct candidate *c)
{
    judge_explanation e = { .code = hypotheses[c->first.row].code };
    char first[JUDGE_TEXT / 2 - 8], second[JUDGE_TEXT / 2 - 8];
    double least = INFINITY;
    put_sentence(j, &c->first, first, sizeof first);
    snprintf(e.detail, sizeof e.detail, "%s", first);
    snprintf(e.fix, sizeof e.fix, "%s", hypotheses[c->first.row].fix);
    if (c->second.row >= 0) {
        e.and_code = hypotheses[c->second.row].code;
        put_sentence(j, &c->second, second, sizeof second);
        snprintf(e.detail, sizeof e.detail, "%s, and %s", first, second);
        snprintf(e.fix, sizeof e.fix, "%s; %s", hypotheses[c->first.row].fix, hypotheses[c->second.row].fix);
    }
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const bool of_pattern = c->explains == 0 && is_given(j, frame_tensors[which]) && which != 1;
        if (!(c->explains >> which & 1) && !of_pattern) continue;
        const struct difference *const now = c->whole ? &j->now[which] : &j->now_sample[which];
        const double share = worst_of(&c->left[which]) / fmax(worst_of(now), 1e-300);
        if (c->left[which].count == 0) continue;
        e.tensors |= UINT64_C(1) << frame_tensors[which];
        if (share >= least && e.tensors != UINT64_C(1) << frame_tensors[which]) continue;
        least = share;
        e.now = worst_of(now);
        e.if_so = worst_of(&c->left[which]);
    }
    return e;
}

/* Does the list already have an explanation of the same one or two mistakes, in either order and of any variant? */
static bool is_listed(const struct judge *j, const int *list, int count, const struct candidate *c)
{
    for (int n = 0; n < count; n++) {
        const struct candidate *const other = &j->candidates[list[n]];
        if (other->first.row == c->first.row && other->second.row == c->second.row) return true;
        if (c->second.row >= 0 && other->first.row == c->second.row && other->second.row == c->first.row) return true;
    }
    return false;
}

/* Returns the best explanation that is not listed. Among explanations of about equal score, it is the one that stands
 * first in the table. -1: all are listed. */
static int best_left(const struct judge *j, const int *list, int count)
{
    enum { NONE = -1 };
    int best = NONE;
    for (int n = 0; n < j->candidate_count; n++) {
        const struct candidate *const c = &j->candidates[n];
        if (!is_explanation(j, c) || is_listed(j, list, count, c)) continue;
        if (best == NONE || c->score < j->candidates[best].score - 0.1) best = n;
    }
    return best;
}

static void report_tensors(const struct judge *j, judge_result *result)
{
    for (int which = 0; which < FRAME_TENSORS; which++)
        if (is_given(j, frame_tensors[which])) result->tensor[frame_tensors[which]] = j->tensor[which];
}

void judge_report(judge *j, judge_result *result)
{
    int list[JUDGE_EXPLANATIONS], count = 0, best;
    *result = (judge_result){ .verdict = j->verdict, .op = j->p.op, .given = j->given };
    result->rows_checked = j->frame.rows;
    result->rows_of = j->frame.all_rows;
    report_tensors(j, result);
    if (j->phase > PHASE_COMPARE) where_find(&j->frame, &j->truth, j->results, j->given, result);
    while (count < JUDGE_EXPLANATIONS && (best = best_left(j, list, count)) >= 0) {
        result->explanation[count] = explanation_of(j, &j->candidates[best]);
        list[count++] = best;
    }
    result->explanation_count = count;
    for (int row = 0; row < hypotheses_count && j->verdict == JUDGE_MISMATCH; row++) {
        variation ignored = variation_of(&j->frame.p);
        char words[HYPOTHESIS_WORDS];
        bool applies = false;
        for (int n = 0; n < hypotheses[row].variants && !applies; n++) {
            ignored = variation_of(&j->frame.p);
            applies = hypotheses[row].apply(&j->facts, n, &ignored, words);
        }
        if (applies && !j->tried[row]) result->not_tried[result->not_tried_count++] = hypotheses[row].code;
    }
}
