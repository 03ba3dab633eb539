"""Converts tensors to attnd's JSON and back, in the few lines that a client needs, and makes problems to send."""
import base64
import json

import numpy as np

NUMPY = {'float32': np.float32, 'float16': np.float16, 'int32': np.int32, 'uint8': np.uint8}
BYTES = {'float32': 4, 'float16': 2, 'bfloat16': 2, 'float8_e4m3fn': 1, 'int32': 4, 'uint8': 1}


def bf16_bits(x):
    """Converts float32 to bfloat16, to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_value(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


# The value of every float8_e4m3fn byte: sign, 4 exponent bits with bias 7, 3 mantissa bits; there are no infinities,
# and NaN is 0x7f.
E4M3 = np.zeros(256, np.float32)
for byte in range(256):
    e, m = (byte >> 3) & 15, byte & 7
    value = m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    E4M3[byte] = np.nan if byte & 127 == 127 else -value if byte & 128 else value


def e4m3_bits(x):
    """Converts float32 to the nearest e4m3, saturating at 448."""
    x = np.clip(np.asarray(x, np.float32), -448, 448)
    finite = np.array([b for b in range(256) if b & 127 != 127], np.uint8)
    order = np.argsort(E4M3[finite], kind='stable')
    values, codes = E4M3[finite][order], finite[order]
    at = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    lower = np.abs(x - values[at - 1]) <= np.abs(values[at] - x)
    return codes[np.where(lower, at - 1, at)].reshape(np.shape(x))


def raw(x, dtype):
    if dtype == 'bfloat16':
        return bf16_bits(x).tobytes()
    if dtype == 'float8_e4m3fn':
        return e4m3_bits(x).tobytes()
    return np.ascontiguousarray(x, NUMPY[dtype]).tobytes()


def rounded(x, dtype):
    """Rounds the values to the dtype, and returns them as float64."""
    if dtype == 'bfloat16':
        return bf16_value(bf16_bits(x)).reshape(np.shape(x)).astype(np.float64)
    if dtype == 'float8_e4m3fn':
        return E4M3[e4m3_bits(x)].reshape(np.shape(x)).astype(np.float64)
    return np.asarray(x).astype(NUMPY[dtype]).astype(np.float64)


def tensor(x, dtype='float32'):
    return {'shape': list(np.shape(x)), 'dtype': dtype, 'data': base64.b64encode(raw(x, dtype)).decode()}


NUMBER = {'NaN': np.nan, 'Infinity': np.inf, '-Infinity': -np.inf}


def value(t):
    """Converts a tensor of an answer, from base64 or from numbers, to a float64 array."""
    shape, dtype, data = t['shape'], t['dtype'], t['data']
    if isinstance(data, list):
        flat = []

        def walk(x):
            for y in x:
                walk(y) if isinstance(y, list) else flat.append(NUMBER[y] if isinstance(y, str) else y)
        walk(data)
        return np.array(flat, np.float64).reshape(shape)
    raw_bytes = base64.b64decode(data, validate=True)
    assert len(raw_bytes) == int(np.prod(shape)) * BYTES[dtype]
    if dtype == 'bfloat16':
        a = bf16_value(np.frombuffer(raw_bytes, np.uint16))
    elif dtype == 'float8_e4m3fn':
        a = E4M3[np.frombuffer(raw_bytes, np.uint8)]
    else:
        a = np.frombuffer(raw_bytes, NUMPY[dtype])
    return a.reshape(shape).astype(np.float64)


def random_problem(rng, B=1, Sq=5, Sk=None, H=2, Hk=None, D=8, Dv=None, dtype='float32', back=False, layout='bshd', **options):
    """Returns ({member: JSON}, {'q': float64 [B, S, H, D], ...}) of a random forward or backward."""
    Sk, Hk, Dv = Sq if Sk is None else Sk, Hk or H, Dv or D
    shapes = {'q': (B, Sq, H, D), 'k': (B, Sk, Hk, D), 'v': (B, Sk, Hk, Dv)}
    if back:
        shapes['dout'] = (B, Sq, H, Dv)
    members, values = {}, {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape)
        values[name] = rounded(x, dtype)
        members[name] = tensor(x.swapaxes(1, 2) if layout == 'bhsd' else x, dtype)
    if layout != 'bshd':
        members['layout'] = layout
    members.update(options)
    return members, values


def small_body(**options):
    """A forward of a few hundred bytes, always the same."""
    members, _ = random_problem(np.random.default_rng(7), Sq=3, H=2, D=4)
    members.update(options)
    return members


def small_bytes(**options):
    return json.dumps(small_body(**options)).encode()
