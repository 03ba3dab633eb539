"""Caches (keys and values that stay on the server) as a client sees them, and a model of them in NumPy. test_caches.py
and the random walk below share this file.

    python3 http/caches.py [--operations 10000] [--seed 1] [--gpu]      (make walk)

The model keeps every position in float64, rounded to the cache's dtype as the server holds it, and computes attention
in float64 by the definition of kernels/README.md."""
import argparse
import json
import os
import sys
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
import service  # noqa: E402
import wire  # noqa: E402

DECODE, CACHES = '/v1/attention/decode', '/v1/caches'


def attention(q, k, v, causal=False, scale=None, window=(-1, -1), softcap=0, sinks=None, keep=None):
    """Returns attention of one batch row as (out, lse [H, Sq]): q is [Sq, H, D], k [Sk, Hk, D], v [Sk, Hk, Dv]. `keep`
    [H or 1, Sq or 1, n] masks the last n keys."""
    (Sq, H, D), (Sk, Hk, Dv) = q.shape, v.shape
    k, v = np.repeat(k, H // Hk, 1), np.repeat(v, H // Hk, 1)
    z = np.einsum('qhd,khd->hqk', q, k) * (1 / np.sqrt(D) if scale is None else scale)
    if softcap:
        z = softcap * np.tanh(z / softcap)
    i, j = np.arange(Sq)[:, None] + Sk - Sq, np.arange(Sk)[None]
    left, right = window
    seen = (j <= i if causal else True) & (j >= i - left if left >= 0 else True) & (j <= i + right if right >= 0 else True)
    seen = np.broadcast_to(seen, (H, Sq, Sk)).copy()
    if keep is not None:
        n = min(keep.shape[-1], Sk)
        seen[..., Sk - n:] &= keep[..., keep.shape[-1] - n:].astype(bool)
    z = np.where(seen, z, -np.inf)
    if sinks is not None:
        z = np.concatenate([z, np.broadcast_to(np.asarray(sinks, float)[:, None, None], (H, Sq, 1))], -1)
    top = z.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(z - top)
    sums = p.sum(-1, keepdims=True)
    with np.errstate(divide='ignore', invalid='ignore'):
        lse = (top + np.log(sums))[..., 0]
        p = np.where(sums > 0, p / sums, 0)[..., :Sk]
    return np.einsum('hqk,khd->qhd', p, v), lse


TOLERANCE = {'float32': 2e-5, 'float16': 4e-3, 'bfloat16': 3e-2}


def assert_close(got, want, dtype):
    assert got.shape == want.shape, (got.shape, want.shape)
    finite = np.isfinite(want)
    assert np.array_equal(finite, np.isfinite(got)), (got, want)
    if finite.any():
        worst = np.max(np.abs(got[finite] - want[finite]))
        assert worst <= TOLERANCE[dtype] * max(1, np.max(np.abs(want[finite]))), worst


class Gone(Exception):
    """Raised when the server answers 404 for a cache whose lifetime may have ended."""

    def __init__(self, cache):
        super().__init__(cache.id)
        self.cache = cache


class Cache:
    """A cache on a server, and its model. The server notes when a cache was last used. `used` has the earliest and the
    latest time that the server may have noted."""

    def __init__(self, server, kv_heads=2, head_dim=8, head_dim_v=None, dtype='float32', page_size=64, headers=(), **more):
        self.server, self.headers, self.dtype = server, dict(headers), dtype
        self.Hk, self.D, self.Dv = kv_heads, head_dim, head_dim_v or head_dim
        body = {'kv_heads': kv_heads, 'head_dim': head_dim, 'dtype': dtype, 'page_size': page_size, **more}
        if head_dim_v:
            body['head_dim_v'] = head_dim_v
        self.ttl, sent = more.get('ttl_s', 600), time.monotonic()
        answer = server.post(CACHES, body, self.headers)
        assert answer.status == 201, answer
        self.used = sent, time.monotonic()
        self.id = answer.json()['id']
        assert answer.headers['location'] == f'{CACHES}/{self.id}'
        self.k, self.v = np.zeros((0, self.Hk, self.D)), np.zeros((0, self.Hk, self.Dv))

    @property
    def length(self):
        return len(self.k)

    def path(self, what=''):
        return f'{CACHES}/{self.id}{what}'

    def ask(self, method, what='', body=None):
        sent = time.monotonic()
        answer = self.server.ask(method, self.path(what), body, self.headers)
        self.answered(answer.status, sent, uses=method == 'POST')
        return answer

    def answered(self, status, sent, uses=True):
        """Checks the status of an answer. 404 is right if the cache's lifetime may have ended, and required if it must
        have ended. `sent` is the time at which the request was sent."""
        now = time.monotonic()
        if status == 404 and now - self.used[0] >= self.ttl:
            raise Gone(self)
        assert status >= 300 or sent < self.expires(), f'{self.id} should have expired'
        if uses:
            self.used = sent if status < 300 else self.used[0], now

    def expires(self):
        """Returns the time at which the cache must have expired if no request uses it."""
        return self.used[1] + self.ttl + .05

    def info(self):
        answer = self.ask('GET')
        assert answer.status == 200, answer
        return answer.json()

    def new(self, rng, count):
        """Returns (k, v) of `count` random positions, with values rounded as the cache will hold them."""
        return tuple(wire.rounded(rng.standard_normal((count, self.Hk, d)), self.dtype) for d in (self.D, self.Dv))

    def grow(self, k, v):
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])

    def append(self, rng, count):
        k, v = self.new(rng, count)
        answer = self.ask('POST', '/append', {'k': wire.tensor(k, self.dtype), 'v': wire.tensor(v, self.dtype)})
        if answer.status == 200:
            self.grow(k, v)
            assert answer.json()['lengths'] == [self.length], answer
        return answer

    def fork(self, length=None):
        answer = self.ask('POST', '/fork', {} if length is None else {'length': length})
        assert answer.status == 201, answer
        other = Cache.__new__(Cache)
        other.__dict__.update(self.__dict__)
        other.id = answer.json()['id']
        end = self.length if length is None else length
        other.k, other.v = self.k[:end], self.v[:end]
        return other

    def truncate(self, length):
        answer = self.ask('POST', '/truncate', {'length': length})
        assert answer.status == 200 and answer.json()['length'] == length, answer
        self.k, self.v = self.k[:length], self.v[:length]

    def delete(self):
        answer = self.ask('DELETE')
        assert answer.status == 204 and answer.body == b'', answer


def decode(caches, q, new=None, headers=None, keep=None, **options):
    """Sends a decode of q [B, Sq, H, D], which attends to one cache per row, after the positions `new` [(k, v), ...]
    were appended. Returns (answer, expected answer)."""
    server, dtype = caches[0].server, caches[0].dtype
    body = {'q': wire.tensor(q, dtype), 'caches': [c.id for c in caches], **options}
    if new:
        body['k'], body['v'] = (wire.tensor(np.stack([pair[i] for pair in new]), dtype) for i in (0, 1))
    if keep is not None:
        body['keep_mask'] = wire.tensor(keep, 'uint8')
    if 'sinks' in options:
        body['sinks'] = wire.tensor(options['sinks'])
    sent = time.monotonic()
    answer = server.post(DECODE, body, caches[0].headers if headers is None else headers)
    missing = int(answer.json()['pointer'].split('/')[2]) if answer.status == 404 else -1
    # the server has found these caches before it noticed that another is missing, so it has noted a use of them
    for i, cache in enumerate(caches):
        cache.answered(answer.status if missing in (-1, i) else 400, sent)
    if answer.status == 200 and new:
        for cache, pair in zip(caches, new):
            cache.grow(*pair)
    q = wire.rounded(q, dtype)
    given = {n: x for n, x in options.items() if n in ('causal', 'scale', 'window', 'softcap', 'sinks')}
    masks = [None if keep is None else np.broadcast_to(keep, (len(caches), *keep.shape[1:]))[b] for b in range(len(caches))]
    return answer, [attention(q[b], c.k, c.v, keep=masks[b], **given) for b, c in enumerate(caches)]


def assert_right(answer, want, caches):
    assert answer.status == 200, answer
    told = answer.json()
    assert told['lengths'] == [c.length for c in caches], told['lengths']
    out, lse = wire.value(told['out']), wire.value(told['lse'])
    for b, (o, l) in enumerate(want):
        assert_close(out[b], o, caches[0].dtype)
        assert_close(lse[b], l, 'float32' if caches[0].dtype == 'float32' else 'float16')


def bits(answer):
    """Returns the outputs of an answer as bytes, for comparison with another answer."""
    told = json.loads(answer.body)
    return told['out']['data'], told['lse']['data']


DTYPES = 'float32', 'float16', 'bfloat16'


def walk_step(what, server, rng, caches, dtype, most, count):
    """Runs one operation of the walk, unless it is impossible now."""
    if what == 'create':
        if len(caches) < count:
            caches.append(Cache(server, dtype=dtype, head_dim_v=5, **({'ttl_s': 1} if rng.random() < .5 else {})))
    elif what in ('decode', 'step'):
        rows = [caches[i] for i in rng.permutation(len(caches))[:rng.integers(1, 5)]]
        Sq = int(rng.choice([1, 1, 1, 2, 5]))
        new = [c.new(rng, Sq) for c in rows] if what == 'step' and max(c.length for c in rows) + Sq <= most else None
        options = [{}, {'causal': True}, {'causal': True, 'window': [17, -1]}, {'softcap': 3.0}, {'sinks': rng.standard_normal(4)}][rng.integers(5)]
        assert_right(*decode(rows, rng.standard_normal((len(rows), Sq, 4, 8)), new, **options), rows)
    # after the pause all caches with a short lifetime have expired; later operations on them must get 404
    elif what == 'pause':
        time.sleep(max([0, *(c.expires() - time.monotonic() for c in caches if c.ttl == 1)]))
    else:
        at = rng.integers(len(caches))
        cache, length = caches[at], int(rng.integers(1, 130))
        if what == 'append' and cache.length + length <= most:
            answer = cache.append(rng, length)
            assert answer.status == 200, answer
        elif what == 'fork' and len(caches) < count:
            caches.append(cache.fork(int(rng.integers(cache.length + 1)) if rng.random() < .8 else None))
        elif what == 'truncate':
            cache.truncate(int(rng.integers(cache.length + 1)))
        elif what == 'delete':
            cache.delete()
            caches.pop(at)
        elif what == 'get':
            info = cache.info()
            assert info['length'] == cache.length and info['pages'] == -(-cache.length // 64), info


def walk(server, operations, seed, most=400, count=12, say=lambda text: None):
    """Runs random operations on caches of a dtype that `seed` chooses; some caches live for one second. Compares every
    answer with the model's, and deletes all caches at the end."""
    caches, done, every = [], {'expired': 0}, max(90, operations // 5)
    expired = server.metric('attnd_cache_ends_total', why='expired')

    def tried(what, call):
        done[what] = done.get(what, 0) + 1
        try:
            call()
        except Gone as gone:
            caches.remove(gone.cache)
            done['expired'] += 1
    for n in range(operations):
        # a generator for each operation, so that expired caches do not change the random numbers of later operations
        rng = np.random.default_rng((seed, n))
        what = str(rng.choice(['create', 'append', 'decode', 'step', 'fork', 'truncate', 'delete', 'get'], p=[.06, .2, .2, .3, .08, .08, .05, .03]))
        what = 'pause' if n % every == every - 1 else what if caches else 'create'
        tried(what, lambda: walk_step(what, server, rng, caches, DTYPES[seed % 3], most, count))
        if n % 1000 == 999:
            say(f'{n + 1} operations, {len(caches)} caches')
    for cache in list(caches):
        tried('delete', cache.delete)

    def nothing_left():
        m = server.metrics()
        return m['attnd_caches'] == m['attnd_cache_pages{kind="all"}'] == m['attnd_cache_bytes{state="used"}'] == 0
    assert service.eventually(nothing_left), server.metrics()
    assert server.metric('attnd_cache_ends_total', why='expired') == expired + done['expired']
    return done


def main():
    arguments = argparse.ArgumentParser(description='A random walk of operations on caches, on the CPU and on a device with memory of its own.')
    arguments.add_argument('--operations', type=int, default=10000)
    arguments.add_argument('--seed', type=int, default=1, help='chooses the operations, and the dtype')
    arguments.add_argument('--gpu', action='store_true', help='on the first GPU instead')
    arguments = arguments.parse_args()
    here = ('cpu', {}), ('fake device', {'binary': service.FAKE, 'env': {'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': ''}})
    for name, how in [('gpu', {})] if arguments.gpu else here:
        with service.Server('--kv-bytes', '8M', '--devices', '0' if arguments.gpu else 'auto', **how) as server:
            done = walk(server, arguments.operations, arguments.seed, say=lambda text: print(f'{name}: {text}', flush=True))
        print(f'{name}, {DTYPES[arguments.seed % 3]}: every answer right, no page left: ' + ', '.join(f'{what} {count}' for what, count in sorted(done.items())))


if __name__ == '__main__':
    main()
