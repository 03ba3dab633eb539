"""Requests that are small to send and take a known time to compute. Tests of queues, deadlines, clients that leave, and
shutdown use them.

A server estimates how long a request takes, and refuses it at once if the estimate is beyond the deadline. The estimate
is a third of the time that the request takes on the fastest core that was ever measured. It ignores a softcap, which
doubles the time. If a deadline is at least a quarter of the computing time, the server therefore never refuses the
request at once, on any machine. It computes the request until a timer ends it at the deadline."""
import json

import numpy as np

from wire import tensor


def body(S, seed=1, **options):
    """Makes a forward of S x S scores with one narrow head. The server computes S^2 exponentials and S^2 tanh. The body
    has 24 S bytes."""
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
