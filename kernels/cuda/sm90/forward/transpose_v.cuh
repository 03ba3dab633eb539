/* transpose_v.cuh: V^T of float8, written to scratch by warps that have nothing else to do, ahead of those that read
 * it.
 *
 * It comes in units of KEYS keys x CHANNELS_V channels of a head. A warp that has time claims the
 * next one from a counter, transposes it and sets the unit's mark; what loads V^T waits for the
 * marks of its keys. Units are claimed in the order in which tiles of work want them. No unit is
 * assigned to a block beforehand, because a block may begin late while another kernel has its
 * multiprocessor. A warp that has claimed a unit finishes it without waiting. The warps of a
 * waiting block claim the remaining units themselves, so every wait ends. The stores are ordinary
 * ones and the loads the copy engine's: a fence between the two proxies on either side, around the
 * mark's release and acquire.
 *
 * The keys of each 16 are in the order that makes P an operand as it lies in the accumulators: place 16u + 4q + e
 * holds key 16u + 8 (e / 2) + 2q + e % 2.
 *
 * A NaN in V would reach, as 0 * NaN, rows that do not see it: V^T has zeros in its place, and the unit's mark says
 * so. (float8_e4m3fn has no infinities.) */
#ifndef ATTN_SM90_TRANSPOSE_V_CUH
#define ATTN_SM90_TRANSPOSE_V_CUH

#include "kernels/cuda/sm90/layer/scheduler.cuh"

enum { KEYS = 128, CHANNELS_V = 64 };           /* a unit of V^T */
enum { TRANSPOSERS = 2, FIRST_TRANSPOSER = 2 }; /* warps of a block that make it; the first of them */
enum { THERE = 1, THERE_NONFINITE = 3 };        /* a unit's mark; 0: not yet. Nonfinite: with zeros for NaN */

/* ---- The plan ---------------------------------------------------------------------------------------------------- */

struct transpose_plan {
    const uint8_t *V;
    int64_t batch, head, row, sweep; /* the last: the rows that a warp asks for at once */
    uint8_t *to;                     /* V^T, dense [B, Hk, Dv, pitch] */
    int64_t to_head, pitch;
    uint32_t *marks; /* of its units, by head, block of keys, block of channels */
    int Hk, Sk, Dv;
    int key_blocks, channel_blocks, units; /* of a head, of a head, of the batch */
    tile_order order;                      /* of blocks of keys */
    bool in_haste;                         /* more units are wanted at once than warps are there to make them */
    int *next_unit;
    uint32_t *any_nan; /* had any unit one? */
};

static inline int64_t transpose_units(const attn_dims &d)
{
    return d.B * d.Hk * attn_tiles(d.Sk, KEYS) * attn_tiles(d.Dv, CHANNELS_V);
}

/* ---- Units ------------------------------------------------------------------------------------------------------- */

/* A unit of V^T: places in V, in V^T and among the marks; how many keys and channels there are from its first on.
 * keys == 0: none is left. */
struct unit {
    int64_t from, to;
    int mark;
    uint32_t found; /* what the mark is to be */
    int keys, channels;
};

/* Shared memory of the warps that transpose. Each warp has room for V of one step, and the descriptions of its present
 * and its next unit, for which it has too few registers. STEPS: the number of steps in which a unit is made. */
template <int STEPS> struct transpose_memory {
    alignas(128) uint8_t staging[TRANSPOSERS][KEYS * CHANNELS_V / STEPS];
    unit units[TRANSPOSERS][2];

    static DEVICE uint32_t index() { return thread_anew() / 32 - FIRST_TRANSPOSER; }
    /* The calling warp's. */
    DEVICE uint32_t own_staging() const { return smem_addr(staging[index()]); }
    DEVICE unit &own_unit(int which) { return units[index()][which]; }
};

/* Unit n: blocks of keys in the order of tiles of work, the last keys first; of each all its channels. */
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

/* ---- A warp transposes ------------------------------------------------------------------------------------------- */

/* The bytes of a word that are NaN, all ones below the sign, become 0. */
DEVICE uint32_t without_nan(uint32_t word)
{
    const uint32_t nan = ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
    return word & ~(nan | (nan - (nan >> 7)));
}

/* What a step of a unit is: LINES keys of CELLS x 16 channels. A cell of 16 channels of a key lies in staging where
 * ldmatrix finds the 8 rows of a matrix, keys 16 i and 16 i + 1 from some on, in all banks. */
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

/* MEMORY: transpose_memory, or a type with the same members. */
template <int STEPS, class MEMORY> struct transposer {
    typedef transpose_step_shape<STEPS> step_shape;
    const transpose_plan &p;
    MEMORY &memory;

    /* The calling warp's unit: one of its present and its next. */
    DEVICE unit &at(int which) const { return memory.own_unit(which); }

    /* The warp asks for V of a step; zeros past its end. */
    DEVICE void fetch(int which, int step) const
    {
        const uint32_t lane = thread_anew() % 32;
        const int n = lane % step_shape::CELLS, channel = step_shape::channel_of(step) + n * 16;
        const unit &x = at(which);
        const uint32_t staging = memory.own_staging();
        const int keys = channel < x.channels ? x.keys - step_shape::key_of(step) : 0; /* that there are */
        const uint8_t *from = p.V + x.from + (step_shape::key_of(step) + lane / step_shape::CELLS) * p.row + channel;
#pragma unroll(STEPS == 1 ? 4 : 1)
        for (int key = lane / step_shape::CELLS; key < step_shape::LINES; key += step_shape::SWEEP, from += p.sweep)
            cp_async_16(staging + step_shape::cell(key, n), from, key < keys);
        if (STEPS > 1 && step == 0) /* and for the other steps', as far as the L2 */
#pragma unroll 1
            for (int key = lane; key < min(x.keys, KEYS); key += 32) prefetch_L2(p.V + x.from + key * p.row);
    }

    /* The warp transposes a step. Of 16 channels of 64 keys a lane gets, by matrices whose rows are chosen so,
     * channels 2g and 2g + 1 of keys 16 q to 16 q + 15, two keys a register: what it takes to make 16 neighbours of
     * each of the two. */
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
                uint32_t v[4], w[4], sums = 0; /* v[m]: keys 2m and 2m + 1 of the lane's 16; w[m]: 8 further */
                ldmatrix_x4_trans(v, from);
                ldmatrix_x4_trans(w, from + 8 * step_shape::CELLS * 16);
#pragma unroll
                for (int m = 0; m < 4; m++)
                    sums |= ((v[m] & 0x7f7f7f7f) + 0x01010101) | ((w[m] & 0x7f7f7f7f) + 0x01010101); /* NaN carries */
                if (__any_sync(0xffffffff, sums & 0x80808080)) {
                    if (lane == 0) x.found = THERE_NONFINITE;
                    opaque(v), opaque(w); /* otherwise the compiler would keep eight sums */
#pragma unroll
                    for (int m = 0; m < 4; m++) v[m] = without_nan(v[m]), w[m] = without_nan(w[m]);
                }
                store_channel<0x6420>(to + first, v, w);
                store_channel<0x7531>(to + first + p.pitch, v, w);
            }
    }

    /* 16 keys of a channel: every second byte of v and w. */
    template <int BYTES> static DEVICE void store_channel(uint8_t *to, const uint32_t (&v)[4], const uint32_t (&w)[4])
    {
        *(uint4 *)to = make_uint4(__byte_perm(v[0], w[0], BYTES), __byte_perm(v[1], w[1], BYTES),
                                  __byte_perm(v[2], w[2], BYTES), __byte_perm(v[3], w[3], BYTES));
    }

    /* The warp tells that its stores of a unit are there. */
    DEVICE void publish(const unit &x) const
    {
        fence_proxy_async_global(); /* the lane's stores, for the copy engine */
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            if (x.found == THERE_NONFINITE) *(volatile uint32_t *)p.any_nan = 1;
            store_release(p.marks + x.mark, x.found);
        }
    }

    /* One unit, if there is one. */
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
            __syncwarp(); /* all have read it */
        }
        publish(at(0));
    }

    /* As long as there is a unit left. A lane describes units to its warp. */
    DEVICE void run() const
    {
        const bool claimer = threadIdx.x % 32 == 0;
        if (claimer) at(0) = unit_of(p, claim(p.next_unit));
        __syncwarp();
        if (at(0).keys) fetch(0, 0);
        for (int n = 0; at(n).keys; n ^= 1) {
            const int claimed = claimer ? claim(p.next_unit) : 0; /* known by the time it is wanted */
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                cp_async_wait_all();
                __syncwarp();
                transpose(n, step);
                __syncwarp(); /* all have read it */
                if (step + 1 < STEPS) fetch(n, step + 1);
            }
            if (claimer) at(n ^ 1) = unit_of(p, claimed);
            __syncwarp();
            if (at(n ^ 1).keys) fetch(n ^ 1, 0); /* on its way while the stores arrive */
            publish(at(n));
        }
    }
};

/* ---- Who reads it ------------------------------------------------------------------------------------------------ */

/* Waits until V^T of a key/value head's blocks of keys [wanted, ready) is there. Returns from which on it is known
 * to be. A warp asks, a lane a mark. */
DEVICE int await_units(const transpose_plan &p, int head, int wanted, int ready)
{
    while (ready > wanted) {
        const int below = ready * p.channel_blocks - 1 - (int)(thread_anew() % 32); /* the lane's mark of the head's */
        const bool missing = below >= 0 &&
                             load_acquire(p.marks + (head * p.key_blocks * p.channel_blocks + below)) == 0;
        const uint32_t any = __ballot_sync(0xffffffff, missing);
        ready -= (uint32_t)(any ? __ffs(any) - 1 : 32) / (uint32_t)p.channel_blocks;
    }
    __syncwarp();               /* what one lane has acquired is there for all */
    fence_proxy_async_global(); /* and for the copy engine */
    return ready;
}

/* Blocks of keys up to the one that holds key `end` - 1. */
DEVICE int key_blocks_below(const transpose_plan &p, int end)
{
    return min((end + KEYS - 1) / KEYS, p.key_blocks);
}

/* Had any V a NaN of which units are there, as far as is known yet? Of units that the caller has waited for, itself or
 * for a copy of theirs, all is known. */
DEVICE bool had_any_nan(const transpose_plan &p)
{
    return *(volatile uint32_t *)p.any_nan;
}

/* Had V of a head's keys [begin, end), all of them there, a NaN? */
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
