"""Attention whose keys are stored in several places: each place computes the result over its part, and one merge
combines them.

    python3 merge_client.py [http://127.0.0.1:8080]

Splits the keys in three, and compares out, lse and all gradients with those of one request over all keys. Then sends
the gradients of the merge to a backward of each part. The dk and dv that this backward returns are final, and dq is the
sum over the parts."""
import sys

import numpy as np

from numpy_client import Refused, attention, tensor


def main(url='http://127.0.0.1:8080'):
    rng = np.random.default_rng(0)
    # axes: batch, position, head, channel [B, S, H, D]
    q, k, v, dout = (rng.standard_normal((1, 90, 4, 32)).astype(np.float32) for _ in range(4))
    whole = attention(url, 'forward', q=q, k=k, v=v)
    gradients = attention(url, 'backward', q=q, k=k, v=v, dout=dout)

    # one problem for each place that stores a part of the keys
    inputs = [{'q': q, 'k': k[:, a:b], 'v': v[:, a:b]} for a, b in ((0, 20), (20, 50), (50, 90))]
    parts = [attention(url, 'forward', **part) for part in inputs]
    parts = [{name: tensor(part[name]) for name in ('out', 'lse')} for part in parts]
    merged = attention(url, 'merge', parts=parts, dout=dout)
    print(f'{len(parts)} parts: out {merged["out"].shape}, the largest error is {np.abs(merged["out"] - whole["out"]).max():.1e}')
    assert np.abs(merged['out'] - whole['out']).max() < 1e-6 and np.abs(merged['lse'] - whole['lse']).max() < 1e-6

    backs = [attention(url, 'backward', **part, **of_part) for part, of_part in zip(inputs, merged['parts'])]
    got = {'dq': sum(back['dq'] for back in backs), 'dk': np.concatenate([back['dk'] for back in backs], 1), 'dv': np.concatenate([back['dv'] for back in backs], 1)}
    error = max(np.abs(got[name] - gradients[name]).max() for name in got)
    print(f'gradients of all parts together: the largest error is {error:.1e}')
    assert error < 1e-5

    try:
        attention(url, 'merge', parts=[parts[0], {**parts[1], 'lse': tensor(np.full((1, 4, 90), np.nan, np.float32))}])
        sys.exit('a NaN in lse was not refused')
    except Refused as refused:
        print(f'refused: {refused} ({refused.code} at {refused.pointer})')


if __name__ == '__main__':
    main(*sys.argv[1:])
