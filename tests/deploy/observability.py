"""Runs a real Prometheus against a real attnd, with the files of deploy/prometheus and deploy/grafana: observability.py
[--seconds 12]

  rules       promtool finds prometheus.yml and alerts.yml valid; alerts_test.yml passes. It has two cases for each
              alert: in one the alert must fire, in the other it must be silent
  scrape      Prometheus finds attnd up, and evaluates all rules without an error
  dashboard   every query of every panel and variable has data after a mix of requests: some are good, and others are
              refused for each reason that a client can cause. The values are printed. Panels of dcgm-exporter need a
              GPU, and only their names are printed
  devices     a second attnd has two devices. One fails after a while (kernels/fake/fake.c), and the metrics show it as
              lost
  alerts      every metric that an alert's expression reads has data. The alerts that the mix causes fire, with windows
              and thresholds cut from minutes to seconds, and all others are silent. Prometheus shows a drain while it
              lasts, and then the server's end

The configuration is the delivered file, except for addresses and intervals."""
import argparse
import base64
import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

import checks
from checks import DEPLOY, Tally, find_program
import service
from service import Server, eventually, free_port

PROMETHEUS = os.path.join(DEPLOY, 'prometheus')
DASHBOARD = os.path.join(DEPLOY, 'grafana', 'attnd.json')
FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'
TOKEN = {'Authorization': 'Bearer observed'}
# Windows of queries in this test. They replace Grafana's $__rate_interval and the minutes in the rules, because
# Prometheus scrapes every second here.
WINDOW = '8s'

# Alerts that the requests of class Mix must cause. All others, except those of EITHER, must be silent.
DESERVED = {'AttndDeviceLost', 'AttndDeviceErrors', 'AttndQueueFull', 'AttndConnectionsRefused', 'AttndTooLarge', 'AttndUnauthorized', 'AttndDeadlines', 'AttndClientsLeave'}
# Alerts that may fire or not, because that depends on the machine's speed.
EITHER = {'AttndSlow', 'AttndQueueWait', 'AttndQueueNearLimit', 'AttndConnectionsNearLimit', 'AttndLogDropped', 'AttndOutOfMemory',
          'AttndStagingNearLimit'}


# ---- The mix of requests ---------------------------------------------------------------------------------------------


def tensor(*shape):
    count = math.prod(shape)
    return {'shape': list(shape), 'dtype': 'float16', 'data': base64.b64encode(b'\x00\x3c' * count).decode()}


def problem(S, H=1, D=8, **more):
    return json.dumps({'q': tensor(1, S, H, D), 'k': tensor(1, S, H, D), 'v': tensor(1, S, H, D), **more}).encode()


class Mix:
    """Threads that each repeat one kind of request at a low rate until they are stopped. Together the kinds cause data
    in every panel."""

    def __init__(self, server):
        self.server, self.stopped, self.threads, self.seen = server, threading.Event(), [], {}
        small, slow = problem(16), self.slow_body()
        self.slow = slow
        self.again(0.05, 'forward', FORWARD, small)
        self.again(0.05, 'backward', BACKWARD, problem(16, dout=tensor(1, 16, 1, 8)))
        self.again(0.05, 'larger', FORWARD, problem(256, 4, 64, causal=True))
        self.again(0.2, 'saved', FORWARD, problem(16, save=True))
        self.again(0.2, 'malformed', FORWARD, b'{')
        self.again(0.2, 'not there', '/v1/nothing', small)
        self.again(0.1, 'too large', FORWARD, b' ' * (8 << 20))
        self.again(0.1, 'no token', FORWARD, small, {})
        self.again(0.1, 'too late', FORWARD, slow, {**TOKEN, 'X-Request-Timeout-Ms': '5'})
        self.start(1.0, self.burst)
        self.start(0.05, self.leave)
        self.start(0.7, self.crowd)

    def also(self, server):
        """Sends small requests to another server too, which has two devices. The first device, which is fast enough for
        all requests, fails."""
        def one():
            status = server.post(FORWARD, problem(16)).status
            self.seen[f'failing {status}'] = self.seen.get(f'failing {status}', 0) + 1
        for _ in range(4):
            self.start(0.03, one)

    def slow_body(self):
        """Makes a problem of a few MB at most that takes about 50 ms on this machine, if nothing else runs."""
        S = 512
        while True:
            body = problem(S, 1, 4, outputs=['lse'])
            answers = [self.server.post(FORWARD, body, TOKEN) for _ in range(5)]
            assert all(answer.status == 200 for answer in answers), answers
            if min(answer.json()['timing_us']['compute'] for answer in answers) > 40e3 or S >= 1 << 15:
                return body
            S *= 2

    def start(self, pause, what):
        def run():
            while not self.stopped.wait(pause):
                try:
                    what()
                except OSError:
                    pass  # the server may refuse or cut the connection, as in ask()
        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def again(self, pause, name, path, body, headers=TOKEN):
        self.start(pause, lambda: self.ask(name, path, body, headers))

    def ask(self, name, path, body, headers=TOKEN):
        try:
            answer = self.server.post(path, body, headers)
        except (OSError, http.client.HTTPException):
            return  # at the moment crowd() holds all connections that the server allows
        key = f'{name} {answer.status}'
        self.seen[key] = self.seen.get(key, 0) + 1

    def burst(self):
        """Sends more slow requests at the same time than --queue-depth allows to wait."""
        threads = [threading.Thread(target=self.ask, args=('burst', FORWARD, self.slow)) for _ in range(10)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    def leave(self):
        """Sends a request and closes the connection while the request waits."""
        with socket.create_connection(self.server.address) as s:
            s.sendall(service.request_bytes(FORWARD, self.slow, headers=['Content-Type: application/json', 'Authorization: Bearer observed']))
            time.sleep(0.03)

    def crowd(self):
        """Opens more connections than --max-connections. Each has a request under way, because the server would close
        idle ones to make room."""
        held = []
        head = f'POST {FORWARD} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer observed\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n'
        try:
            for _ in range(48):
                held.append(socket.create_connection(self.server.address))
                with contextlib.suppress(OSError):
                    held[-1].sendall(head.encode() + b'{"q":')
            time.sleep(0.05)
        finally:
            for s in held:
                s.close()

    def stop(self):
        self.stopped.set()
        for t in self.threads:
            t.join()


# ---- Prometheus ------------------------------------------------------------------------------------------------------


class Prometheus:
    at = None  # the time at which Prometheus evaluates queries; None: now

    def __init__(self, folder, targets):
        self.port = free_port()
        with open(os.path.join(PROMETHEUS, 'prometheus.yml')) as f:
            text = f.read()
        for pattern, new in ((r'15s', '1s'), (r'"attnd:8080"', ', '.join(f'"{t}"' for t in targets)), (r'"dcgm-exporter:9400"', '"127.0.0.1:1"'),
                             (r'- alerts.yml', f'- {PROMETHEUS}/alerts.yml'), (r'localhost:9090', f'127.0.0.1:{self.port}')):
            text, count = re.subn(pattern, new, text)
            assert count, f'{pattern} is not in prometheus.yml any more'
        path = os.path.join(folder, 'prometheus.yml')
        with open(path, 'w') as f:
            f.write(text)
        self.log = open(os.path.join(folder, 'prometheus.log'), 'w+b')
        self.process = subprocess.Popen(
            [find_program('prometheus'), f'--config.file={path}', f'--storage.tsdb.path={folder}/data', f'--web.listen-address=127.0.0.1:{self.port}'],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def api(self, path, **query):
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=20)
        try:
            connection.request('GET', f'/api/v1/{path}?{urllib.parse.urlencode(query, doseq=True)}')
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if answer['status'] != 'success':
            raise ValueError(f'{answer["errorType"]}: {answer["error"]}')
        return answer['data']

    def query(self, expression, at=None):
        """Returns the results of a query as [(labels, value)], without NaN."""
        at = at or self.at
        data = self.api('query', query=expression, **({'time': f'{at:.3f}'} if at else {}))
        found = [(r['metric'], float(r['value'][1])) for r in data['result']]
        return [(m, v) for m, v in found if not math.isnan(v)]

    def ready(self):
        try:
            return [t['health'] for t in self.api('targets')['activeTargets'] if t['labels']['job'] == 'attnd'] == ['up'] * 2
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def moment(self):
        """Waits until both attnd are up and Prometheus has seen a device fail. Returns the time of that moment. Queries
        are then evaluated at that time, so that their results do not depend on how long the queries take. Returns None
        if this does not happen within 60 s."""
        def found():
            at = time.time()
            time.sleep(1.5)  # a scrape that has begun ends within this time
            up = [v for _, v in self.query('up{job="attnd"}', at)]
            return at if up == [1, 1] and self.query('attnd_device_errors_total > 0', at) else None
        return eventually(found, 60)

    def stop(self):
        self.process.terminate()
        self.process.wait(20)
        self.log.close()


def values_text(found, limit=4):
    """Returns the values of a query as text, with the labels in which they differ, such as "forward=12.5
    backward=3"."""
    names = sorted({n for m, _ in found for n in m if len({x.get(n) for x, _ in found}) > 1})
    parts = [(' '.join(m.get(n, '-') for n in names) + '=' if names else '') + f'{v:.4g}' for m, v in found]
    return ', '.join(parts[:limit]) + (f' and {len(parts) - limit} more' if len(parts) > limit else '')


# ---- What is tested --------------------------------------------------------------------------------------------------


def test_rules(tally):
    promtool = find_program('promtool')
    for args in (['check', 'config', 'prometheus.yml'], ['test', 'rules', 'alerts_test.yml']):
        run = subprocess.run([promtool, *args], cwd=PROMETHEUS, capture_output=True, text=True)
        tally.check(f'promtool {" ".join(args)}', run.returncode == 0, '' if run.returncode == 0 else run.stdout + run.stderr)
    names = alert_names()
    with open(os.path.join(PROMETHEUS, 'alerts_test.yml')) as f:
        tested = re.findall(r'^  - name: (\w+) (fires|is silent)$', f.read(), re.M)
    tally.check('each alert is tested both ways', sorted(tested) == sorted((n, way) for n in names for way in ('fires', 'is silent')), f'{len(names)} alerts')


def alert_names():
    with open(os.path.join(PROMETHEUS, 'alerts.yml')) as f:
        return re.findall(r'^      - alert: (\w+)$', f.read(), re.M)


def fill_in(dashboard, expression):
    """Replaces the variables in a query of the dashboard as Grafana does when "All" is selected."""
    expression = expression.replace('$__rate_interval', WINDOW)
    for variable in dashboard['templating']['list']:
        expression = expression.replace('$' + variable['name'], variable.get('allValue', ''))
    assert '$' not in expression, expression
    return expression


def test_dashboard(tally, prometheus):
    with open(DASHBOARD) as f:
        dashboard = json.load(f)
    for variable in dashboard['templating']['list']:
        if variable['type'] == 'query':
            series, label = re.fullmatch(r'label_values\((.*), (\w+)\)', variable['query']['query']).groups()
            found = prometheus.api(f'label/{label}/values', **{'match[]': fill_in(dashboard, series)})
            tally.check(f'variable {variable["name"]}', bool(found), ', '.join(found))
    gpu = []
    queries = [(p['title'], fill_in(dashboard, t['expr'])) for p in dashboard['panels'] for t in p.get('targets', ())]
    for title, expression in queries:
        if 'DCGM_' in expression:
            prometheus.query(expression)  # this query may have no data, but it must be valid
            gpu.append(title)
            continue
        found = prometheus.query(expression)
        tally.check(f'panel "{title}" has data', bool(found), values_text(found) if found else expression)
        print(f'            {expression}')
    for annotation in dashboard['annotations']['list']:
        # an annotation's query may have no data, but it must be valid
        prometheus.query(fill_in(dashboard, annotation['expr']))
    print(f'        needs a GPU and dcgm-exporter: {", ".join(gpu)}')
    panels = [p for p in dashboard['panels'] if p['type'] != 'row']
    tally.check('panels have titles, ids of their own, and do not overlap', well_placed(panels), f'{len(panels)} panels')


def well_placed(panels):
    cells = [(x, y) for p in panels for x in range(p['gridPos']['x'], p['gridPos']['x'] + p['gridPos']['w'])
             for y in range(p['gridPos']['y'], p['gridPos']['y'] + p['gridPos']['h'])]
    return len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24 and all(p['title'] for p in panels) and \
        len({p['id'] for p in panels}) == len(panels)


def rules(prometheus):
    return [r for g in prometheus.api('rules')['groups'] for r in g['rules']]


def shorter(expression):
    """Returns the expression with its windows of minutes cut to seconds."""
    expression = re.sub(r'\[\d+m\]', f'[{WINDOW}]', expression)
    return re.sub(r'offset \d+m', f'offset {WINDOW}', expression)


def test_alerts(tally, prometheus):
    found = rules(prometheus)
    ill = [(r['name'], r.get('lastError')) for r in found if r['health'] != 'ok']
    tally.check('every rule is evaluated without an error', not ill and len(found) == len(alert_names()), ill or f'{len(found)} rules')
    selectors = sorted({s for r in found for s in re.findall(r'\b(?:attnd|process)_\w+(?:\{[^}]*\})?|\bup\{[^}]*\}', r['query'])})
    for s in selectors:
        has = prometheus.query(s)
        tally.check(f'alerts read {s}', bool(has), values_text(has, 3))
    for r in found:
        fires = prometheus.query(shorter(r['query']))
        if r['name'] in EITHER:
            print(f'        {r["name"]}: {"fires, " + values_text(fires) if fires else "silent"} (either is right)')
        else:
            tally.check(f'{r["name"]} {"fires" if r["name"] in DESERVED else "is silent"}', bool(fires) == (r['name'] in DESERVED), values_text(fires) if fires else '')


def test_end(tally, prometheus, server):
    """Checks what Prometheus shows while an upload delays a drain, and after the server has ended."""
    upload = service.Upload(server, service.request_bytes(FORWARD, problem(16), headers=['Content-Type: application/json', 'Authorization: Bearer observed']), tail=400)
    time.sleep(0.2)
    server.process.send_signal(signal.SIGTERM)
    tally.check('a drain is seen', bool(eventually(lambda: prometheus.query('attnd_phase{phase="draining"} == 1'), 20)))
    slow, count = re.subn(r'\b0\.8 \*', '0.05 *', next(r['query'] for r in rules(prometheus) if r['name'] == 'AttndDrainSlow'))
    assert count == 1, 'AttndDrainSlow does not fire at 0.8 of the limit any more'
    fires = eventually(lambda: prometheus.query(slow), 20, 0.1)
    tally.check('AttndDrainSlow fires, here from a twentieth of the limit on', bool(fires), values_text(fires))
    answer = upload.finish()
    tally.check('what was accepted is answered', answer.status == 200, answer.status)
    server.stop()
    down = next(r['query'] for r in rules(prometheus) if r['name'] == 'AttndDown')
    tally.check('AttndDown fires', bool(eventually(lambda: prometheus.query(down), 10, 0.1)))


def run(tally, seconds):
    with tempfile.TemporaryDirectory(prefix='attnd-observability-') as folder:
        tokens = os.path.join(folder, 'tokens')
        with open(tokens, 'w') as f:
            f.write('observed\n')
        os.chmod(tokens, 0o600)
        metrics = f'127.0.0.1:{free_port()}'
        server = Server('--metrics-listen', metrics, '--token-file', tokens, '--queue-depth', '4', '--max-body-bytes', '4M', '--max-connections', '32',
                        '--cpu-threads', '1', '--drain-ms', '60000', '--allow-shm', 'observed_', '--log-level', 'error').start()
        failing = Server('--cpu-threads', '1', '--log-level', 'error', binary=service.FAKE,
                         env={'ATTN_FAKE_DEVICES': '2', 'ATTN_FAKE_SCRIPT': '0:sync.err=700@5'}).start()
        prometheus = mix = None
        try:
            prometheus = Prometheus(folder, [metrics, f'127.0.0.1:{failing.port}'])
            if not tally.check('Prometheus finds attnd up', bool(eventually(prometheus.ready, 20, 0.1))):
                return
            mix = Mix(server)
            time.sleep(seconds)
            # requests to the server whose device fails begin only now, because the windows of the queries must contain
            # the failure
            mix.also(failing)
            prometheus.at = prometheus.moment()
            if not tally.check('Prometheus sees both attnd, and the failure of a device', bool(prometheus.at)):
                return
            test_dashboard(tally, prometheus)
            test_alerts(tally, prometheus)
            prometheus.at = None
            mix.stop()
            print(f'        the mix saw: {", ".join(f"{n} x {k}" for k, n in sorted(mix.seen.items()))}')
            mix = None
            test_end(tally, prometheus, server)
            failing.stop()
        finally:
            if mix:
                mix.stop()
            if prometheus:
                prometheus.stop()
            server.kill()
            failing.kill()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--seconds', type=int, default=12, help='of requests before the queries')
    a = ap.parse_args()
    tally = Tally()
    if not tally.missing('promtool'):
        test_rules(tally)
    if not tally.missing('prometheus'):
        run(tally, a.seconds)
    return tally.end()


if __name__ == '__main__':
    sys.exit(main())
