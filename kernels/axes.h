/* axes.h: which size each axis of each tensor has. Internal to attention.c, check.c and
 * queries.c.
 *
 * attention.h explains the letters of the axes (attn_axes) and lists the axes of each tensor (ATTN_TENSOR_MAP). */
#ifndef ATTN_AXES_H
#define ATTN_AXES_H

#include "attention.h"

/* Returns the tensor that defines the axes of tensor `id`. A gradient has the axes of its input; every other tensor has
 * its own. */
static inline attn_tensor_id attn_axes_owner(attn_tensor_id id)
{
    const int like = attn_tensors[id].axes.like;
    return like == ATTN_TENSOR_COUNT ? id : (attn_tensor_id)like;
}

static inline const attn_axes *attn_axes_row(attn_tensor_id id)
{
    return &attn_tensors[attn_axes_owner(id)].axes;
}

/* Writes the letters of the tensor's axes, in the order in which the client sends the axes, and returns the rank. The
 * order depends on the layout (bshd or bhsd), and on whether sequences are packed. */
int attn_axes_of(const attn_problem *p, attn_tensor_id id, char letters[ATTN_MAX_RANK + 1]);

/* Returns whether a tensor whose axes are of this kind may be given without its first axis. */
static inline bool attn_axes_may_lack_one(attn_axes_kind kind)
{
    return kind == ATTN_AXES_OPTIONAL || kind == ATTN_AXES_SPREAD;
}

/* Returns whether this axis of a tensor of `rank` axes may have size 1 (broadcast), whatever size its letter stands
 * for. */
static inline bool attn_axis_may_be_one(attn_axes_kind kind, int axis, int rank)
{
    return kind == ATTN_AXES_SPREAD || (kind == ATTN_AXES_BROADCAST && axis < rank - 1);
}

/* Writes axes as text at `at`: "[1 or B, 1 or H, 1 or Sq, Sk]", "[total_q, H, D]". Returns the end of the text. */
char *attn_axes_put(char *at, const char *letters, bool packed, attn_axes_kind kind);

/* Returns the size that an axis letter stands for in this problem, such as Sq for 'q'. */
int64_t attn_axis_size(const attn_dims *d, char letter);

/* Returns the size that an axis letter stands for. In contrast to attn_axis_size(), the function also has the sizes of
 * the outputs of an observe (statistics of probabilities). */
int64_t attn_size_of(const attn_problem *p, const attn_dims *d, char letter);

typedef struct attn_dtype_set {
    /* `always`: dtypes that are always allowed; `as_q`: dtypes that are allowed only where q has the same dtype */
    unsigned always, as_q;
} attn_dtype_set;
extern const attn_dtype_set attn_dtype_rules[];

static inline bool attn_dtype_in(unsigned set, attn_dtype dtype)
{
    return (unsigned)dtype < ATTN_DTYPE_COUNT && (set >> dtype & 1);
}

#endif
