"""Three attnd behind a real NGINX and a real Envoy, with the files of deploy/: scaleout.py [--proxies nginx,envoy]
[--seconds 4]

For each proxy, on free ports of this machine:

  sessions   requests with the same X-Session-Id reach the same server, as the servers' own counters show, and other
             requests spread; a backward reaches the server that saved its forward
  bodies     a body of 20 MB passes unchanged and is not stored on the way; a body over the limit is refused with a
             problem document
  SIGTERM    wrk loads the proxy, and one attnd gets SIGTERM: no request fails, and that attnd ends with status 0
  SIGKILL    wrk loads the proxy, and one attnd is killed: only requests that it had at that moment fail, and none after
             RECOVERED_S
  moving     after that, the other servers' sessions stay where they were, and those of the dead server move to others
  return     the killed server is started again on its address, and gets requests within RETURNED_S

The proxy's configuration is the delivered file, except for addresses, ports and the place of the log.
"""
import argparse
import base64
import collections
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import checks
from checks import DEPLOY, Tally, find_program
import service
from service import Server, eventually, free_port

SERVERS = 3
CONNECTIONS = 16
# Seconds. NGINX's fail_timeout and the interval of Envoy's health check are 2 s each. The other 2 s allow for a loaded
# machine.
RECOVERED_S = 4.0
# Seconds. The two intervals may follow each other, and the machine may be loaded. The measured time is printed.
RETURNED_S = 15.0
FORWARD, BACKWARD = '/v1/attention/forward', '/v1/attention/backward'
SMALL_LUA = os.path.join(checks.ROOT, 'tests', 'load', 'small.lua')


def tensor(shape, value=b'\x00\x3c'):
    count = 1
    for n in shape:
        count *= n
    return {'shape': shape, 'dtype': 'float16', 'data': base64.b64encode(value * count).decode()}


def problem(S=2, **more):
    return {'q': tensor([1, S, 1, 8]), 'k': tensor([1, S, 1, 8]), 'v': tensor([1, S, 1, 8]), **more}


# ---- The proxies -----------------------------------------------------------------------------------------------------


class Proxy:
    """A proxy as a child process that listens on self.port. It inherits from Server the methods that send requests."""
    url = property(lambda self: f'http://127.0.0.1:{self.port}')

    def __init__(self, ports, folder):
        self.port, self.address, self.tls = free_port(), None, None
        self.address = ('127.0.0.1', self.port)
        self.folder = folder
        self.log_path = os.path.join(folder, f'{self.name}.log')
        command = self.configure(ports)
        with open(self.log_path, 'wb') as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def up(self):
        try:
            return self.ask('GET', '/readyz').status == 200
        except (OSError, http.client.HTTPException):
            return False

    def ask(self, method, path, body=None, headers=()):
        connection = service.Connection(self.address, 60)
        try:
            return connection.ask(method, path, body, headers)
        finally:
            connection.close()

    def log(self):
        with open(self.log_path, 'rb') as f:
            return f.read().decode('utf-8', 'replace')

    def knows_all(self):
        return True

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def replace_once_or_more(text, pattern, new):
    changed, count = re.subn(pattern, new, text)
    assert count, f'{pattern} is not in the file any more'
    return changed


class Nginx(Proxy):
    name = 'nginx'
    # after one server died: the largest fraction of the other servers' sessions that may move to another server
    may_stray = 0

    def configure(self, ports):
        with open(os.path.join(DEPLOY, 'nginx', 'attnd.conf')) as f:
            text = f.read()
        line = re.search(r'^ *server attnd-1:8080( [^;]*);\n', text, re.M)
        text = replace_once_or_more(text, r'(?: *server attnd-\d:8080[^;]*;\n)+',
                                    ''.join(f'    server 127.0.0.1:{p}{line.group(1)};\n' for p in ports))
        text = replace_once_or_more(text, r'listen 80;', f'listen 127.0.0.1:{self.port};')
        text = replace_once_or_more(text, r'/var/log/nginx/access.log', f'{self.folder}/access.log')
        with open(os.path.join(self.folder, 'attnd.conf'), 'w') as f:
            f.write(text)
        temp = ''.join(f'    {kind}_temp_path {self.folder}/{kind};\n' for kind in ('client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi'))
        main = os.path.join(self.folder, 'nginx.conf')
        with open(main, 'w') as f:
            f.write(('user root;\n' if os.geteuid() == 0 else '') + f'daemon off;\nworker_processes 2;\npid {self.folder}/nginx.pid;\n'
                    f'error_log stderr warn;\nevents {{ worker_connections 1024; }}\nhttp {{\n{temp}    include {self.folder}/attnd.conf;\n}}\n')
        self.command = [find_program('nginx'), '-e', 'stderr', '-p', self.folder, '-c', main]
        return self.command

    def check_configuration(self):
        run = subprocess.run(self.command + ['-t'], capture_output=True, text=True)
        return run.returncode == 0 and 'warn' not in run.stderr, run.stderr.strip().splitlines()[-1]

    def failures(self):
        """Returns the lines of NGINX's access log for requests that got a 502 or 504."""
        with open(os.path.join(self.folder, 'access.log')) as f:
            return [line.rstrip() for line in f if re.search(r' status=50[24] ', line)]

    def servers_of_failures(self):
        return collections.Counter(re.search(r' server=(.*?) server_status=', line).group(1) for line in self.failures())

    def stored_bodies(self):
        return self.log().count('temporary file')


class Envoy(Proxy):
    name = 'envoy'
    may_stray = 0.1  # Envoy's table of sessions (Maglev) promises only that few sessions move

    def configure(self, ports):
        with open(os.path.join(DEPLOY, 'envoy', 'envoy.yaml')) as f:
            text = f.read()
        endpoint = '              - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {} }} }} }}\n'
        text = replace_once_or_more(text, r'(?: *- endpoint: .*attnd-\d.*\n)+', ''.join(endpoint.format(p) for p in ports))
        text = replace_once_or_more(text, r'address: 0\.0\.0\.0, port_value: 8080', f'address: 127.0.0.1, port_value: {self.port}')
        self.admin = ('127.0.0.1', free_port())
        text = replace_once_or_more(text, 'port_value: 9901', f'port_value: {self.admin[1]}')
        path = os.path.join(self.folder, 'envoy.yaml')
        with open(path, 'w') as f:
            f.write(text)
        self.check = [find_program('envoy'), '--mode', 'validate', '-c', path]
        return [find_program('envoy'), '-c', path, '--concurrency', '2', '--log-level', 'warning', '--disable-hot-restart']

    def check_configuration(self):
        run = subprocess.run(self.check, capture_output=True, text=True)
        said = (run.stdout + run.stderr).strip().splitlines()
        return run.returncode == 0 and not any('deprecated' in line.lower() for line in said), said[-1]

    def knows_all(self):
        """Returns whether Envoy has asked each server of both its clusters for its health."""
        connection = service.Connection(self.admin, 10)
        page = connection.ask('GET', '/clusters').body.decode()
        connection.close()
        return len(re.findall(r'^attnd\w*::127\.0\.0\.1:\d+::health_flags::healthy$', page, re.M)) == 2 * SERVERS

    def failures(self):
        """Returns the lines of Envoy's log for failed requests. A flag gives the reason. UC: the server closed the
        connection; UF: no connection; UH: no healthy server; UO, URX: a limit of the configuration."""
        return [line for line in self.log().splitlines() if re.search(r' status=50[234] ', line)]

    def servers_of_failures(self):
        return collections.Counter(re.search(r' server=(\S*)', line).group(1) for line in self.failures())

    def stored_bodies(self):
        return 0  # Envoy never stores a body in a file


# ---- What is tested --------------------------------------------------------------------------------------------------


def forwards(servers):
    return [s.metric('attnd_requests_total', endpoint='forward') for s in servers]


def process_of(proxy, servers, session, times=1):
    """Sends `times` requests of one session. Returns for each the index of the server that answered it, from the
    servers' own counters."""
    before = forwards(servers)
    for _ in range(times):
        answer = proxy.ask('POST', FORWARD, problem(), {'X-Session-Id': session})
        assert answer.status == 200, answer
    eventually(lambda: sum(forwards(servers)) - sum(before) >= times, 3)
    return [i for i, (a, b) in enumerate(zip(before, forwards(servers))) for _ in range(round(b - a))]


def settle(servers):
    """When wrk ends, it does not wait for the answers to its last requests. Waits until the servers have sent these
    answers."""
    def still():
        before = forwards(servers)
        time.sleep(0.2)
        return forwards(servers) == before
    eventually(still, 10)


def start_wrk(url, seconds, *words):
    line = [find_program('wrk'), '-t1', f'-c{CONNECTIONS}', f'-d{seconds}s', '--timeout', '20s', '-s', SMALL_LUA, url, '--', 'statuses=1', *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wrk_result(wrk):
    out, err = wrk.communicate(timeout=90)
    found = re.search(r'^RESULT (.*)$', out, re.M)
    assert found, out + err
    return json.loads(found.group(1))


def seen(r):
    errors = ', '.join(f'{r[k]} {k.replace("_", " ")}' for k in ('connect_errors', 'read_errors', 'write_errors', 'timeouts'))
    statuses = ', '.join(f'{n} x {s}' for s, n in sorted(r['statuses'].items()))
    return f'{statuses}; {errors}; p50 {r["p50_ms"]:.1f} ms, p99 {r["p99_ms"]:.1f} ms, longest {r["max_ms"]:.0f} ms'


def test_sessions(tally, proxy, servers):
    where, split = {}, []
    for i in range(24):
        session = f'session-{i}'
        reached = process_of(proxy, servers, session, times=3)
        if len(set(reached)) != 1:
            split.append((session, reached))
        where[session] = collections.Counter(reached).most_common(1)[0][0]
    spread = collections.Counter(where.values())
    tally.check(f'{proxy.name}: requests of one session reach one process', not split, split or '24 sessions of 3 requests each')
    tally.check(f'{proxy.name}: sessions spread over the processes', len(spread) == len(servers), [spread[i] for i in range(len(servers))])

    statuses = []
    for i in range(12):
        headers = {'X-Session-Id': f'context-{i}'}
        context = proxy.ask('POST', FORWARD, problem(save=True), headers).json()['context']
        statuses.append(proxy.ask('POST', BACKWARD, {'context': context, 'dout': tensor([1, 2, 1, 8])}, headers).status)
    tally.check(f'{proxy.name}: a backward finds the context of its forward', set(statuses) == {200}, dict(collections.Counter(statuses)))
    return where


def test_bodies(tally, proxy):
    big = problem(S=400_000)  # q, k and v are 8.5 MB each in base64
    big = {**big, 'q': tensor([1, 1, 1, 8])}
    answer = proxy.ask('POST', FORWARD, big, {'X-Request-Id': 'scaleout-1'})
    body = len(json.dumps(big))
    tally.check(f'{proxy.name}: a body of {body / 1e6:.0f} MB goes through, its id with it',
                answer.status == 200 and answer.headers.get('x-request-id') == 'scaleout-1', answer.status)
    tally.check(f'{proxy.name}: bodies are not stored on the way', proxy.stored_bodies() == 0)

    # Content-Length announces more than 1 GiB, and no byte of the body is sent
    with service.socket.create_connection(proxy.address) as s:
        s.settimeout(20)
        s.sendall(service.request_bytes(FORWARD, b'', headers=['Content-Type: application/json', f'Content-Length: {3 << 30}', 'Connection: close']))
        answer = service.RawReader(s).answer()
    document = answer.json()
    tally.check(f'{proxy.name}: a body over the limit is refused with a problem document',
                answer.status == 413 and document['status'] == 413 and document['error'], answer.body.decode()[:120])
    answer = proxy.ask('GET', '/metrics')
    tally.check(f'{proxy.name}: /metrics of a random server is not shown', answer.status == 404)


def test_end_one(tally, proxy, servers, sig, seconds):
    """Runs wrk for `seconds`, and sends the last server the signal after a third of that time. Returns the time of the
    signal."""
    name, victim = signal.Signals(sig).name, servers[-1]
    before, failed_before = forwards(servers), len(proxy.failures())
    wrk = start_wrk(proxy.url, seconds)
    time.sleep(seconds / 3)
    had = victim.metric('attnd_requests_total', endpoint='forward') - before[-1]
    waiting = victim.inflight()
    at_ms = time.time() * 1000
    if sig == signal.SIGKILL:
        victim.kill()
    else:
        victim.stop(sig)  # stop() fails unless the server ends with status 0
        drained_ms = time.time() * 1000 - at_ms
    result = wrk_result(wrk)
    left = [b - a for a, b in zip(before, forwards(servers[:-1]))]
    bad = sum(n for s, n in result['statuses'].items() if s != '200')
    lost = bad + result['socket_errors']
    print(f'       {proxy.name}, {name}: clients saw {seen(result)}')
    print(f'       {proxy.name}, {name}: forwards by process {[round(n) for n in left + [had]]} (the last one until the signal; it had {waiting:.0f} under way)')
    tally.check(f'{proxy.name}, {name}: all of them had work', min(left + [had]) > 0.05 * sum(left + [had]))
    if sig == signal.SIGTERM:
        for line in proxy.failures()[failed_before:]:
            print(f'       {proxy.name}, SIGTERM {at_ms / 1000:.3f}: {line}')
        tally.check(f'{proxy.name}, SIGTERM: no request failed', lost == 0, f'{lost} of {result["requests"]}')
        tally.check(f'{proxy.name}, SIGTERM: the server drained and ended with status 0', True, f'after {drained_ms:.0f} ms')
    else:
        tally.check(f'{proxy.name}, SIGKILL: at most what the process had under way failed ({CONNECTIONS} connections)', lost <= CONNECTIONS,
                    f'{lost} of {result["requests"]}')
        last_s = (result['last_bad_ms'] - at_ms) / 1000 if bad else 0
        tally.check(f'{proxy.name}, SIGKILL: no request failed later than {RECOVERED_S} s', last_s < RECOVERED_S, f'the last one {last_s:.2f} s after the signal')
        elsewhere = {k: n for k, n in proxy.servers_of_failures().items() if f':{victim.port}' not in k}
        tally.check(f'{proxy.name}, SIGKILL: what failed had been sent to the dead server', not elsewhere, elsewhere or '')
    tally.check(f'{proxy.name}, {name}: no client lost its connection to the proxy', result['socket_errors'] == 0, result['socket_errors'])


def again(servers):
    """Starts the last server again, on the address that it had."""
    old = servers[-1]
    servers[-1] = Server(*old.options, listen=f'127.0.0.1:{old.port}').start()


def has_work(proxy, server):
    """Sends a few requests without a session. Returns whether the last server has got one of them."""
    for _ in range(2 * SERVERS):
        proxy.ask('POST', FORWARD, problem())
    return server.metric('attnd_requests_total', endpoint='forward') > 0


def test_proxy(tally, make, seconds):
    options = ['--cpu-threads', '1', '--http-threads', '2', '--log-level', 'warn']
    servers = [Server(*options).start() for _ in range(SERVERS)]
    with tempfile.TemporaryDirectory(prefix='attnd-scaleout-') as folder:
        os.chmod(folder, 0o755)  # NGINX's workers may run as another user, which must be able to enter the folder
        proxy = make([s.port for s in servers], folder)
        try:
            if not tally.check(f'{proxy.name}: serves', eventually(proxy.up, 15) and eventually(proxy.knows_all, 10)):
                return
            tally.check(f'{proxy.name}: finds no fault with its configuration', *proxy.check_configuration())
            where = test_sessions(tally, proxy, servers)
            test_bodies(tally, proxy)

            test_end_one(tally, proxy, servers, signal.SIGTERM, seconds)
            settle(servers[:-1])
            again(servers)
            eventually(lambda: has_work(proxy, servers[-1]), RETURNED_S)
            test_end_one(tally, proxy, servers, signal.SIGKILL, seconds)
            alive = servers[:-1]
            settle(alive)
            now = {session: process_of(proxy, alive, session) for session in where}
            strayed = {s: (i, now[s]) for s, i in where.items() if i < SERVERS - 1 and now[s] != [i]}
            moved = [now[s] for s, i in where.items() if i == SERVERS - 1]
            stay = sum(i < SERVERS - 1 for i in where.values())
            tally.check(f'{proxy.name}: sessions of the living processes stayed', len(strayed) <= proxy.may_stray * stay, strayed or f'{stay} sessions')
            tally.check(f'{proxy.name}: sessions of the dead one moved to the living', all(len(m) == 1 for m in moved), f'{len(moved)} sessions')

            again(servers)
            began, mine = time.monotonic(), next(s for s, i in where.items() if i == SERVERS - 1)
            back = eventually(lambda: process_of(proxy, servers, mine) == [SERVERS - 1], RETURNED_S)
            tally.check(f'{proxy.name}: a server that comes back gets its sessions back', back, f'after {time.monotonic() - began:.1f} s')
        finally:
            if tally.failed:
                print(f'---- log of {proxy.name} ----\n{proxy.log()[-4000:]}')
            proxy.end()
            for s in servers:
                s.stop()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--proxies', default='nginx,envoy')
    ap.add_argument('--seconds', type=int, default=4, help='of load, for each signal')
    a = ap.parse_args()
    tally = Tally()
    if not tally.missing('wrk'):
        for name in a.proxies.split(','):
            if not tally.missing(name):
                test_proxy(tally, {'nginx': Nginx, 'envoy': Envoy}[name], a.seconds)
    return tally.end()


if __name__ == '__main__':
    sys.exit(main())
