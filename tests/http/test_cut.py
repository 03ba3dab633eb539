"""A long problem that is cut over several devices by groups of heads, by batch rows or by queries: equal bits, lost
devices, and what the answer, /v1/info, /metrics and the log say about it. attnd-fake has several devices, which compute
on the CPU (kernels/fake/fake.c). tests/unit/server/test_cut.c has 500 random problems with all options."""
import os

import numpy as np
import pytest

import wire
from service import SLOWER, eventually
from under_way import Asking, dies

H, HK, S, D = 8, 4, 1024, 64
SPLIT = ('--split-above-ms', 1)
RESULTS = {'forward': ('out', 'lse'), 'backward': ('dq', 'dk', 'dv'), 'observe': ('lse', 'entropy', 'key_mass', 'mean_entropy')}


@pytest.fixture(scope='module', autouse=True)
def no_instructions_beyond_avx2():
    """Makes the server use AVX2 at most, unless ATTN_CPU_ISA is set. On every machine the server then estimates that
    each problem takes longer than a millisecond, and cuts it. With AMX the estimates for the short ones would be
    shorter."""
    with pytest.MonkeyPatch.context() as patch:
        if 'ATTN_CPU_ISA' not in os.environ: patch.setenv('ATTN_CPU_ISA', 'avx2')
        yield


def tensors(names, seed=1):
    rng = np.random.default_rng(seed)
    return {n: wire.tensor(rng.standard_normal((1, S, HK if n in 'kv' else H, D)).astype(np.float16)) for n in names}


QKV = tensors(['q', 'k', 'v'])
DOUT = tensors(['dout'], 2)
CASES = {
    'forward': ('forward', {**QKV, 'causal': True}),
    'dropout': ('forward', {**QKV, 'dropout_p': 0.3, 'seed': 5}),
    'softcap and slopes': ('forward', {**QKV, 'softcap': 20, 'alibi_slopes': wire.tensor(np.linspace(.1, 1, H).astype(np.float32))}),
    'backward': ('backward', {**QKV, **DOUT, 'causal': True, 'deterministic': True}),
    'observe': ('observe', {'q': QKV['q'], 'k': QKV['k'], 'causal': True, 'observe': list(RESULTS['observe'])}),
    'backward with dropout': ('backward', {**QKV, **DOUT, 'causal': True, 'dropout_p': 0.3, 'seed': 5}),
}


def answer_of(server, name):
    op, members = CASES[name]
    answer = server.post(f'/v1/attention/{op}', members)
    assert answer.status == 200, answer
    return answer.json(), {n: answer.json()[n] for n in RESULTS[op]}


@pytest.fixture(scope='module')
def right():
    """Returns the answers that a server with one device gives."""
    from service import FAKE, Server
    with Server('--cpu-threads', '1', env={'ATTN_FAKE_DEVICES': '1'}, binary=FAKE) as server:
        return {name: answer_of(server, name)[1] for name in CASES}


@pytest.mark.parametrize('devices', [2, 3, 4])
def test_an_answer_has_the_same_bits_over_any_number_of_devices(fake, right, devices):
    server = fake('', *SPLIT, devices=devices)
    # Three devices would not be faster than two: four heads are cut into 2 and 2, or into 2, 1 and 1, and the largest
    # part has 2.
    used = 2 if devices == 3 else devices
    for name in CASES:
        answer, numbers = answer_of(server, name)
        assert numbers == right[name], name
        assert answer['backend'].startswith('fake:') and answer['backend'].endswith(' by heads'), answer['backend']
    info = server.get('/v1/info').json()
    assert info['limits']['split_above_ms'] == 1
    assert sum(d['parts'] for d in info['devices']) == server.metric('attnd_device_parts_total') == used * len(CASES)
    assert eventually(lambda: server.log().count(f' parts={used}') == len(CASES))


def test_a_saved_forward_and_its_backward_have_the_same_bits(fake, right):
    server = fake('', *SPLIT, devices=4)
    saved = server.forward(**QKV, dropout_p=0.3, seed=5, save=True).json()
    back = server.backward(context=saved['context'], **DOUT).json()
    assert saved['backend'].startswith('fake:0-3 ') and back['backend'].startswith('fake:0-3 ')
    assert {n: saved[n] for n in RESULTS['forward']} == right['dropout']
    assert server.metric('attnd_device_parts_total', device='fake:3') == 2


def test_a_short_problem_and_one_without_the_option_go_to_one_device(fake, right):
    server = fake('', '--split-above-ms', 0, devices=4)
    answer, numbers = answer_of(server, 'forward')
    assert numbers == right['forward'] and ' by heads' not in answer['backend']
    assert server.metric('attnd_device_parts_total') == 0
    server = fake('', *SPLIT, devices=4)
    assert ' by heads' not in server.forward(**wire.small_body()).json()['backend']
    assert server.get('/v1/info').json()['devices'][0]['parts'] == 0


@pytest.mark.parametrize('fault', ['1:sync.err=700@1', '1:launch.err=700@1', '1:copy.err=700@1', '1:call.err=700@9'])
def test_a_lost_device_is_made_up_for_by_the_others(fake, right, fault):
    server = fake(fault, *SPLIT, devices=3)
    for name in CASES:
        answer, numbers = answer_of(server, name)
        assert numbers == right[name], name
        assert answer['backend'].startswith('fake:0'), answer['backend']
    assert server.get('/readyz').status == 200
    assert [d['usable'] for d in server.get('/v1/info').json()['devices']] == [True, False, True]


def test_a_part_that_fails_fails_the_problem(fake, right):
    server = fake('1:sync.err=9@1', *SPLIT, devices=2)
    answer = server.post('/v1/attention/forward', CASES['forward'][1])
    assert answer.status == 500 and 'error 9' in answer.json()['detail'], answer
    assert answer_of(server, 'forward')[1] == right['forward']
    assert server.metric('attnd_device_errors_total') == 1, 'a part that was cancelled is no error'


def test_a_deadline_ends_all_parts(fake, right, gate):
    server = fake(f'1:hold={gate.path}@1', *SPLIT, devices=2)
    answer = server.forward(**CASES['forward'][1], timeout_ms=300)
    assert answer.status == 504 and 'while the request was running' in answer.json()['detail'], answer
    gate.open()
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)
    assert answer_of(server, 'forward')[1] == right['forward']


def test_problems_of_several_clients_share_the_devices(fake, right):
    server = fake('', *SPLIT, devices=3)
    long = [Asking(server, CASES['forward'][1]) for _ in range(6)]
    short = [Asking(server) for _ in range(6)]
    for asking in long:
        assert {n: asking.result().json()[n] for n in RESULTS['forward']} == right['forward']
    assert all(asking.result().status == 200 for asking in short)


# ---- By queries --------------------------------------------------------------------------------------------------------

SUMS = 'dk', 'dv'
MQA = {n: wire.tensor(np.random.default_rng(3 + i).standard_normal((1, S, 1 if n in 'kv' else 2, D)), 'float16')
       for i, n in enumerate(('q', 'k', 'v', 'dout'))}
FORWARD = {n: MQA[n] for n in ('q', 'k', 'v')}
QUERIES = {
    'forward': ('forward', {**FORWARD, 'causal': True}),
    'softcap': ('forward', {**FORWARD, 'softcap': 20}),
    'backward': ('backward', {**MQA, 'causal': True, 'deterministic': True}),
    'float32 gradients': ('backward', {**MQA, 'grad_dtype': 'float32'}),
}


@pytest.fixture(scope='module')
def right_by_queries():
    """Returns the answers that a server with one device gives."""
    from service import FAKE, Server
    with Server('--cpu-threads', '1', env={'ATTN_FAKE_DEVICES': '1'}, binary=FAKE) as server:
        return {name: asked(server, name)[1] for name in QUERIES}


def asked(server, name):
    op, members = QUERIES[name]
    answer = server.post(f'/v1/attention/{op}', members)
    assert answer.status == 200, answer
    return answer.json(), {n: answer.json()[n] for n in RESULTS[op]}


def assert_by_queries(got, want):
    """Checks that out, lse and dq have the same bits as from one device, and that dk and dv are right within the
    rounding of their dtype."""
    for name in want:
        if name not in SUMS:
            assert got[name] == want[name], name
            continue
        a, b = (wire.value(t) for t in (got[name], want[name]))
        assert np.abs(a - b).max() <= 2e-3 * np.abs(b).max(), name


def device_memory(server):
    """Returns the bytes that each device has allocated."""
    return {d['name']: d['memory_used_bytes'] for d in server.get('/v1/info').json()['devices']}


def memory_after(server, right_by_queries):
    """Computes the backward, and returns the bytes that each device has allocated after it: the scratch memory of
    kernels, which a device keeps. If the numbers are larger after another backward, a device has kept sums of parts."""
    assert_by_queries(asked(server, 'backward')[1], right_by_queries['backward'])
    return device_memory(server)


def assert_memory_is_free(server, before):
    """Waits until all staging memory is free, and until each device has allocated as many bytes as in `before`. The
    devices then keep no sums of parts."""
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)
    assert eventually(lambda: device_memory(server) == before), (before, device_memory(server))


@pytest.mark.parametrize('devices', [2, 3, 4])
def test_queries_of_few_heads_are_shared_by_all_devices(fake, right_by_queries, devices):
    server = fake('', *SPLIT, devices=devices)
    for name in QUERIES: asked(server, name)
    before = device_memory(server)
    for name in QUERIES:
        answer, numbers = asked(server, name)
        assert answer['backend'].startswith(f'fake:0-{devices - 1} ') and answer['backend'].endswith(' by queries'), answer['backend']
        assert_by_queries(numbers, right_by_queries[name])
        assert asked(server, name)[1] == numbers, 'the same bits each time'
    assert server.metric('attnd_device_parts_total') == 3 * devices * len(QUERIES)
    assert_memory_is_free(server, before)


def test_rows_of_a_batch_are_shared_where_there_are_few_heads(fake):
    rng = np.random.default_rng(5)
    body = {n: wire.tensor(rng.standard_normal((3, S, 1 if n in 'kv' else 2, D)).astype(np.float16)) for n in ('q', 'k', 'v', 'dout')}
    one, three = (server.backward(**body, causal=True).json() for server in (fake('', devices=1), fake('', *SPLIT, devices=3)))
    assert three['backend'].startswith('fake:0-2 ') and three['backend'].endswith(' by batch')
    assert all(one[n] == three[n] for n in RESULTS['backward'])


# The first problem that is sent is a backward. In it, the first run of kernels on a device computes the device's part.
# The second run, and the first copy from another device, add up the parts' sums.
@pytest.mark.parametrize('fault', ['1:sync.err=700@1', '1:launch.err=700@1', '1:copy.err=700@1', '1:call.err=700@9', '1:peer.err=700@1', '1:launch.err=700@2', '1:sync.err=700@2'])
def test_queries_of_a_lost_device_are_computed_by_the_others(fake, right_by_queries, fault):
    whole = fake('', *SPLIT, devices=3)
    server = fake(fault, *SPLIT, devices=3)
    for name in reversed(QUERIES):
        answer, numbers = asked(server, name)
        assert_by_queries(numbers, right_by_queries[name])
        assert numbers == asked(whole, name)[1], 'the bits do not depend on how many devices are left'
        assert answer['backend'].startswith('fake:0,2 '), answer['backend']
    assert server.get('/readyz').status == 200
    assert [d['usable'] for d in server.get('/v1/info').json()['devices']] == [True, False, True]


def test_a_device_that_is_lost_before_others_copy_its_sums_is_made_up_for(fake, right_by_queries, gate):
    # Device 0 runs kernels four times: for its part, for its shares of dk and of dv, and for another problem, in which
    # the device is lost. Until the loss, a slow launch keeps the thread of device 1 from adding up sums.
    server = fake(f'0:hold={gate.path}@1,1:launch.slow={int(2000 * SLOWER)}@2,0:sync.err=700@4', *SPLIT, devices=2)
    op, members = QUERIES['backward']
    asking = Asking(server, members, path=f'/v1/attention/{op}')
    # device 1 has computed its part
    assert eventually(lambda: server.metric('attnd_device_batches_total', device='fake:1') == 1)
    slow = Asking(server)
    assert eventually(lambda: server.get('/v1/info').json()['devices'][1]['running_requests'] == 1)
    gate.open()
    # device 0 has added up its shares of dk and dv
    assert eventually(lambda: server.metric('attnd_device_batches_total', device='fake:0') == 2)
    assert server.forward(**wire.small_body()).status == 503
    assert slow.result().status == 200
    answer = asking.result()
    assert answer.status == 200, answer
    assert answer.json()['backend'].startswith('fake:1 ')
    assert_by_queries({n: answer.json()[n] for n in RESULTS[op]}, right_by_queries['backward'])


def test_a_problem_by_queries_is_answered_503_when_no_device_is_left(fake):
    server = fake('sync.err=700', *SPLIT, devices=2)
    answer = server.post('/v1/attention/backward', QUERIES['backward'][1])
    assert answer.status == 503, answer
    dies(server, 70)


# A backward is three runs of kernels on each device: its part, and its shares of dk and of dv. The second one fails.
@pytest.mark.parametrize('fault', ['1:sync.err=9@4', '1:sync.err=9@5', '1:launch.err=9@5', '1:peer.err=9@3'])
def test_a_part_by_queries_that_fails_fails_the_problem(fake, right_by_queries, fault):
    server = fake(fault, *SPLIT, devices=2)
    before = memory_after(server, right_by_queries)
    answer = server.post('/v1/attention/backward', QUERIES['backward'][1])
    assert answer.status == 500 and 'error 9' in answer.json()['detail'], answer
    assert_memory_is_free(server, before)
    assert_by_queries(asked(server, 'backward')[1], right_by_queries['backward'])


def test_a_deadline_ends_the_adding_up_of_parts(fake, right_by_queries, gate):
    server = fake(f'1:hold={gate.path}@5', *SPLIT, devices=2)
    before = memory_after(server, right_by_queries)
    answer = server.post('/v1/attention/backward', {**QUERIES['backward'][1], 'timeout_ms': 1500})
    assert answer.status == 504 and 'while the request was running' in answer.json()['detail'], answer
    gate.open()
    assert_memory_is_free(server, before)
    assert_by_queries(asked(server, 'backward')[1], right_by_queries['backward'])


def test_a_device_that_never_ends_adding_up_is_given_up(fake, right_by_queries):
    server = fake('1:event.never@2', *SPLIT, '--watchdog-ms', int(1500 * SLOWER), devices=3)
    answer = server.post('/v1/attention/backward', QUERIES['backward'][1])
    assert answer.status == 503, answer
    answer, numbers = asked(server, 'backward')
    assert answer['backend'].startswith('fake:0,2 ')
    assert_by_queries(numbers, right_by_queries['backward'])


def test_sums_are_freed_if_another_device_never_ends_its_part(fake, right_by_queries):
    server = fake('1:event.never@4', *SPLIT, '--watchdog-ms', int(1500 * SLOWER), devices=2)
    before = memory_after(server, right_by_queries)
    answer = server.post('/v1/attention/backward', QUERIES['backward'][1])
    assert answer.status == 503, answer
    assert eventually(lambda: device_memory(server)['fake:0'] == before['fake:0'])


# A gate holds the part of device 1 beyond the deadline. If `late`, a second gate holds the part of device 0 beyond it
# too. Otherwise the part of device 0 ends before the deadline.
@pytest.mark.parametrize('late', [False, True])
def test_sums_are_freed_at_a_deadline_while_another_part_runs(fake, right_by_queries, gate, tmp_path, late):
    other = tmp_path / 'other'
    server = fake(f'0:hold={other}@4,1:hold={gate.path}@4', *SPLIT, devices=2)
    before = memory_after(server, right_by_queries)
    if late: other.touch()
    answer = server.post('/v1/attention/backward', {**QUERIES['backward'][1], 'timeout_ms': int(1500 * SLOWER)})
    assert answer.status == 504, answer
    if late: other.unlink()
    assert eventually(lambda: device_memory(server)['fake:0'] == before['fake:0'])
    gate.open()
    assert_memory_is_free(server, before)


def test_sums_that_do_not_fit_on_a_device_leave_the_problem_on_one_device(fake):
    # each of eight parts needs 4 MiB for its own sums in float32, and nearly as much for those of the other parts
    rng = np.random.default_rng(6)
    body = {n: wire.tensor(rng.standard_normal((1, 8 * S if n in 'kv' else S, 1, D)).astype(np.float16)) for n in ('q', 'k', 'v', 'dout')}
    one, small, large = (fake('', *SPLIT, '--device-bytes', size, '--kv-bytes', 0, devices=devices).backward(**body).json()
                         for size, devices in ((16_200_000, 1), (16_200_000, 8), (20_000_000, 8)))
    assert ' by ' not in small['backend'] and all(one[n] == small[n] for n in RESULTS['backward'])
    assert large['backend'].endswith(' by queries')


def test_many_clients_share_devices_by_queries(fake, right_by_queries):
    server = fake('', *SPLIT, devices=3)
    want = asked(server, 'backward')[1]
    long = [Asking(server, QUERIES['backward'][1], path='/v1/attention/backward') for _ in range(8)]
    for asking in long:
        assert {n: asking.result().json()[n] for n in RESULTS['backward']} == want
    assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == 0)
