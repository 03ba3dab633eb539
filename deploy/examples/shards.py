"""One sequence whose keys are spread over several servers: the arithmetic, forward and backward.

    python3 shards.py [http://127.0.0.1:8080 http://10.0.0.2:8080 ...]

`cut` makes parts of the keys. `forward` returns one part's result, `merge` the result over all keys, and `backward`
one part's gradients. Their argument `post` is a function that sends tensors to a server. `join` returns all
gradients. dask_client.py and ray_client.py run these steps on a cluster, which repeats a step that has failed. Run
as a program, this file takes the steps one after the other, with 1, 2, 3 ... servers, and shows the bytes that each
server moved."""
import functools
import http.client
import json
import sys
import time
import urllib.error
import urllib.request

import numpy as np
from safetensors.numpy import load, save

RETRIES = 5   # how often Dask or Ray repeats a step that ended with Unavailable
WAIT_S = 600  # seconds of silence after which a server counts as lost; longer than any computation takes


# ---- The arithmetic --------------------------------------------------------------------------------------------------


def cut(q, k, v, count, causal=False, **options):
    """Returns at most `count` parts of the keys of k and v, [B, S, H, D], with about the same work in each.

    The protocol has no option for the position at which a part's keys begin, and needs none. With `causal` a query sees
    no key behind its own position. So the queries before a part's first key are not sent. The first query that is sent
    sees the part's key 0, and each later query sees one key more. This is a causal mask with alignment top_left. If
    there are more keys than queries, the first query sees some more keys, and the right end of `window` says how
    many."""
    if set(options) - {'scale', 'softcap'}:
        raise ValueError(f'{sorted(options)}: only causal, scale and softcap are the same in every part of the keys')
    if k.shape[1] != v.shape[1]:
        raise ValueError(f'v: shape[1] is {v.shape[1]}, must be {k.shape[1]}, the keys of k')
    Sq, Sk = q.shape[1], k.shape[1]
    behind = Sk - Sq if causal else Sk                             # number of keys that every query sees
    seen_by = Sq - np.maximum(0, np.arange(Sk) - behind)           # number of queries that see key j, at least 1
    work = np.cumsum(seen_by)
    ends = {int(np.searchsorted(work, work[-1] * p / count)) + 1 for p in range(1, count)} | {0, Sk}
    parts = []
    for begin, end in zip(sorted(ends), sorted(ends)[1:]):
        # the first query that sees a key of this part of the keys
        first = max(0, begin - behind) if causal else 0
        mask = {'window': [-1, first + behind - begin], 'alignment': 'top_left'} if causal else {}
        part = {'q': q, 'k': k[:, begin:end], 'v': v[:, begin:end]}
        parts.append({**part, 'first': first, 'options': {**options, **mask}})
    return parts


def inputs(part):
    return {'q': part['q'][:, part['first']:], 'k': part['k'], 'v': part['v']}


def forward(post, part):
    """Returns out and lse of all queries over the keys of one part. A query that sees no key of the part has out 0 and
    lse -inf."""
    answer = post('forward', inputs(part), **part['options'], out_dtype='float32')
    B, Sq, H, _ = part['q'].shape
    out, lse = np.zeros((B, Sq, H, part['v'].shape[3]), np.float32), np.full((B, H, Sq), -np.inf, np.float32)
    out[:, part['first']:], lse[:, :, part['first']:] = answer['out'], answer['lse']
    return {'out': out, 'lse': lse}


def merge(post, *results):
    """Returns out and lse over all keys. `results` has out and lse over each part of the keys."""
    return post('merge', {f'parts.{p}.{name}': t for p, result in enumerate(results) for name, t in result.items()})


def backward(post, part, whole, dout):
    """Returns the final dk and dv of one part's keys, and what this part adds to dq.

    The server gets out and lse over all keys. From this lse it computes the probabilities that the part's keys have
    among all keys, so it needs no other part's keys."""
    first = part['first']
    results = {'out': whole['out'][:, first:], 'lse': whole['lse'][:, :, first:], 'dout': dout[:, first:]}
    answer = post('backward', {**inputs(part), **results}, **part['options'], grad_dtype='float32')
    dq = np.zeros(part['q'].shape, np.float32)
    dq[:, first:] = answer['dq']
    return {**answer, 'dq': dq}


def join(*gradients):
    dk, dv = (np.concatenate([g[name] for g in gradients], 1) for name in ('dk', 'dv'))
    return {'dq': sum(g['dq'] for g in gradients), 'dk': dk, 'dv': dv}


# ---- A server of several ---------------------------------------------------------------------------------------------


class Unavailable(Exception):
    """Raised if no server answered, or if no server could compute at the moment. A server keeps nothing of a request,
    so the same request may be sent again, to any server."""


class Refused(Exception):
    """Raised if a server refused the request, with its reason in one sentence. Every server would refuse it."""


def ready(servers, n):
    """Returns the first server that takes requests, beginning with server n."""
    for i in range(len(servers)):
        url = servers[(n + i) % len(servers)]
        try:
            with urllib.request.urlopen(f'{url}/readyz', timeout=5):
                return url
        except (OSError, http.client.HTTPException):
            pass
    time.sleep(1)  # a server that is being restarted needs a second; then the engine (Dask or Ray) tries again
    raise Unavailable(f'none of {", ".join(servers)} is ready')


def reason(error):
    """Returns the server's reason for not answering a request: one sentence, or the status if there is no sentence."""
    try:
        return json.load(error)['detail']
    # the server was killed while it answered, or a proxy answered
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return f'status {error.code}'


def post(servers, n, op, tensors, **options):
    """Sends a request to server n, or to the next one that is ready. Returns the tensors of the answer. Pass
    functools.partial(post, servers, n) to the functions above."""
    url = ready(servers, n)
    body = save({name: np.ascontiguousarray(t) for name, t in tensors.items()},
                {name: json.dumps(option) for name, option in options.items()})
    request = urllib.request.Request(f'{url}/v1/attention/{op}', body, {'Content-Type': 'application/x-safetensors'})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return load(answer.read())
    except urllib.error.HTTPError as e:
        if e.code < 500 and e.code not in (408, 429):
            raise Refused(reason(e)) from None
        time.sleep(float(e.headers.get('Retry-After', 0)))
        raise Unavailable(f'{url}: {reason(e)}') from None
    except (OSError, http.client.HTTPException) as e:
        raise Unavailable(f'{url}: {e!r}') from None


# ---- An example ------------------------------------------------------------------------------------------------------


def one_after_the_other(servers, parts, dout):
    """Returns out and lse, and the gradients, by the steps that a Dask or Ray cluster runs in parallel."""
    posts = [functools.partial(post, servers, n) for n in range(len(parts))]
    whole = merge(posts[0], *(forward(p, part) for p, part in zip(posts, parts)))
    return whole, join(*(backward(p, part, whole, dout) for p, part in zip(posts, parts)))


def compare(attention, servers, count):
    """Returns the largest error of `attention` over `count` parts, compared with one request with all keys. For tensors
    with numbers above 1 it is relative to the largest number."""
    rng = np.random.default_rng(0)
    # axes: batch, position, head, channel [B, S, H, D]
    q, dout = (rng.standard_normal((1, 300, 4, 32)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((1, 700, 2, 32)).astype(np.float32) for _ in range(2))
    whole, gradients = attention(servers, cut(q, k, v, count, causal=True), dout)
    want = post(servers, 0, 'forward', {'q': q, 'k': k, 'v': v}, causal=True)
    want.update(post(servers, 0, 'backward', {'q': q, 'k': k, 'v': v, 'dout': dout}, causal=True))
    got = {**whole, **gradients}
    error = max(np.abs(got[name] - want[name]).max() / max(1, np.abs(want[name]).max()) for name in want)
    assert error < 1e-5, error
    return error


def show(attention, servers):
    """Prints the largest error of a client's `attention`, and how the client reports a request that the server
    refused."""
    count = max(3, len(servers))
    print(f'servers: {len(servers)}; parts: {count}; the largest error is {compare(attention, servers, count):.1e}')
    q, k = np.ones((1, 1, 4, 8), np.float32), np.ones((1, 9, 3, 8), np.float32)
    try:
        attention(servers, cut(q, k, k, 3), q)
        sys.exit('three heads of k were not refused')
    except Refused as refused:
        # Ray raises an exception of its own, whose cause is the worker's exception, so that cause is printed
        print(f'refused: {getattr(refused, "cause", refused)}')


def moved(url):
    """Returns (sum, page). The sum is the number of bytes of all bodies that the server has received and sent. It is
    read from the server's /metrics; page is the number of bytes of that page."""
    with urllib.request.urlopen(f'{url}/metrics') as answer:
        page = answer.read()
    counters = dict(line.rsplit(' ', 1) for line in page.decode().splitlines() if not line.startswith('#'))
    total = float(counters['attnd_body_bytes_received_total']) + float(counters['attnd_body_bytes_sent_total'])
    return total, len(page)


def counted(servers, parts, dout):
    before = [sum(moved(url)) for url in servers]
    result = one_after_the_other(servers, parts, dout)
    kilobytes = ', '.join(f'{(moved(url)[0] - b) / 1e3:.0f}' for url, b in zip(servers, before))
    print(f'servers: {len(servers)}; KB of bodies to and from each: {kilobytes}')
    return result


def main(*servers):
    servers = servers or ('http://127.0.0.1:8080',)
    for n in range(1, len(servers) + 1):
        compare(counted, servers[:n], n)
    show(one_after_the_other, servers)


if __name__ == '__main__':
    main(*sys.argv[1:])
