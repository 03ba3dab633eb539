"""Writes reference_golden.h: small problems with their results by tests/conformance/ref.py (NumPy, float64), for
test_reference.c.

    python3 tests/unit/kernels/make_reference_golden.py > tests/unit/kernels/reference_golden.h

Inputs are not stored: element n of the tensor with number `salt` is value(n, salt). The C test computes them in the
same way."""
import os, sys
import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', '..', 'conformance'))
import ref

SALT = dict(q=1, k=2, v=3, dout=4, dlse=5, bias=6, sinks=7, alibi=8, keep=9, mask=10)


def value(shape, name):
    n = np.arange(int(np.prod(shape)), dtype=np.int64)
    return (((n * 7919 + SALT[name] * 104729) % 257 - 128) / 64.0).reshape(shape)


def bounds(shape, Sq):
    n = np.arange(int(np.prod(shape)), dtype=np.int64)
    return ((n * 5 + 3) % (Sq + 1)).reshape(shape)


BASE = dict(B=1, Sq=3, Sk=4, H=2, Hk=1, D=2, Dv=3, causal=0, top_left=0, left=-1, right=-1, softcap=0, scale=None, alibi=0, sinks=0,
            bias=0, keep=0, mask=0, mask_heads=1, dlse=0, seqlens=None, packed=None)

CASES = [
    ('plain', {}),
    ('causal', dict(causal=1)),
    ('causal, more queries than keys', dict(causal=1, Sq=5, Sk=3)),
    ('causal, top left', dict(causal=1, top_left=1)),
    ('causal, top left, more queries than keys', dict(causal=1, top_left=1, Sq=5, Sk=3)),
    ('window', dict(left=1, right=0, Sq=4)),
    ('window with causal, top left', dict(left=2, right=3, causal=1, top_left=1, Sq=4)),
    ('scale and softcap', dict(scale=-0.7, softcap=1.5)),
    ('alibi', dict(alibi=1, H=4, Hk=2)),
    ('alibi of a batch', dict(alibi=2, B=2, causal=1)),
    ('sinks, empty rows', dict(sinks=1, causal=1, Sq=5, Sk=3, dlse=1)),
    ('bias', dict(bias=8, B=2)),
    ('bias of keys', dict(bias=1, B=2)),
    ('bias of batch and queries', dict(bias=6, B=2)),
    ('keep mask', dict(keep=8, B=2, sinks=1)),
    ('keep mask of keys', dict(keep=2, B=2)),
    ('FlashMask 1', dict(mask=1, causal=1)),
    ('FlashMask 2, causal', dict(mask=2, causal=1, H=4, Hk=2, mask_heads=2)),
    ('FlashMask 2', dict(mask=2, B=2)),
    ('FlashMask 4', dict(mask=4, H=4, Hk=2, mask_heads=4)),
    ('dlse, softcap, sinks, alibi, bias', dict(dlse=1, softcap=2, sinks=1, alibi=1, bias=8, causal=1)),
    ('seqlens_k', dict(B=3, seqlens=[4, 0, 2], causal=1, alibi=1, sinks=1)),
    ('packed', dict(packed=([2, 0, 3], [3, 2, 1]), causal=1, sinks=1, alibi=1)),
    ('no keys', dict(Sk=0, sinks=1, dlse=1)),
]


def answers(c):
    B, Sq, Sk, H, Hk, D, Dv = (c[n] for n in ('B', 'Sq', 'Sk', 'H', 'Hk', 'D', 'Dv'))
    if c['packed']:
        B, Sq, Sk = 1, sum(c['packed'][0]), sum(c['packed'][1])
    axes = lambda bits: (B if bits - 1 & 1 else 1, H if bits - 1 & 2 else 1, Sq if bits - 1 & 4 else 1, Sk)
    q, k, v = value((B, Sq, H, D), 'q'), value((B, Sk, Hk, D), 'k'), value((B, Sk, Hk, Dv), 'v')
    dout = value((B, Sq, H, Dv), 'dout')
    dlse = value((B, H, Sq), 'dlse') if c['dlse'] else None
    kw = dict(scale=c['scale'], causal=bool(c['causal']), window=(c['left'], c['right']), softcap=c['softcap'], top_left=bool(c['top_left']))
    if c['alibi']:
        kw['alibi'] = value((H,) if c['alibi'] == 1 else (B, H), 'alibi')
    if c['sinks']:
        kw['sinks'] = value((H,), 'sinks')
    if c['bias']:
        kw['bias'] = value(axes(c['bias']), 'bias')
    if c['keep']:
        kw['mask'] = value(axes(c['keep']), 'keep') > -0.5
    if c['mask']:
        kw['mask'] = ref.flashmask(Sq, bounds((B, c['mask_heads'], Sk, c['mask']), Sq), bool(c['causal']))

    def run(q, k, v, dout, dlse, kw):
        o, l, dq, dk, dv, extra = ref.backward(q, k, v, dout, dlse, **kw)
        return dict(out=o, lse=l, dq=dq, dk=dk, dv=dv, **extra)

    if c['packed']:
        parts, iq, ik = [], 0, 0
        for a, b in zip(*c['packed']):
            parts.append(run(q[:, iq:iq + a], k[:, ik:ik + b], v[:, ik:ik + b], dout[:, iq:iq + a], None, kw))
            iq, ik = iq + a, ik + b
        total = lambda n: n in ('dsinks', 'dalibi_slopes')
        return {n: sum(p[n] for p in parts) if total(n) else np.concatenate([p[n] for p in parts], 2 if n == 'lse' else 1) for n in parts[0]}
    if c['seqlens']:
        parts = [run(q[b:b + 1], k[b:b + 1, :n], v[b:b + 1, :n], dout[b:b + 1], None, kw) for b, n in enumerate(c['seqlens'])]
        pad = lambda a: np.concatenate([a, np.zeros((1, Sk - a.shape[1]) + a.shape[2:])], 1)
        return {n: sum(p[n] for p in parts) if n in ('dsinks', 'dalibi_slopes') else
                np.concatenate([pad(p[n]) if n in ('dk', 'dv') else p[n] for p in parts]) for n in parts[0]}
    return run(q, k, v, dout, dlse, kw)


def number(x):
    return '-INFINITY' if x == -np.inf else f'{x:.9g}'


def main():
    print('/* Made by make_reference_golden.py: do not edit. */\n/* clang-format off */')
    rows = []
    for index, (name, changes) in enumerate(CASES):
        c = dict(BASE, **changes)
        res = answers(c)
        fields = [f'.name = "{name}"']
        for f in ('B', 'Sq', 'Sk', 'H', 'Hk', 'D', 'Dv', 'causal', 'top_left', 'left', 'right', 'softcap', 'alibi', 'sinks', 'bias', 'keep', 'mask',
                  'mask_heads', 'dlse'):
            fields.append(f'.{f} = {c[f]}')
        if c['scale'] is not None:
            fields.append(f'.has_scale = 1, .scale = {c["scale"]}')
        if c['seqlens']:
            fields.append('.seqlens = { %s }' % ', '.join(map(str, c['seqlens'])))
            fields.append('.has_seqlens = 1')
        if c['packed']:
            lq, lk = c['packed']
            fields.append('.sequences = %d, .q_lengths = { %s }, .k_lengths = { %s }' % (len(lq), ', '.join(map(str, lq)), ', '.join(map(str, lk))))
        for n, a in res.items():
            if a.size:
                print(f'static const double golden_{index}_{n}[] = {{ ' + ', '.join(number(x) for x in a.ravel()) + ' };')
                fields.append(f'.want[ATTN_T_{n}] = golden_{index}_{n}')
        rows.append('    { ' + ', '.join(fields) + ' },')
    print('static const struct golden goldens[] = {')
    print('\n'.join(rows))
    print('};')


if __name__ == '__main__':
    main()
