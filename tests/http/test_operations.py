"""Probes, /v1/info, /openapi.json and the page, and schemathesis against the running server."""
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

import service
import slow
import wire
from under_way import occupied

FORWARD = '/v1/attention/forward'


@pytest.mark.parametrize('path', ['/livez', '/healthz', '/health', '/v2/health/live', '/readyz', '/v2/health/ready'])
@pytest.mark.parametrize('method', ['GET', 'HEAD'])
def test_probes(server, path, method):
    assert server.ask(method, path).status == 200


def test_info(server):
    info = server.get('/v1/info').json()
    text = json.dumps(info)
    assert re.fullmatch(r'\d+\.\d+\.\d+', info['version'])
    for word in ('cpu', 'float32', 'float16', 'bfloat16', 'float8_e4m3fn', '1024'):
        assert word in text, word


@pytest.mark.parametrize('path', ['/', '/docs'])
def test_the_pages(server, path):
    answer = server.get(path)
    assert answer.status == 200 and answer.headers['content-type'].startswith('text/html')
    assert 'content-security-policy' in answer.headers
    text = answer.body.decode()
    assert '<!doctype html>' in text.lower() and not re.search(r'(src|href)="https?://', text)


# ---- OpenAPI ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def document(shared_server):
    answer = shared_server.get('/openapi.json')
    assert answer.status == 200 and answer.headers['content-type'].startswith('application/json')
    return answer.json()


def test_openapi_is_31_and_names_every_route(document):
    assert document['openapi'].startswith('3.1') and document['info']['version']
    for path in ('/v1/attention/forward', '/v1/attention/backward', '/livez', '/readyz', '/metrics', '/v1/info', '/openapi.json', '/', '/docs'):
        assert path in document['paths'], path
    for path, item in document['paths'].items():
        for method, operation in item.items():
            assert operation['responses'], (path, method)


def members_of_the_contract():
    """Returns the members of a forward and of a backward in the contract. The names of tensors are read from the C
    header, because a list of them in this test would become outdated."""
    with open(os.path.join(service.HERE, '../kernels/attention.h')) as f:
        rows = re.findall(r'^    X\((\w+), (IN|OUT|IN_BACK|OUT_BACK),', f.read(), re.M)
    options = {'layout', 'scale', 'causal', 'window', 'alignment', 'softcap', 'dropout_p', 'seed', 'outputs', 'encoding'}
    forward = {n for n, role in rows if role == 'IN'} | options | {'out_dtype', 'verify', 'save'}
    backward = {n for n, role in rows if role in ('IN', 'IN_BACK')} | options | {'out', 'lse', 'context', 'deterministic', 'grad_dtype'}
    return {'forward': forward, 'backward': backward}


def resolve(document, schema):
    while '$ref' in schema:
        node = document
        for part in schema['$ref'].lstrip('#/').split('/'):
            node = node[part.replace('~1', '/').replace('~0', '~')]
        schema = node
    return schema


def all_properties(document, schema, found=None, depth=0):
    found = {} if found is None else found
    schema = resolve(document, schema)
    found.update(schema.get('properties', {}))
    for part in ('oneOf', 'anyOf', 'allOf'):
        for s in schema.get(part, []):
            if depth < 6:
                all_properties(document, s, found, depth + 1)
    return found


@pytest.mark.parametrize('op', ['forward', 'backward'])
def test_openapi_documents_every_member(document, op):
    schema = document['paths'][f'/v1/attention/{op}']['post']['requestBody']['content']['application/json']['schema']
    documented = all_properties(document, schema)
    missing = members_of_the_contract()[op] - set(documented)
    assert not missing, f'not documented: {sorted(missing)}'


@pytest.mark.parametrize('op', ['forward', 'backward'])
def test_openapi_documents_every_status_that_the_route_answers(document, op):
    statuses = set(document['paths'][f'/v1/attention/{op}']['post']['responses'])
    assert {'200', '400', '408', '413', '415', '422', '500', '503', '504'} <= statuses, statuses


def test_every_tag_has_a_name_for_people(server, document):
    """Every tag of the OpenAPI document has a name for people. In an earlier version /docs had the heading "Kserve",
    because a style capitalised the first letter."""
    shown = {tag['name']: tag['x-displayName'] for tag in document['tags']}
    assert shown['kserve'] == 'KServe'
    assert {tag for item in document['paths'].values() for op in item.values() for tag in op['tags']} <= set(shown)
    page = server.get('/docs').body
    assert b'text-transform' not in page and b"tag['x-displayName']" in page


def test_openapi_has_no_dangling_reference(document):
    def walk(node):
        if isinstance(node, dict):
            if isinstance(node.get('$ref'), str):
                resolve(document, node)
            for v in node.values():
                walk(v)
        elif isinstance(node, list):
            for v in node:
                walk(v)
    walk(document)


def test_openapi_examples_are_served(server, document):
    """Every example request of the OpenAPI document is served. Examples about caches name a cache that does not exist,
    so the test replaces its id by that of a cache that does."""
    tried, cache = 0, server.post('/v1/caches', {'kv_heads': 1, 'head_dim': 2, 'dtype': 'float32'}).json()['id']
    for path, item in document['paths'].items():
        content = item.get('post', {}).get('requestBody', {}).get('content', {}).get('application/json', {})
        examples = [content['example']] if 'example' in content else []
        for example in list(content.get('examples', {}).values()):
            examples.append(example['value'])
        for body in examples:
            if 'context' in body:
                continue  # this example names the context of a forward that was never sent
            named = {p['name']: p['example'] for p in item['post']['parameters'] if p.get('in') == 'path'}
            if 'id' in named:
                named['id'] = cache
            if 'caches' in body:
                body = {**body, 'caches': [cache]}
            answer = server.post(path.format(**named), body)
            assert answer.status == 200, (path, answer)
            tried += 1
    assert tried >= 8


def find_schemathesis():
    here = os.path.join(service.BUILD, 'venv/bin/st')
    return os.environ.get('SCHEMATHESIS') or (here if os.access(here, os.X_OK) else shutil.which('st'))


@pytest.mark.limit(400)
@pytest.mark.skipif(not find_schemathesis(), reason='schemathesis is not here (tests/setup.sh test fetches it from PyPI)')
def test_schemathesis(server, tmp_path):
    """schemathesis makes valid and invalid requests from the OpenAPI document. Every answer must be one that the
    document promises."""
    run = subprocess.run(
        [find_schemathesis(), '--config-file', os.path.join(service.HERE, 'http/schemathesis.toml'), 'run', f'{server.url}/openapi.json', '--checks', 'all', '--max-examples', service.SETTINGS.get('ATTND_EXAMPLES', '40'),
         '--phases', 'examples,coverage,fuzzing', '--seed', '1', '--request-timeout', '20', '--no-color'],
        cwd=tmp_path, env=dict(os.environ, SCHEMATHESIS_HOOKS='schemathesis_hooks', PYTHONPATH=os.path.join(service.HERE, 'http')),
        capture_output=True, text=True, timeout=390 * service.SLOWER)
    assert run.returncode == 0, run.stdout[-12000:] + run.stderr[-3000:]


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.limit(180)
@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('back', [False, True])
def test_neighbours_change_no_bit(server, dtype, back):
    """The same request is sent alone, then while random other requests are under way, and then as one of several
    problems in a body (an envelope). Its answer must always have the same bits."""
    import threading
    rng = np.random.default_rng(9)
    path = '/v1/attention/' + ('backward' if back else 'forward')
    names = ('dq', 'dk', 'dv') if back else ('out', 'lse')

    def problem(r):
        H, Hk = [(1, 1), (2, 1), (4, 2)][int(r.integers(3))]
        return wire.random_problem(r, B=int(r.integers(1, 3)), Sq=int(r.integers(1, 150)), Sk=int(r.integers(1, 300)), H=H, Hk=Hk,
                                   D=int(r.integers(1, 80)), dtype=['float32', 'float16', 'bfloat16'][int(r.integers(3))],
                                   back=back, causal=bool(r.integers(2)))[0]
    subjects = [wire.random_problem(rng, Sq=Sq, Sk=Sk, H=4, Hk=2, D=64, dtype=dtype, back=back, causal=True)[0] for Sq, Sk in ((1, 700), (130, 130), (67, 259))]
    alone = [[server.post(path, s).json()[n]['data'] for n in names] for s in subjects]
    stop, failures = threading.Event(), []

    def neighbour(seed):
        r = np.random.default_rng(seed)
        connection = server.connect()
        while not stop.is_set():
            answer = connection.ask('POST', path, problem(r))
            if answer.status != 200:
                failures.append(answer)
        connection.close()
    threads = [threading.Thread(target=neighbour, args=(s,)) for s in range(6)]
    for t in threads:
        t.start()
    try:
        for i in range(20 if service.SLOWER == 1 else 5):
            for s, want in zip(subjects, alone):
                assert [server.post(path, s).json()[n]['data'] for n in names] == want
            mixed = [problem(rng) for _ in range(int(rng.integers(1, 6)))]
            at = int(rng.integers(0, len(mixed) + 1))
            j = i % len(subjects)
            many = server.post(path, {'requests': mixed[:at] + [subjects[j]] + mixed[at:]}).json()['responses']
            assert [many[at][n]['data'] for n in names] == alone[j]
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not failures, failures[0]


@pytest.mark.limit(120)
def test_the_number_of_threads_changes_no_bit(serve):
    rng = np.random.default_rng(10)
    problems = [wire.random_problem(rng, B=2, Sq=Sq, Sk=Sk, H=4, Hk=1, D=64, dtype=dtype, back=True, causal=True)[0]
                for Sq, Sk in ((1, 3000), (257, 300)) for dtype in ('float32', 'bfloat16')]
    want = None
    for threads in (1, 2, 3, 7):
        server = serve('--cpu-threads', threads)
        forward = [{n: t for n, t in p.items() if n != 'dout'} for p in problems]
        got = [[a[n] for n in ('out', 'lse')] for a in (server.post(FORWARD, p).json() for p in forward)]
        got += [[a[n] for n in ('dq', 'dk', 'dv')] for a in (server.post('/v1/attention/backward', p).json() for p in problems)]
        want = want or got
        assert got == want, f'{threads} threads'


@pytest.mark.limit(120)
def test_a_small_problem_passes_by_those_that_wait_for_the_processor(serve):
    """The HTTP thread that receives a small problem computes it itself, so the problem does not wait for the device.
    The metrics and the times in the answer count it as a batch of one."""
    server = serve('--cpu-threads', 1, '--max-batch', 1)
    with occupied(server, slow.calibrated(server, 20), queued=1):
        counts = [server.metric(n) for n in ('attnd_device_batches_total', 'attnd_batch_size_count', 'attnd_flops_total')]
        for path in ('forward', 'backward'):
            problem = wire.random_problem(np.random.default_rng(3), Sq=64, H=2, D=32, back=path == 'backward')[0]
            answer = server.post('/v1/attention/' + path, problem).json()
            assert answer['timing_us']['queue'] == 0 and answer['timing_us']['compute'] > 0 and answer['backend'].startswith('cpu ')
        assert server.metric('attnd_queue_requests') == 1 and server.metric('attnd_inflight_requests', state='running') == 2, 'it waited'
        after = [server.metric(n) for n in ('attnd_device_batches_total', 'attnd_batch_size_count', 'attnd_flops_total')]
        assert after == [counts[0] + 2, counts[1] + 2, counts[2] + 3.5 * 4 * 64 * 64 * 32 * 2]
    assert service.eventually(lambda: server.get('/v1/info').json()['devices'][0]['running_requests'] == 0)
    # The HTTP thread does not compute these two problems, because they are not small. The first has many heads (in 129
    # batch rows), and the second many scores. A head size of 1 is padded.
    for what in ({'B': 129, 'Sq': 1, 'D': 1}, {'Sq': 300, 'D': 1, 'H': 1}):
        assert server.post(FORWARD, wire.random_problem(np.random.default_rng(3), **{'H': 1, **what})[0]).json()['timing_us']['queue'] > 0, what
