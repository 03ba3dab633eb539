/* where.c: lists the elements with the largest errors, and says where a tensor has wrong elements.
 *
 * Wrong elements are counted along each axis of a tensor: batch rows, heads, queries or keys, columns. A sentence names
 * each axis on which only some indices have wrong elements: the indices as a range, as a list, or as every n-th index.
 * The sentence leaves out an axis on which all indices have wrong elements. The sentence may name elements that are
 * correct, but it never leaves out a wrong one. */
#include "kernels/judge/state.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { AXES = 4 };

/* Counts of a tensor's wrong elements: for each index of each axis, the number of wrong elements that have this
 * index. */
struct counts {
    int64_t size[AXES]; /* sizes of the four axes of `wrong`: batch rows, heads, queries (or keys), columns */
    int64_t *wrong[AXES];
    int64_t total;
};

static bool open_counts(struct counts *c)
{
    bool all = true;
    for (int a = 0; a < AXES; a++) all &= (c->wrong[a] = calloc((size_t)c->size[a] + 1, sizeof *c->wrong[a])) != NULL;
    return all;
}

static void close_counts(struct counts *c)
{
    for (int a = 0; a < AXES; a++) free(c->wrong[a]);
}

/* ---- Sentences that say where wrong elements are ----------------------------------------------------------------- */

struct words {
    char *text;
    size_t room, used;
};

static void put(struct words *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

#include <stdarg.h>
static void put(struct words *w, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(w->text + w->used, w->room - w->used, format, args);
    va_end(args);
    if (n > 0) w->used += (size_t)n < w->room - w->used ? (size_t)n : w->room - w->used - 1;
}

/* Returns the distance between neighbouring indices that have wrong elements, if all these distances are equal;
 * otherwise 0. */
static int64_t step_of(const int64_t *wrong, int64_t size, int64_t *first, int64_t *last, int64_t *count)
{
    int64_t step = 0;
    *first = *last = -1, *count = 0;
    for (int64_t n = 0; n < size; n++) {
        if (wrong[n] == 0) continue;
        if (*first < 0) *first = n;
        else if (step == 0 && *count == 1) step = n - *last;
        else if (n - *last != step) step = -1;
        *last = n;
        ++*count;
    }
    return *count == 1 ? 1 : step < 0 ? 0 : step;
}

/* Writes which indices of an axis have wrong elements, such as "queries 128 to 255". Writes nothing and returns false
 * if all indices have wrong elements. */
static bool put_axis(struct words *w, const char *one, const char *many, const int64_t *wrong, int64_t size)
{
    enum { LISTED = 4 };
    int64_t first, last, count;
    const int64_t step = step_of(wrong, size, &first, &last, &count);
    if (count == size || size <= 1) return false;
    if (count == 1) put(w, "%s %lld", one, (long long)first);
    else if (step == 1) put(w, "%s %lld to %lld", many, (long long)first, (long long)last);
    else if (count <= LISTED) {
        const char *between = "";
        put(w, "%s ", many);
        for (int64_t n = first; n <= last; n++)
            if (wrong[n]) put(w, "%s%lld", between, (long long)n), between = ", ";
    } else if (step > 1)
        put(w, "every %lldth of the %s from %lld to %lld", (long long)step, many, (long long)first, (long long)last);
    else put(w, "%lld %s between %lld and %lld", (long long)count, many, (long long)first, (long long)last);
    return true;
}

static void put_place(const struct counts *c, bool of_keys, bool packed, char *text, size_t room)
{
    static const char *const one[] = { "batch row", "head", "query", "column" };
    static const char *const many[] = { "batch rows", "heads", "queries", "columns" };
    static const int order[AXES] = { 2, 3, 1, 0 };
    struct words w = { text, room, 0 };
    bool any = false, heads = false;
    *text = '\0';
    for (int n = 0; n < AXES; n++) {
        const int a = order[n];
        const char *const single = a == 0 && packed ? "sequence" : a == 2 && of_keys ? "key" : one[a];
        const char *const several = a == 0 && packed ? "sequences" : a == 2 && of_keys ? "keys" : many[a];
        const size_t before = w.used;
        if (any) put(&w, a == 3 ? ", " : " of ");
        if (put_axis(&w, single, several, c->wrong[a], c->size[a])) any = true, heads |= a == 1;
        else w.used = before, text[before] = '\0';
    }
    if (!any) put(&w, "elements of every head, %s and column", of_keys ? "key" : "query");
    else if (!heads && c->size[1] > 1) put(&w, " of every head");
}

/* ---- Counting wrong elements ------------------------------------------------------------------------------------- */

static void index_of(const attn_tensor *t, int64_t at, judge_element *e)
{
    e->rank = t->rank;
    for (int a = t->rank - 1; a >= 0; a--) {
        const int64_t size = t->shape[a] > 0 ? t->shape[a] : 1;
        e->index[a] = at % size;
        at /= size;
    }
}

static double error_of(double got, double want)
{
    if (got == want || (isnan(got) && isnan(want))) return 0;
    const double error = fabs(got - want);
    return isfinite(error) ? error : INFINITY;
}

static void keep_worst(judge_result *result, double *errors, const attn_tensor *t, attn_tensor_id id, int64_t at,
                       double got, double want, double error)
{
    int n = result->worst_count;
    if (n == JUDGE_WORST && !(error > errors[n - 1])) return;
    if (n < JUDGE_WORST) result->worst_count++;
    else n--;
    for (; n > 0 && error > errors[n - 1]; n--) {
        result->worst[n] = result->worst[n - 1];
        errors[n] = errors[n - 1];
    }
    result->worst[n] = (judge_element){ .id = id, .got = got, .want = want };
    index_of(t, at, &result->worst[n]);
    errors[n] = error;
}

struct search {
    const struct frame *f;
    const struct truth *t;
    const attn_tensor *results;
    judge_result *result;
    double errors[JUDGE_WORST]; /* error of each element of result->worst, divided by the tensor's limit */
    struct counts counts;
};

static void look(struct search *s, attn_tensor_id id, int64_t at, const int64_t place[AXES], double got, double want)
{
    judge_tensor *const tensor = &s->result->tensor[id];
    const double error = error_of(got, want);
    if (!(error > tensor->limit)) return;
    keep_worst(s->result, s->errors, &s->results[id], id, at, got, want, error / fmax(tensor->limit, 1e-300));
    tensor->wrong++;
    s->counts.total++;
    for (int a = 0; a < AXES; a++) s->counts.wrong[a][place[a]]++;
}

static void look_at_rows(struct search *s, attn_tensor_id id, int64_t b, int64_t h, int64_t first, int64_t count,
                         int64_t start, int64_t kept)
{
    const int64_t columns = frame_columns(s->f, id);
    const double *const truth = frame_kept(s->t, id);
    for (int64_t r = 0; r < count; r++)
        for (int64_t e = 0; e < columns; e++) {
            int64_t at;
            const double got = frame_got(s->f, id, false, b, h, start + first + r, e, &at);
            look(s, id, at, (const int64_t[]){ b, h, first + r, e }, got, truth[(kept + r) * columns + e]);
        }
}

static void look_at_queries(struct search *s, attn_tensor_id id)
{
    const struct frame *const f = s->f;
    for (int64_t n = 0; n < f->count; n++) {
        const struct tile *const t = &f->tiles[n];
        look_at_rows(s, id, t->b, t->hk * f->g.group + t->n, t->first, t->count, frame_first_row(f, t->b), t->row);
    }
}

static void look_at_keys(struct search *s, attn_tensor_id id)
{
    const struct frame *const f = s->f;
    for (int64_t n = 0; n < f->key_count; n++) {
        const struct key_tile *const t = &f->key_tiles[n];
        look_at_rows(s, id, t->b, t->hk, t->first, t->count, frame_first_key(f, t->b), t->line);
    }
}

/* Counts the wrong elements of dbias, dsinks or dslopes. */
static void look_at_sum(struct search *s, attn_tensor_id id)
{
    const attn_tensor *const t = &s->results[id];
    const double *const truth = frame_kept(s->t, id);
    int64_t elements = 0;
    attn_shape_elements(t->rank, t->shape, &elements);
    for (int64_t n = 0; n < elements && truth; n++) {
        judge_element e;
        index_of(t, n, &e);
        int64_t place[AXES] = { 0 };
        for (int a = 0; a < t->rank; a++) place[AXES - t->rank + a] = e.index[a];
        look(s, id, n, place, attn_load(t->dtype, t->data, n), truth[n]);
    }
}

static void set_sizes(struct search *s, attn_tensor_id id, bool of_keys, bool of_sum)
{
    const attn_dims *const d = &s->f->g.dims;
    const attn_tensor *const t = &s->results[id];
    const int64_t rows = of_keys ? d->Sk : d->Sq;
    s->counts = (struct counts){ .size = { d->B, of_keys ? d->Hk : d->H, rows, frame_columns(s->f, id) } };
    for (int a = 0; a < AXES && of_sum; a++)
        s->counts.size[a] = a < AXES - t->rank ? 1 : t->shape[a - (AXES - t->rank)];
}

static void put_sum(const struct counts *c, char *text, size_t room)
{
    struct words w = { text, room, 0 };
    bool any = false;
    for (int a = 0; a < AXES; a++) {
        const size_t before = w.used;
        if (any) put(&w, ", ");
        char name[24];
        snprintf(name, sizeof name, "axis %d from the end:", AXES - a);
        if (put_axis(&w, name, name, c->wrong[a], c->size[a])) any = true;
        else w.used = before, text[before] = '\0';
    }
    if (!any) put(&w, "all elements");
}

void where_find(const struct frame *f, const struct truth *t, const attn_tensor *results, uint64_t given,
                judge_result *result)
{
    struct search s = { .f = f, .t = t, .results = results, .result = result };
    for (int which = 0; which < FRAME_TENSORS; which++) {
        const attn_tensor_id id = frame_tensors[which];
        const bool of_keys = which == 3 || which == 4, of_sum = which > 4;
        if (!(given >> id & 1)) continue;
        set_sizes(&s, id, of_keys, of_sum);
        if (open_counts(&s.counts)) {
            if (of_sum) look_at_sum(&s, id);
            else if (of_keys) look_at_keys(&s, id);
            else look_at_queries(&s, id);
            if (s.counts.total > 0 && result->place_count < JUDGE_WHERE) {
                judge_place *const place = &result->place[result->place_count++];
                *place = (judge_place){ .id = id, .wrong = s.counts.total, .of_wrong = s.counts.total };
                if (of_sum) put_sum(&s.counts, place->what, sizeof place->what);
                else put_place(&s.counts, of_keys, f->g.dims.packed, place->what, sizeof place->what);
            }
        }
        close_counts(&s.counts);
    }
}
