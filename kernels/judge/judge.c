/* judge.c: the phases of a judge's work, in order. See judge.h.
 *
 *   TRUTH      computes every tile in float64 and stores the results (the truth)
 *   EMULATE    computes every tile with the roundings of right kernels, to see how far results may be from the truth
 *   COMPARE    compares the caller's results with the truth: errors, limits, verdict
 *   SAMPLE     chooses the tiles on which mistakes are tested, and sums up the caller's errors on these tiles
 *   SINGLES    tests every mistake on the sample
 *   PAIRS      tests two mistakes at once, if no single mistake explains everything
 *   CONFIRM    tests the best explanations on all tiles
 *
 * A phase has one pass or several. A pass goes over tiles, and a step of a judge computes one tile. After PHASE_TRUTH a
 * pass stores only sums of differences. */
#include "kernels/judge/judge.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/judge/state.h"

/* The most bytes that a judge may take, besides the problem's tensors. */
#define JUDGE_BYTES ((int64_t)512 << 20)

/* Multiply-adds per second in double on one thread: JUDGE_RATE with AVX2 or AVX-512, JUDGE_RATE_PORTABLE without. */
#define JUDGE_RATE          8e9
#define JUDGE_RATE_PORTABLE 2e9
/* An emulation takes this many times as long as the truth (float64 results). */
#define JUDGE_EMULATION 2.5

/* number of emulations (results with the roundings of right kernels) of a problem above SMALL_MULTIPLY_ADDS */
enum { EMULATIONS_LARGE = 2 };

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

judge_cost judge_cost_of(const attn_problem *problem)
{
    const double rate = products_best() == &products_portable ? JUDGE_RATE_PORTABLE : JUDGE_RATE;
    const double truth = frame_multiply_adds(problem) / rate;
    return (judge_cost){ .truth = truth * (1 + JUDGE_EMULATION * EMULATIONS_LARGE), .all = truth * hypotheses_count };
}

/* ---- Phases ------------------------------------------------------------------------------------------------------ */

static int emulation_count(const struct judge *j)
{
    return frame_multiply_adds(&j->p) <= SMALL_MULTIPLY_ADDS ? EMULATIONS : EMULATIONS_LARGE;
}

static void enter(struct judge *j, enum phase phase)
{
    j->phase = phase;
    j->index = 0;
    j->in_pass = false;
}

/* Begins the next pass (run over tiles) of the judge's present phase. Returns false if this phase has no more
 * passes. */
static bool begin_in_phase(struct judge *j)
{
    const variation right = variation_of(&j->frame.p);
    switch (j->phase) {
    case PHASE_TRUTH: pass_begin(j, &j->frame, &right, NULL, 0); return true;
    case PHASE_EMULATE:
        pass_begin(j, &j->frame, &right, NULL, 0);
        j->pass.emulation = j->index;
        j->pass.against_truth = true;
        return true;
    case PHASE_COMPARE:
    case PHASE_SAMPLE:
        pass_begin(j, &j->frame, &right, j->phase == PHASE_SAMPLE ? j->sample : NULL, j->sample_count);
        j->pass.converts = true;
        return true;
    case PHASE_SINGLES: return search_next_single(j);
    case PHASE_PAIRS: return search_next_pair(j);
    case PHASE_CONFIRM:
        for (; j->index < j->confirm_count; j->index++) {
            struct candidate *const c = &j->candidates[j->confirm[j->index]];
            if (!c->whole && j->sample_count < j->frame.count && candidate_begin(j, c, true)) return true;
            c->confirmed = true;
        }
        return false;
    case PHASE_DONE: return false;
    }
    return false;
}

/* Enters the judge's next phase. Call this when the present phase has no more passes. */
static void leave_phase(struct judge *j)
{
    if (j->phase == PHASE_SINGLES) {
        j->singles = j->candidate_count;
        search_choose_pairs(j);
        enter(j, j->verdict == JUDGE_MISMATCH ? PHASE_PAIRS : PHASE_CONFIRM);
    } else if (j->phase == PHASE_PAIRS) enter(j, PHASE_CONFIRM);
    else enter(j, PHASE_DONE);
    if (j->phase == PHASE_CONFIRM) search_choose_confirmed(j);
}

/* Stores the results of a finished pass (run over tiles), and enters the next phase if it was the last pass of a
 * phase. */
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
        verdict_decide(j);
        if (j->verdict == JUDGE_MATCH) enter(j, PHASE_DONE);
        else {
            search_choose_sample(j);
            enter(j, PHASE_SAMPLE);
        }
        break;
    case PHASE_SAMPLE:
        memcpy(j->now_sample, j->pass.found, sizeof j->now_sample);
        if (j->sample_count == j->frame.count) memcpy(j->now_sample, j->now, sizeof j->now);
        enter(j, PHASE_SINGLES);
        break;
    case PHASE_SINGLES: candidate_end(j, &j->candidates[j->candidate_count++]), j->trying.variant++; break;
    case PHASE_PAIRS: candidate_end(j, &j->candidates[j->candidate_count++]), j->index++; break;
    case PHASE_CONFIRM:
        candidate_end(j, &j->candidates[j->confirm[j->index]]);
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
    if (count == 0) return; /* no key/value head has been computed as a whole yet, so the pass must go on */
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

/* Opens a second frame (the problem cut into tiles), which reads the problem in the other layout: heads and rows are
 * exchanged. */
static bool open_other(struct judge *j)
{
    attn_problem other = j->p;
    attn_error ignored;
    other.layout = j->p.layout == ATTN_BSHD ? ATTN_BHSD : ATTN_BSHD;
    if (j->facts.g.dims.packed || j->p.page_table.rank || attn_check(&other, &ignored) != ATTN_OK) return true;
    if (j->facts.g.dims.H < 2 || j->facts.most_q < 2 || frame_bytes(&other, 1) > JUDGE_BYTES) return true;
    j->has_other = frame_open(&j->other, &other, j->results, 1);
    j->other.whole = false; /* dbias, dsinks and dslopes have other shapes in this layout, so they are not compared */
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
    if (!state_is_given(j, ATTN_T_dbias)) j->sum_elements[5] = 0;
    const int64_t *const n = j->sum_elements;
    j->sample = calloc((size_t)j->frame.count + 1, sizeof *j->sample);
    j->candidates = calloc(CANDIDATES, sizeof *j->candidates);
    return j->sample && j->candidates && numbers(&t->out, rows * d->Dv) && numbers(&t->lse, rows) &&
           numbers(&t->dq, backward ? rows * d->D : 0) && numbers(&t->dk, lines * d->D) &&
           numbers(&t->dv, lines * d->Dv) && (n[5] == 0 || (numbers(&t->dbias, n[5]) && numbers(&s->dbias, n[5]))) &&
           (n[6] == 0 || (numbers(&t->dsinks, n[6]) && numbers(&s->dsinks, n[6]))) &&
           (n[7] == 0 || (numbers(&t->dslopes, n[7]) && numbers(&s->dslopes, n[7])));
}

/* Returns the share of the rows that a judge can compute in float64 with this time and with its memory. *bytes becomes
 * the memory that this share takes. */
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
