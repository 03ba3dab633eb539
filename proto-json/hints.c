/* hints.c: finds what looks wrong in valid requests. See hints.h. */
#include "hints.h"

#include <math.h>
#include <string.h>

enum {
#define X(name, text) name,
    PROTO_HINT_MAP(X)
#undef X
        HINT_COUNT
};

static const char *const texts[HINT_COUNT] = {
#define X(name, text) [name] = text,
    PROTO_HINT_MAP(X)
#undef X
};

static int64_t elements_of(const attn_tensor *t)
{
    int64_t elements = 0;
    return t->rank > 0 && attn_shape_elements(t->rank, t->shape, &elements) ? elements : 0;
}

/* Returns whether every number of the tensor is 0 or 1, and at least one of them is 1. */
static bool is_of_bits(const attn_tensor *t)
{
    const int64_t elements = elements_of(t);
    const uint16_t half_one = t->dtype == ATTN_BF16 ? 0x3f80 : 0x3c00;
    int64_t ones = 0;
    for (int64_t i = 0; i < elements; i++) {
        uint32_t x = 0;
        const bool whole = t->dtype == ATTN_F32;
        memcpy(&x, (const char *)t->data + (size_t)i * (whole ? 4 : 2), whole ? 4 : 2);
        if (x == (whole ? UINT32_C(0x3f800000) : half_one)) ones++;
        else if (x != 0) return false;
    }
    return ones > 0;
}

static bool is_zero(const attn_tensor *mask)
{
    const int64_t elements = elements_of(mask);
    return elements > 0 && memchr(mask->data, 1, (size_t)elements) == NULL;
}

/* Returns whether each matrix of a tensor [.., .., S, S] is 1 above its diagonal and 0 elsewhere. */
static bool is_upper_triangle(const attn_tensor *mask)
{
    const int64_t S = mask->shape[3], elements = elements_of(mask);
    const uint8_t *const keep = mask->data;
    if (S < 2 || mask->shape[2] != S) return false;
    for (int64_t row = 0; row * S < elements; row++) {
        const size_t zeros = (size_t)(row % S) + 1, ones = (size_t)S - zeros;
        const uint8_t *const at = keep + row * S;
        if (memchr(at, 1, zeros) != NULL || memchr(at + zeros, 0, ones) != NULL) return false;
    }
    return elements > 0;
}

unsigned hints_of(const proto_item *item)
{
    const attn_problem *const p = &item->problem;
    const attn_dims d = attn_dims_of(p);
    /* whether keys and values are in pages; those in KV caches of the server always are */
    const bool pages = p->page_table.rank > 0;
    unsigned hints = 0;
#define SAY(hint) hints |= 1U << (hint)
    if (p->has_scale && p->scale == 0) SAY(SCALE_ZERO);
    if (p->has_scale && d.D > 1 && fabs(p->scale - sqrt((double)d.D)) < 1e-4 * p->scale) SAY(SCALE_SQRT);
    if (p->window_left == 0 && p->window_right == 0 && (d.Sq > 1 || item->caches)) SAY(WINDOW_ZERO);
    if (p->keep_mask.rank == 4 && !p->keep_mask_at_end) {
        if (is_zero(&p->keep_mask)) SAY(MASK_ZERO);
        else if (is_upper_triangle(&p->keep_mask)) SAY(MASK_INVERTED);
    }
    if (p->bias.rank > 0 && is_of_bits(&p->bias)) SAY(BIAS_OF_BITS);
    if (!item->has_layout && !d.packed && !pages && d.Sq > 1 && d.H > d.Sq && d.Hk > d.Sk) SAY(FEW_QUERIES);
#undef SAY
    return hints;
}

void hints_put(struct text *t, unsigned hints)
{
    char before = '[';
    for (int i = 0; i < HINT_COUNT; i++) {
        if (!(hints >> i & 1)) continue;
        text_put_char(t, before);
        text_put_char(t, '"');
        text_put_string(t, texts[i]);
        text_put_char(t, '"');
        before = ',';
    }
    text_put_char(t, ']');
}
