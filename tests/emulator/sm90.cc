/* sm90.cc: the functions of sm90.h. Each block has one `engine`: its mbarriers, its copies in flight, and a log of
 * instructions for each warpgroup.
 *
 * A warpgroup's log has one entry per wgmma instruction (product, fence, commit, wait). The first of the 128 threads
 * that comes to an instruction makes the entry, and all others must come to the same instruction. Issuing an
 * instruction never waits. A product is carried out after all 128 threads have issued it; an eager product computes a
 * warp's 16 rows as soon as the 32 threads of that warp have issued it. A wait lasts until the products that it covers
 * are carried out. One warp may therefore be ahead of another as far as PTX allows.
 *
 *   fence  product  product  commit  fence  product  product  commit  wait
 *          carried out ^                     the slowest thread ^         ^ the fastest
 *
 * An `accumulator` holds 64 x N sums in flight. A thread takes part in it from its first product on, and its registers
 * for the sums then hold a signalling NaN. The wait that covers the thread's last product writes the sums to the
 * registers, and the thread takes part no longer. */
#include "tests/emulator/sm90.h"

#include <algorithm>
#include <deque>
#include <math.h>
#include <memory>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include <immintrin.h>

#include "kernels/dtype.h"
#include "tests/emulator/emulator.h"

namespace emu {
namespace {

enum { GROUP = 128, ROWS = 64, MOST_N = 256, MOST_K = 32 };

struct span {
    uint32_t from, to; /* shared addresses */
};

bool overlap(const span &a, const span &b)
{
    return a.from < b.to && b.from < a.to;
}

/* Returns the address to which a swizzle of `width` bytes moves a 16-byte piece. The swizzle xors address bits from bit
 * 7 on into the bits from bit 4 on. */
uint32_t swizzled(uint32_t address, uint32_t width)
{
    return address ^ ((address >> 7 & (width / 16 - 1)) << 4);
}

/* ---- Tensor maps ------------------------------------------------------------------------------------------------- */

const uint64_t MAP_MAGIC = UINT64_C(0x70616d726f736e65);

struct tensor_map { /* what the emulator stores in a CUtensorMap */
    uint64_t magic;
    char *address;
    uint64_t dims[5], strides[4];
    uint16_t box[5];
    /* element: bytes of an element; width: bytes of the swizzle's pattern (16: no swizzle) */
    uint8_t rank, element, width;
};
static_assert(sizeof(tensor_map) <= sizeof(CUtensorMap), "the driver's size");

const tensor_map &map_at(const CUtensorMap *map, const char *what)
{
    const tensor_map &m = *(const tensor_map *)map;
    if ((uintptr_t)map % 64 != 0) fail("%s: the tensor map at %p is not aligned to 64 bytes", what, (const void *)map);
    if (m.magic != MAP_MAGIC)
        fail("%s: at %p there is no map that cuTensorMapEncodeTiled made", what, (const void *)map);
    return m;
}

uint32_t row_bytes(const tensor_map &m)
{
    return (uint32_t)m.box[0] * m.element;
}

uint32_t box_rows(const tensor_map &m)
{
    uint32_t rows = 1;
    for (int n = 1; n < m.rank; n++) rows *= m.box[n];
    return rows;
}

/* ---- The engine: a block's mbarriers, copies in flight and logs of instructions ---------------------------------- */

/* An initialised mbarrier's word in shared memory holds this value plus the mbarrier's address. */
const uint64_t BARRIER_WORD = UINT64_C(0xb0a771e5) << 32;

struct barrier {
    uint32_t address, count, pending;
    int64_t bytes; /* number of bytes that arrivals have announced to the mbarrier and that are not copied yet */
    uint64_t phase;
    bool fenced; /* fence_mbarrier_init has followed the initialisation, so TMA may use the mbarrier */
};

struct copy {
    /* load: the copy goes from global to shared memory, otherwise from shared to global memory. late: the copy happens
     * only when no thread can run. add: the copy adds floats to global memory. */
    bool load, late, add;
    uint32_t shared;
    tensor_map map;
    int at[5];
    barrier *bar; /* the mbarrier that a load completes */
    int thread;
    int64_t group; /* for a copy to global memory: the number of its bulk group; each thread numbers its own groups */
    span where() const { return { shared, shared + row_bytes(map) * box_rows(map) }; }
};

/* The 64 x N sums of a warpgroup's products in flight. A thread takes part from its first product to the wait for its
 * last product. */
struct accumulator {
    int N, users;
    int64_t last_group;
    float *d[GROUP]; /* each thread's registers for the sums; NULL: the thread does not take part */
    float values[ROWS * MOST_N];
};

/* Operand A of a product, read from registers. */
struct register_operand {
    float values[ROWS * MOST_K];
    const uint32_t *registers[GROUP];
    uint32_t words[GROUP][4];
};

enum instruction { PRODUCT, FENCE, COMMIT, WAIT };
const char *const instruction_names[] = { "wgmma.mma_async", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group" };

struct entry {
    instruction kind;
    int number = 0; /* for a wait instruction: the number of commit groups that may stay in flight */
    /* arrived: number of threads that have issued the instruction; waited: number of threads that have waited for it */
    int arrived = 0, waited = 0;
    int lanes[4] = {}; /* number of threads of each warp that issued the instruction */
    /* Only the log entries of products use the following members. */
    int64_t group;
    bool late;         /* the product is carried out only when no thread can run */
    bool eager;        /* a warp's rows are computed as soon as all threads of that warp have issued the product */
    unsigned rows = 0; /* bit w: the 16 rows of warp w are computed */
    wgmma_operation x; /* the operands and options of the product, as its first thread issued it */
    accumulator *sums = nullptr;
    std::unique_ptr<register_operand> A;
    int spans = 0;
    span reads[4 * (MOST_N + ROWS) / 64]; /* the parts of shared memory that the product reads */
};

struct share { /* a thread's */
    /* next: number of the log entry that the thread's next instruction will get. covered: number of a log entry; the
     * thread has waited for all products (wgmma) whose entries have smaller numbers. */
    int64_t next = 0, covered = 0;
    int64_t commits = 0;
    bool fenced = false; /* the thread has executed wgmma_fence since its last wait */
    std::vector<accumulator *> held;
};

struct warpgroup {
    std::deque<entry> log;
    /* number of the first entry that is still in the log; entries are numbered from the start of the thread block */
    int64_t base = 0;
    int64_t done = 0;   /* log entries before this number have been carried out */
    int64_t groups = 0; /* number of commits among the log entries that have been carried out */
    /* Eager products are computed warp by warp. For each warp, the number of a log entry: the warp's rows of all
     * products before that entry are computed. */
    int64_t rows_done[4] = {};
    share shares[GROUP];
    entry &at(int64_t n) { return log[(size_t)(n - base)]; }
    int64_t end() const { return base + (int64_t)log.size(); }
};

/* accumulators that no product uses; the next product takes one of them, so it allocates no memory */
std::vector<std::unique_ptr<accumulator>> free_sums;
std::vector<std::unique_ptr<register_operand>> free_operands;

struct engine : agent {
    char *memory; /* host pointer that corresponds to address 0 of shared memory */
    uint32_t memory_end;
    std::deque<barrier> barriers;
    /* for each 8-byte word of shared memory: the index of its mbarrier, plus 1; 0: none */
    std::vector<uint16_t> barrier_at;
    std::vector<copy> copies;         /* in flight */
    std::vector<int64_t> bulk_groups; /* for each thread: the number of bulk groups that it has committed */
    std::deque<warpgroup> groups;
    /* stores: number of ordinary stores to shared memory; fenced: how many of them the last proxy fence covers */
    uint32_t stores = 0, fenced = 0;
    /* For each 16-byte piece of shared memory: the number of the last ordinary store to it; 0: there was none since a
     * TMA load. */
    std::vector<uint32_t> written;
    int pool = 0;               /* number of registers that setmaxnreg has released and no warp has taken */
    std::vector<int> registers; /* number of registers of each warp */

    engine();
    bool step(bool must) override;
    void thread_ends(int thread) override;
    void block_ends() override;
    void accessed(const void *pointer, size_t bytes, bool store) override;
    void describe(FILE *to) override;

    barrier &barrier_of(uint32_t bar, const char *what);
    void settle(barrier &b);
    void perform(const copy &c);
    void perform_and_drop(size_t n);
    bool ready(warpgroup &g, bool must);
    void carry_out(warpgroup &g);
    void carry_out_rows(entry &e, unsigned warps);
    void carry_out_early(warpgroup &g, int w, int64_t until);
    void check_fenced(const span &all, const char *what);
};

/* Returns the running block's engine, and creates it at the first use. */
engine &here()
{
    agent *&a = block_agent();
    if (!a) a = new engine;
    return *static_cast<engine *>(a);
}

engine::engine()
{
    memory_end = SHARED_BEGIN + shared_bytes();
    memory = shared_pointer(SHARED_BEGIN, shared_bytes(), 1, "the block") - SHARED_BEGIN;
    if ((uintptr_t)memory % 1024 != 0) fail("emulator: shared memory is not aligned as its addresses are");
    barrier_at.resize(memory_end / 8 + 1);
    written.resize(memory_end / 16 + 1);
    bulk_groups.resize((size_t)threads());
    groups.resize((size_t)(threads() + GROUP - 1) / GROUP);
    registers.assign((size_t)(threads() + 31) / 32, 65536 / threads() / 8 * 8);
}

/* Does one piece of asynchronous work: a copy or a product. Work that is marked late waits until no thread can run
 * (`must`). */
bool engine::step(bool must)
{
    size_t count = 0;
    for (const copy &c : copies) count += must || !c.late;
    for (warpgroup &g : groups) count += ready(g, must);
    if (count == 0) return false;
    size_t n = random() % count;
    for (size_t c = 0; c < copies.size(); c++)
        if ((must || !copies[c].late) && n-- == 0) {
            perform_and_drop(c);
            return true;
        }
    for (warpgroup &g : groups)
        if (ready(g, must) && n-- == 0) {
            const int64_t group = g.at(g.done).group;
            /* If no thread can run (`must`), this call carries out all ready products of the commit group. If each call
             * carried out only one product, the scheduler would have to decide once for each product. */
            do carry_out(g);
            while (must && ready(g, must) && g.at(g.done).group == group);
            return true;
        }
    return false;
}

void engine::thread_ends(int thread)
{
    for (size_t n = copies.size(); n-- > 0;)
        if (!copies[n].load && copies[n].thread == thread) perform_and_drop(n);
}

void engine::block_ends()
{
    for (const copy &c : copies)
        fail("the block ends while a TMA load of thread %d to shared 0x%x is under way", c.thread, c.shared);
    for (const barrier &b : barriers)
        if (b.bytes)
            fail("the block ends, and the mbarrier at 0x%x is still to get %lld bytes", b.address, (long long)b.bytes);
    for (size_t w = 0; w < groups.size(); w++) {
        warpgroup &g = groups[w];
        if (g.log.empty()) continue;
        const entry &e = g.log[0];
        if (e.arrived < GROUP)
            fail("warpgroup %zu: only %d of its threads issued a %s", w, e.arrived, instruction_names[e.kind]);
        fail("warpgroup %zu ends with products that were not waited for", w);
    }
    for (size_t w = 1; w < registers.size(); w++)
        if (w % 4 && registers[w] != registers[w - 1])
            fail("setmaxnreg: not all warps of warpgroup %zu executed it", w / 4);
}

void engine::describe(FILE *to)
{
    for (const barrier &b : barriers)
        fprintf(to, "\n  mbarrier 0x%x: phase %llu, %u of %u arrivals and %lld bytes to come", b.address,
                (unsigned long long)b.phase, b.pending, b.count, (long long)b.bytes);
    for (size_t w = 0; w < groups.size(); w++)
        if (!groups[w].log.empty()) {
            warpgroup &g = groups[w];
            fprintf(to, "\n  warpgroup %zu: %lld instructions of %lld carried out", w, (long long)g.done,
                    (long long)g.end());
            if (g.done == g.end()) continue;
            const entry &e = g.at(g.done);
            fprintf(to, "; the next, a %s, was issued by %d threads", instruction_names[e.kind], e.arrived);
        }
}

/* ---- mbarrier ---------------------------------------------------------------------------------------------------- */

barrier &engine::barrier_of(uint32_t bar, const char *what)
{
    uint64_t word;
    memcpy(&word, shared_pointer(bar, 8, 8, what), 8);
    const uint16_t n = barrier_at[bar / 8];
    if (n == 0) fail("%s: there is no initialised mbarrier at shared 0x%x", what, bar);
    if (word != (BARRIER_WORD | bar)) fail("%s: the mbarrier at shared 0x%x was overwritten", what, bar);
    return barriers[n - 1u];
}

void engine::settle(barrier &b)
{
    if (b.pending || b.bytes) return;
    b.phase++;
    b.pending = b.count;
}

} // namespace

void mbarrier_init(uint32_t bar, uint32_t count)
{
    engine &e = here();
    char *const word = shared_pointer(bar, 8, 8, "mbarrier.init");
    const uint64_t content = BARRIER_WORD | bar;
    if (count == 0 || count >= 1 << 20) fail("mbarrier.init: a count of %u", count);
    if (e.barrier_at[bar / 8]) fail("mbarrier.init: the mbarrier at shared 0x%x is in use", bar);
    memcpy(word, &content, 8);
    e.barriers.push_back({ bar, count, count, 0, 0, false });
    e.barrier_at[bar / 8] = (uint16_t)e.barriers.size();
}

void mbarrier_fence_init()
{
    for (barrier &b : here().barriers) b.fenced = true;
}

void mbarrier_arrive(uint32_t bar, uint32_t expected_bytes)
{
    engine &e = here();
    barrier &b = e.barrier_of(bar, "mbarrier.arrive");
    if (b.pending == 0)
        fail("mbarrier.arrive: one more than the %u that the mbarrier at shared 0x%x counts, whose phase waits for "
             "%lld bytes",
             b.count, bar, (long long)b.bytes);
    b.bytes += expected_bytes;
    if (b.bytes >= 1 << 20)
        fail("mbarrier.arrive.expect_tx: %lld bytes, more than an mbarrier counts", (long long)b.bytes);
    b.pending--;
    e.settle(b);
}

void mbarrier_wait(uint32_t bar, uint32_t parity)
{
    const barrier &b = here().barrier_of(bar, "mbarrier.try_wait");
    if (parity > 1) fail("mbarrier.try_wait.parity: %u", parity);
    wait_until([&] { return (b.phase & 1) != parity; }, parity ? "an mbarrier's odd phase" : "an mbarrier's even phase",
               bar);
}

/* ---- TMA --------------------------------------------------------------------------------------------------------- */

namespace {

/* Performs a TMA copy between shared memory and the part of the tensor map's box that lies inside the tensor. */
void engine::perform(const copy &c)
{
    const tensor_map &m = c.map;
    const uint32_t pitch = row_bytes(m), rows = box_rows(m);
    if (!c.load) check_fenced(c.where(), "a TMA store reads");
    /* Columns [first, last) of the box lie inside the tensor. */
    const int64_t first = std::min<int64_t>(std::max<int64_t>(-(int64_t)c.at[0], 0), m.box[0]);
    const int64_t last = std::max<int64_t>(std::min<int64_t>((int64_t)m.dims[0] - c.at[0], m.box[0]), first);
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t rest = r;
        bool inside = first < last;
        char *row = m.address + (int64_t)c.at[0] * m.element;
        for (int n = 1; n < m.rank; n++) {
            const int64_t x = (int64_t)c.at[n] + rest % m.box[n];
            rest /= m.box[n];
            inside = inside && x >= 0 && x < (int64_t)m.dims[n];
            row += x * (int64_t)m.strides[n - 1];
        }
        const uint32_t from = inside ? (uint32_t)first * m.element : pitch,
                       to = inside ? (uint32_t)last * m.element : pitch;
        if (inside) check_global(row + from, to - from, 1, c.load ? "a TMA load" : "a TMA store");
        for (uint32_t piece = 0; piece < pitch; piece += 16) {
            char *const shared = memory + swizzled(c.shared + r * pitch + piece, m.width);
            if (c.load && (piece < from || piece + 16 > to)) memset(shared, 0, 16);
            const uint32_t low = std::max(piece, from), high = std::min(piece + 16, to);
            if (low >= high) continue;
            if (c.load) memcpy(shared + low - piece, row + low, high - low);
            else if (c.add)
                for (uint32_t at = low; at < high; at += 4) *(float *)(row + at) += *(float *)(shared + at - piece);
            else memcpy(row + low, shared + low - piece, high - low);
        }
    }
    if (c.load) {
        const span all = c.where();
        std::fill(written.begin() + all.from / 16, written.begin() + all.to / 16, 0);
        c.bar->bytes -= pitch * rows;
        settle(*c.bar);
    }
}

/* Fails if an ordinary store to the memory `all` was not followed by a proxy fence. Without a fence, TMA and products
 * may not see the store. */
void engine::check_fenced(const span &all, const char *what)
{
    for (uint32_t n = all.from / 16; n < (all.to + 15) / 16; n++)
        if (written[n] > fenced)
            fail("%s shared 0x%x, where an ordinary store wrote since the last fence.proxy.async", what, n * 16);
}

void engine::accessed(const void *pointer, size_t bytes, bool store)
{
    const uint32_t at = (uint32_t)((const char *)pointer - memory);
    const span all = { at, at + (uint32_t)bytes };
    for (const copy &c : copies)
        if ((c.load || store) && overlap(all, c.where()))
            fail("an ordinary %s of shared 0x%x, where a TMA %s of thread %d is under way", store ? "store" : "load",
                 all.from, c.load ? "load" : "store", c.thread);
    if (!store) return;
    /* Only products of the thread's own warpgroup are checked. A store to memory that a product of another warpgroup
     * reads may be harmless, because it may store the value that is already there. */
    for (const entry &p : groups[(size_t)thread() / GROUP].log)
        for (int n = 0; n < p.spans && !p.waited; n++)
            if (overlap(all, p.reads[n]))
                fail("an ordinary store to shared 0x%x, which a product of the warpgroup may read", all.from);
    stores++;
    for (uint32_t n = all.from / 16; n < (all.to + 15) / 16; n++) written[n] = stores;
}

void engine::perform_and_drop(size_t n)
{
    const copy c = copies[n];
    copies[n] = copies.back();
    copies.pop_back();
    perform(c);
}

/* Begins the TMA copy `c`, whose tensor map and coordinates have been set. */
void begin_copy(engine &e, copy &c, uint32_t shared, int alignment, const char *what)
{
    c.shared = shared;
    c.late = chance(2);
    c.thread = thread();
    const span all = c.where();
    shared_pointer(shared, all.to - all.from, alignment, what);
    for (const copy &other : e.copies)
        if (other.load && overlap(all, other.where()))
            fail("%s: shared [0x%x, 0x%x), where a TMA load of thread %d is under way", what, all.from, all.to,
                 other.thread);
}

copy copy_of(engine &e, const CUtensorMap *map, const int *at, int rank, uint32_t shared, const char *what)
{
    copy c = {};
    c.map = map_at(map, what);
    if (c.map.rank != rank) fail("%s: %d coordinates for a map of rank %d", what, rank, c.map.rank);
    for (int n = 0; n < rank; n++) c.at[n] = at[n];
    begin_copy(e, c, shared, 128, what);
    return c;
}

/* Returns a copy of contiguous bytes, described as the copy of a tensor with one axis. */
copy copy_of_bytes(engine &e, const void *global, uint32_t bytes, uint32_t shared, const char *what)
{
    copy c = {};
    if (bytes == 0 || bytes % 16 || bytes > 65520 || (uintptr_t)global % 16)
        fail("%s: %u bytes at %p", what, bytes, global);
    c.map.address = (char *)global;
    c.map.dims[0] = bytes;
    c.map.box[0] = (uint16_t)bytes;
    c.map.rank = 1, c.map.element = 1, c.map.width = 16;
    begin_copy(e, c, shared, 16, what);
    return c;
}

} // namespace

void fence_proxy_async()
{
    engine &e = here();
    e.fenced = e.stores;
}

void tma_check_map(const CUtensorMap *map)
{
    map_at(map, "prefetch.tensormap");
}

static void begin_load(engine &e, copy c, uint32_t bar)
{
    const span all = c.where();
    c.load = true;
    c.bar = &e.barrier_of(bar, "a TMA load");
    if (!c.bar->fenced)
        fail("a TMA load: no fence_mbarrier_init since the mbarrier at shared 0x%x was initialised", bar);
    for (const copy &other : e.copies)
        if (overlap(all, other.where()))
            fail("a TMA load to shared [0x%x, 0x%x), which a TMA store of thread %d may still read", all.from, all.to,
                 other.thread);
    e.check_fenced(all, "a TMA load to");
    for (size_t w = 0; w < e.groups.size(); w++)
        for (const entry &p : e.groups[w].log)
            if (p.kind == PRODUCT && !p.waited)
                for (int n = 0; n < p.spans; n++)
                    if (overlap(all, p.reads[n]))
                        fail("a TMA load to shared [0x%x, 0x%x), which a product of warpgroup %zu may still read: "
                             "nobody waited for it",
                             all.from, all.to, w);
    e.copies.push_back(c);
}

static unsigned long loads;
static bool refuse_maps;

void tma_load(uint32_t to, const CUtensorMap *map, const int *at, int rank, uint32_t bar)
{
    loads++;
    begin_load(here(), copy_of(here(), map, at, rank, to, "a TMA load"), bar);
}

void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t bar)
{
    begin_load(here(), copy_of_bytes(here(), from, bytes, to, "a bulk load"), bar);
}

void bulk_store(void *to, uint32_t from, uint32_t bytes)
{
    engine &e = here();
    copy c = copy_of_bytes(e, to, bytes, from, "a bulk store");
    c.group = e.bulk_groups[(size_t)c.thread];
    e.copies.push_back(c);
}

void bulk_add(float *to, uint32_t from, uint32_t bytes)
{
    engine &e = here();
    copy c = copy_of_bytes(e, to, bytes, from, "a bulk add");
    c.add = true;
    c.group = e.bulk_groups[(size_t)c.thread];
    e.copies.push_back(c);
}

void tma_store(const CUtensorMap *map, const int *at, int rank, uint32_t from)
{
    engine &e = here();
    copy c = copy_of(e, map, at, rank, from, "a TMA store");
    c.group = e.bulk_groups[(size_t)c.thread];
    e.copies.push_back(c);
}

void bulk_commit()
{
    here().bulk_groups[(size_t)thread()]++;
}

void bulk_wait(int groups_left)
{
    engine &e = here();
    const int mine = thread();
    const int64_t limit = e.bulk_groups[(size_t)mine] - groups_left;
    auto awaited = [&](const copy &c) { return !c.load && c.thread == mine && c.group < limit; };
    wait_until([&] { return std::none_of(e.copies.begin(), e.copies.end(), awaited); }, "cp.async.bulk.wait_group");
}

/* ---- wgmma ------------------------------------------------------------------------------------------------------- */

namespace {

/* A product's operand in shared memory: `lines` rows of A or columns of B, each with 32 bytes along k. */
struct operand {
    uint32_t start, lbo, sbo, width;
};

operand operand_of(uint64_t descriptor, const char *name)
{
    static const uint32_t widths[4] = { 0, 128, 64, 32 };
    operand x;
    x.start = (uint32_t)(descriptor & 0x3fff) << 4;
    x.lbo = (uint32_t)(descriptor >> 16 & 0x3fff) << 4;
    x.sbo = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    x.width = widths[descriptor >> 62];
    if (descriptor & UINT64_C(0x3ff1c000c000c000)) fail("wgmma: %s's descriptor has bits set that mean nothing", name);
    if (descriptor >> 49 & 7) fail("wgmma: %s's descriptor has a base offset, which is not modelled", name);
    if (x.width == 0) fail("wgmma: %s is not swizzled, which is not modelled", name);
    return x;
}

/* Adds the parts of shared memory that an operand occupies to the product's list of reads. */
void add_spans(entry &e, const operand &x, int lines, int element, bool mn, uint32_t memory_end, const char *name)
{
    const int before = e.spans;
    if (!mn) {
        if (x.start % x.width + 32 > x.width) fail("wgmma: %s's step of k crosses a row of %u bytes", name, x.width);
        const uint32_t row = x.start - x.start % x.width;
        e.reads[e.spans++] = { row, row + (uint32_t)(lines - 1) / 8 * x.sbo + 8 * x.width };
    } else {
        const uint32_t chunk = x.width / (uint32_t)element;
        if (x.start % x.width) fail("wgmma: %s is MN-major and begins inside a row", name);
        for (uint32_t n = 0; n < (uint32_t)lines; n += chunk) {
            const uint32_t from = x.start + n / chunk * x.lbo;
            e.reads[e.spans++] = { from, from + x.sbo + 8 * x.width };
        }
    }
    for (int n = before; n < e.spans; n++)
        if (e.reads[n].from < SHARED_BEGIN || e.reads[n].to > memory_end)
            fail("wgmma: %s takes shared [0x%x, 0x%x), outside of the block's", name, e.reads[n].from, e.reads[n].to);
}

int k_of(wgmma_type type)
{
    return type == WGMMA_E4M3 ? 32 : 16;
}

/* Converts 16 bytes to floats: 8 numbers of 16 bits or 16 of 8 bits. */
void widen(wgmma_type type, const char *piece, float *to)
{
    static const float *const e4m3 = [] {
        static float table[256];
        for (int n = 0; n < 256; n++) table[n] = attn_e4m3_to_f32((uint8_t)n);
        return table;
    }();
    if (type == WGMMA_E4M3) {
        for (int n = 0; n < 16; n++) to[n] = e4m3[(uint8_t)piece[n]];
        return;
    }
    const __m128i x = _mm_loadu_si128((const __m128i *)piece);
    if (type == WGMMA_F16) _mm256_storeu_ps(to, _mm256_cvtph_ps(x));
    else _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)));
}

/* Writes an operand's numbers as float32: number k of row or column `line` becomes to[line * K + k], or to[k * lines
 * + line] if transposed. */
template <bool TRANSPOSED>
void read_operand(const char *memory, const operand &x, wgmma_type type, uint32_t lines, bool mn, float *to)
{
    const uint32_t K = (uint32_t)k_of(type);
    float piece[16];
    if (!mn) {
        for (uint32_t r = 0; r < lines; r++)
            for (uint32_t half = 0; half < 2; half++) {
                widen(type, memory + swizzled(x.start + r / 8 * x.sbo + r % 8 * x.width + half * 16, x.width), piece);
                for (uint32_t n = 0, k = half * K / 2; n < K / 2; n++, k++)
                    to[TRANSPOSED ? k * lines + r : r * K + k] = piece[n];
            }
        return;
    }
    const uint32_t chunk = x.width / 2;
    for (uint32_t k = 0; k < K; k++)
        for (uint32_t line = 0; line < lines; line += 8) {
            const uint32_t at = x.start + line / chunk * x.lbo + k / 8 * x.sbo + k % 8 * x.width + line % chunk * 2;
            widen(type, memory + swizzled(at, x.width), piece);
            for (uint32_t n = 0; n < 8; n++) to[TRANSPOSED ? k * lines + line + n : (line + n) * K + k] = piece[n];
        }
}

typedef float vector __attribute__((vector_size(32), aligned(4)));

/* Computes 8 * WIDTH columns of d[rows x N] = (accumulate ? d : 0) + A[rows x K] B[K x N]. */
template <int WIDTH>
void multiply_columns(float *d, const float *A, const float *B, int rows, int N, int K, bool accumulate)
{
    for (int i = 0; i < rows; i += 4) {
        vector sum[4][WIDTH] = {};
        if (accumulate)
            for (int r = 0; r < 4; r++)
                for (int c = 0; c < WIDTH; c++) sum[r][c] = *(const vector *)(d + (i + r) * N + c * 8);
        for (int k = 0; k < K; k++)
            for (int c = 0; c < WIDTH; c++) {
                const vector b = *(const vector *)(B + k * N + c * 8);
                for (int r = 0; r < 4; r++) sum[r][c] += A[(i + r) * K + k] * b;
            }
        for (int r = 0; r < 4; r++)
            for (int c = 0; c < WIDTH; c++) *(vector *)(d + (i + r) * N + c * 8) = sum[r][c];
    }
}

/* Computes 8 columns of a product of e4m3 numbers as the tensor core does: each addend is truncated at 2^-13 of the
 * largest addend's power of two. */
void multiply_columns_short(float *d, const float *A, const float *B, int rows, int N, bool accumulate)
{
    const int K = 32;
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (int i = 0; i < rows; i++) {
        vector *const to = (vector *)(d + i * N);
        const vector before = accumulate ? *to : vector{};
        vector largest = (vector)_mm256_andnot_ps(sign, (__m256)before), whole = before;
        for (int k = 0; k < K; k++) {
            const vector p = A[i * K + k] * *(const vector *)(B + k * N);
            largest = (vector)_mm256_max_ps((__m256)largest, _mm256_andnot_ps(sign, (__m256)p));
            whole += p;
        }
        const __m256i power = _mm256_and_si256(_mm256_castps_si256((__m256)largest), _mm256_set1_epi32(0x7f800000));
        const vector unit = (vector)_mm256_castsi256_ps(_mm256_sub_epi32(power, _mm256_set1_epi32(13 << 23)));
        /* The factor that converts numbers to units, where a unit is 2^-13 of the largest addend's power of two. */
        const vector units = (vector)_mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(267 << 23), power));
        vector sum = (vector)_mm256_round_ps((__m256)(before * units), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        for (int k = 0; k < K; k++) {
            const vector p = A[i * K + k] * *(const vector *)(B + k * N);
            sum += (vector)_mm256_round_ps((__m256)(p * units), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        }
        sum *= unit;
        /* If the unit (2^-13 of the largest addend) is below the normal numbers of float32, nothing is truncated, and
         * the result is the plain sum. If an addend is not finite, the result is also the plain sum. */
        const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(14 << 23), power);
        const __m256 infinite = _mm256_cmp_ps((__m256)(whole - whole), _mm256_setzero_ps(), _CMP_NEQ_UQ);
        *to = (vector)_mm256_blendv_ps((__m256)sum, (__m256)whole, _mm256_or_ps(_mm256_castsi256_ps(small), infinite));
    }
}

void multiply(float *d, const float *A, const float *B, int rows, int N, wgmma_type type, bool accumulate)
{
    static const char *const text = getenv("ATTN_EMULATOR_E4M3");
    static const bool exact = text && strcmp(text, "exact") == 0;
    int n = 0;
    if (type == WGMMA_E4M3 && !exact)
        for (; n < N; n += 8) multiply_columns_short(d + n, A, B + n, rows, N, accumulate);
    for (; n + 16 <= N; n += 16) multiply_columns<2>(d + n, A, B + n, rows, N, k_of(type), accumulate);
    for (; n < N; n += 8) multiply_columns<1>(d + n, A, B + n, rows, N, k_of(type), accumulate);
}

/* Returns whether the warpgroup's log has a product that can be carried out now. */
bool engine::ready(warpgroup &g, bool must)
{
    while (g.done < g.end() && g.at(g.done).kind != PRODUCT) {
        if (g.at(g.done).kind == COMMIT) g.groups++;
        g.done++;
    }
    if (g.done == g.end()) return false;
    const entry &e = g.at(g.done);
    return e.arrived == GROUP && (must || !e.late);
}

/* Computes the rows of some warps of a product; `warps` has one bit per warp. */
void engine::carry_out_rows(entry &e, unsigned warps)
{
    static thread_local float A[ROWS * MOST_K], B[MOST_N * MOST_K];
    const wgmma_operation &x = e.x;
    const int K = k_of(x.type);
    for (int n = 0; n < e.spans; n++) check_fenced(e.reads[n], "a product reads");
    if (!e.A) read_operand<false>(memory, operand_of(x.A, "A"), x.type, ROWS, x.A_mn, A);
    read_operand<true>(memory, operand_of(x.B, "B"), x.type, (uint32_t)x.N, x.B_mn, B);
    const float *const from = e.A ? e.A->values : A;
    for (int w = 0; w < 4; w++)
        if (warps >> w & 1)
            multiply(e.sums->values + w * 16 * x.N, from + w * 16 * K, B, 16, x.N, x.type, x.accumulate);
    e.rows |= warps;
}

void engine::carry_out(warpgroup &g)
{
    entry &e = g.at(g.done);
    if (e.rows != 15) carry_out_rows(e, 15 & ~e.rows);
    g.done++;
    ready(g, true); /* skips the log entries of other instructions, up to the next product */
}

/* Computes warp w's rows of the eager products (products computed warp by warp) before log entry `until`. Warp w must
 * have issued all these products. Stops where rows of an earlier product are missing. */
void engine::carry_out_early(warpgroup &g, int w, int64_t until)
{
    int64_t &n = g.rows_done[w];
    for (n = std::max(n, g.done); n < until; n++) {
        entry &e = g.at(n);
        if (e.kind != PRODUCT || e.rows >> w & 1) continue;
        if (!e.eager || e.lanes[w] < 32) return;
        carry_out_rows(e, 1u << w);
    }
}

/* The registers of sums in flight hold POISON plus the register's number, a signalling NaN. Arithmetic turns it into a
 * quiet NaN, which the wait notices. */
const uint32_t POISON = 0x7fa5a000;

/* Returns where register i of a thread belongs in the 64 x N sums. */
int place_of(int thread, int i, int N)
{
    return (thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8) * N + i / 4 * 8 + thread % 4 * 2 + i % 2;
}

void join(accumulator &a, int t, float *d, bool read)
{
    a.d[t] = d;
    a.users++;
    for (int i = 0; i < a.N / 2; i++) {
        const uint32_t poison = POISON + (uint32_t)i;
        if (read) a.values[place_of(t, i, a.N)] = d[i];
        memcpy(d + i, &poison, 4);
    }
}

void leave(accumulator &a, int t)
{
    float *const d = a.d[t];
    for (int i = 0; i < a.N / 2; i++) {
        uint32_t bits;
        memcpy(&bits, d + i, 4);
        if (bits != POISON + (uint32_t)i)
            fail("wgmma: accumulator %d was changed between the product's issue and the wait for it", i);
        d[i] = a.values[place_of(t, i, a.N)];
    }
    a.d[t] = nullptr;
    a.users--;
}

/* Stores a thread's part of operand A: 4 registers of 2 or 4 elements each, in the fragment layout of the PTX ISA. */
void take_registers(register_operand &A, int t, const uint32_t *registers, wgmma_type type)
{
    const int K = k_of(type), in_register = K / 8;
    char bytes[16];
    float values[16];
    memcpy(A.words[t], registers, 16);
    memcpy(bytes, registers, 16);
    A.registers[t] = registers;
    widen(type, bytes, values);
    for (int n = 0; n < 4; n++)
        memcpy(A.values + (t / 32 * 16 + t % 32 / 4 + n % 2 * 8) * K + n / 2 * (K / 2) + t % 4 * in_register,
               values + n * in_register, (size_t)in_register * 4);
}

/* Returns the log entry of the calling thread's next instruction. Fails if another thread of the warpgroup issued a
 * different instruction there. `first`: the calling thread is the first of its warpgroup at this entry. */
entry &next_entry(engine &e, instruction kind, int number, bool &first)
{
    const int t = thread() % GROUP;
    warpgroup &g = e.groups[(size_t)thread() / GROUP];
    share &s = g.shares[t];
    first = s.next == g.end();
    if (first) {
        g.log.emplace_back();
        entry &x = g.log.back();
        x.kind = kind;
        x.number = number;
    }
    entry &x = g.at(s.next++);
    x.arrived++;
    if (x.kind != kind || x.number != number)
        fail("wgmma: this thread executes %s (%d) where another of its warpgroup executed %s (%d)",
             instruction_names[kind], number, instruction_names[x.kind], x.number);
    return x;
}

/* Removes log entries from the start of the log, as long as all threads have passed them and their work is done. */
void shorten(warpgroup &g)
{
    while (!g.log.empty() && g.base < g.done && g.log[0].arrived == GROUP &&
           (g.log[0].kind != PRODUCT || g.log[0].waited == GROUP)) {
        if (g.log[0].A) free_operands.push_back(std::move(g.log[0].A));
        g.log.pop_front();
        g.base++;
    }
}

} // namespace

void wgmma_issue(const wgmma_operation &x)
{
    engine &e = here();
    const int t = thread() % GROUP, element = x.type == WGMMA_E4M3 ? 1 : 2;
    warpgroup &g = e.groups[(size_t)thread() / GROUP];
    share &s = g.shares[t];
    bool first;
    entry &p = next_entry(e, PRODUCT, 0, first);
    if (first) {
        p.x = x;
        p.group = s.commits;
        p.late = chance(2);
        p.eager = chance(4);
        /* the previous product is not committed yet, so this product joins the group of the previous one */
        if (g.log.size() > 1 && g.at(g.end() - 2).kind == PRODUCT)
            p.late = g.at(g.end() - 2).late, p.eager = g.at(g.end() - 2).eager;
        if (x.N % 8 || x.N < 8 || x.N > MOST_N) fail("wgmma: N = %d", x.N);
        if (element == 1 && (x.A_mn || x.B_mn)) fail("wgmma: operands of 8 bits are K-major");
        if (!x.A_registers) add_spans(p, operand_of(x.A, "A"), ROWS, element, x.A_mn, e.memory_end, "A");
        add_spans(p, operand_of(x.B, "B"), x.N, element, x.B_mn, e.memory_end, "B");
        if (x.A_registers) {
            if (free_operands.empty()) p.A.reset(new register_operand);
            else p.A = std::move(free_operands.back()), free_operands.pop_back();
        }
    } else if (x.type != p.x.type || x.N != p.x.N || x.A != p.x.A || x.B != p.x.B ||
               !x.A_registers != !p.x.A_registers || x.accumulate != p.x.accumulate || x.A_mn != p.x.A_mn ||
               x.B_mn != p.x.B_mn)
        fail("wgmma: the threads of a warpgroup issue different products");
    for (const copy &c : e.copies)
        if (c.load)
            for (int n = 0; n < p.spans; n++)
                if (overlap(c.where(), p.reads[n]))
                    fail("wgmma: a product reads shared [0x%x, 0x%x), which a TMA load to 0x%x is still to fill",
                         p.reads[n].from, p.reads[n].to, c.shared);

    accumulator *held = nullptr;
    for (accumulator *a : s.held)
        if (a->d[t] == x.d) held = a;
    if ((!held || x.A_registers) && !s.fenced)
        fail("wgmma: registers that may have been touched, and no wgmma.fence since the last wait");
    if (held && held->N != x.N)
        fail("wgmma: products of N = %d and of N = %d share accumulators in flight", held->N, x.N);
    if (!p.sums) {
        if (!held && free_sums.empty()) free_sums.emplace_back(new accumulator);
        if (held) p.sums = held;
        else {
            p.sums = free_sums.back().release();
            free_sums.pop_back();
            p.sums->N = x.N;
            p.sums->users = 0;
            p.sums->last_group = 0;
            std::fill(p.sums->d, p.sums->d + GROUP, nullptr);
        }
    }
    if (held ? held != p.sums : p.sums->d[t] != nullptr)
        fail("wgmma: the threads of a warpgroup use different accumulators");
    if (!held) {
        join(*p.sums, t, x.d, x.accumulate);
        s.held.push_back(p.sums);
    }
    p.sums->last_group = std::max(p.sums->last_group, p.group);
    if (x.A_registers) take_registers(*p.A, t, x.A_registers, x.type);
    if (++p.lanes[t / 32] == 32 && p.eager) e.carry_out_early(g, t / 32, s.next);
}

void wgmma_fence()
{
    bool first;
    engine &e = here();
    next_entry(e, FENCE, 0, first);
    e.groups[(size_t)thread() / GROUP].shares[thread() % GROUP].fenced = true;
}

void wgmma_commit()
{
    bool first;
    engine &e = here();
    next_entry(e, COMMIT, 0, first);
    e.groups[(size_t)thread() / GROUP].shares[thread() % GROUP].commits++;
}

void wgmma_wait(int groups_left)
{
    bool first;
    engine &e = here();
    const int t = thread() % GROUP;
    warpgroup &g = e.groups[(size_t)thread() / GROUP];
    share &s = g.shares[t];
    next_entry(e, WAIT, groups_left, first);
    const int64_t limit = s.commits - groups_left;
    auto done = [&] {
        if (g.groups < limit) e.ready(g, true); /* past commits */
        return g.groups >= limit;
    };
    wait_until(done, "wgmma.wait_group", (uint32_t)groups_left);
    s.fenced = false;
    for (s.covered = std::max(s.covered, g.base); s.covered < s.next; s.covered++) {
        entry &p = g.at(s.covered);
        if (p.kind != PRODUCT) continue;
        if (p.group >= limit) break;
        p.waited++;
        if (p.A && memcmp(p.A->words[t], p.A->registers[t], 16) != 0)
            fail("wgmma: registers of A were changed between the product's issue and the wait for it");
    }
    for (size_t n = s.held.size(); n-- > 0;) {
        accumulator *const a = s.held[n];
        if (a->last_group >= limit) continue;
        leave(*a, t);
        s.held.erase(s.held.begin() + (long)n);
        if (a->users == 0) free_sums.emplace_back(a);
    }
    shorten(g);
}

/* ---- setmaxnreg: registers that warps release and take ----------------------------------------------------------- */

void setmaxnreg(int count, bool increase)
{
    engine &e = here();
    const size_t w = (size_t)thread() / 32;
    int mine = count;
    if (count < 24 || count > 256 || count % 8) fail("setmaxnreg: %d registers", count);
    warp<int>("setmaxnreg", mine, [](int *const *all) {
        for (int n = 1; n < 32; n++)
            if (*all[n] != *all[0]) fail("setmaxnreg: %d and %d registers in one warp", *all[0], *all[n]);
    });
    if (increase ? e.registers[w] > count : e.registers[w] < count)
        fail("setmaxnreg: from %d registers to %d", e.registers[w], count);
    auto granted = [&] {
        const int more = (count - e.registers[w]) * 32;
        if (more <= e.pool) e.pool -= more, e.registers[w] = count;
        return e.registers[w] == count;
    };
    wait_until(granted, "registers", (uint32_t)count);
}

/* ---- Instructions that never wait -------------------------------------------------------------------------------- */

namespace {
struct matrix_rows {
    char *row;
    const uint32_t *r;
};
} // namespace

void stmatrix_x4(uint32_t row, const uint32_t (&r)[4])
{
    matrix_rows mine = { shared_pointer(row, 16, 16, "stmatrix"), r };
    shared_written(thread(), row, 16);
    here().accessed(mine.row, 16, true);
    warp<matrix_rows>("stmatrix", mine, [](matrix_rows *const *all) {
        /* n numbers the 32 rows of the four 8 x 8 matrices. The eight elements of row n lie in four lanes, two elements
         * in each lane. */
        for (int n = 0; n < 32; n++)
            for (int c = 0; c < 4; c++) memcpy(all[n]->row + c * 4, &all[n % 8 * 4 + c]->r[n / 8], 4);
    });
}

void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4])
{
    matrix_rows mine = { shared_pointer(row, 16, 16, "stmatrix"), r };
    shared_written(thread(), row, 16);
    here().accessed(mine.row, 16, true);
    warp<matrix_rows>("stmatrix.trans", mine, [](matrix_rows *const *all) {
        /* n numbers the 32 rows of the four 8 x 8 matrices. Element c of row n lies in lane c * 4 + n % 8 / 2. It is in
         * the low half of the register if n is even, and in the high half otherwise. */
        for (int n = 0; n < 32; n++)
            for (int c = 0; c < 8; c++) {
                const uint16_t x = (uint16_t)(all[c * 4 + n % 8 / 2]->r[n / 8] >> n % 2 * 16);
                memcpy(all[n]->row + c * 2, &x, 2);
            }
    });
}

static uint32_t e4m3_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (x != x) return 0x7f;
    if (size >= 0x43e80000) return sign | 0x7e; /* 464 and larger numbers become 448, the largest e4m3 */
    /* Below 2^-6 all e4m3 numbers are multiples of 2^-9. */
    if (size < 0x3c800000) return sign | (uint32_t)(int)nearbyintf(fabsf(x) * 512);
    return sign | std::min<uint32_t>((size + 0x7ffff + (size >> 20 & 1) - (120 << 23)) >> 20, 0x7e);
}

uint32_t pack_e4m3(float x0, float x1, float x2, float x3)
{
    return e4m3_of(x0) | e4m3_of(x1) << 8 | e4m3_of(x2) << 16 | e4m3_of(x3) << 24;
}

} // namespace emu

extern "C" unsigned long emu_tma_loads()
{
    return emu::loads;
}
extern "C" void emu_refuse_maps(int refuse)
{
    emu::refuse_maps = refuse != 0;
}

/* ---- cuTensorMapEncodeTiled -------------------------------------------------------------------------------------- */

extern "C" CUresult emu_cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                               void *address, const cuuint64_t *dims, const cuuint64_t *strides,
                                               const cuuint32_t *box, const cuuint32_t *element_strides,
                                               CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                               CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    /* bytes of an element, by CUtensorMapDataType */
    static const uint8_t elements[] = { 1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4 };
    static const uint8_t widths[] = { 16, 32, 64, 128 };
    const CUresult wrong = CUDA_ERROR_INVALID_VALUE;
    if (emu::refuse_maps) return wrong;
    if (!map || (uintptr_t)map % 64 || (unsigned)type > CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ || rank < 1 || rank > 5)
        return wrong;
    if (!address || (uintptr_t)address % 16 || !dims || !box || !element_strides || (rank > 1 && !strides))
        return wrong;
    /* the driver also accepts other kinds of interleaving, swizzling and filling, which the emulator does not model */
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || (unsigned)swizzle > CU_TENSOR_MAP_SWIZZLE_128B) return wrong;
    if ((unsigned)promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        return wrong;
    emu::tensor_map m = {};
    m.magic = emu::MAP_MAGIC;
    m.address = (char *)address;
    m.rank = (uint8_t)rank;
    m.element = elements[type];
    m.width = widths[swizzle];
    for (cuuint32_t n = 0; n < rank; n++) {
        if (dims[n] == 0 || dims[n] > UINT64_C(1) << 32 || box[n] == 0 || box[n] > 256) return wrong;
        /* the driver allows element strides up to 8, but the emulator models only 1 */
        if (n && element_strides[n] != 1) return wrong;
        m.dims[n] = dims[n];
        m.box[n] = (uint16_t)box[n];
        if (n == 0) continue;
        if (strides[n - 1] == 0 || strides[n - 1] % 16 || strides[n - 1] >= UINT64_C(1) << 40) return wrong;
        m.strides[n - 1] = strides[n - 1];
    }
    if (emu::row_bytes(m) % 16) return wrong;
    if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && emu::row_bytes(m) > m.width) return wrong;
    if (emu::row_bytes(m) < m.width)
        emu::fail("cuTensorMapEncodeTiled: a box narrower than its swizzle is not modelled");
    memcpy((void *)map, &m, sizeof m);
    return CUDA_SUCCESS;
}
