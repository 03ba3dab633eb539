"""The pages at / and /docs in a browser: they fill themselves, ask no other host, break no policy of their own,
and /docs sends a request.

Chromium is driven through its own pipe (--remote-debugging-pipe): JSON messages with a NUL behind each. It is not among
what tests/setup.sh installs, for it takes 300 MB: where there is none, these are skipped."""
import json
import os
import shutil
import subprocess
import time
from urllib.parse import urlsplit

import pytest

import service

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
pytestmark = pytest.mark.skipif(not CHROMIUM, reason='chromium is not here (apt-get install chromium)')


class Browser:
    def __init__(self, folder):
        (theirs_in, self.to), (self.back, theirs_out) = os.pipe(), os.pipe()

        def wire_up():  # it reads from 3 and writes to 4
            a, b = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(a, 3)
            os.dup2(b, 4)
        self.process = subprocess.Popen(
            [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--no-first-run', f'--user-data-dir={folder}', '--remote-debugging-pipe', 'about:blank'],
            preexec_fn=wire_up, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.number, self.events = b'', 0, []
        target = next(t for t in self.ask('Target.getTargets', session=None)['targetInfos'] if t['type'] == 'page')
        self.session = self.ask('Target.attachToTarget', session=None, targetId=target['targetId'], flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Network', 'Log'):
            self.ask(domain + '.enable')

    def message(self):
        while b'\0' not in self.buffer:
            piece = os.read(self.back, 1 << 16)
            assert piece, 'chromium has gone'
            self.buffer += piece
        one, self.buffer = self.buffer.split(b'\0', 1)
        return json.loads(one)

    def ask(self, method, session='', **parameters):
        self.number += 1
        message = {'id': self.number, 'method': method, 'params': parameters}
        if session is not None:
            message['sessionId'] = self.session
        os.write(self.to, json.dumps(message).encode() + b'\0')
        while True:
            got = self.message()
            if got.get('id') == self.number:
                assert 'error' not in got, got
                return got['result']
            self.events.append(got)

    def value(self, expression):
        return self.ask('Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True)['result'].get('value')

    def wait(self, expression, seconds=15):
        end = time.monotonic() + seconds * service.SLOWER
        while not self.value(expression):
            assert time.monotonic() < end, (expression, self.value('document.body.innerText'))
            time.sleep(0.05)

    def complaints(self):
        """Errors of scripts and of policies, and hosts that were asked."""
        bad = [e['params'] for e in self.events if e.get('method') == 'Runtime.exceptionThrown'
               or (e.get('method') == 'Log.entryAdded' and e['params']['entry']['level'] in ('warning', 'error') and e['params']['entry']['source'] != 'network')]
        urls = [e['params']['request']['url'] for e in self.events if e.get('method') == 'Network.requestWillBeSent']
        return bad, {urlsplit(url).netloc for url in urls if not url.startswith('data:')}

    def close(self):
        os.close(self.to)  # which ends it
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.back)


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path / 'profile')
    yield browser
    browser.close()


def test_the_page_fills_itself(server, browser):
    browser.ask('Page.navigate', url=server.url + '/')
    browser.wait("document.getElementById('state').textContent === 'ready'")
    assert browser.value("document.querySelectorAll('#limits tr').length") > 10
    assert browser.complaints() == ([], {f'127.0.0.1:{server.port}'})


SEND = """(() => { const op = document.getElementById('post_v1_attention_forward'); op.open = true;
           op.querySelector('button').click(); })()"""
ANSWERED = "document.querySelector('#post_v1_attention_forward pre').textContent"


def test_the_document_is_shown_and_a_request_sent(server, browser):
    browser.ask('Page.navigate', url=server.url + '/docs#ForwardProblem')
    browser.wait("document.getElementById('ForwardProblem')?.open")
    document = server.get('/openapi.json').json()
    shown = set(browser.value("[...document.querySelectorAll('details')].map(d => d.id)"))
    assert shown == {op['operationId'] for item in document['paths'].values() for m, op in item.items() if m != 'head'} | set(document['components']['schemas'])
    headings = browser.value("[...document.querySelectorAll('h2')].map(h => h.innerText)")
    assert headings == [t['x-displayName'] for t in document['tags']] + ['Schemas'] and 'KServe' in headings
    assert 'softcap' in browser.value("document.getElementById('ForwardProblem').innerText")
    dangling = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.getElementById(a.hash.slice(1))).length"
    assert browser.value(dangling) == 0
    browser.value(SEND)
    browser.wait(ANSWERED + ".startsWith('HTTP 200')")
    assert '"backend": "cpu' in browser.value(ANSWERED)
    cache = server.post('/v1/caches', {'kv_heads': 1, 'head_dim': 2, 'dtype': 'float32'}).json()['id']  # what the path names is typed
    fork = "document.getElementById('post_v1_caches_id_fork')"
    browser.value(f"{fork}.querySelector('input').value = '{cache}', {fork}.querySelector('button').click()")
    browser.wait(f"{fork}.querySelector('pre').textContent.startsWith('HTTP 201')")
    assert browser.complaints() == ([], {f'127.0.0.1:{server.port}'})


# Finds elements that are wider than the page (unless they scroll by themselves) or stand out of their row, and words that are broken into letters.
LAYOUT = """(() => { const wide = document.documentElement.clientWidth, box = e => e.getBoundingClientRect(), bad = [];
  const say = (what, e) => bad.push(what + ': ' + e.tagName + ' ' + e.textContent.slice(0, 40));
  for (const e of document.querySelectorAll('body *')) if (!e.closest('pre') && box(e).right > wide + 0.5) say('too wide', e);
  for (const s of document.querySelectorAll('summary')) for (const e of s.children) {
    if (box(e).bottom > box(s).bottom + 0.5) say('out of its row', e);
    const next = e.nextElementSibling;
    if (next && box(next).top < box(e).bottom - 4 && box(next).left < box(e).right + 4) say('glued', e); }
  for (const e of document.querySelectorAll('td code')) {
    const word = Math.max(...e.textContent.split(/[ ,]+/).map(w => w.length));
    if (e.textContent && box(e).width < 7 * Math.min(word, 12)) say('broken into letters', e); }
  return bad; })()"""


@pytest.mark.parametrize('width', [1400, 800, 400])
@pytest.mark.parametrize('path', ['/', '/docs'])
def test_nothing_overflows_lies_over_another_or_is_broken_at_any_width(server, browser, path, width):
    browser.ask('Page.navigate', url=server.url + path)
    browser.wait("document.querySelectorAll('#features tr').length > 2" if path == '/' else "!!document.querySelector('#schemas details')")
    browser.ask('Emulation.setDeviceMetricsOverride', width=width, height=1000, deviceScaleFactor=1, mobile=False)
    for scheme in ('light', 'dark'):
        browser.ask('Emulation.setEmulatedMedia', features=[{'name': 'prefers-color-scheme', 'value': scheme}])
        assert browser.value(LAYOUT) == []
        browser.value("for (const each of document.querySelectorAll('details')) each.open = true")
        assert browser.value(LAYOUT) == []
        assert browser.value('document.documentElement.scrollWidth <= document.documentElement.clientWidth')
    colours = browser.value("[getComputedStyle(document.documentElement).colorScheme, matchMedia('(prefers-color-scheme: dark)').matches]")
    assert colours == ['light dark', True]


def test_the_first_page_begins_with_a_link_to_the_interface(server, browser):
    browser.ask('Page.navigate', url=server.url + '/')
    browser.wait("document.getElementById('state').textContent === 'ready'")
    assert browser.value("document.querySelector('a').getAttribute('href')") == '/docs'
    assert browser.value("document.querySelector('a').getBoundingClientRect().bottom") < 200


def test_with_tokens_it_asks_for_one(serve, browser, tmp_path):
    (tmp_path / 'tokens').write_text('secret\n')
    server = serve('--token-file', tmp_path / 'tokens')
    browser.ask('Page.navigate', url=server.url + '/docs')
    browser.wait("!!document.getElementById('post_v1_attention_forward')")
    assert browser.value("document.getElementById('auth').hidden") is False
    browser.value(SEND)
    browser.wait(ANSWERED + ".startsWith('HTTP 401')")
    browser.value("document.getElementById('token').value = 'secret'")
    browser.value(SEND)
    browser.wait(ANSWERED + ".startsWith('HTTP 200')")
    assert browser.complaints()[0] == []
