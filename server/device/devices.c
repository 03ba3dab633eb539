/* devices.c: how batches of jobs go to a device and come back.
 *
 *   main thread --> inbox --> slot 0: stream, batch: copy in | run | copy out --> done? --> main thread's mailbox
 *                             slot 1: ...               (in all attn_device_info.streams + DEVICE_GUESTS slots)
 *
 * A GPU has one thread for all of its slots. The CPU has one thread for each slot.
 *
 * Invariants
 * 1. One flow (the work of one access token or connection) has at most as many batches on a device as the device has
 *    streams. On the CPU, or with a single stream, a flow may have one more batch, because the device would otherwise
 *    be idle between two batches. All flows together may have as many batches as one flow alone, and DEVICE_GUESTS
 *    more. A guest is the batch of a flow that has no other batch on the device. A job that is cut into sum_parts parts
 *    (struct job) may exceed these numbers, because one device gets all its parts if other devices are busy or lost.
 * 2. A guest begins when all other batches have run for DEVICE_GUEST_AFTER_NS, so that short batches run alone. If
 *    the other batches belong to several flows, the oldest of these batches must also have run for DEVICE_GUEST_FACTOR
 *    times the time that the guest needs.
 * 3. Threads share only the fields of a device that are under `lock`, and the atomic fields.
 *    The main thread or the device's threads own all other fields, as internal.h says. */
#include "server/device/internal.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/text.h"
#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/caches/caches.h"
#include "server/work/request.h"

/* ---- Opening and closing devices --------------------------------------------------------------------------------- */

static void device_free(struct device *device)
{
    assert(device->outstanding == 0 && device->batches == NULL && device->first == NULL && device->held == NULL);
    for (int s = 0; s < device->slot_count; s++) {
        assert(device->slots[s].batch == NULL && device->slots[s].mirror_count == 0);
        memory_close_slot(device->handle, &device->slots[s]);
    }
    if (device->handle) attn_device_free(device->handle, device->cache_memory);
    attn_device_close(device->handle);
    pthread_cond_destroy(&device->wake);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static void join_threads(struct device *device)
{
    for (int i = 0; i < device->thread_count; i++) pthread_join(device->threads[i].thread, NULL);
}

/* Starts a device's threads. A GPU gets one thread, which serves all of its slots (streams). The CPU gets one thread
 * for each slot, because these threads compute the problems themselves. */
static attn_status start_threads(struct device *device, attn_error *err)
{
    const int threads = device->info.unified ? device->slot_count : 1, slots = device->slot_count / threads;
    for (; device->thread_count < threads; device->thread_count++) {
        struct device_thread *thread = &device->threads[device->thread_count];
        thread->device = device;
        thread->slots = &device->slots[device->thread_count * slots];
        thread->slot_count = slots;
        const int error = pthread_create(&thread->thread, NULL, device_main, thread);
        if (error == 0) continue;
        pthread_mutex_lock(&device->lock);
        device->stop = true;
        pthread_cond_broadcast(&device->wake);
        pthread_mutex_unlock(&device->lock);
        join_threads(device);
        return attn_fail(err, ATTN_DEVICE, NULL, "--devices: no thread for %s: %s", device->info.name, strerror(error));
    }
    return ATTN_OK;
}

static attn_status device_open(const struct config *config, const char *backend, int index, struct mailbox *box,
                               int message_kind, struct devices *devices, attn_error *err)
{
    const attn_device_options options = { .threads = config->cpu_threads, .memory_bytes = config->device_bytes };
    attn_status status;
    if (devices->count == CONFIG_MAX_DEVICES)
        return attn_fail(err, ATTN_TOO_LARGE, NULL, "--devices: more than %d devices", CONFIG_MAX_DEVICES);
    struct device *device = calloc(1, sizeof *device);
    if (device == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "--devices: out of memory");
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&device->lock, NULL);
    pthread_cond_init(&device->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    device->last = &device->first;
    device->box = box;
    device->message_kind = message_kind;
    status = attn_device_open(backend, index, &options, &device->handle, err);
    if (status != ATTN_OK) goto fail;
    attn_device_describe(device->handle, &device->info);
    /* The CPU is not watched: problems may take minutes on it, and it cannot be lost. */
    device->watchdog_ns = device->info.unified ? NEVER : config->watchdog_ms * CLOCK_NS_PER_MS;
    atomic_store(&device->due_ns, NEVER);
    const int most = DEVICE_MAX_STREAMS - DEVICE_GUESTS, streams = device->info.streams;
    device->streams = streams < 1 ? 1 : streams > most ? most : streams;
    while (device->slot_count < device->streams + DEVICE_GUESTS) {
        status = attn_stream_open(device->handle, &device->slots[device->slot_count].stream, err);
        if (status != ATTN_OK) goto fail;
        device->slot_count++;
    }
    atomic_store(&device->usable, true);
    if ((status = start_threads(device, err)) != ATTN_OK) goto fail;
    device->number = devices->count;
    devices->device[devices->count++] = device;
    static const attn_status to_count[] = { ATTN_DEVICE, ATTN_DEVICE_LOST, ATTN_NO_MEMORY };
    /* these metrics must exist with the value 0, because Prometheus's rate() ignores the first sample of a metric */
    metrics_add(METRIC_DEVICE_BATCHES, device->info.name, NULL, 0);
    metrics_add(METRIC_DEVICE_PARTS, device->info.name, NULL, 0);
    for (int i = 0; i < 3; i++) metrics_add(METRIC_DEVICE_ERRORS, device->info.name, attn_status_name(to_count[i]), 0);
    log_event(LOG_INFO, NULL, "device", "name=%s backend=%s streams=%d description=\"%s\"", device->info.name,
              device->info.backend, device->streams, device->info.description);
    return ATTN_OK;
fail:
    device_free(device);
    return status;
}

/* Returns the GPU backend whose device numbers --devices uses, or NULL if this build supports only the CPU. */
static const char *gpu_backend(void)
{
    for (const char *const *name = attn_backends(); *name; name++)
        if (attn_is_gpu(*name)) return *name;
    return NULL;
}

attn_status devices_open(const struct config *config, struct mailbox *box, int message_kind, struct devices **out,
                         attn_error *err)
{
    const char *gpu = gpu_backend();
    struct devices *devices = calloc(1, sizeof *devices);
    attn_status status = ATTN_OK;
    if (devices == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "--devices: out of memory");
    devices->split_above_ms = config->split_above_ms;
    const char *wanted = config->devices;
    const bool numbers = *wanted >= '0' && *wanted <= '9';
    const int gpus = gpu ? attn_device_count(gpu) : 0;
    if (gpus == 0 && (numbers || strcmp(wanted, "all") == 0)) {
        status = attn_fail(err, ATTN_NOT_FOUND, NULL, "--devices: '%.100s' wants GPUs, and %s", wanted,
                           gpu ? "there is none here" : "this program was built without CUDA");
    } else if (strcmp(wanted, "auto") == 0 || strcmp(wanted, "all") == 0) {
        for (int i = 0; i < gpus && status == ATTN_OK; i++)
            status = device_open(config, gpu, i, box, message_kind, devices, err);
        if (gpus == 0) status = device_open(config, "cpu", 0, box, message_kind, devices, err);
    } else if (numbers) {
        for (const char *at = wanted; *at && status == ATTN_OK; at += *at == ',') {
            uint64_t index = 0;
            /* cannot fail, because config.c has checked the text */
            at = text_read_number(at, &index);
            assert(at != NULL && index < CONFIG_MAX_DEVICES);
            if (index >= (uint64_t)gpus)
                status = attn_fail(err, ATTN_NOT_FOUND, NULL, "--devices: there is no GPU %d, there %s %d", (int)index,
                                   gpus == 1 ? "is" : "are", gpus);
            else status = device_open(config, gpu, (int)index, box, message_kind, devices, err);
        }
    } else status = device_open(config, wanted, 0, box, message_kind, devices, err);
    if (status == ATTN_OK) status = inline_open(devices, config, err);
    if (status != ATTN_OK) {
        devices_stop(devices, DEVICE_STOP_MS);
        devices_close(devices);
        return status;
    }
    *out = devices;
    return ATTN_OK;
}

static int64_t default_kv_bytes(const attn_device_info *info)
{
    const int64_t share = info->memory_limit / DEVICE_CACHE_SHARE;
    return info->unified && share > DEVICE_CACHE_MOST_CPU ? DEVICE_CACHE_MOST_CPU : share;
}

static attn_status give_memory(void *context, size_t bytes, void **memory, attn_error *err)
{
    struct device *device = context;
    const attn_status status = attn_device_alloc(device->handle, bytes, &device->cache_memory, err);
    *memory = device->cache_memory;
    if (status == ATTN_OK)
        log_event(LOG_INFO, NULL, "caches", "device=%s bytes=%lld", device->info.name, (long long)bytes);
    return status;
}

attn_status devices_add_caches(struct devices *devices, const struct config *config, struct caches *caches,
                               attn_error *err)
{
    for (int i = 0; i < devices->count && config->kv_bytes != 0; i++) {
        struct device *device = devices->device[i];
        const attn_device_info *const info = &device->info;
        const struct caches_source source = { give_memory, device };
        const int64_t bytes = config->kv_bytes > 0 ? config->kv_bytes : default_kv_bytes(info);
        /* a pool (the memory for caches) that is larger than the device's memory could never be allocated */
        if (bytes > info->memory_limit && info->memory_limit > 0)
            return attn_fail(
                err, ATTN_INVALID, NULL,
                "--kv-bytes: %lld is more than %s has for all that it does, which is %lld bytes (--device-bytes)",
                (long long)bytes, info->name, (long long)info->memory_limit);
        caches_add_pool(caches, i, info->name, &source, (size_t)bytes);
    }
    return ATTN_OK;
}

bool devices_stop(struct devices *devices, int64_t wait_ms)
{
    const int64_t until_ns = clock_ns() + wait_ms * CLOCK_NS_PER_MS;
    bool all = true;
    for (int i = 0; i < devices->count; i++) {
        struct device *device = devices->device[i];
        const struct timespec until = { until_ns / CLOCK_NS_PER_S, until_ns % CLOCK_NS_PER_S };
        int error = 0;
        pthread_mutex_lock(&device->lock);
        device->stop = true;
        /* no more gradient sums will be freed, so the batch that is held back for lack of memory must try again now */
        device->held_may_run = true;
        pthread_cond_broadcast(&device->wake);
        while (device->threads_ended < device->thread_count && error == 0)
            error = pthread_cond_timedwait(&device->wake, &device->lock, &until);
        const bool stopped = device->threads_ended == device->thread_count;
        pthread_mutex_unlock(&device->lock);
        if (stopped && !device->joined) join_threads(device);
        device->joined = stopped;
        all &= stopped;
    }
    return all;
}

void devices_close(struct devices *devices)
{
    if (devices == NULL) return;
    for (int i = 0; i < devices->count; i++)
        if (!devices->device[i]->joined) join_threads(devices->device[i]);
    /* inline slots (streams for HTTP threads) belong to the devices, so they are closed first */
    inline_close(devices);
    for (int i = 0; i < devices->count; i++) device_free(devices->device[i]);
    free(devices);
}

/* ---- Functions for the server's main thread ---------------------------------------------------------------------- */

int devices_count(const struct devices *devices)
{
    return devices->count;
}
const attn_capabilities *devices_capabilities(const struct devices *devices)
{
    return attn_device_capabilities(devices->device[0]->handle);
}
const attn_device_info *devices_largest(const struct devices *devices)
{
    const attn_device_info *largest = &devices->device[0]->info;
    for (int i = 1; i < devices->count; i++)
        if (devices->device[i]->info.memory_limit > largest->memory_limit) largest = &devices->device[i]->info;
    return largest;
}
int device_number(const struct device *device)
{
    return device->number;
}
const char *device_name(const struct device *device)
{
    return device->info.name;
}

/* Allocates staging memory (host memory for requests' tensors). The driver of one device pins it for all devices. */
static void *map_staging(void *context, size_t bytes)
{
    const struct devices *devices = context;
    attn_error ignored;
    void *memory = NULL;
    for (int i = 0; i < devices->count && memory == NULL; i++)
        if (atomic_load(&devices->device[i]->usable))
            (void)attn_staging_alloc(devices->device[i]->handle, bytes, &memory, &ignored);
    return memory;
}

static void unmap_staging(void *context, void *memory, size_t bytes)
{
    const struct devices *devices = context;
    attn_staging_free(devices->device[0]->handle, memory, bytes);
}

bool devices_staging(struct devices *devices, struct staging_source *source)
{
    if (devices->device[0]->info.unified) return false;
    *source = (struct staging_source){ map_staging, unmap_staging, NULL, devices };
    return true;
}

attn_device *devices_copier(const struct devices *devices)
{
    return devices->device[0]->info.unified ? NULL : devices->device[0]->handle;
}

bool devices_usable(const struct devices *devices)
{
    for (int i = 0; i < devices->count; i++)
        if (atomic_load(&devices->device[i]->usable)) return true;
    return false;
}

void devices_describe(struct devices *devices, struct device_state *states)
{
    for (int i = 0; i < devices->count; i++) {
        states[i].can = attn_device_capabilities(devices->device[i]->handle);
        attn_device_describe(devices->device[i]->handle, &states[i].info);
        states[i].usable = atomic_load(&devices->device[i]->usable);
        states[i].running_requests = atomic_load(&devices->device[i]->requests);
    }
}

attn_device *devices_of_index(const struct devices *devices, int64_t index, int *number)
{
    for (int i = 0; i < devices->count; i++) {
        if (devices->device[i]->info.index != index) continue;
        *number = i;
        return devices->device[i]->handle;
    }
    return NULL;
}

bool devices_is_usable(const struct devices *devices, int number)
{
    return atomic_load(&devices->device[number]->usable);
}

void devices_note_lost(struct devices *devices, int number)
{
    atomic_store(&devices->device[number]->lost, true);
}

/* Returns a lower bound on the time, in seconds, that the job takes on the fastest device. For a long job, scores that
 * FlashMask hides do not count. */
double devices_least_seconds(const struct devices *devices, const struct job *job)
{
    const double unimportant_s = 0.05;
    double seconds = 0;
    for (int closer = 0; closer < 2; closer++) {
        double flops = 0, scores = 0, fastest_flops = 0, fastest_scores = 0;
        for (int i = 0; i < job->call->count; i++) {
            const attn_problem *p = job_problem(job, i);
            if (p == NULL) continue;
            const attn_dims d = attn_dims_of(p);
            const double each = 2 * (double)(d.D + d.Dv) * (p->op == ATTN_OP_BACKWARD ? 2.5 : 1);
            const double own = closer ? attn_scores(p) : (job->call->count == 1 ? job->flops : attn_flops(p)) / each;
            scores += own;
            flops += own * each;
        }
        for (int i = 0; i < devices->count; i++) {
            const attn_device_info *info = &devices->device[i]->info;
            if (info->fastest_flops > fastest_flops) fastest_flops = info->fastest_flops;
            if (info->fastest_scores > fastest_scores) fastest_scores = info->fastest_scores;
        }
        const double by_flops = flops / fastest_flops, by_scores = scores / fastest_scores;
        seconds = (by_flops > by_scores ? by_flops : by_scores) + job->truth_seconds / DEVICE_TRUTH_FASTEST;
        if (seconds < unimportant_s) break;
    }
    return seconds;
}

/* Returns how many batches the device may have at a time. The limit holds for each flow (client), and also for all
 * flows together. Guests (batches of flows without another batch on the device) do not count. */
static int most_batches(const struct device *device)
{
    return device->streams + (device->info.unified || device->streams == 1);
}

static bool is_full(const struct device *device)
{
    return device->outstanding >= most_batches(device) + DEVICE_GUESTS;
}

bool device_has_room(const struct device *device, const struct job *job, int64_t now_ns, int64_t *wait_ns)
{
    struct guest_others others = { 0 };
    int own = 0;
    if (is_full(device)) return false;
    for (const struct batch *batch = device->batches; batch; batch = batch->next) {
        own += batch->flow == job->flow;
        batch_guest_sees(&others, batch->flow, batch->left_ns);
    }
    if (device->outstanding < most_batches(device)) return own < most_batches(device);
    if (own > 0) return false;
    const int64_t left_ns = batch_guest_wait_ns(&others, job->seconds, now_ns);
    if (left_ns > 0 && left_ns < *wait_ns) *wait_ns = left_ns;
    return left_ns <= 0;
}

struct device *devices_pick(struct devices *devices, uint64_t passed_over)
{
    struct device *best = NULL;
    for (int i = 0; i < devices->count; i++) {
        struct device *device = devices->device[i];
        if ((passed_over >> i & 1) || device->disabled || is_full(device)) continue;
        /* Checks of clients' results add nothing to device->flops, the work on a device. Among devices with equal
         * `flops`, the one with fewer batches is therefore chosen. */
        const bool less = best && (device->flops < best->flops ||
                                   (device->flops == best->flops && device->outstanding < best->outstanding));
        if (best == NULL || less) best = device;
    }
    return best;
}

bool device_can_wait(const struct device *device, int64_t now_ns, int64_t *wait_ns)
{
    int64_t oldest_ns = now_ns;
    if (!device->info.unified || device->outstanding == 0 || device->flops > QUEUE_BATCH_FLOPS) return false;
    for (const struct batch *batch = device->batches; batch; batch = batch->next)
        if (batch->left_ns < oldest_ns) oldest_ns = batch->left_ns;
    *wait_ns = oldest_ns + DEVICE_GUEST_AFTER_NS - now_ns;
    /* false: the oldest batch has run for longer than expected, so its end is unknown */
    return *wait_ns > 0;
}

bool devices_away(const struct devices *devices)
{
    for (int i = 0; i < devices->count; i++)
        if (!devices->device[i]->info.unified && devices->device[i]->outstanding > 0) return true;
    return false;
}

void devices_submit(struct devices *devices, struct batch *batch, struct device *device)
{
    (void)devices;
    assert(batch->count > 0 && batch->device == NULL);
    assert(batch->adopted || batch_job(batch, 0)->sum_parts > 0 || !is_full(device));
    batch->device = device;
    batch->left_ns = clock_ns();
    batch->previous = NULL;
    batch->next = device->batches;
    if (batch->next) batch->next->previous = batch;
    device->batches = batch;
    batch->message.kind = device->message_kind;
    batch->message.next = NULL;
    device->outstanding++;
    device->flops += batch->flops;
    atomic_fetch_add(&device->requests, batch->count);
    for (int i = 0; i < batch->count; i++) batch->parts[i]->index = device->info.index;
    pthread_mutex_lock(&device->lock);
    *device->last = &batch->message;
    device->last = &batch->message.next;
    pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->lock);
}

void devices_submit_late(struct devices *devices, struct batch *batch)
{
    batch->adopted = true;
    devices_submit(devices, batch, batch->parts[0]->handed_over->device);
}

void devices_collect(struct devices *devices, struct batch *batch)
{
    struct device *device = batch->device;
    (void)devices;
    assert(batch->previous ? batch->previous->next == batch
                           /* fails if a batch is collected twice */
                           : device->batches == batch);
    assert(device->outstanding > 0 && atomic_load(&device->requests) >= batch->count);
    for (int i = 0; i < batch->count; i++) assert(batch->parts[i]->ran == (batch->parts[i]->error.status == ATTN_OK));
    *(batch->previous ? &batch->previous->next : &device->batches) = batch->next;
    if (batch->next) batch->next->previous = batch->previous;
    device->outstanding--;
    device->flops -= batch->flops;
    /* set to exactly 0, so that rounding errors of additions and subtractions do not accumulate */
    if (device->outstanding == 0) device->flops = 0;
    atomic_fetch_sub(&device->requests, batch->count);
}

bool device_disable(struct device *device)
{
    if (device->disabled) return false;
    device->disabled = true;
    atomic_store(&device->usable, false);
    return true;
}

struct device *devices_to_disable(const struct devices *devices, bool *overdue)
{
    const int64_t now_ns = clock_ns();
    for (int i = 0; i < devices->count; i++) {
        struct device *const device = devices->device[i];
        *overdue = atomic_load(&device->due_ns) < now_ns;
        if (!device->disabled && (*overdue || atomic_load(&device->lost))) return device;
    }
    return NULL;
}

struct batch *device_batches(const struct device *device)
{
    return device->batches;
}
