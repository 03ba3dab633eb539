/* axes.h: which size stands on which axis of which tensor. Internal to attention.c and check.c.
 *
 * An axis is called by a letter:
 *   b batch   q queries (packed: total_q)   k keys (packed: total_k)   h heads of q   g key/value heads
 *   d head size of q and k   e head size of v   c sequences + 1   m 1, Hk or H (mask_startend_rows)   n bounds of
 * mask_startend_rows The sizes b q h d come from q, k g from k, e from v, and b from cu_seqlens_q when packed; all
 * other shapes must agree. */
#ifndef ATTN_AXES_H
#define ATTN_AXES_H

#include "attention.h"

typedef struct attn_axes_info {
    const char *plain, *packed; /* letters; packed "": not possible with cu_seqlens */
    bool layout;                /* bhsd swaps sequence and head */
    bool broadcast;             /* every axis but the last may be 1 */
} attn_axes_info;

extern const attn_axes_info attn_axes[ATTN_TENSOR_COUNT];

/* The letters of a tensor in this problem's layout and packing, as the client sees them; returns the rank. */
int attn_axes_of(const attn_problem *p, attn_tensor_id id, char letters[ATTN_MAX_RANK + 1]);

/* The size that belongs to a letter. */
int64_t attn_axis_size(const attn_dims *d, char letter);

#endif
