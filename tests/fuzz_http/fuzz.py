"""An HTTP fuzzer: sends valid requests, and requests with one change, over raw sockets to a server that it starts.

    make fuzz-http SECONDS=600          ten minutes; COUNT=3000 instead: 3000 rounds
    make fuzz-http SEED=7               repeats the rounds of seed 7; ONLY=7:2:413 repeats one round
    SAN=1 make fuzz-http                with a server that was built with the sanitizers

A round is one connection. Its requests are forwards, backwards, envelopes (bodies with several problems), backwards of
saved contexts, arrays, pages, HEAD or OPTIONS. They are JSON, safetensors or KServe, compressed or not, with a length
or in chunks, and one request or several pipelined ones. Each request is unchanged, or is changed in one place: a byte,
a member, a shape, a dtype, a digit of base64, a header, or a chunk's size. A request is sent in pieces with pauses.
Round n of worker w of seed s is always the same.

In every round, each answer must be HTTP with a documented status. An error must be a problem document (RFC 9457). Only
to an unknown version of HTTP may libmicrohttpd itself answer. A 200 must hold the numbers that NumPy computes in
float64 from the body that was sent. A 200 is a finding if Python finds a fault in the body (fuzz_oracle.py).

Every GOLDEN rounds, one fixed request must have the same bits as the first time. A probe must never wait more than 100
ms for /livez. At the end, the server must have as many descriptors as at the beginning, and no more memory than in the
middle. No request may wait, and no memory may be leased. SIGTERM must end the server with status 0 and without a report
of a sanitizer. A finding is printed with its round, and its bytes are kept in build/fuzz_http/.
"""
import argparse
import base64
import copy
import json
import multiprocessing
import os
import random
import gzip
import re
import socket
import struct
import sys
import time
import traceback
import zlib

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
import fuzz_oracle as oracle  # noqa: E402
import service  # noqa: E402
import wire  # noqa: E402

PATHS = {False: '/v1/attention/forward', True: '/v1/attention/backward'}
MODELS = {False: '/v2/models/attention_forward/infer', True: '/v2/models/attention_backward/infer'}
SAFETENSORS = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'int32': 'I32', 'uint8': 'U8'}
KSERVE = {'float32': 'FP32', 'float16': 'FP16', 'bfloat16': 'BF16', 'int32': 'INT32', 'uint8': 'UINT8'}
# The status that each page returns for GET and HEAD.
PAGES = {'/livez': 200, '/readyz': 200, '/healthz': 200, '/v1/info': 200, '/openapi.json': 200, '/metrics': 200, '/': 200, '/docs': 200, '/nothing': 404, '/v2/health/live': 200,
         '*': 404, 'http://x/livez': 200, '/%6civez': 200, '/livez%00': 404, '/livez?a=1&b': 200, '/v1%2finfo': 404, PATHS[False]: 405}
STATUSES = {100, 200, 204, 400, 401, 404, 405, 408, 413, 414, 415, 417, 422, 431, 500, 501, 503, 504, 505, 507}
# statuses that libmicrohttpd itself sends: 500 if it has no memory, 505 for an unknown version of HTTP
ITS_OWN = {500, 505}
GOLDEN = 100
# Options of the tested server. The server gives up early on a body that stalls. Otherwise a round that does not send
# the end of a body would delay other rounds.
OPTIONS = ['--body-stall-ms', '700', '--body-timeout-ms', '3000', '--staging-bytes', '256M', '--max-body-bytes', '16M', '--log-level', 'warn',
           '--drain-ms', '5000']
RSS_KB = 48 << 10
DTYPES = ['float32', 'float16', 'bfloat16']


class Finding(Exception):
    pass


# ---- Requests that are right -----------------------------------------------------------------------------------------


def beyond_float32(r, rng, members, back):
    """Makes a problem's scores overflow float32 by its scale, by q and k, or by its mask. The mask is like Hugging
    Face's 4-D masks: it has finfo.min, and padding on the left whose queries see only padding. A backward may get an
    lse in base 2 instead."""
    (B, Sq, H, D), (_, Sk, Hk, _) = (wire.value(members[n]).shape if members.get('layout') != 'bhsd' else wire.value(members[n]).swapaxes(1, 2).shape for n in 'qk')
    what, dtype = r.randrange(4), members['q']['dtype']
    if what == 0:
        members['scale'] = r.choice([3e38, -3e38, 1e38])
    elif what == 1 and dtype != 'float16':
        for n, most in (('q', 2e19), ('k', 1.8e19)):
            members[n] = wire.tensor(most * (1 - 2 * rng.random(members[n]['shape'])), dtype)
        members['scale'] = r.choice([1e-38, -1e-38, 3e-38])
    elif what == 2 and back:
        rows = (B, H, Sq) if members.get('layout') == 'bhsd' else (B, Sq, H)
        members['out'] = wire.tensor(rng.standard_normal(rows + (members['v']['shape'][3],)), dtype)
        members['lse'] = wire.tensor(np.log2(Sk) + rng.random((B, H, Sq)), 'float32')
    else:
        kind = r.choice(['float32', dtype])
        lowest = {'float16': -65504.0, 'bfloat16': float(wire.bf16_value(np.uint16([0xFF7F]))[0])}.get(kind, r.choice([float(np.finfo(np.float32).min), -65504.0]))
        padding, at = rng.integers(0, Sk + 1, B)[:, None, None], np.arange(Sk)[None, None]
        hidden = (at < padding) | ((at > np.arange(Sq)[None, :, None] + Sk - Sq) if r.random() < 0.7 else False)
        members['bias'] = wire.tensor(np.broadcast_to(np.where(hidden, lowest, 0.0), (B, Sq, Sk))[:, None], kind)


def problem(r, back, small=False, beyond=True):
    """Makes a random problem. With `beyond`, its scores may overflow float32 (beyond_float32()). The oracle does not
    always know the answer to such a problem."""
    rng = np.random.default_rng(r.getrandbits(63))
    B, H, Hk = r.choice([1, 1, 2]), *r.choice([(1, 1), (2, 2), (4, 2), (3, 1)])
    Sq, Sk, D = r.randint(1, 9), r.randint(1, 12), r.choice([1, 2, 4, 8, 17, 24])
    if not small and r.random() < 0.05:
        Sq, Sk, D = r.randint(50, 200), r.randint(50, 200), 64
    options = {}
    if r.random() < 0.4:
        options['causal'] = r.random() < 0.7
    if r.random() < 0.15:
        options['window'] = [r.randint(-1, 4), r.randint(-1, 4)]
    if r.random() < 0.15:
        options['softcap'] = r.choice([0, 1, 2.5, 30])
    if r.random() < 0.2:
        options['scale'] = r.choice([1, 0.25, 0.125, -0.5, 1e-3])
    if r.random() < 0.15:
        options['alignment'] = r.choice(['top_left', 'bottom_right'])
    if r.random() < 0.2:
        options['encoding'] = r.choice(['array', 'base64'])
    if not back and r.random() < 0.1:
        options['verify'] = r.choice([1, 3, 'all'])
    if not back and r.random() < 0.1:
        options['outputs'] = r.choice([['lse'], ['out'], ['lse', 'out']])
    if r.random() < 0.15:
        options['sinks'] = wire.tensor(rng.standard_normal(H))
    if r.random() < 0.15:
        options['alibi_slopes'] = wire.tensor(np.abs(rng.standard_normal(H)))
    if not back and r.random() < 0.15:
        options['bias'] = wire.tensor(rng.standard_normal((r.choice([1, B]), r.choice([1, H]), Sq, Sk)))
    if r.random() < 0.1:
        options['keep_mask'] = wire.tensor(rng.random((B, 1, Sq, Sk)) < 0.7, 'uint8')
    if not back and r.random() < 0.1:
        options['seqlens_k'] = wire.tensor(rng.integers(0, Sk + 1, B), 'int32')
    dtype = r.choice(DTYPES)
    members, _ = wire.random_problem(rng, B, Sq, Sk, H, Hk, D, r.choice([None, D, 5]), dtype, back, r.choice(['bshd', 'bshd', 'bhsd']), **options)
    if beyond and r.random() < 0.08:
        beyond_float32(r, rng, members, back)
    for name, t in list(members.items()):  # some tensors are sent as lists of numbers instead of base64
        if isinstance(t, dict) and r.random() < 0.15 and np.prod(t['shape']) < 2000:
            x = wire.value(t)
            if t['dtype'] in ('int32', 'uint8'):
                x = x.astype(int)
            members[name] = {**t, 'data': (x if r.random() < 0.7 else x.reshape(-1)).tolist()}
    return members


def raw_of(t):
    """Returns the bytes of a tensor of a JSON problem, whether it is written in base64 or as numbers."""
    if isinstance(t['data'], str):
        return base64.b64decode(t['data'])
    return wire.raw(np.array(t['data'], np.float64).reshape(t['shape']), t['dtype'])


def is_tensor(x):
    return isinstance(x, dict) and 'data' in x


def safetensors_of(r, members):
    """Converts a JSON problem to a safetensors file. Returns (tree of the header, data)."""
    tree, data = {}, b''
    names = list(members)
    r.shuffle(names)
    for name in names:
        if not is_tensor(members[name]):
            continue
        raw = raw_of(members[name])
        tree[name] = {'dtype': SAFETENSORS[members[name]['dtype']], 'shape': members[name]['shape'], 'data_offsets': [len(data), len(data) + len(raw)]}
        data += raw
    options = {n: x if isinstance(x, str) and r.random() < 0.5 else json.dumps(x) for n, x in members.items() if not is_tensor(x)}
    if options or r.random() < 0.2:
        tree['__metadata__'] = options
    return tree, data


def kserve_of(r, members):
    """Converts a JSON problem to a KServe request. Returns (tree of the JSON, bytes that follow the JSON)."""
    inputs, tail = [], b''
    for name, t in members.items():
        if not is_tensor(t):
            continue
        one = {'name': name, 'shape': t['shape'], 'datatype': KSERVE[t['dtype']]}
        if isinstance(t['data'], list):
            one['data'] = t['data']
        else:
            raw = raw_of(t)
            one['parameters'] = {'binary_data_size': len(raw)}
            tail += raw
        inputs.append(one)
    options = {n: json.dumps(x) if isinstance(x, list) else x for n, x in members.items() if not is_tensor(x) and n not in ('outputs', 'encoding')}
    if r.random() < 0.5:
        options['binary_data_output'] = r.random() < 0.8
    tree = {'inputs': inputs}
    if options:
        tree['parameters'] = options
    if r.random() < 0.5:
        tree['id'] = r.choice(['', '1', 'a "quoted" one', 'é'])
    if 'outputs' in members:
        tree['outputs'] = [{'name': n, **({'parameters': {'binary_data': r.random() < 0.5}} if r.random() < 0.6 else {})} for n in members['outputs']]
    return tree, tail


class Raw(str):
    """Text that dump() writes into a JSON document as it is."""


def dump(x, r):
    """Writes JSON with random white space where JSON allows it."""
    space = (lambda: '') if r.random() < 0.6 else (lambda: r.choice(['', '', ' ', '\n', '\t ']))

    def put(x):
        if isinstance(x, Raw):
            return str(x)
        if isinstance(x, dict):
            x = list(x.items())
            return '{' + ','.join(f'{space()}{json.dumps(n)}{space()}:{space()}{put(v)}{space()}' for n, v in x) + '}'
        if isinstance(x, Pairs):
            return '{' + ','.join(f'{json.dumps(n)}:{put(v)}' for n, v in x.list) + '}'
        if isinstance(x, list):
            return '[' + ','.join(space() + put(v) for v in x) + space() + ']'
        return json.dumps(x)
    return (space() + put(x) + space()).encode()


class Pairs:
    """A JSON object as a list of pairs, so that a member may occur twice."""

    def __init__(self, pairs):
        self.list = pairs


# ---- A little wrong --------------------------------------------------------------------------------------------------

TOKENS = ['0', '-0', '-1', '1', '2', '7', '1.5', '2.0', '1e1', '1e400', '-1e400', '1e-400', '007', '+1', '9007199254740993', '18446744073709551616', 'true',
          'null', 'NaN', 'Infinity', '[]', '{}', '""', '"cpu"', '[[]]', '"\\u0000"', '"\\ud800"', '[1,', '65504', '3.5e38', '"NaN"', '"bshd"', '"all"']


def nodes(x, path=()):
    yield path
    for key, v in (x.items() if isinstance(x, dict) else enumerate(x[:40]) if isinstance(x, list) else ()):
        yield from nodes(v, path + (key,))


def change_json(r, x):
    """Returns a copy of the JSON tree x that differs in one place or in a few."""
    x = copy.deepcopy(x)
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        paths = [p for p in nodes(x) if p]
        if not paths:
            return x
        path = r.choice(paths)
        parent = x
        for key in path[:-1]:
            parent = parent[key]
        key, value = path[-1], parent[path[-1]]
        what = r.randrange(10)
        if what == 0:
            del parent[key]
        elif what == 1:
            parent[key] = Raw(r.choice(TOKENS))
        elif what == 2 and isinstance(parent, dict):
            parent[r.choice(['casual', 'Q', '', 'q ', key + 'x', 'seed', 'context', 'dropout_p', 'requests', 'deterministic'])] = parent.pop(key)
        elif what == 3 and isinstance(value, (int, float)) and not isinstance(value, bool):
            parent[key] = r.choice([value + 1, value - 1, -value, 0, value * 2, 2**31, 2**53 + 1, 2**63, 1 << 40, value * 1.0])
        elif what == 4 and isinstance(value, str) and value:
            i = r.randrange(len(value))
            parent[key] = value[:i] + r.choice(['A', '=', '/', '+', '-', '_', '', ' ', 'é', value[i] * 2, '\n']) + value[i + 1:]
        elif what == 5 and isinstance(parent, dict) and 'dtype' in parent:
            parent['dtype'] = r.choice(['F16', 'BF16', 'fp32', 'I32', 'uint8', 'float8_e4m3fn', 'float64', 'FLOAT16', 'bfloat16', 'float16', 'float32'])
        elif what == 6 and isinstance(parent, dict) and 'shape' in parent:
            shape = parent['shape']
            if isinstance(shape, list) and shape:
                i = r.randrange(len(shape))
                parent['shape'] = r.choice([shape[::-1], shape[1:], shape + [1], [1] + shape[1:], shape[:i] + [0] + shape[i + 1:],
                                            sorted(shape, key=str), shape[:i] + [2**32 + 1] + shape[i + 1:]])
        elif what == 7:
            parent[key] = [value]
        elif what == 8 and isinstance(parent, dict):
            other = r.choice(list(parent))
            parent[key], parent[other] = parent[other], parent[key]
        # flips bits of the decoded bytes, so that the base64 stays valid
        elif what == 9 and isinstance(value, str) and len(value) > 8:
            try:
                raw = bytearray(base64.b64decode(value, validate=True))
            except ValueError:
                raw = bytearray()
            if raw:
                i = r.randrange(len(raw))
                raw[i] ^= 1 << r.randrange(8)
                parent[key] = base64.b64encode(bytes(raw)).decode()
    if isinstance(x, dict) and x and r.random() < 0.08:
        name = r.choice(list(x))
        return Pairs(list(x.items()) + [(name, x[name])])
    return x


def change_bytes(r, body):
    body = bytearray(body)
    for _ in range(r.choice([1, 1, 2, 4])):
        i = r.randrange(len(body) + 1)
        n = r.choice([1, 1, 2, 5, 40])
        what = r.randrange(6)
        if what == 0:
            del body[i:i + n]
        elif what == 1:
            body[i:i] = bytes(r.randrange(256) for _ in range(n))
        elif what == 2 and i < len(body):
            body[i] ^= 1 << r.randrange(8)
        elif what == 3:
            body[i:i] = body[max(0, i - n):i]
        elif what == 4:
            body[i:i + 1] = r.choice([b'{', b'}', b'[', b']', b'"', b',', b':', b'\\', b'0', b'-', b'.', b'e', b'\x00', b'\xef\xbb\xbf', b'\r\n', b'=', b' '])
        elif what == 5 and r.random() < 0.3:
            del body[i:]
    return bytes(body)


HEADERS = ['Content-Length: 5', 'Content-Length: 0', 'Content-Length: -1', 'Content-Length: 99999999999999999999999', 'Content-Length: 12a', 'Content-Length:',
           'Transfer-Encoding: chunked', 'Transfer-Encoding: gzip', 'Transfer-Encoding: chunked, chunked', 'Host: other', 'Host:', 'Content-Encoding: gzip',
           'Content-Type: text/plain', 'Expect: 100-continue', 'Expect: x', 'X Space: 1', 'X-Any : 2', ': no name', 'nothing', ' folded: 1', 'X-Long: ' + 'y' * 3000,
           'X-Request-Id: ' + 'a' * 200, 'X-Request-Timeout-Ms: 1', 'X-Request-Timeout-Ms: 0', 'Content-Encoding: deflate', 'Content-Encoding: br', 'Content-Type: application/x-safetensors',
           'Accept: application/x-safetensors', 'Inference-Header-Content-Length: 0', 'X-Request-Timeout-Ms: x', 'X-Request-Timeout-Ms: 99999999999999999999', 'Authorization: Bearer x',
           'Connection: close', 'Connection: keep-alive, upgrade', 'Upgrade: h2c', 'traceparent: 00-0', 'Cookie: ' + 'a=b; ' * 300, 'X-Nul: a\0b', 'X-Tab:\t\x01',
           'Inference-Header-Content-Length: 7', 'Content-Length: 00000000000000000005', 'Trailer: X', 'TE: trailers', 'Range: bytes=0-1', 'Origin: http://x']


def change_head(r, head):
    lines = head.split(b'\r\n')
    for _ in range(r.choice([1, 1, 2])):
        what = r.randrange(8)
        if what == 0:
            lines.insert(r.randint(1, len(lines)), r.choice(HEADERS).encode('latin1'))
        elif what == 1 and len(lines) > 1:
            del lines[r.randrange(1, len(lines))]
        elif what == 2 and len(lines) > 1:
            lines.append(r.choice(lines[1:]))
        elif what == 3:
            i = r.randrange(len(lines))
            lines[i] = change_bytes(r, lines[i])
        elif what == 4:
            method, rest = lines[0].split(b' ', 1) if b' ' in lines[0] else (b'GET', lines[0])
            lines[0] = r.choice([b'GET', b'HEAD', b'PUT', b'OPTIONS', b'DELETE', b'CONNECT', b'post', b'BREW', b'', b'P' * 300]) + b' ' + rest
        elif what == 5:
            lines[0] = re.sub(rb'HTTP/1.1$', r.choice([b'HTTP/1.0', b'HTTP/1.2', b'HTTP/2.0', b'HTTP/1.x', b'http/1.1', b'', b'HTTP/1.1 ', b'HTTP/11']), lines[0])
        elif what == 6:
            lines[0] = lines[0].replace(b' /', b' /' + r.choice([b'%00', b'../', b'?a=b', b'%zz', b'x' * 5000, b'/', b' ', b'?' + b'a&' * 300, b'\xff']), 1)
        elif what == 7:
            lines = [r.choice([b'', b'\n', b'\r\n\r\n'])] + lines
    return b'\r\n'.join(lines)


def chunks(r, body, wrong):
    """Returns the body in chunks. With `wrong`, one chunk has a fault."""
    pieces = []
    while body:
        n = r.choice([1, 2, 7, 50, 400, 5000, 70000])
        pieces.append(body[:n])
        body = body[n:]
        if len(pieces) > 300:
            pieces.append(body)
            break
    bad = r.randrange(len(pieces) + 1) if wrong else -1
    out = []
    for i, p in enumerate(pieces + [b'']):
        size = (b'%x' if r.random() < 0.8 else b'%X') % len(p)
        if r.random() < 0.05:
            size = b'0' + size
        line, end = size + b'\r\n', b'\r\n'
        if i == bad:
            line, end = r.choice([(b'x\r\n', end), (b'\r\n', end), (b'-1\r\n', end), (b'FFFFFFFFFFFFFFFFF\r\n', end), (b'7FFFFFFFFFFFFFFF\r\n', end),
                                  (b'%x\r\n' % (len(p) + 1), end), (b'%x\r\n' % max(len(p) - 1, 0), end), (line, b''), (line, b'\n'), (line, b'xx\r\n'),
                                  (size + b' ;\r\n', end), (size + b';' + b'x' * 3000 + b'\r\n', end), (size + b'\n', end), (b'0x' + line, end)])
        out.append(line + p + end if p or i < len(pieces) else line + (b'X-Trailer: 1\r\n' if r.random() < 0.1 else b'') + end)
    return b''.join(out)


# ---- A round ---------------------------------------------------------------------------------------------------------


class Sent:
    def __init__(self, method, path, body, id_, clean, how=None):
        self.method, self.path, self.body, self.id, self.clean, self.how = method, path, body, id_, clean, how


class Round:
    def __init__(self, server, seed, worker, number, counts):
        self.server, self.name, self.counts = server, f'{seed}:{worker}:{number}', counts
        self.r = random.Random(self.name)
        self.contexts, self.log, self.socket, self.reader = {}, b'', None, None

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    def fail(self, text, answer=None):
        raise Finding(f'{text}\n  answer: {answer!r}'[:3000])

    def message(self, last):
        """Makes one request, unchanged or changed in one way. Returns (bytes, a description)."""
        r = self.r
        id_ = f'r{r.getrandbits(40):x}'
        if r.random() < 0.15:
            page = r.choice(list(PAGES))
            method = r.choice(['GET', 'GET', 'HEAD', 'OPTIONS', 'POST', 'DELETE'])
            head = f'{method} {page} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {id_}'.encode()
            clean = r.random() < 0.7 or not last
            if not clean:
                head = change_head(r, head)
            return head + b'\r\n\r\n', Sent(method, page, b'', id_, clean)
        back = r.random() < 0.3
        small = r.random() < 0.9
        if r.random() < 0.15:
            tree = {'requests': [problem(r, back, True) for _ in range(r.randint(0, 5))]}
        elif back and self.contexts and r.random() < 0.5:
            name = r.choice(list(self.contexts))
            saved = self.contexts[name]
            shape = saved.members['q']['shape'][:3] + [saved.members['v']['shape'][3]]
            tree = {'context': name, 'dout': wire.tensor(np.random.default_rng(r.getrandbits(32)).standard_normal(shape), saved.dtypes['q'])}
        else:
            tree = problem(r, back, small)
            if not back and r.random() < 0.1:
                tree['save'] = True
        change = r.choice(['none', 'none', 'json', 'json', 'json', 'bytes', 'bytes', 'head', 'chunks'])
        if change in ('head', 'chunks') and not last:
            change = 'none'
        how = oracle.As('json' if 'requests' in tree else r.choice(['json', 'json', 'json', 'safetensors', 'kserve']), r.choice([None, None, None, 'gzip', 'deflate']))
        path, more = PATHS[back], []
        if how.form == 'json':
            body = dump(change_json(r, tree) if change == 'json' else tree, r)
            more = ['Content-Type: application/json'] if r.random() < 0.8 else []
            if r.random() < 0.1:
                more.append('Accept: application/x-safetensors')
        elif how.form == 'safetensors':
            header, data = safetensors_of(r, tree)
            text = dump(change_json(r, header) if change == 'json' else header, r)
            body = struct.pack('<Q', len(text)) + text + data
            more = ['Content-Type: application/x-safetensors']
        else:
            document, tail = kserve_of(r, tree)
            text = dump(change_json(r, document) if change == 'json' else document, r)
            body, path = text + tail, MODELS[back]
            if tail or r.random() < 0.3:
                how.json_bytes = len(text)
                more = [f'Inference-Header-Content-Length: {len(text)}']
        if change == 'bytes' and r.random() < (0.5 if how.coding else 1):
            body = change_bytes(r, body)
            change = 'bytes, before they were compressed' if how.coding else change
        if how.coding:
            body = zlib.compress(body, r.choice([0, 1, 9])) if how.coding == 'deflate' else gzip.compress(body, r.choice([0, 1, 9]), mtime=0)
            more.append(f'Content-Encoding: {how.coding}')
            if change == 'bytes':
                body = change_bytes(r, body)
        headers = [f'POST {path} HTTP/1.1', 'Host: x', f'X-Request-Id: {id_}'] + more
        chunked = change == 'chunks' or r.random() < 0.25
        headers.append('Transfer-Encoding: chunked' if chunked else f'Content-Length: {len(body)}')
        r.shuffle(headers[1:])
        head = '\r\n'.join(headers).encode()
        if change == 'head':
            head = change_head(r, head)
        self.count(f'requests, changed: {change}')
        self.count(f'requests as {how.form}' + (f', {how.coding}' if how.coding else ''))
        return head + b'\r\n\r\n' + (chunks(r, body, change == 'chunks') if chunked else body), \
            Sent('POST', path, body, id_, change not in ('head', 'chunks'), how)

    def send(self, data):
        r = self.r
        self.log += data
        try:
            if r.random() < 0.5:
                self.socket.sendall(data)
                return
            cuts = sorted(r.randrange(len(data) + 1) for _ in range(r.randint(1, 6)))
            for a, b in zip([0] + cuts, cuts + [len(data)]):
                self.socket.sendall(data[a:b])
                if r.random() < 0.4:
                    time.sleep(r.random() * 0.02)
        except OSError:
            pass  # the server has refused the request before all of it was sent; the answer is read below

    def answer(self, method):
        try:
            a = self.reader.answer(method)
            while a is not None and a.status == 100:
                self.count('answers 100')
                a = self.reader.answer(method)
            return a
        except AssertionError as e:
            self.fail(f'not HTTP: {e}')
        except OSError:
            return None

    def check(self, a, sent, candidates):
        """Checks one answer. `sent` is the request that it answers. If `sent` is None, the request is not known, and
        the answer must be right for one of `candidates`."""
        self.count(f'answers {a.status}')
        if a.status not in STATUSES:
            self.fail('a status that nobody knows', a)
        if 'x-request-id' not in a.headers:
            if (sent and sent.clean) or a.status not in ITS_OWN:
                self.fail('an answer of libmicrohttpd to a sound message', a)
            return
        if sent and sent.clean and sent.method in ('GET', 'HEAD') and a.status != PAGES[sent.path]:
            self.fail(f'{sent.method} {sent.path}: {a.status}, not {PAGES[sent.path]}', a)
        if a.status >= 400:
            wrong = '' if sent and sent.method == 'HEAD' else oracle.is_problem(a.status, a.headers, a.body)
            if wrong:
                self.fail(wrong, a)
            if a.status in (500, 505, 507) or a.status == 503 and 'retry-after' not in a.headers:
                self.fail('the server failed', a)
        elif a.status == 200:
            echoed = [c for c in candidates if c.id == a.headers['x-request-id']]
            of = sent or (echoed[0] if echoed else None)
            if of is None or of.method != 'POST' or b'"' not in a.body[:30] or 'html' in a.headers.get('content-type', ''):
                return
            wrong, verified = oracle.judge(of.path, of.body, a.body, self.contexts, of.how, a.headers)
            # If the change concerns the framing of the body, the server may have read another body than the fuzzer
            # meant.
            if wrong and not of.clean:
                others = [b for b in bodies_of(self.log) if not oracle.judge(of.path, b, a.body, self.contexts, of.how, a.headers)[0]]
                wrong = '' if others or not a.body.startswith(b'{"out"') else wrong
            if wrong:
                self.fail(f'{of.path}: {wrong}', a)
            self.counts['problems verified'] = self.counts.get('problems verified', 0) + verified
            if verified and of.how.form != 'json':
                self.count(f'verified as {of.how.form}')
            if verified and of.how.coding:
                self.count('verified, compressed')
            if not verified:
                self.count('answers 200 beyond the oracle')
        if sent and a.headers['x-request-id'] != sent.id:
            self.fail(f'the answer of another request than {sent.id}', a)

    def run(self):
        r = self.r
        self.socket = self.server.raw(timeout=15 * service.SLOWER)
        self.reader = service.RawReader(self.socket)
        try:
            for turn in range(r.choice([1, 1, 2, 3])):
                pipe = r.choice([1, 1, 1, 2, 5])
                messages = [self.message(i == pipe - 1) for i in range(pipe)]
                sent = [m[1] for m in messages]
                self.send(b''.join(m[0] for m in messages))
                if r.random() < 0.03:  # hangs up
                    return
                for s in sent:
                    if not s.clean:
                        break
                    a = self.answer(s.method)
                    if a is None:
                        self.fail(f'no answer to the sound request {s.id}')
                    self.check(a, s, sent)
                    if a.headers.get('connection', '').lower() == 'close':
                        return
                if all(s.clean for s in sent):
                    continue
                # Any number of answers to a malformed message is allowed, so this code reads all answers that arrive
                # soon.
                if r.random() < 0.3:
                    self.send(b'GET /livez HTTP/1.1\r\nHost: x\r\n\r\n')
                self.socket.settimeout(r.choice([0.05, 0.05, 0.3, 2.5]) * min(service.SLOWER, 2))
                # a HEAD is among the pipelined requests, so the reader cannot know which answers have a body
                if b'HEAD' in self.log:
                    return
                for _ in range(10):
                    a = self.answer('POST')
                    if a is None:
                        return
                    self.check(a, None, sent)
                return
        finally:
            self.socket.close()


def bodies_of(log):
    """Yields the bodies that a lenient HTTP reader may find in these bytes. Behind the end of a head, such a reader may
    take as many bytes as any Content-Length in `log` says, or decode chunks."""
    for match in re.finditer(rb'\r?\n\r?\n', log):
        rest = log[match.end():]
        for length in set(re.findall(rb'(?i)content-length[ \t]*:[ \t]*(\d+)', log)):
            yield rest[:int(length[:12])]
        body, at = b'', 0
        while True:
            m = re.match(rb'(?:0x)?([0-9a-fA-F]{1,15})[ \t]*(?:;[^\n]*)?\r?\n', rest[at:])
            if not m:
                break
            n = int(m.group(1), 16)
            body += rest[at + m.end():at + m.end() + n]
            if n == 0:
                break
            at += m.end() + n
            at += 2 if rest[at:at + 2] == b'\r\n' else 1
        yield body


# ---- All rounds ------------------------------------------------------------------------------------------------------


def golden_body():
    members, _ = wire.random_problem(np.random.default_rng(11), B=2, Sq=33, Sk=47, H=4, Hk=2, D=24, dtype='float16', causal=True)
    return members


def work(server, seed, worker, workers, count, end, pipe):
    counts, findings, number = {}, [], worker
    body, first = golden_body(), None
    while (count is None or number < count) and (end is None or time.monotonic() < end) and len(findings) < 5:
        if number // workers % GOLDEN == 0:
            try:
                answer = server.post(PATHS[False], body)
                bits = (answer.status, answer.status == 200 and answer.json()['out'], answer.status == 200 and answer.json()['lse'])
            except Exception as e:
                bits = repr(e)
            first = first or bits
            counts['golden requests'] = counts.get('golden requests', 0) + 1
            if bits != first or bits[0] != 200:
                findings.append((f'{seed}:{worker}:{number}', f'the golden request has other bits: {str(bits)[:300]}', b''))
        round_ = Round(server, seed, worker, number, counts)
        try:
            round_.run()
        except Finding as e:
            findings.append((round_.name, str(e), round_.log))
        except OSError as e:
            findings.append((round_.name, f'{type(e).__name__}: {e}', round_.log))
        counts['rounds'] = counts.get('rounds', 0) + 1
        number += workers
    pipe.send((counts, findings))


def begin(server, seed, workers, count, end):
    pipes = {}
    for worker in range(workers):
        ours, theirs = multiprocessing.Pipe(False)
        child = os.fork()
        if child == 0:
            try:
                work(server, seed, worker, workers, count, end, theirs)
            except BaseException:  # an exception is an error of this fuzzer and is reported as a finding
                theirs.send(({}, [(f'{seed}:{worker}:?', traceback.format_exc(), b'')]))
            os._exit(0)
        theirs.close()
        pipes[ours] = child
    return pipes


def fuzz(seed, count=None, seconds=None, workers=3, only=None, out=print):
    """Runs rounds in several threads. Returns the findings, each as (round, what is wrong, bytes sent)."""
    server = service.Server(*OPTIONS, env={'ASAN_OPTIONS': os.environ.get('ASAN_OPTIONS', '') + ':quarantine_size_mb=16'}).start()
    findings, counts = [], {}
    try:
        if only:
            seed, worker, number = only.split(':')
            round_ = Round(server, seed, int(worker), int(number), counts)
            try:
                round_.run()
            except Finding as e:
                findings.append((round_.name, str(e), round_.log))
            out(f'{len(findings)} findings: {findings}\n{counts}')
            return findings
        server.post(PATHS[False], golden_body())
        service.eventually(lambda: server.metric('attnd_connections') == 1)
        descriptors, middle = server.descriptors(), None
        began = time.monotonic()
        with service.Probe(server) as probe:
            pipes = begin(server, seed, workers, count, began + seconds if seconds else None)
            while any(not p.closed for p in pipes):
                for p in pipes:
                    if not p.closed and p.poll(0.2):
                        try:
                            c, f = p.recv()
                            findings += f
                            for name, n in c.items():
                                counts[name] = counts.get(name, 0) + n
                        except EOFError:
                            findings.append((f'{seed}', 'a worker died', b''))
                        p.close()
                        os.waitpid(pipes[p], 0)
                if middle is None and seconds and time.monotonic() - began > seconds / 2:
                    middle = server.memory_kb()
                if server.process.poll() is not None:
                    findings.append((f'{seed}', f'the server died: {server.process.returncode}', b''))
                    break
        out(f'probe of /livez: {probe.count} answers, the longest after {probe.longest * 1e3:.1f} ms (control {probe.control * 1e3:.1f} ms)')
        if server.process.poll() is None:
            try:
                probe.check()
            except AssertionError as e:
                findings.append((f'{seed}', str(e), b''))
            quiet = service.eventually(lambda: server.metric('attnd_connections') == 1 and server.inflight() == 0)
            if not quiet:
                findings.append((f'{seed}', f'something is left: {server.metrics()}', b''))
            used = server.metric('attnd_staging_bytes', kind='used') - server.metric('attnd_staging_bytes', kind='contexts')
            if used > 0:
                findings.append((f'{seed}', f'{used} bytes of staging memory are leased to nobody', b''))
            if not service.eventually(lambda: server.descriptors() <= descriptors, 5):
                findings.append((f'{seed}', f'{server.descriptors()} descriptors, {descriptors} at the beginning', b''))
            now = server.memory_kb()
            if middle and now - middle > RSS_KB:
                findings.append((f'{seed}', f'{now} KiB of memory, {middle} in the middle', b''))
            out(f'memory: {middle} KiB in the middle, {now} at the end; descriptors: {descriptors} at the beginning, {server.descriptors()} at the end')
    except Exception as e:
        findings.append((f'{seed}', f'{type(e).__name__}: {e}', b''))
    try:
        server.stop()
    except AssertionError as e:
        findings.append((f'{seed}', f'the end: {e}', b''))
    for name in sorted(counts):
        out(f'{counts[name]:9d} {name}')
    folder = os.path.join(service.BUILD, 'fuzz_http')
    for n, (name, what, data) in enumerate(findings):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f'{name.replace(":", "-")}.bin'), 'wb') as f:
            f.write(data)
        out(f'FINDING in {name}: {what}')
    out(f'fuzz-http: seed {seed}, {counts.get("rounds", 0)} rounds, {counts.get("problems verified", 0)} problems verified, {len(findings)} findings')
    return findings


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--seconds', type=float)
    ap.add_argument('--count', type=int)
    ap.add_argument('--seed', default=str(random.SystemRandom().randrange(2**31)))
    ap.add_argument('--workers', type=int, default=3)
    ap.add_argument('--only')
    a = ap.parse_args()
    if not a.seconds and not a.count:
        a.count = 3000
    return 1 if fuzz(a.seed, a.count, a.seconds, a.workers, a.only) else 0


if __name__ == '__main__':
    sys.exit(main())
