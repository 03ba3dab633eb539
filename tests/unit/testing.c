/* testing.c: implements testing.h. */
#include "testing.h"

#include <float.h>

/* ThreadSanitizer ignores UNWATCHED functions, which fill and compare tensors in the test's own thread. To watch each
 * number would take a hundred times as long. */
#define UNWATCHED __attribute__((no_sanitize_thread))

/* ---- Random numbers ---------------------------------------------------------------------------------------------- */

UNWATCHED uint64_t rng_next(struct rng *r)
{
    uint64_t z = r->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

UNWATCHED double rng_uniform(struct rng *r)
{
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

UNWATCHED int64_t rng_between(struct rng *r, int64_t low, int64_t high)
{
    return low + (int64_t)(rng_next(r) % (uint64_t)(high - low + 1));
}

UNWATCHED bool rng_chance(struct rng *r, double p)
{
    return rng_uniform(r) < p;
}

/* The sum of twelve uniform numbers of 16 bits, each with the variance 1 / 12, is nearly normal. A logarithm and a
 * cosine (Box and Muller's exact method) would take most of the time of some tests. The result is never 0. */
UNWATCHED double rng_normal(struct rng *r)
{
    int64_t sum = 0;
    for (int n = 0; n < 3; n++) {
        const uint64_t four = rng_next(r);
        sum += (int64_t)((four & 0xffff) + (four >> 16 & 0xffff) + (four >> 32 & 0xffff) + (four >> 48));
    }
    return ((double)(sum - 6 * 0xffff) + 0.5) * 0x1p-16;
}

/* ---- A problem that a few numbers describe (struct spec) --------------------------------------------------------- */

UNWATCHED void spec_print(FILE *file, const struct spec *s)
{
    static const char *const dtypes[] = { "ATTN_F32", "ATTN_F16", "ATTN_BF16", "ATTN_F8E4M3" };
    static const char *const ops[] = { "ATTN_OP_FORWARD", "ATTN_OP_BACKWARD", "ATTN_OP_OBSERVE" };
    fprintf(
        file,
        "    SPEC(.op = %s, .dtype = %s, .out_dtype = %s, .bias_dtype = %s, .B = %lld, .H = %lld, .Hk = %lld, .Sq = "
        "%lld, .Sk = %lld, .D = %lld, .Dv = %lld",
        ops[s->op], dtypes[s->dtype], dtypes[s->out_dtype], dtypes[s->bias_dtype], (long long)s->B, (long long)s->H,
        (long long)s->Hk, (long long)s->Sq, (long long)s->Sk, (long long)s->D, (long long)s->Dv);
    if (s->layout == ATTN_BHSD) fprintf(file, ", .layout = ATTN_BHSD");
    if (s->alignment == ATTN_TOP_LEFT) fprintf(file, ", .alignment = ATTN_TOP_LEFT");
    if (s->has_scale) fprintf(file, ", .has_scale = true, .scale = %.17g", s->scale);
    if (s->causal) fprintf(file, ", .causal = true");
    if (s->window_left != -1) fprintf(file, ", .window_left = %lld", (long long)s->window_left);
    if (s->window_right != -1) fprintf(file, ", .window_right = %lld", (long long)s->window_right);
    if (s->softcap != 0) fprintf(file, ", .softcap = %.17g", s->softcap);
    if (s->dropout_p != 0)
        fprintf(file, ", .dropout_p = %.17g, .seed = %lluu", s->dropout_p, (unsigned long long)s->seed);
    if (s->sequences) {
        fprintf(file, ", .sequences = %d, .q_lengths = {", s->sequences);
        for (int n = 0; n < s->sequences; n++) fprintf(file, "%s%d", n ? ", " : " ", s->q_lengths[n]);
        fprintf(file, " }, .k_lengths = {");
        for (int n = 0; n < s->sequences; n++) fprintf(file, "%s%d", n ? ", " : " ", s->k_lengths[n]);
        fprintf(file, " }");
    }
#define SHOW(field, form) \
    if (s->field) fprintf(file, ", ." #field " = " form, s->field)
    SHOW(alibi, "%d");
    SHOW(bias, "%d");
    SHOW(bias_hidden, "%.17g");
    SHOW(keep_mask, "%d");
    SHOW(keep, "%.17g");
    SHOW(keep_tail, "%d");
    SHOW(mask_bounds, "%d");
    SHOW(mask_heads, "%d");
    SHOW(mask_kind, "%d");
    SHOW(sinks, "%d");
    SHOW(seqlens_k, "%d");
    SHOW(seqlens_q, "%d");
    SHOW(gaps, "%d");
    SHOW(key_rows, "%d");
    SHOW(page_size, "%d");
    SHOW(fp8_keys, "%d");
    SHOW(fp8_scales, "%d");
    SHOW(scale_axes, "%d");
    SHOW(fp8_scale, "%.17g");
    SHOW(dlse, "%d");
    SHOW(give_forward, "%d");
    SHOW(no_dout, "%d");
    SHOW(float_grads, "%d");
    SHOW(latent, "%d");
    SHOW(given_lse, "%d");
    if (s->observe) fprintf(file, ", .observe = %#llx", (unsigned long long)s->observe);
    SHOW(no_lse, "%d");
    SHOW(plain_grads, "%d");
    SHOW(any_order, "%d");
    SHOW(q_amp, "%.17g");
    SHOW(v_amp, "%.17g");
    SHOW(q_mean, "%.17g");
    SHOW(sides, "%d");
    SHOW(v_most, "%.17g");
    SHOW(bias_levels, "%d");
    SHOW(strided, "%d");
    SHOW(poison_unseen, "%d");
    SHOW(poison, "%d");
#undef SHOW
    fprintf(file, ", .data_seed = %lluu)\n", (unsigned long long)s->data_seed);
}

/* ---- A problem with tensors in memory (struct fixture) ----------------------------------------------------------- */

/* POISON fills the bytes around each tensor, and the gaps between its rows. The pattern is NaN in every float type. */
enum { POISON = 0xff, GUARD = 64 };

UNWATCHED void fixture_clear(struct fixture *f)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) free(f->block[id]);
    memset(f, 0, sizeof *f);
}

/* Returns the number of elements from the tensor's first to its last, including the gaps between rows. */
UNWATCHED static int64_t tensor_extent(const attn_tensor *t)
{
    int64_t n = 1;
    for (int a = 0; a < t->rank; a++) {
        if (t->shape[a] == 0) return 0;
        n += (t->shape[a] - 1) * t->stride[a];
    }
    return n;
}

UNWATCHED int64_t tensor_elements(const attn_tensor *t)
{
    int64_t n = 0;
    if (t->rank == 0 || !attn_shape_elements(t->rank, t->shape, &n)) return 0;
    return n;
}

/* Returns the number of the tensor's elements if they are adjacent in memory, otherwise 0. */
UNWATCHED static int64_t adjacent_elements(const attn_tensor *t)
{
    int64_t count = 1;
    for (int a = t->rank - 1; a >= 0; count *= t->shape[a--])
        if (t->stride[a] != count) return 0;
    return count;
}

UNWATCHED int64_t tensor_offset(const attn_tensor *t, int64_t n)
{
    int64_t offset = 0;
    if (n < adjacent_elements(t)) return n;
    for (int a = t->rank - 1; a >= 0; a--) {
        offset += n % t->shape[a] * t->stride[a];
        n /= t->shape[a];
    }
    return offset;
}

UNWATCHED double tensor_get(const attn_tensor *t, int64_t n)
{
    return attn_load(t->dtype, t->data, tensor_offset(t, n));
}

UNWATCHED void tensor_set(const attn_tensor *t, int64_t n, double x)
{
    const int64_t offset = tensor_offset(t, n);
    if (t->dtype == ATTN_I32) ((int32_t *)t->data)[offset] = (int32_t)x;
    else if (t->dtype == ATTN_U8) ((uint8_t *)t->data)[offset] = (uint8_t)x;
    else attn_store(t->dtype, t->data, offset, x);
}

UNWATCHED void fixture_add(struct fixture *f, attn_tensor_id id, attn_dtype dtype, int rank, const int64_t *shape)
{
    attn_tensor t = attn_tensor_make(NULL, dtype, rank, shape);
    const size_t bytes = attn_dtype_bytes(dtype), shift = f->spec.strided ? bytes : 0;
    if (f->spec.strided && attn_tensors[id].role != ATTN_ROLE_IN)
        for (int64_t a = rank - 2, stride = (shape[rank - 1] > 0 ? shape[rank - 1] : 1) + 3; a >= 0; a--) {
            t.stride[a] = stride;
            stride = stride * (shape[a] > 0 ? shape[a] : 1) + (a == 1 && !f->spec.key_rows ? 5 : 0);
        }
    else if (f->spec.strided && rank > 2) {
        t.stride[rank - 2] = (shape[rank - 1] > 0 ? shape[rank - 1] : 1) + (int64_t)(id % 3) + 1;
        for (int a = rank - 3; a >= 0; a--) t.stride[a] = t.stride[a + 1] * (shape[a + 1] > 0 ? shape[a + 1] : 1);
    }
    f->block_bytes[id] = 2 * GUARD + shift + (size_t)tensor_extent(&t) * bytes;
    f->block[id] = aligned_alloc(64, (f->block_bytes[id] + 63) / 64 * 64);
    if (!f->block[id]) {
        fprintf(stderr, "no memory for a test of %zu bytes\n", f->block_bytes[id]);
        exit(1);
    }
    memset(f->block[id], POISON, f->block_bytes[id]);
    t.data = f->block[id] + GUARD + shift;
    f->p.tensor[id] = t;
}

UNWATCHED void fill_normal(const attn_tensor *t, struct rng *r, double amp, double mean)
{
    for (int64_t n = tensor_elements(t), i = 0; i < n; i++) tensor_set(t, i, mean + amp * rng_normal(r));
}

/* Sets the first channel of q and k [B, S, H, D] so that the scores have the signs that `sides` says. */
UNWATCHED static void put_scores(const attn_tensor *q, const attn_tensor *k, enum score_sides sides)
{
    const int64_t *const of_q = q->shape, *const of_k = k->shape;
    for (int64_t row = 0; row < of_q[0] * of_q[1] * of_q[2]; row++)
        tensor_set(q, row * of_q[3], sides == SIDES_BY_ROW && row / of_q[2] % 2 ? -8 : 8);
    for (int64_t row = 0; row < of_k[0] * of_k[1] * of_k[2]; row++) {
        const int64_t key = row / of_k[2] % of_k[1];
        const bool above = sides == SIDES_BY_ROW ||
                           sides == (key >= of_k[1] / 2 ? SIDES_ABOVE_BELOW : SIDES_BELOW_ABOVE);
        tensor_set(k, row * of_k[3], above ? 24 : -8 - 232 * (double)key / (double)of_k[1]);
    }
}

/* Fills a bias with numbers as large as float32 can hold.
 *   kind 1: a mask with -3.38e38 (about the lowest number) for hidden keys, as many libraries write it; in every third
 *           row all keys are hidden
 *   kind 2: numbers of several large sizes; a row of `out` is then the mean of the rows of v for which the bias is
 *           largest
 *   kind 3: -3.38e38 for the first half of the keys, as for padding on the left */
UNWATCHED static void fill_bias_levels(const attn_tensor *t, struct rng *r, int kind)
{
    static const double levels[] = { -3.38e38, -2.4e38, -1e38, 1e38, 2.4e38, 3.38e38 };
    const int64_t keys = t->shape[t->rank - 1];
    uint64_t in_row = 0;
    for (int64_t n = tensor_elements(t), i = 0; i < n; i++) {
        if (i % keys == 0) in_row = rng_next(r);
        if (kind == 1) {
            if (i / keys % 3 == 1 || rng_chance(r, 0.5)) tensor_set(t, i, -3.38e38);
            continue;
        }
        if (kind == 3) {
            if (i % keys < keys / 2) tensor_set(t, i, -3.38e38);
            continue;
        }
        uint64_t level = rng_next(r) % ARRAY_SIZE(levels);
        while (level > 0 && !(in_row >> level & 1)) level--;
        tensor_set(t, i, levels[level]);
    }
}

/* Returns whether query i of (b, h) may see key j. The function shares no code with the reference backend, so that
 * tests can compare the two. */
UNWATCHED static bool fixture_sees(const struct fixture *f, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const attn_problem *p = &f->p;
    int64_t Sq = f->spec.Sq, Sk = f->spec.Sk, shifted;
    if (f->spec.sequences) Sq = f->spec.q_lengths[b], Sk = f->spec.k_lengths[b];
    else if (p->seqlens_k.rank) Sk = ((int32_t *)p->seqlens_k.data)[b];
    if (!f->spec.sequences && p->seqlens_q.rank) Sq = ((int32_t *)p->seqlens_q.data)[b];
    if (i >= Sq || j >= Sk) return false;
    shifted = f->spec.alignment == ATTN_TOP_LEFT ? i : i + Sk - Sq;
    if (f->spec.causal && j > shifted) return false;
    if (f->spec.window_left >= 0 && j < shifted - f->spec.window_left) return false;
    if (f->spec.window_right >= 0 && j > shifted + f->spec.window_right) return false;
    for (int which = 0; which < 2; which++) {
        const attn_tensor *t = which ? &p->keep_mask : &p->bias;
        const int64_t column = which && p->keep_mask_at_end ? j - (Sk - t->shape[3]) : j;
        if (!t->rank || column < 0) continue;
        const int64_t at[4] = { t->shape[0] > 1 ? b : 0, t->shape[1] > 1 ? h : 0, t->shape[2] > 1 ? i : 0, column };
        const double x = attn_load(t->dtype, t->data,
                                   at[0] * t->stride[0] + at[1] * t->stride[1] + at[2] * t->stride[2] + at[3]);
        if (which ? x == 0 : x == -INFINITY) return false;
    }
    if (p->mask_startend_rows.rank) {
        const attn_tensor *t = &p->mask_startend_rows;
        const int64_t heads = t->shape[1], hm = heads == 1 ? 0 : heads == f->spec.H ? h : h / (f->spec.H / f->spec.Hk);
        const int32_t *c = (int32_t *)t->data + b * t->stride[0] + hm * t->stride[1] + j * t->stride[2];
        if (f->spec.causal) return !(i >= c[0] && i < (t->shape[3] == 2 ? c[1] : Sq));
        if (t->shape[3] == 2) return !(i >= c[0] || i < c[1]);
        return !((i >= c[0] && i < c[1]) || (i >= c[2] && i < c[3]));
    }
    return true;
}

UNWATCHED static void fill_mask(const struct fixture *f, struct rng *r)
{
    const attn_tensor *t = &f->p.mask_startend_rows;
    const int64_t Sq = f->spec.Sq, Sk = f->spec.Sk, n = t->shape[3], width = rng_between(r, 1, Sq / 2 + 1);
    for (int64_t bh = 0; bh < t->shape[0] * t->shape[1]; bh++) {
        int64_t doc_start = 0, doc_end = 0;
        for (int64_t j = 0; j < Sk; j++) {
            int64_t lts = 0, lte = Sq, uts = 0, ute = 0;
            const int64_t at = Sk > 0 ? j * Sq / Sk : 0;
            if (j >= doc_end) doc_start = doc_end, doc_end = rng_between(r, j + 1, Sk);
            switch (f->spec.mask_kind) {
            case MASK_DOCUMENT: lts = doc_end * Sq / Sk, ute = doc_start * Sq / Sk; break;
            case MASK_WINDOW: lts = attn_min64(at + width, Sq), ute = attn_max64(at - width, 0); break;
            case MASK_ALL: lts = 0, ute = Sq; break;
            case MASK_UNION: lts = Sq / 2, ute = Sq / 2; break;
            default:
                lts = rng_between(r, 0, Sq), lte = rng_between(r, 0, Sq);
                uts = rng_between(r, 0, Sq), ute = rng_between(r, 0, Sq);
                if (n == 2 && !f->spec.causal)
                    /* `ute` is drawn from 0 to `lts`. With a larger `ute`, the two hidden intervals would hide the
                     * key from every query. */
                    ute = rng_between(r, 0, lts);
            }
            const int64_t e = (bh * Sk + j) * n;
            tensor_set(t, e, (double)lts);
            if (n == 2) tensor_set(t, e + 1, (double)(f->spec.causal ? lte : ute));
            if (n == 4)
                tensor_set(t, e + 1, (double)lte), tensor_set(t, e + 2, (double)uts), tensor_set(t, e + 3, (double)ute);
        }
    }
}

UNWATCHED static void poison_keys(struct fixture *f, struct rng *r)
{
    const struct spec *s = &f->spec;
    const int64_t batches = s->sequences ? s->sequences : s->B;
    const attn_geometry g = attn_geometry_of(&f->p);
    for (int64_t b = 0; b < batches; b++) {
        const int64_t k_start = attn_sequence_of(&g, b).k_start;
        const int64_t Sq = s->sequences ? s->q_lengths[b] : s->Sq, Sk = s->sequences ? s->k_lengths[b] : s->Sk;
        const int64_t victim = Sk > 0 ? rng_between(r, 0, Sk - 1) : 0;
        for (int64_t hk = 0; hk < s->Hk; hk++)
            for (int64_t j = 0; j < Sk; j++) {
                bool seen = false;
                for (int64_t h = hk * g.group; h < (hk + 1) * g.group && !seen; h++)
                    for (int64_t i = 0; i < Sq && !seen; i++) seen = fixture_sees(f, b, h, i, j);
                if (s->poison_unseen && !seen) {
                    for (int64_t d = 0; d < s->D; d++)
                        attn_store(f->p.k.dtype, f->p.k.data, attn_at(&g.view[ATTN_T_k], b, hk, k_start + j) + d,
                                   d & 1 ? NAN : INFINITY);
                    for (int64_t e = 0; e < s->Dv; e++)
                        attn_store(f->p.v.dtype, f->p.v.data, attn_at(&g.view[ATTN_T_v], b, hk, k_start + j) + e,
                                   e & 1 ? -INFINITY : NAN);
                }
                if (s->poison && seen && j == victim) {
                    const attn_tensor_id id = s->poison == 1 ? ATTN_T_k : ATTN_T_v;
                    attn_store(f->p.tensor[id].dtype, f->p.tensor[id].data, attn_at(&g.view[id], b, hk, k_start + j),
                               NAN);
                }
            }
    }
}

UNWATCHED static void poison_rows(const attn_tensor *t, const attn_view *view, int64_t heads, int64_t columns,
                                  int64_t b, int64_t first, int64_t end)
{
    for (int64_t h = 0; t->rank && h < heads; h++)
        for (int64_t row = first; row < end; row++)
            for (int64_t c = 0; c < columns; c++) attn_store(t->dtype, t->data, attn_at(view, b, h, row) + c, NAN);
}

UNWATCHED static void poison_padding(struct fixture *f)
{
    const attn_geometry g = attn_geometry_of(&f->p);
    const attn_dims *d = &g.dims;
    for (int64_t b = 0; b < d->B; b++) {
        const attn_sequence s = attn_sequence_of(&g, b);
        const int64_t q0 = s.q_start + s.Sq, q1 = s.q_start + attn_room_of(g.cu_q, d->Sq, b);
        const int64_t k0 = s.k_start + s.Sk, k1 = s.k_start + attn_room_of(g.cu_k, d->page_size ? 0 : d->Sk, b);
        poison_rows(&f->p.k, &g.view[ATTN_T_k], d->Hk, d->D, b, k0, k1);
        poison_rows(&f->p.v, &g.view[ATTN_T_v], d->Hk, d->Dv, b, k0, k1);
        poison_rows(&f->p.q, &g.view[ATTN_T_q], d->H, d->D, b, q0, q1);
        poison_rows(&f->p.dout, &g.view[ATTN_T_dout], d->H, d->Dv, b, q0, q1);
        poison_rows(&f->p.dlse, &g.view[ATTN_T_dlse], d->H, 1, b, q0, q1);
        if (f->p.op != ATTN_OP_BACKWARD) continue;
        poison_rows(&f->p.out, &g.view[ATTN_T_out], d->H, d->Dv, b, q0, q1);
        poison_rows(&f->p.lse, &g.view[ATTN_T_lse], d->H, 1, b, q0, q1);
    }
}

/* Moves the keys and values of a problem to pages in random order. Unused bytes of pages, and unused entries of
 * page_table, stay 0xff. */
UNWATCHED static void move_to_pages(struct fixture *f, struct rng *r)
{
    const struct spec *s = &f->spec;
    const attn_tensor_id tensors[] = { ATTN_T_k, ATTN_T_v };
    const attn_problem plain = f->p;
    const attn_dtype dtype = f->p.k.dtype;
    const attn_geometry from = attn_geometry_of(&plain);
    uint8_t *const blocks[] = { f->block[ATTN_T_k], f->block[ATTN_T_v] };
    uint8_t *const starts = f->block[ATTN_T_cu_seqlens_k];
    int64_t longest = s->sequences ? 0 : s->Sk, next = 0;
    for (int n = 0; n < s->sequences; n++) longest = attn_max64(longest, s->k_lengths[n]);
    const int64_t most = attn_tiles(longest, s->page_size), pages = s->B * most + 3;
    int32_t *const order = calloc((size_t)pages, sizeof *order);
    if (!order) exit(1);
    for (int64_t n = 0; n < pages; n++) {
        const int64_t other = rng_between(r, 0, n);
        order[n] = order[other];
        order[other] = (int32_t)n;
    }
    fixture_add(f, ATTN_T_page_table, ATTN_I32, 2, (int64_t[]){ s->B, most });
    uint8_t *const lengths = s->sequences ? f->block[ATTN_T_seqlens_k] : NULL;
    if (s->sequences) {
        fixture_add(f, ATTN_T_seqlens_k, ATTN_I32, 1, (int64_t[]){ s->B });
        for (int64_t b = 0; b < s->B; b++) tensor_set(&f->p.seqlens_k, b, s->k_lengths[b]);
        f->p.cu_seqlens_k = (attn_tensor){ 0 };
        f->block[ATTN_T_cu_seqlens_k] = NULL;
    }
    for (int n = 0; n < 2; n++)
        fixture_add(f, tensors[n], dtype, 4, (int64_t[]){ pages, s->page_size, s->Hk, n ? s->Dv : s->D });
    for (int64_t b = 0; b < s->B; b++)
        for (int64_t n = 0; n < most; n++)
            tensor_set(&f->p.page_table, b * most + n,
                       n < attn_tiles((int64_t)tensor_get(&f->p.seqlens_k, b), s->page_size) ? order[next++]
                       : n % 2                                                               ? -1
                                                                                             : INT32_MAX);
    const attn_geometry to = attn_geometry_of(&f->p);
    for (int n = 0; n < 2; n++) {
        const size_t row = (size_t)(n ? s->Dv : s->D) * attn_dtype_bytes(dtype);
        const attn_view *old = &from.view[tensors[n]], *moved = &to.view[tensors[n]];
        for (int64_t b = 0; b < s->B; b++) {
            const attn_sequence sequence = attn_sequence_of(&from, b);
            for (int64_t hk = 0; hk < s->Hk; hk++)
                for (int64_t j = 0; j < sequence.Sk; j++)
                    memcpy((uint8_t *)moved->data + (size_t)attn_key_at(&to, moved, b, hk, j) * attn_dtype_bytes(dtype),
                           (uint8_t *)old->data +
                               (size_t)attn_at(old, b, hk, sequence.k_start + j) * attn_dtype_bytes(dtype),
                           row);
        }
        free(blocks[n]);
    }
    if (s->sequences) free(starts);
    free(lengths);
    free(order);
}

UNWATCHED static void add_bshd(struct fixture *f, attn_tensor_id id, attn_dtype dtype, int64_t S, int64_t heads,
                               int64_t size)
{
    const struct spec *s = &f->spec;
    const bool keys = id == ATTN_T_k || id == ATTN_T_v || id == ATTN_T_dk || id == ATTN_T_dv;
    if (s->key_rows && keys) fixture_add(f, id, dtype, 4, (int64_t[]){ s->B, S / s->B, heads, size });
    else if (s->sequences) fixture_add(f, id, dtype, 3, (int64_t[]){ S, heads, size });
    else if (s->layout == ATTN_BHSD) fixture_add(f, id, dtype, 4, (int64_t[]){ s->B, heads, S, size });
    else fixture_add(f, id, dtype, 4, (int64_t[]){ s->B, S, heads, size });
}

UNWATCHED static void add_lse(struct fixture *f, attn_tensor_id id)
{
    const struct spec *s = &f->spec;
    if (s->sequences) fixture_add(f, id, ATTN_F32, 2, (int64_t[]){ s->H, s->Sq });
    else fixture_add(f, id, ATTN_F32, 3, (int64_t[]){ s->B, s->H, s->Sq });
}

/* Adds the inputs and outputs that an observe (a request for attention weights) has besides q, k and v. */
UNWATCHED static void add_observed(struct fixture *f)
{
    const struct spec *const s = &f->spec;
    struct rng r = { s->data_seed + 77 };
    attn_observe *const o = &f->p.observe;
    const uint64_t wanted = s->observe ? s->observe : UINT64_MAX;
    attn_tensor made;
    attn_error err = { 0 };
    if (s->given_lse) {
        attn_problem forward = f->p;
        forward.op = ATTN_OP_FORWARD;
        run_reference(&forward);
    } else {
        free(f->block[ATTN_T_lse]);
        f->block[ATTN_T_lse] = NULL;
        f->p.lse.rank = 0;
    }
    static const attn_tensor_id unused[] = { ATTN_T_out, ATTN_T_v, ATTN_T_v_scale };
    for (size_t n = 0; n < ARRAY_SIZE(unused); n++) {
        free(f->block[unused[n]]);
        f->block[unused[n]] = NULL;
        f->p.tensor[unused[n]] = (attn_tensor){ 0 };
    }
    o->given_lse = s->given_lse;
    o->top = rng_between(&r, 1, 9);
    o->key_mass_rows = rng_chance(&r, 0.5) ? 0 : rng_between(&r, 1, s->Sq + 2);
    if (s->sequences) o->sequence = rng_between(&r, 0, s->sequences - 1);
    attn_observe_region(&f->p);
    if (rng_chance(&r, 0.6)) {
        o->rows[0] = rng_between(&r, 0, o->rows[1]), o->rows[1] = rng_between(&r, o->rows[0], o->rows[1]);
        o->keys[0] = rng_between(&r, 0, o->keys[1]), o->keys[1] = rng_between(&r, o->keys[0], o->keys[1]);
    }
    o->map[0] = rng_between(&r, 1, rng_chance(&r, 0.2) ? 200 : 12);
    o->map[1] = rng_between(&r, 1, rng_chance(&r, 0.2) ? 200 : 12);
    const double weights = (double)(o->rows[1] - o->rows[0]) * (double)(o->keys[1] - o->keys[0]) *
                           (double)(s->H * (s->sequences ? 1 : s->B));
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (!attn_writes(&f->p, (attn_tensor_id)id) || !(wanted >> id & 1)) continue;
        if (id == ATTN_T_weights && weights > 1 << 20) continue;
        if (attn_output(&f->p, (attn_tensor_id)id, ATTN_F32, &made, &err)) {
            fprintf(stderr, "%s: %s\n", attn_tensors[id].name, err.text);
            exit(1);
        }
        fixture_add(f, (attn_tensor_id)id, made.dtype, made.rank, made.shape);
    }
}

UNWATCHED void fixture_make(struct fixture *f, const struct spec *spec)
{
    struct rng r = { spec->data_seed };
    const double q_amp = spec->q_amp != 0 ? spec->q_amp : 1, v_amp = spec->v_amp != 0 ? spec->v_amp : 1;
    struct spec *s;
    attn_error err = { 0 };
    memset(f, 0, sizeof *f);
    f->spec = *spec;
    s = &f->spec;
    f->p = (attn_problem)ATTN_PROBLEM_INIT;
    f->p.op = s->op;
    f->p.layout = s->layout;
    f->p.alignment = s->alignment;
    f->p.has_scale = s->has_scale;
    f->p.scale = s->scale;
    f->p.softcap = s->softcap;
    f->p.causal = s->causal;
    f->p.window_left = s->window_left;
    f->p.window_right = s->window_right;
    f->p.dropout_p = s->dropout_p;
    f->p.seed = s->seed;
    f->p.deterministic = !s->any_order;
    if (s->sequences) {
        fixture_add(f, ATTN_T_cu_seqlens_q, ATTN_I32, 1, (int64_t[]){ s->sequences + 1 });
        fixture_add(f, ATTN_T_cu_seqlens_k, ATTN_I32, 1, (int64_t[]){ s->sequences + 1 });
        s->B = s->sequences;
        s->Sq = s->Sk = 0;
        const bool key_lengths = s->key_rows || s->gaps;
        int64_t longest = 0;
        for (int n = 0; n < s->sequences; n++) longest = attn_max64(longest, s->k_lengths[n]);
        if (s->gaps) fixture_add(f, ATTN_T_seqlens_q, ATTN_I32, 1, (int64_t[]){ s->B });
        if (key_lengths) fixture_add(f, ATTN_T_seqlens_k, ATTN_I32, 1, (int64_t[]){ s->B });
        for (int n = 0; n <= s->sequences; n++) {
            tensor_set(&f->p.cu_seqlens_q, n, (double)s->Sq);
            tensor_set(&f->p.cu_seqlens_k, n, (double)s->Sk);
            if (n == s->sequences) break;
            if (s->gaps) tensor_set(&f->p.seqlens_q, n, s->q_lengths[n]);
            if (key_lengths) tensor_set(&f->p.seqlens_k, n, s->k_lengths[n]);
            s->Sq += s->q_lengths[n] + (s->gaps ? rng_between(&r, 0, s->gaps) : 0);
            s->Sk += s->key_rows ? longest + s->gaps : s->k_lengths[n] + (s->gaps ? rng_between(&r, 0, s->gaps) : 0);
        }
    }
    add_bshd(f, ATTN_T_q, s->dtype, s->Sq, s->H, s->D);
    add_bshd(f, ATTN_T_k, s->fp8_keys ? ATTN_F8E4M3 : s->dtype, s->Sk, s->Hk, s->D);
    add_bshd(f, ATTN_T_v, s->fp8_keys ? ATTN_F8E4M3 : s->dtype, s->Sk, s->Hk, s->Dv);
    fill_normal(&f->p.q, &r, q_amp, s->q_mean);
    fill_normal(&f->p.k, &r, q_amp, s->q_mean);
    if (s->sides) put_scores(&f->p.q, &f->p.k, s->sides);
    fill_normal(&f->p.v, &r, v_amp, 0);
    for (int64_t n = s->v_most != 0 ? tensor_elements(&f->p.v) : 0, i = 0; i < n; i++)
        tensor_set(&f->p.v, i, s->v_most * (0.5 + 0.5 * rng_uniform(&r)));
    if (s->alibi) {
        if (s->alibi == 1) fixture_add(f, ATTN_T_alibi_slopes, ATTN_F32, 1, (int64_t[]){ s->H });
        else fixture_add(f, ATTN_T_alibi_slopes, ATTN_F32, 2, (int64_t[]){ s->B, s->H });
        for (int64_t n = tensor_elements(&f->p.alibi_slopes), i = 0; i < n; i++)
            tensor_set(&f->p.alibi_slopes, i, exp2(-8.0 * (double)(i + 1) / (double)n));
    }
    if (s->bias) {
        const int axes = s->bias - 1;
        fixture_add(f, ATTN_T_bias, s->bias_dtype, 4,
                    (int64_t[]){ axes & 1 ? s->B : 1, axes & 2 ? s->H : 1, axes & 4 ? s->Sq : 1, s->Sk });
        fill_normal(&f->p.bias, &r, 1, 0);
        for (int64_t n = tensor_elements(&f->p.bias), i = 0; i < n; i++)
            if (rng_chance(&r, s->bias_hidden)) tensor_set(&f->p.bias, i, -INFINITY);
        if (s->bias_levels) fill_bias_levels(&f->p.bias, &r, s->bias_levels);
    }
    if (s->keep_mask) {
        const int axes = s->keep_mask - 1;
        const int64_t columns = s->keep_tail ? attn_min64(s->keep_tail, s->Sk) : s->Sk;
        f->p.keep_mask_at_end = s->keep_tail > 0;
        fixture_add(f, ATTN_T_keep_mask, ATTN_U8, 4,
                    (int64_t[]){ axes & 1 ? s->B : 1, axes & 2 ? s->H : 1, axes & 4 ? s->Sq : 1, columns });
        for (int64_t n = tensor_elements(&f->p.keep_mask), i = 0; i < n; i++) {
            const bool all_hidden_row = columns > 0 && i / columns % 7 == 3;
            tensor_set(&f->p.keep_mask, i, !all_hidden_row && rng_chance(&r, s->keep));
        }
    }
    if (s->sinks) {
        fixture_add(f, ATTN_T_sinks, ATTN_F32, 1, (int64_t[]){ s->H });
        for (int64_t h = 0; h < s->H; h++) {
            static const double extremes[] = { -INFINITY, 100, -100, 3, -3e38, 3e38, 1e38, -1e38 };
            tensor_set(&f->p.sinks, h, s->sinks > 1 ? extremes[h % 4 + 4 * (s->sinks - 2)] : 2 * rng_normal(&r));
        }
    }
    if (s->seqlens_k && !s->sequences) {
        fixture_add(f, ATTN_T_seqlens_k, ATTN_I32, 1, (int64_t[]){ s->B });
        for (int64_t b = 0; b < s->B; b++)
            tensor_set(&f->p.seqlens_k, b, (double)(b % 4 == 1 ? 0 : b % 4 == 3 ? s->Sk : rng_between(&r, 0, s->Sk)));
    }
    if (s->seqlens_q && !s->sequences) {
        fixture_add(f, ATTN_T_seqlens_q, ATTN_I32, 1, (int64_t[]){ s->B });
        for (int64_t b = 0; b < s->B; b++)
            tensor_set(&f->p.seqlens_q, b, (double)(b % 4 == 2 ? 0 : b % 4 == 3 ? s->Sq : rng_between(&r, 0, s->Sq)));
    }
    if (s->mask_bounds) {
        const int64_t heads = s->mask_heads == 0 ? 1 : s->mask_heads == 1 ? s->Hk : s->H;
        fixture_add(f, ATTN_T_mask_startend_rows, ATTN_I32, 4, (int64_t[]){ s->B, heads, s->Sk, s->mask_bounds });
        fill_mask(f, &r);
    }
    if (s->fp8_scales)
        for (attn_tensor_id id = s->dtype == ATTN_F8E4M3 ? ATTN_T_q_scale : ATTN_T_k_scale; id <= ATTN_T_v_scale;
             id++) {
            const int axes = s->scale_axes;
            const int64_t shape[] = { axes == 1 || axes == 4 ? 1 : axes == 3 ? s->Hk : s->B, axes == 2 ? 1 : s->Hk };
            fixture_add(f, id, ATTN_F32, axes >= 3 ? 1 : 2, shape);
            for (int64_t n = tensor_elements(&f->p.tensor[id]), i = 0; i < n; i++)
                tensor_set(&f->p.tensor[id], i, s->fp8_scale != 0 ? s->fp8_scale : 0.5 + rng_uniform(&r));
        }
    if (s->poison_unseen || s->poison) poison_keys(f, &r);
    if (s->page_size) move_to_pages(f, &r);
    if (s->latent) {
        f->p.v = f->p.k;
        f->p.v.shape[3] = s->Dv;
        free(f->block[ATTN_T_v]);
        f->block[ATTN_T_v] = NULL;
    }
    add_bshd(f, ATTN_T_out, s->out_dtype, s->Sq, s->H, s->Dv);
    add_lse(f, ATTN_T_lse);
    if (s->no_lse) f->p.lse.rank = 0;
    if (s->op == ATTN_OP_OBSERVE) add_observed(f);
    if (s->op == ATTN_OP_BACKWARD) {
        if (s->give_forward) {
            attn_problem forward = f->p;
            forward.op = ATTN_OP_FORWARD;
            run_reference(&forward);
        } else {
            f->p.out.rank = f->p.lse.rank = 0;
        }
        add_bshd(f, ATTN_T_dout, s->out_dtype, s->Sq, s->H, s->Dv);
        fill_normal(&f->p.dout, &r, s->no_dout ? 0 : v_amp, 0);
        if (s->dlse) {
            add_lse(f, ATTN_T_dlse);
            fill_normal(&f->p.dlse, &r, v_amp, 0);
        }
        add_bshd(f, ATTN_T_dq, s->float_grads & 1 ? ATTN_F32 : s->dtype, s->Sq, s->H, s->D);
        add_bshd(f, ATTN_T_dk, s->float_grads & 2 ? ATTN_F32 : s->dtype, s->Sk, s->Hk, s->D);
        add_bshd(f, ATTN_T_dv, s->float_grads & 4 ? ATTN_F32 : s->dtype, s->Sk, s->Hk, s->Dv);
        if (s->sinks) fixture_add(f, ATTN_T_dsinks, ATTN_F32, 1, f->p.sinks.shape);
        if (s->bias && !s->plain_grads) fixture_add(f, ATTN_T_dbias, ATTN_F32, 4, f->p.bias.shape);
        if (s->alibi && !s->plain_grads)
            fixture_add(f, ATTN_T_dalibi_slopes, ATTN_F32, f->p.alibi_slopes.rank, f->p.alibi_slopes.shape);
    }
    if (s->seqlens_q || s->gaps || s->key_rows) poison_padding(f);
    if (attn_check(&f->p, &err)) {
        fprintf(stderr, "a test made a problem that attn_check() refuses: %s\n", err.text);
        spec_print(stderr, spec);
        exit(1);
    }
}

/* Returns the id of the tensor whose memory block holds tensor `id`: `id` itself, or k if v is part of k. */
UNWATCHED static int block_of(const struct fixture *f, int id)
{
    return id == ATTN_T_v && !f->block[id] ? ATTN_T_k : id;
}

UNWATCHED void fixture_copy(struct fixture *to, const struct fixture *from)
{
    *to = *from;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (!from->block[id]) continue;
        to->block[id] = aligned_alloc(64, (from->block_bytes[id] + 63) / 64 * 64);
        if (!to->block[id]) exit(1);
        memcpy(to->block[id], from->block[id], from->block_bytes[id]);
        to->p.tensor[id].data = to->block[id] + ((uint8_t *)from->p.tensor[id].data - from->block[id]);
    }
    if (block_of(from, ATTN_T_v) == ATTN_T_k && from->p.v.rank > 0)
        to->p.v.data = to->block[ATTN_T_k] + ((uint8_t *)from->p.v.data - from->block[ATTN_T_k]);
}

UNWATCHED bool is_output(const attn_problem *p, attn_tensor_id id)
{
    return p->tensor[id].rank > 0 && attn_writes(p, id);
}

/* ---- Running problems on a backend ------------------------------------------------------------------------------- */

UNWATCHED void bench_open(struct bench *b, const char *backend, int threads)
{
    const attn_device_options options = { .threads = threads };
    attn_error err = { 0 };
    b->also = 0;
    b->in_steps = false;
    if (attn_device_open(backend, 0, &options, &b->device, &err) || attn_stream_open(b->device, &b->stream, &err)) {
        fprintf(stderr, "cannot open backend %s: %s\n", backend, err.text);
        exit(1);
    }
    attn_device_describe(b->device, &b->info);
}

UNWATCHED void bench_close(struct bench *b)
{
    attn_stream_close(b->stream);
    attn_device_close(b->device);
    memset(b, 0, sizeof *b);
}

/* Under AddressSanitizer a kernel must not even read the bytes around a tensor. */
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define FORBID(address, bytes) ASAN_POISON_MEMORY_REGION(address, bytes)
#define ALLOW(address, bytes)  ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#else
#define FORBID(address, bytes) ((void)(address), (void)(bytes))
#define ALLOW(address, bytes)  ((void)(address), (void)(bytes))
#endif

UNWATCHED static void guards_forbid(const struct fixture *f)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *t = &f->p.tensor[id];
        const size_t bytes = (size_t)tensor_extent(t) * attn_dtype_bytes(t->dtype);
        if (!f->block[id]) continue;
        FORBID(f->block[id], (size_t)((uint8_t *)t->data - f->block[id]));
        FORBID((uint8_t *)t->data + bytes, GUARD);
    }
}

UNWATCHED static void guards_allow(const struct fixture *f)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (f->block[id]) ALLOW(f->block[id], f->block_bytes[id]);
}

/* With ATTN_PRINT_BITS=1, prints a line after every run: the problem, and a checksum (FNV-1a) of each output. diff can
 * then compare the bits of two builds. */
UNWATCHED static void bits_print(const struct fixture *f)
{
    const char *const wanted = getenv("ATTN_PRINT_BITS");
    if (!wanted || !*wanted || *wanted == '0') return;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        uint64_t hash = UINT64_C(0xcbf29ce484222325);
        if (!f->block[id] || !is_output(&f->p, (attn_tensor_id)id)) continue;
        for (size_t n = 0; n < f->block_bytes[id]; n++) hash = (hash ^ f->block[id][n]) * UINT64_C(0x100000001b3);
        printf("%s=%016llx ", attn_tensors[id].name, (unsigned long long)hash);
    }
    spec_print(stdout, &f->spec);
}

UNWATCHED static attn_status run_plans(struct bench *b, const attn_plan *plans, int count, attn_error *err)
{
    void *workspace = NULL;
    size_t bytes;
    int64_t step = 0;
    if (!b->in_steps) return attn_run(b->stream, plans, count, NULL, err);
    attn_status status = attn_workspace(attn_device_capabilities(b->device), plans, count, &bytes, err);
    if (!status && bytes) status = attn_device_alloc(b->device, bytes, &workspace, err);
    for (b->calls = 0; !status && step != ATTN_NO_MORE_STEPS; b->calls++) {
        status = attn_run_some(b->stream, plans, count, workspace, &step, err);
        if (!status) status = attn_stream_wait(b->stream, err);
        if (!status && step == ATTN_NO_MORE_STEPS && attn_stream_left_rows(b->stream)) step = ATTN_EVERY_ROW;
    }
    if (workspace) attn_device_free(b->device, workspace);
    return status;
}

/* Copies the fixture's tensors to the device's memory, and makes *p the problem there. With unified memory *p has the
 * fixture's own tensors. The caller must free `blocks` and `prefix`. */
UNWATCHED static attn_status to_device(struct bench *b, const struct fixture *f, attn_problem *p,
                                       void *blocks[ATTN_TENSOR_COUNT], void **prefix, attn_error *err)
{
    attn_status status = ATTN_OK;
    *p = f->p;
    if (b->info.unified) return ATTN_OK;
    if (p->prefix_keys) {
        const size_t bytes = (size_t)f->spec.B * sizeof *p->prefix_keys;
        status = attn_device_alloc(b->device, bytes, prefix, err);
        if (!status) status = attn_copy(b->stream, *prefix, p->prefix_keys, bytes, ATTN_TO_DEVICE, err);
        p->prefix_keys = *prefix;
    }
    for (int id = 0; id < ATTN_TENSOR_COUNT && !status; id++) {
        const int owner = block_of(f, id);
        void **block = &blocks[owner];
        if (p->tensor[id].rank == 0) continue;
        if (!*block) {
            status = attn_device_alloc(b->device, f->block_bytes[owner], block, err);
            if (!status)
                status = attn_copy(b->stream, *block, f->block[owner], f->block_bytes[owner], ATTN_TO_DEVICE, err);
        }
        p->tensor[id].data = (uint8_t *)*block + ((uint8_t *)f->p.tensor[id].data - f->block[owner]);
    }
    return status;
}

UNWATCHED attn_status fixtures_run(struct bench *b, struct fixture *const *list, int count, attn_error *err)
{
    attn_problem *problems = calloc((size_t)count + 1, sizeof *problems);
    attn_plan *plans = calloc((size_t)count + 1, sizeof *plans);
    void **blocks = calloc((size_t)count * ATTN_TENSOR_COUNT + 1, sizeof *blocks);
    void **prefixes = calloc((size_t)count + 1, sizeof *prefixes);
    attn_status status = ATTN_OK;
    for (int n = 0; n < count && !status; n++)
        status = to_device(b, list[n], &problems[n], blocks + (size_t)n * ATTN_TENSOR_COUNT, &prefixes[n], err);
    for (int n = 0; n < count && b->info.unified; n++) guards_forbid(list[n]);
    for (int n = 0; n < count && !status; n++)
        status = attn_plan_for(attn_device_capabilities(b->device), &problems[n], attn_features(&problems[n]) | b->also,
                               &plans[n], err);
    if (!status) status = run_plans(b, plans, count, err);
    for (int n = 0; n < count && !status && !b->info.unified; n++)
        for (int id = 0; id < ATTN_TENSOR_COUNT && !status; id++)
            if (is_output(&list[n]->p, (attn_tensor_id)id))
                status = attn_copy(b->stream, list[n]->block[id], blocks[n * ATTN_TENSOR_COUNT + id],
                                   list[n]->block_bytes[id], ATTN_FROM_DEVICE, err);
    {
        attn_error waited = { 0 };
        const attn_status late = attn_stream_wait(b->stream, &waited);
        if (!status && late) {
            status = late;
            if (err) *err = waited;
        }
    }
    for (int n = 0; n < count && b->info.unified; n++) guards_allow(list[n]);
    for (int n = 0; n < count && !status; n++) bits_print(list[n]);
    for (int n = 0; n < count * ATTN_TENSOR_COUNT; n++) attn_device_free(b->device, blocks[n]);
    for (int n = 0; n < count; n++) attn_device_free(b->device, prefixes[n]);
    free(prefixes);
    free(blocks);
    free(plans);
    free(problems);
    return status;
}

/* ---- The truth (float64 results) that a device computes ---------------------------------------------------------- */

static const attn_tensor_id truth_ids[TRUTH_RESULTS] = { ATTN_T_out, ATTN_T_lse, ATTN_T_dq, ATTN_T_dk, ATTN_T_dv };

UNWATCHED static int64_t truth_elements(const attn_problem *p, int result)
{
    const attn_dims d = attn_dims_of(p);
    const bool of_keys = result == TRUTH_DK || result == TRUTH_DV, keys_packed = d.packed && d.page_size == 0;
    const int64_t columns[] = { d.Dv, 1, d.D, d.D, d.Dv };
    const int64_t rows = of_keys ? d.Hk * d.Sk * (keys_packed ? 1 : d.B) : d.H * d.Sq * (d.packed ? 1 : d.B);
    return p->op == ATTN_OP_FORWARD && result >= TRUTH_DQ ? 0 : rows * columns[result];
}

UNWATCHED attn_status truth_run(struct bench *b, const struct fixture *f, struct truth *t, attn_error *err)
{
    void *blocks[ATTN_TENSOR_COUNT] = { NULL }, *prefix = NULL, *workspace = NULL, *distances = NULL,
         *memory[TRUTH_RESULTS] = { NULL };
    attn_problem p;
    attn_truth_cost cost;
    int64_t step = 0;
    memset(t, 0, sizeof *t);
    attn_status status = attn_truth_need(attn_device_capabilities(b->device), &f->p, &cost, err);
    if (!status) status = to_device(b, f, &p, blocks, &prefix, err);
    if (!status) status = attn_device_alloc(b->device, cost.workspace_bytes, &workspace, err);
    for (int n = 0; n < TRUTH_RESULTS && !status; n++) {
        t->count[n] = truth_elements(&f->p, n);
        if (t->count[n] > 0)
            status = attn_device_alloc(b->device, (size_t)t->count[n] * sizeof(double), &memory[n], err);
    }
    const attn_truth results = { memory[0], memory[1], memory[2], memory[3], memory[4] };
    for (b->calls = 0; !status && step != ATTN_NO_MORE_STEPS; b->calls++) {
        status = attn_truth_some(b->stream, &p, &results, workspace, &step, err);
        if (!status) status = attn_stream_wait(b->stream, err);
    }
    if (!status) status = attn_device_alloc(b->device, sizeof t->distance, &distances, err);
    if (!status) status = attn_truth_compare(b->stream, &p, &results, distances, err);
    if (!status) status = attn_copy(b->stream, t->distance, distances, sizeof t->distance, ATTN_FROM_DEVICE, err);
    for (int n = 0; n < TRUTH_RESULTS && !status; n++) {
        t->result[n] = calloc((size_t)t->count[n] + 1, sizeof(double));
        if (t->count[n] > 0)
            status = attn_copy(b->stream, t->result[n], memory[n], (size_t)t->count[n] * sizeof(double),
                               ATTN_FROM_DEVICE, err);
    }
    if (!status) status = attn_stream_wait(b->stream, err);
    for (int n = 0; n < TRUTH_RESULTS; n++) attn_device_free(b->device, memory[n]);
    for (int n = 0; n < ATTN_TENSOR_COUNT; n++) attn_device_free(b->device, blocks[n]);
    attn_device_free(b->device, prefix);
    attn_device_free(b->device, workspace);
    attn_device_free(b->device, distances);
    return status;
}

UNWATCHED void truth_clear(struct truth *t)
{
    for (int n = 0; n < TRUTH_RESULTS; n++) free(t->result[n]);
    memset(t, 0, sizeof *t);
}

/* Returns half of the distance between neighbouring numbers of the dtype near x. */
static double half_unit(attn_dtype dtype, double x)
{
    static const struct {
        double relative, least;
    } unit[] = {
        [ATTN_F32] = { 0x1p-24, 0x1p-150 }, [ATTN_F16] = { 0x1p-11, 0x1p-25 }, [ATTN_BF16] = { 0x1p-8, 0x1p-134 }
    };
    return fmax(fabs(x) * unit[dtype].relative, unit[dtype].least);
}

/* Returns by how much a float64 result of the device may change if the device adds its terms in another order. */
UNWATCHED static double truth_noise(const attn_problem *p, const attn_geometry *g, int result)
{
    const double unit = 64 * 0x1p-53, v = largest(&p->v), score = largest(&p->q) * largest(&p->k) * g->scale;
    const double exponent = 1 + fmin(fabs(score), FLT_MAX);
    if (result == TRUTH_OUT) return unit * exponent * v;
    if (result == TRUTH_LSE) return unit * exponent;
    const double dout = largest(&p->dout);
    if (result == TRUTH_DV) return unit * exponent * dout;
    const double other = result == TRUTH_DQ ? largest(&p->k) : largest(&p->q) * (double)g->group;
    return unit * exponent * dout * v * (double)g->dims.Dv * fabs(g->scale) * other;
}

/* Compares a float64 result of the device with the reference backend's result, which is rounded to its dtype. Padding
 * rows must be 0, or -inf in lse. */
UNWATCHED static bool truth_result_agrees(const struct fixture *want, const struct truth *t, int result, char *why,
                                          size_t room)
{
    const attn_problem *const p = &want->p;
    const attn_tensor_id id = truth_ids[result];
    const attn_geometry g = attn_geometry_of(p);
    const attn_dims *const d = &g.dims;
    const attn_view *const view = &g.view[id];
    const bool of_keys = result == TRUTH_DK || result == TRUTH_DV;
    const int64_t heads = of_keys ? d->Hk : d->H, room_of_rows = of_keys ? d->Sk : d->Sq;
    const int64_t columns = result == TRUTH_LSE ? 1 : result == TRUTH_DQ || result == TRUTH_DK ? d->D : d->Dv;
    const double nothing = result == TRUTH_LSE ? -INFINITY : 0, noise = truth_noise(p, &g, result);
    attn_truth_distance distance = { 0, 0 };
    int64_t flips = 0, left = t->count[result];
    bool *const seen = calloc((size_t)t->count[result] + 1, sizeof *seen);
    bool good = true;
    for (int64_t b = 0; b < d->B && good; b++) {
        const attn_sequence s = attn_sequence_of(&g, b);
        const int64_t start = of_keys ? s.k_start : s.q_start;
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < (of_keys ? s.Sk : s.Sq) && good; i++)
                for (int64_t e = 0; e < columns && good; e++) {
                    const int64_t row = d->packed ? h * room_of_rows + start + i : (b * heads + h) * room_of_rows + i;
                    const double x = t->result[result][row * columns + e];
                    const double y = attn_load(view->dtype, view->data, attn_at(view, b, h, start + i) + e);
                    double rounded = 0;
                    attn_store(view->dtype, &rounded, 0, x);
                    rounded = attn_load(view->dtype, &rounded, 0);
                    const bool same = x == y || (isnan(x) && isnan(y));
                    const double apart = same ? 0 : isfinite(x) && isfinite(y) ? fabs(x - y) : INFINITY;
                    seen[row * columns + e] = true, left--;
                    distance.max_abs = fmax(distance.max_abs, apart);
                    if (isfinite(x)) distance.largest = fmax(distance.largest, fabs(x));
                    if (rounded == y || fabs(x - y) <= noise || (isnan(x) && isnan(y))) continue;
                    flips++;
                    if (fabs(x - y) <= half_unit(view->dtype, y) + noise) continue;
                    snprintf(why, room, "%s of b %lld, h %lld, row %lld, column %lld is %.17g, must be about %.17g",
                             attn_tensors[id].name, (long long)b, (long long)h, (long long)i, (long long)e, x, y);
                    good = false;
                }
    }
    for (int64_t n = 0; n < t->count[result] && good && left > 0; n++)
        if (!seen[n] && t->result[result][n] != nothing) {
            snprintf(why, room, "%s: element %lld is of a row that does not exist and is %g", attn_tensors[id].name,
                     (long long)n, t->result[result][n]);
            good = false;
        }
    free(seen);
    if (good && memcmp(&distance, &t->distance[result], sizeof distance) != 0) {
        snprintf(why, room, "%s: the distance is %g of %g, must be %g of %g", attn_tensors[id].name,
                 t->distance[result].max_abs, t->distance[result].largest, distance.max_abs, distance.largest);
        good = false;
    }
    /* A number may lie near the middle between two neighbouring numbers of the dtype. The device and the reference
     * backend may then round it in opposite directions. In float32 this is rare, except for averages (a scale of 0). */
    if (!good || view->dtype != ATTN_F32 || g.scale == 0 || flips <= 2 + t->count[result] / 500) return good;
    snprintf(why, room, "%s: %lld of %lld numbers round otherwise", attn_tensors[id].name, (long long)flips,
             (long long)t->count[result]);
    return false;
}

UNWATCHED bool truth_agrees(struct bench *b, const struct spec *spec)
{
    struct fixture want;
    struct truth t;
    attn_error err = { 0 };
    char why[400] = "";
    fixture_make(&want, spec);
    run_reference(&want.p);
    bool good = truth_run(b, &want, &t, &err) == ATTN_OK;
    if (!good) snprintf(why, sizeof why, "%s", err.text);
    for (int n = 0; n < TRUTH_RESULTS && good; n++)
        if (is_output(&want.p, truth_ids[n])) good = truth_result_agrees(&want, &t, n, why, sizeof why);
    if (!good) {
        fprintf(stderr, "the truth: %s\n", why);
        spec_print(stderr, spec);
    }
    truth_clear(&t);
    fixture_clear(&want);
    return good;
}

UNWATCHED void fixtures_must_run(struct bench *b, struct fixture *const *list, int count)
{
    attn_error err = { 0 };
    if (fixtures_run(b, list, count, &err)) {
        fprintf(stderr, "backend %s: %s\n", b->info.backend, err.text);
        for (int n = 0; n < count; n++) spec_print(stderr, &list[n]->spec);
        exit(1);
    }
}

UNWATCHED void fixture_run(struct bench *b, struct fixture *f)
{
    fixtures_must_run(b, (struct fixture *[]){ f }, 1);
}

UNWATCHED void run_reference(const attn_problem *p)
{
    struct bench b;
    attn_plan plan;
    attn_error err = { 0 };
    bench_open(&b, "reference", 0);
    if (attn_plan_make(attn_device_capabilities(b.device), p, &plan, &err) ||
        attn_run(b.stream, &plan, 1, NULL, &err)) {
        fprintf(stderr, "reference: %s\n", err.text);
        exit(1);
    }
    bench_close(&b);
}

/* ---- Comparing results ------------------------------------------------------------------------------------------- */

const struct limits limits_of[] = {
    [ATTN_F32] = { 1e-5, 3e-5, 1e-4, 1e-6, 1e-45 },
    [ATTN_F16] = { 1e-3, 3e-3, 5e-3, 1e-5, 6e-8 },
    /* `least` is about the smallest normal number, because processors' bfloat16 products treat subnormal operands as
     * 0. */
    [ATTN_BF16] = { 8e-3, 2e-2, 3e-2, 1e-4, 1.2e-38 },
    [ATTN_F8E4M3] = { 4e-2, 0, 0, 1e-4, 2e-38 },
};

UNWATCHED double largest(const attn_tensor *t)
{
    double m = 0;
    for (int64_t n = tensor_elements(t), i = 0; i < n; i++) {
        const double x = fabs(tensor_get(t, i));
        if (isfinite(x) && x > m) m = x;
    }
    return m;
}

/* Estimates the largest |score|. The rounding errors of scores grow with it. */
UNWATCHED static double score_size(const struct fixture *f)
{
    const attn_geometry g = attn_geometry_of(&f->p);
    double size = fabs(g.scale) * sqrt((double)g.dims.D) * largest(&f->p.q) * largest(&f->p.k);
    if (f->p.q_scale.rank) size *= largest(&f->p.q_scale);
    if (f->p.k_scale.rank) size *= largest(&f->p.k_scale);
    /* A score with softcap is below the softcap. The factor 8 allows for the errors of the computed softcap. */
    if (g.softcap > 0) size = fmin(size, 8 * g.softcap);
    return size + (f->spec.bias_levels ? 0 : largest(&f->p.bias)) +
           largest(&f->p.alibi_slopes) * (double)attn_max64(g.dims.Sk, g.dims.Sq);
}

struct tolerance {
    double relative, absolute;
};

/* Returns the tolerance of output `id`, without the term `sensitivity` (see testing.h). */
UNWATCHED static struct tolerance tolerance_of(const struct fixture *f, attn_tensor_id id)
{
    const struct limits *limit = &limits_of[f->spec.dtype];
    const struct limits *as = &limits_of[f->p.tensor[id].dtype];
    const attn_geometry g = attn_geometry_of(&f->p);
    const double scores = score_size(f), blur = 2.4e-7 * scores,
                 v = largest(&f->p.v) * (f->p.v_scale.rank ? largest(&f->p.v_scale) : 1);
    const double q = largest(&f->p.q), k = largest(&f->p.k), dout = largest(&f->p.dout), dlse = largest(&f->p.dlse);
    const double kept = f->spec.dropout_p > 0 ? 1 / (1 - f->spec.dropout_p) : 1;
    /* an estimate of the largest |dP| + |delta| */
    const double dz = (dout * v * sqrt((double)g.dims.Dv) * kept + dlse);
    struct tolerance t = { 0 };
    switch (id) {
    case ATTN_T_out: t.relative = fmax(limit->out, as->out) + blur, t.absolute = limit->noise * v * kept; break;
    case ATTN_T_entropy:
    case ATTN_T_mean_entropy: t.absolute = 1e-4 + blur * (2 + 2 * log((double)attn_max64(g.dims.Sk, 2))); return t;
    case ATTN_T_key_mass:
    case ATTN_T_map:
    case ATTN_T_weights:
    case ATTN_T_top_weights:
        t.relative = 4e-5 + 2 * blur;
        t.absolute = 1e-30;
        return t;
    case ATTN_T_top_keys: t.absolute = INFINITY; return t;
    case ATTN_T_row_max:
    case ATTN_T_max_logit:
    case ATTN_T_lse:
        t.absolute = 2e-5 + 2.4e-7 * scores;
        t.relative = f->spec.bias_levels || f->spec.sinks == 3 ? 2.4e-7 : 0;
        return t;
    case ATTN_T_dq: t.relative = limit->qkv + blur, t.absolute = limit->noise * fabs(g.scale) * k * dz; break;
    case ATTN_T_dk:
        t.relative = limit->qkv + blur, t.absolute = limit->noise * fabs(g.scale) * q * dz * (double)g.group;
        break;
    case ATTN_T_dv: t.relative = limit->qkv + blur, t.absolute = limit->noise * dout * kept; break;
    case ATTN_T_dbias: t.relative = limit->sums + blur, t.absolute = limit->noise * dz; break;
    case ATTN_T_dsinks: t.relative = limit->sums + blur, t.absolute = limit->noise * dz; break;
    default:
        t.relative = limit->sums + blur, t.absolute = limit->noise * dz * (double)attn_max64(g.dims.Sk, g.dims.Sq);
        break;
    }
    t.absolute += as->least;
    return t;
}

UNWATCHED bool fixture_compare(const struct fixture *got, const struct fixture *want, const struct fixture *other,
                               char *why, size_t room)
{
    for (int i = 0; i < ATTN_TENSOR_COUNT; i++) {
        const attn_tensor_id id = (attn_tensor_id)i;
        const attn_tensor *x = &got->p.tensor[id], *y = &want->p.tensor[id];
        const int64_t n = tensor_elements(x);
        struct tolerance t;
        double top = 0, sensitivity = 0, worst = 0, error2 = 0, size2 = 0, sensitivity2 = 0;
        int64_t worst_at = 0;
        if (!is_output(&got->p, id)) continue;
        t = tolerance_of(got, id);
        for (int64_t e = 0; e < n; e++) {
            const double a = tensor_get(x, e), b = tensor_get(y, e);
            if (isnan(b) != isnan(a) || (isinf(b) && a != b) || (isinf(a) && a != b)) {
                snprintf(why, room, "%s: element %lld is %.9g, must be %.9g", attn_tensors[id].name, (long long)e, a,
                         b);
                return false;
            }
            if (!isfinite(b)) continue;
            top = fmax(top, fabs(b));
            size2 += b * b;
            error2 += (a - b) * (a - b);
            if (fabs(a - b) > worst) worst = fabs(a - b), worst_at = e;
            if (other && isfinite(tensor_get(&other->p.tensor[id], e))) {
                const double moved = fabs(tensor_get(&other->p.tensor[id], e) - b);
                sensitivity = fmax(sensitivity, moved);
                sensitivity2 += moved * moved;
            }
        }
        if (worst > t.relative * top + 2 * sensitivity + t.absolute) {
            snprintf(why, room, "%s: element %lld is %.9g, must be %.9g; allowed %.3g (largest %.3g)",
                     attn_tensors[id].name, (long long)worst_at, tensor_get(x, worst_at), tensor_get(y, worst_at),
                     t.relative * top + 2 * sensitivity + t.absolute, top);
            return false;
        }
        if (sqrt(error2) > t.relative * sqrt(size2) + 2 * sqrt(sensitivity2) + t.absolute * sqrt((double)n)) {
            snprintf(why, room, "%s: norm of the error is %.3g, of the tensor %.3g; allowed %.3g",
                     attn_tensors[id].name, sqrt(error2), sqrt(size2),
                     t.relative * sqrt(size2) + 2 * sqrt(sensitivity2) + t.absolute * sqrt((double)n));
            return false;
        }
        /* The norm of the error of each row of `out` must also be small, compared with the norm of the row. Rows of
         * fewer than 8 elements are left out, because their norm may be small by chance. */
        if (id == ATTN_T_out && got->spec.Dv >= 8)
            for (int64_t row = 0; row < n / got->spec.Dv; row++) {
                double row_error = 0, row_size = 0;
                for (int64_t e = row * got->spec.Dv; e < (row + 1) * got->spec.Dv; e++) {
                    const double a = tensor_get(x, e), b = tensor_get(y, e);
                    if (isfinite(b)) row_error += (a - b) * (a - b), row_size += b * b;
                }
                if (sqrt(row_error) > 4 * t.relative * sqrt(row_size) + t.absolute * sqrt((double)got->spec.Dv)) {
                    snprintf(why, room, "out: norm of the error of row %lld is %.3g, of the row %.3g", (long long)row,
                             sqrt(row_error), sqrt(row_size));
                    return false;
                }
            }
    }
    return true;
}

UNWATCHED bool fixture_intact(const struct fixture *f, const struct fixture *before, char *why, size_t room)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *t = &f->p.tensor[id];
        uint8_t *mask;
        size_t data;
        if (!f->block[id]) continue;
        mask = calloc(f->block_bytes[id], 1);
        data = (size_t)((uint8_t *)t->data - f->block[id]);
        if (is_output(&f->p, (attn_tensor_id)id))
            for (int64_t n = tensor_elements(t), e = 0; e < n; e++)
                memset(mask + data + (size_t)tensor_offset(t, e) * attn_dtype_bytes(t->dtype), 1,
                       attn_dtype_bytes(t->dtype));
        for (size_t n = 0; n < f->block_bytes[id]; n++)
            if (!mask[n] && f->block[id][n] != before->block[id][n]) {
                snprintf(why, room, "%s: byte %lld from its start was written and is not one of its elements",
                         attn_tensors[id].name, (long long)n - (long long)data);
                free(mask);
                return false;
            }
        free(mask);
    }
    return true;
}

UNWATCHED bool outputs_equal(const struct fixture *a, const struct fixture *b, char *why, size_t room)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *x = &a->p.tensor[id], *y = &b->p.tensor[id];
        if (!is_output(&a->p, (attn_tensor_id)id)) continue;
        for (int64_t n = tensor_elements(x), e = 0; e < n; e++)
            if (memcmp((char *)x->data + (size_t)tensor_offset(x, e) * attn_dtype_bytes(x->dtype),
                       (char *)y->data + (size_t)tensor_offset(y, e) * attn_dtype_bytes(y->dtype),
                       attn_dtype_bytes(x->dtype))) {
                snprintf(why, room, "%s: element %lld is %.9g here and %.9g there", attn_tensors[id].name, (long long)e,
                         tensor_get(x, e), tensor_get(y, e));
                return false;
            }
    }
    return true;
}

enum { FEW_OUTPUTS = 16 };

/* Moves each number of v up or down by about one unit in its last place, to show how much rounding P may change
 * `out`. */
UNWATCHED static void move_values(struct fixture *f)
{
    static const double unit[] = {
        [ATTN_F32] = 0x1p-23, [ATTN_F16] = 0x1p-10, [ATTN_BF16] = 0x1p-7, [ATTN_F8E4M3] = 0x1p-3
    };
    struct rng r = { f->spec.data_seed };
    for (int64_t n = tensor_elements(&f->p.v), i = 0; i < n; i++) {
        const double x = tensor_get(&f->p.v, i);
        tensor_set(&f->p.v, i, x * (1 + (rng_next(&r) & 1 ? 1 : -1) * unit[f->p.v.dtype]));
    }
}

UNWATCHED bool spec_agrees(struct bench *bench, const struct spec *spec)
{
    struct fixture got, want, other, before;
    char why[400];
    bool good;
    fixture_make(&got, spec);
    fixture_copy(&want, &got);
    fixture_copy(&before, &got);
    run_reference(&want.p);
    memset(&other, 0, sizeof other);
    /* Computes the reference results a second time in another way, to see how much rounding changes them. A backward
     * for which `want` computed out and lse now gets rounded out and lse as inputs. A backward for which `want` got out
     * and lse as inputs now computes them. A forward with at most FEW_OUTPUTS outputs now gets slightly changed values
     * v. */
    if (spec->op == ATTN_OP_BACKWARD) {
        struct spec twin = *spec;
        twin.give_forward = !spec->give_forward;
        twin.out_dtype = spec->give_forward ? spec->out_dtype : spec->dtype;
        fixture_make(&other, &twin);
        run_reference(&other.p);
    } else if (spec->op == ATTN_OP_FORWARD && want.block[ATTN_T_v] && tensor_elements(&want.p.out) <= FEW_OUTPUTS) {
        fixture_copy(&other, &before);
        move_values(&other);
        run_reference(&other.p);
    }
    fixture_run(bench, &got);
    good = fixture_compare(&got, &want, other.p.q.rank ? &other : NULL, why, sizeof why) &&
           fixture_intact(&got, &before, why, sizeof why);
    if (!good) {
        fprintf(stderr, "%s%s%s\n", spec->name ? spec->name : "", spec->name ? ": " : "", why);
        spec_print(stderr, spec);
    }
    fixture_clear(&got), fixture_clear(&want), fixture_clear(&before), fixture_clear(&other);
    return good;
}
