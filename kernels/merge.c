/* merge.c: attn_merge(): its checks, and its loops on the host. */
#include "merge.h"

#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "tiles.h"

/* ---- The rows ---------------------------------------------------------------------------------------------------- */

enum { COLUMNS = 64 }; /* columns that are summed at a time */

/* Merges columns [first, first + columns) of a row of out. */
static void merge_columns(const attn_merge_plan *m, const attn_merge_row *row, int64_t first, int64_t columns)
{
    const int64_t from = attn_at(&m->out_of_part, row->b, row->h, row->i) + first;
    const int64_t to = attn_at(&m->out, row->b, row->h, row->i) + first;
    float sum[COLUMNS] = { 0 }, part[COLUMNS];
    for (int p = 0; p < m->count; p++) {
        if (m->part_lse[p][row->lse_at] == -INFINITY) continue;
        for (int64_t d = 0; d < columns; d++)
            part[d] = (float)attn_load(m->out_of_part.dtype, m->part_out[p], from + d);
        attn_merge_add(sum, attn_merge_share(m, row, p), part, columns);
    }
    for (int64_t d = 0; d < columns; d++) attn_store(m->out.dtype, m->out.data, to + d, sum[d]);
}

void attn_merge_rows(const attn_merge_plan *m, int64_t first, int64_t end)
{
    for (int64_t n = first; n < end; n++) {
        const attn_merge_row row = attn_merge_row_of(m, n);
        for (int64_t d = 0; d < m->Dv && m->out.data; d += COLUMNS)
            merge_columns(m, &row, d, attn_min64(COLUMNS, m->Dv - d));
        if (m->lse.data) ((float *)m->lse.data)[attn_at(&m->lse, row.b, row.h, row.i)] = attn_merge_lse(&row);
    }
}

/* ---- The check --------------------------------------------------------------------------------------------------- */

/* Refuses a tensor. `where` is "/parts/3", or "" for the result; `name` is "out" or "lse". */
static attn_status refuse(attn_error *err, const char *where, const char *name, const char *rule)
{
    char member[64];
    snprintf(member, sizeof member, "%s/%s", where, name);
    return attn_fail(err, ATTN_INVALID, member, "%s: %s", member + 1, rule);
}

/* Checks that the tensor has this shape, memory, and a last axis without gaps. */
static attn_status check_tensor(const attn_tensor *t, unsigned dtypes, int rank, const int64_t *shape,
                                const char *where, const char *name, attn_error *err)
{
    int64_t elements;
    if ((unsigned)t->dtype >= ATTN_DTYPE_COUNT || !(dtypes >> t->dtype & 1))
        return refuse(err, where, name, "its dtype must be float32, of out float16 or bfloat16 too");
    if (t->rank != rank || memcmp(t->shape, shape, (size_t)rank * sizeof *shape) != 0)
        return refuse(err, where, name,
                      "out must be [B, Sq, H, Dv] or [total_q, H, Dv], lse the same without Dv and "
                      "with its heads before its rows, in all parts and the result");
    if (!attn_shape_bytes(t->dtype, rank, shape, &elements)) return refuse(err, where, name, "its size overflows");
    if (elements > 0 && !t->data) return refuse(err, where, name, "has no memory");
    if (name[0] == 'o' && t->shape[rank - 1] > 1 && t->stride[rank - 1] != 1)
        return refuse(err, where, name, "the stride of the last axis must be 1");
    return ATTN_OK;
}

static attn_view out_view(const attn_tensor *t)
{
    const int axis = t->rank - 3; /* the axis of rows */
    return (attn_view){ t->data, t->dtype, axis ? t->stride[0] : 0, t->stride[axis + 1], t->stride[axis] };
}

static attn_view lse_view(const attn_tensor *t)
{
    const int axis = t->rank - 2; /* the axis of heads */
    return (attn_view){ t->data, ATTN_F32, axis ? t->stride[0] : 0, t->stride[axis], t->stride[axis + 1] };
}

/* Checks a part. Its dtype and strides must be those of the first part. */
static attn_status check_part(const attn_result *part, const attn_result *first, const int64_t *lse_shape,
                              const char *where, attn_error *err)
{
    const int rank = first->out.rank;
    attn_status status = check_tensor(&part->out, ATTN_DTYPES_BACKWARD, rank, first->out.shape, where, "out", err);
    if (status == ATTN_OK)
        status = check_tensor(&part->lse, ATTN_DTYPE_BIT(F32), rank - 1, lse_shape, where, "lse", err);
    if (status != ATTN_OK) return status;
    if (part->out.dtype != first->out.dtype) return refuse(err, where, "out", "all parts must have one dtype");
    if (memcmp(part->out.stride, first->out.stride, (size_t)rank * sizeof *part->out.stride) != 0)
        return refuse(err, where, "out", "all parts must have the same strides");
    if (memcmp(part->lse.stride, first->lse.stride, (size_t)(rank - 1) * sizeof *part->lse.stride) != 0)
        return refuse(err, where, "lse", "all parts must have the same strides");
    return ATTN_OK;
}

/* Makes the plan of a merge whose tensors passed the checks. */
static attn_status plan_of(const attn_result *parts, int count, const attn_result *whole, attn_merge_plan *plan,
                           attn_error *err)
{
    if (count < 1 || count > ATTN_MERGE_PARTS)
        return attn_fail(err, ATTN_INVALID, "/parts", "parts: there are %d, must be 1 to %d", count, ATTN_MERGE_PARTS);
    const attn_tensor *out = &parts[0].out;
    const int rank = out->rank;
    if (rank != 3 && rank != 4) return refuse(err, "/parts/0", "out", "must have 3 or 4 axes");
    const int64_t *const rows = out->shape + rank - 3; /* sizes of the axes of rows, heads and columns */
    const int64_t lse_shape[] = { rank == 4 ? out->shape[0] : rows[1], rank == 4 ? rows[1] : rows[0], rows[0] };
    attn_status status = ATTN_OK;
    *plan = (attn_merge_plan){ .B = rank == 4 ? out->shape[0] : 1, .Sq = rows[0], .H = rows[1], .Dv = rows[2] };
    plan->count = count;
    for (int p = 0; p < count && status == ATTN_OK; p++) {
        char where[24];
        snprintf(where, sizeof where, "/parts/%d", p);
        status = check_part(&parts[p], &parts[0], lse_shape, where, err);
        plan->part_out[p] = parts[p].out.data;
        plan->part_lse[p] = parts[p].lse.data;
    }
    if (status == ATTN_OK && whole->out.rank)
        status = check_tensor(&whole->out, ATTN_DTYPES_BACKWARD, rank, out->shape, "", "out", err);
    if (status == ATTN_OK && whole->lse.rank)
        status = check_tensor(&whole->lse, ATTN_DTYPE_BIT(F32), rank - 1, lse_shape, "", "lse", err);
    if (status != ATTN_OK) return status;
    plan->out_of_part = out_view(out);
    plan->lse_of_part = lse_view(&parts[0].lse);
    plan->out_of_part.data = plan->lse_of_part.data = NULL;
    if (whole->out.rank) plan->out = out_view(&whole->out);
    if (whole->lse.rank) plan->lse = lse_view(&whole->lse);
    return ATTN_OK;
}

attn_status attn_merge(attn_stream *stream, const attn_result *parts, int count, const attn_result *whole,
                       attn_error *err)
{
    attn_merge_plan plan;
    const attn_status status = plan_of(parts, count, whole, &plan, err);
    if (status != ATTN_OK || attn_merge_count(&plan) == 0) return status;
    return stream->device->backend->merge(stream, &plan, err);
}
