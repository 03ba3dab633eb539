"""priority: which of one token's waiting requests leaves first; those of others wait no longer for it."""
import json
import threading

import numpy as np
import pytest

import service
import slow
import wire

FORWARD = '/v1/attention/forward'
INFER = '/v2/models/attention_forward/infer'
ROWS = 8192  # some 40 ms of a core, so that answers come in the order in which requests leave


def problem(priority):
    return FORWARD, slow.body(ROWS, priority=priority)


def inference(priority):
    r = np.random.default_rng(2)
    inputs = [{'name': n, 'shape': [1, ROWS, 1, 4], 'datatype': 'FP32', 'data': r.standard_normal(4 * ROWS).round(3).tolist()} for n in 'qkv']
    return INFER, json.dumps({'inputs': inputs, 'outputs': [{'name': 'lse'}], 'parameters': {'priority': priority, 'softcap': 30.0}}).encode()


@pytest.fixture
def answered(serve, tmp_path):
    """Sends requests, one after the other, while slow ones hold the device: the order in which they are answered."""
    tokens = tmp_path / 'tokens'
    tokens.write_text('alice\nbob\n')
    server = serve('--cpu-threads', '1', '--max-batch', '1', '--token-file', tokens)
    server.page_headers = {'Authorization': 'Bearer alice'}

    class Alice:
        post = staticmethod(lambda path, body: server.post(path, body, server.page_headers))
        metric = staticmethod(server.metric)

    def send(*requests):
        names = []

        def ask(name, token, path, body):
            answer = server.ask('POST', path, body, {'Content-Type': 'application/json', 'Authorization': f'Bearer {token}'})
            assert answer.status == 200, answer
            names.append(name)
        threads = slow.occupy(Alice, slow.calibrated(Alice, 1.0))
        for n, (token, (path, body)) in enumerate(requests):
            threads.append(threading.Thread(target=ask, args=(n, token, path, body)))
            threads[-1].start()
            assert service.eventually(lambda: server.metric('attnd_queue_requests') >= 2 + n), 'the slow ones were too quick'
        for t in threads:
            t.join()
        return names
    return send


def test_the_most_urgent_of_a_token_leaves_first_and_others_keep_their_place(answered):
    # In the queue: a slow one of alice's, and these. Bob's stays the third.
    assert answered(('alice', problem(0)), ('bob', problem(200)), ('alice', problem(127)), ('alice', inference(1))) == [3, 2, 1, 0]


@pytest.mark.parametrize('value', ['-1', '1.5', '"1"'])
def test_what_is_no_priority(server, value):
    answer = server.post(FORWARD, wire.small_bytes()[:-1] + b',"priority":' + value.encode() + b'}')
    assert answer.status == 400 and answer.json()['pointer'] == '/priority' and 'must be an integer from 0' in answer.json()['detail'], answer
    body = json.loads(inference(1)[1])
    body['parameters']['priority'] = json.loads(value)
    answer = server.post(INFER, body)
    assert answer.status == 400 and 'priority' in answer.json()['error'], answer
