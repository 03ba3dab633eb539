"""Plots how the time of a request grows with the number of queries Sq, and with the size of its body.
growth.py [OUT.svg] (default tests/load/growth.svg)

Left plot: the compute time that the server reports for causal forward and backward, float32, B 1, H 4, D 64, Sq = Sk
from 64 to 4096. It should grow as Sq^2 (the dashed line) where fixed costs are negligible. Right plot: the client's
time for a request of one query over n keys, 8 heads, D 128, float16, against the bytes of its body. It should grow in
proportion to the bytes. Each point is the median of at least five requests.
"""
import base64
import math
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..'))
import service  # noqa: E402

W, H, LEFT, TOP = 400, 320, 70, 50


def random_tensor(shape, dtype='float32'):
    count = math.prod(shape)
    if dtype == 'float32':  # the random bytes become numbers with magnitudes between 2^-7 and 2
        raw = bytearray(os.urandom(4 * count))
        raw[3::4] = bytes(0x3c + (b & 0x83 & 0x03) | (b & 0x80) for b in raw[3::4])
    else:
        raw = bytearray(os.urandom(2 * count))
        raw[1::2] = bytes(0x30 + (b & 0x0f) | (b & 0x80) for b in raw[1::2])
    return f'{{"shape":{list(shape)},"dtype":"{dtype}","data":"{base64.b64encode(raw).decode()}"}}'


def measure(server, path, body, at_least=5, seconds=1.0):
    """Returns the medians of the compute time and of the whole time of a request, in seconds."""
    connection = server.connect(timeout=300)
    compute, whole, end = [], [], time.monotonic() + seconds
    connection.ask('POST', path, body)
    while len(whole) < at_least or time.monotonic() < end:
        start = time.monotonic()
        answer = connection.ask('POST', path, body, {'Content-Type': 'application/json'})
        whole.append(time.monotonic() - start)
        assert answer.status == 200, answer
        compute.append(answer.json()['timing_us']['compute'] / 1e6)
    connection.close()
    return statistics.median(compute), statistics.median(whole)


def by_length(server):
    points = {'forward': [], 'backward': []}
    for S in (64, 128, 256, 512, 1024, 2048, 4096):
        tensors = ','.join(f'"{n}":{random_tensor((1, S, 4, 64))}' for n in ('q', 'k', 'v'))
        points['forward'].append((S, measure(server, '/v1/attention/forward', f'{{{tensors},"causal":true}}'.encode())[0]))
        dout = random_tensor((1, S, 4, 64))
        points['backward'].append((S, measure(server, '/v1/attention/backward', f'{{{tensors},"dout":{dout},"causal":true}}'.encode())[0]))
        print(f'Sq {S:>5}: forward {points["forward"][-1][1] * 1e3:9.3f} ms, backward {points["backward"][-1][1] * 1e3:9.3f} ms', flush=True)
    return points


def by_bytes(server):
    points = []
    for keys in (16, 64, 256, 1024, 4096, 16384, 32768):
        k, v = random_tensor((1, keys, 8, 128), 'float16'), random_tensor((1, keys, 8, 128), 'float16')
        body = f'{{"q":{random_tensor((1, 1, 8, 128), "float16")},"k":{k},"v":{v}}}'.encode()
        points.append((len(body), measure(server, '/v1/attention/forward', body)[1]))
        print(f'body {len(body) / 1e6:9.3f} MB: {points[-1][1] * 1e3:9.3f} ms, {len(body) / points[-1][1] / 1e9:.2f} GB/s', flush=True)
    return {'one query': points}


# ---- a log-log plot, by hand -----------------------------------------------------------------------------------------

COLOURS = ['#1b6ca8', '#c1440e']


def seconds_text(s):
    return f'{s:g} s' if s >= 1 else f'{s * 1e3:g} ms' if s >= 1e-3 else f'{s * 1e6:g} µs'


def plot(x0, title, x_label, series, slope, x_ticks, tick_text):
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    lx, hx = math.log10(min(xs)), math.log10(max(xs))
    ly, hy = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def at(x, y):
        return x0 + LEFT + (math.log10(x) - lx) / (hx - lx) * W, TOP + H - (math.log10(y) - ly) / (hy - ly) * H
    out = [f'<text x="{x0 + LEFT}" y="{TOP - 20}" class="title">{title}</text>',
           f'<text x="{x0 + LEFT + W / 2}" y="{TOP + H + 42}" text-anchor="middle">{x_label}</text>']
    for e in range(ly, hy + 1):
        _, y = at(min(xs), 10.0 ** e)
        out.append(f'<line x1="{x0 + LEFT}" y1="{y:.1f}" x2="{x0 + LEFT + W}" y2="{y:.1f}" class="grid"/>')
        out.append(f'<text x="{x0 + LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{seconds_text(10.0 ** e)}</text>')
    for x in x_ticks:
        px, _ = at(x, 10.0 ** ly)
        out.append(f'<line x1="{px:.1f}" y1="{TOP}" x2="{px:.1f}" y2="{TOP + H}" class="grid"/>')
        out.append(f'<text x="{px:.1f}" y="{TOP + H + 18}" text-anchor="middle">{tick_text(x)}</text>')
    for i, (name, points) in enumerate(series.items()):
        xe, ye = points[-1]
        x_low = max(points[0][0], xe * (10.0 ** ly / ye) ** (1 / slope))
        (xa, ya), (xb, yb) = at(x_low, ye * (x_low / xe) ** slope), at(xe, ye)
        out.append(f'<line x1="{xa:.1f}" y1="{ya:.1f}" x2="{xb:.1f}" y2="{yb:.1f}" stroke="{COLOURS[i]}" class="guide"/>')
        path = ' '.join('%.1f,%.1f' % at(x, y) for x, y in points)
        out.append(f'<polyline points="{path}" stroke="{COLOURS[i]}" class="line"/>')
        out += ['<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>' % (*at(x, y), COLOURS[i]) for x, y in points]
        out.append(f'<text x="{x0 + LEFT + 14}" y="{TOP + 20 + 18 * i}" fill="{COLOURS[i]}">{name}</text>')
    out.append(f'<text x="{x0 + LEFT + W - 8}" y="{TOP + H - 10}" text-anchor="end" class="note">dashed: slope {slope}</text>')
    return out


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, 'growth.svg')
    with service.Server() as server:
        lengths, sizes = by_length(server), by_bytes(server)
    body = plot(0, 'Compute time against length (float32, H 4, D 64, causal)', 'Sq = Sk', lengths, 2, (64, 256, 1024, 4096), str)
    body += plot(LEFT + W + 40, 'Whole request against body size (one query, float16)', 'bytes of JSON', sizes, 1,
                 (1e5, 1e6, 1e7, 1e8), lambda x: f'{x / 1e6:g} MB')
    width, height = 2 * (LEFT + W) + 80, TOP + H + 60
    style = ('text{font:13px sans-serif;fill:#333}.title{font-weight:bold}.note{fill:#777}.grid{stroke:#ddd}'
             '.line{fill:none;stroke-width:2}.guide{stroke-width:1;stroke-dasharray:5 4;opacity:.7}')
    with open(path, 'w') as f:
        f.write('\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
                           f'<style>{style}</style>', f'<rect width="{width}" height="{height}" fill="#fff"/>', *body, '</svg>']) + '\n')
    print(path)


if __name__ == '__main__':
    main()
