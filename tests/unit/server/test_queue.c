/* test_queue.c: tests of the queue without devices or sockets: which requests it admits, and which jobs leave it
 * together. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "server/work/queue.h"

static struct job make(job_kind kind, double flops)
{
    return (struct job){ .kind = kind, .flops = flops, .tensor_bytes = 100 };
}

static struct caller everybody = CALLER_EVERYBODY;
static const struct queue_taker any = { .device = 0 };

static bool enter(struct queue *q)
{
    return queue_enter(q, CALLER_WAITING, &everybody, NULL) == ATTN_OK;
}

static void leave(struct queue *q)
{
    queue_leave(q, CALLER_WAITING, &everybody);
}

static void test_who_is_received_takes_no_place_of_those_who_wait(void **state)
{
    (void)state;
    struct queue q;
    attn_error err = { 0 };
    queue_init(&q, 2, 3, 8, 0);
    for (int i = 0; i < 2; i++) assert_int_equal(queue_enter(&q, CALLER_RECEIVING, &everybody, &err), ATTN_OK);
    assert_int_equal(queue_enter(&q, CALLER_RECEIVING, &everybody, &err), ATTN_BUSY);
    assert_string_equal(err.text, "2 requests are being received already (--max-receiving)");
    for (int i = 0; i < 3; i++) {
        assert_int_equal(queue_look(&q, CALLER_WAITING, &everybody, &err), ATTN_OK);
        assert_true(enter(&q));
    }
    assert_int_equal(queue_look(&q, CALLER_WAITING, &everybody, &err), ATTN_BUSY);
    assert_string_equal(err.text, "3 requests are waiting already (--queue-depth)");
    queue_leave(&q, CALLER_RECEIVING, &everybody);
    assert_int_equal(queue_enter(&q, CALLER_RECEIVING, &everybody, &err), ATTN_OK);
}

static void test_a_caller_has_a_share_of_the_places(void **state)
{
    (void)state;
    struct queue q;
    attn_error err = { 0 };
    struct caller *one = caller_new(), *other = caller_new();
    atomic_store(&one->percent, 50);
    atomic_store(&other->percent, 50);
    queue_init(&q, 4, 4, 8, 0);
    for (int i = 0; i < 2; i++) assert_int_equal(queue_enter(&q, CALLER_RECEIVING, one, &err), ATTN_OK);
    assert_int_equal(queue_look(&q, CALLER_RECEIVING, one, &err), ATTN_QUOTA);
    assert_int_equal(queue_enter(&q, CALLER_RECEIVING, one, &err), ATTN_QUOTA);
    assert_string_equal(err.text,
                        "2 requests of this token are being received already (--max-receiving, --token-share)");
    for (int i = 0; i < 2; i++) assert_int_equal(queue_enter(&q, CALLER_RECEIVING, other, &err), ATTN_OK);
    queue_leave(&q, CALLER_RECEIVING, one);
    assert_int_equal(queue_enter(&q, CALLER_RECEIVING, other, &err), ATTN_QUOTA);
    assert_int_equal(queue_enter(&q, CALLER_RECEIVING, one, &err), ATTN_OK);
    assert_int_equal(atomic_load(&one->places[CALLER_RECEIVING]) + atomic_load(&other->places[CALLER_RECEIVING]), 4);
    for (int i = 0; i < 2; i++) queue_leave(&q, CALLER_RECEIVING, one);
    for (int i = 0; i < 2; i++) queue_leave(&q, CALLER_RECEIVING, other);
    caller_release(one);
    caller_release(other);
}

static void test_slots_are_bounded_and_come_back(void **state)
{
    (void)state;
    struct queue q;
    queue_init(&q, 100, 3, 8, 0);
    for (int i = 0; i < 3; i++) assert_true(enter(&q));
    assert_false(enter(&q));
    leave(&q);
    assert_true(enter(&q));
    assert_false(enter(&q));
}

static void *admit_and_leave(void *context)
{
    struct queue *q = context;
    for (int i = 0; i < 100000; i++)
        if (enter(q)) {
            assert_true(atomic_load(&q->places[CALLER_WAITING].count) <= 2);
            leave(q);
        }
    return NULL;
}

static void test_slots_hold_among_threads(void **state)
{
    (void)state;
    struct queue q;
    pthread_t threads[4];
    queue_init(&q, 100, 2, 8, 0);
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, admit_and_leave, &q);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&q.places[CALLER_WAITING].count), 0);
}

/* Jobs arrive in the order of `waiting`. Each letter is a job. Jobs with equal letters may share a batch; the job
 * '-' is always a batch of its own. */
static void test_batches(void **state)
{
    (void)state;
    static const struct {
        const char *waiting, *batches;
        int max_batch;
    } cases[] = {
        { "", "", 8 },          { "a", "a", 8 },          { "aaa", "aaa", 8 },     { "aaaaa", "aa aa a", 2 },
        { "abab", "aa bb", 8 }, { "baaab", "bb aaa", 8 }, { "-a-a", "- aa -", 8 }, { "--", "- -", 8 },
        { "a", "a", 1 },
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct queue q;
        struct job jobs[16], *batch[16];
        char text[64] = "";
        queue_init(&q, 100, 100, cases[c].max_batch, 0);
        for (size_t i = 0; cases[c].waiting[i]; i++) {
            jobs[i] = make(cases[c].waiting[i] == '-' ? 0 : (job_kind)cases[c].waiting[i], 1e3);
            queue_push(&q, &jobs[i], 0);
        }
        int64_t wait_ns;
        for (int count; (count = queue_take(&q, &any, 0, batch, &wait_ns)) > 0;) {
            if (*text) strcat(text, " ");
            for (int i = 0; i < count; i++)
                strncat(text, batch[i]->kind ? (char[]){ (char)batch[i]->kind, 0 } : "-", 2);
        }
        assert_string_equal(text, cases[c].batches);
        assert_int_equal(q.count, 0);
        assert_int_equal(q.bytes, 0);
    }
}

static void test_the_work_of_a_batch_is_bounded(void **state)
{
    (void)state;
    struct queue q;
    struct job jobs[8], *batch[64];
    int64_t wait_ns;
    queue_init(&q, 100, 1000, 64, 0);
    for (int i = 0; i < 8; i++) {
        jobs[i] = make(1, 0.3e9);
        queue_push(&q, &jobs[i], 0);
    }
    /* A batch has at most 1e9 operations: 3 * 0.3e9 <= 1e9 < 4 * 0.3e9. */
    assert_int_equal(queue_take(&q, &any, 0, batch, &wait_ns), 3);
}

static void test_a_window_holds_a_batch_back_until_it_is_full_or_old(void **state)
{
    (void)state;
    struct queue q;
    struct job jobs[4], *batch[64];
    int64_t wait_ns;
    queue_init(&q, 100, 100, 3, 1000);
    for (int i = 0; i < 4; i++) jobs[i] = make(1, 1);
    queue_push(&q, &jobs[0], 100);
    assert_int_equal(queue_take(&q, &any, 300, batch, &wait_ns), 0);
    assert_int_equal(wait_ns, 800);
    queue_push(&q, &jobs[1], 400);
    assert_int_equal(queue_take(&q, &any, 1100, batch, &wait_ns), 2);
    assert_int_equal(wait_ns, 0);
    for (int i = 0; i < 3; i++) queue_push(&q, &jobs[i], 2000);
    assert_int_equal(queue_take(&q, &any, 2001, batch, &wait_ns), 3); /* full */
    jobs[3].kind = 0;
    queue_push(&q, &jobs[3], 3000);
    /* No other job can join this one, so it need not wait. */
    assert_int_equal(queue_take(&q, &any, 3000, batch, &wait_ns), 1);
}

/* come: the jobs in order of arrival, each with its caller and priority; S is a decode on caches of caller a. leave:
 * the jobs' numbers in the order in which they leave the queue. */
static void test_priority_is_among_the_jobs_of_one_caller(void **state)
{
    static const struct {
        const char *come, *leave;
    } cases[] = {
        { "a5 a5 a5", "012" },     { "a5 a4 a3", "210" },
        { "a5 a3 a4", "120" },     { "a5 b5 a4 b4", "2301" },
        { "a5 b5 b5 a4", "3120" }, { "a5 b1 a4 b2 a3", "41230" },
        { "a5 S9 a4", "210" },     { "a5 S9 S8 a4 a3", "41230" },
        { "a5 S1 S1", "012" },     { "a2 a2 a9 a2 a1 a5", "401352" },
    };
    struct caller *callers[2] = { caller_new(), caller_new() };
    /* The queue never reads this memory, so any address will do. */
    struct job_transaction *const some = (struct job_transaction *)callers;
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct queue q;
        struct job jobs[8];
        char left[9] = "";
        int count = 0;
        queue_init(&q, 100, 100, 1, 0);
        for (const char *at = cases[c].come; *at; at += strcspn(at, " "), at += *at == ' ') {
            jobs[count] = make(0, 1);
            jobs[count].caller = callers[*at == 'b'];
            jobs[count].transaction = *at == 'S' ? some : NULL;
            jobs[count].priority = at[1] - '0';
            queue_push(&q, &jobs[count++], 0);
        }
        for (struct job *job = q.last; job; job = job->in_queue.previous)
            assert_ptr_equal(job->in_queue.previous ? job->in_queue.previous->in_queue.next : q.first, job);
        for (int i = 0; q.first; i++) {
            struct job *const first = q.first;
            left[i] = (char)('0' + (first - jobs));
            queue_remove(&q, first);
        }
        assert_string_equal(left, cases[c].leave);
        assert_null(q.last);
    }
    caller_release(callers[0]);
    caller_release(callers[1]);
}

/* ---- Tests of flows (the work of one client) --------------------------------------------------------------------- */

enum { FLOWS = 3, SECOND = 1000000000 };

/* Three callers a, b and c. Each has a flow, which is the caller's queued jobs. */
struct fair {
    struct queue q;
    struct flow *flows[FLOWS];
    struct job jobs[64];
    int count;
    int64_t now_ns;
};

static void fair_begin(struct fair *fair)
{
    *fair = (struct fair){ 0 };
    queue_init(&fair->q, 100, 100, 1, 0);
    for (int i = 0; i < FLOWS; i++) fair->flows[i] = flow_new((char[]){ (char)('a' + i), 0 });
}

static void fair_end(struct fair *fair)
{
    assert_null(fair->q.first);
    assert_null(fair->q.first_flow);
    for (int i = 0; i < FLOWS; i++) flow_release(fair->flows[i]);
}

static void fair_push(struct fair *fair, const char *whose)
{
    for (; *whose; whose++) {
        struct job *job = &fair->jobs[fair->count++];
        *job = make(0, 1);
        job->flow = fair->flows[*whose - 'a'];
        queue_push(&fair->q, job, fair->now_ns);
    }
}

/* Takes the next job from the queue. Returns the name ('a', 'b' or 'c') of its caller, or '-' if there is none. */
static char fair_take(struct fair *fair, const struct queue_taker *taker)
{
    struct job *batch[1];
    int64_t wait_ns;
    if (queue_take(&fair->q, taker, fair->now_ns, batch, &wait_ns) == 0) return '-';
    return batch[0]->flow->name[0];
}

/* Takes the next job, and pretends that it runs for a second. */
static char fair_run(struct fair *fair)
{
    const char who = fair_take(fair, &any);
    fair->now_ns += SECOND;
    if (who != '-') flow_charge(fair->flows[who - 'a'], FLOW_DEVICE, SECOND);
    return who;
}

static void fair_run_all(struct fair *fair, const char *expected)
{
    char order[64] = "";
    for (size_t i = 0; i < strlen(expected); i++) order[i] = fair_run(fair);
    assert_string_equal(order, expected);
}

static void test_flows_are_served_in_turns_however_many_jobs_each_has_queued(void **state)
{
    struct fair fair;
    (void)state;
    fair_begin(&fair);
    fair_push(&fair, "bbbbbb");
    fair_run_all(&fair, "b");
    fair_push(&fair, "aac");
    fair_run_all(&fair, "acbabbbb-");
    fair_end(&fair);
}

static void test_a_flow_that_asked_for_nothing_has_saved_up_nothing(void **state)
{
    struct fair fair;
    (void)state;
    fair_begin(&fair);
    fair_push(&fair, "bbbbbbbb");
    fair_run_all(&fair, "bbbb");
    /* While caller a had no jobs, four jobs of b ran. This must not give a four turns in a row afterwards. */
    fair_push(&fair, "aaaa");
    fair_run_all(&fair, "abababab-");
    fair_end(&fair);
}

static void test_long_jobs_count_as_long_as_they_are(void **state)
{
    struct fair fair;
    (void)state;
    fair_begin(&fair);
    fair_push(&fair, "bb");
    assert_int_equal(fair_take(&fair, &any), 'b');
    flow_charge(fair.flows[1], FLOW_DEVICE, INT64_C(3) * SECOND + 1);
    fair_push(&fair, "aaaaa");
    fair_run_all(&fair, "aaaab");
    (void)fair_run(&fair);
    fair_end(&fair);
}

static void test_a_batch_that_still_runs_counts_with_the_time_since_it_left(void **state)
{
    struct fair fair;
    (void)state;
    fair_begin(&fair);
    fair_push(&fair, "b");
    assert_int_equal(fair_take(&fair, &any), 'b');
    const int64_t left_ns = fair.now_ns;
    queue_flow_runs(fair.flows[1], left_ns);
    fair.now_ns += SECOND;
    fair_push(&fair, "ba");
    assert_int_equal(fair_take(&fair, &any), 'a');
    assert_int_equal(fair_take(&fair, &any), 'b');
    queue_flow_ran(fair.flows[1], left_ns);
    fair_end(&fair);
}

static bool only_of_a(void *context, const struct job *job)
{
    (void)context;
    return job->flow->name[0] == 'a';
}

static void test_a_flow_for_which_the_device_has_no_room_is_passed_over(void **state)
{
    const struct queue_taker taker = { 0, only_of_a, NULL };
    struct fair fair;
    (void)state;
    fair_begin(&fair);
    fair_push(&fair, "bba");
    assert_int_equal(fair_take(&fair, &taker), 'a');
    assert_int_equal(fair_take(&fair, &taker), '-');
    fair_run_all(&fair, "bb");
    fair_end(&fair);
}

static void test_priority_goes_before_fairness_among_the_flows_of_one_caller_alone(void **state)
{
    struct caller *callers[2] = { caller_new(), caller_new() };
    (void)state;
    for (int several = 0; several < 2; several++) {
        struct fair fair;
        fair_begin(&fair);
        flow_charge(fair.flows[1], FLOW_DEVICE, SECOND);
        fair_push(&fair, "c");
        fair_run_all(&fair, "c");
        fair.count = 0;
        for (int i = 0; i < 2; i++) {
            fair.jobs[i] = make(0, 1);
            fair.jobs[i].flow = fair.flows[i];
            fair.jobs[i].caller = callers[several ? i : 0];
            fair.jobs[i].priority = 2 - i;
            queue_push(&fair.q, &fair.jobs[i], fair.now_ns);
        }
        assert_int_equal(fair_take(&fair, &any), several ? 'a' : 'b');
        assert_int_equal(fair_take(&fair, &any), several ? 'b' : 'a');
        fair_end(&fair);
    }
    caller_release(callers[0]);
    caller_release(callers[1]);
}

static void test_a_job_can_be_taken_out_anywhere(void **state)
{
    (void)state;
    for (int out = 0; out < 3; out++) {
        struct queue q;
        struct job jobs[3], *batch[8];
        int64_t wait_ns;
        queue_init(&q, 100, 100, 8, 0);
        for (int i = 0; i < 3; i++) {
            jobs[i] = make(1, 1);
            queue_push(&q, &jobs[i], 0);
        }
        queue_remove(&q, &jobs[out]);
        assert_int_equal(q.count, 2);
        assert_int_equal(q.bytes, 200);
        assert_int_equal(queue_take(&q, &any, 0, batch, &wait_ns), 2);
        assert_ptr_equal(batch[0], &jobs[out == 0 ? 1 : 0]);
        assert_ptr_equal(batch[1], &jobs[out == 2 ? 1 : 2]);
    }
}

static void test_retry_after_is_between_1_and_30_seconds(void **state)
{
    (void)state;
    struct queue q;
    queue_init(&q, 100, 1000, 8, 0);
    assert_int_equal(queue_retry_after_s(&q, 1), 1);
    queue_learn(&q, 1, 0.5);
    for (int i = 0; i < 9; i++) enter(&q);
    assert_int_equal(queue_retry_after_s(&q, 1), 5);
    assert_int_equal(queue_retry_after_s(&q, 3), 2);
    for (int i = 0; i < 900; i++) enter(&q);
    assert_int_equal(queue_retry_after_s(&q, 1), 30);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_who_is_received_takes_no_place_of_those_who_wait),
        cmocka_unit_test(test_a_caller_has_a_share_of_the_places),
        cmocka_unit_test(test_slots_are_bounded_and_come_back),
        cmocka_unit_test(test_slots_hold_among_threads),
        cmocka_unit_test(test_batches),
        cmocka_unit_test(test_the_work_of_a_batch_is_bounded),
        cmocka_unit_test(test_a_window_holds_a_batch_back_until_it_is_full_or_old),
        cmocka_unit_test(test_priority_is_among_the_jobs_of_one_caller),
        cmocka_unit_test(test_flows_are_served_in_turns_however_many_jobs_each_has_queued),
        cmocka_unit_test(test_a_flow_that_asked_for_nothing_has_saved_up_nothing),
        cmocka_unit_test(test_long_jobs_count_as_long_as_they_are),
        cmocka_unit_test(test_a_batch_that_still_runs_counts_with_the_time_since_it_left),
        cmocka_unit_test(test_a_flow_for_which_the_device_has_no_room_is_passed_over),
        cmocka_unit_test(test_priority_goes_before_fairness_among_the_flows_of_one_caller_alone),
        cmocka_unit_test(test_a_job_can_be_taken_out_anywhere),
        cmocka_unit_test(test_retry_after_is_between_1_and_30_seconds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
