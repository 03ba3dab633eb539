"""Device time is shared between callers. A caller is a token, or a connection if there are no tokens."""
import contextlib
import json

import pytest

import slow
import wire
from service import eventually, request_bytes

FORWARD = '/v1/attention/forward'
JSON = 'Content-Type: application/json'


def head(token):
    return [JSON] + ([f'Authorization: Bearer {token}'] if token else [])


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / 'tokens'
    path.write_text('alice-secret # alice\n\nbob-secret\n')
    return path


def endless():
    """Makes work that takes longer than any test, but no more than the server lets a request take (--max-seconds)."""
    return slow.body(150000)


def queued(seed=1):
    """Makes work that is too large for the HTTP thread that receives it, but that a device computes soon."""
    return slow.body(700, seed=seed)


@contextlib.contextmanager
def flood(server, count, token=None, body=None):
    """Sends `count` requests, each on its own connection, and waits until at least one runs."""
    with contextlib.ExitStack() as stack:
        for n in range(count):
            stack.enter_context(server.raw()).sendall(request_bytes(FORWARD, body or endless(), headers=head(token)))
            assert eventually(lambda: server.inflight() >= n + 1), server.metrics()
        assert eventually(lambda: server.metric('attnd_inflight_requests', state='running') >= 1), server.metrics()
        yield


@pytest.mark.parametrize('threads', [1, 2])
def test_a_token_that_keeps_all_streams_busy_holds_up_nobody_else(serve, tokens, threads):
    server = serve('--cpu-threads', str(threads), '--token-file', tokens)
    server.page_headers = {'Authorization': 'Bearer alice-secret'}
    with flood(server, 5, 'bob-secret'):
        for seed in range(5):
            answer = server.post(FORWARD, queued(seed), {'Authorization': 'Bearer alice-secret'})
            assert answer.status == 200, answer
        assert server.metric('attnd_inflight_requests', state='running') + server.metric('attnd_queue_requests') >= 5, server.metrics()


def test_without_tokens_a_connection_is_a_caller(serve):
    """Without tokens each connection is a caller. Pipelined requests of one connection run one after the other, and a
    request of another connection runs beside them."""
    server = serve('--cpu-threads', '1')
    with flood(server, 1):
        assert server.post(FORWARD, queued()).status == 200
        assert server.metric('attnd_inflight_requests', state='running') >= 1, server.metrics()


def test_checks_and_verification_of_one_token_leave_threads_to_another(serve, tokens):
    """Bob sends more requests than there are threads that verify, and each has many rows to verify. The server must
    still keep a thread free for Alice."""
    server = serve('--cpu-threads', '2', '--token-file', tokens)
    server.page_headers = {'Authorization': 'Bearer alice-secret'}
    verified = json.loads(slow.body(20000, outputs=['out']))
    verified['verify'] = 4000
    with flood(server, 12, 'bob-secret', json.dumps(verified).encode()):
        own = slow.body(700, outputs=['out'], verify=2)
        answer = server.post(FORWARD, own, {'Authorization': 'Bearer alice-secret'})
        assert answer.status == 200 and answer.json()['verification']['rows'] == 2, answer


def test_metrics_have_the_time_of_each_token_by_its_name(serve, tokens):
    server = serve('--cpu-threads', '2', '--token-file', tokens)
    server.page_headers = {'Authorization': 'Bearer alice-secret'}

    def spent(caller):
        return server.metric('attnd_caller_seconds_total', caller=caller, work='device')
    for token, caller, other in [('alice-secret', 'alice', 'line 3'), ('bob-secret', 'line 3', 'alice')]:
        # the first body is computed by the HTTP thread that receives it, and the second by a device
        for body in (wire.small_bytes(), queued()):
            before = spent(caller), spent(other)
            assert server.post(FORWARD, body, {'Authorization': f'Bearer {token}'}).status == 200
            assert spent(caller) > before[0] and spent(other) == before[1], server.metrics()
    assert 'secret' not in server.metrics()


def test_metrics_have_the_time_of_connections_without_tokens_in_one_place(server):
    before = server.metric('attnd_caller_seconds_total', caller='everybody', work='device')
    assert server.post(FORWARD, wire.small_bytes()).status == 200
    assert server.metric('attnd_caller_seconds_total', caller='everybody', work='device') > before
