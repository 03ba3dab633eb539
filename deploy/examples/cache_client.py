"""Decoding from NumPy: keys and values stay at the server, and each step sends only the new ones.

    python3 cache_client.py [http://127.0.0.1:8080]

Makes a cache, fills it with a prompt and decodes a few steps. Forks the cache so that two continuations share the
prompt. Verifies a tree of guessed tokens and keeps one path of it. Rolls back to an earlier position. Compares every
answer with attention over all keys computed here. Copy `Attnd` into your program."""
import base64
import json
import sys
import urllib.error
import urllib.request

import numpy as np


class Refused(Exception):
    """Raised for a request that the server refuses. The text is the reason in one sentence, `code` is stable, and
    `pointer` names the wrong member of the request."""

    def __init__(self, problem):
        super().__init__(problem['detail'])
        self.code, self.pointer = problem['code'], problem.get('pointer')


class Attnd:
    def __init__(self, url):
        self.url = url

    def ask(self, method, path, **members):
        members = {n: self.tensor(m) if isinstance(m, np.ndarray) else m for n, m in members.items()}
        body = json.dumps(members).encode() if members else None
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, method=method)) as answer:
                text = answer.read()
        except urllib.error.HTTPError as e:
            raise Refused(json.load(e)) from None
        return {n: self.array(m) if isinstance(m, dict) and 'data' in m else m for n, m in json.loads(text or b'{}').items()}

    @staticmethod
    def tensor(a):
        return {'shape': a.shape, 'dtype': str(a.dtype), 'data': base64.b64encode(a.tobytes()).decode()}

    @staticmethod
    def array(t):
        return np.frombuffer(base64.b64decode(t['data']), t['dtype']).reshape(t['shape'])

    def create(self, **shape):
        return self.ask('POST', '/v1/caches', **shape)['id']

    def append(self, cache, k, v):
        """Appends S positions to a cache: k [S, Hk, D] and v [S, Hk, Dv]."""
        return self.ask('POST', f'/v1/caches/{cache}/append', k=k, v=v)['lengths'][0]

    def decode(self, caches, q, **members):
        """Attends with q [B, Sq, H, D] to B caches, one batch row of q for each cache. If k and v [B, S, Hk, ...] are
        among the members, the server appends them first."""
        return self.ask('POST', '/v1/attention/decode', caches=caches, q=q, **members)

    def truncate(self, cache, length):
        """Rolls the cache back to its first `length` positions."""
        return self.ask('POST', f'/v1/caches/{cache}/truncate', length=length)['length']


def attention(q, k, v):
    """Returns causal attention of one batch row: q [Sq, H, D] over k and v [Sk, Hk, D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.astype(float), k.astype(float).repeat(group, 1), v.astype(float).repeat(group, 1)
    scores = np.einsum('qhd,khd->hqk', q, k) / q.shape[-1]**0.5
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1 + len(k) - len(q))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum('hqk,khd->qhd', weights / weights.sum(-1, keepdims=True), v)


def main(url='http://127.0.0.1:8080'):
    attnd, rng = Attnd(url), np.random.default_rng(0)

    def new(*shape):
        return rng.standard_normal(shape).astype(np.float16)
    cache = attnd.create(kv_heads=2, head_dim=64, dtype='float16')
    k, v = new(500, 2, 64), new(500, 2, 64)
    print('prompt:', attnd.append(cache, k, v), 'positions')

    worst = 0
    for _ in range(5):  # each step sends one query, and the key and value of its position
        q, k1, v1 = new(1, 1, 8, 64), new(1, 1, 2, 64), new(1, 1, 2, 64)
        answer = attnd.decode([cache], q, k=k1, v=v1, causal=True)
        k, v = np.concatenate([k, k1[0]]), np.concatenate([v, v1[0]])
        worst = max(worst, np.abs(answer['out'][0] - attention(q[0], k, v)).max())
    print(f'{answer["backend"]}: 5 steps, {answer["lengths"][0]} positions, the largest error is {worst:.1e}')
    assert worst < 2e-3, 'float16 has 11 bits'

    # the server does not copy the prompt: the fork shares its pages
    fork = attnd.ask('POST', f'/v1/caches/{cache}/fork', length=500)['id']
    q, k1, v1 = new(2, 3, 8, 64), new(2, 3, 2, 64), new(2, 3, 2, 64)
    answer = attnd.decode([cache, fork], q, k=k1, v=v1, causal=True)
    for row, length in enumerate((505, 500)):
        want = attention(q[row], np.concatenate([k[:length], k1[row]]), np.concatenate([v[:length], v1[row]]))
        assert np.abs(answer['out'][row] - want).max() < 2e-3
    print('two continuations:', answer['lengths'])
    k, v = np.concatenate([k, k1[0]]), np.concatenate([v, v1[0]])

    # The guessed tokens form a tree: each has a parent. A guess attends to the cache, to its ancestors and to itself.
    parents = [None, 0, 0, 1, 2, 2]
    sees = np.eye(len(parents), dtype=np.uint8)
    for node, parent in enumerate(parents):
        if parent is not None:
            sees[node] |= sees[parent]
    q, kt, vt = new(1, 6, 8, 64), new(1, 6, 2, 64), new(1, 6, 2, 64)
    before = len(k)
    # keep_mask covers the last keys, which are the guesses; all keys before them are seen
    answer = attnd.decode([cache], q, k=kt, v=vt, keep_mask=sees[None, None])
    for node in range(len(parents)):
        path = np.flatnonzero(sees[node])
        want = attention(q[0, node:node + 1], np.concatenate([k, kt[0, path]]), np.concatenate([v, vt[0, path]]))
        assert np.abs(answer['out'][0, node:node + 1] - want).max() < 2e-3
    # Say the path 0, 2, 5 of the tree is right. Its positions in the cache are not contiguous, so all guesses are
    # removed, and the path is sent again together with the next position.
    path = [0, 2, 5]
    attnd.truncate(cache, before)
    q, k1, v1 = new(1, 4, 8, 64), np.concatenate([kt[:, path], new(1, 1, 2, 64)], 1), np.concatenate([vt[:, path], new(1, 1, 2, 64)], 1)
    answer = attnd.decode([cache], q, k=k1, v=v1, causal=True)
    k, v = np.concatenate([k, k1[0]]), np.concatenate([v, v1[0]])
    assert np.abs(answer['out'][0] - attention(q[0], k, v)).max() < 2e-3
    print('a tree of 6 guesses, 3 of them kept:', answer['lengths'])

    # Rolls back to position 500, and sends other positions from there on.
    attnd.truncate(cache, 500)
    k, v = np.concatenate([k[:500], k1[0]]), np.concatenate([v[:500], v1[0]])
    answer = attnd.decode([cache], q, k=k1, v=v1, causal=True)
    assert np.abs(answer['out'][0] - attention(q[0], k, v)).max() < 2e-3
    print('back to position 500, and on:', answer['lengths'])

    q = new(2, 1, 8, 64)
    try:
        attnd.decode([cache, fork, '0' * 40], q)
    except Refused as refused:
        print(f'refused: {refused} ({refused.code} at {refused.pointer})')
    for each in cache, fork:
        attnd.ask('DELETE', f'/v1/caches/{each}')


if __name__ == '__main__':
    main(*sys.argv[1:])
