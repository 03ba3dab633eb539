"""Contexts (saved forwards): who may use them, how much memory counts for them, and what happens to them when their
backward fails."""
import json
import os
import signal
import struct

import numpy as np
import pytest

import service
import wire
from service import eventually, request_bytes

FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'
ALICE, BOB = {'Authorization': 'Bearer alice'}, {'Authorization': 'Bearer bob'}
DOUT = wire.tensor(np.ones((1, 3, 2, 4)))  # gradient of out for all backwards in this file


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / 'tokens'
    path.write_text('alice\nbob\n')
    return path


def saved(server, headers=(), **options):
    answer = server.post(FORWARD, wire.small_body(save=True, **options), headers)
    assert answer.status == 200, answer
    return answer.json()['context']


def use(server, context, headers=(), dout=DOUT):
    return server.post(BACKWARD, {'context': context, 'dout': dout}, headers)


def statuses(answer):
    """Returns the statuses of the problems in an envelope (many problems in one body)."""
    return [r['error']['status'] if 'error' in r else 200 for r in answer.json()['responses']]


def nothing_is_kept(server):
    m = server.metrics()
    return not any(v for n, v in m.items() if n.startswith('attnd_contexts{')) and m['attnd_staging_bytes{kind="contexts"}'] == 0 and \
        m['attnd_staging_bytes{kind="used"}'] == 0


def filler(megabytes, **options):
    """Makes a forward with many keys and one query. Its tensors take about `megabytes` MiB."""
    # k and v each have 128 bytes per key, so 4096 keys make 1 MiB in all
    keys = wire.tensor(np.zeros((1, megabytes << 12, 1, 64)), 'float16')
    return {'q': wire.tensor(np.zeros((1, 1, 1, 64)), 'float16'), 'k': keys, 'v': keys, **options}


# ---- What may be saved -----------------------------------------------------------------------------------------------


def with_pages(**options):
    keys = wire.tensor(np.zeros((2, 4, 2, 4)))  # k and v are a pool of two pages
    return {'q': wire.tensor(np.zeros((1, 3, 2, 4))), 'k': keys, 'v': keys, 'page_table': wire.tensor(np.zeros((1, 2)), 'int32'),
            'seqlens_k': wire.tensor(np.full(1, 5), 'int32'), **options}


def with_float8(**options):
    return {name: wire.tensor(np.zeros((1, 2, 1, 16)), 'float8_e4m3fn') for name in 'qkv'} | options


@pytest.mark.parametrize('body, says', [
    (with_pages, 'page_table: backward has no pages; send k and v whole, or with cu_seqlens_k'),
    (with_float8, 'q: dtype is float8_e4m3fn, backward supports float32, float16 and bfloat16'),
])
def test_what_no_backward_can_use_is_not_kept_for_one(serve, body, says):
    server = serve()
    assert server.post(FORWARD, body()).status == 200
    answer = server.post(FORWARD, body(save=True))
    assert answer.status == 422 and answer.json()['pointer'] == '/save', answer
    assert answer.json()['detail'] == f'save: no backward can use it; {says}', answer
    mixed = server.post(FORWARD, {'requests': [body(save=True), wire.small_body(save=True)]})
    assert statuses(mixed) == [422, 200], mixed
    assert use(server, mixed.json()['responses'][1]['context']).status == 200
    assert eventually(lambda: nothing_is_kept(server)), server.metrics()


# ---- Whose -----------------------------------------------------------------------------------------------------------


def test_a_context_is_its_tokens_alone_and_others_cannot_use_it_up(serve, tokens):
    server = serve('--token-file', tokens)
    server.page_headers = ALICE
    context = saved(server, ALICE)
    unknown, foreign = use(server, '0' * 32, BOB), use(server, context, BOB)
    assert unknown.status == foreign.status == 404, foreign
    assert {**unknown.json(), 'request_id': ''} == {**foreign.json(), 'request_id': ''}
    many = server.post(BACKWARD, {'requests': [{'context': context, 'dout': DOUT}]}, BOB)
    assert statuses(many) == [404], many
    assert use(server, context, ALICE).status == 200, 'it was used up by another token'
    assert use(server, context, ALICE).status == 404
    assert eventually(lambda: nothing_is_kept(server)), server.metrics()


def test_one_token_cannot_save_so_much_that_others_can_save_nothing(serve, tokens):
    server = serve('--token-file', tokens, '--staging-bytes', '64M')
    forward = json.dumps({'requests': [wire.small_body(save=True)] * 512}).encode()
    with service.Probe(server) as probe:
        answers = [server.post(FORWARD, forward, ALICE).json()['responses'] for _ in range(2)]
        mine = [r for many in answers for r in many]
        assert len([r for r in mine if 'context' in r]) == 512, 'a token may have half of 1024'
        refused = server.post(FORWARD, wire.small_body(save=True), ALICE)
        assert refused.status == 429 and refused.json()['code'] == 'quota-exceeded' and int(refused.headers['retry-after']) >= 1, refused
        assert "this token's contexts" in refused.json()['detail'] and '--token-share' in refused.json()['detail'], refused
        assert use(server, saved(server, BOB), BOB).status == 200
    probe.check()
    assert server.post(FORWARD, wire.small_body(), ALICE).status == 200


# ---- What they are charged for ---------------------------------------------------------------------------------------


def test_a_tiny_context_is_charged_for_the_large_job_that_it_keeps(serve):
    """Contexts (saved forwards) may hold a quarter of the memory, here 8 MiB. A job (the memory of one request) stays
    as long as one of its contexts. A tiny context therefore counts as its whole job, here 5 MiB, and two such jobs do
    not fit."""
    server = serve('--staging-bytes', '32M')
    with service.Probe(server) as probe:
        mixed = {'requests': [filler(5)] + [wire.small_body(save=True)] * 255}
        first = server.post(FORWARD, mixed)
        assert first.status == 200, first
        contexts = [r['context'] for r in first.json()['responses'][1:]]
        used = server.metric('attnd_staging_bytes', kind='contexts')
        assert used > 5 << 20
        # The server gives the memory of an answer back only after the answer's last byte was sent.
        assert eventually(lambda: server.metric('attnd_staging_bytes', kind='used') == used), server.metrics()
        for context in contexts[1:]:
            assert use(server, context).status == 200
        assert server.metric('attnd_staging_bytes', kind='contexts') == used, 'the job is still there'
        second = server.post(FORWARD, mixed)
        assert set(statuses(second)[1:]) == {503}, second
        assert server.metric('attnd_staging_bytes', kind='contexts') <= 8 << 20
        assert use(server, contexts[0]).status == 200
        assert eventually(lambda: nothing_is_kept(server)), server.metrics()
        assert all('context' in r for r in server.post(FORWARD, mixed).json()['responses'][1:])
    probe.check()


def test_what_never_fits_is_told_so(serve):
    server = serve('--staging-bytes', '32M')
    answer = server.post(FORWARD, filler(9, save=True))
    assert answer.status == 413 and 'saved contexts may hold 8388608 bytes' in answer.json()['detail'], answer
    assert eventually(lambda: nothing_is_kept(server)), server.metrics()


# ---- A backward that does not run ------------------------------------------------------------------------------------

WRONG = wire.tensor(np.ones((1, 3, 2, 5)))


@pytest.mark.parametrize('envelope', [False, True])
def test_a_bad_use_gives_the_context_back(server, envelope):
    context = saved(server)
    bad, good = {'context': context, 'dout': WRONG}, {'context': saved(server), 'dout': DOUT}
    if envelope:
        answer = server.post(BACKWARD, {'requests': [bad, good]})
        assert statuses(answer) == [400, 200], answer
    else:
        assert server.post(BACKWARD, bad).status == 400
        assert server.post(BACKWARD, good).status == 200
    assert use(server, context).status == 200, 'a bad use has used it up'
    assert use(server, context).status == 404
    assert eventually(lambda: nothing_is_kept(server)), server.metrics()


def test_an_envelope_may_use_a_context_again_that_its_first_use_did_not(server):
    context = saved(server)
    answer = server.post(BACKWARD, {'requests': [{'context': context, 'dout': d} for d in (WRONG, DOUT, DOUT)]})
    assert statuses(answer) == [400, 200, 404], answer


def test_the_contexts_of_a_token_that_is_gone_go_with_it(serve, tokens):
    server = serve('--token-file', tokens)
    mine, other = saved(server, ALICE), saved(server, BOB)
    server.page_headers = BOB
    tokens.write_text('bob\n')
    os.kill(server.pid, signal.SIGHUP)
    assert eventually(lambda: server.metric('attnd_contexts', state='ready') == 1)
    assert use(server, mine, ALICE).status == 401 and use(server, mine, BOB).status == 404
    assert use(server, other, BOB).status == 200


def fake(serve, script):
    return serve('--cpu-threads', '1', '--max-batch', '1', env={'ATTN_FAKE_SCRIPT': script}, binary=service.FAKE)


def test_what_is_saved_may_have_no_bytes(serve):
    """The body is sent in pieces, so that the server leases no memory before bytes have come. The device has its own
    memory. The saved tensors are empty, so no bytes are copied to the device."""
    server = fake(serve, '')
    head = json.dumps({'__metadata__': {'save': 'true'}, **{n: {'dtype': 'F16', 'shape': [1, 0, 2, 8], 'data_offsets': [0, 0]} for n in 'qkv'}}).encode()
    body = struct.pack('<Q', len(head)) + head
    with server.raw() as s:
        s.sendall(request_bytes(FORWARD, None, headers=['Content-Type: application/x-safetensors', 'Accept: application/json', 'Transfer-Encoding: chunked'])
                  + b'%x\r\n%s\r\n0\r\n\r\n' % (len(body), body))
        answer = service.RawReader(s).answer()
    assert answer.status == 200, answer
    answer = server.post(BACKWARD, {'context': answer.json()['context'], 'dout': wire.tensor(np.zeros((1, 0, 2, 8)), 'float16')})
    assert answer.status == 200 and answer.json()['dq']['shape'] == [1, 0, 2, 8], answer


def test_a_use_whose_run_fails_gives_the_context_back(serve):
    server = fake(serve, 'launch.err=9@2')
    context = saved(server)
    assert use(server, context).status == 500
    assert use(server, context).status == 200
    assert eventually(lambda: nothing_is_kept(server)), server.metrics()


@pytest.fixture
def gate(tmp_path):
    path = tmp_path / 'gate'
    path.write_text('')
    yield str(path)
    if path.exists():
        path.unlink()


def test_a_use_whose_deadline_passes_gives_the_context_back(serve, gate):
    server = fake(serve, f'hold={gate}@2')
    context = saved(server)
    late = server.post(BACKWARD, {'context': context, 'dout': DOUT, 'timeout_ms': int(1000 * service.SLOWER)})
    assert late.status == 504, late
    # The first backward still runs and reads the tensors of the context (saved forward). They must not be freed yet.
    assert use(server, context).status == 200
    os.unlink(gate)
    assert eventually(lambda: nothing_is_kept(server)), server.metrics()


def test_a_context_that_another_request_uses_is_in_use_and_not_unknown(serve, gate, tokens):
    server = serve('--token-file', tokens, '--cpu-threads', '1', '--max-batch', '1', env={'ATTN_FAKE_SCRIPT': f'hold={gate}@2'}, binary=service.FAKE)
    server.page_headers = ALICE
    context = saved(server, ALICE)
    body = json.dumps({'context': context, 'dout': DOUT}).encode()
    with server.raw() as s:
        s.sendall(request_bytes(BACKWARD, body, headers=['Content-Type: application/json', 'Authorization: Bearer alice']))
        assert eventually(lambda: server.metric('attnd_contexts', state='taken') == 1)
        answer = use(server, context, ALICE)
        assert answer.status == 409 and answer.json()['code'] == 'in-use' and answer.json()['pointer'] == '/context', answer
        assert answer.json()['title'] == 'Another request uses this' and 'another backward uses it' in answer.json()['detail'], answer
        assert statuses(server.post(BACKWARD, {'requests': [{'context': context, 'dout': DOUT}]}, ALICE)) == [409]
        tensors = [{'name': 'dout', 'shape': DOUT['shape'], 'datatype': 'FP32', 'data': [1] * 24}]
        answer = server.post('/v2/models/attention_backward/infer', {'inputs': tensors, 'parameters': {'context': context}}, ALICE)
        assert answer.status == 409 and answer.json()['pointer'] == '/parameters/context', answer
        assert use(server, context, BOB).status == 404, 'another token learns that it is there'
        os.unlink(gate)
        assert b' 200 ' in s.recv(100)
    assert use(server, context, ALICE).status == 404


def test_a_use_whose_client_leaves_gives_the_context_back(serve, gate):
    server = fake(serve, f'hold={gate}@2')
    context = saved(server)
    body = json.dumps({'context': context, 'dout': DOUT}).encode()
    with server.raw() as s:
        s.sendall(request_bytes(BACKWARD, body, headers=['Content-Type: application/json']))
        assert eventually(lambda: server.metric('attnd_contexts', state='taken') == 1)
    assert eventually(lambda: server.metric('attnd_contexts', state='ready') == 1)
    os.unlink(gate)
    assert use(server, context).status == 200
    assert eventually(lambda: nothing_is_kept(server)), server.metrics()


def test_a_forward_whose_client_leaves_keeps_nothing(serve, gate):
    server = fake(serve, f'hold={gate}@1')
    with server.raw() as s:
        s.sendall(request_bytes(FORWARD, wire.small_bytes(save=True), headers=['Content-Type: application/json']))
        assert eventually(lambda: server.metric('attnd_contexts', state='reserved') == 1)
    assert eventually(lambda: server.metric('attnd_contexts') == 0)
    os.unlink(gate)
    assert eventually(lambda: nothing_is_kept(server)), server.metrics()
