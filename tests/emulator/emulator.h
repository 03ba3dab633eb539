/* emulator.h: CUDA's programming model on one CPU thread, so that the kernels' own sources run where there is no
 * GPU.
 *
 * Purpose: finding ordering mistakes in kernels, without a GPU and reproducibly. Examples are data used before its
 * asynchronous copy was waited for, a missing barrier, and shared memory that is overwritten while it is read. A
 * mistake shows as a wrong result or as an error with a name. The emulator says nothing about speed, registers or bank
 * conflicts. Its memory is sequentially consistent, so it does not find a missing memory fence.
 *
 * Threads. A CUDA thread is a fiber with a stack of its own. A fiber runs until it meets something that waits: a
 * barrier, an instruction that a whole warp executes, or a condition. Then another fiber runs: mostly a lane of the
 * same warp, and otherwise a lane of a random warp (the seed is ATTN_EMULATOR_SEED). One warp may therefore run far
 * ahead of another wherever the kernel permits this. The same seed gives the same order. In half of the launches, some
 * warps or lanes are starved: they run only when no other can. Some launches interleave two or three blocks, and the
 * others run one block after the other.
 *
 * Warps. The function gather() carries out an instruction that a whole warp executes. Each lane passes its operands,
 * and the last lane to arrive does the work for all lanes. If lanes arrive at different instructions, or if all fibers
 * wait, the launch ends with a message that says which thread waits where.
 *
 * Copies. An asynchronous copy (cp.async) is made at a random moment between its issue and the wait that covers it, or
 * the end of its thread. Some copies are made at the last moment. Two mistakes are reported: ldmatrix of memory that a
 * copy may still write, and any other change of this memory. Other asynchronous work (TMA, tensor cores) is done by the
 * object `agent` of each thread block.
 *
 * Races. Two accesses to the same shared memory, at least one of them a store, are an error if no barrier orders them
 * (races.h). It does not matter in which order they happened.
 *
 * Poison. Shared memory first holds a pattern, mostly of finite numbers. If the pattern were NaN, a kernel that reads
 * it could pass unnoticed, because kernels compute rows that contain NaN again in another way. ldmatrix of 16 bytes of
 * the pattern is an error. New global memory holds NaN.
 *
 * translate.py first translates the kernels' sources (launches, __shared__, kernel parameters). The compiler then
 * includes device.h first, which defines CUDA's keywords and functions. The headers in tests/emulator/kernels/ replace
 * the headers that contain inline assembler. */
#ifndef ATTN_EMULATOR_H
#define ATTN_EMULATOR_H

#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* A function of the emulator whose accesses to memory are not checked for races. What its callers pass lies on their
 * stacks, and not in shared memory. */
#define UNWATCHED __attribute__((no_sanitize("thread")))

extern dim3 gridDim, blockDim; /* gridDim and blockDim of the launch that is running */

namespace emu {

/* ---- Fibers (CUDA threads) and their teams ----------------------------------------------------------------------- */

struct fiber;
struct block;

/* Consecutive threads of a block that execute collectives (instructions) together: a warp, a warpgroup or the whole
 * block. */
struct team {
    fiber *first;
    /* size: number of threads; live: number of threads that have not ended; arrived: number of threads that wait at the
     * instruction `name`. All threads of the team execute this instruction together. */
    int size, live, arrived;
    unsigned round;
    const char *name;
    /* For each thread of the team, a pointer to the `mine` that the thread passed to the collective (an instruction
     * that all threads of the team execute together). */
    void **brought;
};

struct warp_state : team {
    /* sets of lanes of the warp, one bit per lane: lanes that have not ended, lanes that may run, lanes that wait for a
     * condition */
    uint32_t alive, ready, polling;
    unsigned turn;
};

struct fiber {
    void *stack_pointer; /* the saved stack pointer of the fiber (a CUDA thread), valid only while the fiber does not
                          * run */
    uint3 index;         /* threadIdx */
    int thread;          /* the thread's linear index in its thread block */
    bool ended;
    struct block *block;
    warp_state *warp;
    /* text for the deadlock message: what this fiber (CUDA thread) waits for; NULL: it does not wait */
    const char *what;
    uint32_t number;
    const void *waits_on;      /* the team (such as a warp) or the named barrier that the fiber waits on */
    bool (*condition)(void *); /* the condition that a polling fiber waits for */
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
int threads();          /* Returns the number of threads per block in the running launch. */
int64_t block_number(); /* linear number of the running block in its grid */
uint3 block_index();

/* Prints the kernel, the block, the thread and the error, and ends the launch. The device then counts as lost, so later
 * CUDA calls fail, as after an illegal address. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern char failure[1024]; /* the text of the last failure of a launch */
/* whether failures are not printed; can_fail.cu sets this, because its failures are intended */
extern bool quiet;

/* Returns a random number. It depends only on ATTN_EMULATOR_SEED, on the number of the launch, and on how many numbers
 * were drawn before. */
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

/* ---- Waiting for all threads of a team (such as a warp), at a named barrier, or for a condition ------------------ */

team &warp_team();
team &group_team(); /* Returns the 128 threads of the calling thread's warpgroup. */
team &block_team();

void arrive(team &t, const char *name, void *mine);
bool all_here(const team &t, const char *name, bool whole);
/* Waits for the instruction `name`, which all threads of the team (such as a warp) execute together. The function may
 * return before the instruction is complete. The caller must therefore check whether it is complete, and wait again if
 * it is not. */
void await(team &t, const char *name);
void release(team &t);

/* Executes a collective (an instruction that all threads of a team, such as a warp, execute together). Every thread
 * passes its `mine`. The last thread to arrive calls leader(all), where all[n] points to the n-th thread's `mine`,
 * which the leader may change. Then all threads go on. If `whole` is true and a thread of the team has ended, the call
 * fails. If `whole` is false, all[n] is NULL for a thread that has ended. */
template <class T>
UNWATCHED void gather(team &t, const char *name, T &mine, void (*leader)(T *const *all), bool whole = true)
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
template <class T> UNWATCHED void warp(const char *name, T &mine, void (*leader)(T *const *all))
{
    gather(warp_team(), name, mine, leader);
}
template <class T> UNWATCHED void group(const char *name, T &mine, void (*leader)(T *const *all))
{
    gather(group_team(), name, mine, leader);
}

void sync_warp();
void sync_block();
bool sync_block_or(bool x);

/* The instructions bar.sync and bar.arrive. */
void barrier_sync(int id, int threads);
bool barrier_all(int id, int threads, bool x); /* bar.red.and: returns whether all threads have x = true */
void barrier_arrive(int id, int threads);

/* Waits until condition() holds. Messages show `what` and `number`; `what` must stay valid until the end of the
 * wait. */
void poll(bool (*condition)(void *), void *context, const char *what, uint32_t number);
template <class Condition> void wait_until(Condition condition, const char *what, uint32_t number = 0)
{
    poll([](void *c) -> bool { return (*(Condition *)c)(); }, &condition, what, number);
}
void yield(); /* lets other fibers (CUDA threads) run */

/* ---- Global and shared memory, and checks of their use ----------------------------------------------------------- */

/* A block's shared memory starts at the 32-bit address 0x400, as on the hardware. A byte of it has a 32-bit address and
 * a host pointer, which leave the same remainder when divided by 1024. */
enum : uint32_t { SHARED_BEGIN = 0x400 };
uint32_t shared_address(const void *pointer);
uint32_t shared_bytes();
/* Returns the host pointer for an address in shared memory. Fails unless all bytes lie in the thread block's shared
 * memory and the address is a multiple of `align`. */
char *shared_pointer(uint32_t address, size_t bytes, size_t align, const char *what);
/* If results of rows are not finite, a launcher (a host function that starts kernels) computes these rows a second
 * time, one by one. It calls this function first. The call fails if ATTN_EMULATOR_REPAIRS is "none". */
void repair_begins();
/* Fails unless all `bytes` bytes of global memory at `pointer` lie in one allocation of the device. */
void check_global(const void *pointer, size_t bytes, size_t align, const char *what);

char *dynamic_shared(size_t align);
/* Returns the memory of a __shared__ variable of the running thread block. All threads of the block get the same
 * address. `place` identifies the variable. */
void *static_shared(const void *place, size_t bytes, size_t align);
template <class T> T &static_shared()
{
    static char place;
    return *(T *)static_shared(&place, sizeof(T), alignof(T));
}

/* cp.async: copies to shared memory; writes zeros if `valid` is false */
void cp_async(uint32_t to, const void *from, bool valid, size_t bytes = 16);
void cp_async_commit();
void cp_async_wait(int newest);
/* Returns 16 bytes of shared memory that an instruction of `thread` reads. Fails if a copy to these bytes is not
 * complete, or if the read races with another thread's store. */
const char *shared_row(int thread, uint32_t address, const char *what);
/* Records that an instruction of `thread` writes shared memory at `address`. Fails if the write races with another
 * thread's access. */
void shared_written(int thread, uint32_t address, size_t bytes);

/* ---- Agents: asynchronous work such as TMA copies and tensor core products --------------------------------------- */

/* The agent of a thread block does the block's asynchronous work: TMA copies and tensor core products (sm90.cc). The
 * agent is created at its first use. */
struct agent {
    /* Does some of the agent's work (copies, products of the tensor cores) and returns true. Returns false if there was
     * no work. The scheduler calls this function now and then. If `must` is true, no fiber (CUDA thread) can run, so
     * the agent must do work at once. */
    virtual bool step(bool must) = 0;
    virtual void thread_ends(int) {}
    /* called for each ordinary load or store by which the running thread accesses the thread block's shared memory */
    virtual void accessed(const void *, size_t, bool) {}
    /* called when all threads have ended, before shared memory and the agent (copies and tensor cores) are freed */
    virtual void block_ends() {}
    /* prints the agent's work in flight (copies and products) for the deadlock message */
    virtual void describe(FILE *) {}
    virtual ~agent() {}
};
/* the object that does the running block's copies and tensor core products; NULL until its first use */
agent *&block_agent();

/* ---- Launches of kernels ----------------------------------------------------------------------------------------- */

struct launch_shape {
    dim3 grid, block;
    size_t shared;
};

void run(const char *name, const char *where, const void *kernel, const launch_shape &shape, void (*body)(void *),
         void *context);

/* Launches a kernel: translate.py replaces kernel<<<grid, block, shared, stream>>>(...) by a launcher. `where` is
 * the function that launches, with its template arguments, for messages. */
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
/* The emulator's cudaLaunchKernelEx(). It ignores the launch attributes, such as the one that lets a kernel begin
 * before the previous kernel has ended. In the emulator the previous kernel has always ended. */
template <class... P, class... A>
cudaError_t launch_ex(const char *name, const char *where, const cudaLaunchConfig_t *c, void (*kernel)(P...),
                      A &&...args)
{
    launch(name, where, kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes)(args...);
    return cudaPeekAtLastError();
}

/* runtime.cc */
/* Returns how many bytes of shared memory a kernel may use: what cudaFuncSetAttribute has set, or 48 KB. */
size_t shared_allowed(const void *kernel);
void launch_failed();

} // namespace emu

#endif
