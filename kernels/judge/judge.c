/* judge.c: the phases of a judge's work, in order.
 *
 *   TRUTH      computes every tile in float64 and stores the results (the truth), if no device has computed them
 *   COMPARE    computes the errors: the differences between the caller's results and the truth
 *   EMULATE    computes tiles with the roundings of correct kernels, which shows how far correct results may be from
 *              the truth, and thus gives limits and verdict. If a device has computed the truth of a large problem,
 *              only some tiles are emulated (units.c)
 *   SAMPLE     chooses the tiles on which mistakes are tested, and sums up the caller's errors on these tiles
 *   SINGLES    tests every mistake on the sample
 *   PAIRS      tests two mistakes at once, if no single mistake explains everything
 *   CONFIRM    tests the best explanations on all tiles. If only some tiles are emulated, it tests the best explanation
 *              on the sample's tiles of keys, if SINGLES and PAIRS left these tiles out because they take much work
 *
 * A phase has one pass or several. A pass goes over tiles, and a step of a judge computes one tile. After PHASE_TRUTH a
 * pass stores only sums of differences. */
#include "kernels/judge/judge.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/judge/state.h"

/* The largest number of bytes that a judge (a check of a caller's results) may allocate, besides the problem's
 * tensors. */
#define JUDGE_BYTES ((int64_t)512 << 20)

/* If a problem has more multiply-adds than this, a device computes its truth (float64 results). With fewer, the judge
 * itself takes less than 20 ms on one CPU core with AVX2 (EFFORT_RATE), so a device would save nothing. */
#define JUDGE_DEVICE_MULTIPLY_ADDS ((double)(INT64_C(1) << 27))
/* The largest number of bytes of truth (float64 results) that a device computes for a judge. */
#define JUDGE_TRUTH_BYTES ((int64_t)1 << 30)

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

/* ---- How long a judge takes -------------------------------------------------------------------------------------- */

judge_cost judge_cost_of(const attn_problem *problem)
{
    const double truth = frame_multiply_adds(problem) / effort_rate();
    return (judge_cost){ .truth = truth * (1 + effort_of_emulations(EFFORT_EMULATIONS_LARGE)),
                         .all = truth * hypotheses_count };
}

/* ---- The phases of a judge's work -------------------------------------------------------------------------------- */

static void enter(struct judge *j, enum phase phase)
{
    j->phase = phase;
    j->index = 0;
    j->in_pass = false;
}

/* Begins the next pass (run over tiles) of the judge's present phase. Returns false if the phase has no more passes. */
static bool begin_in_phase(struct judge *j)
{
    const variation right = variation_of(&j->frame.p);
    switch (j->phase) {
    case PHASE_TRUTH: pass_begin(j, &j->frame, &right, NULL, 0); return true;
    case PHASE_EMULATE:
        pass_begin(j, &j->frame, &right, j->emulated, j->emulated_count);
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
            const bool widens = units_are_sampled(j) ? j->index == 0 && candidate_lacks_keys(j, c)
                                                     : !c->whole && j->sample_count < j->frame.count;
            if (widens && candidate_begin(j, c, true)) return true;
            c->confirmed = true;
        }
        return false;
    case PHASE_DONE: return false;
    }
    return false;
}

/* Enters the judge's next phase. Call this function when the present phase has no more passes (runs over tiles). */
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

static void end_pass(struct judge *j)
{
    switch (j->phase) {
    case PHASE_TRUTH: enter(j, PHASE_COMPARE); break;
    case PHASE_COMPARE:
        memcpy(j->now, j->pass.found, sizeof j->now);
        for (int64_t n = 0; n < j->frame.rows; n++)
            if (isfinite(j->truth.lse[n])) j->largest_score = fmax(j->largest_score, fabs(j->truth.lse[n]));
        units_choose_emulated(j);
        enter(j, PHASE_EMULATE);
        break;
    case PHASE_EMULATE:
        for (int which = 0; which < FRAME_TENSORS; which++)
            if (j->pass.found[which].most > j->noise[which].most || j->index == 0)
                j->noise[which] = j->pass.found[which];
        if (++j->index < effort_emulations(&j->p)) break;
        verdict_decide(j);
        if (j->verdict == JUDGE_MATCH) enter(j, PHASE_DONE);
        else {
            search_choose_sample(j);
            enter(j, PHASE_SAMPLE);
        }
        break;
    case PHASE_SAMPLE:
        memcpy(j->now_sample, j->pass.found, sizeof j->now_sample);
        if (j->sample_count == j->frame.count && !units_are_sampled(j)) memcpy(j->now_sample, j->now, sizeof j->now);
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
    return j->phase > PHASE_EMULATE;
}

/* Leaves tiles of keys out of the check if no tile of queries before tile number `count` reads them. Tiles of keys that
 * no query reads at all are kept. */
static void leave_out_keys(struct frame *f, int64_t count)
{
    const int64_t all = f->key_count, read = f->read_count;
    f->key_count = f->read_count = 0;
    for (int64_t n = 0; n < all; n++) {
        if (n < read && f->key_tiles[n].tile >= count) continue;
        f->key_tiles[f->key_count++] = f->key_tiles[n];
        f->read_count += n < read;
    }
}

void judge_hurry(judge *j)
{
    struct frame *const f = &j->frame;
    if (j->phase != PHASE_TRUTH || j->pass.at == 0 || j->pass.at >= f->count) return;
    int64_t count = j->pass.at;
    while (f->p.op == ATTN_OP_BACKWARD && count > 0 && f->tiles[count].hk == f->tiles[count - 1].hk &&
           f->tiles[count].b == f->tiles[count - 1].b)
        count--;
    /* no key/value head has all of its float64 results yet, so all rows stay in the check */
    if (count == 0) return;
    leave_out_keys(f, count);
    f->count = j->pass.count = j->pass.at = count;
    f->whole = j->pass.sums = false;
    f->rows = f->tiles[count - 1].row + f->tiles[count - 1].count;
    for (int64_t n = 0; n < f->g.dims.B * f->g.dims.H; n++)
        if (f->row_of_head[n] >= f->rows) f->row_of_head[n] = -1;
    j->given &= ~(ATTN_TENSOR_BIT(dbias) | ATTN_TENSOR_BIT(dsinks) | ATTN_TENSOR_BIT(dalibi_slopes));
}

/* ---- Opening and closing a judge --------------------------------------------------------------------------------- */

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
    if (j->facts.g.dims.H < 2 || j->facts.most_q < 2 || frame_bytes(&other, 1, true) > JUDGE_BYTES) return true;
    j->has_other = frame_open(&j->other, &other, j->results, 1, false);
    /* With heads and rows exchanged, dbias, dsinks and dslopes would have other shapes. `whole` is set to false, so
     * that these three are not compared. */
    j->other.whole = false;
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
    j->sample = calloc((size_t)units_room(&j->frame), sizeof *j->sample);
    j->candidates = calloc(CANDIDATES, sizeof *j->candidates);
    if (j->borrows_truth) return j->sample && j->candidates;
    return j->sample && j->candidates && numbers(&t->out, rows * d->Dv) && numbers(&t->lse, rows) &&
           numbers(&t->dq, backward ? rows * d->D : 0) && numbers(&t->dk, lines * d->D) &&
           numbers(&t->dv, lines * d->Dv) && (n[5] == 0 || (numbers(&t->dbias, n[5]) && numbers(&s->dbias, n[5]))) &&
           (n[6] == 0 || (numbers(&t->dsinks, n[6]) && numbers(&s->dsinks, n[6]))) &&
           (n[7] == 0 || (numbers(&t->dslopes, n[7]) && numbers(&s->dslopes, n[7])));
}

/* Returns the share of the query rows that a judge can check in the given time and with its memory. *bytes becomes the
 * memory that this share takes. */
static double share_of(const attn_problem *p, bool has_truth, double seconds, int64_t *bytes)
{
    const double third = seconds / 3, needs = judge_cost_of(p).truth, least = 1e-9;
    double share = has_truth || needs <= third ? 1 : third / needs;
    while ((*bytes = frame_bytes(p, share, !has_truth)) > JUDGE_BYTES && !has_truth && share > least) share /= 2;
    if (*bytes > JUDGE_BYTES) *bytes = INT64_MAX;
    return share;
}

int64_t judge_bytes(const attn_problem *problem, bool has_truth, double seconds)
{
    int64_t bytes;
    share_of(problem, has_truth, seconds, &bytes);
    return bytes;
}

int64_t judge_elements(const attn_problem *problem, attn_tensor_id id)
{
    return frame_elements(problem, id);
}

uint64_t judge_wants(const attn_problem *problem, const attn_tensor results[ATTN_TENSOR_COUNT])
{
    uint64_t wants = ATTN_TENSOR_BIT(out) | ATTN_TENSOR_BIT(lse);
    int64_t bytes = 0;
    if (frame_multiply_adds(problem) <= JUDGE_DEVICE_MULTIPLY_ADDS) return 0;
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const attn_tensor_id id = frame_tensors[which];
        if (results[id].rank > 0) wants |= UINT64_C(1) << id;
        if (results[id].rank > 0 && which >= FRAME_KEY_TENSORS) return 0;
        if (!(wants >> id & 1)) continue;
        const int64_t elements = frame_elements(problem, id);
        if (elements > JUDGE_TRUTH_BYTES / (int64_t)sizeof(double)) return 0;
        bytes += elements * (int64_t)sizeof(double);
    }
    return bytes <= JUDGE_TRUTH_BYTES && judge_bytes(problem, true, 0) != INT64_MAX ? wants : 0;
}

static attn_status choose_share(struct judge *j, double *share, attn_error *err)
{
    int64_t bytes;
    *share = share_of(&j->p, j->borrows_truth, j->time_s, &bytes);
    if (bytes != INT64_MAX) return ATTN_OK;
    return attn_fail(err, ATTN_TOO_LARGE, "",
                     "a check of this problem takes more than %lld bytes, even of a part of it",
                     (long long)JUDGE_BYTES);
}

attn_status judge_open(const attn_problem *problem, const attn_tensor results[ATTN_TENSOR_COUNT],
                       const attn_truth *truth, double seconds, judge **opened, attn_error *err)
{
    double share;
    attn_status status;
    struct judge *const j = calloc(1, sizeof *j);
    *opened = NULL;
    if (!j) goto no_memory;
    j->p = *problem;
    j->time_s = seconds;
    if (truth) {
        j->borrows_truth = true;
        j->truth = (struct truth){ truth->out, truth->lse, truth->dq, truth->dk, truth->dv, NULL, NULL, NULL };
        j->phase = PHASE_COMPARE;
    }
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const attn_tensor_id id = frame_tensors[which];
        j->results[id] = results[id];
        j->p.tensor[id] = (attn_tensor){ 0 };
        if (results[id].rank > 0) j->given |= UINT64_C(1) << id;
    }
    if ((status = judge_check(&j->p, j->results, err)) != ATTN_OK ||
        (status = choose_share(j, &share, err)) != ATTN_OK) {
        judge_close(j);
        return status;
    }
    if (!frame_open(&j->frame, &j->p, j->results, share, j->borrows_truth) || !take_memory(j)) goto no_memory;
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
    if (j->borrows_truth) j->truth = (struct truth){ 0 };
    struct truth *const both[] = { &j->truth, &j->some };
    frame_close(&j->frame);
    frame_close(&j->other);
    for (size_t i = 0; i < 2; i++)
        for (int which = 0; which < FRAME_TENSORS; which++) free(frame_kept(both[i], frame_tensors[which]));
    free(j->emulated);
    free(j->sample);
    free(j->other_sample);
    free(j->candidates);
    free(j);
}
