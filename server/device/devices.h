/* devices.h: one thread per GPU, that alone talks to it: copy in, run, copy out, report; and a thread per stream of the
 * CPU, which computes.
 *
 * The loop hands over batches and gets them back through its mailbox. Everything on a GPU's stream is asynchronous:
 * while the kernels of one batch run, the next is copied in. A completion is learned by asking the stream, never by a
 * callback, for a device in error calls nobody back.
 *
 * What goes wrong on a device, and who hears of it:
 *
 *   out of memory in an inline slot      the job is queued, as if there were no inline slots
 *   out of memory                the batch waits for those beside it to end and is tried again, alone in the end; then
 *                                its requests fail with NO_MEMORY
 *   an error that is not sticky  the batch's requests fail with DEVICE; the next batch runs
 *   a sticky error               all batches of the device come back with DEVICE_LOST; the loop disables it
 *   nobody waits for it          the loop cancels it: the CPU gives it up between two tiles, a GPU between two
 *                                launches, and its jobs come back with CANCELLED
 *   it never finishes            devices_to_disable() finds it; the loop disables it and answers what it runs without
 *                                waiting. The batches may come back later or never: their memory stays theirs,
 *                                for the device may still write
 *
 * A disabled device stays so until another process opens it. The server goes on with the others; without any it
 * ends. */
#ifndef DEVICES_H
#define DEVICES_H

#include "server/base/config.h"
#include "server/work/job.h"
#include "server/base/mailbox.h"

struct device;

/* Parts of jobs that run together. The loop makes a batch. A thread of the device owns it from devices_submit() until
 * it arrives in the mailbox. */
struct batch {
    struct message message;
    struct device *device;
    const struct flow *flow;       /* the first job's, which holds a reference: the batch has its turn. May be NULL */
    int64_t left_ns;               /* when it left for the device */
    int64_t charged_ns;            /* device time of the batch, which is charged to the flows of its jobs */
    struct batch *next, *previous; /* the loop's: those that are with the same device */
    int count;
    int waiting;                  /* the loop's: jobs whose requests still wait; at 0 it is cancelled */
    int cancel;                   /* attn_cancel(): the device gives it up between two tiles or launches */
    double flops, seconds;        /* operations of all jobs, and their expected time */
    bool adopted;                 /* an HTTP thread put it on the device: nobody marked when its parts began */
    int64_t started_ns, ended_ns; /* on the thread that ran it */
    double prepare_us, copy_in_us, compute_us, copy_out_us;
    double launch_us;         /* of compute_us: until the kernels were on the stream */
    struct job_part *parts[]; /* with a reference to the job of each */
};

static inline struct job *batch_job(const struct batch *batch, int part)
{
    return batch->parts[part]->job;
}

/* Metrics and the log, for a batch that came back; `first` is one of its parts. When one fails, all do. */
void batch_count(const struct batch *batch, const struct job_part *first);
/* The times of a job that ran in it, for its answer and the metrics. */
void batch_note_times(const struct batch *batch, struct job *job);

struct caches;
struct devices;

/* Opens what --devices names ("auto": every GPU, else the CPU; "all": every GPU) and starts the threads. Batches
 * that are done are posted to `box` as messages of kind `message_kind`. Fills *err with one clear line. */
attn_status devices_open(const struct config *config, struct mailbox *box, int message_kind, struct devices **devices,
                         attn_error *err);
/* Ends the threads after what they run, waiting at most `wait_ms`; false: something still runs. Batches may still
 * lie in the mailbox. */
bool devices_stop(struct devices *devices, int64_t wait_ms);
/* After devices_stop() said true, and the mailbox is empty. */
void devices_close(struct devices *devices); /* NULL is fine */

/* Memory of each device for the pages of KV caches: --kv-bytes, when the first one is made. Before the first request.
 * INVALID: it is more than a device has. */
attn_status devices_add_caches(struct devices *devices, const struct config *config, struct caches *caches,
                               attn_error *err);

int devices_count(const struct devices *devices);
const attn_device *devices_any(const struct devices *devices); /* to ask which kernels there are */
const attn_device_info *
devices_largest(const struct devices *devices); /* that with the most memory, as it was opened */
/* Where staging memory should come from so that the devices copy from it quickly: pinned memory of the first one that
 * copies. False when all compute in any memory: then the system's will do.
 * The devices must outlive the staging pool. */
bool devices_staging(struct devices *devices, struct staging_source *source);
attn_device *devices_copier(const struct devices *devices); /* that one; NULL: there is none */
bool devices_usable(const struct devices *devices);

/* A device as others see it at this moment. */
struct device_state {
    const attn_device *device; /* to ask what it can do; NULL in tests that have none */
    attn_device_info info;     /* attn_device_describe() */
    bool usable;               /* it has not failed */
    int64_t running_requests;  /* handed to this device and not yet answered */
};
void devices_describe(struct devices *devices, struct device_state *states); /* devices_count() of them; any thread */

/* The device that the backend counts as `index` (2 of "cuda:2"), to import memory on; *number is its number here. NULL:
 * this server does not have it. Any thread. */
attn_device *devices_of_index(const struct devices *devices, int64_t index, int *number);
bool devices_is_usable(const struct devices *devices, int number); /* it has not failed; any thread */
/* A call on its handle said DEVICE_LOST. The loop hears of it by devices_to_disable(). Any thread. */
void devices_note_lost(struct devices *devices, int number);

/* ---- The loop's side --------------------------------------------------------------------------------------------- */

/* Seconds that the job takes at the very least, on the fastest of the devices: less than any kernel here could need.
 * What it says cannot be done in time cannot; what it says can may still take several times as long. Any thread. */
double devices_least_seconds(const struct devices *devices, const struct job *job);

/* Of the devices that may have room for another batch, the one with the least work. The bits of `passed_over` are
 * numbers of devices that do not count. NULL when all are busy. */
struct device *devices_pick(struct devices *devices, uint64_t passed_over);
/* Has the device room for a batch that this job leads? Where the job's flow has no batch there, room may come later:
 * *wait_ns, which the caller has set, is reduced to the time until then. */
bool device_has_room(const struct device *device, const struct job *job, int64_t now_ns, int64_t *wait_ns);
int device_number(const struct device *device);
/* It computes on this machine's own cores and has a batch already that is soon over: another one would end no sooner
 * for being sent now, and may grow. *wait_ns: until when that may be said. */
bool device_can_wait(const struct device *device, int64_t now_ns, int64_t *wait_ns);
void devices_submit(struct devices *devices, struct batch *batch, struct device *device);
/* A batch of one job that is late: it is on the device already, whether or not there is room. */
void devices_submit_late(struct devices *devices, struct batch *batch);
/* Is there a batch with a device that is not this machine's own processor? */
bool devices_away(const struct devices *devices);
/* The batch has come back. */
void devices_collect(struct devices *devices, struct batch *batch);
const char *device_name(const struct device *device);
/* A device that failed gets no more work. False: it was disabled already. */
bool device_disable(struct device *device);

/* A device that is not done with a batch though the time it may take has passed (--watchdog-ms, and what its size
 * explains), or of which somebody has noted that it is lost; NULL: none. *overdue says which: it is as good as lost.
 * Devices that compute on this machine's own cores are not watched. */
struct device *devices_to_disable(const struct devices *devices, bool *overdue);
/* The batches that are with a device, linked by `next`. */
struct batch *device_batches(const struct device *device);

#endif
