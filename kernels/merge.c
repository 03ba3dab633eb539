/* merge.c: the checks of attn_merge(), and its loops on the host.
 *
 * The gradients of a part p need the number dout . (out_p - out), where out is the sum over parts q of w_q out_q. The
 * number is computed as dout . out_p - sum_q w_q (dout . out_q), with each dot product computed once. The stored out is
 * not read, because it may be rounded to 16 bits or not wanted. */
#include "merge.h"

#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "tiles.h"

/* ---- Merging rows ------------------------------------------------------------------------------------------------ */

/* The loops process COLUMNS numbers of a row at a time, and a dot product is computed as LANES partial sums. These
 * constant lengths let the compiler vectorise the loops. At the end of a row, missing columns are zeros. */
enum { COLUMNS = 64, LANES = 8 };

/* Values for one row of a merge: each partial result's share of the row, and its dot product dout . out. `mean` is the
 * mean of these products, weighted by the shares. */
struct weights {
    float share[ATTN_MERGE_PARTS], dot[ATTN_MERGE_PARTS], mean;
};

static void load(float to[COLUMNS], attn_dtype dtype, const void *from, int64_t at, int64_t columns)
{
    if (columns < COLUMNS) memset(to, 0, COLUMNS * sizeof *to);
    if (dtype == ATTN_F32) memcpy(to, (const float *)from + at, (size_t)columns * sizeof *to);
    else
        for (int64_t d = 0; d < columns; d++) to[d] = (float)attn_load(dtype, from, at + d);
}

static float dot_of(const float a[COLUMNS], const float b[COLUMNS])
{
    float lanes[LANES] = { 0 }, sum = 0;
    for (int d = 0; d < COLUMNS; d += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += a[d + l] * b[d + l];
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}

static void store(attn_dtype dtype, void *to, int64_t at, const float *from, int64_t columns)
{
    if (dtype == ATTN_F32) memcpy((float *)to + at, from, (size_t)columns * sizeof *from);
    else
        for (int64_t d = 0; d < columns; d++) attn_store(dtype, to, at + d, from[d]);
}

static bool is_empty(const attn_merge_plan *m, const attn_merge_row *row, int p)
{
    return m->part_lse[p][row->lse_at] == -INFINITY;
}

static void find_shares(const attn_merge_plan *m, const attn_merge_row *row, struct weights *w)
{
    for (int p = 0; p < m->count; p++) w->share[p] = attn_merge_share(row, m->part_lse[p][row->lse_at]);
}

/* Merges columns [first, first + columns) of a row: adds up the outs of the partial results, each multiplied by its
 * share. */
static void merge_columns(const attn_merge_plan *m, const attn_merge_row *row, const struct weights *w, int64_t first,
                          int64_t columns)
{
    const int64_t from = attn_at(&m->out_of_part, row->b, row->h, row->i) + first;
    float sum[COLUMNS] = { 0 }, part[COLUMNS];
    for (int p = 0; p < m->count; p++) {
        if (is_empty(m, row, p)) continue;
        load(part, m->out_of_part.dtype, m->part_out[p], from, columns);
        attn_merge_add(sum, w->share[p], part, COLUMNS);
    }
    store(m->out.dtype, m->out.data, attn_at(&m->out, row->b, row->h, row->i) + first, sum, columns);
}

/* For each partial result (part), adds the products of columns [first, first + columns) of a row to its dot product
 * dout . out. If gradients of the parts are wanted, the function also writes these columns of the gradients dout_p. */
static void back_columns(const attn_merge_plan *m, const attn_merge_row *row, struct weights *w, int64_t first,
                         int64_t columns)
{
    const int64_t from = attn_at(&m->out_of_part, row->b, row->h, row->i) + first;
    const int64_t to = attn_at(&m->dout_of_part, row->b, row->h, row->i) + first;
    float dout[COLUMNS], part[COLUMNS];
    load(dout, m->dout.dtype, m->dout.data, attn_at(&m->dout, row->b, row->h, row->i) + first, columns);
    for (int p = 0; p < m->count; p++) {
        const bool empty = is_empty(m, row, p);
        if (!empty) load(part, m->out_of_part.dtype, m->part_out[p], from, columns);
        if (!empty) w->dot[p] += dot_of(dout, part);
        if (!m->gradients) continue;
        if (empty) memset(part, 0, sizeof part);
        for (int d = 0; d < COLUMNS && !empty; d++) part[d] = w->share[p] * dout[d];
        store(m->dout_of_part.dtype, m->part_dout[p], to, part, columns);
    }
}

/* For one row, computes dout . out of each part (partial result), and the mean of these products, weighted by each
 * part's share of the row (attn_merge_share()). */
static void find_dots(const attn_merge_plan *m, const attn_merge_row *row, struct weights *w)
{
    for (int p = 0; p < m->count; p++) w->dot[p] = 0;
    for (int64_t d = 0; d < m->Dv; d += COLUMNS) back_columns(m, row, w, d, attn_min64(COLUMNS, m->Dv - d));
    w->mean = 0;
    for (int p = 0; p < m->count; p++)
        if (!is_empty(m, row, p)) w->mean += w->share[p] * w->dot[p];
}

static void write_gradients(const attn_merge_plan *m, const attn_merge_row *row, struct weights *w)
{
    const int64_t to = attn_at(&m->dlse_of_part, row->b, row->h, row->i);
    find_dots(m, row, w);
    for (int p = 0; p < m->count; p++)
        m->part_dlse[p][to] = attn_merge_dlse(m, row, m->part_lse[p][row->lse_at], w->dot[p], w->mean);
}

void attn_merge_rows(const attn_merge_plan *m, int64_t first, int64_t end)
{
    struct weights w;
    for (int64_t n = first; n < end; n++) {
        const attn_merge_row row = attn_merge_row_of(m, n);
        find_shares(m, &row, &w);
        for (int64_t d = 0; d < m->Dv && m->out.data; d += COLUMNS)
            merge_columns(m, &row, &w, d, attn_min64(COLUMNS, m->Dv - d));
        if (m->lse.data) ((float *)m->lse.data)[attn_at(&m->lse, row.b, row.h, row.i)] = attn_merge_lse(&row);
        if (m->gradients) write_gradients(m, &row, &w);
    }
}

void attn_merge_sink(const attn_merge_plan *plan, int64_t h)
{
    attn_merge_plan m = *plan;
    struct weights w;
    double sum = 0;
    m.gradients = false; /* only dsinks is computed here, and no gradients of the parts */
    for (int64_t n = h; n < attn_merge_count(&m) && m.sinks[h] != -INFINITY; n += m.H) {
        const attn_merge_row row = attn_merge_row_of(&m, n);
        find_shares(&m, &row, &w);
        find_dots(&m, &row, &w);
        sum += attn_merge_dlse(&m, &row, row.sink, 0, w.mean);
    }
    m.dsinks[h] = (float)sum;
}

void attn_merge_all(const attn_merge_plan *m)
{
    attn_merge_rows(m, 0, attn_merge_count(m));
    for (int64_t h = 0; h < m->H && m->dsinks; h++) attn_merge_sink(m, h);
}

/* ---- Checking the tensors of a merge ----------------------------------------------------------------------------- */

struct expected {
    const attn_tensor *tensor;
    int part; /* index of the part (partial result) to which the tensor belongs; -1: it belongs to no part */
    /* name of the request's list that contains the tensor: "parts", or "gradients" for the gradients of the parts */
    const char *of;
    const char *name; /* "lse" */
    unsigned dtypes;  /* set of the allowed dtypes: one bit for each attn_dtype */
    int rank;
    int64_t shape[ATTN_MAX_RANK];
    const char *axes[ATTN_MAX_RANK]; /* names of the axes in messages, such as "Sq" */
    bool has_memory;                 /* whether the tensor must have memory, unless it has no elements */
};

enum { NAME_BYTES = 24 };

/* Writes the name of a tensor for messages: "parts.3.lse", or as a JSON pointer "/parts/3/lse". */
static void name_of(const struct expected *e, bool pointer, char name[NAME_BYTES])
{
    const char *const dot = pointer ? "/" : ".";
    if (e->part < 0) snprintf(name, NAME_BYTES, "%s%s", pointer ? dot : "", e->name);
    else snprintf(name, NAME_BYTES, "%s%s%s%d%s%s", pointer ? dot : "", e->of, dot, e->part, dot, e->name);
}

/* Writes an error whose JSON pointer leads to the member `rest` of the tensor (such as "/shape/1"). The message is the
 * tensor's name, followed by the text `rule`. */
static attn_status refuse(const struct expected *e, const char *rest, const char *rule, attn_error *err)
{
    char member[64], pointer[NAME_BYTES], name[NAME_BYTES];
    name_of(e, true, pointer);
    name_of(e, false, name);
    snprintf(member, sizeof member, "%s%s", pointer, rest);
    return attn_fail(err, ATTN_INVALID, member, "%s: %s", name, rule);
}

static attn_status check_tensor(const struct expected *e, attn_error *err)
{
    const attn_tensor *const t = e->tensor;
    const bool is_out = strstr(e->name, "out") != NULL;
    /* axes[] has enough room: the names of four axes take 32 bytes */
    char rule[160], rest[24], list[ATTN_DTYPE_LIST_BYTES], axes[64];
    int64_t bytes, elements;
    if ((unsigned)t->dtype >= ATTN_DTYPE_COUNT || !(e->dtypes >> t->dtype & 1)) {
        snprintf(rule, sizeof rule, "dtype is %s, must be %s%s",
                 (unsigned)t->dtype < ATTN_DTYPE_COUNT ? attn_dtype_name(t->dtype) : "unknown",
                 attn_dtype_list(e->dtypes, list),
                 is_out && e->part > 0 ? e->of[0] == 'p' ? ", as in parts.0.out" : ", as in gradients.0.out" : "");
        return refuse(e, "/dtype", rule, err);
    }
    if (t->rank != e->rank) {
        size_t used = 0;
        axes[0] = '\0';
        for (int a = 0; a < e->rank; a++)
            used += (size_t)snprintf(axes + used, sizeof axes - used, "%s%s", a ? ", " : "", e->axes[a]);
        snprintf(rule, sizeof rule, "has %d dimensions, must have %d: [%s]", t->rank, e->rank, axes);
        return refuse(e, "/shape", rule, err);
    }
    for (int a = 0; a < t->rank; a++) {
        if (t->shape[a] == e->shape[a]) continue;
        snprintf(rule, sizeof rule, "shape[%d] is %lld, must be %lld, the %s of parts.0.out", a, (long long)t->shape[a],
                 (long long)e->shape[a], e->axes[a]);
        snprintf(rest, sizeof rest, "/shape/%d", a);
        return refuse(e, rest, rule, err);
    }
    if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes)) return refuse(e, "/shape", "its size overflows", err);
    if (e->has_memory && attn_shape_elements(t->rank, t->shape, &elements) && elements > 0 && !t->data)
        return refuse(e, "", "has no memory", err);
    if (t->shape[t->rank - 1] > 1 && t->stride[t->rank - 1] != 1 && (is_out || t->rank == 1))
        return refuse(e, "", "the stride of the last axis must be 1", err);
    return ATTN_OK;
}

/* Checks that a tensor of a part has the strides of the first part's tensor, because attn_merge_plan stores one set of
 * strides for all parts. */
static attn_status check_strides(const struct expected *e, const attn_tensor *first, attn_error *err)
{
    if (memcmp(e->tensor->stride, first->stride, (size_t)first->rank * sizeof *first->stride) == 0) return ATTN_OK;
    return refuse(e, "", "must have the strides of the first part", err);
}

/* Sizes of a merge, taken from the first partial result, and the names of these sizes in messages. */
struct shape {
    int rank;
    int64_t out[ATTN_MAX_RANK], lse[ATTN_MAX_RANK];
    const char *out_axes[ATTN_MAX_RANK], *lse_axes[ATTN_MAX_RANK];
    bool has_memory; /* whether the merge is about to run, so that each of its tensors must have memory */
};

static attn_status shape_of(const attn_merge_problem *m, struct shape *s, attn_error *err)
{
    static const char *const names[] = { "batch", "rows", "heads", "head size" };
    static const int bshd[] = { 0, 1, 2, 3 }, bhsd[] = { 0, 2, 1, 3 }, packed[] = { 1, 2, 3 };
    static const int lse[] = { 0, 2, 1 }, packed_lse[] = { 2, 1 };
    const attn_tensor *const out = &m->parts[0].out;
    const struct expected e = { .tensor = out, .part = 0, .of = "parts", .name = "out" };
    if (out->rank != 3 && out->rank != 4)
        return refuse(&e, "/shape", "must have 4 dimensions, [B, Sq, H, Dv], or packed 3, [total_q, H, Dv]", err);
    if (out->rank == 3 && m->layout == ATTN_BHSD)
        return attn_fail(err, ATTN_INVALID, "/layout", "layout: is bhsd, must be bshd with packed parts");
    const int *const axes = out->rank == 3 ? packed : m->layout == ATTN_BHSD ? bhsd : bshd;
    const int *const of_lse = out->rank == 3 ? packed_lse : lse;
    int64_t sizes[4] = { 1 };
    s->rank = out->rank;
    for (int a = 0; a < out->rank; a++) sizes[axes[a]] = s->out[a] = out->shape[a], s->out_axes[a] = names[axes[a]];
    for (int a = 0; a < out->rank - 1; a++) s->lse[a] = sizes[of_lse[a]], s->lse_axes[a] = names[of_lse[a]];
    return ATTN_OK;
}

/* Returns the dtypes and the shape that the checks require of a tensor named "out", "dout", "lse" or "dlse". */
static struct expected expect(const struct shape *s, const attn_tensor *t, int part, const char *of, const char *name)
{
    struct expected e = { .tensor = t, .part = part, .of = of, .name = name };
    const bool is_out = strstr(name, "out") != NULL;
    e.dtypes = is_out ? ATTN_DTYPES_BACKWARD : ATTN_DTYPE_BIT(F32);
    e.rank = is_out ? s->rank : s->rank - 1;
    e.has_memory = s->has_memory;
    memcpy(e.shape, is_out ? s->out : s->lse, sizeof e.shape);
    memcpy(e.axes, is_out ? s->out_axes : s->lse_axes, sizeof e.axes);
    return e;
}

static attn_status check_list(const struct shape *s, const attn_result *list, int count, const char *of,
                              attn_error *err)
{
    attn_status status = ATTN_OK;
    for (int p = 0; p < count && status == ATTN_OK; p++) {
        struct expected out = expect(s, &list[p].out, p, of, "out"), lse = expect(s, &list[p].lse, p, of, "lse");
        if (p > 0) out.dtypes = 1u << list[0].out.dtype;
        status = check_tensor(&out, err);
        if (status == ATTN_OK) status = check_tensor(&lse, err);
        if (status == ATTN_OK) status = check_strides(&out, &list[0].out, err);
        if (status == ATTN_OK) status = check_strides(&lse, &list[0].lse, err);
    }
    return status;
}

enum { OTHERS = 6 };
static void others_of(const attn_merge_problem *m, const struct shape *s, struct expected others[OTHERS])
{
    const struct expected head = { .part = -1,
                                   .dtypes = ATTN_DTYPE_BIT(F32),
                                   .rank = 1,
                                   .shape = { s->lse[s->rank - 3] },
                                   .axes = { "heads" },
                                   .has_memory = s->has_memory };
    others[0] = others[1] = head;
    others[0].name = "sinks", others[0].tensor = &m->sinks;
    others[1].name = "dsinks", others[1].tensor = &m->dsinks;
    others[2] = expect(s, &m->dout, -1, "", "dout");
    others[3] = expect(s, &m->dlse, -1, "", "dlse");
    others[4] = expect(s, &m->whole.out, -1, "", "out");
    others[5] = expect(s, &m->whole.lse, -1, "", "lse");
}

static attn_status check(const attn_merge_problem *m, bool has_memory, attn_error *err)
{
    struct shape s = { .has_memory = has_memory };
    struct expected others[OTHERS];
    if (m->count < 1 || m->count > ATTN_MERGE_PARTS)
        return attn_fail(err, ATTN_INVALID, "/parts", "parts: there are %d, must be 1 to %d", m->count,
                         ATTN_MERGE_PARTS);
    attn_status status = shape_of(m, &s, err);
    if (status == ATTN_OK) status = check_list(&s, m->parts, m->count, "parts", err);
    if (status == ATTN_OK) others_of(m, &s, others);
    for (int i = 0; i < OTHERS && status == ATTN_OK; i++)
        if (others[i].tensor->rank) status = check_tensor(&others[i], err);
    if (status != ATTN_OK) return status;
    if (m->dsinks.rank && !m->sinks.rank) return attn_fail(err, ATTN_INVALID, "/dsinks", "dsinks: there are no sinks");
    if ((m->gradients || m->dsinks.rank || m->dlse.rank) && !m->dout.rank)
        return attn_fail(err, ATTN_INVALID, "/dout", "dout: is missing, must be given for gradients");
    return m->gradients ? check_list(&s, m->gradients, m->count, "gradients", err) : ATTN_OK;
}

attn_status attn_merge_check(const attn_merge_problem *m, attn_error *err)
{
    return check(m, false, err);
}

/* ---- Planning and running a merge -------------------------------------------------------------------------------- */

static attn_view out_view(const attn_tensor *t, attn_layout layout)
{
    if (t->rank == 0) return (attn_view){ 0 };
    const int rows = t->rank == 3 ? 0 : layout == ATTN_BHSD ? 2 : 1, heads = t->rank == 3 ? 1 : 3 - rows;
    return (attn_view){ t->data, t->dtype, t->rank == 3 ? 0 : t->stride[0], t->stride[heads], t->stride[rows] };
}

static attn_view lse_view(const attn_tensor *t)
{
    if (t->rank == 0) return (attn_view){ 0 };
    const int axis = t->rank - 2; /* index of the axis of heads: lse is [B, H, Sq] or [H, total_q] */
    return (attn_view){ t->data, ATTN_F32, axis ? t->stride[0] : 0, t->stride[axis], t->stride[axis + 1] };
}

static attn_merge_plan plan_of(const attn_merge_problem *m)
{
    const attn_tensor *const out = &m->parts[0].out;
    const bool packed = out->rank == 3;
    /* sizes of the last three axes of out: rows, heads and columns; in layout bhsd heads, rows and columns */
    const int64_t *const s = out->shape + out->rank - 3;
    const int rows = m->layout == ATTN_BHSD && !packed;
    attn_merge_plan plan = { .B = packed ? 1 : out->shape[0], .Sq = s[rows], .H = s[1 - rows], .Dv = s[2] };
    plan.count = m->count;
    plan.gradients = m->gradients != NULL;
    for (int p = 0; p < m->count; p++) {
        plan.part_out[p] = m->parts[p].out.data;
        plan.part_lse[p] = m->parts[p].lse.data;
        if (!m->gradients) continue;
        plan.part_dout[p] = m->gradients[p].out.data;
        plan.part_dlse[p] = m->gradients[p].lse.data;
    }
    plan.out_of_part = out_view(out, m->layout);
    plan.lse_of_part = lse_view(&m->parts[0].lse);
    if (m->gradients) plan.dout_of_part = out_view(&m->gradients[0].out, m->layout);
    if (m->gradients) plan.dlse_of_part = lse_view(&m->gradients[0].lse);
    plan.out_of_part.data = plan.lse_of_part.data = plan.dout_of_part.data = plan.dlse_of_part.data = NULL;
    plan.sinks = m->sinks.data;
    plan.dsinks = m->dsinks.data;
    plan.dout = out_view(&m->dout, m->layout);
    plan.dlse = lse_view(&m->dlse);
    plan.out = out_view(&m->whole.out, m->layout);
    plan.lse = lse_view(&m->whole.lse);
    return plan;
}

attn_status attn_merge(attn_stream *stream, const attn_merge_problem *m, attn_error *err)
{
    const attn_status status = check(m, true, err);
    if (status != ATTN_OK) return status;
    const attn_merge_plan plan = plan_of(m);
    if (attn_merge_count(&plan) == 0 && !plan.dsinks) return ATTN_OK;
    return stream->device->backend->merge(stream, &plan, err);
}
