"""POST /v1/attention/check and `attnd check`: verdicts, explanations and refusals. tests/evidence measures whether
every mistake of the table is found. These tests send a few mistakes in every way in which a check can be sent."""
import json
import struct
import subprocess
import time

import numpy as np
import pytest

import ref
import service
from wire import random_problem, raw, tensor

CHECK = '/v1/attention/check'
SAFETENSORS = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16'}
LOG2E = 1.4426950408889634


def rng(seed=0):
    return np.random.default_rng(seed)


def check(server, members, **more):
    answer = server.post(CHECK, {**members, **more})
    assert answer.status == 200, answer.body
    return answer.json()


def codes(answer):
    return [(e['code'], e.get('and')) for e in answer['explanations']]


@pytest.fixture
def problem():
    """A causal problem in float32: its members, its inputs, and its right results."""
    members, x = random_problem(rng(), Sq=40, H=4, Hk=2, D=16)
    out, lse, *_ = ref.forward(x['q'], x['k'], x['v'], causal=True)
    return {**members, 'causal': True}, x, out, lse


# ---- Verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype, layout, D, Dv', [(dtype, layout, 24, 8) for dtype in SAFETENSORS for layout in ('bshd', 'bhsd')] +
                         [('bfloat16', 'bshd', 1024, 520)])
def test_what_the_server_computes_is_right(server, dtype, layout, D, Dv):
    members, _ = random_problem(rng(1), B=2, Sq=50, Sk=70, H=4, Hk=2, D=D, Dv=Dv, dtype=dtype, layout=layout, back=True, causal=True)
    dout = members.pop('dout')
    forward = server.forward(**members).json()
    answer = check(server, members, out=forward['out'], lse=forward['lse'])
    assert answer['verdict'] in ('match', 'rounding') and answer['operation'] == 'forward', answer
    assert answer['rows'] == {'checked': 400, 'of': 400, 'emulated': 400} and answer['not_tried'] == [] and answer['sizes']['Sk'] == 70
    backward = server.backward(**members, dout=dout).json()
    gradients = {name: backward[name] for name in ('dq', 'dk', 'dv')}
    answer = check(server, members, dout=dout, **gradients, out=forward['out'], lse=forward['lse'])
    assert answer['verdict'] in ('match', 'rounding') and answer['operation'] == 'backward', answer
    assert set(answer['errors']) == {'out', 'lse', 'dq', 'dk', 'dv'}
    for e in answer['errors'].values():
        assert e['max_abs'] <= e['limit'] and e['wrong'] == e['nan'] == 0 and e['explained'] > 0


def test_the_exact_result_rounded_once_matches(server, problem):
    members, _, out, lse = problem
    answer = check(server, members, out=tensor(out), lse=tensor(lse))
    assert answer['verdict'] == 'match' and answer['worst'] == answer['where'] == answer['explanations'] == []


def test_a_mistake_is_named_with_its_fix(server, problem):
    members, x, _, _ = problem
    out, lse, *_ = ref.forward(x['q'], x['k'], x['v'])
    answer = check(server, members, out=tensor(out), lse=tensor(lse))
    first = answer['explanations'][0]
    assert answer['verdict'] == 'mismatch' and first['code'] == 'causal_missing' and first['tensors'] == ['out', 'lse']
    assert first['error_if_so'] < 1e-5 < first['error_now'] and 'hide key j from query i' in first['fix']
    assert answer['where'][0] == {'tensor': 'out', 'what': 'queries 0 to 38 of every head', 'wrong': answer['errors']['out']['wrong'],
                                  'of_wrong': answer['errors']['out']['wrong']}


def test_two_mistakes_at_once_are_both_named(server, problem):
    members, x, _, _ = problem
    out, lse, *_ = ref.forward(x['q'], x['k'], x['v'], scale=1)
    answer = check(server, members, out=tensor(out), lse=tensor(lse))
    assert set(codes(answer)[0]) == {'scale_missing', 'causal_missing'}, answer


def test_of_three_mistakes_one_is_named_as_a_part(server, problem):
    """No two mistakes explain these results completely. The mistake "causal mask is missing" explains most of the error
    of out, so the answer names it as a part of the error."""
    members, x, _, _ = problem
    out, lse, *_ = ref.forward(x['q'], x['k'], x['v'], scale=0.2)
    out[:, :, 2] *= 1.2
    answer = check(server, members, out=tensor(out), lse=tensor(lse * LOG2E))
    assert len(answer['explanations']) == 1, answer['explanations']
    explanation, = answer['explanations']
    assert explanation['partly'] is True and explanation['code'] == 'causal_missing' and explanation['tensors'] == ['out'], answer
    assert explanation['detail'] == 'partly, beside other mistakes: the causal mask is missing'


def test_lse_in_base_2(server, problem):
    members, _, out, lse = problem
    answer = check(server, members, out=tensor(out), lse=tensor(lse * LOG2E))
    assert codes(answer)[0] == ('lse_base2', None) and answer['explanations'][0]['fix'] == 'multiply lse by 0.6931472'
    assert answer['errors']['out']['wrong'] == 0


@pytest.mark.parametrize('declared', [True, False])
def test_results_in_the_other_layout(server, problem, declared):
    """Results in the wrong layout, sent in two ways: declared with the wrong layout's shape, or declared with the right
    shape over memory in the wrong layout."""
    members, _, out, lse = problem
    moved = np.ascontiguousarray(out.swapaxes(1, 2))
    answer = check(server, members, out=tensor(moved if declared else moved.reshape(out.shape)), lse=tensor(lse))
    assert answer['verdict'] == 'mismatch' and codes(answer)[0] == ('layout_out', None)


def test_a_nan_is_found_where_it_is(server, problem):
    members, _, out, _ = problem
    out[0, 17, 3, 5] = np.nan
    answer = check(server, members, out=tensor(out))
    assert answer['verdict'] == 'mismatch' and answer['errors']['out']['nan'] == 1 and answer['errors']['out']['max_abs'] == 'Infinity'
    assert answer['worst'] == [{'tensor': 'out', 'index': [0, 17, 3, 5], 'got': 'NaN', 'want': answer['worst'][0]['want']}]
    assert answer['where'][0]['what'] == 'query 17, column 5 of head 3'


def test_gradients_of_a_kernel_without_delta(server):
    members, x = random_problem(rng(3), Sq=30, H=2, D=16, back=True)
    scale = 16 ** -0.5
    _, _, dq, dk, dv, _ = ref.backward(x['q'], x['k'], x['v'], x['dout'])
    answer = check(server, members, dq=tensor(dq / scale), dk=tensor(dk), dv=tensor(dv))
    assert codes(answer)[0] == ('scale_missing_in_dq', None) and answer['explanations'][0]['tensors'] == ['dq']


def test_info_lists_the_codes(server):
    listed = server.get('/v1/info').json()['checks']
    assert len(listed) == len(set(listed)) > 60 and {'lse_base2', 'layout_q', 'dq_last_tile_only'} <= set(listed)


# ---- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('change, pointer, says', [
    ({'out': None}, None, 'a check needs results: out, lse, or of a backward dq, dk, dv, dsinks, dbias or dalibi_slopes'),
    ({'out': tensor(np.zeros((1, 39, 4, 16)))}, '/out/shape', "out: has 2496 elements, the problem's result has 2560"),
    ({'dsinks': tensor(np.zeros(4))}, '/dout', None),
    ({'dropout_p': 0.5}, '/seed', None),
    ({'operation': 'forwards'}, '/operation', 'operation: is \'forwards\', must be forward or backward, did you mean'),
    ({'verify': 'all'}, '/verify', 'verify: belongs to forward, POST /v1/attention/forward'),
])
def test_refusals(server, problem, change, pointer, says):
    members, _, out, _ = problem
    body = {name: m for name, m in {**members, 'out': tensor(out), **change}.items() if m is not None}
    answer = server.post(CHECK, body)
    assert answer.status == 400, answer.body
    assert answer.json().get('pointer') == pointer and (says is None or answer.json()['detail'].startswith(says)), answer.body


def test_a_result_may_not_be_an_integer(server, problem):
    members, _, out, _ = problem
    answer = server.post(CHECK, {**members, 'out': {**tensor(out), 'dtype': 'int32'}})
    assert answer.status == 400 and answer.json()['detail'] == "out: dtype is 'int32', must be float32, float16, bfloat16 or float8_e4m3fn"


def test_a_gradient_is_still_no_member_of_a_forward(server, problem):
    members, _, out, _ = problem
    answer = server.forward(**members, dq=tensor(out))
    assert answer.status == 400 and 'gradients are POST /v1/attention/backward' in answer.json()['detail']


# ---- Formats and limits ----------------------------------------------------------------------------------------------


def test_several_in_one_body(server, problem):
    members, _, out, lse = problem
    good, bad = {**members, 'out': tensor(out)}, {**members, 'out': tensor(out * 2)}
    answers = server.post(CHECK, {'requests': [good, {'q': members['q']}, bad]}).json()['responses']
    assert [a.get('verdict') for a in answers] == ['match', None, 'mismatch']
    assert answers[1]['error']['pointer'].startswith('/requests/1')


def file_of(tensors, metadata):
    """Writes {name: (array, dtype)} to a safetensors file."""
    header, data = {'__metadata__': metadata}, b''
    for name, (x, dtype) in tensors.items():
        bytes = raw(x, dtype)
        header[name] = {'dtype': SAFETENSORS[dtype], 'shape': list(np.shape(x)), 'data_offsets': [len(data), len(data) + len(bytes)]}
        data += bytes
    text = json.dumps(header).encode()
    return struct.pack('<Q', len(text)) + text + data


def arrays(problem, out):
    _, x, _, _ = problem
    return {name: (a, 'float32') for name, a in (('q', x['q']), ('k', x['k']), ('v', x['v']), ('out', out))}


def test_a_safetensors_body(server, problem):
    _, _, out, _ = problem
    answer = server.post(CHECK, file_of(arrays(problem, out), {'causal': 'true'}), {'Content-Type': 'application/x-safetensors'})
    assert answer.status == 200, answer.body
    length, = struct.unpack('<Q', answer.body[:8])
    metadata = json.loads(answer.body[8:8 + length])['__metadata__']
    assert json.loads(metadata['verdict']) == 'match' and json.loads(metadata['rows']) == {'checked': 160, 'of': 160, 'emulated': 160}


def test_kserve_answers_a_report(server, problem):
    _, _, out, _ = problem
    inputs = [{'name': name, 'shape': list(a.shape), 'datatype': 'FP32', 'data': np.float32(a).ravel().tolist()}
              for name, (a, _) in arrays(problem, out * 2).items()]
    body = {'inputs': inputs, 'parameters': {'causal': True}, 'outputs': [{'name': 'report'}]}
    answer = server.post('/v2/models/attention_check/infer', body).json()
    output, = answer['outputs']
    assert (output['name'], output['datatype'], output['shape']) == ('report', 'BYTES', [1])
    assert json.loads(output['data'][0])['verdict'] == 'mismatch'
    refused = server.post('/v2/models/attention_check/infer', {**body, 'outputs': [{'name': 'out'}]})
    assert refused.status == 400 and refused.json()['error'] == "outputs[0]: name is 'out', must be report"
    metadata = server.get('/v2/models/attention_check').json()
    assert metadata['outputs'] == [{'name': 'report', 'datatype': 'BYTES', 'shape': [1]}]


def test_a_deadline_makes_the_check_smaller_and_not_late(server):
    """A complete check takes many times the deadline of 2 s. The answer must come before the deadline, and say which
    parts of the check were left out."""
    shape = (1, 6000, 8, 64)
    members = {name: tensor(rng(5).standard_normal(shape), 'float16') for name in ('q', 'k', 'v')}
    began = time.monotonic()
    answer = check(server, members, out=tensor(np.ones(shape), 'float16'), timeout_ms=int(2000 * service.SLOWER))
    assert time.monotonic() - began < 4 * service.SLOWER
    assert answer['verdict'] == 'mismatch' and 0 < answer['rows']['checked'] < answer['rows']['of'] == 48000


def test_its_time_is_charged(server, problem):
    members, _, out, _ = problem

    def seconds():
        return sum(float(line.split()[-1]) for line in server.get('/metrics').body.decode().splitlines() if 'work="finish"' in line)
    before = seconds()
    check(server, members, out=tensor(out * 2))
    assert seconds() > before


# ---- The command -----------------------------------------------------------------------------------------------------


def run(*args):
    return subprocess.run([service.BINARY, 'check', *args], capture_output=True, text=True, timeout=100 * service.SLOWER)


def test_the_command(problem, tmp_path):
    _, x, out, _ = problem
    right, wrong = tmp_path / 'right.safetensors', tmp_path / 'wrong.safetensors'
    right.write_bytes(file_of(arrays(problem, out), {'causal': 'true'}))
    wrong.write_bytes(file_of(arrays(problem, ref.forward(x['q'], x['k'], x['v'])[0]), {'causal': 'true'}))
    r = run(str(right))
    assert r.returncode == 0 and r.stdout.startswith('match\n') and not r.stderr, r
    r = run(str(wrong))
    assert r.returncode == 1 and r.stdout.startswith('mismatch\n') and 'causal_missing: the causal mask is missing' in r.stdout, r
    assert len(r.stdout.splitlines()) <= 20
    r = run('--json', str(wrong))
    assert r.returncode == 1 and json.loads(r.stdout)['explanations'][0]['code'] == 'causal_missing'


def test_members_of_the_command_win(problem, tmp_path):
    _, _, out, _ = problem
    file, members = tmp_path / 'x.safetensors', tmp_path / 'members.json'
    file.write_bytes(file_of(arrays(problem, out), {'scale': '3'}))
    members.write_text('{"causal": true, "scale": 0.25}')
    assert run(str(file)).returncode == 1
    r = run(str(file), '--members', str(members))
    assert r.returncode == 0, r
    members.write_text('[1]')
    r = run(str(file), '--members', str(members))
    assert r.returncode == 65 and 'is no JSON object of members' in r.stderr


@pytest.mark.parametrize('args, status', [
    ([], 64), (['--what', 'x'], 64), (['a', 'b'], 64), (['--members'], 64), (['/nowhere.safetensors'], 65), ([__file__], 65), (['--help'], 0),
])
def test_the_command_refuses(args, status):
    r = run(*args)
    assert r.returncode == status and len(r.stderr.splitlines()) == (status > 0), r
