"""Reads a request independently of the server, with Python's json, and computes attention in float64
(conformance/ref.py).

    verdict = judge(path, body, answer, contexts, sent, headers)       '' or what is wrong with a 200

Safetensors, KServe and compressed bodies, and their answers, are first converted to JSON members (struct and zlib).
There are three cases. If the request is valid and its numbers are known, they are compared with the answer. If the
request is not valid (Invalid), a 200 is a finding. If this file does not know the numbers (Unsure: dropout, packed
sequences, float8, values that overflow), only the form of the answer is checked."""
import base64
import json
import os
import re
import struct
import sys
import zlib

import numpy as np

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', folder) for folder in ('', 'conformance')]
import ref  # noqa: E402
import wire  # noqa: E402

DTYPES = {'float32': 'float32', 'f32': 'float32', 'fp32': 'float32', 'float16': 'float16', 'f16': 'float16', 'fp16': 'float16',
          'bfloat16': 'bfloat16', 'bf16': 'bfloat16', 'int32': 'int32', 'i32': 'int32', 'uint8': 'uint8', 'u8': 'uint8',
          'float8_e4m3fn': 'float8_e4m3fn', 'f8_e4m3': 'float8_e4m3fn', 'fp8_e4m3': 'float8_e4m3fn'}
TENSORS = ('q', 'k', 'v', 'alibi_slopes', 'bias', 'keep_mask', 'sinks', 'cu_seqlens_q', 'cu_seqlens_k', 'seqlens_q', 'seqlens_k', 'page_table', 'mask_startend_rows',
           'q_scale', 'k_scale', 'v_scale', 'dout', 'out', 'lse', 'dlse')
OPTIONS = ('layout', 'scale', 'causal', 'window', 'alignment', 'keep_mask_at_end', 'softcap', 'dropout_p', 'seed', 'out_dtype', 'outputs', 'encoding', 'verify',
           'save', 'timeout_ms', 'deterministic', 'grad_dtype', 'context')
UNSURE = ('cu_seqlens_q', 'cu_seqlens_k', 'seqlens_q', 'page_table', 'mask_startend_rows', 'q_scale', 'k_scale', 'v_scale')
# The tolerances of golden.py. Here they are relative to a tensor's largest value instead of each value.
RTOL = {'float32': 1e-5, 'float16': 1e-3, 'bfloat16': 8e-3}
# Inputs above this size are not verified. They overflow somewhere, or their differences have no significant digits. For
# q and k this is a limit on the product of their sizes.
WILD = 1e4
# A bias below this removes all digits of a score. Masks use such a bias (finfo.min) to hide keys, and sometimes hide
# all keys of a row.
LOWEST = -1e38
STEEP = 500.0    # above this score, an error in its last bit changes exp() by more than the tolerance


class Invalid(Exception):
    pass


class Unsure(Exception):
    pass


# ---- Reading ---------------------------------------------------------------------------------------------------------


class MinusZero(int):
    pass


class Twice(dict):
    """A JSON object in which a member occurs twice. Such an object makes the body invalid. If it lies in one of several
    problems of a body, it makes only that problem invalid."""


def parse(body):
    """Returns the value of a JSON text by the strict grammar of RFC 8259; raises Invalid."""
    def unique(pairs):
        return (dict if len({name for name, _ in pairs}) == len(pairs) else Twice)(pairs)

    def never(text):
        raise Invalid(f'{text} is not JSON')
    try:
        text = body.decode('utf-8')
        value = json.loads(text, object_pairs_hook=unique, parse_constant=never, parse_int=lambda t: MinusZero(0) if t == '-0' else int(t))
        json.dumps(value, ensure_ascii=False).encode('utf-8')  # lone surrogates
    except (ValueError, RecursionError) as e:
        raise Invalid(f'{type(e).__name__}: {e}')
    if '\\u0000' in text:
        raise Unsure('a NUL, perhaps')
    return value


def unpack(body, coding):
    """Unpacks a compressed body, which must be exactly one complete stream."""
    if coding is None:
        return body
    stream = zlib.decompressobj(15 if coding == 'deflate' else 31)
    try:
        data = stream.decompress(body)
    except zlib.error as e:
        raise Invalid(f'no {coding}: {e}')
    if not stream.eof or stream.unused_data:
        raise Invalid(f'{coding} that goes on, or ends behind the body' if stream.eof else f'{coding} that does not end')
    return data


def raw_tensor(shape, dtype, raw):
    return {'shape': shape, 'dtype': dtype, 'data': base64.b64encode(raw).decode()}


WORDS = ('layout', 'alignment', 'encoding', 'out_dtype', 'grad_dtype', 'context')


def option_of(name, text):
    """Returns the value of an option that is written as JSON in a string."""
    if name in WORDS and not text.startswith('"'):
        return text
    try:
        return parse({'True': 'true', 'False': 'false'}.get(text, text).encode())
    except Invalid:
        return text


def sound_object(x, what):
    if not isinstance(x, dict) or isinstance(x, Twice):
        raise Invalid(f'{what}: not an object, or one with a member twice')
    return x


def members_of_safetensors(body):
    """Converts a safetensors file to the JSON members of a problem."""
    if len(body) < 8:
        raise Invalid('no length of a header')
    length, = struct.unpack('<Q', body[:8])
    data = body[8 + length:] if length <= len(body) - 8 else None
    if data is None:
        raise Invalid('the header is longer than the body')
    header = sound_object(parse(body[8:8 + length]), 'header')
    members, at = {}, 0
    for name, t in header.items():
        if name == '__metadata__':
            continue
        sound_object(t, name)
        if set(t) != {'dtype', 'shape', 'data_offsets'} or name not in TENSORS:
            raise Invalid(f'{name}: no tensor, or with other members')
        if not isinstance(t['data_offsets'], list) or len(t['data_offsets']) != 2 or not all(is_int(n) and n >= 0 for n in t['data_offsets']):
            raise Invalid(f'{name}: data_offsets')
    tensors = [(name, t) for name, t in header.items() if name != '__metadata__']
    for name, t in sorted(tensors, key=lambda one: one[1]['data_offsets']):
        begin, end = t['data_offsets']
        if begin != at or end < begin:
            raise Invalid(f'{name}: begins at {begin}, not at {at}, or ends before')
        at = end
    if at != len(data):
        raise Invalid(f'{len(data)} bytes of data, not {at}')
    for name, t in tensors:
        members[name] = raw_tensor(t['shape'], t['dtype'], data[slice(*t['data_offsets'])])
    for name, text in sound_object(header.get('__metadata__', {}), '__metadata__').items():
        if not isinstance(text, str) or name in members or name not in OPTIONS:
            raise Invalid(f'__metadata__: {name!r}')
        members[name] = option_of(name, text)
    members.pop('encoding', None)  # `encoding` has an effect only on JSON answers
    return members


def members_of_kserve(body, json_bytes):
    """Converts a KServe request. Returns (the JSON members of a problem, {output: whether it is binary}, the request's
    id)."""
    text, tail = (body, b'') if json_bytes is None else (body[:json_bytes], body[json_bytes:])
    try:
        request = sound_object(parse(text), 'the JSON')
    except Invalid:
        if b'NaN' in text or b'Infinity' in text:
            raise Unsure('numbers that JSON has not')
        raise
    if not set(request) <= {'id', 'parameters', 'inputs', 'outputs', 'model_name', 'model_version'} or not isinstance(request.get('inputs'), list):
        raise Invalid('members of a request')
    members = {}
    for one in request['inputs']:
        sound_object(one, 'an input')
        said = sound_object(one.get('parameters', {}), 'parameters')
        if not set(one) <= {'name', 'shape', 'datatype', 'parameters', 'data'} or not set(said) <= {'binary_data_size', 'fp8'}:
            raise Invalid('members of an input')
        if said.get('fp8'):
            raise Unsure('float8')
        if ('data' in one) == ('binary_data_size' in said) or one.get('name') not in TENSORS or one['name'] in members:
            raise Invalid('data and name of an input')
        if 'data' in one:
            if not isinstance(one['data'], list):
                raise Invalid('data')
            if 'true' in str(one['data']).lower() or 'false' in str(one['data']).lower():
                raise Unsure('bools as numbers')
            members[one['name']] = {'shape': one.get('shape'), 'dtype': one.get('datatype'), 'data': one['data']}
        else:
            size = said['binary_data_size']
            if not is_int(size) or not 0 <= size <= len(tail):
                raise Invalid('binary_data_size')
            members[one['name']], tail = raw_tensor(one.get('shape'), one.get('datatype'), tail[:size]), tail[size:]
    if tail:
        raise Invalid('bytes behind the last tensor')
    options = dict(sound_object(request.get('parameters', {}), 'parameters'))
    binary = options.pop('binary_data_output', False)
    for name in ('timeout', 'priority'):
        if not is_int(options.pop(name, 0)):
            raise Invalid(name)
    if not isinstance(binary, bool) or not set(options) <= set(OPTIONS) - {'outputs', 'encoding'}:
        raise Invalid('parameters')
    for name, value in options.items():
        members[name] = option_of(name, value) if name == 'window' and isinstance(value, str) else value
    outputs = request.get('outputs') or []
    for one in outputs if isinstance(outputs, list) else [None]:
        sound_object(one, 'an output')
        said = sound_object(one.get('parameters', {}), 'parameters')
        if not set(one) <= {'name', 'parameters'} or not set(said) <= {'binary_data'} or not isinstance(said.get('binary_data', True), bool):
            raise Invalid('members of an output')
    if outputs:
        members['outputs'] = [one.get('name') for one in outputs]
    forms = {one['name']: one.get('parameters', {}).get('binary_data', binary) for one in outputs}
    return members, (lambda name: forms.get(name, binary)), request.get('id', '')


def is_int(x):
    return isinstance(x, int) and not isinstance(x, (bool, MinusZero))


def numbers(data, shape, dtype):
    flat = []

    def walk(x, depth):
        for y in x:
            if isinstance(y, list):
                if depth + 1 >= max(len(shape), 1):
                    raise Invalid('nested too deep')
                walk(y, depth + 1)
            else:
                flat.append(y)
    walk(data, 0)
    if any(isinstance(y, list) for y in data) and flat:
        x = data
        for n in shape:
            if not isinstance(x, list) or len(x) != n:
                raise Invalid('nested otherwise than its shape')
            x = x[0] if x else x
    out = []
    for x in flat:
        if isinstance(x, str):
            if x not in wire.NUMBER or dtype in ('int32', 'uint8'):
                raise Invalid(f'{x!r} is no number')
            out.append(wire.NUMBER[x])
        elif isinstance(x, bool) or not isinstance(x, (int, float)):
            raise Invalid(f'{x!r} is no number')
        elif dtype in ('int32', 'uint8'):
            if not isinstance(x, int) or not (0 <= x < 256 if dtype == 'uint8' else -2**31 <= x < 2**31):
                raise Invalid(f'{x!r} is no {dtype}')
            out.append(x)
        else:
            try:
                out.append(float(x))
            except OverflowError:
                raise Invalid('too large a number')
    if len(out) != int(np.prod(shape, dtype=object)):
        raise Invalid('as many numbers as the shape has')
    a = np.array(out, np.float64).reshape(shape)
    limit = {'float32': 3.4028235e38, 'float16': 65504, 'bfloat16': 3.38e38, 'float8_e4m3fn': 448}.get(dtype, np.inf)
    if np.any(np.abs(a[np.isfinite(a)]) > limit * 1.01) or any(isinstance(x, float) and np.isinf(x) for x in flat):
        raise Invalid('a number that rounds to infinity')
    return wire.rounded(a, dtype)


def tensor(name, t):
    """Returns (values as float64, dtype) of a JSON tensor."""
    if not isinstance(t, dict) or isinstance(t, Twice) or set(t) != {'shape', 'dtype', 'data'}:
        raise Invalid(f'{name}: shape, dtype and data')
    shape, dtype, data = t['shape'], t['dtype'], t['data']
    if not isinstance(shape, list) or not 1 <= len(shape) <= 4 or not all(is_int(n) and 0 <= n <= 2**53 for n in shape):
        raise Invalid(f'{name}: shape {shape!r}')
    if not isinstance(dtype, str) or dtype.lower() not in DTYPES:
        raise Invalid(f'{name}: dtype {dtype!r}')
    dtype = DTYPES[dtype.lower()]
    count = int(np.prod(shape, dtype=object))
    if isinstance(data, list):
        if count > 10**6:
            raise Invalid(f'{name}: too few numbers')
        return numbers(data, shape, dtype), dtype
    if not isinstance(data, str):
        raise Invalid(f'{name}: data')
    try:
        raw = base64.b64decode(data.encode('ascii'), validate=True)
    except ValueError as e:
        raise Invalid(f'{name}: {e}')
    if base64.b64encode(raw).decode() != data:
        raise Invalid(f'{name}: not the base64 of its bytes')
    if len(raw) != count * wire.BYTES[dtype]:
        raise Invalid(f'{name}: {len(raw)} bytes for {count} values')
    return wire.value({'shape': shape, 'dtype': dtype, 'data': data}), dtype


def need(condition, text):
    if not condition:
        raise Invalid(text)


class Problem:
    """A problem as the oracle reads it. `contexts` has the problems that were saved before, by their ids."""

    def __init__(self, members, back, contexts=()):
        need(isinstance(members, dict) and not isinstance(members, Twice), 'not an object, or one with a member twice')
        for name in members:
            need(name in TENSORS + OPTIONS, f'unknown member {name!r}')
        self.back, self.members = back, members
        self.values, self.dtypes = {}, {}
        for name in TENSORS:
            if name in members:
                self.values[name], self.dtypes[name] = tensor(name, members[name])
        o = dict(members)
        number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
        kinds = {'layout': lambda x: x in ('bshd', 'bhsd'), 'scale': number, 'causal': lambda x: isinstance(x, bool),
                 'window': lambda x: isinstance(x, list) and len(x) == 2 and all(is_int(n) and n >= -1 for n in x),
                 'alignment': lambda x: x in ('bottom_right', 'top_left'), 'softcap': lambda x: number(x) and x >= 0,
                 'dropout_p': lambda x: number(x) and 0 <= x < 1, 'seed': lambda x: is_int(x) and 0 <= x < 2**64,
                 'out_dtype': lambda x: not back and isinstance(x, str) and DTYPES.get(x.lower()) in RTOL,
                 'grad_dtype': lambda x: back and isinstance(x, str) and DTYPES.get(x.lower()) in RTOL,
                 'outputs': lambda x: isinstance(x, list) and all(isinstance(n, str) for n in x),
                 'encoding': lambda x: x in ('base64', 'array'), 'verify': lambda x: x == 'all' or is_int(x) and x >= 0,
                 'save': lambda x: isinstance(x, bool), 'timeout_ms': lambda x: is_int(x) and x >= 1,
                 'deterministic': lambda x: isinstance(x, bool), 'context': lambda x: isinstance(x, str)}
        for name, sound in kinds.items():
            if name in o:
                hashable = not isinstance(o[name], (list, dict)) or name in ('window', 'outputs')
                need(hashable and sound(o[name]), f'{name}: {o[name]!r}')
        self.outputs = o.get('outputs', ['dq', 'dk', 'dv'] if back else ['out', 'lse'])
        self.array = o.get('encoding') == 'array'
        if 'context' in o:
            need(back, 'context in a forward')
            need(o['context'] in contexts, f'no such context: {o["context"]!r}')
            need(set(members) <= {'context', 'dout', 'dlse', 'deterministic', 'grad_dtype', 'outputs', 'encoding', 'timeout_ms'}, 'members beside context')
            saved = contexts[o['context']]
            self.values = {**{n: v for n, v in saved.values.items()}, **self.values}
            self.dtypes = {**saved.dtypes, **self.dtypes}
            o = {**saved.options, **o}
        self.options = o
        for name in ('q', 'k', 'v') + (('dout',) if back else ()):
            need(name in self.values, f'{name} is missing')
        if any(name in self.values for name in UNSURE) or o.get('dropout_p') or 'float8_e4m3fn' in self.dtypes.values():
            raise Unsure('beyond this oracle')
        q, k, v = (self.values[n] for n in 'qkv')
        need(all(self.values[n].ndim == 4 for n in 'qkv'), 'dimensions')
        need(all(self.dtypes[n] in RTOL for n in 'qkv') and len({self.dtypes[n] for n in 'qkv'}) == 1, 'dtypes of q, k, v')
        need('grad_dtype' not in o or DTYPES[o['grad_dtype'].lower()] in ('float32', self.dtypes['q']), 'grad_dtype')
        if o.get('layout') == 'bhsd':
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        need(q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3], 'shapes of q, k, v')
        if 0 in q.shape or 0 in k.shape or 0 in v.shape:
            raise Unsure('empty')
        need(q.shape[2] % k.shape[2] == 0, 'heads')
        self.q, self.k, self.v = q, k, v

    def compute(self):
        """Computes the expected results. Returns {name: (values, size)}. The size is the largest magnitude of a term in
        the sums that give the values."""
        o, q, k, v = self.options, self.q, self.k, self.v
        B, Sq, H, D = q.shape
        Sk = k.shape[1]
        get = self.values.get
        big = [np.where(x < LOWEST, 0, x) if n == 'bias' else x for n, x in self.values.items() if self.dtypes[n] in RTOL and n not in 'qk']
        if not all(np.isfinite(x).all() and np.abs(x).max(initial=0) < 1e20 for x in (q, k)):
            raise Unsure('wild values of q and k')
        if not all(np.isfinite(x).all() and np.abs(x).max(initial=0) < WILD for x in big):
            raise Unsure('wild values')
        bias, mask = get('bias'), get('keep_mask')
        for name, x in (('bias', bias), ('keep_mask', mask)):
            if x is not None:
                need(x.ndim == 4 and all(n in (1, m) for n, m in zip(x.shape, (B, H, Sq, Sk))) or name == 'keep_mask', f'shape of {name}')
        if mask is not None:
            if mask.ndim != 4 or mask.shape[1] not in (1, H) or not all(n in (1, m) for n, m in zip(mask.shape, (B, H, Sq, Sk))):
                raise Unsure('shape of keep_mask')
            mask = np.broadcast_to(mask != 0, (B, H, Sq, Sk))
        alibi, sinks, lengths = get('alibi_slopes'), get('sinks'), get('seqlens_k')
        need(alibi is None or alibi.shape in ((H,), (B, H)), 'shape of alibi_slopes')
        need(sinks is None or sinks.shape == (H,), 'shape of sinks')
        need(lengths is None or lengths.shape == (B,) and np.all((0 <= lengths) & (lengths <= Sk)), 'seqlens_k')
        try:
            scale, softcap = float(o.get('scale', 1 / np.sqrt(D))), float(o.get('softcap', 0))
        except OverflowError:
            raise Invalid('a number that rounds to infinity')
        need(np.isfinite(scale) and np.isfinite(softcap), 'scale, softcap')
        common = dict(scale=scale, causal=o.get('causal', False), window=tuple(o.get('window', (-1, -1))), softcap=softcap,
                      top_left=o.get('alignment') == 'top_left')
        dout = dlse = None
        if self.back:
            dout = get('dout')
            need(dout.ndim == 4, 'dout')
            dout = dout.swapaxes(1, 2) if o.get('layout') == 'bhsd' else dout
            need(dout.shape == (B, Sq, H, v.shape[3]), 'shape of dout')
            dlse = get('dlse')
            need(dlse is None or dlse.shape == (B, H, Sq), 'shape of dlse')
            if get('out') is not None or get('lse') is not None or bias is not None or lengths is not None:
                raise Unsure('a backward with more than this oracle follows')
        found = {}
        steep = 0.0
        for b in range(B):
            L = Sk if lengths is None else int(lengths[b])
            one = slice(b, b + 1)
            kw = dict(common, sinks=sinks, alibi=None if alibi is None else alibi if alibi.ndim == 1 else alibi[one],
                      bias=None if bias is None else np.broadcast_to(bias, (B, H, Sq, Sk))[one, ..., :L],
                      mask=None if mask is None else mask[one, ..., :L])
            qb, kb, vb = q[one], k[one, :L], v[one, :L]
            magnitude = np.abs(scale) * np.abs(qb).max() * (np.abs(kb).sum(-1).max() if L else 0)
            magnitude += np.abs(np.where(kw['bias'] < LOWEST, 0, kw['bias'])).max() if bias is not None and L else 0
            magnitude += np.abs(alibi).max() * (Sq + Sk) if alibi is not None else 0
            steep = max(steep, magnitude, np.abs(sinks).max() if sinks is not None else 0)
            if self.back:
                g = H // k.shape[2]
                out, lse, dq, dk, dv, extra = ref.backward(qb, kb, vb, dout[one], None if dlse is None else dlse[one], **kw)
                _, _, (p, t, _, kk, vv) = ref.forward(qb, kb, vb, **kw)
                dp = np.einsum('bihd,bjhd->bhij', np.abs(dout[one]), np.abs(vv))
                delta = np.einsum('bhij,bhij->bhi', p, dp) + (np.abs(dlse[one]) if dlse is not None else 0)
                ds = p * (dp + delta[..., None])
                parts = {'dq': (dq, np.einsum('bhij,bjhd->bihd', ds, np.abs(kk)) * abs(scale)),
                         'dk': (dk, np.einsum('bhij,bihd->bjhd', ds, np.abs(qb)) * abs(scale) * g),
                         'dv': (dv, np.einsum('bhij,bihd->bjhd', p, np.abs(dout[one])) * g)}
            else:
                out, lse, _ = ref.forward(qb, kb, vb, **kw)
                parts = {'out': (out, np.abs(vb).max(initial=0) * np.ones(1)), 'lse': (lse, np.ones(1))}
            for name, (values, m) in parts.items():
                found.setdefault(name, ([], []))
                found[name][0].append(values)
                found[name][1].append(m.max(initial=0))
        if steep > STEEP:
            raise Unsure('steep')
        self.steep = steep
        return {name: (np.concatenate(values), max(m)) for name, (values, m) in found.items()}


# ---- Judging ---------------------------------------------------------------------------------------------------------


def check_tensor(name, t, problem, want):
    """Returns what is wrong with this tensor of an answer, or ''."""
    if not isinstance(t, dict) or list(t) != ['shape', 'dtype', 'data']:
        return f'{name}: {str(t)[:200]}'
    if isinstance(t['data'], list) != problem.array:
        return f'{name}: the encoding that was not asked for'
    got = wire.value(t)
    if name in ('dq', 'dk', 'dv') and t['dtype'] != DTYPES[problem.options.get('grad_dtype', problem.dtypes['q']).lower()]:
        return f'{name}: dtype {t["dtype"]} was not asked for'
    if want is None:
        return ''
    values, magnitude = want
    if name != 'lse' and problem.options.get('layout') == 'bhsd':
        values = values.swapaxes(1, 2)
    if got.shape != values.shape:
        return f'{name}: shape {got.shape}, not {values.shape}'
    same = np.isfinite(values)
    if not np.array_equal(got[~same], values[~same]) or not np.isfinite(got[same]).all():
        return f'{name}: infinities or NaN differ'
    error = np.abs(got[same] - values[same]).max(initial=0)
    rough = 2e-6 * problem.steep
    if name == 'lse':
        limit = 3e-5 + 3e-6 * np.abs(values[same]).max(initial=0) + rough
    else:
        rtol = max(RTOL[problem.dtypes['q']], RTOL.get(t['dtype'], 0))
        limit = magnitude * (rtol * (5 if problem.back else 2) + 4 * rough) + 1e-7
    return '' if error <= limit else f'{name}: off by {error:.3e}, the limit is {limit:.3e}'


def judge_one(members, answer, back, contexts):
    """Judges an answer with status 200 to a single problem. Returns (what is wrong or '', whether the numbers were
    verified)."""
    unsure = None
    problem = want = None
    try:
        problem = Problem(members, back, contexts)
        want = problem.compute()
    except Invalid as e:
        return f'answered with numbers, but: {e}', False
    except Unsure as e:
        unsure = e
    if problem is None or not hasattr(problem, 'outputs'):
        return '', False
    for name in problem.outputs:
        if name not in answer:
            return f'{name} is missing', False
        wrong = check_tensor(name, answer[name], problem, want.get(name) if want else None)
        if wrong:
            return wrong, False
    if 'context' in answer and isinstance(contexts, dict):
        contexts[answer['context']] = problem
    return '', unsure is None


WIRE = {'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16', 'FP32': 'float32', 'FP16': 'float16'}


def answer_of_json(text):
    def unique(pairs):
        assert len({n for n, _ in pairs}) == len(pairs)
        return dict(pairs)
    return json.loads(text, object_pairs_hook=unique)


def answer_of_safetensors(text):
    length, = struct.unpack('<Q', text[:8])
    header, data = answer_of_json(text[8:8 + length]), text[8 + length:]
    answer = {name: json.loads(value) for name, value in header.pop('__metadata__').items()}
    assert sum(t['data_offsets'][1] - t['data_offsets'][0] for t in header.values()) == len(data)
    for name, t in header.items():
        answer[name] = raw_tensor(t['shape'], WIRE[t['dtype']], data[slice(*t['data_offsets'])])
    return answer


def answer_of_kserve(text, headers, is_binary, id_):
    length = headers.get('inference-header-content-length')
    text, tail = (text, b'') if length is None else (text[:int(length)], text[int(length):])
    document = answer_of_json(text)
    assert (headers['content-type'] == 'application/octet-stream') == (length is not None)
    assert document.get('id', '') == id_, document.get('id')
    answer = {name: value for name, value in document['parameters'].items()}
    for t in document['outputs']:
        size = t.get('parameters', {}).get('binary_data_size')
        assert (size is not None) == is_binary(t['name']), t['name']
        dtype = WIRE[t['datatype']]
        if size is None:
            answer[t['name']] = wire.tensor(np.array(t['data'], np.float64).reshape(t['shape']), dtype)
        else:
            answer[t['name']], tail = raw_tensor(t['shape'], dtype, tail[:size]), tail[size:]
    assert tail == b'', f'{len(tail)} bytes behind the last output'
    return answer


class As:
    """How a request was sent: the format of its body ('json', 'safetensors', 'kserve'), its Content-Encoding, and the
    length of its JSON (KServe)."""

    def __init__(self, form='json', coding=None, json_bytes=None):
        self.form, self.coding, self.json_bytes = form, coding, json_bytes


def judge(path, body, text, contexts, sent=None, headers=None):
    """Judges an answer with status 200. Returns (what is wrong or '', the problems whose numbers were verified), and
    adds new contexts (saved forwards) to contexts {id: Problem}. sent: how the request was sent (As); headers: those of
    the answer."""
    back = 'backward' in path
    sent, headers = sent or As(), headers or {}
    is_binary, id_, answer = None, None, None
    try:
        if headers.get('content-type') == 'application/x-safetensors':
            answer = answer_of_safetensors(text)
        elif sent.form != 'kserve':
            answer = answer_of_json(text)
    except (ValueError, AssertionError, KeyError, TypeError, struct.error) as e:
        return f'the answer is no {headers.get("content-type") or "JSON"}: {type(e).__name__}: {e}', 0
    try:
        body = unpack(body, sent.coding)
        if sent.form == 'safetensors':
            members = members_of_safetensors(body)
        elif sent.form == 'kserve':
            members, is_binary, id_ = members_of_kserve(body, sent.json_bytes)
        else:
            members = parse(body)
    except Invalid as e:
        return f'200, but the body is no {sent.form}: {e}', 0
    except Unsure:
        return '', 0
    try:
        if sent.form == 'kserve':
            answer = answer_of_kserve(text, headers, is_binary, id_)
        elif isinstance(members, dict) and headers.get('content-type') == 'application/x-safetensors':
            # `encoding` has no effect on a KServe answer
            members = {name: value for name, value in members.items() if name != 'encoding'}
        if isinstance(members, dict) and 'requests' in members:
            if isinstance(members, Twice) or set(members) != {'requests'} or not isinstance(members['requests'], list):
                return '200 to an envelope with more than requests', 0
            if len(answer.get('responses', ())) != len(members['requests']):
                return f'{len(answer.get("responses", ()))} answers to {len(members["requests"])} requests', 0
            verified = 0
            for n, (m, a) in enumerate(zip(members['requests'], answer['responses'])):
                if 'error' in a:
                    if a['error'].get('pointer', f'/requests/{n}').split('/')[:3] != ['', 'requests', str(n)]:
                        return f'the error of request {n} points to {a["error"]["pointer"]}', verified
                    continue
                wrong, sure = judge_one(m, a, back, contexts)
                if wrong:
                    return f'request {n}: {wrong}', verified
                verified += sure
            return '', verified
        wrong, sure = judge_one(members, answer, back, contexts)
        return wrong, int(sure)
    except (KeyError, TypeError, AttributeError, AssertionError, ValueError) as e:
        return f'{type(e).__name__}: {e}', 0


REFUSAL = re.compile(r'^urn:attnd:[a-z-]+$')


def is_problem(status, headers, text):
    """Returns '' if this answer is a problem document with that status, otherwise what is wrong."""
    # errors of paths under /v2 have the type application/json (test_kserve.py)
    if headers.get('content-type') not in ('application/problem+json', 'application/json'):
        return f'content type {headers.get("content-type")}'
    try:
        p = json.loads(text)
    except ValueError as e:
        return f'no JSON: {e}'
    if p.get('status') != status or not REFUSAL.match(p.get('type', '')) or p['type'] != 'urn:attnd:' + p.get('code', ''):
        return f'not of this status: {p}'
    if p.get('request_id') != headers.get('x-request-id'):
        return 'another request id inside than outside'
    return '' if p.get('detail') and p.get('detail') == p.get('error') else f'no detail: {p}'
