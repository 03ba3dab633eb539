/* batch.c: counts the operations of a batch, and records its results, times and metrics. It also says when a guest (a
 * batch whose client has no other batch on the device) may begin. */
#include "server/device/internal.h"

#include <string.h>

#include "server/base/log.h"
#include "server/base/metrics.h"

/* a head dimension below 64 costs as much as 64, because kernels compute whole tiles */
enum { LEAST_HEAD_DIM = 64 };

double batch_padded_flops(const struct job_part *part)
{
    const struct job *const job = part->job;
    double waste = 1;
    for (int i = 0; i < job->call->count; i++) {
        if (job_problem(job, i) == NULL) continue;
        const attn_dims d = attn_dims_of(job_problem(job, i));
        const double real = (double)(d.D + d.Dv), padded = (double)((d.D > LEAST_HEAD_DIM ? d.D : LEAST_HEAD_DIM) +
                                                                    (d.Dv > LEAST_HEAD_DIM ? d.Dv : LEAST_HEAD_DIM));
        if (real > 0 && padded / real > waste) waste = padded / real;
    }
    return job->flops * part->range.share * waste;
}

void batch_name_backend(proto_result *result, const struct device *device, const char *kernel)
{
    char *at = stpcpy(result->backend, device->info.name);
    if (*kernel) *at++ = ' ';
    const size_t room = sizeof result->backend - (size_t)(at - result->backend), length = strnlen(kernel, room - 1);
    memcpy(at, kernel, length);
    at[length] = '\0';
}

void batch_count(const struct batch *batch, const struct job_part *first)
{
    const char *device = batch->device->info.name;
    metrics_add(METRIC_DEVICE_BATCHES, device, NULL, 1);
    if (job_part_is_cut(first) && !first->adds) metrics_add(METRIC_DEVICE_PARTS, device, NULL, 1);
    if (first->ran) {
        const char *op = proto_operations[first->job->call->op].name;
        metrics_add(METRIC_KERNEL_SECONDS, device, op, batch->compute_us / 1e6);
        if (batch->truth_us > 0)
            metrics_add(METRIC_KERNEL_SECONDS, device, first->job->wants_judge ? op : "verify", batch->truth_us / 1e6);
        metrics_add(METRIC_FLOPS, device, op, batch->flops);
        metrics_add(METRIC_TENSOR_BYTES, device, op, batch->bytes);
        return;
    }
    /* a cancelled request is not an error of the device */
    if (first->error.status == ATTN_CANCELLED) return;
    metrics_add(METRIC_DEVICE_ERRORS, device, attn_status_name(first->error.status), 1);
    /* the loss of a device is not logged here: the main thread reports it, once for all batches */
    if (first->error.status != ATTN_DEVICE_LOST)
        log_event(LOG_WARN, NULL, "batch_failed", "device=%s requests=%d text=" LOG_Q, device, batch->count,
                  first->error.text);
}

void batch_note_times(const struct batch *batch, struct job *job)
{
    const double queue_us = (double)(batch->started_ns - job->queued_ns) / 1e3;
    if (batch->ended_ns - batch->started_ns < job->longest_ns) return;
    job->longest_ns = batch->ended_ns - batch->started_ns;
    for (int i = 0; i < job->call->count; i++) {
        double *us = job->results[i].timing_us;
        us[PROTO_STAGE_queue] = queue_us;
        us[PROTO_STAGE_prepare] = batch->prepare_us;
        us[PROTO_STAGE_copy_in] = batch->copy_in_us;
        us[PROTO_STAGE_launch] = batch->launch_us;
        us[PROTO_STAGE_compute] = batch->compute_us - batch->launch_us + (job->wants_judge ? batch->truth_us : 0);
        us[PROTO_STAGE_copy_out] = batch->copy_out_us;
    }
}

void batch_observe_times(const struct job *job)
{
    const double *const us = job->results[0].timing_us;
    metrics_observe(METRIC_STAGE_SECONDS, "queue", us[PROTO_STAGE_queue] / 1e6);
    metrics_observe(METRIC_STAGE_SECONDS, "compute", (us[PROTO_STAGE_launch] + us[PROTO_STAGE_compute]) / 1e6);
    if (us[PROTO_STAGE_copy_in] > 0) metrics_observe(METRIC_STAGE_SECONDS, "copy_in", us[PROTO_STAGE_copy_in] / 1e6);
    if (us[PROTO_STAGE_copy_out] > 0) metrics_observe(METRIC_STAGE_SECONDS, "copy_out", us[PROTO_STAGE_copy_out] / 1e6);
}

int64_t batch_guest_wait_ns(const struct guest_others *others, double seconds, int64_t now_ns)
{
    const double own_s = DEVICE_GUEST_FACTOR * (others->count + 1) * seconds, most_s = 1e9;
    const int64_t own_ns = others->several_flows ? (int64_t)((own_s < most_s ? own_s : most_s) * 1e9) : 0;
    const int64_t by_youngest_ns = others->youngest_ns + DEVICE_GUEST_AFTER_NS - now_ns;
    const int64_t by_oldest_ns = others->oldest_ns + own_ns - now_ns;
    return by_youngest_ns > by_oldest_ns ? by_youngest_ns : by_oldest_ns;
}

void batch_guest_sees(struct guest_others *others, const struct flow *flow, int64_t since_ns)
{
    if (others->count > 0 && others->flow != flow) others->several_flows = true;
    if (others->count == 0 || since_ns > others->youngest_ns) others->youngest_ns = since_ns;
    if (others->count == 0 || since_ns < others->oldest_ns) others->oldest_ns = since_ns;
    others->flow = flow;
    others->count++;
}

attn_status batch_plan(const attn_capabilities *can, const struct job *job, int item, const attn_problem *problem,
                       attn_plan *plan, attn_error *err)
{
    return job->transaction ? attn_plan_make(can, problem, plan, err)
                            : attn_plan_move(can, &job->plans[item], problem, plan, err);
}
