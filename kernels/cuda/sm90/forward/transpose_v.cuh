/* transpose_v.cuh: writes V^T of a float8 V to scratch memory, by warps that have no other work.
 *
 * A unit is KEYS keys x CHANNELS_V channels of a head. A warp claims the next unit from a counter, in the order in
 * which work tiles need them, transposes it and sets the unit's mark (a word in global memory: V^T of the unit is
 * ready). A warp that loads V^T waits for the marks of its keys. Every wait ends, because a warp finishes a claimed
 * unit without waiting, and a waiting block's other warps claim the remaining units. V^T is stored by ordinary stores
 * and loaded by TMA, so two fences between the generic and the asynchronous proxy are needed: one before a mark is
 * released, one after it was acquired.
 *
 * Within each 16 keys, V^T has the keys in the order in which the accumulators hold P, so that P can be an operand
 * without a change: position 16u + 4q + e holds key 16u + 8 (e / 2) + 2q + e % 2.
 *
 * V^T has a zero in place of a NaN, because 0 * NaN is NaN even in rows that do not see the key; the unit's mark
 * records that. (float8_e4m3fn has no infinities.) */
#ifndef ATTN_SM90_TRANSPOSE_V_CUH
#define ATTN_SM90_TRANSPOSE_V_CUH

#include "kernels/cuda/sm90/layer/scheduler.cuh"

/* numbers of keys and of channels in a unit, which a warp transposes at a time */
enum { KEYS = 128, CHANNELS_V = 64 };
/* number of warps of a block that only transpose V, and the first of these warps */
enum { TRANSPOSERS = 2, FIRST_TRANSPOSER = 2 };
/* Whether a unit of V^T (128 keys by 64 channels) is ready. 0: no. THERE: yes. THERE_NONFINITE: yes, with zeros in
 * place of NaN. */
enum { THERE = 1, THERE_NONFINITE = 3 };

/* ---- The plan: parameters of the transposition ------------------------------------------------------------------- */

struct transpose_plan {
    const uint8_t *V;
    /* Strides of V in bytes. sweep: a warp loads several rows of V at a time; the rows that it loads next are `sweep`
     * bytes further on. */
    int64_t batch, head, row, sweep;
    uint8_t *to; /* V^T, a dense tensor [B, Hk, Dv, pitch] */
    int64_t to_head, pitch;
    /* [head][block of keys][block of channels]: 0, THERE or THERE_NONFINITE */
    uint32_t *marks;
    int Hk, Sk, Dv;
    /* numbers of blocks of 128 keys per head, of blocks of 64 channels per head, and of units (128 keys by 64 channels)
     * of all heads */
    int key_blocks, channel_blocks, units;
    tile_order order;
    /* Whether each consumer warp transposes 128 keys by 64 channels before its other work (help_to_transpose()). This
     * is so if the two transposing warps of each block would be too slow alone. */
    bool in_haste;
    int *next_unit;
    uint32_t *any_nan; /* set to 1 if a warp found a NaN in V */
};

static inline int64_t transpose_units(const attn_dims &d)
{
    return d.B * d.Hk * attn_tiles(d.Sk, KEYS) * attn_tiles(d.Dv, CHANNELS_V);
}

/* ---- Units of V^T: what a warp transposes at a time -------------------------------------------------------------- */

/* A unit of V^T (at most 128 keys by 64 channels): where it begins in V and in V^T, and the index of its mark. keys and
 * channels: how many keys and channels V has from the beginning of the unit on; keys = 0: no unit is left. */
struct unit {
    int64_t from, to;
    int mark;
    uint32_t found; /* THERE or THERE_NONFINITE, which will be stored in `marks` */
    int keys, channels;
};

/* Memory of the warps that transpose V. A unit is transposed in STEPS steps. Each warp has a buffer for one step, and
 * the descriptions of the present and the next unit. */
template <int STEPS> struct transpose_memory {
    alignas(128) uint8_t staging[TRANSPOSERS][KEYS * CHANNELS_V / STEPS];
    unit units[TRANSPOSERS][2];

    static DEVICE uint32_t index() { return thread_anew() / 32 - FIRST_TRANSPOSER; }
    DEVICE uint32_t own_staging() const { return smem_addr(staging[index()]); }
    DEVICE unit &own_unit(int which) { return units[index()][which]; }
};

/* Returns unit n of V^T (128 keys by 64 channels) in the order in which work tiles need them: a head's last keys come
 * first. */
DEVICE unit unit_of(const transpose_plan &p, int n)
{
    unit x = {};
    if (n >= p.units) return x;
    const int line = n / p.channel_blocks, channels = n - line * p.channel_blocks;
    const head_tile place = head_tile_of(p.order, line);
    const int b = place.head / p.Hk, block = p.key_blocks - 1 - place.tile;
    const int key0 = block * KEYS, channel0 = channels * CHANNELS_V;
    x.from = b * p.batch + (place.head - b * p.Hk) * p.head + key0 * p.row + channel0;
    x.to = place.head * p.to_head + channel0 * p.pitch + key0;
    x.mark = (place.head * p.key_blocks + block) * p.channel_blocks + channels, x.found = THERE;
    x.keys = p.Sk - key0, x.channels = p.Dv - channel0;
    return x;
}

/* ---- The transposition by a warp --------------------------------------------------------------------------------- */

/* Sets the bytes of a word that are NaN to 0. A NaN of e4m3 has all bits below the sign set. */
DEVICE uint32_t without_nan(uint32_t word)
{
    const uint32_t nan = ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
    return word & ~(nan | (nan - (nan >> 7)));
}

/* Layout in shared memory of the elements of V that a warp transposes in one step: LINES keys with CELLS cells (16
 * channels of one key) each. ldmatrix reads without bank conflicts, because the 8 rows of a matrix lie in different
 * banks. */
template <int STEPS> struct transpose_step_shape {
    static const int LINES = STEPS == 1 ? KEYS : 64, CELLS = STEPS == 1 ? CHANNELS_V / 16 : 1, SWEEP = 32 / CELLS;
    static_assert(LINES * CELLS * 16 * STEPS == KEYS * CHANNELS_V, "all of the unit");
    static DEVICE int key_of(int step) { return STEPS == 1 ? 0 : step / 4 * LINES; }
    static DEVICE int channel_of(int step) { return STEPS == 1 ? 0 : step % 4 * 16; }
    static DEVICE uint32_t cell(uint32_t key, uint32_t n)
    {
        return 16 * ((key * CELLS + n) ^ (key / 16 % 4 * (CELLS == 1 ? 2 : 1)));
    }
};

/* A warp that transposes units of V. MEMORY is transpose_memory, or a type with members of the same names. */
template <int STEPS, class MEMORY> struct transposer {
    typedef transpose_step_shape<STEPS> step_shape;
    const transpose_plan &p;
    MEMORY &memory;

    /* Returns the description of the unit that the calling warp transposes now or next. `which` alternates between 0
     * and 1. */
    DEVICE unit &at(int which) const { return memory.own_unit(which); }

    /* Starts to copy the elements of V for one of STEPS steps to shared memory. Bytes past the end become zeros. */
    DEVICE void fetch(int which, int step) const
    {
        const uint32_t lane = thread_anew() % 32;
        const int n = lane % step_shape::CELLS, channel = step_shape::channel_of(step) + n * 16;
        const unit &x = at(which);
        const uint32_t staging = memory.own_staging();
        const int keys = channel < x.channels ? x.keys - step_shape::key_of(step) : 0;
        const uint8_t *from = p.V + x.from + (step_shape::key_of(step) + lane / step_shape::CELLS) * p.row + channel;
#pragma unroll(STEPS == 1 ? 4 : 1)
        for (int key = lane / step_shape::CELLS; key < step_shape::LINES; key += step_shape::SWEEP, from += p.sweep)
            cp_async_16(staging + step_shape::cell(key, n), from, key < keys);
        if (STEPS > 1 && step == 0)
#pragma unroll 1
            for (int key = lane; key < min(x.keys, KEYS); key += 32) prefetch_L2(p.V + x.from + key * p.row);
    }

    /* Transposes the elements of one step, and stores them in V^T. With g = lane / 4 and q = lane % 4, ldmatrix gives a
     * lane channels 2 g and 2 g + 1 (of 16) of keys 16 q to 16 q + 15 (of 64), two keys per register. */
    DEVICE void transpose(int which, int step) const
    {
        const uint32_t lane = thread_anew() % 32, row = lane % 8, key = 16 * (row / 2) + 2 * (lane / 8) + row % 2;
        unit &x = at(which);
        const uint32_t staging = memory.own_staging();
        const int channels = x.channels - step_shape::channel_of(step);
        uint8_t *to = p.to + x.to + (step_shape::channel_of(step) + lane / 4 * 2) * p.pitch + step_shape::key_of(step) +
                      lane % 4 * 16;
#pragma unroll 1
        for (int n = 0; n < step_shape::CELLS && n * 16 < channels; n++, to += 16 * p.pitch)
#pragma unroll 1
            for (int first = 0; first < step_shape::LINES; first += 64) {
                const uint32_t from = staging + step_shape::cell(first + key, n);
                /* v[m] has keys 2m and 2m + 1 of the lane's 16 keys; w[m] has keys 2m + 8 and 2m + 9 */
                uint32_t v[4], w[4], sums = 0;
                ldmatrix_x4_trans(v, from);
                ldmatrix_x4_trans(w, from + 8 * step_shape::CELLS * 16);
#pragma unroll
                /* A NaN has all bits below the sign set, so adding 1 to these bits sets the sign bit for a NaN only. */
                for (int m = 0; m < 4; m++)
                    sums |= ((v[m] & 0x7f7f7f7f) + 0x01010101) | ((w[m] & 0x7f7f7f7f) + 0x01010101);
                if (__any_sync(0xffffffff, sums & 0x80808080)) {
                    if (lane == 0) x.found = THERE_NONFINITE;
                    opaque(v), opaque(w); /* without opaque(), the compiler would keep the sums in registers */
#pragma unroll
                    for (int m = 0; m < 4; m++) v[m] = without_nan(v[m]), w[m] = without_nan(w[m]);
                }
                store_channel<0x6420>(to + first, v, w);
                store_channel<0x7531>(to + first + p.pitch, v, w);
            }
    }

    /* Stores 16 keys of one channel. BYTES, a selector of __byte_perm(), takes every second byte of v and w. */
    template <int BYTES> static DEVICE void store_channel(uint8_t *to, const uint32_t (&v)[4], const uint32_t (&w)[4])
    {
        *(uint4 *)to = make_uint4(__byte_perm(v[0], w[0], BYTES), __byte_perm(v[1], w[1], BYTES),
                                  __byte_perm(v[2], w[2], BYTES), __byte_perm(v[3], w[3], BYTES));
    }

    /* Sets the unit's mark, by which other warps see that its V^T is ready. All stores of this warp to V^T become
     * visible before the mark. */
    DEVICE void publish(const unit &x) const
    {
        fence_proxy_async_global(); /* makes this lane's stores visible to TMA */
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            if (x.found == THERE_NONFINITE) *(volatile uint32_t *)p.any_nan = 1;
            store_release(p.marks + x.mark, x.found);
        }
    }

    DEVICE void make_one() const
    {
        if (threadIdx.x % 32 == 0) at(0) = unit_of(p, claim(p.next_unit));
        __syncwarp();
        if (!at(0).keys) return;
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            fetch(0, step);
            cp_async_wait_all();
            __syncwarp();
            transpose(0, step);
            __syncwarp(); /* all lanes have read V in shared memory, which the next step may overwrite */
        }
        publish(at(0));
    }

    DEVICE void run() const
    {
        const bool claimer = threadIdx.x % 32 == 0;
        if (claimer) at(0) = unit_of(p, claim(p.next_unit));
        __syncwarp();
        if (at(0).keys) fetch(0, 0);
        for (int n = 0; at(n).keys; n ^= 1) {
            /* claim the next unit early, to hide the latency of the atomic operation */
            const int claimed = claimer ? claim(p.next_unit) : 0;
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                cp_async_wait_all();
                __syncwarp();
                transpose(n, step);
                __syncwarp(); /* all lanes have read V in shared memory, which the next step may overwrite */
                if (step + 1 < STEPS) fetch(n, step + 1);
            }
            if (claimer) at(n ^ 1) = unit_of(p, claimed);
            __syncwarp();
            /* load V of the next unit while V^T of this unit is stored */
            if (at(n ^ 1).keys) fetch(n ^ 1, 0);
            publish(at(n));
        }
    }
};

/* ---- Functions for warps that read V^T --------------------------------------------------------------------------- */

/* Waits until V^T of a key/value head is ready in the blocks of keys `wanted` to `ready` - 1. Returns the lowest block
 * from which on all blocks are now known to be ready; the next call must get this number as `ready`. All lanes of the
 * warp must call this. */
DEVICE int await_units(const transpose_plan &p, int head, int wanted, int ready)
{
    while (ready > wanted) {
        const int below = ready * p.channel_blocks - 1 - (int)(thread_anew() % 32);
        const bool missing = below >= 0 &&
                             load_acquire(p.marks + (head * p.key_blocks * p.channel_blocks + below)) == 0;
        const uint32_t any = __ballot_sync(0xffffffff, missing);
        ready -= (uint32_t)(any ? __ffs(any) - 1 : 32) / (uint32_t)p.channel_blocks;
    }
    __syncwarp();               /* all lanes now see V^T, although only one lane has acquired each mark */
    fence_proxy_async_global(); /* now TMA sees V^T too */
    return ready;
}

/* Returns the number of blocks of keys up to and including the one with key `end` - 1. */
DEVICE int key_blocks_below(const transpose_plan &p, int end)
{
    return min((end + KEYS - 1) / KEYS, p.key_blocks);
}

/* Returns whether a warp has found a NaN in V so far. The answer covers all keys that the caller has waited for, or
 * whose V^T has arrived in shared memory. */
DEVICE bool had_any_nan(const transpose_plan &p)
{
    return *(volatile uint32_t *)p.any_nan;
}

/* Returns whether V had a NaN in any block of KEYS keys that contains one of the keys `begin` to `end` - 1 of a head.
 * V^T of these blocks must be ready. */
DEVICE bool had_nan(const transpose_plan &p, int64_t head, int begin, int end)
{
    const uint32_t *const marks = p.marks + head * p.key_blocks * p.channel_blocks;
    const int first = begin / KEYS, last = key_blocks_below(p, end);
    bool any = false;
#pragma unroll 1
    for (int n = first * p.channel_blocks; n < last * p.channel_blocks; n++) any |= marks[n] == THERE_NONFINITE;
    return any;
}

#endif
