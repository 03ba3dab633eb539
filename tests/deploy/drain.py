"""Sends SIGTERM to an attnd under load and counts what happened to every request: drain.py --pid N --grace S URL

Threads send requests without pause on connections that they keep. After a while the script sends the signal. A thread
ends when it can no longer connect. A request counts as accepted when the server may have read its first byte: it was
sent, whole or in part, on an established connection. Each accepted request must get a complete answer, 200 or 503.

HTTP cannot avoid one loss: the server closes a kept connection while the client's next request is on its way. While
draining, attnd says `Connection: close` in every answer, so this must not happen here. Kernels before 5.7 cause another
loss: a connection made after the signal, whose handshake the kernel completed while the listener was being closed, is
reset before the server sees it. Such a connection is counted as "at the door" and allowed once.

The exit status is 0 if all accepted requests were answered and the process was gone within the grace period."""
import argparse
import base64
import collections
import http.client
import json
import os
import re
import signal
import sys
import threading
import time
import urllib.parse


def body(B, S, H, D):
    """Returns the body of a forward over float16 tensors. Their numbers are small and not random, because this script
    checks only that answers arrive."""
    data = base64.b64encode(bytes([0x00, 0x38, 0x66, 0x2E]) * (B * S * H * D // 2)).decode()
    tensor = {'shape': [B, S, H, D], 'dtype': 'float16', 'data': data}
    return json.dumps({'q': tensor, 'k': tensor, 'v': tensor, 'causal': True}).encode()


class Load:
    def __init__(self, host, port):
        self.host, self.port = host, port
        self.lock = threading.Lock()
        # {status: number of answers with this status}: `before` has the answers to requests that were sent before the
        # signal, `after` those to later requests
        self.before, self.after = collections.Counter(), collections.Counter()
        self.lost, self.at_the_door, self.signalled, self.stop = [], 0, False, False

    def run(self, sent_body):
        while not self.stop:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
            late, fresh = self.signalled, True
            try:
                connection.connect()
            except OSError:
                if self.signalled:
                    return
                raise
            try:
                while not self.stop:
                    after = self.signalled
                    connection.request('POST', '/v1/attention/forward', sent_body, {'Content-Type': 'application/json'})
                    answer = connection.getresponse()
                    length = int(answer.getheader('Content-Length'))
                    if len(answer.read()) != length:
                        raise http.client.IncompleteRead(b'')
                    with self.lock:
                        (self.after if after else self.before)[answer.status] += 1
                    fresh = False
                    if answer.will_close:
                        break
            except (OSError, http.client.HTTPException) as e:
                with self.lock:
                    if late and fresh and isinstance(e, (ConnectionResetError, BrokenPipeError)):
                        self.at_the_door += 1
                    else:
                        self.lost.append(f'{type(e).__name__}: {e}')
            finally:
                connection.close()


def hides():
    """Returns whether a listener on this system can refuse new connections while it still accepts waiting ones (see
    server/http/listen.c)."""
    return tuple(int(n) for n in re.findall(r'\d+', os.uname().release)[:2]) >= (5, 7)


def gone(pid):
    try:
        with open(f'/proc/{pid}/stat') as f:
            return f.read().rsplit(')', 1)[1].split()[0] == 'Z'
    except OSError:
        return True


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('url')
    ap.add_argument('--pid', type=int, required=True)
    ap.add_argument('--grace', type=float, default=45)
    ap.add_argument('--seconds', type=float, default=2)
    a = ap.parse_args()
    where = urllib.parse.urlsplit(a.url)
    load = Load(where.hostname, where.port)
    bodies = [body(1, 64, 4, 64)] * 12 + [body(1, 1024, 8, 64)] * 4
    threads = [threading.Thread(target=load.run, args=(b,), daemon=True) for b in bodies]
    for t in threads:
        t.start()
    time.sleep(a.seconds)
    load.signalled = True
    began = time.monotonic()
    os.kill(a.pid, signal.SIGTERM)
    while not gone(a.pid) and time.monotonic() - began < a.grace:
        time.sleep(0.005)
    took = time.monotonic() - began
    in_time = gone(a.pid)
    for t in threads:
        t.join(timeout=5)
    load.stop = True
    stuck = sum(t.is_alive() for t in threads)
    print(f'          {len(threads)} connections; sent before the signal: {dict(load.before)}, after it: {dict(load.after)}; '
          f'lost: {len(load.lost)}, at the door: {load.at_the_door}; gone after {took:.2f} s')
    for text in load.lost[:5]:
        print('          lost:', text)
    ok = in_time and not stuck and not load.lost and load.at_the_door <= (0 if hides() else 1) and set(load.before) == {200} and set(load.after) <= {200, 503}
    if not in_time:
        print(f'          still there after {a.grace:g} s')
    if stuck:
        print(f'          {stuck} threads still wait for an answer')
    return 0 if ok and sum(load.before.values()) > 50 else 1


if __name__ == '__main__':
    sys.exit(main())
