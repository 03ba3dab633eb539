/* finish.c: does the work between a job's run on a device and its answer, a piece at a time. */
#include "server/sched/finish.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/device/devices.h"
#include "server/regions/regions.h"
#include "server/intake/verify.h"

bool finish_is_wanted(const struct job *job)
{
    return job->wants_judge || job->wants_verify || job->wants_count || job->wants_measure ||
           (job->shared && job->shared->writes);
}

const attn_truth *finish_truth(const struct job *job, int item)
{
    return job->truths && job->truth_known && job->truths[item].wanted ? &job->truths[item].to : NULL;
}

struct finishing *finish_new(struct job *job, const char *id, void (*done)(void *context, struct finishing *finishing),
                             void *context)
{
    struct finishing *finishing = calloc(1, sizeof *finishing);
    if (finishing == NULL) return NULL;
    finishing->job = job_hold(job);
    snprintf(finishing->id, sizeof finishing->id, "%s", id);
    finishing->done = done;
    finishing->context = context;
    return finishing;
}

void finish_free(struct finishing *finishing)
{
    judge_close(finishing->judging.judge);
    if (finishing->verifier) attn_verifier_close(finishing->verifier);
    if (finishing->counter) (void)attn_counter_close(finishing->counter);
    proto_encoder_free(finishing->encoder);
    job_release(finishing->job);
    free(finishing);
}

/* Creates the judge that compares a client's results for one problem (item) with exact ones. Divides the remaining time
 * equally among this problem and those after it. */
static attn_status open_judge(struct finishing *finishing, proto_item *item)
{
    struct judging *const judging = &finishing->judging;
    const int64_t now_ns = clock_ns(), left_ns = finishing->judge_until_ns - now_ns;
    const int64_t share_ns = left_ns > 0 ? left_ns / (finishing->job->call->count - judging->item) : 0;
    judging->began_ns = now_ns;
    judging->until_ns = now_ns + share_ns;
    judging->worked_ns = 0;
    judging->hurried = false;
    return judge_open(&item->problem, item->results, finish_truth(finishing->job, judging->item),
                      (double)share_ns / 1e9, &judging->judge, &item->error);
}

static void end_judge(struct finishing *finishing, proto_item *item)
{
    struct judging *const judging = &finishing->judging;
    proto_result *const result = &finishing->job->results[judging->item];
    result->report = malloc(sizeof *result->report);
    if (result->report) judge_report(judging->judge, result->report);
    else (void)attn_fail(&item->error, ATTN_NO_MEMORY, NULL, "out of memory");
    if (finish_truth(finishing->job, judging->item) == NULL)
        snprintf(result->backend, sizeof result->backend, "cpu float64");
    result->timing_us[PROTO_STAGE_compute] += (double)judging->worked_ns / 1e3;
    judge_close(judging->judge);
    judging->judge = NULL;
    judging->item++;
}

/* Compares one tile of the client's results in the current problem (item) with exact results. True: no problem is left
 * to compare. */
static bool judge_piece(struct finishing *finishing)
{
    struct job *const job = finishing->job;
    struct judging *const judging = &finishing->judging;
    if (!job->wants_judge || judging->item == job->call->count) return true;
    proto_item *const item = &job->call->items[judging->item];
    if (item->error.status != ATTN_OK || (!judging->judge && open_judge(finishing, item) != ATTN_OK)) {
        judging->item++;
        return false;
    }
    const int64_t began_ns = clock_ns();
    const bool over = judge_step(judging->judge);
    const int64_t now_ns = clock_ns();
    judging->worked_ns += now_ns - began_ns;
    if (!judging->hurried && now_ns > judging->began_ns + (judging->until_ns - judging->began_ns) / 3) {
        judging->hurried = true;
        judge_hurry(judging->judge);
    }
    if (over || (now_ns > judging->until_ns && judge_has_verdict(judging->judge))) end_judge(finishing, item);
    return false;
}

/* Opens a verifier on the CPU for an item (problem). If a device should have verified the item but could not, first
 * checks that the work is within the CPU's limits. */
static attn_status open_verifier(struct finishing *finishing, proto_item *item)
{
    const struct job *const job = finishing->job;
    int64_t left = VERIFY_MAX_MULTIPLY_ADDS;
    attn_status status = ATTN_OK;
    if (job->truths && job->truths[finishing->item].wanted)
        status = verify_check(job, finishing->item, &left, &item->error);
    if (status != ATTN_OK) return status;
    return attn_verifier_open(&item->problem, item->verify_rows, &finishing->verifier, &item->error);
}

/* Recomputes some rows of the current item (problem) in float64. True: no item is left. */
static bool verify_step(struct finishing *finishing)
{
    struct job *job = finishing->job;
    proto_item *item = &job->call->items[finishing->item];
    proto_result *result = &job->results[finishing->item];
    if (finishing->item == job->call->count) return true;
    /* A device has compared the client's lse with its own lse. A job of this kind has only one problem. */
    if (job->lse && item->error.status == ATTN_OK) verify_found_lse(job, &item->error);
    if (item->error.status == ATTN_OK)
        result->verified = verify_found_truth(job, finishing->item, &result->verification);
    if (item->error.status != ATTN_OK || item->verify_rows == 0 || result->verified ||
        (finishing->verifier == NULL && open_verifier(finishing, item) != ATTN_OK)) {
        finishing->item++;
        return false;
    }
    if (!attn_verifier_step(finishing->verifier)) return false;
    const attn_verification found = attn_verifier_close(finishing->verifier);
    finishing->verifier = NULL;
    result->verified = true;
    result->verification =
        (proto_verification){ .max_abs = found.max_abs, .relative = found.relative, .rows = found.rows };
    finishing->item++;
    return false;
}

/* Counts some pairs of a query and a key of the current item (problem). True: no item is left. */
static bool count_step(struct finishing *finishing)
{
    struct job *job = finishing->job;
    if (!job->wants_count || finishing->counted == job->call->count) return true;
    proto_item *item = &job->call->items[finishing->counted];
    proto_result *result = &job->results[finishing->counted];
    if (finishing->counter == NULL && item->error.status == ATTN_OK && item->counts) {
        finishing->count_of = item->problem;
        /* the cache transaction has ended, and with it its array of the caches' lengths, so the result's copy of that
         * array is used */
        if (result->lengths) finishing->count_of.seqlens_k.data = (void *)result->lengths;
        attn_counter_open(&finishing->count_of, proto_tile(item), &finishing->counter, &item->error);
    }
    if (finishing->counter && !attn_counter_step(finishing->counter)) return false;
    if (finishing->counter) {
        result->counts = attn_counter_close(finishing->counter);
        if (result->counts.status != ATTN_OK)
            attn_fail(&item->error, result->counts.status, NULL, "out of memory to count pairs");
    }
    finishing->counter = NULL;
    finishing->counted++;
    return false;
}

/* Writes a piece of the outputs to shared memory. True: all are written, or an error occurred. */
static bool write_step(struct finishing *finishing, int64_t until_ns)
{
    struct job *job = finishing->job;
    bool done;
    if (job->shared == NULL || job->call->items[0].error.status != ATTN_OK) return true;
    const int64_t began_ns = clock_ns();
    if (region_uses_write(job->shared, until_ns, &done, &finishing->error) != ATTN_OK) done = true;
    finishing->wrote_ns += clock_ns() - began_ns;
    return done;
}

/* Computes how many characters some of the answer's numbers will have. True: the answer's length is known, or an error
 * occurred. */
static bool measure_step(struct finishing *finishing)
{
    struct job *job = finishing->job;
    if (!job->wants_measure || finishing->error.status != ATTN_OK) return true;
    if (finishing->encoder == NULL &&
        proto_encoder_new(job->call, job->results, finishing->id, &finishing->encoder, &finishing->error) != ATTN_OK)
        return true;
    return proto_encoder_measure(finishing->encoder, FINISH_NUMBERS);
}

static void run_piece(struct piece *piece)
{
    struct finishing *finishing = (struct finishing *)piece; /* a valid cast: `piece` is the struct's first member */
    const int64_t until_ns = clock_ns() + FINISH_PIECE_NS;
    request_set_role(ROLE_DEVICE);
    do
        finishing->complete = judge_piece(finishing) && verify_step(finishing) && count_step(finishing) &&
                              write_step(finishing, until_ns) && measure_step(finishing);
    while (!finishing->complete && clock_ns() < until_ns);
}

static void after_piece(struct piece *piece)
{
    struct finishing *finishing = (struct finishing *)piece;
    assert(!finishing->complete || (finishing->verifier == NULL && finishing->counter == NULL));
    if (finishing->complete || finishing->cancelled) finishing->done(finishing->context, finishing);
    else pieces_add(piece->pieces, piece);
}

void finish_start(struct finishing *finishing, struct pieces *pieces)
{
    finishing->piece =
        (struct piece){ .flow = finishing->job->flow, .work = FLOW_FINISH, .run = run_piece, .after = after_piece };
    pieces_add(pieces, &finishing->piece);
}
