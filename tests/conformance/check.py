"""Tests the conformance of a running service: check.py URL [--seed N] [--only SUBSTRING] [--token T]

Makes new random cases (golden.py), POSTs each one, and compares the answer with float64 (ref.py), within limits that
depend on the dtype alone. The exit status is 0 only if every case passes; the last line counts the cases."""
import argparse
import json
import sys
import urllib.error
import urllib.request

import numpy as np

import golden


def errors(got, want):
    """Returns (relative Frobenius error of the finite entries, largest absolute error divided by the largest number,
    note). Both errors are inf if only one of the two tensors has infinities or NaNs at some place."""
    g, w = golden.dec(got), golden.dec(want)
    if g.shape != w.shape:
        return float('inf'), float('inf'), f'shape {g.shape} not {w.shape}'
    if g.size == 0:
        return 0.0, 0.0, ''
    fin = np.isfinite(w)
    if not np.array_equal(g[~fin], w[~fin]) or not np.isfinite(g[fin]).all():
        return float('inf'), float('inf'), 'infinities or NaN differ'
    g, w = g[fin], w[fin]
    if g.size == 0:
        return 0.0, 0.0, ''
    n = max(np.linalg.norm(w), 1e-30)
    return np.linalg.norm(g - w) / n, np.abs(g - w).max() / max(np.abs(w).max(), 1e-30), ''


def judge(case, status, answer):
    """Returns (the worst error as a multiple of its limit, and what is wrong with the answer, or '')."""
    if status != 200:
        return float('inf'), f'{status} {str(answer.get("detail", answer))[:140]}'
    worst = 0.0
    for name, want in case['expect'].items():
        if name not in answer:
            return float('inf'), f'{name} missing'
        fro, largest, note = errors(answer[name], want)
        if name == 'lse':  # lse has an absolute limit, because its error does not depend on the dtype of the inputs
            top = np.abs(np.nan_to_num(golden.dec(want), posinf=0, neginf=0)).max(initial=0)
            part = largest * max(1e-30, top) / (3e-5 + 3e-6 * top)
        else:
            limit = case['rtol'] * (2.5 if name[0] == 'd' else 1)
            part = max(fro / limit, largest / (2 * limit))
        worst = max(worst, part)
        if not part <= 1:
            return worst, f'{name}: error {fro:.2e}, worst {largest:.2e} of the largest, {part:.1f} times the limit {note}'
    return worst, ''


def post(url, body, token=None, timeout=120):
    headers = {'Content-Type': 'application/json'}
    if token:
        headers['Authorization'] = 'Bearer ' + token
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=timeout) as r:
            return r.status, json.loads(r.read())
    except urllib.error.HTTPError as e:
        text = e.read()
        try:
            return e.code, json.loads(text)
        except ValueError:
            return e.code, {'raw': text[:200].decode('latin1')}


def fresh_seed():
    return int(np.random.SeedSequence().entropy % 2**31)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('url')
    ap.add_argument('--seed', type=int, default=None)
    ap.add_argument('--only', default='')
    ap.add_argument('--token')
    a = ap.parse_args()
    seed = fresh_seed() if a.seed is None else a.seed
    passed = failed = 0
    for name, make in golden.all_cases(seed):
        if a.only not in name:
            continue
        case = make()
        worst, why = judge(case, *post(a.url.rstrip('/') + case['endpoint'], case['request'], a.token))
        if why:
            failed += 1
            print(f'FAIL {name}: {why}')
        else:
            passed += 1
            print(f'ok   {name} ({worst:.2f} of the limit)')
    print(f'seed {seed}')
    print(f'{passed} passed, {failed} failed')
    return 1 if failed or not passed else 0


if __name__ == '__main__':
    sys.exit(main())
