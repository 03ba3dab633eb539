/* devices.h: the threads of devices. A GPU has one thread, which copies in, starts kernels, copies out and reports. The
 * CPU has one thread per stream, which computes.
 *
 * The loop submits batches and gets them back through its mailbox. All work on a GPU's stream is asynchronous: while
 * the kernels of one batch run, the next batch is copied in. The thread polls a stream for its end. The thread uses no
 * callbacks, because a device in error calls none.
 *
 * What can go wrong on a device, and what the server does then:
 *
 *   out of memory, inline slot     the job is queued, as if there were no inline slots
 *   out of memory                  the batch waits for the batches beside it and is tried again, in the end alone;
 *                                  if it then fails, its requests fail with NO_MEMORY
 *   an error that is not sticky    the batch's requests fail with DEVICE; the next batch runs
 *   a sticky error                 all batches of the device come back with DEVICE_LOST; the loop disables the device.
 *                                  A job that was cut over several devices is computed again on the others
 *   no request waits any more      the loop cancels the batch: the CPU ends it between two tiles, a GPU between two
 *                                  launches, and its jobs come back with CANCELLED
 *   the batch never ends           devices_to_disable() finds the device; the loop disables it and answers its requests
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

/* Parts of jobs that run together. The loop makes a batch. A thread of the device owns the batch from devices_submit()
 * until the batch arrives in the mailbox. */
struct batch {
    struct message message;
    struct device *device;
    /* The flow (one client's work) of the batch's first job, which holds a reference to the flow. The batch counts
     * as work of this flow. NULL: the first job has no flow. */
    const struct flow *flow;
    int64_t left_ns;    /* time at which the batch left for the device */
    int64_t held_ns;    /* time since which the batch has been held back for lack of memory; 0: it was not */
    int64_t charged_ns; /* device time in nanoseconds, which is charged to the flows (clients) of the batch's jobs */
    struct batch *next, *previous; /* neighbours in the loop's list of batches on this device */
    int count;
    int waiting; /* number of jobs whose requests still wait (used by the loop); at 0 the batch is cancelled */
    /* set by attn_cancel(): the device ends the batch between two tiles of a kernel, or between two launches */
    int cancel;
    /* sums over all jobs of the batch: operations, bytes of tensors, and expected time in seconds */
    double flops, bytes, seconds;
    /* true: an HTTP thread, and not the device's thread, put the batch on the device, and recorded no events between
     * its stages */
    bool adopted;
    int64_t started_ns, ended_ns; /* times at which the batch started and ended, on the thread that ran it */
    double prepare_us, copy_in_us, compute_us, copy_out_us;
    double launch_us; /* microseconds of compute_us that passed before the kernels were on the stream */
    /* device time, in microseconds, of verifying outputs in float64, after the outputs were copied out */
    double truth_us;
    struct job_part *parts[]; /* the parts of jobs in the batch, each with a reference to its job */
};

static inline struct job *batch_job(const struct batch *batch, int part)
{
    return batch->parts[part]->job;
}

/* True if the batch is one part that adds up a share of gradients (struct job_part, adds). */
static inline bool batch_adds(const struct batch *batch)
{
    return batch->parts[0]->adds;
}

/* Records in the metrics that a batch came back, and logs it if it failed. `first` is one of the batch's parts; if one
 * part fails, all parts do. */
void batch_count(const struct batch *batch, const struct job_part *first);
/* Sets the times of a job that ran in the batch, for its answer. A job with several parts keeps the times of the part
 * that took longest. */
void batch_note_times(const struct batch *batch, struct job *job);
/* Counts the times of a job that ran, for the metrics. */
void batch_observe_times(const struct job *job);

struct caches;
struct devices;

/* Opens the devices that --devices names ("auto": every GPU, else the CPU; "all": every GPU) and starts their threads.
 * Finished batches are posted to `box` as messages of kind `message_kind`. On an error *err has one line of text. */
attn_status devices_open(const struct config *config, struct mailbox *box, int message_kind, struct devices **devices,
                         attn_error *err);
/* Ends the devices' threads after the work that runs, and waits for them for at most `wait_ms`. False: a thread still
 * runs. The mailbox may still have batches. */
bool devices_stop(struct devices *devices, int64_t wait_ms);
/* Call this after devices_stop() has returned true, with the mailbox empty. */
void devices_close(struct devices *devices); /* does nothing if `devices` is NULL */

/* Adds a pool of memory for KV caches (--kv-bytes) on each device. The memory is allocated with the first cache. Call
 * this before the first request. INVALID: a device has less memory than the pool needs. */
attn_status devices_add_caches(struct devices *devices, const struct config *config, struct caches *caches,
                               attn_error *err);

int devices_count(const struct devices *devices);
/* Returns what the first device can compute, by which any thread may plan problems. */
const attn_capabilities *devices_capabilities(const struct devices *devices);
const attn_device_info *
/* Returns the description of the device with the most memory. The description was made when the device was opened. */
devices_largest(const struct devices *devices);
/* Sets `source` to host memory that is pinned by the first device that copies, because devices copy from pinned
 * memory fastest. False: no device copies, so ordinary memory is as good. The devices must exist longer than the
 * staging pool. */
bool devices_staging(struct devices *devices, struct staging_source *source);
/* Returns the device that pins staging memory. NULL: no device copies from staging memory. */
attn_device *devices_copier(const struct devices *devices);
bool devices_usable(const struct devices *devices);

/* The present state of a device, for other parts of the server. */
struct device_state {
    const attn_capabilities *can; /* what the device can compute; NULL in tests without a device */
    attn_device_info info;        /* result of attn_device_describe() */
    bool usable;                  /* true if the device has not failed */
    int64_t running_requests;     /* number of requests on this device that are not answered yet */
};
/* Describes all devices in an array of devices_count() elements. Any thread may call this. */
void devices_describe(struct devices *devices, struct device_state *states);

/* Returns the device with the backend's number `index` (2 for "cuda:2"), for importing memory. *number becomes the
 * server's number of the device. NULL: this server does not use the device. Any thread may call this. */
attn_device *devices_of_index(const struct devices *devices, int64_t index, int *number);
/* true if the device has not failed; any thread may call this */
bool devices_is_usable(const struct devices *devices, int number);
/* Records that a call for the device returned DEVICE_LOST; devices_to_disable() tells the loop. Any thread may call
 * this. */
void devices_note_lost(struct devices *devices, int number);

/* ---- Functions for the loop -------------------------------------------------------------------------------------- */

/* Returns a time in seconds that the job takes at least, even on the fastest device and with the best kernel. A job may
 * take several times as long. Any thread may call this. */
double devices_least_seconds(const struct devices *devices, const struct job *job);

/* Returns the largest number of parts into which the job may be cut. Any thread that owns the job may call this. */
int cut_most_parts(const struct devices *devices, const struct job *job);
/* Decides whether the job will be cut by queries into parts whose gradients are added up, and sets sum_parts. Call this
 * once, after prepare_job(), on the thread that owns the job. A job is not cut in this way if its sums would take more
 * than half of a device's memory. */
void cut_prepare(const struct devices *devices, struct job *job);

/* Functions for the gradients that are sums over queries. sums_begin(): call it when all parts of a job have run. True:
 * each part must leave once more, for its device part->sums_on, to add up a share of the gradients. False: the job has
 * no such gradients, or they are added up already, or a device was lost with its part of them; the part then has the
 * error DEVICE_LOST. sums_free() frees the parts' memory of sums; call it when no part is with a device.
 * sums_free_part() frees the memory of one part; call it when the part is back and no part adds up. sums_lose(): call
 * it when a device that hangs has a part of the job. While parts add up, the memory of their sums may then never be
 * freed, so no batch waits for that memory any more. */
bool sums_begin(struct job *job);
void sums_free(struct job *job);
void sums_free_part(struct job_part *part);
void sums_lose(struct job *job);

/* Returns the device with the least work among those that may have room for a batch. Among devices with equal work,
 * it is the one with the fewest batches. NULL: all devices are busy. Devices whose bits are set in `passed_over` are
 * ignored. */
struct device *devices_pick(struct devices *devices, uint64_t passed_over);
/* True if the device has room for a batch that begins with this job. If there is no room, and the job's flow (its
 * client's work) has no batch there, *wait_ns is reduced to the time until there may be room. The caller sets *wait_ns
 * before. */
bool device_has_room(const struct device *device, const struct job *job, int64_t now_ns, int64_t *wait_ns);
int device_number(const struct device *device);
/* Cuts a job that is about to leave for the device `first`, if the job is expected to take longer than
 * --split-above-ms. The parts go to all devices that have room for the job and compute results that are equal to the
 * bit (cut.c). Returns the number of parts: over[0] to over[n - 1] are their devices, and over[0] is `first`. A
 * device may get several parts of a job whose gradients are added up from parts (sums.c). 1: the job was not cut. 0:
 * there is no memory for the parts. */
int cut_over_devices(struct devices *devices, struct device *first, struct job *job, int64_t now_ns,
                     struct device *over[CONFIG_MAX_DEVICES]);
/* False: the job has gradients that are added up from parts, and the devices that have room for it, with `first` among
 * them, have too little memory for the sums of all parts. More devices may have room later. `first` must have room.
 * *wait_ns is reduced as by device_has_room(). */
bool cut_may_leave(const struct devices *devices, struct device *first, const struct job *job, int64_t now_ns,
                   int64_t *wait_ns);
/* Sets the backend in the result of a cut job whose parts all ran, such as "cuda:0-3 sm90 by queries". */
void cut_name_backend(const struct devices *devices, struct job *job);
/* Combines the differences that the devices of a cut job found between their parts' outputs and the exact outputs
 * (job.h, truth_found). All parts must have run. */
void cut_join_truths(struct job *job);
/* True if the device is the CPU and runs a batch that will end soon. To send a second batch before that end gains no
 * time, and until then more jobs may join the second batch. *wait_ns becomes the time for which the second batch may
 * wait. */
bool device_can_wait(const struct device *device, int64_t now_ns, int64_t *wait_ns);
/* The device must have room for the batch, unless the batch is a part of a job with sum_parts (struct job). */
void devices_submit(struct devices *devices, struct batch *batch, struct device *device);
/* Submits a batch of one late job: an HTTP thread has put the job on the device already, so the batch needs no free
 * slot. */
void devices_submit_late(struct devices *devices, struct batch *batch);
/* True if a device other than the CPU has a batch that has not come back. */
bool devices_away(const struct devices *devices);
/* Removes from its device's list of batches a batch that has come back. Call this for each batch that arrives in the
 * mailbox. */
void devices_collect(struct devices *devices, struct batch *batch);
const char *device_name(const struct device *device);
/* Stops giving work to a device that failed. False: the device was disabled already. */
bool device_disable(struct device *device);

/* Returns a device that must be disabled, or NULL if there is none. Either a thread noted the device as lost, or a
 * batch on the device has exceeded its time (--watchdog-ms and the time that the batch's size explains). *overdue: a
 * batch has exceeded its time. The CPU is not watched. */
struct device *devices_to_disable(const struct devices *devices, bool *overdue);
/* Returns the batches on a device, linked by their member `next`. */
struct batch *device_batches(const struct device *device);

#endif
