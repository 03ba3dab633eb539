"""Requests that take a known time to compute and little to send: for queues, deadlines, hang-ups and shutdown.

A server refuses at once what by its estimate cannot be done before the deadline. The estimate is a third of what the
fastest core needs that was ever measured, and knows nothing of a softcap, which doubles the time: so a deadline from a
quarter of the time upward is kept by the timer and not by the estimate, on any machine."""
import json

import numpy as np

from wire import tensor


def body(S, seed=1, **options):
    """A forward of S x S scores with one narrow head: S^2 exponentials and as many tanh, 24 S bytes."""
    r = np.random.default_rng(seed)
    q, k, v = (tensor(r.standard_normal((1, S, 1, 4)), 'float16') for _ in range(3))
    return json.dumps({'q': q, 'k': k, 'v': v, 'softcap': 30.0, 'outputs': ['lse'], **options}).encode()


def calibrated(server, seconds, **options):
    """A body whose computation takes this server about that many seconds of the processor: with --cpu-threads 1 no less
    time passes, however busy the machine was while this measured."""
    S = 2048
    while True:
        before = server.metric('process_cpu_seconds_total')
        answer = server.post('/v1/attention/forward', body(S, **options))
        assert answer.status == 200, answer
        computed = server.metric('process_cpu_seconds_total') - before
        if computed > 0.1:
            break
        S *= 2
    S = int(S * (seconds / computed) ** 0.5) + 1
    assert S < 400000, 'this machine is too fast for this test'
    return body(S, **options)
