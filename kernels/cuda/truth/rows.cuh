/* rows.cuh: the arguments of the kernels of truth.cu (attention in float64), and where rows lie in arrays. */
#ifndef ATTN_TRUTH_ROWS_CUH
#define ATTN_TRUTH_ROWS_CUH

#include "kernels/cuda/common/args.cuh"

namespace {

enum { ROWS = 64, COLUMNS = 32, THREADS = ROWS * 2, WARPS = THREADS / 32 };
/* CHUNK: number of channels of q, k, v and dout that are loaded at a time; WIDTH: number of columns of the result that
 * a block computes */
enum { CHUNK = 32, WIDTH = 128, STAGES = 3 };
/* number of floats from one row to the next in shared memory: 4 more than a row has, to spread a warp's loads over all
 * banks */
enum { LINE = CHUNK + 4, Z_LINE = WIDTH + 4 };
enum { N_TILES = COLUMNS / 8, N_WIDTH = WIDTH / 8 };

enum pass { FORWARD, DQ, DK, DV };

/* The softmax of a query's row: the largest score (top), the logarithm of the sum of exp(score - top) (rest), and
 * delta. `only`: the score of the row's only key, or NaN if it does not see exactly one key. */
struct row_sum {
    double top, rest, delta, only;
};

/* A float32 copy of a tensor, made by widen(): rows of `width` floats, a multiple of CHUNK, with zeros behind the
 * tensor's columns. */
struct dense {
    float *data;
    uint8_t *strange; /* one byte per row: 1 if the row has a NaN or an infinity */
    int width;
};

struct truth_args {
    cuda_args a;
    dense q, k, v, dout;
    row_sum *sums;
    /* Addresses of the results; NULL: not requested. A backward always has an address for out, because delta needs
     * out. */
    attn_truth to;
    attn_score_options_as<double> scores;
    double drop_scale;
    bool options; /* whether the problem has options other than scale, causal, window and lengths */
    int64_t first_block;
};

/* ---- Where rows lie in arrays ------------------------------------------------------------------------------------ */

ATTN_HD bool packed_rows(const attn_dims &d, bool keys)
{
    return keys ? attn_keys_are_packed(&d) : d.packed;
}
static inline int64_t dense_rows(const attn_dims &d, bool keys)
{
    return (keys ? d.Sk * d.Hk : d.Sq * d.H) * (packed_rows(d, keys) ? 1 : d.B);
}

/* Returns the index of the first row of sequence b in head h, counted over all heads. */
DEVICE int64_t first_row(const attn_dims &d, const attn_sequence &s, bool keys, int64_t b, int64_t h)
{
    const int64_t rows = keys ? d.Sk : d.Sq, heads = keys ? d.Hk : d.H;
    return packed_rows(d, keys) ? h * rows + (keys ? s.k_start : s.q_start) : (b * heads + h) * rows;
}

/* The position of a row: batch row b, head h, and row number `line`. In packed tensors, `line` counts from the start of
 * the tensor, and b is 0. */
struct row_place {
    int64_t b, h, line;
};
DEVICE row_place place_of_row(const attn_dims &d, bool keys, int64_t row)
{
    const int64_t rows = keys ? d.Sk : d.Sq, heads = keys ? d.Hk : d.H, head = row / rows;
    const bool packed = packed_rows(d, keys);
    return { packed ? 0 : head / heads, packed ? head : head % heads, row % rows };
}

} // namespace

#endif
