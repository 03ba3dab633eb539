"""Runs the HTTP fuzzer (../fuzz_http/fuzz.py) for a minute, and tests that the fuzzer notices faults."""
import gzip
import json
import os
import random
import sys
import zlib

import pytest

import service
import wire

sys.path.insert(0, os.path.join(service.HERE, 'fuzz_http'))
import fuzz  # noqa: E402
import fuzz_oracle as oracle  # noqa: E402

FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'


@pytest.mark.limit(600)
def test_a_minute_of_requests_that_are_a_little_wrong(capsys):
    seed = '15520'  # a fixed seed, so that a failing test can be repeated; `make fuzz-http` draws other seeds
    lines = []
    findings = fuzz.fuzz(seed, count=1200, out=lines.append)
    assert not findings, '\n'.join(lines)
    said = '\n'.join(lines)
    counts = {line.split(None, 1)[1]: int(line.split()[0]) for line in lines if line[:9].strip().isdigit()}
    # Checks what the fuzzer did. A fuzzer that verified no numbers, or that saw only one status, would find no faults.
    assert counts['problems verified'] > 1000 and counts['answers 400'] > 300 and counts['answers 200'] > 600, said
    assert counts['answers 200 beyond the oracle'] < counts['answers 200'] / 10, said
    assert min(counts['verified as safetensors'], counts['verified as kserve'], counts['verified, compressed']) > 100, said


def answer_of(server, path, body):
    answer = server.post(path, body)
    assert answer.status == 200, answer
    return answer.body


@pytest.mark.parametrize('path', [FORWARD, BACKWARD])
def test_the_oracle_is_no_rubber_stamp(server, path):
    """The fuzzer's oracle must accept a right answer. It must reject a changed number, the answer to another request,
    and any 200 to an invalid request."""
    r = random.Random(5)
    noticed = 0
    for _ in range(20):
        members = fuzz.problem(r, path == BACKWARD, True, beyond=False)
        members.pop('encoding', None)
        body = json.dumps(members).encode()
        text = answer_of(server, path, body)
        wrong, verified = oracle.judge(path, body, text, {})
        assert not wrong and verified == 1, wrong
        document = json.loads(text)
        name = next(n for n in ('out', 'dv', 'lse') if n in document)
        values = wire.value(document[name])
        at = tuple(r.randrange(n) for n in values.shape)
        values[at] = 1 if values[at] < 0 else -1
        document[name] = wire.tensor(values, document[name]['dtype'])
        noticed += oracle.judge(path, body, json.dumps(document).encode(), {})[0] != ''
        for fault in (body[:-1], body.replace(b'"q"', b'"Q"', 1), body[:-1] + b', "causal": 2}', body + b'x', b'\xef\xbb\xbf' + body):
            assert oracle.judge(path, fault, text, {})[0], fault[-100:]
    assert noticed == 20


@pytest.mark.parametrize('coding', [None, 'gzip', 'deflate'])
@pytest.mark.parametrize('form', ['safetensors', 'kserve'])
def test_the_oracle_reads_other_forms_and_sees_what_is_wrong_with_them(server, form, coding):
    r = random.Random(6)
    for _ in range(8):
        members = fuzz.problem(r, False, True, beyond=False)
        members = {n: m for n, m in members.items() if n not in ('encoding', 'outputs')}
        if form == 'safetensors':
            (tree, tail), path, headers = fuzz.safetensors_of(r, members), FORWARD, {'Content-Type': 'application/x-safetensors'}
            text = json.dumps(tree).encode()
            make = lambda text, tail: len(text).to_bytes(8, 'little') + text + tail
        else:
            (tree, tail), path = fuzz.kserve_of(r, members), fuzz.MODELS[False]
            text = json.dumps(tree).encode()
            headers = {'Inference-Header-Content-Length': str(len(text))}
            make = lambda text, tail: text + tail
        pack = {None: bytes, 'gzip': gzip.compress, 'deflate': zlib.compress}[coding]
        if coding:
            headers['Content-Encoding'] = coding
        how, body = oracle.As(form, coding, len(text)), pack(make(text, tail))
        answer = server.post(path, body, headers)
        assert answer.status == 200, answer
        wrong, verified = oracle.judge(path, body, answer.body, {}, how, answer.headers)
        assert not wrong and verified == 1, wrong
        faults = [pack(make(text, tail + b'x')), body + b'x' if coding or form == 'safetensors' else body[:-1], body[:-1], pack(make(text.replace(b'"q"', b'"Q"', 1), tail)),
                  pack(make(text[:-1], tail))]
        faults += [body[:-1] + bytes([body[-1] ^ 1])] if coding else []
        for fault in faults:
            assert oracle.judge(path, fault, answer.body, {}, how, answer.headers)[0], fault[-60:]
        other = bytearray(answer.body)
        at = answer.body.find(b'\x3f', answer.body.rfind(b'}')) if form == 'safetensors' else -1
        if at > 0:  # another number
            other[at] ^= 0x40
            assert oracle.judge(path, body, bytes(other), {}, how, answer.headers)[0]


def test_a_round_is_the_same_each_time():
    one, two = (fuzz.Round(None, '7', 1, 413, {}) for _ in range(2))
    assert one.message(True)[0] == two.message(True)[0]
    assert one.message(True)[0] != fuzz.Round(None, '7', 1, 414, {}).message(True)[0]


def test_what_the_fuzzer_calls_no_problem_document(server):
    answer = server.post(FORWARD, b'{}')
    assert oracle.is_problem(400, answer.headers, answer.body) == ''
    assert oracle.is_problem(404, answer.headers, answer.body)
    assert oracle.is_problem(400, {**answer.headers, 'content-type': 'text/html'}, answer.body)
    assert oracle.is_problem(400, {**answer.headers, 'x-request-id': 'other'}, answer.body)
    assert oracle.is_problem(400, answer.headers, answer.body[:-2])
