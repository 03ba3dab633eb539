/* emulator.cc: implements the fibers (CUDA threads), the choice of the fiber that runs next, and shared memory; see
 * emulator.h. */
#include "emulator.h"

#include <algorithm>
#include <dlfcn.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector>

#include "races.h"

#ifndef __x86_64__
#error "the switch between fibers below is written for x86-64"
#endif

dim3 gridDim, blockDim;

namespace emu {

enum { GROUPS = THREADS / 128, BARRIERS = 16, RESIDENT = 3 };
enum {
    SHARED_STEP = (SHARED_MOST + 4095) / 4096 * 4096,
    STACK_BYTES = 64 << 10,
    PAGE = 4096,
    PIECE = 16 /* number of bytes that one cp.async copies */
};

/* A named barrier (bar.sync, bar.arrive) and the number of threads that it waits for. */
struct named_barrier {
    int arrived, expected;
    unsigned round;
    /* for barrier_all(): whether some thread passed false. Uses of the barrier alternate between the two elements,
     * because a fast thread may already be at the next use. */
    bool objected[2];
    /* for the race check: epochs (counts of barriers) of the warps that have arrived at the barrier */
    clocks clock;
};

/* A cp.async that has been issued and not waited for. */
struct copy {
    uint32_t to;
    const char *from; /* NULL: zeros */
    int thread, group;
    size_t bytes;
    bool late, done;
    /* The bytes that must be at `to` until the thread waits for the copy. At first they are the bytes that were at `to`
     * when the copy was issued, and later the copied bytes. If other bytes are at `to`, a thread has written there,
     * which is an error. */
    char there[PIECE];
};

struct copies {
    std::vector<copy> list; /* the thread's copies; the thread has waited for those before index `first` */
    size_t first = 0;
    int group = 0;
};

struct static_place {
    const void *place;
    char *memory;
};

/* The state of a thread block if `running` is true, and otherwise room for a thread block. Up to RESIDENT thread blocks
 * run at the same time. */
struct block {
    bool running;
    int64_t number;
    uint3 index;
    int live;
    fiber fibers[THREADS];
    warp_state warps[WARPS];
    team groups[GROUPS], all;
    named_barrier barriers[BARRIERS];
    /* A thread belongs to three teams: its warp, its warpgroup and its thread block. For each of the three: what each
     * thread passes to a collective (an instruction that all threads of a team execute together). */
    void *brought[3][THREADS];
    char *stacks[THREADS];
    copies queues[THREADS];
    agent *work;
    char *shared;   /* SHARED_MOST */
    uint32_t bytes; /* number of bytes of the block's shared memory that are in use */
    std::vector<static_place> places;
    uint32_t pattern; /* the 4-byte pattern with which shared memory begins */
    race_watch races;
    /* for each 16-byte piece of shared memory: the number of copies to it that no thread has waited for */
    uint8_t in_flight[SHARED_MOST / PIECE];
};

fiber *self;
bool quiet;
char failure[1024];

namespace {

/* The kernel launch that is running. */
struct {
    const char *name, *where;
    int64_t number;
    launch_shape shape;
    void (*body)(void *);
    void *context;
    /* a warp executes at most 2^longest collectives (instructions of a whole warp) before another warp may run */
    int longest;
    unsigned lateness; /* how many of 4 asynchronous copies happen only at the last possible moment */
    bool starves;      /* true in launches that starve warps (a starved warp runs only when no other warp can) */
} now;

block *resident[RESIDENT];
char *all_shared; /* the shared memories of all resident blocks, SHARED_STEP bytes for each block */
void *main_stack;
void *launch_failed_at[5]; /* in run() */
uint64_t state;
uint64_t starved;       /* one bit per starved warp; a starved warp runs only when no other warp can */
uint32_t starved_lanes; /* the lanes of a starved warp that run only when no other lane can */
int starved_for;        /* number of scheduling decisions until the starved warps are drawn anew */
/* number of collectives (instructions of a whole warp) that the running warp may still execute before another warp gets
 * its turn */
int burst;

} // namespace

uint64_t random()
{
    state += 0x9e3779b97f4a7c15; /* splitmix64 */
    uint64_t x = state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

int threads()
{
    return (int)(blockDim.x * blockDim.y * blockDim.z);
}
int64_t block_number()
{
    return self->block->number;
}
uint3 block_index()
{
    return self->block->index;
}
team &warp_team()
{
    return *self->warp;
}
team &group_team()
{
    return self->block->groups[self->thread / 128];
}
team &block_team()
{
    return self->block->all;
}
agent *&block_agent()
{
    return self->block->work;
}

/* Switches fibers: pushes the callee-saved registers, stores the stack pointer at *from, and continues on the stack
 * `to`. */
extern "C" void emu_switch(void **from, void *to);
asm(".text\n"
    ".globl emu_switch\n"
    ".type emu_switch, @function\n"
    "emu_switch:\n"
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp, (%rdi)\n"
    "mov %rsi, %rsp\n"
    "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
    /* A jump ends the function. With ret, the processor would predict wrongly where the function returns to. */
    "pop %rcx\n jmp *%rcx\n"
    ".size emu_switch, .-emu_switch\n");

/* ---- Reporting failures ------------------------------------------------------------------------------------------ */

static void say_launch(FILE *to)
{
    const char *with = now.where ? strchr(now.where, '[') : nullptr;
    fprintf(to, "\nemulator: launch %lld: %s %s, grid (%u, %u, %u) of %d threads", (long long)now.number,
            now.name ? now.name : "no kernel", with ? with : "", gridDim.x, gridDim.y, gridDim.z, threads());
}

static void who(FILE *to)
{
    fflush(stdout);
    say_launch(to);
    if (self)
        fprintf(to, "\nemulator: block (%u, %u, %u), thread %d (warp %d, lane %d)", self->block->index.x,
                self->block->index.y, self->block->index.z, self->thread, self->thread / 32, lane());
    fprintf(to, "\nemulator: ");
}

void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(failure, sizeof failure, format, args);
    va_end(args);
    if (!quiet) {
        who(stderr);
        fprintf(stderr, "%s\n", failure);
    }
    if (!now.name) abort();
    self = nullptr;
    __builtin_longjmp(launch_failed_at, 1);
}

static void on_fault(int, siginfo_t *info, void *)
{
    fail("an access to address %p, which is nobody's", info->si_addr);
}

/* If results of rows are not finite, a launcher (a host function that starts kernels) computes these rows a second
 * time, one by one. It calls this function first. The call fails if ATTN_EMULATOR_REPAIRS is "none". */
void repair_begins()
{
    const char *allowed = getenv("ATTN_EMULATOR_REPAIRS");
    if (allowed && !strcmp(allowed, "none")) fail("rows are computed one by one, and ATTN_EMULATOR_REPAIRS is none");
}

[[noreturn]] static void deadlock()
{
    for (block *b : resident) {
        if (!b || !b->running || quiet) continue;
        fprintf(stderr, "\nemulator: block (%u, %u, %u):", b->index.x, b->index.y, b->index.z);
        for (int first = 0, t = 0; t < threads(); t = first) {
            const fiber &f = b->fibers[t];
            for (first = t; first < threads() && b->fibers[first].what == f.what && b->fibers[first].number == f.number;
                 first++)
                continue;
            fprintf(stderr, "\n  threads %d to %d: %s", t, first - 1,
                    f.ended  ? "ended"
                    : f.what ? f.what
                             : "may go on");
            if (f.number) fprintf(stderr, " 0x%x", f.number);
        }
        if (b->work) b->work->describe(stderr);
    }
    self = nullptr;
    fail("all fibers wait: a deadlock");
}

/* ---- Fibers: one for each CUDA thread ---------------------------------------------------------------------------- */

static void switch_to(fiber *next)
{
    fiber *const before = self;
    if (next == before) return;
    self = next;
    emu_switch(before ? &before->stack_pointer : &main_stack, next ? next->stack_pointer : main_stack);
}

static void mark_ready(fiber *f)
{
    f->warp->ready |= 1u << f->thread % 32;
    f->warp->polling &= ~(1u << f->thread % 32);
    f->waits_on = nullptr;
}

/* Returns the lanes of the warp that are starved now (that run only when no other lane can). */
static uint32_t asleep(const warp_state *w)
{
    return starved >> w->first->thread / 32 & 1 ? starved_lanes : 0;
}

/* Returns a ready fiber among `lanes`: the first fiber at or after lane w->turn, cyclically. */
static fiber *lane_of(const warp_state *w, uint32_t lanes)
{
    const uint32_t ready = w->ready & lanes, turned = ready >> w->turn | ready << (32 - w->turn) % 32;
    return w->first + (__builtin_ctz(turned) + w->turn) % 32;
}

static void perform(block *b, copy &c);

/* Performs some asynchronous copies of random threads, except copies that are to happen late. */
static void let_copies_happen(block *b)
{
    for (int n = 0; n < 8; n++) {
        copies &q = b->queues[random() % (unsigned)threads()];
        for (size_t i = q.first; i < q.list.size(); i++)
            if (!q.list[i].late && chance(2)) perform(b, q.list[i]);
    }
}

static bool may_go_on(warp_state *w, uint32_t lanes)
{
    for (uint32_t left = w->polling & lanes; left; left &= left - 1) {
        fiber *f = w->first + __builtin_ctz(left);
        if (f->condition(f->context)) mark_ready(f);
    }
    return (w->ready & lanes) != 0;
}

static bool agents_step(bool must)
{
    bool something = false;
    for (block *b : resident)
        if (b && b->running && b->work && (must || chance(2))) something |= b->work->step(must);
    return something;
}

/* Returns a random fiber that may run, or NULL if there is none. `hungry`: search only the starved lanes (which run
 * only when no other lane can); otherwise search only the other lanes. */
static fiber *choose(bool hungry)
{
    warp_state *open[RESIDENT * WARPS];
    int count = 0;
    for (block *b : resident)
        for (int w = 0; b && b->running && w < (threads() + 31) / 32; w++) {
            warp_state *const x = &b->warps[w];
            if ((x->ready | x->polling) & (hungry ? asleep(x) : ~asleep(x))) open[count++] = x;
        }
    while (count) {
        const unsigned pick = random() % (unsigned)count;
        const uint32_t lanes = hungry ? asleep(open[pick]) : ~asleep(open[pick]);
        if (may_go_on(open[pick], lanes)) return lane_of(open[pick], lanes);
        open[pick] = open[--count];
    }
    return nullptr;
}

/* Returns a fiber that may run, of any resident block. If no fiber may run, ends the launch with "deadlock". */
static fiber *schedule()
{
    burst = 1 << random() % (unsigned)(now.longest + 1);
    for (block *b : resident)
        if (b && b->running) let_copies_happen(b);
    agents_step(false);
    if (now.starves && --starved_for < 0) {
        starved_for = 1 << random() % 12;
        starved = chance(2) ? UINT64_C(1) << random() % (unsigned)((threads() + 31) / 32) : random() & random();
        starved_lanes = chance(2) ? 0xffffffff : chance(2) ? 1u << random() % 32 : (uint32_t)random();
    }
    for (;;) {
        fiber *f = choose(false);
        /* If only starved threads (which run when no other thread can) are ready, the scheduler first carries out a
         * pending copy or product. It does so in seven cases of eight. */
        if (!f && starved && !chance(8) && agents_step(true)) continue;
        if (!f && starved) f = choose(true);
        if (f) return f;
        if (!agents_step(true)) deadlock();
    }
}

static void go_on()
{
    const uint32_t lanes = ~asleep(self->warp);
    switch_to(self->warp->ready & lanes ? lane_of(self->warp, lanes) : schedule());
}

static void suspend(const char *what, const void *waits_on)
{
    self->what = what;
    self->waits_on = waits_on;
    self->warp->ready &= ~(1u << lane());
    go_on();
    self->what = nullptr;
    self->number = 0;
    self->waits_on = nullptr;
}

void yield()
{
    switch_to(schedule());
}

/* ---- Teams: threads that execute an instruction together --------------------------------------------------------- */

void arrive(team &t, const char *name, void *mine)
{
    if (!t.name) t.name = name;
    if (t.name != name && strcmp(t.name, name))
        fail("comes to %s while others of its warp, group or block wait in %s", name, t.name);
    t.brought[self - t.first] = mine;
    t.arrived++;
}

bool all_here(const team &t, const char *name, bool whole)
{
    if (whole && t.live != t.size)
        fail("%s needs all %d threads, of which %d have ended", name, t.size, t.size - t.live);
    return t.arrived == t.live;
}

void await(team &t, const char *name)
{
    suspend(name, &t);
}

void release(team &t)
{
    t.round++;
    t.arrived = 0;
    t.name = nullptr;
    for (int n = 0; n < t.size; n += 32) {
        warp_state &w = *t.first[n].warp;
        w.ready = w.alive; /* all lanes of the warp have arrived at the instruction, so all of them may continue */
        w.turn = random() % 32;
    }
    if (--burst < 0) yield();
}

/* Removes a thread that has ended from its team. A collective (instruction of the whole team) that waited only for this
 * thread is then complete. */
static void leave(team &t)
{
    t.live--;
    for (int n = 0; n < t.size && t.arrived == t.live; n++)
        if (t.first[n].waits_on == &t && !(t.first[n].warp->ready >> n % 32 & 1)) {
            mark_ready(t.first + n);
            return;
        }
}

void sync_warp()
{
    int none = 0;
    gather<int>(
        warp_team(), "__syncwarp", none, [](int *const *) { watch_warp(self->block->races, self->thread / 32); },
        false);
}

static void whole_block()
{
    bool warps[WARPS];
    clocks arrived = {};
    for (int w = 0; w < WARPS; w++) warps[w] = w * 32 < threads();
    watch_barrier(self->block->races, warps, &arrived);
}

void sync_block()
{
    int none = 0;
    gather<int>(
        block_team(), "__syncthreads", none, [](int *const *) { whole_block(); }, false);
}

bool sync_block_or(bool x)
{
    gather<bool>(
        block_team(), "__syncthreads_or", x,
        [](bool *const *all) {
            bool any = false;
            whole_block();
            for (int n = 0; n < threads(); n++) any |= all[n] && *all[n];
            for (int n = 0; n < threads(); n++)
                if (all[n]) *all[n] = any;
        },
        false);
    return x;
}

static named_barrier &barrier_join(int id, int count, const char *what, bool waits)
{
    if (id < 1 || id >= BARRIERS) fail("%s of barrier %d: named barriers are 1 to 15", what, id);
    named_barrier &b = self->block->barriers[id];
    if (b.arrived && b.expected != count)
        fail("%s of barrier %d for %d threads while others wait there for %d", what, id, count, b.expected);
    b.expected = count;
    if (++b.arrived == count) {
        bool warps[WARPS] = {};
        b.arrived = 0;
        b.round++;
        b.objected[b.round % 2] = false;
        for (int n = 0; n < threads(); n++)
            if (self->block->fibers[n].waits_on == &b) {
                mark_ready(&self->block->fibers[n]);
                warps[n / 32] = true;
            }
        warps[self->thread / 32] |= waits;
        watch_barrier(self->block->races, warps, &b.clock);
    }
    return b;
}

void barrier_arrive(int id, int count)
{
    watch_arrive(self->block->races, self->thread / 32, &self->block->barriers[id & 15].clock);
    barrier_join(id, count, "bar.arrive", false);
}

void barrier_sync(int id, int count)
{
    const unsigned round = self->block->barriers[id & 15].round;
    named_barrier &b = barrier_join(id, count, "bar.sync", true);
    while (b.round == round) {
        self->number = (uint32_t)id;
        suspend("bar.sync", &b);
    }
    if (--burst < 0) yield();
}

bool barrier_all(int id, int count, bool x)
{
    named_barrier &b = self->block->barriers[id & 15];
    const unsigned round = b.round;
    b.objected[round % 2] |= !x;
    barrier_sync(id, count);
    return !b.objected[round % 2];
}

void poll(bool (*condition)(void *), void *context, const char *what, uint32_t number)
{
    if (chance(16)) yield();
    while (!condition(context)) {
        self->condition = condition;
        self->context = context;
        self->number = number;
        self->warp->polling |= 1u << lane();
        suspend(what, context);
    }
    watch_everything(self->block->races, self->thread / 32);
}

/* ---- Finding races ----------------------------------------------------------------------------------------------- */

/* Returns the source file and line of a return address, by addr2line, or "?" without that program. */
static const char *line_of(const void *where)
{
    static char line[256];
    char command[4200];
    Dl_info file;
    strcpy(line, "?");
    if (!dladdr(where, &file)) return line;
    snprintf(command, sizeof command, "addr2line -e '%s' %p 2>/dev/null", file.dli_fname,
             (void *)((const char *)where - (const char *)file.dli_fbase - 1));
    FILE *out = popen(command, "r");
    if (out && fgets(line, sizeof line, out)) line[strcspn(line, "\n")] = 0;
    if (out) pclose(out);
    return line;
}

/* Checks an access to shared memory for races. `what` names the instruction; NULL stands for an ordinary load or store
 * at the code address `where`. */
static void watch(int thread, size_t at, size_t bytes, bool store, const char *what, const void *where = nullptr)
{
    const int other = watch_access(self->block->races, thread, at, bytes, store);
    if (other >= 0)
        fail("thread %d %s shared memory at 0x%zx, which thread %d accesses too with nothing that orders the two (%s)",
             thread, store ? "writes" : "reads", at + SHARED_BEGIN, other, what ? what : line_of(where));
}

static __attribute__((noinline)) void access_shared(const void *p, size_t bytes, bool store, bool is_volatile,
                                                    const void *where)
{
    if (!self) return;
    const size_t at = (size_t)((const char *)p - self->block->shared);
    if (at + bytes > SHARED_MOST) fail("%p is another block's shared memory", p);
    if (!is_volatile) watch(self->thread, at, bytes, store, nullptr, where);
    if (self->block->work) self->block->work->accessed(p, bytes, store);
}

/* The compiler inserts a call of this function before each load and store (see races.h). Only accesses to shared memory
 * are checked, and volatile ones never count as races. */
static inline void access(const void *p, size_t bytes, bool store, bool is_volatile, const void *where)
{
    if (__builtin_expect((size_t)((const char *)p - all_shared) < (size_t)RESIDENT * SHARED_STEP, 0))
        access_shared(p, bytes, store, is_volatile, where);
}

/* clang-format off: each row of the table stays on one line */
#define ACCESS(name, bytes, store, is_volatile)                            \
    extern "C" void __tsan_##name(void *p)                                 \
    {                                                                      \
        access(p, bytes, store, is_volatile, __builtin_return_address(0)); \
    }
#define ACCESSES(n)                                    \
    ACCESS(read##n, n, false, false)                   \
    ACCESS(unaligned_read##n, n, false, false)         \
    ACCESS(write##n, n, true, false)                   \
    ACCESS(unaligned_write##n, n, true, false)         \
    ACCESS(volatile_read##n, n, false, true)           \
    ACCESS(unaligned_volatile_read##n, n, false, true) \
    ACCESS(volatile_write##n, n, true, true) ACCESS(unaligned_volatile_write##n, n, true, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

/* These functions have the names of ThreadSanitizer's functions for atomic operations. The compiler makes the kernels'
 * host code call them. */
#define ATOMICS(bits, T)                                                                                \
    extern "C" T __tsan_atomic##bits##_load(const volatile T *p, int)                                   \
    {                                                                                                   \
        return *p;                                                                                      \
    }                                                                                                   \
    extern "C" void __tsan_atomic##bits##_store(volatile T *p, T x, int)                                \
    {                                                                                                   \
        *p = x;                                                                                         \
    }                                                                                                   \
    extern "C" T __tsan_atomic##bits##_fetch_or(volatile T *p, T x, int)                                \
    {                                                                                                   \
        return __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST);                                               \
    }                                                                                                   \
    extern "C" bool __tsan_atomic##bits##_compare_exchange_strong(volatile T *p, T *old, T x, int, int) \
    {                                                                                                   \
        return __atomic_compare_exchange_n(p, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
    }
ATOMICS(8, uint8_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
/* clang-format on */

extern "C" void __tsan_read_range(void *p, size_t bytes)
{
    access(p, bytes, false, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void *p, size_t bytes)
{
    access(p, bytes, true, false, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}

/* ---- Shared memory ----------------------------------------------------------------------------------------------- */

uint32_t shared_bytes()
{
    return self->block->bytes;
}

uint32_t shared_address(const void *pointer)
{
    const ptrdiff_t at = (const char *)pointer - self->block->shared;
    if (at < 0 || at > (ptrdiff_t)self->block->bytes) fail("%p is not in the block's shared memory", pointer);
    return SHARED_BEGIN + (uint32_t)at;
}

char *shared_pointer(uint32_t address, size_t bytes, size_t align, const char *what)
{
    const block *b = self->block;
    if (address < SHARED_BEGIN || address - SHARED_BEGIN + bytes > b->bytes)
        fail("%s: %zu bytes at 0x%x are not in the block's shared memory, 0x%x to 0x%x", what, bytes, address,
             SHARED_BEGIN, SHARED_BEGIN + b->bytes);
    if (address % align) fail("%s: 0x%x is not a multiple of %zu", what, address, align);
    return b->shared + (address - SHARED_BEGIN);
}

static void fill(const block *b, char *memory, size_t bytes)
{
    for (size_t n = 0; n < bytes; n++) memory[n] = (char)(b->pattern >> n % 4 * 8);
}

char *dynamic_shared(size_t align)
{
    if ((uintptr_t)self->block->shared % align) fail("shared memory does not start on %zu bytes", align);
    return self->block->shared;
}

void *static_shared(const void *place, size_t bytes, size_t align)
{
    block *b = self->block;
    for (const static_place &p : b->places)
        if (p.place == place) return p.memory;
    const size_t at = (b->bytes + align - 1) / align * align;
    if (at + bytes > SHARED_MOST) fail("more than %d bytes of shared memory", (int)SHARED_MOST);
    b->places.push_back({ place, b->shared + at });
    b->bytes = (uint32_t)(at + bytes);
    fill(b, b->shared + at, bytes);
    return b->shared + at;
}

const char *shared_row(int thread, uint32_t address, const char *what)
{
    const block *b = self->block;
    const char *row = shared_pointer(address, PIECE, PIECE, what);
    watch(thread, (size_t)(row - b->shared), PIECE, false, what);
    uint32_t word[PIECE / 4];
    memcpy(word, row, PIECE);
    if (b->in_flight[(row - b->shared) / PIECE])
        fail("%s reads shared memory at 0x%x, where a cp.async that was not waited for writes", what, address);
    if (word[0] == b->pattern && word[1] == word[0] && word[2] == word[0] && word[3] == word[0])
        fail("%s reads shared memory at 0x%x, which nobody has written", what, address);
    return row;
}

void shared_written(int thread, uint32_t address, size_t bytes)
{
    watch(thread, address - SHARED_BEGIN, bytes, true, "an instruction");
}

/* ---- Asynchronous copies (cp.async) ------------------------------------------------------------------------------ */

static char *target(block *b, const copy &c)
{
    return b->shared + (c.to - SHARED_BEGIN);
}

static void check_untouched(block *b, const copy &c)
{
    if (memcmp(target(b, c), c.there, c.bytes))
        fail("shared memory at 0x%x was written while a cp.async of thread %d to it was on its way", c.to, c.thread);
}

static void perform(block *b, copy &c)
{
    if (c.done) return;
    check_untouched(b, c);
    if (c.from) memcpy(c.there, c.from, c.bytes);
    else memset(c.there, 0, c.bytes);
    memcpy(target(b, c), c.there, c.bytes);
    c.done = true;
}

void cp_async(uint32_t to, const void *from, bool valid, size_t bytes)
{
    block *b = self->block;
    copies &q = *self->copies;
    copy c = { to,    valid ? (const char *)from : nullptr, self->thread, q.group,
               bytes, random() % 4 < now.lateness,          false,        {} };
    memcpy(c.there, shared_pointer(to, bytes, bytes, "cp.async"), bytes);
    if (valid) check_global(from, bytes, bytes, "cp.async");
    watch(self->thread, to - SHARED_BEGIN, bytes, true, "cp.async");
    b->in_flight[(to - SHARED_BEGIN) / PIECE]++;
    q.list.push_back(c);
}

void cp_async_commit()
{
    self->copies->group++;
}

/* Performs all copies of the thread whose commit group is before `group`. */
static void finish_copies(int group)
{
    block *b = self->block;
    copies &q = *self->copies;
    for (; q.first < q.list.size() && q.list[q.first].group < group; q.first++) {
        copy &c = q.list[q.first];
        if (c.done) check_untouched(b, c);
        perform(b, c);
        watch(self->thread, c.to - SHARED_BEGIN, c.bytes, true, "cp.async");
        b->in_flight[(c.to - SHARED_BEGIN) / PIECE]--;
    }
    if (q.first == q.list.size()) q.list.clear(), q.first = 0;
}

void cp_async_wait(int newest)
{
    /* In one case of four, other threads run before the copy is made. A thread that reads the target too early then
     * finds the old bytes. */
    if (chance(4)) yield();
    finish_copies(self->copies->group - newest);
}

/* ---- Running blocks and launches --------------------------------------------------------------------------------- */

/* The first function on a fiber's stack. It never returns, but ends by switching to another fiber. */
static void fiber_main()
{
    now.body(now.context);
    finish_copies(INT_MAX);
    block *b = self->block;
    self->ended = true;
    self->what = "ended";
    warp_team().brought[lane()] = group_team().brought[self->thread % 128] = block_team().brought[self->thread] =
        nullptr;
    self->warp->alive &= ~(1u << lane());
    self->warp->ready &= ~(1u << lane());
    if (b->work) b->work->thread_ends(self->thread);
    leave(warp_team());
    leave(group_team());
    leave(block_team());
    if (--b->live == 0) switch_to(nullptr);
    go_on();
}

static team team_of(block *b, int first, int size, void **brought)
{
    const int count = std::max(0, std::min(size, threads() - first));
    return { b->fibers + first, count, count, 0, 0, nullptr, brought + first };
}

static void *map(size_t bytes)
{
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for %zu bytes", bytes);
    return memory;
}

static void begin(block *b, int64_t number)
{
    b->running = true;
    b->number = number;
    b->index = { (unsigned)(number % gridDim.x), (unsigned)(number / gridDim.x % gridDim.y),
                 (unsigned)(number / gridDim.x / gridDim.y) };
    b->live = threads();
    b->work = nullptr;
    watch_begin(b->races);
    b->places.clear();
    b->bytes = (uint32_t)now.shape.shared;
    /* Shared memory begins as a pattern: NaN, or a number of moderate size in float16, bfloat16 and float32 alike. */
    const uint32_t half = (uint32_t)(chance(4) ? 0xffc0 | random() % 63
                                               : 0x3c00 + random() % 0x1c00 + (random() % 2 << 15));
    b->pattern = half << 16 | half;
    fill(b, b->shared, b->bytes);
    memset(b->in_flight, 0, sizeof b->in_flight);
    memset(b->barriers, 0, sizeof b->barriers);
    memset(b->brought, 0, sizeof b->brought);
    for (int w = 0; w < (threads() + 31) / 32; w++) {
        static_cast<team &>(b->warps[w]) = team_of(b, w * 32, 32, b->brought[0]);
        b->warps[w].ready = b->warps[w].alive = (uint32_t)((UINT64_C(1) << b->warps[w].size) - 1);
        b->warps[w].turn = random() % 32;
        b->warps[w].polling = 0;
    }
    for (int g = 0; g < (threads() + 127) / 128; g++) b->groups[g] = team_of(b, g * 128, 128, b->brought[1]);
    b->all = team_of(b, 0, THREADS, b->brought[2]);
    for (int t = 0; t < threads(); t++) {
        fiber &f = b->fibers[t];
        if (!b->stacks[t]) {
            b->stacks[t] = (char *)map(STACK_BYTES + PAGE);
            mprotect(b->stacks[t], PAGE, PROT_NONE);
        }
        f = fiber();
        f.thread = t;
        f.index = { t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y };
        f.block = b;
        f.warp = &b->warps[t / 32];
        f.copies = &b->queues[t];
        f.copies->list.clear();
        f.copies->first = 0;
        f.copies->group = 0;
        /* The fibers' stacks begin at different offsets within a page. Otherwise the tops of all stacks would compete
         * for a few lines of the cache. */
        void **top = (void **)(b->stacks[t] + STACK_BYTES + PAGE - 128 - t % 32 * 128);
        /* a function expects a stack pointer that is 8 bytes off a multiple of 16, as after a call */
        top[0] = (void *)fiber_main;
        top[1] = nullptr;
        f.stack_pointer = top - 6;
    }
}

static void end(block *b)
{
    if (b->work) {
        /* The functions called below find the block through `self`, a fiber (CUDA thread). Any fiber of the block will
         * do. */
        self = b->fibers;
        b->work->block_ends();
        self = nullptr;
    }
    delete b->work;
    b->running = false;
}

/* Runs all blocks of a launch. Up to RESIDENT blocks are interleaved. */
static void run_blocks(const void *kernel)
{
    if (gridDim.x == 0 || gridDim.y == 0 || gridDim.z == 0 || gridDim.y > 65535 || gridDim.z > 65535 ||
        threads() == 0 || threads() > THREADS)
        fail("blocks or threads that no GPU takes");
    if (now.shape.shared > shared_allowed(kernel))
        fail("%zu bytes of shared memory, %zu were asked for", now.shape.shared, shared_allowed(kernel));
    now.longest = 2 + (int)(random() % 9);
    now.lateness = (unsigned)(random() % 5);
    now.starves = chance(2);
    starved = 0;
    starved_for = 0;

    const int64_t blocks = (int64_t)gridDim.x * gridDim.y * gridDim.z;
    const int most = (int)std::min<int64_t>(blocks, chance(2) ? 1 : 2 + random() % (RESIDENT - 1));
    int64_t next = 0;
    for (int running = 1; running;) {
        running = 0;
        for (int n = 0; n < most; n++) {
            if (!resident[n]) {
                if (!all_shared) all_shared = (char *)map(RESIDENT * SHARED_STEP);
                resident[n] = new (map(sizeof(block))) block();
                resident[n]->shared = all_shared + n * SHARED_STEP;
            }
            block *b = resident[n];
            if (b->running && b->live == 0) end(b);
            if (!b->running && next < blocks) begin(b, next++);
            running += b->running;
        }
        if (running) switch_to(schedule());
    }
}

void run(const char *name, const char *where, const void *kernel, const launch_shape &shape, void (*body)(void *),
         void *context)
{
    static const char *const text = getenv("ATTN_EMULATOR_SEED"), *const trace = getenv("ATTN_EMULATOR_TRACE");
    static int64_t launches;
    struct sigaction fault = {}, before[2];
    static char signal_stack[1 << 16];
    const stack_t aside = { signal_stack, 0, sizeof signal_stack };

    now = { name, where, launches++, shape, body, context, 0, 0, false };
    gridDim = shape.grid;
    blockDim = shape.block;
    state = (uint64_t)(text && *text ? strtoll(text, nullptr, 10) : 1) * 0x2545f4914f6cdd1d ^
            (uint64_t)now.number * 0xd6e8feb86659fd93;
    random();
    if (trace) say_launch(stderr);
    fault.sa_sigaction = on_fault;
    fault.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaltstack(&aside, nullptr);
    sigaction(SIGSEGV, &fault, &before[0]);
    sigaction(SIGBUS, &fault, &before[1]);

    if (__builtin_setjmp(launch_failed_at)) {
        for (block *b : resident)
            if (b && b->running) b->running = false, delete b->work;
        launch_failed();
    } else {
        run_blocks(kernel);
    }
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGBUS, &before[1], nullptr);
    now.name = now.where = nullptr;
}

} // namespace emu
