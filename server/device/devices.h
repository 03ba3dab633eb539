/* devices.h: devices (GPUs, or the CPU) and their threads. A GPU has one thread, which copies in, starts kernels,
 * copies out and reports. The CPU has one thread per stream, which computes.
 *
 * The main thread submits batches and gets them back through its mailbox. All work on a GPU's stream is asynchronous:
 * while the kernels of one batch run, the next batch is copied in. The thread polls a stream for its end. The thread
 * uses no callbacks, because a device in error calls none.
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

/* Parts of jobs (computations of requests) that run together on one device. The main thread makes a batch. A thread of
 * the device owns the batch from devices_submit() until the batch arrives in the main thread's mailbox. */
struct batch {
    struct message message;
    struct device *device;
    /* The flow (client) of the batch, which is that of its first job. That job holds a reference to the flow. NULL: the
     * first job has no flow. */
    const struct flow *flow;
    int64_t left_ns;    /* time at which the batch was sent to the device */
    int64_t held_ns;    /* time at which the batch was held back for lack of memory; 0: it is not held back */
    int64_t charged_ns; /* device time in nanoseconds, which is charged to the flows (clients) of the batch's jobs */
    struct batch *next, *previous; /* neighbours in the main thread's list of batches on this device */
    int count;
    /* number of jobs in the batch whose requests still wait for a result; when it is 0, the batch is cancelled; only
     * the main thread uses it */
    int waiting;
    /* attn_cancel() sets this member; the device then ends the batch between two tiles of a kernel, or between two
     * launches */
    int cancel;
    /* totals of the batch's jobs: floating-point operations, bytes of tensors, and expected time in seconds */
    double flops, bytes, seconds;
    /* true: an HTTP thread, and not the device's thread, put the batch on the device, and recorded no events between
     * the stages of the batch */
    bool adopted;
    int64_t started_ns, ended_ns; /* times at which the batch started and ended, on the thread that ran it */
    double prepare_us, copy_in_us, compute_us, copy_out_us;
    double launch_us; /* the part of compute_us, in microseconds, that passed before the kernels were on the stream */
    /* device time, in microseconds, of computing exact outputs in float64 for `verify`, after the outputs were copied
     * out */
    double truth_us;
    struct job_part *parts[]; /* the parts of jobs in the batch, each with a reference to its job */
};

static inline struct job *batch_job(const struct batch *batch, int part)
{
    return batch->parts[part]->job;
}

/* True if the batch only adds up gradients. Such a batch is one part of a job that was divided among devices. The part
 * has been computed already. It is sent to its device again to add up a share of the gradients that are sums over all
 * queries (`adds` of struct job_part). */
static inline bool batch_adds(const struct batch *batch)
{
    return batch->parts[0]->adds;
}

/* Records in the metrics that a batch came back, and logs it if it failed. `first` is any part of the batch: if a batch
 * fails, all its parts have the same error. */
void batch_count(const struct batch *batch, const struct job_part *first);
/* Copies the times of the batch to a job that ran in it, for the job's answer. A job with several parts keeps the times
 * of the part that took longest. */
void batch_note_times(const struct batch *batch, struct job *job);
/* Adds the times of a job that ran to the metrics. */
void batch_observe_times(const struct job *job);

struct caches;
struct devices;

/* Opens the devices that --devices names ("auto": every GPU, else the CPU; "all": every GPU) and starts their threads.
 * Finished batches are posted to `box` as messages of kind `message_kind`. On an error *err has one line of text. */
attn_status devices_open(const struct config *config, struct mailbox *box, int message_kind, struct devices **devices,
                         attn_error *err);
/* Ends the devices' threads when their running work is done, and waits for the threads for at most `wait_ms`. False: a
 * thread still runs. The mailbox may still have batches afterwards. */
bool devices_stop(struct devices *devices, int64_t wait_ms);
/* Closes and frees the devices; does nothing if `devices` is NULL. Call this after devices_stop() has returned true and
 * the mailbox is empty. */
void devices_close(struct devices *devices);

/* Adds a pool of memory for KV caches (--kv-bytes) on each device. The memory is allocated with the first cache. Call
 * this before the first request. INVALID: a device has less memory than the pool needs. */
attn_status devices_add_caches(struct devices *devices, const struct config *config, struct caches *caches,
                               attn_error *err);

int devices_count(const struct devices *devices);
/* Returns what the first device can compute. Any thread may use this to choose kernels for problems. */
const attn_capabilities *devices_capabilities(const struct devices *devices);
const attn_device_info *
/* Returns the description of the device with the most memory, made when the device was opened. */
devices_largest(const struct devices *devices);
/* Sets `source` to a source of host memory that the first device has pinned, because devices copy from pinned memory
 * fastest. False: no device copies, so ordinary memory is as good. The devices must exist longer than the staging pool,
 * which takes its memory from `source`. */
bool devices_staging(struct devices *devices, struct staging_source *source);
/* Returns the device whose driver pins staging memory (host memory for tensors). NULL: no device copies from staging
 * memory. */
attn_device *devices_copier(const struct devices *devices);
bool devices_usable(const struct devices *devices);

/* The current state of a device, for other parts of the server. */
struct device_state {
    const attn_capabilities *can; /* what the device can compute; NULL in tests without a device */
    attn_device_info info;        /* result of attn_device_describe() */
    bool usable;                  /* true if the device has not failed */
    int64_t running_requests;     /* number of requests on this device that are not answered yet */
};
/* Describes all devices in an array of devices_count() elements. Any thread may call this. */
void devices_describe(struct devices *devices, struct device_state *states);

/* Returns the device with this number of its backend (2 for "cuda:2"), so that a client's memory on this GPU can be
 * opened. *number becomes the server's number of the device. NULL: this server does not use the device. Any thread may
 * call this. */
attn_device *devices_of_index(const struct devices *devices, int64_t index, int *number);
/* true if the device has not failed; any thread may call this */
bool devices_is_usable(const struct devices *devices, int number);
/* Records that a call for the device returned DEVICE_LOST; devices_to_disable() then tells the main thread. Any thread
 * may call this. */
void devices_note_lost(struct devices *devices, int number);

/* ---- Functions for the main thread ------------------------------------------------------------------------------- */

/* Returns a lower bound, in seconds, on the job's time on the fastest device with the best kernel. The job may take
 * several times as long. Any thread may call this. */
double devices_least_seconds(const struct devices *devices, const struct job *job);

/* Returns the largest number of parts into which the job may be cut. Any thread that owns the job may call this. */
int cut_most_parts(const struct devices *devices, const struct job *job);
/* Decides whether the job will be cut by queries into parts whose gradients are added up, and sets job->sum_parts. Call
 * this once, after prepare_job(), on the thread that owns the job. The job is not cut in this way if the sums would
 * take more than half of a device's memory. */
void cut_prepare(const struct devices *devices, struct job *job);

/* These functions add up gradients that are sums over queries, such as dk and dv, over the parts of a job.
 *
 *   sums_begin()      Call this when all parts of the job have run. Returns true if each part must be sent once more
 *                     to its device (sums_on), to add up a share of the gradients. Returns false if the job has no such
 *                     gradients, if they are added up already, or if a device was lost with a part's sums. That part
 *                     then has the error DEVICE_LOST.
 *   sums_free()       Call this when no device has a part of the job. It frees the parts' memory for sums.
 *   sums_free_part()  Call this when a part is back and no part adds up. It frees that part's memory for sums.
 *   sums_lose()       Call this when a device that hangs has a part of the job. If parts are adding up, the memory of
 *                     their sums may never be freed. No batch waits for that memory any more. */
bool sums_begin(struct job *job);
void sums_free(struct job *job);
void sums_free_part(struct job_part *part);
void sums_lose(struct job *job);

/* Returns the device that has the least work, among those that may have room for a batch. Among devices with equal
 * work, it is the one with the fewest batches. NULL: all devices are busy. Devices whose bits are set in `passed_over`
 * are not considered. */
struct device *devices_pick(struct devices *devices, uint64_t passed_over);
/* True if the device has room for a batch that begins with this job. If there is no room, and the job's flow (client)
 * has no batch on the device, *wait_ns is reduced to the time until there may be room. The caller must set *wait_ns
 * before the call. */
bool device_has_room(const struct device *device, const struct job *job, int64_t now_ns, int64_t *wait_ns);
int device_number(const struct device *device);
/* Cuts a job into parts just before it is sent to the device `first`, if it is expected to take longer than
 * --split-above-ms. The parts go to all devices that have room for the job and compute bitwise equal results (cut.c).
 * Returns the number n of parts, and writes their devices to over[0] to over[n - 1]; over[0] is `first`. A device may
 * get several parts if gradients are added up from the parts (sums.c). 1: the job was not cut. 0: there is no memory
 * for the parts. */
int cut_over_devices(struct devices *devices, struct device *first, struct job *job, int64_t now_ns,
                     struct device *over[CONFIG_MAX_DEVICES]);
/* Returns whether the job can be sent to a device now. False: it must wait for memory. This happens only if its
 * gradients are added up from parts (sums.c), and the devices that have room for the job lack memory for the sums of
 * all parts. *wait_ns is then reduced to the time until more devices may have room, as device_has_room() does. `first`
 * must have room. */
bool cut_may_leave(const struct devices *devices, struct device *first, const struct job *job, int64_t now_ns,
                   int64_t *wait_ns);
/* Writes the backend of a job that several devices computed in parts, such as "cuda:0-3 sm90 by queries", into the
 * job's result. All parts must have run. */
void cut_name_backend(const struct devices *devices, struct job *job);
/* Combines what several devices found when they compared the outputs of a job's parts with exact outputs (`truth_found`
 * in job.h). All parts must have run. */
void cut_join_truths(struct job *job);
/* True if the device is the CPU and runs a batch that will end soon. A second batch is then not sent yet: sending it
 * now would gain no time, and more jobs may join it until the first one ends. *wait_ns becomes the time for which the
 * second batch may wait. */
bool device_can_wait(const struct device *device, int64_t now_ns, int64_t *wait_ns);
/* Sends the batch to the device. The device must have room for the batch, unless the batch is a part of a job whose
 * gradients are added up from parts (sum_parts of struct job). */
void devices_submit(struct devices *devices, struct batch *batch, struct device *device);
/* Submits a batch of one late job: an HTTP thread has started this job on the device, and it takes longer than
 * expected. The batch needs no free slot (stream), because the job already runs on one. */
void devices_submit_late(struct devices *devices, struct batch *batch);
/* True if a batch is running on a device other than the CPU, or waits there. */
bool devices_away(const struct devices *devices);
/* Removes a batch that has come back from the list of its device. Call this for each batch that arrives in the
 * mailbox. */
void devices_collect(struct devices *devices, struct batch *batch);
const char *device_name(const struct device *device);
/* Stops giving work to a device that failed. False: the device was disabled already. */
bool device_disable(struct device *device);

/* Returns a device that must be disabled, or NULL if there is none. A device must be disabled if a thread noted it as
 * lost, or if a batch on it takes too long. *overdue becomes true if a batch exceeds the time that its size explains by
 * more than --watchdog-ms. The CPU is not watched. */
struct device *devices_to_disable(const struct devices *devices, bool *overdue);
/* Returns the batches on a device, linked by their member `next`. */
struct batch *device_batches(const struct device *device);

#endif
