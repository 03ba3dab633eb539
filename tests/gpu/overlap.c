/* overlap.c: tests whether copies and kernels of different requests overlap on a GPU, and measures how long each
 * call of the API blocks the calling thread.
 *
 *   build/tests/gpu/overlap [timeline | calls]        both without an argument
 *
 * timeline  Runs one large request alone, then REQUESTS of them at once, each on its own stream, as the server's device
 *           thread does: copy in from pinned memory, kernel, copy out, each followed by an event. Prints every stage on
 *           one time axis and checks three conditions (timeline.h):
 *             1. One of the copies in overlapped the kernels and copies out of other requests for at least half of its
 *                time. One of the copies out overlapped the kernels and copies in of other requests as much.
 *             2. At least half of the time that could be saved was saved. That time is the sum of all stages of all
 *                requests, less REQUESTS times the longest stage.
 *             3. The answers have the same bits as the answer of the request that ran alone.
 * calls     Measures the host's time in each call of the API, as the median of many calls. Nothing is tested.
 *
 * The last line counts passed and failed checks. Without a GPU the program runs nothing and says so. It needs only
 * libattn.a. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/attention.h"
#include "tests/gpu/timeline.h"

enum { REQUESTS = 4, COLUMNS = 96, S = 16384, H = 16, D = 128, CALL_ROUNDS = 200 };

/* One request. Its tensors lie one after the other in pinned host memory, and in device memory. */
struct request {
    attn_stream *stream;
    char *host, *device;
    void *workspace;
    attn_problem problem;
    attn_plan plan;
};
static const size_t TENSOR = (size_t)S * H * D * 2, LSE = (size_t)S * H * 4;

static attn_device *gpu;
static int passed, failed;

static void must(attn_status status, const attn_error *err)
{
    if (status == ATTN_OK) return;
    printf("overlap: %s\n0 passed, 1 failed\n", err->text);
    exit(1);
}

static void judge(bool good, const char *what)
{
    printf("%s %s\n", good ? "ok  " : "FAIL", what);
    if (good) passed++;
    else failed++;
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* ---- `timeline`: whether copies and kernels of several requests overlap ------------------------------------------ */

static void make(struct request *r)
{
    static const int64_t shape[] = { 1, S, H, D }, rows[] = { 1, H, S };
    attn_error err;
    void *host, *device;
    size_t workspace;
    must(attn_stream_open(gpu, &r->stream, &err), &err);
    must(attn_staging_alloc(gpu, 4 * TENSOR + LSE, &host, &err), &err);
    must(attn_device_alloc(gpu, 4 * TENSOR + LSE, &device, &err), &err);
    r->host = host, r->device = device;
    uint16_t *values = host;
    uint32_t x = 12345; /* all requests have the same numbers, close to +-1 in bfloat16 */
    for (size_t i = 0; i < 3 * TENSOR / 2; i++) {
        x = x * 1664525 + 1013904223;
        values[i] = (uint16_t)(0x3f00 | (x >> 31) << 15 | (x >> 16 & 0xff));
    }
    /* Bytes of 0xff are NaN; the kernel must overwrite all outputs. */
    memset(r->host + 3 * TENSOR, 0xff, TENSOR + LSE);
    r->problem = (attn_problem)ATTN_PROBLEM_INIT;
    r->problem.q = attn_tensor_make(r->device, ATTN_BF16, 4, shape);
    r->problem.k = attn_tensor_make(r->device + TENSOR, ATTN_BF16, 4, shape);
    r->problem.v = attn_tensor_make(r->device + 2 * TENSOR, ATTN_BF16, 4, shape);
    r->problem.out = attn_tensor_make(r->device + 3 * TENSOR, ATTN_BF16, 4, shape);
    r->problem.lse = attn_tensor_make(r->device + 4 * TENSOR, ATTN_F32, 3, rows);
    must(attn_plan_make(attn_device_capabilities(gpu), &r->problem, &r->plan, &err), &err);
    must(attn_workspace(attn_device_capabilities(gpu), &r->plan, 1, &workspace, &err), &err);
    must(attn_device_alloc(gpu, workspace ? workspace : 1, &r->workspace, &err), &err);
}

static void put(struct request *r)
{
    attn_error err;
    must(attn_stream_mark(r->stream, 0, &err), &err);
    must(attn_copy(r->stream, r->device, r->host, 3 * TENSOR, ATTN_TO_DEVICE, &err), &err);
    must(attn_stream_mark(r->stream, 1, &err), &err);
    must(attn_run(r->stream, &r->plan, 1, r->workspace, &err), &err);
    must(attn_stream_mark(r->stream, 2, &err), &err);
    must(attn_copy(r->stream, r->host + 3 * TENSOR, r->device + 3 * TENSOR, TENSOR + LSE, ATTN_FROM_DEVICE, &err),
         &err);
    must(attn_stream_mark(r->stream, 3, &err), &err);
}

static void collect(struct request *r, attn_stream *origin, struct times *times)
{
    attn_error err;
    must(attn_stream_wait(r->stream, &err), &err);
    for (int slot = 0; slot < ATTN_MARKS; slot++) times->at[slot] = attn_streams_between_us(origin, 0, r->stream, slot);
}

static void draw(const struct times *t, int count, double total)
{
    static const char marks[] = { '<', '#', '>' };
    for (int i = 0; i < count; i++) {
        char line[COLUMNS + 1];
        memset(line, ' ', COLUMNS);
        line[COLUMNS] = '\0';
        for (int stage = 0; stage < 3; stage++) {
            int from = (int)(stage_began(t, i, stage) / total * COLUMNS),
                to = (int)(t[i].at[stage + 1] / total * COLUMNS);
            for (int c = from < 0 ? 0 : from; c < to && c < COLUMNS; c++) line[c] = marks[stage];
        }
        printf("  %d |%s|  in %.2f-%.2f  kernel %.2f-%.2f  out %.2f-%.2f ms\n", i, line,
               stage_began(t, i, STAGE_IN) / 1e3, t[i].at[1] / 1e3, stage_began(t, i, STAGE_KERNEL) / 1e3,
               t[i].at[2] / 1e3, stage_began(t, i, STAGE_OUT) / 1e3, t[i].at[3] / 1e3);
    }
}

static void timeline(void)
{
    static struct request requests[REQUESTS];
    struct times alone = { { 0 } }, best[REQUESTS], t[REQUESTS];
    double total = 0;
    for (int i = 0; i < REQUESTS; i++) make(&requests[i]);
    /* One request runs alone five times. `alone` gets the shortest of the five times of each stage. */
    for (int round = 0; round < 5; round++) {
        put(&requests[0]);
        collect(&requests[0], requests[0].stream, &t[0]);
        keep_least(&alone, &t[0]);
    }
    char *expected = malloc(TENSOR + LSE);
    if (!expected) exit(1);
    memcpy(expected, requests[0].host + 3 * TENSOR, TENSOR + LSE);
    memset(requests[0].host + 3 * TENSOR, 0xff, TENSOR + LSE);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < REQUESTS; i++) put(&requests[i]);
        for (int i = 0; i < REQUESTS; i++) collect(&requests[i], requests[0].stream, &t[i]);
        double end = 0;
        for (int i = 0; i < REQUESTS; i++) end = t[i].at[3] > end ? t[i].at[3] : end;
        if (total == 0 || end < total) {
            total = end;
            memcpy(best, t, sizeof t);
        }
    }
    const double in = alone.at[1], kernel = alone.at[2] - alone.at[1], out = alone.at[3] - alone.at[2];
    const double longest = in > kernel ? (in > out ? in : out) : kernel > out ? kernel : out;
    const double serial = REQUESTS * alone.at[3], least = REQUESTS * longest;
    printf("one request alone (bf16 1 x %d x %d x %d):\n", S, H, D);
    draw(&alone, 1, alone.at[3]);
    printf("%d requests at once (< copy in, # kernel, > copy out):\n", REQUESTS);
    draw(best, REQUESTS, total);
    printf("%.2f ms; one after the other %.2f ms, the longest stage alone %.2f ms: %.0f %% of what can be saved is "
           "saved\n",
           total / 1e3, serial / 1e3, least / 1e3, 100 * (serial - total) / (serial - least));
    judge(share_beside_others(best, REQUESTS, STAGE_IN) >= 0.5,
          "a copy in runs while another request is computed or copied out");
    judge(share_beside_others(best, REQUESTS, STAGE_OUT) >= 0.5,
          "a copy out runs while another request is computed or copied in");
    judge(serial - total >= 0.5 * (serial - least), "at least half of the time that can be saved is saved");
    bool same = true;
    for (int i = 0; i < REQUESTS; i++) same &= memcmp(expected, requests[i].host + 3 * TENSOR, TENSOR + LSE) == 0;
    judge(same, "the answers are those of a request alone, to the bit");
    for (int i = 0; i < REQUESTS; i++) {
        attn_device_free(gpu, requests[i].workspace);
        attn_device_free(gpu, requests[i].device);
        attn_staging_free(gpu, requests[i].host, 4 * TENSOR + LSE);
        attn_stream_close(requests[i].stream);
    }
    free(expected);
}

/* ---- `calls`: the host's time in each call of the library -------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

struct call {
    const char *name;
    attn_dtype dtype;
    attn_op op;
    bool causal;
    /* number of the timed function: 0 attn_run, 1 attn_plan_make, 2 attn_workspace, 3 attn_copy, 4 attn_stream_mark, 5
     * attn_stream_done, 6 attn_device_alloc and attn_device_free */
    int what;
};

static double one_call(const struct call *c, attn_stream *stream, const attn_plan *plan, void *workspace, void *host,
                       void *device)
{
    attn_error err;
    attn_plan again;
    size_t bytes;
    bool done;
    void *memory;
    const double start = now_us();
    switch (c->what) {
    case 0: must(attn_run(stream, plan, 1, workspace, &err), &err); break;
    case 1: must(attn_plan_make(attn_device_capabilities(gpu), plan->problem, &again, &err), &err); break;
    case 2: must(attn_workspace(attn_device_capabilities(gpu), plan, 1, &bytes, &err), &err); break;
    case 3: must(attn_copy(stream, device, host, 4096, ATTN_TO_DEVICE, &err), &err); break;
    case 4: must(attn_stream_mark(stream, 0, &err), &err); break;
    case 5: must(attn_stream_done(stream, &done, &err), &err); break;
    default: must(attn_device_alloc(gpu, 65536, &memory, &err), &err); attn_device_free(gpu, memory);
    }
    return now_us() - start;
}

static void calls(void)
{
    static const struct call table[] = {
        { "run, forward bf16", ATTN_BF16, ATTN_OP_FORWARD, false, 0 },
        { "run, forward bf16 causal", ATTN_BF16, ATTN_OP_FORWARD, true, 0 },
        { "run, forward f16", ATTN_F16, ATTN_OP_FORWARD, false, 0 },
        { "run, forward f32", ATTN_F32, ATTN_OP_FORWARD, false, 0 },
        { "run, backward bf16", ATTN_BF16, ATTN_OP_BACKWARD, false, 0 },
        { "plan, forward bf16", ATTN_BF16, ATTN_OP_FORWARD, false, 1 },
        { "plan, backward bf16", ATTN_BF16, ATTN_OP_BACKWARD, false, 1 },
        { "attn_workspace, forward bf16", ATTN_BF16, ATTN_OP_FORWARD, false, 2 },
        { "copy in, 4 KiB pinned", ATTN_BF16, ATTN_OP_FORWARD, false, 3 },
        { "mark", ATTN_BF16, ATTN_OP_FORWARD, false, 4 },
        { "done, of an idle stream", ATTN_BF16, ATTN_OP_FORWARD, false, 5 },
        { "alloc and free, 64 KiB", ATTN_BF16, ATTN_OP_FORWARD, false, 6 },
    };
    static const int64_t shape[] = { 1, 64, 4, 64 }, rows[] = { 1, 4, 64 };
    enum { ROOM = 1 << 20 };
    attn_stream *stream;
    attn_error err;
    void *host, *device, *workspace;
    must(attn_stream_open(gpu, &stream, &err), &err);
    must(attn_staging_alloc(gpu, ROOM, &host, &err), &err);
    must(attn_device_alloc(gpu, ROOM, &device, &err), &err);
    memset(host, 0, ROOM);
    must(attn_copy(stream, device, host, ROOM, ATTN_TO_DEVICE, &err), &err);
    must(attn_stream_wait(stream, &err), &err);
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const struct call *c = &table[i];
        double us[CALL_ROUNDS];
        size_t bytes;
        attn_problem p = ATTN_PROBLEM_INIT;
        char *at = device;
        p.op = c->op;
        p.causal = c->causal;
        attn_tensor *const wide[] = { &p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv };
        for (int t = 0; t < (c->op == ATTN_OP_FORWARD ? 4 : 8); t++, at += 65536)
            *wide[t] = attn_tensor_make(at, c->dtype, 4, shape);
        p.lse = attn_tensor_make(at, ATTN_F32, 3, rows);
        attn_plan plan;
        must(attn_plan_make(attn_device_capabilities(gpu), &p, &plan, &err), &err);
        must(attn_workspace(attn_device_capabilities(gpu), &plan, 1, &bytes, &err), &err);
        must(attn_device_alloc(gpu, bytes ? bytes : 1, &workspace, &err), &err);
        for (int round = 0; round < CALL_ROUNDS; round++) {
            us[round] = one_call(c, stream, &plan, workspace, host, device);
            /* Waits now and then, because otherwise the stream's queue would fill up. */
            if (round % 20 == 19) must(attn_stream_wait(stream, &err), &err);
        }
        qsort(us, CALL_ROUNDS, sizeof us[0], by_value);
        printf("  %-32s %6.2f us  (least %.2f)\n", c->name, us[CALL_ROUNDS / 2], us[0]);
        attn_device_free(gpu, workspace);
    }
    attn_device_free(gpu, device);
    attn_staging_free(gpu, host, ROOM);
    attn_stream_close(stream);
}

int main(int argc, char **argv)
{
    attn_error err;
    if (attn_device_count("cuda") == 0) {
        printf("overlap: no GPU here: skipped\n0 passed, 0 failed\n");
        return 0;
    }
    must(attn_device_open("cuda", 0, NULL, &gpu, &err), &err);
    if (argc < 2 || strcmp(argv[1], "timeline") == 0) timeline();
    if (argc < 2 || strcmp(argv[1], "calls") == 0) {
        printf("host time of a call, median:\n");
        calls();
    }
    attn_device_close(gpu);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
