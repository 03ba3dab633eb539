"""One sequence's keys over several servers, on Dask: forward and backward. If a step fails, Dask repeats it.

    python3 dask_client.py [http://127.0.0.1:8080 http://10.0.0.2:8080 ...]

Copy `attention` and the file shards.py into your program. Dask starts three workers on this machine, unless the
variable DASK_SCHEDULER_ADDRESS names a cluster.

Dask repeats a step that ended with an exception, up to `retries` times. The repeated step takes the next server that is
ready. If a worker dies, Dask repeats the step that the worker was computing, and the steps whose results the worker
held for later steps. `retries` does not limit these repetitions. If client.scatter() has put tensors on a worker, they
are lost with that worker. Therefore tensors here are arguments of steps, or results of steps. Dask does not tell
exceptions apart, so it also repeats a request that the server refused."""
import functools
import os
import sys

from dask.distributed import Client

import shards


def attention(client, servers, parts, dout):
    """Returns ({'out', 'lse'}, {'dq', 'dk', 'dv'}) over all keys. `parts` is what shards.cut() returns; part n goes to
    server n, or to the next one that is ready."""
    def step(function, n, *inputs):
        post = functools.partial(shards.post, servers, n % len(servers))
        # pure=False: Dask would otherwise hash the tensors to find out whether it has the result already.
        return client.submit(function, post, *inputs, retries=shards.RETRIES, pure=False)

    whole = step(shards.merge, 0, *(step(shards.forward, n, part) for n, part in enumerate(parts)))
    gradients = [step(shards.backward, n, part, whole, dout) for n, part in enumerate(parts)]
    return client.gather((whole, client.submit(shards.join, *gradients)))


def main(*servers):
    servers = servers or ('http://127.0.0.1:8080',)
    here = {'n_workers': 3, 'threads_per_worker': 1, 'dashboard_address': None}
    with Client(**({} if 'DASK_SCHEDULER_ADDRESS' in os.environ else here)) as client:
        client.upload_file(shards.__file__)  # gives shards.py to the workers, also to each worker that is started later
        shards.show(functools.partial(attention, client), servers)


if __name__ == '__main__':
    main(*sys.argv[1:])
