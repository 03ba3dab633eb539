"""One sequence's keys over several servers, on Ray: forward and backward. If a step fails, Ray repeats it.

    python3 ray_client.py [http://127.0.0.1:8080 http://10.0.0.2:8080 ...]

Copy `attention`, `step` and the file shards.py into your program. Ray starts on this machine, unless the variable
RAY_ADDRESS names a cluster.

Ray repeats a step that ended with shards.Unavailable, and a step whose worker died, up to `max_retries` times. The
repeated step takes the next server that is ready. Ray does not repeat a request that the server refused. If a machine
is lost, Ray computes again the results that the machine held for later steps. Tensors that ray.put() has stored on the
machine are lost."""
import functools
import os
import sys

import ray

import shards


@ray.remote(max_retries=shards.RETRIES, retry_exceptions=[shards.Unavailable])
def step(function, servers, n, *inputs):
    return function(functools.partial(shards.post, servers, n % len(servers)), *inputs)


@ray.remote
def join(*gradients):
    return shards.join(*gradients)


def attention(servers, parts, dout):
    """Returns ({'out', 'lse'}, {'dq', 'dk', 'dv'}) over all keys. `parts` is what shards.cut() returns; part n goes to
    server n, or to the next one that is ready."""
    forwards = [step.remote(shards.forward, servers, n, part) for n, part in enumerate(parts)]
    whole = step.remote(shards.merge, servers, 0, *forwards)
    gradients = [step.remote(shards.backward, servers, n, part, whole, dout) for n, part in enumerate(parts)]
    return ray.get([whole, join.remote(*gradients)])


def main(*servers):
    servers = servers or ('http://127.0.0.1:8080',)
    if 'RAY_ADDRESS' in os.environ:
        # gives shards.py to the workers of a cluster, which do not have it
        ray.init(runtime_env={'py_modules': [shards.__file__]})
    else:
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100_000_000)
    try:
        shards.show(attention, servers)
    finally:
        ray.shutdown()


if __name__ == '__main__':
    main(*sys.argv[1:])
