"""A fixture for pytest: attnd checks the results of an attention kernel, and says what is wrong with the kernel.

    def test_my_kernel(assert_attention):
        out, lse = my_kernel(q, k, v, causal=True)
        assert_attention(out, lse=lse, q=q, k=k, v=v, causal=True)
        assert_attention(dq=dq, dk=dk, dv=dv, q=q, k=k, v=v, dout=dout, causal=True)

Run pytest with `-p pytest_attnd` and this file's folder in PYTHONPATH, or write `pytest_plugins = ['pytest_attnd']` in
conftest.py. ATTND_URL is the server (default http://127.0.0.1:8080), ATTND_TOKEN its token, if it needs one.

Tensors are NumPy arrays (with ml_dtypes also bfloat16 and float8_e4m3fn) or PyTorch tensors on any device. All other
members have the same names as in POST /v1/attention/forward: layout='bhsd' for [B, H, S, D], as in
scaled_dot_product_attention, and alignment='top_left' for its is_causal. Run as a program, this file checks a right and
a wrong result: python3 pytest_attnd.py [http://127.0.0.1:8080]"""
import base64
import json
import os
import sys
import urllib.error
import urllib.request

import pytest

RESULTS = ('out', 'lse', 'dq', 'dk', 'dv', 'dbias', 'dsinks', 'dalibi_slopes')


def to_wire(name, x):
    if hasattr(x, 'detach'):  # The bytes of a PyTorch tensor are used as they are, because NumPy has no bfloat16.
        import torch
        x = x.detach().cpu().contiguous()
        dtype, data = str(x.dtype).removeprefix('torch.'), x.reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        dtype, data = str(x.dtype), x.tobytes()
    if dtype == 'float64':
        raise TypeError(f'{name} is float64: attnd checks float32, float16, bfloat16 and float8_e4m3fn')
    return {'shape': list(x.shape), 'dtype': dtype, 'data': base64.b64encode(data).decode()}


def check(out=None, **members):
    """Returns the answer of POST /v1/attention/check as a dict."""
    members = {n: x for n, x in {'out': out, **members}.items() if x is not None}
    if not any(n in members for n in RESULTS):
        raise TypeError('no result to check: give one of ' + ', '.join(RESULTS))
    body = json.dumps({n: to_wire(n, x) if hasattr(x, 'shape') else x for n, x in members.items()}).encode()
    headers = {'Content-Type': 'application/json'}
    if os.environ.get('ATTND_TOKEN'):
        headers['Authorization'] = 'Bearer ' + os.environ['ATTND_TOKEN']
    url = os.environ.get('ATTND_URL', 'http://127.0.0.1:8080').rstrip('/')
    try:
        with urllib.request.urlopen(urllib.request.Request(url + '/v1/attention/check', body, headers)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        problem = json.load(e)
        # the server's reason is one sentence: what is wrong, where, and the rule
        raise ValueError(f'attnd refused to check: {problem["detail"]}') from None
    except urllib.error.URLError as e:
        raise ConnectionError(f'attnd does not answer at {url}: {e.reason}. Set ATTND_URL, or start it.') from None


def in_words(answer):
    """Returns the answer of a check in words: what is wrong, where, why, and how to fix the kernel."""
    lines = [f'{answer["verdict"]}: {answer["operation"]} of attention']
    for name, e in answer['errors'].items():
        lines.append(f'  {name}: {e["wrong"]} of {e["of"]} are wrong by more than {e["limit"]:.1e}; the largest error is {e["max_abs"]}' +
                     (f'; {e["nan"]} are NaN' if e['nan'] else ''))
    lines += [f'  where: {w["tensor"]}, {w["what"]}: {w["wrong"]} of the {w["of_wrong"]} that are wrong' for w in answer['where']]
    lines += [f'  worst: {w["tensor"]}{w["index"]} is {w["got"]}, must be {w["want"]}' for w in answer['worst'][:3]]
    for e in answer['explanations']:
        # an explanation names one mistake, or two mistakes that the kernel makes together
        codes = ' and '.join(e[n] for n in ('code', 'and') if n in e)
        lines += [f'  because ({codes}): {e["detail"]}', f'  to fix: {e["fix"]}']
    if not answer['explanations']:
        lines.append('  no mistake that attnd knows explains it')
    if answer['not_tried']:
        lines.append('  not tried for lack of time: ' + ', '.join(answer['not_tried']))
    return '\n'.join(lines)


def compare(out=None, **members):
    """Fails the test if the verdict is `mismatch`: no right kernel of this dtype has such results. Returns the
    answer."""
    __tracebackhide__ = True  # makes pytest show the line that called this function instead of a line in it
    answer = check(out, **members)
    if answer['verdict'] == 'mismatch':
        pytest.fail(in_words(answer), pytrace=True)
    return answer


@pytest.fixture(name='assert_attention', scope='session')
def assert_attention_fixture():
    return compare


assert_attention = compare  # the name that tests import


def main():
    import numpy as np
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 100, 4, 64), dtype=np.float32) for _ in range(3))

    def attention(scale):
        scores = np.einsum('bihd,bjhd->bhij', q, k) * scale
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum('bhij,bjhd->bihd', p / p.sum(-1, keepdims=True), v).astype(np.float32)
    print('right:', assert_attention(attention(64 ** -0.5), q=q, k=k, v=v)['verdict'])
    try:
        assert_attention(attention(1), q=q, k=k, v=v)
        sys.exit('a wrong result has passed')
    except pytest.fail.Exception as failure:
        print('wrong:', failure)


if __name__ == '__main__':
    if len(sys.argv) > 1:
        os.environ['ATTND_URL'] = sys.argv[1]
    main()
