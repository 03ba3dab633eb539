/* devices.h: devices (GPUs, or the CPU) and their threads. A GPU has one thread, which copies in, starts kernels,
 * copies out and reports. The CPU has one thread per stream, which computes.
 *
 * The main thread submits batches and gets them back through its mailbox. All work on a GPU's stream is asynchronous:
 * while the kernels of one batch run, the next batch is copied in. The thread polls a stream for its end and uses no
 * callbacks, because a device in error calls none.
 *
 * What can go wrong on a device, and what the server does then:
 *
 *   out of memory, HTTP thread     the job that an HTTP thread tried to run is queued for a device's thread
 *   out of memory                  the batch is tried again when other batches of the device have ended. If it fails
 *                                  even while no other batch runs, its requests fail with NO_MEMORY
 *   an error that is not sticky    the batch's requests fail with DEVICE; the next batch runs
 *   a sticky error                 all batches of the device come back with DEVICE_LOST; the device is disabled.
 *                                  A job that was cut over several devices is computed again on the others
 *   no request waits any more      the batch is cancelled: the CPU ends it between two tiles, a GPU between two
 *                                  launches, and its jobs come back with CANCELLED
 *   the batch never ends           devices_to_disable() finds the device; it is disabled, and its requests are answered
 *                                  at once. The batches may come back later or never, and keep their memory, because
 *                                  the device may still write to it
 *
 * A disabled device stays disabled until another process opens it. The server goes on with its other devices, and ends
 * if there is none. */
#ifndef DEVICES_H
#define DEVICES_H

#include "server/base/config.h"
#include "server/work/job.h"
#include "server/base/mailbox.h"

struct device;

/* Parts of jobs (computations of requests) that run together on one device. The main thread makes the batch. A thread
 * of the device owns it from devices_submit() until it arrives in the main thread's mailbox. */
struct batch {
    struct message message;
    struct device *device;
    /* The flow (client) of the batch's first job; that job holds a reference to the flow. NULL: none. */
    const struct flow *flow;
    int64_t left_ns;               /* time at which the batch was sent to the device */
    int64_t held_ns;               /* time at which the batch was held back for lack of memory; 0: it was not */
    int64_t charged_ns;            /* device time charged to the flows (clients) of the batch's jobs */
    struct batch *next, *previous; /* neighbours in the main thread's list of batches on this device */
    int count;
    /* Number of the batch's jobs whose requests still wait for an answer. At 0 the batch is cancelled. Only the main
     * thread uses this member. */
    int waiting;
    /* attn_cancel() sets this member; the device then ends the batch between two tiles of a kernel, or between two
     * launches */
    int cancel;
    /* sums over the batch's jobs: floating-point operations, bytes read and written, expected seconds */
    double flops, bytes, seconds;
    /* Whether an HTTP thread started the batch on the device. For such a batch no events were recorded between its
     * copies and kernels, so only its total time is known. */
    bool adopted;
    int64_t started_ns, ended_ns; /* times at which a thread of the device began and ended the batch */
    double prepare_us, copy_in_us, compute_us, copy_out_us;
    double launch_us; /* part of compute_us in which the device was probably idle, because no kernel was enqueued yet */
    /* device time of computing exact outputs in float64 for `verify` */
    double truth_us;
    struct job_part *parts[]; /* parts of jobs; each part holds a reference to its job */
};

static inline struct job *batch_job(const struct batch *batch, int part)
{
    return batch->parts[part]->job;
}

/* True if the batch only adds up gradients that are sums over all queries. Such a batch has one part, which has run its
 * kernels already. The part was sent to its device a second time, to add up its share of these gradients. */
static inline bool batch_adds(const struct batch *batch)
{
    return batch->parts[0]->adds;
}

/* Records in the metrics that a batch came back, and logs it if it failed. `first` is any part of the batch: if a batch
 * fails, all its parts have the same error. */
void batch_count(const struct batch *batch, const struct job_part *first);
/* Copies the times of the batch to a job that ran in it. A job with several parts keeps the times of the part that took
 * longest. */
void batch_note_times(const struct batch *batch, struct job *job);
/* Records in the metrics the times of a job that has run. */
void batch_observe_times(const struct job *job);

struct caches;
struct devices;

/* Opens the devices that --devices names ("auto": every GPU, else the CPU; "all": every GPU) and starts their threads.
 * Finished batches are posted to `box` as messages of kind `message_kind`. On an error *err has one line of text. */
attn_status devices_open(const struct config *config, struct mailbox *box, int message_kind, struct devices **devices,
                         attn_error *err);
/* Tells the devices' threads to end after their running batches, and waits at most `wait_ms` milliseconds. Returns
 * false if a thread still runs after that time. When the function has returned, the mailbox may still hold finished
 * batches. */
bool devices_stop(struct devices *devices, int64_t wait_ms);
/* Closes and frees the devices; does nothing for NULL. devices_stop() must have returned true, and the mailbox must be
 * empty. */
void devices_close(struct devices *devices);

/* Adds memory for KV caches (--kv-bytes) on each device. Call this before the first request. The memory is allocated
 * when the first cache is made. Returns INVALID if a device has less memory. */
attn_status devices_add_caches(struct devices *devices, const struct config *config, struct caches *caches,
                               attn_error *err);

int devices_count(const struct devices *devices);
/* Returns what the first device can compute. Any thread may call this to choose kernels. */
const attn_capabilities *devices_capabilities(const struct devices *devices);
const attn_device_info *
/* Returns the description of the device with the most memory, as it was when the device was opened. */
devices_largest(const struct devices *devices);
/* Lets `source` give out host memory that the first device has pinned, because devices copy from pinned memory fastest.
 * Returns false if no device copies from host memory, so that ordinary memory is as good. The devices must outlive the
 * staging pool, which takes its memory from `source`. */
bool devices_staging(struct devices *devices, struct staging_source *source);
/* Returns the device whose driver pins staging memory (host memory for tensors); NULL: no device copies from it. */
attn_device *devices_copier(const struct devices *devices);
bool devices_usable(const struct devices *devices);

struct device_state {
    const attn_capabilities *can; /* what the device can compute; NULL in tests without a device */
    attn_device_info info;
    bool usable;
    int64_t running_requests; /* number of requests on the device that are not answered yet */
};
/* Describes all devices in an array of devices_count() elements. Any thread may call this. */
void devices_describe(struct devices *devices, struct device_state *states);

/* Returns the device to which its backend gives the number `index` (2 for "cuda:2"), or NULL if this server does not
 * use that device. *number becomes the server's own number of the device. Any thread may call this. */
attn_device *devices_of_index(const struct devices *devices, int64_t index, int *number);
/* true if the device has not failed; any thread may call this */
bool devices_is_usable(const struct devices *devices, int number);
/* Records that a call of the device's driver has returned DEVICE_LOST. devices_to_disable() then returns this device.
 * Any thread may call this. */
void devices_note_lost(struct devices *devices, int number);

/* ---- Functions for the main thread ------------------------------------------------------------------------------- */

/* Returns a lower bound, in seconds, on the job's time on the fastest device with the best kernel. Any thread may call
 * this. */
double devices_least_seconds(const struct devices *devices, const struct job *job);

/* Returns the largest number of parts into which the job may be cut. Any thread that owns the job may call this. */
int cut_most_parts(const struct devices *devices, const struct job *job);
/* Decides whether the job will be cut by queries into parts whose gradients are added up, and sets job->sum_parts. The
 * owner of the job calls this once, after prepare_job(). A job whose sums would take more than half of a device's
 * memory is not cut by queries. */
void cut_prepare(const struct devices *devices, struct job *job);

/* These functions add up gradients that are sums over queries, such as dk and dv, over the parts of a job.
 *
 *   sums_begin()      Call this when all parts of the job have run. Returns true if each part must be sent once more
 *                     to its device (sums_on), to add up a share of the gradients. Returns false if the job has no such
 *                     gradients, if they are added up already, or if a device was lost with a part's sums. That part
 *                     then has the error DEVICE_LOST.
 *   sums_free()       Call this when no device has a part of the job. It frees the parts' memory for sums.
 *   sums_free_part()  Call this when a part is back and is not adding up, and nobody waits for the job any more. It
 *                     frees that part's memory for sums.
 *   sums_lose()       Call this when a device that hangs has a part of the job. If the parts are adding up, the memory
 *                     of their sums may never be freed. Batches then stop waiting for that memory. */
bool sums_begin(struct job *job);
void sums_free(struct job *job);
void sums_free_part(struct job_part *part);
void sums_lose(struct job *job);

/* Returns the device with the least work among those that may have room for a batch. If several have the least work,
 * returns the one with the fewest batches. Leaves out devices whose bit in `passed_over` is set. NULL: all are busy. */
struct device *devices_pick(struct devices *devices, uint64_t passed_over);
/* True if the device has room for a batch that begins with this job. If it has none, and the job's flow (client) has no
 * batch on the device, *wait_ns is reduced to the time until there may be room. The caller must have set *wait_ns. */
bool device_has_room(const struct device *device, const struct job *job, int64_t now_ns, int64_t *wait_ns);
int device_number(const struct device *device);
/* Cuts a job that is expected to take longer than --split-above-ms into parts, just before it is sent to the device
 * `first`. The parts go to all devices that have room and compute bitwise equal results. Returns the number n of parts,
 * and writes their devices, which may repeat, to over[0] to over[n - 1]; over[0] is `first`. 1: the job was not cut. 0:
 * out of memory. */
int cut_over_devices(struct devices *devices, struct device *first, struct job *job, int64_t now_ns,
                     struct device *over[CONFIG_MAX_DEVICES]);
/* Returns whether the job can be sent to a device now; `first` must have room. Returns false if its gradients are added
 * up from parts (sums.c), but the devices with room lack memory for all sums. In that case *wait_ns is reduced to the
 * time until more devices may have room. */
bool cut_may_leave(const struct devices *devices, struct device *first, const struct job *job, int64_t now_ns,
                   int64_t *wait_ns);
/* Sets the name of the backend, such as "cuda:0-3 sm90 by queries", in the result of a job that several devices
 * computed. Call it when all parts of the job have run. */
void cut_name_backend(const struct devices *devices, struct job *job);
/* Combines the differences from exact outputs that several devices found in the parts of a job. All parts must have
 * run. */
void cut_join_truths(struct job *job);
/* True if the device is the CPU and runs short batches, the oldest of which will probably end soon. More jobs may join
 * a second batch meanwhile, so *wait_ns becomes the time for which that batch should wait before it is sent. */
bool device_can_wait(const struct device *device, int64_t now_ns, int64_t *wait_ns);
/* Sends the batch to the device, which must have room. Parts of a job whose gradients are added up (sum_parts > 0) may
 * also be sent to a device without room. */
void devices_submit(struct devices *devices, struct batch *batch, struct device *device);
/* Submits a batch of one late job: an HTTP thread has started it on the device, and it takes longer than expected. It
 * needs no free slot (stream), because it already runs on one. */
void devices_submit_late(struct devices *devices, struct batch *batch);
/* True if a batch is on a device other than the CPU. */
bool devices_away(const struct devices *devices);
/* Removes a batch, which has arrived in the mailbox, from its device's list of batches. */
void devices_collect(struct devices *devices, struct batch *batch);
const char *device_name(const struct device *device);
/* Stops giving work to a device that failed. Returns false if the device was disabled already. */
bool device_disable(struct device *device);

/* Returns a device that must be disabled: a thread noted it as lost, or a batch on it takes too long. Returns NULL if
 * there is none. *overdue becomes true if a batch exceeds its expected time by more than --watchdog-ms. The CPU is not
 * watched. */
struct device *devices_to_disable(const struct devices *devices, bool *overdue);
/* Returns the batches on a device, linked by their member `next`. */
struct batch *device_batches(const struct device *device);

#endif
