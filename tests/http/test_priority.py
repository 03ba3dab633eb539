"""The option `priority` decides which of one token's waiting requests runs first. It must not delay requests of other
tokens."""
import contextlib
import json

import numpy as np
import pytest

import service
import slow
import wire
from service import eventually, request_bytes
from under_way import occupied

FORWARD = '/v1/attention/forward'
INFER = '/v2/models/attention_forward/infer'


def inference(priority, rows):
    r = np.random.default_rng(2)
    inputs = [{'name': n, 'shape': [1, rows, 1, 4], 'datatype': 'FP32', 'data': r.integers(-1, 2, 4 * rows).tolist()} for n in 'qkv']
    return INFER, json.dumps({'inputs': inputs, 'outputs': [{'name': 'lse'}], 'parameters': {'priority': priority, 'softcap': 30.0}}).encode()


def test_the_most_urgent_of_a_token_leaves_first_and_others_wait_for_none_of_them(serve, tmp_path):
    """None of the problems ever ends, so the test cannot see the order of their ends. Instead clients leave in the
    order in which the problems should run. The server counts a client that leaves while its problem runs. The device
    runs one problem of Bob and one of Alice at a time. So the next client leaves only when its problem has reached the
    device."""
    tokens = tmp_path / 'tokens'
    tokens.write_text('alice\nbob\n')
    server = serve('--cpu-threads', '1', '--max-batch', '1', '--token-file', tokens)
    server.page_headers = {'Authorization': 'Bearer alice'}

    class Alice:
        post = staticmethod(lambda path, body: server.post(path, body, server.page_headers))
        metric = staticmethod(server.metric)
    endless = json.loads(slow.calibrated(Alice, 20))

    def problem(priority):
        return FORWARD, json.dumps({**endless, 'priority': priority}).encode()

    def head(token):
        return [f'Authorization: Bearer {token}', 'Content-Type: application/json']

    def queue():
        return server.metric('attnd_queue_requests')
    rows = endless['q']['shape'][1]
    # Bob's request goes to the device at once, beside Alice's first
    asked = [('alice', problem(0)), ('alice', problem(0)), ('bob', problem(200)), ('alice', problem(127)), ('alice', inference(1, rows))]
    with contextlib.ExitStack() as stack:
        clients = []
        with occupied(server, problem(0)[1], head('alice')):
            for n, (token, (path, body)) in enumerate(asked):
                clients.append(stack.enter_context(server.raw()))
                clients[n].sendall(request_bytes(path, body, headers=head(token)))
                wanted = sum(token == 'alice' for token, _ in asked[:n + 1])
                assert eventually(lambda: server.inflight() == n + 3 and queue() == wanted), server.metrics()
        assert eventually(lambda: queue() == 3)
        for n, left in zip([4, 3], [2, 1]):
            running = server.metric('attnd_cancelled_total', state='running')
            clients[n].close()
            assert eventually(lambda: queue() == left, 10 / service.SLOWER), f'the device is not at {asked[n][0]}, {n}'
            assert server.metric('attnd_cancelled_total', state='running') == running + 1, f'{n} was still in the queue'


@pytest.mark.parametrize('value', ['-1', '1.5', '"1"'])
def test_what_is_no_priority(server, value):
    answer = server.post(FORWARD, wire.small_bytes()[:-1] + b',"priority":' + value.encode() + b'}')
    assert answer.status == 400 and answer.json()['pointer'] == '/priority' and 'must be an integer from 0' in answer.json()['detail'], answer
    body = json.loads(inference(1, 3)[1])
    body['parameters']['priority'] = json.loads(value)
    answer = server.post(INFER, body)
    assert answer.status == 400 and 'priority' in answer.json()['error'], answer
