"""Requests that take a known time to compute but are small to send: for tests of queues, deadlines, clients that leave,
and shutdown.

A server refuses at once what by its estimate cannot be done before the deadline. The estimate is a third of the time
that the fastest core ever measured needs. It ignores a softcap, which doubles the time. So on any machine a deadline of
at least a quarter of the computing time is kept by the timer and not by the estimate."""
import json

import numpy as np

from wire import tensor


def body(S, seed=1, **options):
    """A forward of S x S scores with one narrow head: S^2 exponentials and as many tanh; the body has 24 S bytes."""
    r = np.random.default_rng(seed)
    q, k, v = (tensor(r.standard_normal((1, S, 1, 4)), 'float16') for _ in range(3))
    return json.dumps({'q': q, 'k': k, 'v': v, 'softcap': 30.0, 'outputs': ['lse'], **options}).encode()


def calibrated(server, seconds, **options):
    """Makes a body that takes this server about that many seconds of processor time. With --cpu-threads 1 the request
    takes at least so many seconds, however busy the machine was when the speed was measured."""
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
