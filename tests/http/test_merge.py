"""POST /v1/attention/merge combines the results over parts of the keys to the result over all keys. It also turns dout
and dlse of the merged result into those of each part. The tests use every format, on the CPU and on a device with
memory of its own."""
import json

import numpy as np
import pytest

import formats
import service
import slow
import wire
from under_way import occupied

MERGE = '/v1/attention/merge'


@pytest.fixture(scope='module', params=['cpu', 'device'])
def merger(request):
    more = {} if request.param == 'cpu' else {'binary': service.FAKE, 'env': {'ATTN_FAKE_DEVICES': '1', 'ATTN_FAKE_SCRIPT': ''}}
    with service.Server(**more) as server:
        yield server


def results(server, kind, members):
    """Returns the tensors of a merge's answer as {name: float64 array}. In JSON the tensors of a part are named
    parts.0.dout and so on."""
    if kind == 'kserve':
        return formats.results(server, kind, 'merge', members)[1]
    send = formats.send_safetensors(server, 'merge', members, Accept='application/json') if kind == 'safetensors' else server.post(MERGE, members)
    assert send.status == 200, send
    answer = send.json()
    got = {n: wire.value(t) for n, t in answer.items() if isinstance(t, dict) and 'data' in t}
    for p, part in enumerate(answer.get('parts', ())):
        got.update({f'parts.{p}.{n}': wire.value(t) for n, t in part.items()})
    return got


def named(parts, dtype='float32', **members):
    """Makes a merge of (out, lse) pairs, with one member for each tensor (parts.0.out and so on)."""
    tensors = {}
    for p, (out, lse) in enumerate(parts):
        tensors.update({f'parts.{p}.out': wire.tensor(out, dtype), f'parts.{p}.lse': wire.tensor(lse)})
    return {**tensors, **members}


def listed(parts, dtype='float32', **members):
    """Makes a merge of (out, lse) pairs, as a list of parts."""
    return {'parts': [{'out': wire.tensor(out, dtype), 'lse': wire.tensor(lse)} for out, lse in parts], **members}


def merged(parts, sinks=None):
    """Returns the expected merge in float64 as (out, lse); out is [B, Sq, H, Dv]."""
    lses = [np.asarray(lse, np.float64) for _, lse in parts]
    values = [np.asarray(out, np.float64) for out, _ in parts]
    if sinks is not None:
        lses.append(np.broadcast_to(np.asarray(sinks, np.float64)[:, None], lses[0].shape))
        values.append(np.zeros_like(values[0]))
    top = np.max(lses, 0)
    weights = [np.where(lse == -np.inf, 0, np.exp(lse - np.where(top == -np.inf, 0, top))) for lse in lses]
    total = np.sum(weights, 0)
    with np.errstate(divide='ignore', invalid='ignore'):
        lse = np.log(total) + np.where(top == -np.inf, 0, top)
        shares = [np.where(total == 0, 0, w / total).swapaxes(1, 2)[..., None] for w in weights]
    return sum(np.where(s == 0, 0, s * np.where(s == 0, 0, v)) for s, v in zip(shares, values)), lse


def random_parts(rng, count, B=2, Sq=7, H=3, Dv=5, empty=0.2):
    parts = []
    for _ in range(count):
        lse = rng.uniform(-4, 4, (B, H, Sq)).astype(np.float32)
        lse[rng.random(lse.shape) < empty] = -np.inf
        parts.append((rng.standard_normal((B, Sq, H, Dv)).astype(np.float32), lse))
    return parts


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_random_splits_of_the_keys_equal_the_whole(merger, kind):
    rng = np.random.default_rng(1)
    for case in range(4):
        members, values = wire.random_problem(rng, B=2, Sq=9, Sk=40, H=4, Hk=2, D=16)
        whole = merger.post('/v1/attention/forward', members).json()
        cuts = [0, *sorted(rng.choice(np.arange(1, 40), case, replace=False)), 40]
        parts = []
        for a, b in zip(cuts, cuts[1:]):
            part = {**members, 'k': wire.tensor(values['k'][:, a:b]), 'v': wire.tensor(values['v'][:, a:b])}
            answer = merger.post('/v1/attention/forward', part).json()
            parts.append((wire.value(answer['out']), wire.value(answer['lse'])))
        got = results(merger, kind, named(parts))
        assert np.abs(got['out'] - wire.value(whole['out'])).max() < 1e-6
        assert np.abs(got['lse'] - wire.value(whole['lse'])).max() < 1e-6


def test_a_backward_of_each_part_gives_the_gradients_of_the_whole(merger):
    rng = np.random.default_rng(2)
    members, values = wire.random_problem(rng, B=1, Sq=6, Sk=20, H=2, D=8, back=True)
    dlse, sinks = rng.standard_normal((1, 2, 6)), rng.standard_normal(2)
    whole = merger.post('/v1/attention/backward', {**members, 'dlse': wire.tensor(dlse), 'sinks': wire.tensor(sinks), 'outputs': ['dq', 'dk', 'dv', 'dsinks']}).json()
    inputs, parts = [], []
    for a, b in ((0, 3), (3, 11), (11, 20)):
        inputs.append({'q': members['q'], 'k': wire.tensor(values['k'][:, a:b]), 'v': wire.tensor(values['v'][:, a:b])})
        answer = merger.post('/v1/attention/forward', inputs[-1]).json()
        parts.append((wire.value(answer['out']), wire.value(answer['lse'])))
    asked = listed(parts, dout=members['dout'], dlse=wire.tensor(dlse), sinks=wire.tensor(sinks), outputs=['out', 'lse', 'dsinks'])
    answer = merger.post(MERGE, asked).json()
    backs = [merger.post('/v1/attention/backward', {**i, **gradients}).json() for i, gradients in zip(inputs, answer['parts'])]
    close = dict(rtol=0, atol=3e-6)
    np.testing.assert_allclose(sum(wire.value(b['dq']) for b in backs), wire.value(whole['dq']), **close)
    for name in ('dk', 'dv'):
        np.testing.assert_allclose(np.concatenate([wire.value(b[name]) for b in backs], 1), wire.value(whole[name]), **close)
    np.testing.assert_allclose(wire.value(answer['dsinks']), wire.value(whole['dsinks']), **close)


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_empty_parts_add_nothing_whatever_they_hold(merger, kind):
    rng = np.random.default_rng(3)
    parts = random_parts(rng, 3)
    for _, lse in parts:
        lse[0, 0, 0] = -np.inf  # hides all keys of all parts from this query
    want, lse = merged(parts)
    for out, its in parts:
        out[np.broadcast_to((its == -np.inf).swapaxes(1, 2)[..., None], out.shape)] = np.nan
    got = results(merger, kind, named(parts, dout=wire.tensor(np.ones_like(want))))
    np.testing.assert_allclose(got['out'], want, atol=1e-6)
    np.testing.assert_allclose(got['lse'], lse, atol=2e-6)
    assert (got['out'][0, 0, 0] == 0).all() and got['lse'][0, 0, 0] == -np.inf
    for p, (_, its) in enumerate(parts):
        empty = its == -np.inf
        assert (got[f'parts.{p}.dlse'][empty] == 0).all() and np.isfinite(got[f'parts.{p}.dlse']).all()
        assert (got[f'parts.{p}.dout'].swapaxes(1, 2)[empty] == 0).all()


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_lse_in_base_2_and_empty_parts_of_plus_infinity(merger, kind):
    rng = np.random.default_rng(4)
    parts = random_parts(rng, 2)
    want, lse = merged(parts)
    others = [(out, np.where(its == -np.inf, np.inf, its / np.log(2)).astype(np.float32)) for out, its in parts]
    got = results(merger, kind, named(others, lse_base='2', empty_lse='+inf'))
    np.testing.assert_allclose(got['out'], want, atol=2e-6)
    np.testing.assert_allclose(got['lse'], lse, atol=2e-6)


def test_a_sink_is_merged_once(merger):
    rng = np.random.default_rng(5)
    members, values = wire.random_problem(rng, Sq=5, Sk=12, H=2, D=8)
    sinks = wire.tensor(np.array([0.7, -np.inf]))
    whole = merger.post('/v1/attention/forward', {**members, 'sinks': sinks}).json()
    parts = []
    for a, b in ((0, 5), (5, 12)):
        answer = merger.post('/v1/attention/forward', {**members, 'k': wire.tensor(values['k'][:, a:b]), 'v': wire.tensor(values['v'][:, a:b])}).json()
        parts.append({'out': answer['out'], 'lse': answer['lse']})
    got = merger.post(MERGE, {'parts': parts, 'sinks': sinks}).json()
    for name in ('out', 'lse'):
        np.testing.assert_allclose(wire.value(got[name]), wire.value(whole[name]), atol=1e-6)


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-6), ('float16', 2e-3), ('bfloat16', 2e-2)])
def test_dtypes_and_layouts(merger, dtype, tolerance):
    rng = np.random.default_rng(6)
    parts = random_parts(rng, 3)
    rounded = [(wire.rounded(out, dtype), lse) for out, lse in parts]
    want, _ = merged(rounded)
    dout = rng.standard_normal(want.shape).astype(np.float32)
    plain = merger.post(MERGE, listed(parts, dtype, dout=wire.tensor(dout))).json()
    assert plain['out']['dtype'] == plain['parts'][0]['dout']['dtype'] == dtype and plain['lse']['dtype'] == 'float32'
    assert plain['sizes'] == {'parts': 3, 'B': 2, 'Sq': 7, 'H': 3, 'Dv': 5}
    assert np.abs(wire.value(plain['out']) - want).max() < tolerance
    single = merger.post(MERGE, listed(parts, dtype, out_dtype='float32')).json()
    assert single['out']['dtype'] == 'float32' and np.abs(wire.value(single['out']) - want).max() < 1e-6

    turned = listed([(out.swapaxes(1, 2), lse) for out, lse in parts], dtype, dout=wire.tensor(dout.swapaxes(1, 2)), layout='bhsd')
    turned = merger.post(MERGE, turned).json()
    assert turned['sizes'] == plain['sizes'] and turned['lse'] == plain['lse']
    assert (wire.value(turned['out']).swapaxes(1, 2) == wire.value(plain['out'])).all()
    assert (wire.value(turned['parts'][2]['dout']).swapaxes(1, 2) == wire.value(plain['parts'][2]['dout'])).all()
    assert turned['parts'][1]['dlse'] == plain['parts'][1]['dlse']

    packed = merger.post(MERGE, listed([(out[0], lse[0]) for out, lse in parts], dtype, dout=wire.tensor(dout[0]))).json()
    assert packed['sizes'] == {'parts': 3, 'total_q': 7, 'H': 3, 'Dv': 5}
    assert (wire.value(packed['out']) == wire.value(plain['out'])[0]).all()
    assert (wire.value(packed['parts'][0]['dlse']) == wire.value(plain['parts'][0]['dlse'])[0]).all()


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_64_parts_and_all_their_gradients(merger, kind):
    rng = np.random.default_rng(7)
    parts = random_parts(rng, 64, B=1, Sq=3, H=2, Dv=4)
    want, lse = merged(parts)
    dout = rng.standard_normal(want.shape).astype(np.float32)
    got = results(merger, kind, named(parts, dout=wire.tensor(dout)))
    np.testing.assert_allclose(got['out'], want, atol=1e-6)
    assert set(got) == {'out', 'lse'} | {f'parts.{p}.{n}' for p in range(64) for n in ('dout', 'dlse')}
    for p, (out, its) in enumerate(parts):
        weight = np.exp(its.astype(np.float64) - lse).swapaxes(1, 2)
        np.testing.assert_allclose(got[f'parts.{p}.dout'], weight[..., None] * dout, atol=1e-6)
        dlse = weight * (dout * (out - want)).sum(-1)
        np.testing.assert_allclose(got[f'parts.{p}.dlse'], dlse.swapaxes(1, 2), atol=2e-6)
    assert merger.post(MERGE, listed(parts + parts[:1])).json()['detail'].startswith('parts: there are 65, must be 1 to 64')


def test_one_part_is_itself_and_rows_without_elements_are_none(merger):
    rng = np.random.default_rng(8)
    out, lse = random_parts(rng, 1, empty=0)[0]
    got = merger.post(MERGE, listed([(out, lse)])).json()
    assert (wire.value(got['out']) == out).all() and (wire.value(got['lse']) == lse).all()
    nothing = merger.post(MERGE, listed([(out[:0], lse[:0])], dout=wire.tensor(out[:0]), sinks=wire.tensor(np.zeros(3)), outputs=['out', 'dsinks'])).json()
    assert nothing['out']['shape'] == [0, 7, 3, 5] and (wire.value(nothing['dsinks']) == 0).all()


def test_several_merges_in_one_body_fail_alone(merger):
    rng = np.random.default_rng(9)
    parts = random_parts(rng, 2)
    one = listed(parts)
    alone = merger.post(MERGE, one).json()
    bad = listed([parts[0], (parts[1][0], np.full_like(parts[1][1], np.nan))])
    answers = merger.post(MERGE, {'requests': [one, bad, named(parts)]}).json()['responses']
    assert answers[1]['error']['pointer'] == '/requests/1/parts/1/lse/data'
    assert answers[1]['error']['detail'] == 'parts.1.lse: [0, 0, 0] is nan, must be a number, or -inf for an empty part'
    for answer in (answers[0], answers[2]):
        assert answer['out'] == alone['out'] and answer['lse'] == alone['lse']


@pytest.mark.parametrize('kind', formats.FORMATS)
def test_refusals_point_into_the_body_as_it_was_sent(merger, kind):
    rng = np.random.default_rng(10)
    parts = random_parts(rng, 2)
    at = {'json': '/parts.1.out', 'safetensors': '/parts.1.out', 'kserve': '/inputs/2'}[kind]
    of_lse = {'json': '/parts.1.lse', 'safetensors': '/parts.1.lse', 'kserve': '/inputs/3'}[kind]
    data = {'json': '/data', 'safetensors': '/data', 'kserve': '/parameters/binary_data_size'}[kind]
    cases = [
        (named([parts[0], (parts[1][0][:, :6], parts[1][1])]), f'{at}/shape/1', 'parts.1.out: shape[1] is 6, must be 7, the rows of parts.0.out'),
        (named([parts[0], (parts[1][0], np.full_like(parts[1][1], np.inf))]), of_lse + data,
         'parts.1.lse: [0, 0, 0] is inf, must be finite, or -inf for an empty part; where empty parts have +inf, write "empty_lse": "+inf"'),
    ]
    for members, pointer, detail in cases:
        if kind == 'json':
            refusal = merger.post(MERGE, members).json()
        else:
            refusal = formats.ask(merger, kind, 'merge', members)[1]
        assert (refusal['status'], refusal['pointer'], refusal['detail']) == (400, pointer, detail)


def test_kserve_names_gradients_as_outputs(merger):
    rng = np.random.default_rng(11)
    parts = random_parts(rng, 2)
    members = named(parts, dout=wire.tensor(np.ones_like(parts[0][0])))
    want = merger.post(MERGE, members).json()
    tensors, _ = formats.split(members)
    head = {'inputs': [{'name': n, 'shape': shape, 'datatype': formats.KSERVE[dtype], 'parameters': {'binary_data_size': len(raw)}} for n, (dtype, shape, raw) in tensors.items()],
            'outputs': [{'name': 'out'}, {'name': 'parts.1.dlse', 'parameters': {'binary_data': True}}]}

    def infer(**more):
        text = json.dumps({**head, **more}).encode()
        return merger.ask('POST', '/v2/models/attention_merge/infer', text + b''.join(raw for *_, raw in tensors.values()), {'Inference-Header-Content-Length': str(len(text))})
    answer = infer()
    length = int(answer.headers['inference-header-content-length'])
    described = {t['name']: t for t in json.loads(answer.body[:length])['outputs']}
    assert list(described) == ['out', 'parts.0.dout', 'parts.0.dlse', 'parts.1.dout', 'parts.1.dlse']
    raw = answer.body[length:]
    assert described['parts.1.dlse']['parameters']['binary_data_size'] == len(raw)
    assert (np.frombuffer(raw, np.float32).reshape(parts[1][1].shape) == wire.value(want['parts'][1]['dlse'])).all()

    refusal = infer(outputs=[{'name': 'parts.2.dout'}]).json()
    assert (refusal['pointer'], refusal['detail']) == ('/outputs', 'outputs: gradients of part 2 need such a part')
    del tensors['dout'], head['inputs'][-1]
    refusal = infer().json()
    assert (refusal['pointer'], refusal['detail']) == ('/outputs', 'outputs: gradients of part 1 need dout')


def test_a_merge_is_counted(merger):
    rng = np.random.default_rng(12)
    before = merger.metric('attnd_requests_total', endpoint='merge')
    answer = merger.post(MERGE, listed(random_parts(rng, 2)))
    assert answer.status == 200 and answer.json()['timing_us']['compute'] > 0
    assert service.eventually(lambda: merger.metric('attnd_requests_total', endpoint='merge') == before + 1)
    assert merger.metric('attnd_kernel_seconds_total', op='merge') > 0


@pytest.mark.limit(120)
def test_a_short_merge_does_not_wait_behind_long_problems(serve):
    """Two problems that never end run on the device. The server estimates that a merge is short, so the merge must run
    beside them, as a short forward does."""
    rng = np.random.default_rng(14)
    server = serve('--cpu-threads', 1, '--max-batch', 1)
    with occupied(server, slow.calibrated(server, 20), queued=1):
        assert server.post(MERGE, listed(random_parts(rng, 2))).status == 200
        assert server.metric('attnd_inflight_requests', state='running') == 2


def test_a_merge_has_the_same_bits_among_others_and_on_any_number_of_threads(serve):
    rng = np.random.default_rng(13)
    members = listed(random_parts(rng, 5, Sq=150, Dv=70), dout=wire.tensor(rng.standard_normal((2, 150, 3, 70))), sinks=wire.tensor(np.zeros(3)), outputs=['out', 'lse', 'dsinks'])
    want = None
    for threads in (1, 3):
        server = serve('--cpu-threads', threads)
        alone = server.post(MERGE, members).json()
        among = server.post(MERGE, {'requests': [listed(random_parts(rng, 2)), members]}).json()['responses'][1]
        for answer in (alone, among):
            got = [answer[n] for n in ('out', 'lse', 'dsinks', 'parts')]
            want = want or got
            assert got == want
