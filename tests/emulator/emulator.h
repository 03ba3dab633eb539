/* emulator.h: CUDA's programming model on one CPU thread, so that the kernels' own sources run where there is no
 * GPU.
 *
 * What it is for: to find mistakes of ordering (data used before an asynchronous copy was waited for, a missing
 * barrier, shared memory overwritten while it is read) as wrong results or as an error with a name, without a GPU
 * and the same way each time. It says nothing of speed, registers or bank conflicts, and memory is sequentially
 * consistent here: a missing fence is not found.
 *
 * Threads. A CUDA thread is a fiber with a stack of its own. A fiber runs until it meets something that waits: a
 * barrier, an instruction that a whole warp executes, a condition. Then another goes on: mostly a lane of the same
 * warp; now and then, and when the warp has none, a lane of a warp drawn from ATTN_EMULATOR_SEED. So one warp may
 * run far ahead of another wherever the kernel lets it, differently with each seed and the same way with the same
 * seed; in half of the launches some warps or lanes at a time go on only when no other can. Some launches have two
 * or three blocks that run interleaved, the others one after the other.
 *
 * Warps. A warp's instruction is a gather(): each lane brings its operands, the last to come does the work for all.
 * Lanes that come to different instructions, or fibers that all wait, end the launch with a message that says who
 * waits where.
 *
 * Copies. An asynchronous copy (cp.async) happens at a random moment between its issue and the wait that covers it,
 * or its thread's end; some at the very last. It reads its source then. Two mistakes have names: ldmatrix from
 * where a copy may still write, and any change of such memory by somebody else. Asynchronous work of other kinds is
 * an agent's (see below).
 *
 * Races. Loads and stores of shared memory that no barrier orders are an error, whatever order they happened to
 * have: see races.h.
 *
 * Poison. Shared memory starts out as a pattern, mostly of finite numbers, for kernels compute rows with NaN again
 * by other means and so would hide that they read it. ldmatrix of 16 bytes of that pattern is an error. New global
 * memory holds NaN.
 *
 * The sources are translated first (translate.py: launches, __shared__, kernel parameters) and compiled with
 * device.h before everything, which makes the language's words and functions; the folder kernels/ here replaces the
 * headers with instructions in assembler. */
#ifndef ATTN_EMULATOR_H
#define ATTN_EMULATOR_H

#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

extern dim3 gridDim, blockDim; /* built-in variables of the running launch */

namespace emu {

/* ---- Who runs ---------------------------------------------------------------------------------------------------- */

struct fiber;
struct block;

/* Neighbouring threads of a block that act together: a warp, a warpgroup, or the block. */
struct team {
    fiber *first;
    int size, live, arrived; /* number of threads; of those that have not ended; of those that have arrived at `name` */
    unsigned round;
    const char *name;
    void **brought; /* what each thread of the team brought */
};

struct warp_state : team {
    uint32_t alive, ready, polling; /* one bit per lane */
    unsigned turn;
};

struct fiber {
    void *stack_pointer; /* valid while the fiber does not run */
    uint3 index;         /* threadIdx */
    int thread;          /* the thread's linear index */
    bool ended;
    struct block *block;
    warp_state *warp;
    const char *what; /* what the fiber waits for (NULL: nothing), and a number for the message */
    uint32_t number;
    const void *waits_on;      /* a team or a named barrier */
    bool (*condition)(void *); /* the condition of a polling fiber */
    void *context;
    struct copies *copies; /* of cp.async */
};

extern fiber *self; /* that runs */

static inline int lane()
{
    return self->thread % 32;
}
static inline int thread()
{
    return self->thread;
}
int threads();          /* number of threads of a block */
int64_t block_number(); /* linear number of the running block */
uint3 block_index();

/* Prints the kernel, the block, the thread and what is wrong, and ends the launch. The device is then lost, as after an
 * illegal address. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern char failure[1024]; /* the text of the last failure */
extern bool quiet;         /* for tests of the emulator: failures are not printed */

/* Random numbers that depend on ATTN_EMULATOR_SEED and the number of the launch. */
uint64_t random();
static inline bool chance(unsigned one_in)
{
    return random() % one_in == 0;
}

template <class To, class From> To bits(From x)
{
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

/* ---- What waits -------------------------------------------------------------------------------------------------- */

team &warp_team();
team &group_team(); /* the 128 threads of the calling thread's warpgroup */
team &block_team();

void arrive(team &t, const char *name, void *mine);
bool all_here(const team &t, const char *name, bool whole);
void await(team &t, const char *name); /* waits until the team's state changes; the caller then checks it again */
void release(team &t);

/* Every thread of the team brings `mine`; when the last has come, one calls leader(all), where all[n] is what the
 * team's n-th thread brought, which may be changed; then all go on. `whole`: no thread may have ended (else those
 * that have count as come, and their all[n] is NULL). */
template <class T> void gather(team &t, const char *name, T &mine, void (*leader)(T *const *all), bool whole = true)
{
    const unsigned round = t.round;
    arrive(t, name, (void *)&mine);
    while (t.round == round) {
        if (all_here(t, name, whole)) {
            leader((T *const *)t.brought);
            release(t);
        } else await(t, name);
    }
}
template <class T> void warp(const char *name, T &mine, void (*leader)(T *const *all))
{
    gather(warp_team(), name, mine, leader);
}
template <class T> void group(const char *name, T &mine, void (*leader)(T *const *all))
{
    gather(group_team(), name, mine, leader);
}

void sync_warp();
void sync_block();
bool sync_block_or(bool x);

/* The instructions bar.sync and bar.arrive. */
void barrier_sync(int id, int threads);
bool barrier_all(int id, int threads, bool x); /* bar.red.and */
void barrier_arrive(int id, int threads);

/* Waits until condition() holds. `what` and `number` appear in messages; `what` must stay valid meanwhile. */
void poll(bool (*condition)(void *), void *context, const char *what, uint32_t number);
template <class Condition> void wait_until(Condition condition, const char *what, uint32_t number = 0)
{
    poll([](void *c) -> bool { return (*(Condition *)c)(); }, &condition, what, number);
}
void yield(); /* lets other fibers run */

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

/* 32-bit addresses of the block's shared memory start at 0x400, as on the hardware. Its pointers have the same value
 * modulo 1024. */
enum : uint32_t { SHARED_BEGIN = 0x400 };
uint32_t shared_address(const void *pointer);
uint32_t shared_bytes();
/* Fails unless all bytes lie in the block's shared memory and the address is a multiple of `align`. */
char *shared_pointer(uint32_t address, size_t bytes, size_t align, const char *what);
/* Fails unless all bytes lie in one allocation of the device. */
/* Fails where ATTN_EMULATOR_REPAIRS is "none". */
void repair_begins();
void check_global(const void *pointer, size_t bytes, size_t align, const char *what);

char *dynamic_shared(size_t align);
/* Returns the same memory to every thread of the block; `place` distinguishes the variables. */
void *static_shared(const void *place, size_t bytes, size_t align);
template <class T> T &static_shared()
{
    static char place;
    return *(T *)static_shared(&place, sizeof(T), alignof(T));
}

void cp_async(uint32_t to, const void *from, bool valid, size_t bytes = 16); /* writes zeros if not valid */
void cp_async_commit();
void cp_async_wait(int newest);
/* Returns 16 bytes of shared memory that `thread` reads by an instruction. Fails if a copy there is not complete, or if
 * other threads write there. */
const char *shared_row(int thread, uint32_t address, const char *what);
/* Records that `thread` writes there by an instruction. Fails if others read or write there. */
void shared_written(int thread, uint32_t address, size_t bytes);

/* ---- Asynchronous work of other kinds ---------------------------------------------------------------------------- */

/* Does the asynchronous work of one block. Code that needs an agent creates it with new at first use. */
struct agent {
    /* Called at times between fibers; must: no fiber can run. Returns true if work was done. */
    virtual bool step(bool must) = 0;
    virtual void thread_ends(int) {}
    virtual void accessed(const void *, size_t, bool) {
    } /* an ordinary load or store of the block's shared memory by the running thread */
    /* all threads have ended and shared memory still exists; the agent is deleted afterwards */
    virtual void block_ends() {}
    virtual void describe(FILE *) {} /* prints state for the message when all fibers wait */
    virtual ~agent() {}
};
agent *&block_agent(); /* the agent of the running block; NULL at first */

/* ---- Launches ---------------------------------------------------------------------------------------------------- */

struct launch_shape {
    dim3 grid, block;
    size_t shared;
};

void run(const char *name, const char *where, const void *kernel, const launch_shape &shape, void (*body)(void *),
         void *context);

/* translate.py replaces kernel<<<grid, block, shared, stream>>>(...) by this. `where` is the function that launches,
 * with its template arguments. */
template <class... P> struct launcher {
    const char *name, *where;
    void (*kernel)(P...);
    launch_shape shape;
    void operator()(P... p) const
    {
        auto call = [&] { kernel(p...); };
        run(
            name, where, (const void *)kernel, shape, [](void *c) { (*(decltype(call) *)c)(); }, &call);
    }
};
template <class... P>
launcher<P...> launch(const char *name, const char *where, void (*kernel)(P...), dim3 blocks, dim3 threads,
                      size_t shared = 0, cudaStream_t = nullptr)
{
    return { name, where, kernel, { blocks, threads, shared } };
}
/* The kernel before has always ended, so the launch attributes have no effect. */
template <class... P, class... A>
cudaError_t launch_ex(const char *name, const char *where, const cudaLaunchConfig_t *c, void (*kernel)(P...),
                      A &&...args)
{
    launch(name, where, kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes)(args...);
    return cudaPeekAtLastError();
}

/* runtime.cc */
size_t shared_allowed(const void *kernel); /* as set by cudaFuncSetAttribute, or 48 KB */
void launch_failed();

} // namespace emu

#endif
