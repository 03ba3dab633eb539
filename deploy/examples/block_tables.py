"""Keys and values in pages of your own, as vLLM (block_tables) and FlashInfer (kv_indptr, kv_indices, kv_last_page_len)
store them.

    python3 block_tables.py [http://127.0.0.1:8080]

Sends two pools of pages and tables that say which sequence has which page, and compares the answer with attention over
the same keys stored contiguously. `table_of` turns FlashInfer's three arrays into attnd's two."""
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


def table_of(kv_indptr, kv_indices, kv_last_page_len, page_size):
    """Returns attnd's two arrays, page_table [B, most] and seqlens_k [B], made of FlashInfer's three arrays. The server
    does not read entries after a sequence's last page."""
    counts = np.diff(kv_indptr)
    table = np.zeros((len(counts), counts.max()), np.int32)
    for b, count in enumerate(counts):
        table[b, :count] = kv_indices[kv_indptr[b]:kv_indptr[b] + count]
    return table, ((counts - 1) * page_size + kv_last_page_len).astype(np.int32)


def forward(url, **members):
    def tensor(a):
        return {'shape': a.shape, 'dtype': str(a.dtype), 'data': base64.b64encode(np.ascontiguousarray(a).tobytes()).decode()}
    body = json.dumps({n: tensor(m) if isinstance(m, np.ndarray) else m for n, m in members.items()}).encode()
    try:
        with urllib.request.urlopen(f'{url}/v1/attention/forward', body) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as e:
        raise Refused(json.load(e)) from None
    return np.frombuffer(base64.b64decode(said['out']['data']), said['out']['dtype']).reshape(said['out']['shape']), said['backend']


def main(url='http://127.0.0.1:8080'):
    rng = np.random.default_rng(0)
    page_size, Hk, H, D = 64, 2, 8, 64
    k, v = rng.standard_normal((2, 20, page_size, Hk, D)).astype(np.float32)  # both pools are [pages, page_size, Hk, D]
    q = rng.standard_normal((3, 1, H, D)).astype(np.float32)  # one query for each of three sequences

    free = rng.permutation(20).astype(np.int32)  # the pages are in random order in the pools
    table, lengths = table_of(np.array([0, 3, 4, 9]), free[:9], np.array([64, 1, 17]), page_size)
    out, backend = forward(url, q=q, k=k, v=v, page_table=table, seqlens_k=lengths, outputs=['out'])

    worst = 0.0
    for b, length in enumerate(lengths):
        keys, values = (x[table[b]].reshape(-1, Hk, D)[:length].repeat(H // Hk, axis=1).astype(float) for x in (k, v))
        scores = np.einsum('hd,khd->hk', q[b, 0].astype(float), keys) / D**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        worst = max(worst, np.abs(out[b, 0] - np.einsum('hk,khd->hd', weights / weights.sum(-1, keepdims=True), values)).max())
    print(f'{backend}: lengths {lengths.tolist()}, the largest error is {worst:.1e}')
    assert worst < 1e-5, 'float32'
    table[1, 0] = 20  # page 20 does not exist: the pools have pages 0 to 19
    try:
        forward(url, q=q, k=k, v=v, page_table=table, seqlens_k=lengths)
    except Refused as refused:
        print(f'refused: {refused} ({refused.code} at {refused.pointer})')


if __name__ == '__main__':
    main(*sys.argv[1:])
