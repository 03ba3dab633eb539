/* transaction.c: prepares the problem that a device computes for a decode: a forward with page_table
 * (kernels/attention.h). k and v are views of the pool, which is the memory of all pages. A granule is the unit of this
 * memory. A page has the number of its first granule, so the stride of the page axis is one granule, however large a
 * page is. In a page, the values follow the keys. In a latent cache, the values are the first columns of the keys. */
#include "server/work/transaction.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/metrics.h"
#include "server/caches/caches.h"

_Static_assert((int)PROTO_MAX_CACHES == (int)CACHES_ROWS, "a body may name as many caches as a step takes");

struct job_transaction {
    struct cache_step step;
    char (*ids)[CACHE_ID_BYTES];
    /* a row of zeros that the problem uses as its page table until the transaction begins */
    int32_t *table;
    /* id of the cache that was made because this request starts a sequence; empty if it starts none */
    char started[CACHE_ID_BYTES];
    bool committed;
};

/* ---- Preparing a transaction ------------------------------------------------------------------------------------- */

/* Copies a cache's id. A text that is too long cannot be an id, so the copy is then empty. */
static void copy_id(char to[CACHE_ID_BYTES], const char *from)
{
    const size_t length = strnlen(from, CACHE_ID_BYTES - 1);
    memcpy(to, from, length);
    to[length] = '\0';
    if (from[length] != '\0') to[0] = '\0';
}

/* Checks that one axis of k or v, which the request appends to caches, has the size `want`. The text `of` explains this
 * size in the error message. */
static attn_status check_size(attn_tensor_id id, const attn_tensor *t, int axis, int64_t want, const char *of,
                              attn_error *err)
{
    const char *const name = attn_tensors[id].name;
    char member[32];
    if (t->shape[axis] == want) return ATTN_OK;
    snprintf(member, sizeof member, "/%s/shape/%d", name, axis);
    return attn_fail(err, ATTN_INVALID, member, "%s: shape[%d] is %lld, must be %lld, %s", name, axis,
                     (long long)t->shape[axis], (long long)want, of);
}

static attn_status check_new(const struct job *job, const struct cache_step *step, attn_tensor_id id, int64_t columns,
                             const char *columns_of, attn_error *err)
{
    const attn_tensor *const t = &job->call->items[0].problem.tensor[id];
    const char *const name = attn_tensors[id].name;
    const int first = t->rank - 3; /* index of the axis of positions (tokens) */
    char member[32];
    attn_status status = ATTN_OK;
    if (t->dtype != step->shape.dtype) {
        snprintf(member, sizeof member, "/%s/dtype", name);
        return attn_fail(err, ATTN_INVALID, member, "%s: dtype is %s, must be %s, the cache's", name,
                         attn_dtype_name(t->dtype), attn_dtype_name(step->shape.dtype));
    }
    if (first == 1) status = check_size(id, t, 0, step->rows, "a row for each cache", err);
    if (status == ATTN_OK) status = check_size(id, t, first, step->append, "k's positions", err);
    if (status == ATTN_OK) status = check_size(id, t, first + 1, step->shape.kv_heads, "the cache's kv_heads", err);
    if (status == ATTN_OK) status = check_size(id, t, first + 2, columns, columns_of, err);
    return status;
}

/* Checks that the request's k and v fit the caches, and stores them in `step` as the keys and values to append. Does
 * nothing if the request has neither. */
static attn_status take_new(struct job *job, struct cache_step *step, attn_error *err)
{
    attn_problem *const p = &job->call->items[0].problem;
    attn_status status;
    if (p->k.rank == 0) {
        if (p->v.rank == 0) return ATTN_OK;
        return attn_fail(err, ATTN_INVALID, "/v", "v: is given without k");
    }
    if (step->shape.latent != (p->v.rank == 0))
        return attn_fail(err, ATTN_INVALID, "/v",
                         step->shape.latent ? "v: cannot be given, the values of a latent cache are part of its keys"
                                            : "v: is missing, each position has a key and a value");
    status = check_new(job, step, ATTN_T_k, step->shape.head_dim, "the cache's head_dim", err);
    if (status == ATTN_OK && p->v.rank)
        status = check_new(job, step, ATTN_T_v, step->shape.head_dim_v, "the cache's head_dim_v", err);
    step->k = p->k.data;
    step->v = p->v.rank ? p->v.data : NULL;
    return status;
}

/* Checks that q fits the caches. The error does not mention k, which the client may not have sent. */
static attn_status check_q(const attn_tensor *q, const struct cache_shape *s, attn_error *err)
{
    if (q->dtype != s->dtype && s->dtype != ATTN_F8E4M3)
        return attn_fail(err, ATTN_INVALID, "/q/dtype", "q: dtype is %s, must be %s, the caches'",
                         attn_dtype_name(q->dtype), attn_dtype_name(s->dtype));
    if (q->shape[2] % s->kv_heads != 0)
        return attn_fail(err, ATTN_INVALID, "/q/shape/2",
                         "q: shape[2] is %lld, must be a multiple of %lld, the caches' kv_heads",
                         (long long)q->shape[2], (long long)s->kv_heads);
    return check_size(ATTN_T_q, q, 3, s->head_dim, "the caches' head_dim", err);
}

/* Returns the keys, or the values, of all pages of the pool as one tensor [page, position, head, column]. `offset` is
 * the offset in bytes of the keys or values in each page, and `columns` is the length of a row. `stored` is the
 * distance from one row to the next, which is larger than `columns` if the values are a part of the keys. */
static attn_tensor of_pool(const struct cache_step *step, int64_t offset, int64_t columns, int64_t stored)
{
    const struct cache_shape *const s = &step->shape;
    const int64_t element = (int64_t)attn_dtype_bytes(s->dtype), row = s->kv_heads * stored;
    const int64_t last = (int64_t)(step->pool_bytes - step->page_bytes) / (int64_t)step->granule;
    return (attn_tensor){ .data = (char *)step->pool + offset,
                          .dtype = s->dtype,
                          .rank = 4,
                          .shape = { last + 1, s->page_size, s->kv_heads, columns },
                          .stride = { (int64_t)step->granule / element, row, stored, 1 } };
}

static attn_tensor of_rows(void *data, attn_dtype dtype, int rank, int64_t rows, int64_t columns)
{
    return attn_tensor_make(data, dtype, rank, (const int64_t[]){ rows, columns });
}

/* Makes the problem's k and v views of the pool (the memory of all pages). Sets the problem's page table to `table`,
 * and its lengths of keys (seqlens_k) to `lengths`. */
static void point(attn_problem *p, const struct cache_step *step, int32_t *table, int32_t *lengths)
{
    const struct cache_shape *const s = &step->shape;
    const int64_t keys = s->page_size * s->kv_heads * s->head_dim * (int64_t)attn_dtype_bytes(s->dtype);
    p->k = of_pool(step, 0, s->head_dim, s->head_dim);
    p->v = s->latent ? of_pool(step, 0, s->head_dim_v, s->head_dim) : of_pool(step, keys, s->head_dim_v, s->head_dim_v);
    p->page_table = of_rows(table, ATTN_I32, 2, step->rows, step->most);
    p->seqlens_k = of_rows(lengths, ATTN_I32, 1, step->rows, 0);
    if (step->k_scaled) p->k_scale = of_rows(step->k_scale, ATTN_F32, 2, step->rows, s->kv_heads);
    if (step->v_scaled) p->v_scale = of_rows(step->v_scale, ATTN_F32, 2, step->rows, s->kv_heads);
}

static attn_status prepare_problem(struct job *job, attn_error *err)
{
    struct job_transaction *const own = job->transaction;
    proto_item *const item = &job->call->items[0];
    struct cache_step *const step = &own->step;
    /* A page table must have at least one column, even if no cache has a page. */
    if (step->most == 0) step->most = 1;
    own->table = calloc((size_t)step->most, sizeof *own->table);
    if (own->table == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    point(&item->problem, step, own->table, step->lengths);
    /* Until the transaction begins, all rows of the page table are the same row of zeros (stride 0). */
    item->problem.page_table.stride[0] = 0;
    /* The caches have different lengths, so the mask is aligned at the end: its last column is for the last key of each
     * cache. */
    item->problem.keep_mask_at_end = item->problem.keep_mask.rank > 0;
    /* In an observe request (statistics of probabilities), key_mass and the default range of keys cover as many keys as
     * the longest cache has. */
    if (item->problem.op == ATTN_OP_OBSERVE) {
        item->problem.observe.shown_keys = 1;
        for (int i = 0; i < step->rows; i++)
            if (step->lengths[i] > item->problem.observe.shown_keys)
                item->problem.observe.shown_keys = step->lengths[i];
    }
    return proto_item_prepare(item, err);
}

/* Deletes the cache of a sequence whose first request failed. Later requests of the sequence are then refused.
 * Otherwise they would attend to an empty cache. */
static void drop_started(struct job *job)
{
    char *const id = job->transaction->started;
    if (*id) (void)caches_delete(job->caches, job->caller, id, NULL);
    *id = '\0';
}

/* If an error names a member of a cache's description, such as head_dim, changes the error to name the request's tensor
 * instead. The client has not made this cache itself, and so does not know that member. */
static void point_at_tensor(attn_error *err)
{
    static const struct {
        const char *of_cache, *of_tensor;
    } members[] = { { "/kv_heads", "/k/shape/2" },
                    { "/head_dim", "/k/shape/3" },
                    { "/head_dim_v", "/v/shape/3" },
                    { "/dtype", "/k/dtype" } };
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        if (strcmp(err->member, members[i].of_cache) == 0) {
            snprintf(err->member, sizeof err->member, "%s", members[i].of_tensor);
            return;
        }
}

/* Finds the cache of the request's sequence (Triton's protocol), or makes it if the request starts the sequence. */
static attn_status name_sequence(struct job *job, attn_error *err)
{
    const proto_sequence *const sequence = &job->call->sequence;
    proto_item *const item = &job->call->items[0];
    const attn_problem *const p = &item->problem;
    if (sequence->start && p->k.rank == 0)
        return attn_fail(err, ATTN_INVALID, "/parameters/sequence_start",
                         "sequence_start: the first request of a sequence has k and v, its keys and values");
    const struct cache_shape shape = { p->k.shape[2], p->k.shape[3], p->v.rank ? p->v.shape[3] : p->k.shape[3],
                                       p->k.dtype,    false,         CACHES_PAGE_SIZE };
    char id[CACHE_ID_BYTES];
    const attn_status status = caches_sequence(job->caches, job->caller, sequence->id, sequence->start ? &shape : NULL,
                                               id, err);
    if (status != ATTN_OK && sequence->start && err) point_at_tensor(err);
    if (status != ATTN_OK) return status;
    if (sequence->start) memcpy(job->transaction->started, id, sizeof id);
    item->caches = calloc(1, sizeof *item->caches);
    if (item->caches == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    memcpy(item->caches[0], id, sizeof id);
    item->cache_count = 1;
    return ATTN_OK;
}

attn_status transaction_prepare(struct job *job, attn_error *err)
{
    struct job_transaction *const own = calloc(1, sizeof *own);
    assert(job->call->count == 1 && job->transaction == NULL);
    if (own == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    job->transaction = own;
    if (*job->call->sequence.id) {
        const attn_status status = name_sequence(job, err);
        if (status != ATTN_OK) return status;
    }

    proto_item *const item = &job->call->items[0];
    const attn_problem *const p = &item->problem;
    const bool computes = proto_operations[job->call->op].computes;
    const int rows = item->cache_count;
    attn_status status;
    assert(rows > 0 && sizeof *item->caches >= CACHE_ID_BYTES);
    if (computes && *job->call->sequence.id && p->q.shape[0] != rows)
        return attn_fail(err, ATTN_INVALID, "/q/shape/0", "q: shape[0] is %lld, must be 1, as a sequence has one row",
                         (long long)p->q.shape[0]);
    if (computes && p->q.shape[0] != rows)
        return attn_fail(err, ATTN_INVALID, "/caches", "caches: has %d ids, must have %lld, one for each row of q",
                         rows, (long long)p->q.shape[0]);
    own->ids = calloc((size_t)rows, sizeof *own->ids);
    if (own->ids == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    for (int i = 0; i < rows; i++) copy_id(own->ids[i], item->caches[i]);
    const int64_t append = p->k.rank ? p->k.shape[p->k.rank - 3] : 0;
    status = caches_look(job->caches, job->caller, own->ids, rows, append, !computes, &own->step, err);
    if (status == ATTN_OK && computes) status = check_q(&p->q, &own->step.shape, err);
    if (status == ATTN_OK) status = take_new(job, &own->step, err);
    if (status == ATTN_OK && computes) status = prepare_problem(job, err);
    own->step.ends = job->call->sequence.end;
    job->blocked = true;
    job->part.device = own->step.device;
    job->results[0].lengths = own->step.lengths;
    job->results[0].length_count = rows;
    return status;
}

/* ---- Beginning and ending a transaction -------------------------------------------------------------------------- */

attn_status transaction_begin(struct job *job, uint64_t scan, bool *wait, attn_error *err)
{
    struct cache_step *const step = &job->transaction->step;
    attn_status status = ATTN_OK;
    *wait = false;
    /* A transaction that has waited before must usually wait longer. caches_ask() shows this before memory for the page
     * tables is leased. */
    if (scan != 0) status = caches_ask(step, scan, wait, err);
    if (status != ATTN_OK || *wait) return status;
    size_t bytes;
    status = caches_table_bytes(step, &bytes, err);
    if (status == ATTN_OK) status = staging_lease(job->staging, job->caller, bytes, &job->tables, err);
    if (status == ATTN_OK) status = caches_begin(step, scan, job->tables->memory, wait, err);
    if (status != ATTN_OK || *wait) {
        staging_release(job->staging, job->tables);
        job->tables = NULL;
        return status;
    }
    job->tables_used = bytes;
    job->blocked = false;
    if (proto_operations[job->call->op].computes) {
        point(&job->call->items[0].problem, step, step->table, step->table_lengths);
        job->call->items[0].problem.prefix_keys = step->shares ? step->prefix_keys : NULL;
    }
    return ATTN_OK;
}

static void count(const struct job *job)
{
    const struct cache_step *const step = &job->transaction->step;
    int64_t attended = 0;
    for (int i = 0; i < step->rows; i++) attended += step->lengths[i];
    metrics_add(METRIC_CACHE_TOKENS, "appended", NULL, (double)(step->append * step->rows));
    if (proto_operations[job->call->op].computes) metrics_add(METRIC_CACHE_TOKENS, "attended", NULL, (double)attended);
}

void transaction_end(struct job *job, bool commit)
{
    if (job->transaction == NULL) return;
    if (job->transaction->step.begun) {
        if (commit) count(job);
        caches_end(&job->transaction->step, commit);
        job->transaction->committed = commit;
    }
    if (commit) *job->transaction->started = '\0';
    else drop_started(job);
}

bool transaction_has_begun(const struct job *job)
{
    return job->transaction && job->transaction->step.begun;
}

bool transaction_is_committed(const struct job *job)
{
    return job->transaction && job->transaction->committed;
}

void transaction_free(struct job *job)
{
    if (job->transaction == NULL) return;
    drop_started(job);
    caches_drop_step(&job->transaction->step);
    free(job->transaction->ids);
    free(job->transaction->table);
    free(job->transaction);
    job->transaction = NULL;
}

int64_t transaction_bytes(const struct job *job)
{
    const struct cache_step *const step = &job->transaction->step;
    const struct cache_shape *const s = &step->shape;
    const int64_t columns = s->head_dim + (s->latent ? 0 : s->head_dim_v);
    int64_t positions = 0;
    for (int i = 0; i < step->rows; i++) positions += step->lengths[i];
    return positions * s->kv_heads * columns * (int64_t)attn_dtype_bytes(s->dtype);
}

int64_t transaction_moves(const struct job *job, const attn_move **moves)
{
    *moves = job->transaction ? job->transaction->step.moves : NULL;
    return job->transaction ? job->transaction->step.move_count : 0;
}
