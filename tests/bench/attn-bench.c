/* attn-bench: measures how fast a device computes attention, and how fast bodies are read. Needs only libattn.a and
 * libproto.a.
 *
 *   attn-bench -B 1 -H 16 --sq 2048 -D 128 --causal               one shape (forward, bf16, the best device)
 *   attn-bench --op both --dtype float32 --device cpu --threads 2
 *   attn-bench --sweep paper --tokens 16384 --json                the table of the FlashAttention papers
 *   attn-bench --decode                                           one query over many keys: GB/s of K and V
 *   attn-bench --decode --page-size 64 --key-dtype float8_e4m3fn  the same with float8 keys in pages
 *   attn-bench -B 32 -H 32 --hk 8 --sq 1 --sk 100000 --page-size 64 --forks   caches that share pages
 *   attn-bench --sweep masks                                      grouped heads, packed lengths, window,
 *                                                                 FlashMask, each beside the plain problem
 *   attn-bench --sweep observe -H 16 --sq 8192                    times of a forward, and of each kind of observe
 *   attn-bench --op backward --bias --grads dbias                 a bias of random numbers, with its gradient
 *   attn-bench --dtype float8_e4m3fn --no-lse                     without lse, for which float8 has faster kernels
 *   attn-bench --op both --truth                                  results in float64 (attn_truth_some())
 *   attn-bench --codec                                            base64 and the scanner, in GB/s of text
 *
 * Each row is the median of warm runs, measured by the device's own clock around the kernels. Before a run begins, the
 * inputs are in the device's memory, the workspace is allocated, and out and lse for a backward are computed. On a GPU
 * a run has as many calls as fill two milliseconds, but at most 500. With a single short call, the program would
 * measure how fast the host queues it. If reading K and V takes most of the time, calls alternate between several
 * copies of K and V, so that no cache holds them. Inputs are random, because equal numbers run faster on power-limited
 * chips. The program fails if an output is NaN after the last run. TFLOP/s counts only pairs of a query and a key that
 * the query sees (attn_flops()). */
#include <errno.h>
#include <float.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/attention.h"
#include "kernels/dtype.h"
#include "proto-json/base64.h"
#include "proto-json/proto.h"

enum { WARM_RUNS = 2, MOST_REPS = 1000, PATTERN = 1000003, MOST_COPIES = 64, MOST_SEQUENCES = 256 };

/* A timed run on a GPU has as many calls as take RUN_MS milliseconds, but at most 500. If calls alternate between
 * copies of K and V, there are enough copies (at most MOST_COPIES) to fill COPIES_BYTES bytes. A GPU's cache holds
 * fewer bytes. */
static const double RUN_MS = 2;
static const int64_t COPIES_BYTES = INT64_C(512) << 20;

/* OPTION_GRADIENTS are the gradients that a backward computes only if --grads names them. */
#define BIT(id)          (UINT64_C(1) << (id))
#define OPTION_GRADIENTS (BIT(ATTN_T_dsinks) | BIT(ATTN_T_dbias) | BIT(ATTN_T_dalibi_slopes))

struct options {
    bool forward, backward, json, causal, codec, top_left;
    bool no_lse;
    /* Whether reading K and V takes most of the time. If so, the report shows GB/s, and calls alternate between several
     * copies of K and V. All copies together do not fit into any cache. */
    bool reading;
    /* number of packed sequences, which have their own lengths instead of B, Sq and Sk; 0: not packed */
    int sequences;
    int32_t lengths[MOST_SEQUENCES];
    /* number of equally long documents that a FlashMask separates; 0: no mask */
    int64_t documents;
    /* how many keys a page of K and V holds; 0: K and V are not in pages */
    int64_t page_size;
    bool forks; /* whether all batch rows share their pages, except the last page of each row */
    bool latent;
    bool deterministic, alibi, sinks;
    bool truth; /* Whether attn_truth_some(), which computes in float64, is timed instead of the kernels. */
    double softcap, scale, dropout;
    double keep;        /* fraction of the keys that a keep_mask of shape [1, 1, Sq, Sk] keeps; 0: no mask */
    bool biased;        /* the problem has a bias of shape [1, 1, Sq, Sk] */
    bool each_head;     /* whether bias and keep_mask have the shape [B, H, Sq, Sk] instead of [1, 1, Sq, Sk] */
    bool forward_first; /* whether a backward computes out and lse itself instead of getting them as inputs */
    /* Whether the bias is a mask instead of random numbers. Such a mask has hidden_bias for keys after the query and
     * for the first `padded` keys, and 0 for all other keys. */
    bool bias_is_mask;
    int64_t padded;
    double hidden_bias;
    uint64_t observed;  /* outputs of an observe (a request for attention weights), one bit each */
    bool given_lse;     /* whether an observe (a request for attention weights) gets lse as an input */
    uint64_t gradients; /* which optional gradients (dsinks, dbias, dalibi_slopes) are computed, one bit each */
    enum { NO_SWEEP, SWEEP_PAPER, SWEEP_DECODE, SWEEP_MASKS, SWEEP_OBSERVE } sweep;
    /* q has `dtype`, k and v have `key_dtype`, dq, dk and dv have `grad_dtype`, and bias has `bias_dtype` */
    attn_dtype dtype, key_dtype, grad_dtype, bias_dtype;
    int64_t B, H, Hk, Sq, Sk, D, Dv, window_left, window_right, tokens;
    const char *device;
    int index, threads, reps; /* reps: number of timed runs; 0: as many as fit into a second, at least 5 */
};

static void die(const char *what, const char *why)
{
    fprintf(stderr, "attn-bench: %s%s%s\n", what, why ? ": " : "", why ? why : "");
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int ascending(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double median(double *times, int count)
{
    qsort(times, (size_t)count, sizeof *times, ascending);
    return count % 2 ? times[count / 2] : (times[count / 2 - 1] + times[count / 2]) / 2;
}

/* ---- Filling tensors with numbers -------------------------------------------------------------------------------- */

/* Fills a tensor with random numbers close to N(0, 1), each the sum of four uniform numbers. Only PATTERN numbers are
 * drawn; the tensor repeats them. PATTERN is prime, so the rows of the tensor differ. */
static void fill_random(void *data, attn_dtype dtype, int64_t count)
{
    static uint64_t state = 88172645463325252u;
    const int64_t fresh = count < PATTERN ? count : PATTERN;
    const size_t bytes = attn_dtype_bytes(dtype);
    for (int64_t n = 0; n < fresh; n++) {
        double sum = 0;
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        for (int part = 0; part < 4; part++) sum += (double)(state >> 16 * part & 0xffff) / 65536 - 0.5;
        /* The sum of four uniform numbers has the variance 4 / 12; the factor makes it 1. */
        attn_store(dtype, data, n, sum * 1.7320508);
    }
    for (int64_t n = fresh; n < count; n += fresh)
        memcpy((char *)data + (size_t)n * bytes, data, (size_t)(count - n < fresh ? count - n : fresh) * bytes);
}

/* ---- Measuring one problem --------------------------------------------------------------------------------------- */

struct machine {
    attn_device *device;
    attn_stream *stream;
    attn_device_info info;
};

struct block {
    void *host, *device;
    int64_t bytes;
};

/* Indices of memory blocks: one for each tensor, and one for prefix_keys (how many first keys batch rows share). */
enum { PREFIX_KEYS = ATTN_TENSOR_COUNT, BLOCKS };

static attn_error err; /* the error of a failed call, which ends the program */

static void must(attn_status status)
{
    if (status != ATTN_OK) die(attn_status_name(status), err.text);
}

static void give_memory(struct machine *m, attn_tensor *t, struct block *b)
{
    int64_t elements = 0;
    if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &b->bytes)) die("a tensor is too large", NULL);
    attn_shape_elements(t->rank, t->shape, &elements);
    if (!(b->host = aligned_alloc(64, ((size_t)b->bytes + 64) / 64 * 64))) die("out of memory", NULL);
    fill_random(b->host, t->dtype, elements);
    must(attn_device_alloc(m->device, (size_t)b->bytes + 1, &b->device, &err));
    must(attn_copy(m->stream, b->device, b->host, (size_t)b->bytes, ATTN_TO_DEVICE, &err));
    t->data = b->host;
}

static void look_at(struct machine *m, attn_tensor_id id, const attn_tensor *t, const struct block *b)
{
    int64_t elements = 0;
    char what[96];
    attn_shape_elements(t->rank, t->shape, &elements);
    must(attn_copy(m->stream, b->host, b->device, (size_t)b->bytes, ATTN_FROM_DEVICE, &err));
    must(attn_stream_wait(m->stream, &err));
    for (int64_t n = 0; n < elements; n++)
        if (isnan(attn_load(t->dtype, b->host, n))) {
            snprintf(what, sizeof what, "%s: element %lld was not written", attn_tensors[id].name, (long long)n);
            die(what, NULL);
        }
}

static void give_indices(struct machine *m, attn_tensor *t, struct block *b, const int32_t *values)
{
    give_memory(m, t, b);
    memcpy(b->host, values, (size_t)b->bytes);
    must(attn_copy(m->stream, b->device, b->host, (size_t)b->bytes, ATTN_TO_DEVICE, &err));
    must(attn_stream_wait(m->stream, &err));
}

static int64_t entries_of(const struct options *o)
{
    return (o->Sk + o->page_size - 1) / o->page_size;
}

/* Returns the number of pages in the pool. With --forks, batch rows share all pages except the last page of each
 * row. */
static int64_t pages_of(const struct options *o)
{
    return o->forks ? entries_of(o) - 1 + o->B : o->B * entries_of(o);
}

/* Fills the page table in random order. With --forks, each row has the pages of the first row, and a last page of its
 * own. */
static void give_pages(struct machine *m, const struct options *o, attn_problem *p, struct block *blocks)
{
    const int64_t entries = entries_of(o), pages = pages_of(o), shared = o->forks ? entries - 1 : 0;
    uint64_t state = 88172645463325252u;
    int32_t *order = malloc((size_t)pages * sizeof *order);
    int32_t *values = malloc((size_t)(o->B * entries) * sizeof *values);
    if (!order || !values) die("out of memory", NULL);
    for (int64_t n = 0; n < pages; n++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const int64_t other = (int64_t)(state % (uint64_t)(n + 1));
        order[n] = order[other];
        order[other] = (int32_t)n;
    }
    for (int64_t b = 0; b < o->B; b++)
        for (int64_t n = 0; n < entries; n++)
            values[b * entries + n] = order[n < shared ? n : shared + b * (entries - shared) + n - shared];
    p->page_table = attn_tensor_make(NULL, ATTN_I32, 2, (int64_t[]){ o->B, entries });
    give_indices(m, &p->page_table, &blocks[ATTN_T_page_table], values);
    if (o->forks) {
        attn_tensor prefix = attn_tensor_make(NULL, ATTN_I32, 1, (int64_t[]){ o->B });
        for (int64_t b = 0; b < o->B; b++) values[b] = b ? (int32_t)(shared * o->page_size) : 0;
        give_indices(m, &prefix, &blocks[PREFIX_KEYS], values);
    }
    for (int64_t b = 0; b < o->B; b++) values[b] = (int32_t)o->Sk;
    p->seqlens_k = attn_tensor_make(NULL, ATTN_I32, 1, (int64_t[]){ o->B });
    give_indices(m, &p->seqlens_k, &blocks[ATTN_T_seqlens_k], values);
    free(values);
    free(order);
}

static attn_tensor pairs_tensor(const struct options *o, attn_dtype dtype)
{
    return attn_tensor_make(NULL, dtype, 4,
                            (int64_t[]){ o->each_head ? o->B : 1, o->each_head ? o->H : 1, o->Sq, o->Sk });
}

static void give_bias(struct machine *m, const struct options *o, attn_tensor *t, struct block *b)
{
    *t = pairs_tensor(o, o->bias_dtype);
    give_memory(m, t, b);
    for (int64_t n = 0; n < b->bytes / 4 && o->bias_is_mask; n++) {
        const int64_t i = n / o->Sk % o->Sq, j = n % o->Sk;
        ((float *)b->host)[n] = j > i + o->Sk - o->Sq || j < o->padded ? (float)o->hidden_bias : 0;
    }
    must(attn_copy(m->stream, b->device, b->host, (size_t)b->bytes, ATTN_TO_DEVICE, &err));
    must(attn_stream_wait(m->stream, &err));
}

/* Fills a keep_mask that keeps the first key of each row, and a random fraction of the others. */
static void give_keep_mask(struct machine *m, const struct options *o, attn_tensor *t, struct block *b)
{
    uint64_t state = 88172645463325252u;
    *t = pairs_tensor(o, ATTN_U8);
    give_memory(m, t, b);
    for (int64_t n = 0; n < b->bytes; n++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        ((uint8_t *)b->host)[n] = n % o->Sk == 0 || (double)(state >> 11) * 0x1p-53 < o->keep;
    }
    must(attn_copy(m->stream, b->device, b->host, (size_t)b->bytes, ATTN_TO_DEVICE, &err));
    must(attn_stream_wait(m->stream, &err));
}

static void give_inputs(struct machine *m, const struct options *o, attn_problem *p, struct block *blocks)
{
    const int64_t sizes[] = { o->H, o->D, o->Hk, o->D, o->Hk, o->Dv };
    int32_t cu[MOST_SEQUENCES + 1] = { 0 };
    for (int n = 0; n < o->sequences; n++) cu[n + 1] = cu[n] + o->lengths[n];
    for (int n = 0; n < 3; n++) {
        attn_tensor *t = &p->tensor[ATTN_T_q + n];
        const int64_t heads = sizes[2 * n], size = sizes[2 * n + 1];
        if (n == 2 && o->latent) {
            *t = p->k;
            t->shape[t->rank - 1] = size;
            continue;
        }
        const attn_dtype dtype = n ? o->key_dtype : o->dtype;
        if (o->sequences) *t = attn_tensor_make(NULL, dtype, 3, (int64_t[]){ cu[o->sequences], heads, size });
        else if (n && o->page_size)
            *t = attn_tensor_make(NULL, dtype, 4, (int64_t[]){ pages_of(o), o->page_size, heads, size });
        else *t = attn_tensor_make(NULL, dtype, 4, (int64_t[]){ o->B, n ? o->Sk : o->Sq, heads, size });
        give_memory(m, t, &blocks[ATTN_T_q + n]);
    }
    if (o->page_size) give_pages(m, o, p, blocks);
    if (o->sequences) {
        p->cu_seqlens_q = p->cu_seqlens_k = attn_tensor_make(NULL, ATTN_I32, 1, (int64_t[]){ o->sequences + 1 });
        give_indices(m, &p->cu_seqlens_q, &blocks[ATTN_T_cu_seqlens_q], cu);
        give_indices(m, &p->cu_seqlens_k, &blocks[ATTN_T_cu_seqlens_k], cu);
    }
    p->softcap = o->softcap;
    p->scale = o->scale;
    p->has_scale = o->scale != 0;
    p->dropout_p = o->dropout;
    p->deterministic = o->deterministic;
    if (o->biased) give_bias(m, o, &p->bias, &blocks[ATTN_T_bias]);
    if (o->keep > 0) give_keep_mask(m, o, &p->keep_mask, &blocks[ATTN_T_keep_mask]);
    if (o->sinks) {
        p->sinks = attn_tensor_make(NULL, ATTN_F32, 1, (int64_t[]){ o->H });
        give_memory(m, &p->sinks, &blocks[ATTN_T_sinks]);
    }
    if (o->alibi) {
        p->alibi_slopes = attn_tensor_make(NULL, ATTN_F32, 1, (int64_t[]){ o->H });
        give_memory(m, &p->alibi_slopes, &blocks[ATTN_T_alibi_slopes]);
    }
    if (o->documents) {
        int32_t *bounds = malloc((size_t)(o->B * o->Sk * 2) * sizeof *bounds);
        const int64_t length = (o->Sk + o->documents - 1) / o->documents;
        if (!bounds) die("out of memory", NULL);
        for (int64_t n = 0; n < o->B * o->Sk; n++) {
            const int64_t start = n % o->Sk / length * length;
            bounds[2 * n] = (int32_t)(start + length < o->Sq ? start + length : o->Sq);
            bounds[2 * n + 1] = (int32_t)(start < o->Sq ? start : o->Sq);
        }
        p->mask_startend_rows = attn_tensor_make(NULL, ATTN_I32, 4, (int64_t[]){ o->B, 1, o->Sk, 2 });
        give_indices(m, &p->mask_startend_rows, &blocks[ATTN_T_mask_startend_rows], bounds);
        free(bounds);
    }
}

static void use(attn_problem *p, const struct options *o, struct block *blocks, bool on_device)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (p->tensor[id].rank) p->tensor[id].data = on_device ? blocks[id].device : blocks[id].host;
    if (o->latent) p->v.data = p->k.data;
    if (o->forks) p->prefix_keys = on_device ? blocks[PREFIX_KEYS].device : blocks[PREFIX_KEYS].host;
}

static void put_outputs(const attn_problem *p)
{
    const char *before = ",\"outputs\":[";
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (!p->tensor[id].rank || !attn_writes(p, (attn_tensor_id)id)) continue;
        printf("%s\"%s\"", before, attn_tensors[id].name);
        before = ",";
    }
    printf("]");
}

static const attn_tensor_id truth_ids[] = { ATTN_T_out, ATTN_T_lse, ATTN_T_dq, ATTN_T_dk, ATTN_T_dv };
enum { TRUTH_RESULTS = sizeof truth_ids / sizeof *truth_ids };

struct truth {
    void *memory[TRUTH_RESULTS], *workspace;
    int64_t elements[TRUTH_RESULTS];
    attn_truth to;
};

/* Allocates the float64 results and the workspace. The problem's tensors are in host memory. */
static void truth_open(struct machine *m, const attn_problem *p, struct truth *t)
{
    attn_truth_cost cost;
    if (attn_truth_need(attn_device_capabilities(m->device), p, &cost, &err)) die("UNSUPPORTED", err.text);
    must(attn_device_alloc(m->device, cost.workspace_bytes, &t->workspace, &err));
    for (int n = 0; n < TRUTH_RESULTS; n++) {
        const attn_tensor *x = &p->tensor[truth_ids[n]];
        if (p->op == ATTN_OP_BACKWARD ? n < 2 : n >= 2) continue;
        attn_shape_elements(x->rank, x->shape, &t->elements[n]);
        must(attn_device_alloc(m->device, (size_t)t->elements[n] * sizeof(double) + 1, &t->memory[n], &err));
    }
    t->to = (attn_truth){ t->memory[0], t->memory[1], t->memory[2], t->memory[3], t->memory[4] };
}

static void truth_close(struct machine *m, struct truth *t)
{
    for (int n = 0; n < TRUTH_RESULTS; n++) {
        double *const x = malloc((size_t)t->elements[n] * sizeof *x + 1);
        if (!x) die("out of memory", NULL);
        if (t->elements[n])
            must(attn_copy(m->stream, x, t->memory[n], (size_t)t->elements[n] * sizeof *x, ATTN_FROM_DEVICE, &err));
        must(attn_stream_wait(m->stream, &err));
        for (int64_t i = 0; i < t->elements[n]; i++)
            if (isnan(x[i])) die("a result in float64 is NaN:", attn_tensors[truth_ids[n]].name);
        free(x);
        attn_device_free(m->device, t->memory[n]);
    }
    attn_device_free(m->device, t->workspace);
}

/* Queues one call of the operation that is timed: a forward, a backward, an observe (attention weights) or a truth
 * (results in float64). */
static void queue_call(struct machine *m, const attn_plan *plan, void *workspace, const struct truth *t)
{
    int64_t step = 0;
    if (!t->workspace) must(attn_run(m->stream, plan, 1, workspace, &err));
    else
        while (step != ATTN_NO_MORE_STEPS)
            must(attn_truth_some(m->stream, plan->problem, &t->to, t->workspace, &step, &err));
}

/* Returns the milliseconds that one call takes. */
static double time_shape(struct machine *m, const struct options *o, attn_op op)
{
    static double times[MOST_REPS], queueing[MOST_REPS];
    static attn_problem turns[MOST_COPIES];
    static attn_plan plans[MOST_COPIES];
    void *copies[MOST_COPIES][2] = { 0 };
    struct block blocks[BLOCKS] = { 0 };
    attn_problem p = ATTN_PROBLEM_INIT;
    struct truth truth = { 0 };
    void *workspace = NULL;
    size_t workspace_bytes;
    double ms, tflops, began, gigabytes;
    int reps = 0, sets = 1, calls = 1;
    int64_t reading;

    p.causal = o->causal;
    p.alignment = o->top_left ? ATTN_TOP_LEFT : ATTN_BOTTOM_RIGHT;
    p.window_left = o->window_left;
    p.window_right = o->window_right;
    give_inputs(m, o, &p, blocks);
    reading = blocks[ATTN_T_k].bytes + blocks[ATTN_T_v].bytes;
    must(attn_check(&p, &err));
    p.observe.map[0] = o->Sq < ATTN_MAX_MAP ? o->Sq : ATTN_MAX_MAP;
    p.observe.map[1] = o->Sk < ATTN_MAX_MAP ? o->Sk : ATTN_MAX_MAP;
    p.observe.top = o->observed & BIT(ATTN_T_top_keys) ? 8 : 0;
    attn_observe_region(&p);
    for (int back = 0; back <= (op == ATTN_OP_BACKWARD); back++) {
        p.op = op == ATTN_OP_OBSERVE ? op : back ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
            if (!attn_writes(&p, (attn_tensor_id)id) || (op == ATTN_OP_OBSERVE && !(o->observed >> id & 1))) continue;
            if (id == ATTN_T_lse && o->no_lse) continue;
            if ((OPTION_GRADIENTS & ~o->gradients) >> id & 1) continue;
            const attn_dtype out_dtype = o->dtype == ATTN_F8E4M3 ? ATTN_BF16 : o->dtype;
            const attn_status is = attn_output(&p, (attn_tensor_id)id, back ? o->grad_dtype : out_dtype, &p.tensor[id],
                                               &err);
            if (is == ATTN_NOT_FOUND) continue;
            must(is);
            give_memory(m, &p.tensor[id], &blocks[id]);
            /* These bytes are NaN in every dtype. NaN in a result then shows that the kernels did not write it. */
            memset(blocks[id].host, 0xff, (size_t)blocks[id].bytes);
            must(attn_copy(m->stream, blocks[id].device, blocks[id].host, (size_t)blocks[id].bytes, ATTN_TO_DEVICE,
                           &err));
        }
        if (op == ATTN_OP_OBSERVE && o->given_lse) {
            must(attn_output(&p, ATTN_T_lse, ATTN_F32, &p.lse, &err));
            give_memory(m, &p.lse, &blocks[ATTN_T_lse]);
            p.observe.given_lse = true;
        }
        if (back) {
            p.dout = p.out;
            give_memory(m, &p.dout, &blocks[ATTN_T_dout]);
            if (o->forward_first) p.out = p.lse = (attn_tensor){ 0 };
        }
        must(attn_stream_wait(m->stream, &err));
        use(&p, o, blocks, false);
        must(attn_check(&p, &err));
        use(&p, o, blocks, true);
        if (attn_plan_make(attn_device_capabilities(m->device), &p, &plans[0], &err)) die("UNSUPPORTED", err.text);
        attn_device_free(m->device, workspace);
        must(attn_workspace(attn_device_capabilities(m->device), plans, 1, &workspace_bytes, &err));
        must(attn_device_alloc(m->device, workspace_bytes + 1, &workspace, &err));
        if (o->truth && back == (op == ATTN_OP_BACKWARD)) break;
        must(attn_run(m->stream, plans, 1, workspace, &err));
        must(attn_stream_wait(m->stream, &err));
    }
    if (o->truth) {
        use(&p, o, blocks, false);
        truth_open(m, &p, &truth);
        use(&p, o, blocks, true);
    }
    turns[0] = p;
    must(attn_plan_make(attn_device_capabilities(m->device), &turns[0], &plans[0], &err));
    while (o->reading && !m->info.unified && sets < MOST_COPIES && sets * reading < COPIES_BYTES) {
        turns[sets] = p;
        for (int n = 0; n < 2 - o->latent; n++) {
            const attn_tensor_id id = n ? ATTN_T_v : ATTN_T_k;
            must(attn_device_alloc(m->device, (size_t)blocks[id].bytes + 1, &copies[sets][n], &err));
            must(
                attn_copy(m->stream, copies[sets][n], blocks[id].host, (size_t)blocks[id].bytes, ATTN_TO_DEVICE, &err));
            turns[sets].tensor[id].data = copies[sets][n];
        }
        if (o->latent) turns[sets].v.data = turns[sets].k.data;
        must(attn_plan_make(attn_device_capabilities(m->device), &turns[sets], &plans[sets], &err));
        sets++;
    }
    for (int n = 1; n < WARM_RUNS; n++) {
        must(attn_stream_mark(m->stream, 0, &err));
        queue_call(m, &plans[0], workspace, &truth);
        must(attn_stream_mark(m->stream, 1, &err));
        must(attn_stream_wait(m->stream, &err));
    }
    /* If one call is short, a timed run on a GPU has several calls. With one short call, the program would measure the
     * time of queueing it. */
    if (!m->info.unified) {
        const double one = attn_stream_elapsed_us(m->stream, 0, 1) / 1000;
        calls = one >= RUN_MS ? 1 : one > RUN_MS / 500 ? (int)(RUN_MS / one) + 1 : 500;
    }
    for (began = now(); reps < MOST_REPS && (o->reps ? reps < o->reps : reps < 5 || now() - began < 1); reps++) {
        must(attn_stream_mark(m->stream, 0, &err));
        const double queued = now();
        for (int n = 0; n < calls; n++) queue_call(m, &plans[(reps * calls + n) % sets], workspace, &truth);
        queueing[reps] = 1e3 * (now() - queued) / calls;
        must(attn_stream_mark(m->stream, 1, &err));
        must(attn_stream_wait(m->stream, &err));
        times[reps] = attn_stream_elapsed_us(m->stream, 0, 1) / 1000 / calls;
    }
    ms = median(times, reps);
    const char *const kernel = o->truth ? "float64" : plans[0].kernel->name;
    use(&p, o, blocks, false);
    tflops = attn_flops(&p) / ms / 1e9;
    gigabytes = (double)reading / ms / 1e6;
    if (o->json) {
        printf("{\"op\":\"%s\",\"dtype\":\"%s\",\"B\":%lld,\"H\":%lld,\"Hk\":%lld,\"Sq\":%lld,\"Sk\":%lld,\"D\":%lld,"
               "\"Dv\":"
               "%lld,"
               "\"causal\":%s,\"window\":[%lld,%lld],\"sequences\":%d,\"documents\":%lld,\"key_dtype\":\"%s\","
               "\"page_size\":%lld,\"backend\":\"%s %s\",\"reps\":%d,"
               "\"calls\":%d,\"ms\":%.6g,\"host_ms\":%.6g,\"tflops\":%.6g,\"gb_per_s\":%.6g",
               attn_op_name(op), attn_dtype_name(o->dtype), (long long)o->B, (long long)o->H, (long long)o->Hk,
               (long long)o->Sq, (long long)o->Sk, (long long)o->D, (long long)o->Dv, o->causal ? "true" : "false",
               (long long)o->window_left, (long long)o->window_right, o->sequences, (long long)o->documents,
               attn_dtype_name(o->key_dtype), (long long)o->page_size, m->info.name, kernel, reps, calls, ms,
               median(queueing, reps), tflops, gigabytes);
        put_outputs(&p);
        printf("}\n");
    } else
        printf("%-8s  %-13s  %5lld  %4lld  %4lld  %6lld  %6lld  %4lld  %4lld  %-6s  %10.4f  %8.3f  %8.0f  %s %s\n",
               attn_op_name(op), attn_dtype_name(o->key_dtype), (long long)o->B, (long long)o->H, (long long)o->Hk,
               (long long)o->Sq, (long long)o->Sk, (long long)o->D, (long long)o->Dv, o->causal ? "causal" : "full", ms,
               tflops, gigabytes, m->info.name, kernel);
    fflush(stdout);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (o->truth) continue;
        if (p.tensor[id].rank && attn_writes(&p, (attn_tensor_id)id) && attn_dtype_floating(p.tensor[id].dtype))
            look_at(m, (attn_tensor_id)id, &p.tensor[id], &blocks[id]);
    }
    for (int n = 0; n < BLOCKS; n++) {
        attn_device_free(m->device, blocks[n].device);
        free(blocks[n].host);
    }
    for (int n = 1; n < sets; n++) attn_device_free(m->device, copies[n][0]), attn_device_free(m->device, copies[n][1]);
    attn_device_free(m->device, workspace);
    if (o->truth) truth_close(m, &truth);
    return ms;
}

static void time_ops(struct machine *m, const struct options *o)
{
    if (o->forward) time_shape(m, o, ATTN_OP_FORWARD);
    if (o->backward && o->dtype != ATTN_F8E4M3) time_shape(m, o, ATTN_OP_BACKWARD);
}

/* Times the sizes in the figures of the FlashAttention papers: B * S tokens, H * D = 2048, D from 64 to 256, S from 512
 * to 16384. */
static void sweep_paper(struct machine *m, const struct options *given)
{
    static const int64_t head_sizes[] = { 64, 128, 256 };
    struct options o = *given;
    for (int op = 0; op < 2; op++)
        for (int d = 0; d < 3; d++)
            for (int causal = 0; causal < 2; causal++)
                for (int64_t S = 512; S <= 16384 && S <= given->tokens; S *= 2) {
                    o.forward = op == 0 && given->forward;
                    o.backward = op == 1 && given->backward;
                    o.causal = causal;
                    o.D = o.Dv = head_sizes[d];
                    o.H = o.Hk = 2048 / o.D;
                    o.Sq = o.Sk = S;
                    o.B = given->tokens / S;
                    time_ops(m, &o);
                }
}

/* Times problems with one query, and with a few queries, over many keys. A device that shares the host's memory does
 * not run the largest of these problems. */
static void sweep_decode(struct machine *m, const struct options *given)
{
    static const struct {
        int64_t B, Sk, Sq, H, Hk;
    } shapes[] = {
        { 1, 131072, 1, 32, 8 }, { 16, 8192, 1, 32, 8 }, { 64, 8192, 1, 32, 8 }, { 1, 8192, 1, 32, 32 },
        { 1, 8192, 1, 32, 8 },   { 1, 2048, 1, 32, 8 },  { 1, 512, 1, 32, 8 },   { 16, 8192, 4, 32, 8 },
    };
    struct options o = *given;
    o.D = o.Dv = 128;
    o.reading = true;
    for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++) {
        if (m->info.unified && shapes[n].B * shapes[n].Sk > 65536) continue;
        o.B = shapes[n].B, o.Sk = shapes[n].Sk, o.Sq = shapes[n].Sq, o.H = shapes[n].H, o.Hk = shapes[n].Hk;
        time_shape(m, &o, ATTN_OP_FORWARD);
    }
}

static void remark(const struct options *o, const char *what, double value)
{
    fprintf(o->json ? stderr : stdout, "# %s: %.2f\n", what, value);
    fflush(o->json ? stderr : stdout);
}

/* Times problems with each mask and with each kind of sequence lengths. For comparison, also times a plain problem of
 * the same size. */
static void sweep_masks(struct machine *m, const struct options *given, attn_op op)
{
    const int64_t longest = given->tokens < 16384 ? given->tokens : 16384, half = longest / 2, total = longest * 4;
    struct options o = *given;
    double plain, masked, pairs = 0;
    uint64_t state = 88172645463325252u;
    int64_t left = total;
    o.D = o.Dv = 128;

    o.B = 2, o.H = 32, o.Hk = 8, o.Sq = o.Sk = half, o.causal = true;
    time_shape(m, &o, op);

    if (op == ATTN_OP_BACKWARD) {
        o.B = 1, o.H = o.Hk = 16;
        plain = time_shape(m, &o, op);
        o.deterministic = true;
        masked = time_shape(m, &o, op);
        o.deterministic = given->deterministic;
        remark(&o, "deterministic, causal: rate, of that in any order", plain / masked);
    }

    o.H = o.Hk = 16;
    for (o.sequences = 0; left > 0 && o.sequences < MOST_SEQUENCES; o.sequences++) {
        int64_t length;
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        length = 100 + (int64_t)(state % (uint64_t)(half - 99));
        if (length > left || o.sequences == MOST_SEQUENCES - 1) length = left;
        o.lengths[o.sequences] = (int32_t)length;
        pairs += (double)length * (double)(length + 1) / 2;
        left -= length;
    }
    o.B = o.sequences, o.Sq = o.Sk = total;
    masked = time_shape(m, &o, op) / pairs;
    o.sequences = 0;
    o.Sq = o.Sk = ((int64_t)(2 * pairs / (double)total) + 7) / 8 * 8;
    o.B = (total + o.Sq / 2) / o.Sq;
    plain = time_shape(m, &o, op) / ((double)o.B * (double)o.Sq * (double)(o.Sq + 1) / 2);
    remark(&o, "packed lengths from 100 up: rate, of that of one length", plain / masked);

    o.B = 1, o.Sq = o.Sk = longest;
    plain = time_shape(m, &o, op);
    o.window_left = longest / 16 - 1, o.window_right = 0;
    masked = time_shape(m, &o, op);
    remark(&o, "window of a sixteenth: times as fast as causal", plain / masked);

    o.window_left = o.window_right = -1, o.causal = false;
    plain = time_shape(m, &o, op);
    o.documents = 16;
    masked = time_shape(m, &o, op);
    remark(&o, "FlashMask of 16 documents: times as fast as without", plain / masked);
}

/* Times observe problems (requests for attention weights) with each kind of output. For comparison, also times a
 * forward of the same sizes. */
static void sweep_observe(struct machine *m, const struct options *given)
{
    static const struct {
        attn_tensor_id output;
        bool given_lse;
    } kinds[] = { { ATTN_T_max_logit, false }, { ATTN_T_entropy, false }, { ATTN_T_key_mass, false },
                  { ATTN_T_key_mass, true },   { ATTN_T_map, false },     { ATTN_T_top_keys, false } };
    const double forward = time_shape(m, given, ATTN_OP_FORWARD);
    for (size_t n = 0; n < sizeof kinds / sizeof *kinds; n++) {
        struct options o = *given;
        char what[64];
        o.observed = BIT(kinds[n].output);
        o.given_lse = kinds[n].given_lse;
        const double ms = time_shape(m, &o, ATTN_OP_OBSERVE);
        snprintf(what, sizeof what, "%s%s: %.3f ms, times a forward", attn_tensors[kinds[n].output].name,
                 o.given_lse ? " with lse given" : "", ms);
        remark(&o, what, ms / forward);
    }
}

/* ---- Measuring how fast request bodies are read and written ------------------------------------------------------ */

/* Memory that grows by reallocation and is aligned to 64 bytes, like the server's memory for request bodies. */
struct arena {
    void *base;
    size_t bytes, used;
};

static attn_status grow(void *context, size_t bytes, void **base, attn_error *error)
{
    struct arena *a = context;
    if (bytes > a->bytes) {
        const size_t room = (bytes + bytes / 2 + 63) / 64 * 64;
        void *bigger = aligned_alloc(64, room);
        if (!bigger) return attn_fail(error, ATTN_NO_MEMORY, "", "out of memory");
        if (a->base) memcpy(bigger, a->base, a->bytes);
        free(a->base);
        a->base = bigger;
        a->bytes = room;
    }
    *base = a->base;
    return ATTN_OK;
}

enum { CODEC_REPS = 15, PIECE = 64 * 1024 };

static void report(const struct options *o, const char *what, const char *variant, size_t bytes, double *seconds)
{
    const double s = median(seconds, CODEC_REPS);
    if (o->json)
        printf("{\"op\":\"%s\",\"variant\":\"%s\",\"bytes\":%zu,\"ms\":%.6g,\"gb_per_s\":%.4g}\n", what, variant, bytes,
               s * 1e3, (double)bytes / s / 1e9);
    else printf("%-14s  %-8s  %10zu  %10.3f  %8.2f\n", what, variant, bytes, s * 1e3, (double)bytes / s / 1e9);
    fflush(stdout);
}

/* Makes the body of a forward with 8 heads of 64 float16 numbers, one row of q, and `keys` rows of k and v. */
static char *make_body(int64_t keys, size_t *length)
{
    const int64_t q_bytes = 8 * 64 * 2, kv_bytes = keys * q_bytes;
    const size_t room = (size_t)(BASE64_ENCODED(q_bytes) + 2 * BASE64_ENCODED(kv_bytes)) + 1024;
    char *body = malloc(room);
    uint8_t *data = malloc((size_t)kv_bytes);
    size_t at = 0;
    if (!body || !data) die("out of memory", NULL);
    fill_random(data, ATTN_F16, kv_bytes / 2);
    body[at++] = '{';
    for (int n = 0; n < 3; n++) {
        const int64_t bytes = n ? kv_bytes : q_bytes;
        at += (size_t)snprintf(body + at, room - at,
                               "%s\"%c\": {\"shape\": [1, %lld, 8, 64], \"dtype\": \"float16\", \"data\": \"",
                               n ? ", " : "", "qkv"[n], n ? (long long)keys : 1);
        base64_encode(data, (size_t)bytes, body + at);
        at += (size_t)BASE64_ENCODED(bytes);
        at += (size_t)snprintf(body + at, room - at, "\"}");
    }
    body[at++] = '}';
    free(data);
    *length = at;
    return body;
}

static void time_codec(const struct options *o)
{
    /* numbers of bytes to encode and decode: the first fit into a core's cache, and the second do not */
    const size_t sizes[] = { 96 * 1024, 24 * 1024 * 1024 };
    double seconds[CODEC_REPS];
    if (!o->json) printf("%-14s  %-8s  %10s  %10s  %8s\n", "what", "variant", "text", "ms", "GB/s");
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
        const size_t bytes = sizes[n], characters = (size_t)BASE64_ENCODED(bytes);
        uint8_t *data = malloc(bytes), *back = malloc(BASE64_DECODED_MAX(characters));
        char *text = malloc(characters);
        const int rounds = bytes < 1 << 20 ? 200 : 1;
        if (!data || !back || !text) die("out of memory", NULL);
        fill_random(data, ATTN_F16, (int64_t)bytes / 2);
        for (const char *const *variant = base64_variants(); *variant; variant++) {
            if (!base64_use(*variant)) continue;
            for (int rep = -WARM_RUNS; rep < CODEC_REPS; rep++) {
                const double began = now();
                for (int r = 0; r < rounds; r++) base64_encode(data, bytes, text);
                if (rep >= 0) seconds[rep] = (now() - began) / rounds;
            }
            report(o, "base64-encode", *variant, characters, seconds);
            for (int rep = -WARM_RUNS; rep < CODEC_REPS; rep++) {
                const double began = now();
                for (int r = 0; r < rounds; r++) {
                    base64_decoder decoder = { 0 };
                    size_t written;
                    if (!base64_decode(&decoder, text, characters, back, &written) || !base64_finish(&decoder) ||
                        written != bytes)
                        die("base64 does not come back", NULL);
                }
                if (rep >= 0) seconds[rep] = (now() - began) / rounds;
            }
            if (memcmp(data, back, bytes)) die("base64 comes back changed", NULL);
            report(o, "base64-decode", *variant, characters, seconds);
        }
        base64_use(NULL);
        free(data), free(back), free(text);
    }
    /* Measures the time of reading a whole body: scanner, base64 decoder, JSON parser and checks. */
    for (int large = 0; large < 2; large++) {
        size_t length;
        char *body = make_body(large ? 16384 : 64, &length);
        struct arena arena = { 0 };
        const int rounds = large ? 1 : 100;
        for (int rep = -WARM_RUNS; rep < CODEC_REPS; rep++) {
            const double began = now();
            for (int r = 0; r < rounds; r++) {
                const proto_limits limits = PROTO_LIMITS_DEFAULT;
                const proto_memory memory = { .grow = grow, .context = &arena };
                proto_parser *decoder = proto_parser_new(&proto_json, ATTN_OP_FORWARD, &limits, &memory);
                proto_call *call = NULL;
                if (!decoder) die("out of memory", NULL);
                for (size_t at = 0; at < length; at += PIECE)
                    must(proto_parser_feed(decoder, body + at, length - at < PIECE ? length - at : PIECE, &err));
                must(proto_parser_finish(decoder, &call, &err));
                proto_call_free(call);
                proto_parser_free(decoder);
            }
            if (rep >= 0) seconds[rep] = (now() - began) / rounds;
        }
        report(o, "body-decode", base64_variants()[0], length, seconds);
        free(arena.base);
        free(body);
    }
}

/* ---- The command line -------------------------------------------------------------------------------------------- */

static const char help[] =
    "attn-bench: time attention on a device, or the codec\n"
    "\n"
    "  --op forward|backward|both   (forward; --sweep: both)\n"
    "  --dtype NAME                 float32, float16, bfloat16, float8_e4m3fn (bfloat16)\n"
    "  -B N  -H N  --hk N           batch, query heads, key/value heads (1, 16, as -H)\n"
    "  --sq N  --sk N               queries and keys (2048, as --sq)\n"
    "  -D N  --dv N                 head size of q and k, and of v (128, as -D)\n"
    "  --causal  --top-left         masks; --window LEFT,RIGHT (-1: unbounded)\n"
    "  --device NAME[:INDEX]        cuda, cpu, reference, paper (the first there is)\n"
    "  --threads N                  cpu: worker threads (all cores)\n"
    "  --reps N                     runs to take the median of (at least 5, for a second)\n"
    "  --sweep paper                B * S = tokens, H * D = 2048, D 64 128 256, S 512 to 16384, causal and not\n"
    "  --sweep decode  --decode     one query and four over 512 to 131072 keys, K and V not in any cache\n"
    "  --sweep masks                grouped heads, packed lengths, a window, FlashMask documents, beside their likes\n"
    "  --sweep observe              of the one shape: a forward, and an observe of each kind beside it\n"
    "  --tokens N                   of the sweeps paper and masks (16384; on a CPU 2048 takes a minute)\n"
    "  --cold                       K and V take turns with copies of them, so that they are read from memory\n"
    "  --documents N                FlashMask: so many equal documents\n"
    "  --softcap X  --alibi  --sinks  --scale X  --dropout P   options of the scores\n"
    "  --bias                       a float32 bias of random numbers; --bias-dtype NAME: float16 or bfloat16\n"
    "  --bias X  --padded N         a float32 bias: X for later keys and for the first N, 0 for others\n"
    "  --keep-mask P                a keep_mask that keeps each key with the probability P, above 0 and at most 1\n"
    "  --each-head                  bias and keep-mask are of each head and batch row, not one for all\n"
    "  --forward-first              backward: it is not given out and lse, and computes them\n"
    "  --grads dsinks,dbias,dalibi_slopes   backward: compute these gradients too; their options must be given\n"
    "  --deterministic              backward: sums of dq in one order\n"
    "  --grad-dtype NAME            backward: the dtype of dq, dk and dv, if it is not that of Q (float32)\n"
    "  --page-size N                forward: K and V are pools of pages of N keys, which lie in no order\n"
    "  --forks                      with --page-size: all rows have their pages in common, but for the last\n"
    "  --key-dtype NAME             forward: of K and V, where it is not that of Q (float8_e4m3fn)\n"
    "  --latent                     forward: V is the first --dv columns of K (multi-head latent attention)\n"
    "  --no-lse                     forward: out alone (float8 is faster so)\n"
    "  --truth                      results in float64, instead of the kernel's (a GPU)\n"
    "  --codec                      base64 and whole bodies, GB of text a second\n"
    "  --json                       one JSON object a line; host_ms is what queueing a call took\n";

static int64_t number(const char *option, const char *text, int64_t low, int64_t high)
{
    char *end, what[128];
    long long n;
    errno = 0;
    n = strtoll(text, &end, 10);
    if (errno || *text == 0 || *end || n < low || n > high) {
        snprintf(what, sizeof what, "%s is '%.40s', must be a number from %lld to %lld", option, text, (long long)low,
                 (long long)high);
        die(what, NULL);
    }
    return n;
}

static double real(const char *option, const char *text)
{
    char *end, what[128];
    const double x = strtod(text, &end);
    if (*text == 0 || *end || !isfinite((float)x)) {
        snprintf(what, sizeof what, "%s is '%.40s', must be a finite float32", option, text);
        die(what, NULL);
    }
    return x;
}

static bool is_number(const char *text)
{
    char *end;
    (void)strtod(text, &end);
    return *text && *end == 0;
}

/* Reads a real number above `low` and at most `high`. */
static double between(const char *option, const char *text, double low, double high)
{
    char what[128];
    const double x = real(option, text);
    if (x > low && x <= high) return x;
    snprintf(what, sizeof what, "%s is '%.40s', must be above %g and at most %g", option, text, low, high);
    die(what, NULL);
    return x;
}

/* Reads names of gradients, separated by commas, as a set of bits. */
static uint64_t gradients(const char *text)
{
    uint64_t bits = 0;
    for (const char *at = text;; at++) {
        const size_t length = strcspn(at, ",");
        int id = 0;
        while (id < ATTN_TENSOR_COUNT && !((OPTION_GRADIENTS >> id & 1) && strlen(attn_tensors[id].name) == length &&
                                           !strncmp(attn_tensors[id].name, at, length)))
            id++;
        if (id == ATTN_TENSOR_COUNT) die("--grads must be of dsinks, dbias and dalibi_slopes, not", text);
        bits |= BIT(id);
        at += length;
        if (*at == 0) return bits;
    }
}

/* Fails if the problem lacks the option (bias, sinks or ALiBi) whose gradient --grads names. */
static void check_gradients(const struct options *o)
{
    const struct {
        attn_tensor_id id;
        bool given;
        const char *option;
    } of[] = { { ATTN_T_dsinks, o->sinks, "--sinks" },
               { ATTN_T_dbias, o->biased, "--bias" },
               { ATTN_T_dalibi_slopes, o->alibi, "--alibi" } };
    if (o->gradients && !o->backward) die("--grads is of a backward: --op backward", NULL);
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
        if ((o->gradients >> of[i].id & 1) && !of[i].given)
            die("--grads names a gradient whose option is not given", of[i].option);
}

int main(int argc, char **argv)
{
    enum {
        OP = 256,
        DTYPE,
        HK,
        SQ,
        SK,
        DV,
        CAUSAL,
        TOP_LEFT,
        WINDOW,
        DEVICE,
        THREADS,
        REPS,
        SWEEP,
        DECODE,
        COLD,
        DOCUMENTS,
        PAGE_SIZE,
        FORKS,
        KEY_DTYPE,
        LATENT,
        TOKENS,
        NO_LSE,
        DETERMINISTIC,
        GRAD_DTYPE,
        ALIBI,
        SOFTCAP,
        SINKS,
        SCALE,
        DROPOUT,
        BIAS,
        BIAS_DTYPE,
        KEEP_MASK,
        EACH_HEAD,
        FORWARD_FIRST,
        GRADS,
        PADDED,
        TRUTH,
        CODEC,
        JSON,
        HELP
    };
    static const struct option flags[] = {
        { "op", required_argument, NULL, OP },
        { "dtype", required_argument, NULL, DTYPE },
        { "hk", required_argument, NULL, HK },
        { "sq", required_argument, NULL, SQ },
        { "sk", required_argument, NULL, SK },
        { "dv", required_argument, NULL, DV },
        { "causal", no_argument, NULL, CAUSAL },
        { "top-left", no_argument, NULL, TOP_LEFT },
        { "window", required_argument, NULL, WINDOW },
        { "device", required_argument, NULL, DEVICE },
        { "threads", required_argument, NULL, THREADS },
        { "reps", required_argument, NULL, REPS },
        { "sweep", required_argument, NULL, SWEEP },
        { "decode", no_argument, NULL, DECODE },
        { "cold", no_argument, NULL, COLD },
        { "documents", required_argument, NULL, DOCUMENTS },
        { "page-size", required_argument, NULL, PAGE_SIZE },
        { "forks", no_argument, NULL, FORKS },
        { "key-dtype", required_argument, NULL, KEY_DTYPE },
        { "latent", no_argument, NULL, LATENT },
        { "tokens", required_argument, NULL, TOKENS },
        { "no-lse", no_argument, NULL, NO_LSE },
        { "deterministic", no_argument, NULL, DETERMINISTIC },
        { "grad-dtype", required_argument, NULL, GRAD_DTYPE },
        { "alibi", no_argument, NULL, ALIBI },
        { "softcap", required_argument, NULL, SOFTCAP },
        { "sinks", no_argument, NULL, SINKS },
        { "scale", required_argument, NULL, SCALE },
        { "dropout", required_argument, NULL, DROPOUT },
        { "bias", optional_argument, NULL, BIAS },
        { "bias-dtype", required_argument, NULL, BIAS_DTYPE },
        { "keep-mask", required_argument, NULL, KEEP_MASK },
        { "each-head", no_argument, NULL, EACH_HEAD },
        { "forward-first", no_argument, NULL, FORWARD_FIRST },
        { "grads", required_argument, NULL, GRADS },
        { "padded", required_argument, NULL, PADDED },
        { "truth", no_argument, NULL, TRUTH },
        { "codec", no_argument, NULL, CODEC },
        { "json", no_argument, NULL, JSON },
        { "help", no_argument, NULL, HELP },
        { 0 },
    };
    struct options o = { .dtype = ATTN_BF16,
                         .bias_dtype = ATTN_F32,
                         .B = 1,
                         .H = 16,
                         .Sq = 2048,
                         .D = 128,
                         .window_left = -1,
                         .window_right = -1,
                         .tokens = 16384 };
    bool op_given = false, key_dtype_given = false, grad_dtype_given = false;
    char name[32];
    struct machine m = { 0 };
    for (int flag; (flag = getopt_long(argc, argv, "B:H:D:h", flags, NULL)) != -1;) {
        switch (flag) {
        case 'B': o.B = number("-B", optarg, 1, INT32_MAX); break;
        case 'H': o.H = number("-H", optarg, 1, INT32_MAX); break;
        case 'D': o.D = number("-D", optarg, 1, ATTN_MAX_HEAD_DIM); break;
        case HK: o.Hk = number("--hk", optarg, 1, INT32_MAX); break;
        case SQ: o.Sq = number("--sq", optarg, 1, INT32_MAX); break;
        case SK: o.Sk = number("--sk", optarg, 1, INT32_MAX); break;
        case DV: o.Dv = number("--dv", optarg, 1, ATTN_MAX_HEAD_DIM); break;
        case THREADS: o.threads = (int)number("--threads", optarg, 1, 4096); break;
        case REPS: o.reps = (int)number("--reps", optarg, 1, MOST_REPS); break;
        case TOKENS: o.tokens = number("--tokens", optarg, 512, 1 << 24); break;
        case CAUSAL: o.causal = true; break;
        case TOP_LEFT: o.top_left = true; break;
        case NO_LSE: o.no_lse = true; break;
        case DETERMINISTIC: o.deterministic = true; break;
        case ALIBI: o.alibi = true; break;
        case SOFTCAP: o.softcap = between("--softcap", optarg, 0, FLT_MAX); break;
        case SINKS: o.sinks = true; break;
        case SCALE: o.scale = real("--scale", optarg); break;
        case DROPOUT: o.dropout = real("--dropout", optarg); break;
        /* An argument that begins with '-' may be a negative number for --bias. */
        case BIAS:
            o.biased = true;
            if (!optarg && optind < argc && is_number(argv[optind])) optarg = argv[optind++];
            if (optarg) o.bias_is_mask = true, o.hidden_bias = real("--bias", optarg);
            break;
        case KEEP_MASK: o.keep = between("--keep-mask", optarg, 0, 1); break;
        case EACH_HEAD: o.each_head = true; break;
        case FORWARD_FIRST: o.forward_first = true; break;
        case BIAS_DTYPE:
            if (!attn_dtype_parse(optarg, &o.bias_dtype) || !attn_dtype_floating(o.bias_dtype))
                die("there is no dtype", optarg);
            break;
        case GRADS: o.gradients = gradients(optarg); break;
        case PADDED: o.padded = number("--padded", optarg, 0, INT32_MAX); break;
        case TRUTH: o.truth = true; break;
        case CODEC: o.codec = true; break;
        case JSON: o.json = true; break;
        case OP:
            o.forward = !strcmp(optarg, "forward") || !strcmp(optarg, "both");
            o.backward = !strcmp(optarg, "backward") || !strcmp(optarg, "both");
            if (!o.forward && !o.backward) die("--op must be forward, backward or both, not", optarg);
            op_given = true;
            break;
        case DTYPE:
            if (!attn_dtype_parse(optarg, &o.dtype) || !attn_dtype_floating(o.dtype)) die("there is no dtype", optarg);
            break;
        case WINDOW: {
            char *comma = strchr(optarg, ',');
            if (!comma) die("--window must be LEFT,RIGHT, not", optarg);
            *comma = 0;
            o.window_left = number("--window", optarg, -1, INT32_MAX);
            o.window_right = number("--window", comma + 1, -1, INT32_MAX);
            *comma = ',';
            break;
        }
        case DEVICE: {
            char *colon;
            snprintf(name, sizeof name, "%s", optarg);
            colon = strchr(name, ':');
            if (colon) *colon = 0, o.index = (int)number("--device", colon + 1, 0, 1023);
            o.device = name;
            break;
        }
        case SWEEP:
            if (!strcmp(optarg, "paper")) o.sweep = SWEEP_PAPER;
            else if (!strcmp(optarg, "decode")) o.sweep = SWEEP_DECODE;
            else if (!strcmp(optarg, "masks")) o.sweep = SWEEP_MASKS;
            else if (!strcmp(optarg, "observe")) o.sweep = SWEEP_OBSERVE;
            else die("there is no sweep", optarg);
            break;
        case DECODE: o.sweep = SWEEP_DECODE; break;
        case COLD: o.reading = true; break;
        case PAGE_SIZE: o.page_size = number("--page-size", optarg, 1, INT32_MAX); break;
        case FORKS: o.forks = true; break;
        case LATENT: o.latent = true; break;
        case KEY_DTYPE:
            if (!attn_dtype_parse(optarg, &o.key_dtype) || !attn_dtype_floating(o.key_dtype))
                die("there is no dtype", optarg);
            key_dtype_given = true;
            break;
        case GRAD_DTYPE:
            if (!attn_dtype_parse(optarg, &o.grad_dtype) || !attn_dtype_floating(o.grad_dtype))
                die("there is no dtype", optarg);
            grad_dtype_given = true;
            break;
        case DOCUMENTS: o.documents = number("--documents", optarg, 1, INT32_MAX); break;
        case HELP:
        case 'h': fputs(help, stdout); return 0;
        default: fputs(help, stderr); return 2;
        }
    }
    if (optind < argc) die("this is no option", argv[optind]);
    if (!op_given) o.forward = true, o.backward = o.sweep == SWEEP_PAPER || o.sweep == SWEEP_MASKS;
    if (o.padded && !o.bias_is_mask) die("--padded is of a bias that hides keys: --bias X", NULL);
    if (o.bias_is_mask && o.bias_dtype != ATTN_F32) die("--bias X is float32", NULL);
    if (o.forward_first && !o.backward) die("--forward-first is of a backward: --op backward", NULL);
    check_gradients(&o);
    if (o.documents && o.causal) die("--documents are not causal", NULL);
    if (o.no_lse && o.dtype != ATTN_F8E4M3 && o.backward) die("a backward needs the lse of its forward", NULL);
    if (!key_dtype_given) o.key_dtype = o.dtype;
    if (!grad_dtype_given) o.grad_dtype = o.dtype;
    else if (!o.backward) die("--grad-dtype is of a backward: --op backward", NULL);
    if (o.backward && (o.page_size || o.latent || o.key_dtype != o.dtype))
        die("--page-size, --latent and --key-dtype are of a forward", NULL);
    if (o.forks && !o.page_size) die("--forks have pages: --page-size", NULL);
    if (o.sweep == SWEEP_MASKS && o.page_size) die("--page-size is not for the sweep masks", NULL);
    if (!o.Hk) o.Hk = o.H;
    if (!o.Sk) o.Sk = o.Sq;
    if (!o.Dv) o.Dv = o.D;
    if (o.latent && o.Dv > o.D) die("--latent: --dv is larger than -D", NULL);

    {
        FILE *to = o.json ? stderr : stdout;
        fputs("#", to);
        for (int n = 0; n < argc; n++) fprintf(to, " %s", argv[n]);
        fputs("\n", to);
    }
    if (o.codec) {
        time_codec(&o);
        return 0;
    }
    for (const char *const *backend = attn_backends(); !o.device && *backend; backend++)
        if (attn_device_count(*backend) > 0) o.device = *backend;
    if (!o.device) die("there is no device", NULL);
    {
        const attn_device_options options = { .threads = o.threads };
        must(attn_device_open(o.device, o.index, &options, &m.device, &err));
        must(attn_stream_open(m.device, &m.stream, &err));
        attn_device_describe(m.device, &m.info);
    }
    if (!o.json) {
        printf("# %s: %s; medians of warm runs\n", m.info.name, m.info.description);
        printf("%-8s  %-13s  %5s  %4s  %4s  %6s  %6s  %4s  %4s  %-6s  %10s  %8s  %8s  %s\n", "op", "dtype", "B", "H",
               "Hk", "Sq", "Sk", "D", "Dv", "mask", "ms", "TFLOP/s", "K+V GB/s", "backend");
    }
    if (o.sweep == SWEEP_PAPER) sweep_paper(&m, &o);
    else if (o.sweep == SWEEP_DECODE) sweep_decode(&m, &o);
    else if (o.sweep == SWEEP_OBSERVE) sweep_observe(&m, &o);
    else if (o.sweep == SWEEP_MASKS) {
        if (o.forward) sweep_masks(&m, &o, ATTN_OP_FORWARD);
        if (o.backward) sweep_masks(&m, &o, ATTN_OP_BACKWARD);
    } else time_ops(&m, &o);
    attn_stream_close(m.stream);
    attn_device_close(m.device);
    return 0;
}
