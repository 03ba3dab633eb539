"""Random problems with their answers, in the service's own JSON: golden.py OUTDIR SEED writes them as files.

A case is {"name", "endpoint", "request": {...}, "expect": {"out": tensor float32, ...}, "rtol": ...}: `expect` is
computed in float64 (ref.py) from the request's own rounded inputs. cases() is a table of all cases. A seed draws their
lengths and numbers. Each case has a random generator of its own, so that any case can be made again alone."""
import base64
import json
import os
import sys

import numpy as np

import ref


def bf16_bits(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_val(b):
    return (b.astype(np.uint32) << 16).view(np.float32)


def enc(x, dt):
    """Returns (JSON tensor, its values after rounding to the dtype dt)."""
    x = np.asarray(x)
    if dt == 'bfloat16':
        b = bf16_bits(x)
        raw, val = b.tobytes(), bf16_val(b).reshape(x.shape)
    else:
        y = np.ascontiguousarray(x, np.dtype(dt))
        raw, val = y.tobytes(), y
    return {'shape': list(x.shape), 'dtype': dt, 'data': base64.b64encode(raw).decode()}, val.astype(np.float64) if dt != 'int32' else val


def dec(t):
    """Converts a JSON tensor to a float64 array."""
    raw = base64.b64decode(t['data'], validate=True)
    if t['dtype'] == 'bfloat16':
        a = bf16_val(np.frombuffer(raw, np.uint16))
    else:
        a = np.frombuffer(raw, np.dtype(t['dtype']))
    return a.reshape(t['shape']).astype(np.float64)


def make(name, r, B=1, Sq=64, Sk=None, H=2, Hk=None, D=64, Dv=None, dt='float16', back=False, layout='bshd', amp=1.0,
         varlen=None, rooms=None, key_rows=None, seqlens_q=None, seqlens_k=None, mask=None, sinks=False, alibi=None, bias=None, keep=False, dlse=False, give=True, extreme=None, **opt):
    """Makes one case. amp: factor of q and k. varlen: (lengths of q, lengths of k) of packed sequences. rooms: for q
    and for k, the number of rows from each sequence's start to the next sequence's start. key_rows: the Sk of k [N, Sk,
    Hk, D] if only q is packed. give: whether the request of a backward contains out and lse. extreme: which tensor has
    numbers at the limits of float32: 'mask' (a row of bias is the lowest number), 'values' or 'sinks'. opt: members
    that go into the request unchanged. Padding rows are NaN."""
    Sk = Sq if Sk is None else Sk
    Hk = Hk or H
    Dv = Dv or D
    T = (lambda a: a.swapaxes(-3, -2)) if layout == 'bhsd' else (lambda a: a)
    if varlen:
        lq, lk = varlen
        room_q, room_k = rooms or varlen
        room_k = [key_rows] * len(lk) if key_rows else room_k
        at_q, at_k = np.cumsum([0] + list(room_q)), np.cumsum([0] + list(room_k))
        rows_q, rows_k = (np.concatenate([np.arange(room) < n for n, room in zip(ns, each)]) for ns, each in ((lq, room_q), (lk, room_k)))
        kv = (at_k[-1], Hk)
        if key_rows:
            kv, rows_k = (len(lk), key_rows, Hk), rows_k.reshape(len(lk), key_rows)
        shp = dict(q=(at_q[-1], H, D), k=kv + (D,), v=kv + (Dv,), dout=(at_q[-1], H, Dv))
    else:
        used_q, used_k = seqlens_q or [Sq] * B, seqlens_k or [Sk] * B
        rows_q, rows_k = np.arange(Sq) < np.array(used_q)[:, None], np.arange(Sk) < np.array(used_k)[:, None]
        shp = dict(q=(B, Sq, H, D), k=(B, Sk, Hk, D), v=(B, Sk, Hk, Dv), dout=(B, Sq, H, Dv))
    req, val = {}, {}
    for n in ('q', 'k', 'v') + (('dout',) if back else ()):
        a = r.standard_normal(shp[n]) * (amp if n in 'qk' else 1.0)
        if extreme == 'values' and n == 'v':
            a = 3e38 * (0.5 + 0.5 * r.random(shp[n]))
        a[~(rows_k if n in 'kv' else rows_q)] = np.nan
        t, x = enc(T(a), dt)
        req[n], val[n] = t, T(x)
    kw = dict(scale=opt.get('scale'), causal=opt.get('causal', False), window=tuple(opt.get('window', (-1, -1))), softcap=opt.get('softcap', 0.0),
              top_left=opt.get('alignment') == 'top_left')
    req.update(opt)
    if layout != 'bshd':
        req['layout'] = layout
    if sinks:
        req['sinks'], kw['sinks'] = enc(np.resize([3e38, -3e38], H) if extreme == 'sinks' else r.standard_normal(H) * 2, 'float32')
    if alibi:
        sl = 2.0 ** (-8.0 * np.arange(1, H + 1) / H)
        req['alibi_slopes'], kw['alibi'] = enc(np.tile(sl, (B, 1)) if alibi == 'bh' else sl, 'float32')
    if mask is not None:
        req['mask_startend_rows'], mv = enc(mask, 'int32')
        kw['mask'] = ref.flashmask(Sq, mv, kw['causal'])
    if keep:
        km = (r.random((1, H, Sq, Sk)) > 0.4).astype('uint8')
        km[:, :, min(3, Sq - 1)] = 0
        req['keep_mask'] = {'shape': list(km.shape), 'dtype': 'uint8', 'data': base64.b64encode(km.tobytes()).decode()}
        kw['mask'] = km.astype(bool)
    if bias:
        b = r.standard_normal([{'B': B, 'H': H, 'Sq': Sq, 'Sk': Sk, 1: 1}[x] for x in bias])
        if extreme == 'mask':
            b[r.random(b.shape) < 0.5] = np.finfo(np.float32).min
            b[:, :, 3] = np.finfo(np.float32).min
        req['bias'], kw['bias'] = enc(b, 'float32')
    dl = None
    if dlse:
        req['dlse'], dl = enc(r.standard_normal((B, H, Sq)), 'float32')

    def run(q, k, v, do, dl, kw):
        if back:
            o, l, dq, dk, dv, extra = ref.backward(q, k, v, do, dl, **kw)
            return dict(out=o, lse=l, dq=dq, dk=dk, dv=dv, **extra)
        o, l, _ = ref.forward(q, k, v, **kw)
        return dict(out=o, lse=l)

    def pieces(where_q, where_k):
        """Computes each sequence alone and puts its results into its rows. Rows that belong to no sequence have out 0
        and lse -inf."""
        lead = shp['q'][:-2]
        res = {'out': np.zeros(shp['q'][:-1] + (Dv,)), 'lse': np.full(lead[:-1] + (H, lead[-1]), -np.inf)}
        if back:
            res.update({'d' + n: np.zeros(shp[n]) for n in 'qkv'})
        for i, j in zip(where_q, where_k):
            one = run(val['q'][i][None], val['k'][j][None], val['v'][j][None], val['dout'][i][None] if back else None, None, kw)
            for n, x in one.items():
                if n == 'lse':
                    res[n][i[:-1] + (slice(None), i[-1])] = x[0]
                elif n in res and n != 'dsinks':
                    res[n][j if n in ('dk', 'dv') else i] = x[0]
                else:
                    res[n] = res.get(n, 0) + x
        return res

    if varlen:
        of_k = [(b, slice(0, n)) for b, n in enumerate(lk)] if key_rows else [(slice(s, s + n),) for s, n in zip(at_k, lk)]
        res = pieces([(slice(s, s + n),) for s, n in zip(at_q, lq)], of_k)
        req['cu_seqlens_q'] = enc(at_q, 'int32')[0]
        if not key_rows:
            req['cu_seqlens_k'] = enc(at_k, 'int32')[0]
        if rooms:
            req['seqlens_q'] = enc(np.array(lq), 'int32')[0]
        if rooms or key_rows:
            req['seqlens_k'] = enc(np.array(lk), 'int32')[0]
    elif seqlens_q or seqlens_k:
        for n, lengths in (('seqlens_q', seqlens_q), ('seqlens_k', seqlens_k)):
            if lengths:
                req[n] = enc(np.array(lengths), 'int32')[0]
        res = pieces([(b, slice(0, n)) for b, n in enumerate(used_q)], [(b, slice(0, n)) for b, n in enumerate(used_k)])
    else:
        res = run(val['q'], val['k'], val['v'], val.get('dout'), dl, kw)
    if back and give:
        req['out'] = enc(T(res['out']), dt)[0]
        req['lse'] = enc(res['lse'], 'float32')[0]
    if back and any(n[0] == 'd' and n not in ('dq', 'dk', 'dv') for n in res):
        req['outputs'] = [n for n in res if n not in ('out', 'lse')]
    exp = {n: enc(T(a) if n in ('out', 'dq', 'dk', 'dv') and not varlen or n == 'out' and layout == 'bhsd' else a, 'float32')[0] for n, a in res.items() if not (back and n in ('out', 'lse'))}
    return {'name': name, 'endpoint': '/v1/attention/' + ('backward' if back else 'forward'), 'request': req, 'expect': exp,
            'rtol': {'float32': 1e-5, 'float16': 1e-3, 'bfloat16': 8e-3}[dt]}


def cases(r):
    """Yields (name, arguments of make()) of every case; the generator r draws the lengths."""
    def n(lo, hi):
        return int(r.integers(lo, hi))
    for dt in ('float16', 'bfloat16', 'float32'):
        for D in (64, 128, 256):
            for causal in (False, True):
                yield f'fwd_{dt}_d{D}_{"causal" if causal else "full"}', dict(dt=dt, D=D, Sq=n(100, 200), H=2, causal=causal)
        for D in (64, 128):
            for causal in (False, True):
                yield f'bwd_{dt}_d{D}_{"causal" if causal else "full"}', dict(dt=dt, D=D, Sq=n(100, 160), H=2, causal=causal, back=True)
    for D in (1, 8, 24, 32, 40, 72, 80, 96, 112, 160, 192, 224):
        yield f'fwd_float16_d{D}', dict(D=D, Sq=n(20, 90), H=2, causal=bool(D & 8))
    for D in (32, 80, 96, 192, 256):
        yield f'bwd_bfloat16_d{D}', dict(D=D, Sq=n(20, 90), H=2, dt='bfloat16', causal=True, back=True)
    yield 'fwd_one_by_one', dict(Sq=1, Sk=1, H=1, D=64)
    yield 'fwd_one_query_gqa', dict(Sq=1, Sk=517, H=8, Hk=2, D=128, dt='bfloat16', causal=True)
    yield 'fwd_113x203_causal', dict(Sq=113, Sk=203, H=2, D=64, causal=True)
    yield 'fwd_203x113_causal_masked_rows', dict(Sq=203, Sk=113, H=2, D=64, causal=True)
    yield 'bwd_113x203_causal', dict(Sq=113, Sk=203, H=2, D=64, causal=True, back=True)
    yield 'bwd_203x113_causal_masked_rows', dict(Sq=203, Sk=113, H=2, D=64, causal=True, back=True)
    yield 'fwd_no_keys', dict(Sq=5, Sk=0, H=2, D=64)
    yield 'fwd_no_queries', dict(Sq=0, Sk=7, H=2, D=64)
    yield 'fwd_mqa', dict(Sq=70, H=6, Hk=1, D=64, causal=True)
    yield 'fwd_gqa', dict(B=2, Sq=90, H=8, Hk=2, D=64, causal=True, dt='bfloat16')
    yield 'bwd_gqa', dict(B=2, Sq=66, H=4, Hk=2, D=64, causal=True, dt='bfloat16', back=True)
    yield 'bwd_mqa_recompute', dict(Sq=50, H=4, Hk=1, D=128, back=True, give=False)
    for dt in ('float16', 'bfloat16'):
        yield f'bwd_{dt}_float32_gradients', dict(Sq=80, Sk=110, H=4, Hk=2, D=64, dt=dt, causal=True, back=True, grad_dtype='float32')
    yield 'bwd_varlen_float32_gradients', dict(H=2, D=128, varlen=([5, 90, 0, 33], [5, 90, 7, 33]), dt='bfloat16', back=True, grad_dtype='float32')
    yield 'fwd_bhsd', dict(B=2, Sq=33, H=3, D=64, layout='bhsd', causal=True)
    yield 'bwd_bhsd', dict(B=2, Sq=33, H=3, D=64, layout='bhsd', causal=True, back=True)
    yield 'fwd_scale', dict(Sq=80, D=64, scale=0.3)
    yield 'fwd_large_logits', dict(Sq=80, D=64, amp=12.0, causal=True)
    yield 'fwd_float32_large_logits', dict(Sq=80, D=64, amp=3.0, causal=True, dt='float32')
    yield 'fwd_window', dict(Sq=300, D=64, window=[63, 0], causal=True)
    yield 'fwd_window_both', dict(Sq=130, Sk=190, D=64, window=[20, 35])
    yield 'bwd_window', dict(Sq=150, D=64, window=[31, 5], back=True)
    yield 'fwd_softcap', dict(Sq=90, D=64, softcap=5.0, amp=2.0, causal=True)
    yield 'bwd_softcap', dict(Sq=90, D=64, softcap=5.0, amp=2.0, causal=True, back=True)
    yield 'fwd_alibi', dict(Sq=90, Sk=120, H=4, D=64, alibi='h', causal=True)
    yield 'bwd_alibi_batch', dict(B=2, Sq=40, H=4, D=64, alibi='bh', back=True)
    yield 'fwd_sinks', dict(Sq=90, H=4, Hk=2, D=64, sinks=True, causal=True, window=[31, 0])
    yield 'bwd_sinks', dict(Sq=60, H=4, Hk=2, D=64, sinks=True, causal=True, back=True)
    yield 'bwd_dlse', dict(Sq=60, H=2, D=64, dlse=True, causal=True, back=True)
    yield 'fwd_dv_differs', dict(Sq=60, H=2, D=192, Dv=128, causal=True, dt='bfloat16')
    yield 'bwd_dv_differs', dict(Sq=60, H=2, D=96, Dv=64, causal=True, back=True)
    yield 'fwd_varlen', dict(H=2, D=64, varlen=([5, 128, 1, 77], [5, 128, 1, 77]), causal=True)
    yield 'fwd_varlen_cross_empty', dict(H=4, Hk=2, D=64, varlen=([3, 0, 40], [90, 12, 0]))
    yield 'bwd_varlen', dict(H=2, D=64, varlen=([5, 90, 1, 33], [5, 90, 1, 33]), causal=True, back=True, dt='bfloat16')
    yield 'fwd_seqlens_k', dict(B=3, Sq=4, Sk=150, H=4, Hk=2, D=64, seqlens_k=[150, 1, 64], causal=True)
    yield 'fwd_seqlens_q', dict(B=4, Sq=90, Sk=90, H=4, Hk=2, D=64, seqlens_q=[90, 0, 64, 1], causal=True, dt='bfloat16')
    yield 'bwd_seqlens_q', dict(B=4, Sq=90, Sk=100, H=4, Hk=2, D=64, seqlens_q=[90, 0, 64, 1], causal=True, back=True)
    yield 'fwd_seqlens_both_bhsd', dict(B=4, Sq=40, Sk=70, H=2, D=128, seqlens_q=[3, 40, 22, 0], seqlens_k=[70, 9, 64, 5], layout='bhsd', sinks=True)
    yield 'bwd_seqlens_both', dict(B=4, Sq=40, Sk=70, H=4, Hk=2, D=64, seqlens_q=[3, 40, 22, 0], seqlens_k=[70, 9, 64, 5], window=[20, 4], sinks=True,
                                   back=True, dt='float32')
    yield 'fwd_gaps', dict(H=4, Hk=2, D=64, varlen=([5, 80, 0, 33], [7, 80, 9, 50]), rooms=([9, 80, 4, 70], [7, 90, 20, 64]), causal=True)
    yield 'bwd_gaps', dict(H=4, Hk=2, D=64, varlen=([5, 80, 0, 33], [7, 80, 9, 50]), rooms=([9, 80, 4, 70], [7, 90, 20, 64]), causal=True, back=True,
                           dt='bfloat16')
    yield 'fwd_packed_queries_padded_cache', dict(H=4, Hk=2, D=128, varlen=([1, 17, 3], [60, 40, 3]), key_rows=64, causal=True, dt='bfloat16')
    yield 'bwd_packed_queries_padded_cache', dict(H=4, Hk=2, D=64, varlen=([1, 17, 3], [60, 40, 3]), key_rows=64, causal=True, back=True)
    Sq = 96
    yield 'fwd_top_left', dict(Sq=40, Sk=90, H=2, D=64, causal=True, alignment='top_left')
    yield 'bwd_top_left_window', dict(Sq=90, Sk=60, H=2, D=64, window=[20, 0], alignment='top_left', back=True)
    yield 'fwd_bias', dict(B=2, Sq=50, H=2, D=64, bias=(1, 'H', 'Sq', 'Sk'), causal=True)
    yield 'bwd_bias', dict(B=2, Sq=50, H=2, D=64, bias=(1, 'H', 'Sq', 'Sk'), back=True)
    yield 'bwd_bias_key_only', dict(B=2, Sq=50, Sk=70, H=2, D=64, bias=('B', 1, 1, 'Sk'), back=True)
    yield 'fwd_keep_mask', dict(Sq=60, H=2, D=64, keep=True)
    yield 'bwd_keep_mask', dict(Sq=60, H=2, D=64, keep=True, back=True)
    yield 'fwd_window_one_key', dict(Sq=70, D=64, window=[0, 0])
    doc = np.zeros((1, 1, Sq, 1), np.int64)
    ends = np.array([20, 50, 96])
    doc[0, 0, :, 0] = ends[np.searchsorted(ends, np.arange(Sq), 'right')]
    yield 'fwd_flashmask_document_causal', dict(Sq=Sq, H=2, D=64, mask=doc, causal=True)
    yield 'bwd_flashmask_document_causal', dict(Sq=Sq, H=2, D=64, mask=doc, causal=True, back=True)
    lo = np.minimum(np.arange(Sq) + n(5, 20), Sq)
    m2 = np.stack([lo, np.minimum(lo + 15, Sq)], -1)[None, None]
    yield 'fwd_flashmask_two_causal', dict(Sq=Sq, H=2, D=64, mask=m2, causal=True)
    start = np.concatenate([[0], ends])[np.searchsorted(ends, np.arange(Sq), 'right')]
    bi = np.stack([doc[0, 0, :, 0], start], -1)[None, None]
    yield 'bwd_flashmask_document_both_ways', dict(Sq=Sq, H=4, Hk=2, D=64, mask=bi, back=True)
    up = np.maximum(np.arange(Sq) - n(10, 30), 0)
    m4 = np.stack([lo, np.full(Sq, Sq), np.zeros(Sq, int), up], -1)[None, None]
    yield 'fwd_flashmask_four', dict(Sq=Sq, H=2, D=64, mask=m4)
    for dt in ('float32', 'bfloat16'):
        yield f'fwd_{dt}_mask_of_most_negative_numbers', dict(Sq=50, H=2, D=64, dt=dt, bias=(1, 'H', 'Sq', 'Sk'), extreme='mask')
        yield f'bwd_{dt}_mask_of_most_negative_numbers', dict(Sq=50, H=2, D=64, dt=dt, bias=(1, 'H', 'Sq', 'Sk'), extreme='mask', back=True)
        yield f'fwd_{dt}_values_of_3e38', dict(Sq=70, H=2, D=64, dt=dt, extreme='values')
        yield f'fwd_{dt}_sinks_of_3e38', dict(Sq=70, H=2, D=64, dt=dt, sinks=True, extreme='sinks')
        yield f'fwd_{dt}_softcap_2e-38', dict(Sq=70, H=2, D=64, dt=dt, softcap=2e-38)
        yield f'fwd_{dt}_softcap_3e38', dict(Sq=70, H=2, D=64, dt=dt, softcap=3e38)
    yield 'fwd_long', dict(Sq=1100, H=1, D=64, causal=True, dt='bfloat16')


def all_cases(seed):
    """Yields (name, function that makes the case) of every case of the seed."""
    for index, (name, spec) in enumerate(cases(np.random.default_rng(seed))):
        yield name, lambda name=name, spec=spec, index=index: make(name, np.random.default_rng([seed, index]), **spec)


if __name__ == '__main__':
    out, seed = sys.argv[1], int(sys.argv[2])
    os.makedirs(out, exist_ok=True)
    for name, build in all_cases(seed):
        with open(os.path.join(out, name + '.json'), 'w') as f:
            json.dump(build(), f)
    print(len(os.listdir(out)), 'cases')
