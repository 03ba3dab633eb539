"""GET /metrics: its text has Prometheus' format, lists every metric, and counts correctly."""
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

import service
import wire
from service import eventually
from under_way import Upload

FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'
NAME, LABEL = r'[a-zA-Z_:][a-zA-Z0-9_:]*', r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\n"])*"'


def find_promtool():
    unpacked = os.path.join(service.BUILD, 'tools/usr/bin/promtool')  # by tests/setup.sh
    return shutil.which('promtool') or (unpacked if os.access(unpacked, os.X_OK) else None)


def traffic(server):
    server.post(FORWARD, wire.small_bytes())
    server.post(FORWARD, b'{')
    server.post(BACKWARD, {**wire.small_body(), 'dout': wire.tensor(__import__('numpy').ones((1, 3, 2, 4)))})
    server.get('/nothing')


@pytest.mark.skipif(not find_promtool(), reason='promtool is not here (tests/setup.sh test fetches it)')
def test_promtool_finds_nothing_to_say(server):
    traffic(server)
    page = server.get('/metrics').body
    run = subprocess.run([find_promtool(), 'check', 'metrics'], input=page, capture_output=True, timeout=50)
    assert run.returncode == 0 and not run.stdout.strip() and not run.stderr.strip(), run.stdout + run.stderr


def test_every_line_is_well_formed(server):
    traffic(server)
    answer = server.get('/metrics')
    assert answer.headers['content-type'].startswith('text/plain; version=0.0.4')
    text = answer.body.decode()
    assert text.endswith('\n')
    types, seen = {}, set()
    for line in text.splitlines():
        if line.startswith('# TYPE '):
            _, _, name, kind = line.split()
            assert name not in types, f'{name} twice'
            types[name] = kind
            continue
        if line.startswith('# HELP '):
            assert len(line.split(' ', 3)) == 4
            continue
        m = re.fullmatch(rf'({NAME})(\{{{LABEL}(?:,{LABEL})*\}})? (-?[0-9.e+-]+|\+Inf|NaN)', line)
        assert m, line
        series = m.group(1) + (m.group(2) or '')
        assert series not in seen, f'{series} twice'
        seen.add(series)
        base = re.sub(r'_(bucket|sum|count)$', '', m.group(1))
        assert m.group(1) in types or types.get(base) == 'histogram', line
    for name, kind in types.items():
        assert name.startswith(('attnd_', 'process_')), name
        assert (kind == 'counter') == name.endswith('_total'), name


def test_histograms_are_cumulative(server):
    traffic(server)
    m = server.metrics()
    histograms = {}
    for series, value in m.items():
        if '_bucket{' in series:
            le = re.search(r'le="([^"]+)"', series).group(1)
            key = re.sub(r',?le="[^"]+"', '', series).replace('{}', '')
            histograms.setdefault(key, []).append((float(le.replace('+Inf', 'inf')), value))
    assert histograms
    for key, buckets in histograms.items():
        values = [v for _, v in sorted(buckets)]
        assert values == sorted(values) and buckets[-1][0] == float('inf'), key
        assert m[key.replace('_bucket', '_count')] == values[-1]


def test_answers_are_counted_by_endpoint_and_status(serve):
    # a new server, because the answer to another test's last request may still be counted after it was sent
    server = serve()

    def counts():
        return {k: v for k, v in server.metrics().items() if k.startswith('attnd_requests_total')}
    before = counts()
    for _ in range(3):
        server.post(FORWARD, wire.small_bytes())
    server.post(FORWARD, b'{')
    server.get('/never/heard/of')

    def grown():
        return {k: v - before.get(k, 0) for k, v in counts().items() if v != before.get(k, 0) and 'metrics' not in k}
    assert eventually(lambda: sum(grown().values()) >= 5)
    g = grown()
    assert sum(v for k, v in g.items() if 'forward' in k and 'status="200"' in k) == 3, g
    assert sum(v for k, v in g.items() if 'forward' in k and 'status="400"' in k) == 1, g
    assert sum(v for k, v in g.items() if 'status="404"' in k) == 1 and 'never' not in str(g), g


def test_bodies_and_work_are_counted(serve):
    server = serve()
    names = ('attnd_body_bytes_received_total', 'attnd_body_bytes_sent_total', 'attnd_kernel_seconds_total', 'attnd_flops_total',
             'attnd_tensor_bytes_total')
    before = {n: server.metric(n) for n in names}
    body = wire.small_bytes()
    answer = server.post(FORWARD, body)
    assert eventually(lambda: server.metric('attnd_body_bytes_sent_total') - before['attnd_body_bytes_sent_total'] >= len(answer.body))
    assert eventually(lambda: server.metric('attnd_body_bytes_received_total') - before['attnd_body_bytes_received_total'] == len(body))
    assert server.metric('attnd_kernel_seconds_total') > before['attnd_kernel_seconds_total']
    # work of a forward: 2 (D + Dv) H Sq Sk operations
    assert server.metric('attnd_flops_total') - before['attnd_flops_total'] == 2 * (4 + 4) * 2 * 9
    # bytes of q, k, v, out (3 x 2 x 4 numbers each) and lse
    assert server.metric('attnd_tensor_bytes_total') - before['attnd_tensor_bytes_total'] == 4 * (4 * 3 * 2 * 4 + 2 * 3)


def test_gauges_return_to_rest(server):
    traffic(server)

    def rest():
        m = server.metrics()
        return server.inflight() == 0 and m['attnd_queue_requests'] == 0 and m['attnd_queue_bytes'] == 0 and m['attnd_ready'] == 1
    assert eventually(rest), server.metrics()


def test_stages_are_observed(serve):
    # a new server, because the answer to another test's last request may still be counted after it was sent
    server = serve()

    def count(stage):
        return server.metric('attnd_stage_duration_seconds_count', stage=stage)
    before = {s: count(s) for s in ('recv', 'queue', 'compute')}
    server.post(FORWARD, wire.small_bytes())
    for stage, n in before.items():
        assert eventually(lambda: count(stage) == n + 1), stage


def test_no_stage_took_less_than_no_time(server):
    traffic(server)
    for name, value in server.metrics().items():
        assert value >= 0, f'{name} {value}'


def test_waiting_for_a_body_is_not_charged_for_decoding_it():
    """The time in which the server waits for a body must not count as decoding. Only the last piece of a body is
    decoded after its last byte has come. The sum of each stage may only grow, because Prometheus would take a smaller
    value for a restart."""
    with service.Server() as server:
        for _ in range(20):
            server.post(FORWARD, wire.small_bytes())
            assert server.metric('attnd_stage_duration_seconds_sum', stage='recv') >= 0


def test_what_alerts_watch_is_there_before_it_happens():
    with service.Server('--queue-depth', '7', '--max-connections', '33', '--drain-ms', '4500') as server:
        m = server.metrics()
        for reason in ('queue-full', 'out-of-memory', 'too-large', 'unauthorized', 'unavailable', 'draining', 'connections'):
            assert m['attnd_rejected_total{reason="%s"}' % reason] == 0
        for endpoint in ('forward', 'backward'):
            assert m['attnd_requests_total{endpoint="%s",status="500"}' % endpoint] == 0
        assert (m['attnd_queue_limit_requests'], m['attnd_connections_limit'], m['attnd_drain_limit_seconds']) == (7, 33, 4.5)
        assert m['attnd_drain_seconds'] == 0
        assert m['attnd_device_usable{device="cpu"}'] == 1
        phases = {k: v for k, v in m.items() if k.startswith('attnd_phase{')}
        assert phases == {'attnd_phase{phase="%s"}' % p: p == 'ready' for p in ('starting', 'ready', 'draining', 'failed')}


def test_a_drain_can_be_watched_on_the_address_of_the_metrics():
    port = service.free_port()
    server = service.Server('--metrics-listen', f'127.0.0.1:{port}').start()
    upload = Upload(server)
    server.process.send_signal(signal.SIGTERM)
    main, server.address = server.address, ('127.0.0.1', port)  # from now on the test reads the metrics port

    def draining():
        return server.metric('attnd_phase', phase='draining') == 1
    assert eventually(draining)
    first = server.metric('attnd_drain_seconds')
    time.sleep(0.1)
    assert server.metric('attnd_drain_seconds') >= first + 0.09  # both readings are truncated to milliseconds
    assert server.metric('attnd_ready') == 0 and server.get('/readyz').status == 503 and server.get('/livez').status == 200
    with pytest.raises(ConnectionRefusedError):
        service.socket.create_connection(main)
    assert upload.finish().status == 200
    server.stop()


def test_process_metrics(server):
    m = server.metrics()
    assert m['process_resident_memory_bytes'] > 1 << 20 and m['process_open_fds'] > 3 and m['process_cpu_seconds_total'] >= 0


def test_build_info(server):
    (series,) = [k for k in server.metrics() if k.startswith('attnd_build_info')]
    assert server.get('/v1/info').json()['version'] in series


def test_every_refusal_is_counted_by_its_reason(serve, tmp_path):
    """Every refusal is counted by its reason, in /metrics and in /v1/info. The page at / shows the reasons of
    /metrics."""
    (tmp_path / 'tokens').write_text('alice\n')
    server = serve('--token-file', tmp_path / 'tokens', '--max-body-bytes', '64K')
    alice = {'Authorization': 'Bearer alice'}
    server.page_headers = alice

    def by_reason():
        counters = server.get('/v1/info', alice).json()['counters']
        return {name[len('rejected_'):].replace('_', '-'): n for name, n in counters.items() if name.startswith('rejected_')}
    assert by_reason() == {} and server.get('/v1/info', alice).json()['counters']['rejected'] == 0
    asked = [('POST', FORWARD, b'{}', alice), ('POST', FORWARD, b'{', alice), ('POST', FORWARD, b'{}', {}), ('GET', '/nothing', None, alice), ('GET', FORWARD, None, alice),
             ('POST', FORWARD, b' ' * 70000, alice), ('POST', FORWARD, b'x', {**alice, 'Content-Type': 'image/png'}), ('GET', '/readyz', None, {})]
    for method, path, body, headers in asked:
        server.ask(method, path, body, headers)
    with server.raw() as s:  # libmicrohttpd itself refuses this request, and the refusal must be counted too
        s.sendall(b'POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n')
        s.recv(1000)
    want = {'invalid-request': 2, 'unauthorized': 1, 'not-found': 1, 'method-not-allowed': 1, 'too-large': 1, 'unsupported-media-type': 1, 'invalid-framing': 1}
    assert eventually(lambda: by_reason() == want), by_reason()
    assert server.get('/v1/info', alice).json()['counters']['rejected'] == sum(want.values())
    for code, count in want.items():
        assert server.metric('attnd_rejected_total', reason=code) == count
