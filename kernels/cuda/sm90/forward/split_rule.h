/* split_rule.h: into how many splits (parts of the keys) the Hopper forward divides the keys of a sequence, so that few
 * rows over many keys give work to all multiprocessors.
 *
 * A row's bits depend on the length of the splits. The length follows from the sequence's own numbers of queries and
 * keys, the heads of a group, the window, the head sizes and the options. It does not depend on the number of key/value
 * heads (a long problem may be computed in parts with fewer heads), the batch, or the number of multiprocessors. */
#ifndef ATTN_SM90_SPLIT_RULE_H
#define ATTN_SM90_SPLIT_RULE_H

#include "kernels/cuda/common/kernels.h"

/* What the split rule needs to know of a kernel's work tiles. */
struct split_tile {
    int BM, BN; /* rows of a work tile, and keys of a tile of keys */
    int least;  /* the least number of keys that a split may have */
    int most;   /* Splits should give a key/value head at most this number of work tiles. */
    bool packs; /* whether a work tile may have rows of several heads */
};

struct split_rule {
    /* Sequences of at most most_queries queries and at least least_keys keys are split, if they have four keys or more
     * per query. */
    int most_queries, least_keys;
    int BM, BN, least, most; /* members of split_tile */
    int queries;             /* number of queries of the whole problem if only a part of it is computed, otherwise 0 */
    /* the largest number of keys that the rows of a work tile see together; FAR if there is no limit on the left or on
     * the right */
    int window;
    /* A work tile has the rows of 2^shift query heads; row r belongs to query r >> shift. per_tile: into how many sets
     * of 2^shift heads the query heads of a group are divided. */
    int shift, per_tile;
};

/* The rule for problems without splits (parts of the keys): it splits no sequence that has queries. */
const split_rule NO_SPLITS = { 0, 0, 1, 1, 1, 1, 0, 0, 0, 0 };

ATTN_HD bool has_splits(const split_rule &r, int Sq, int Sk)
{
    return Sq <= r.most_queries && Sk >= r.least_keys && Sq <= Sk / 4;
}

/* Returns the most splits into which the keys of a work tile are divided, for a sequence with Sq queries and Sk keys;
 * 0: the keys are not split. The result never falls when keys are added. */
ATTN_HD int split_count(const split_rule &r, int Sq, int Sk)
{
    if (!has_splits(r, Sq, Sk)) return 0;
    if (r.queries) Sq = r.queries;
    const int tiles = ((Sq << r.shift) + r.BM - 1) / r.BM * r.per_tile, keys = r.window < Sk ? r.window : Sk,
              most = keys / r.least, wanted = r.most / (tiles > 1 ? tiles : 1);
    return wanted < most ? wanted : most;
}

/* Returns how many key tiles each split has, or 0 if the keys are not split. */
ATTN_HD int split_length(const split_rule &r, int Sq, int Sk)
{
    const int count = split_count(r, Sq, Sk);
    if (count == 0) return 0;
    /* a window may begin and end within a tile; it then touches up to two tiles more than the whole tiles that fit into
     * its length */
    const int all = (Sk + r.BN - 1) / r.BN, seen = r.window < Sk ? r.window / r.BN + 2 : all;
    return ((seen < all ? seen : all) + count - 1) / count;
}

/* Of which sequences of a problem the keys are split: none, some or all. With SPLITS_SOME, the sequences' lengths are
 * in device memory, so only the kernels know which sequences are split. */
enum split_part : uint8_t { SPLITS_NONE, SPLITS_SOME, SPLITS_ALL };

/* The functions of forward_split.cu, which computes problems without options and with head sizes up to 256.
 * plain_split_rule() returns the rule that splits the keys of a problem, and plain_split_workspace() the bytes of
 * workspace that split_launch() needs. split_launch() computes the sequences whose keys are split. In packed problems
 * it skips sequences of at most chip->decode_rows rows. `memory` is aligned to 128 bytes. */
split_rule plain_split_rule(const attn_plan *plan);
size_t plain_split_workspace(const cuda_chip *chip, const attn_plan *plan);
cudaError_t split_launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory);

/* Returns whether forward.cu would split the keys of a float8 problem. */
bool splits_float8(const cuda_chip *chip, const attn_plan *plan);

#endif
