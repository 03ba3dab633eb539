"""The pages at / and /docs in a browser. Every part must work, with the same numbers as the API. The pages must ask no
other host, obey their own security policies, and fit every width. The tool axe must find no fault of accessibility. The
tests control Chromium through a pipe (--remote-debugging-pipe) with JSON messages, each followed by a NUL.
tests/setup.sh does not install Chromium, which takes 300 MB; without it these tests are skipped."""
import json
import os
import shutil
import subprocess
import threading
import time
from urllib.parse import urlsplit

import numpy as np
import pytest

import service
import wire

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
pytestmark = pytest.mark.skipif(not CHROMIUM, reason='chromium is not here (apt-get install chromium)')


class Browser:
    def __init__(self, folder):
        (theirs_in, self.to), (self.back, theirs_out) = os.pipe(), os.pipe()

        def wire_up():  # Chromium reads from descriptor 3 and writes to descriptor 4
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
        while not self.value(f'!!({expression})'):
            assert time.monotonic() < end, (expression, self.value('document.body.innerText'))
            time.sleep(0.05)

    def open(self, url, ready):
        self.ask('Page.navigate', url=url)
        self.wait(ready)

    def text(self, css):
        return self.value(f'document.querySelector({json.dumps(css)}).textContent')

    def click(self, css):
        """Clicks the middle of the element that this CSS selector finds, as a person would."""
        box = self.value(f"""(() => {{ const e = document.querySelector({json.dumps(css)}); e.scrollIntoView({{block: 'center'}});
                             const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2, b.width]; }})()""")
        assert box and box[2] > 0, f'{css} is not to be seen'
        self.press(box[0], box[1])
        self.release(box[0], box[1])

    def mouse(self, kind, x, y, **more):
        self.ask('Input.dispatchMouseEvent', type='mouse' + kind, x=x, y=y, button='left', clickCount=1, **more)

    def press(self, x, y):
        self.mouse('Pressed', x, y)

    def release(self, x, y):
        self.mouse('Released', x, y)

    def key(self, key, css=None):
        if css:
            self.value(f'document.querySelector({json.dumps(css)}).focus()')
        text = {'text': key} if len(key) == 1 else {'text': '\\r'} if key == 'Enter' else {}
        for kind in ('keyDown', 'keyUp'):
            self.ask('Input.dispatchKeyEvent', type=kind, key=key, windowsVirtualKeyCode={'Enter': 13, 'Escape': 27}.get(key, 0), **(text if kind == 'keyDown' else {}))

    def fill(self, css, value):
        """Sets the value of an input, and sends the events that a person's typing would cause."""
        self.value(f"""(() => {{ const e = document.querySelector({json.dumps(css)}), value = {json.dumps(value)};
                       if (e.type === 'checkbox') e.checked = value; else e.value = value;
                       for (const type of ['input', 'change']) e.dispatchEvent(new Event(type, {{bubbles: true}})); }})()""")

    def give_file(self, css, path):
        node = self.ask('Runtime.evaluate', expression=f'document.querySelector({json.dumps(css)})')['result']['objectId']
        self.ask('DOM.setFileInputFiles', files=[str(path)], objectId=node)

    def size(self, width, height=1000):
        self.ask('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, scheme):
        self.ask('Emulation.setEmulatedMedia', features=[{'name': 'prefers-color-scheme', 'value': scheme}])

    def complaints(self):
        """Returns errors of scripts, violations of policies, and requests to other hosts."""
        bad = [e['params'] for e in self.events if e.get('method') == 'Runtime.exceptionThrown'
               or (e.get('method') == 'Log.entryAdded' and e['params']['entry']['level'] in ('warning', 'error') and e['params']['entry']['source'] != 'network')]
        urls = [e['params']['request']['url'] for e in self.events if e.get('method') == 'Network.requestWillBeSent']
        return bad, {urlsplit(url).netloc for url in urls if not url.startswith('data:')}

    def close(self):
        os.close(self.to)  # Chromium ends when its pipe is closed
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


READY = "document.getElementById('state').textContent === 'ready'"
PARTS = ('live', 'masks', 'maps', 'check')
EXAMPLES = {  # text that each part of the page must show, and the condition (in JavaScript) that shows it is there
    'live': (None, READY),
    'masks': (None, "document.getElementById('mask-code').textContent.includes('curl')"),
    'maps': ('#map-example', "document.getElementById('map-message').textContent.startsWith('8 heads')"),
    'check': ('#check-example', "document.querySelectorAll('.error-map').length === 2"),
}


def show(browser, server, part):
    """Opens a part of the page, and fills it with an example."""
    button, there = EXAMPLES[part]
    browser.open(f'{server.url}/#{part}', READY)
    if button:
        browser.click(button)
    browser.wait(there)


# ---- Live ------------------------------------------------------------------------------------------------------------


def test_the_page_fills_itself(server, browser):
    browser.open(server.url + '/', READY)
    assert browser.value("document.querySelectorAll('#limits tr').length") > 10
    # the page's limits are collapsed at first
    assert browser.value("[...document.querySelectorAll('#live details')].some(d => d.open)") is False
    assert browser.complaints() == ([], {f'127.0.0.1:{server.port}'})


FIGURE = "document.querySelectorAll('#figures article')[%d].querySelector('b').textContent"


def test_live_figures_move_under_load(serve, browser):
    server = serve('--max-body-bytes', '4M')
    browser.open(server.url + '/', READY)
    browser.wait('samples.length > 1')
    assert browser.value(FIGURE % 0) == '0' and browser.value(FIGURE % 1) == '–' and browser.value(FIGURE % 3) == '0'
    assert browser.text('#refusals') == 'Nothing was refused since the start.'
    members, _ = wire.random_problem(np.random.default_rng(1), Sq=256, H=4, D=64)
    for _ in range(20):
        assert server.forward(**members).status == 200
    for _ in range(3):
        server.post('/v1/attention/forward', b' ' * (5 << 20))
    browser.wait("samples.some(s => s.p50 > 0 && s.p99 >= s.p50) && document.querySelector('#refusals table') && document.querySelector('#devices circle.now')")
    requests, flops, moved = (browser.value(f"samples[samples.length - 1].{name} - samples[0].{name}") for name in ('requests', 'flops', 'bytes'))
    assert requests == 23 and flops == server.metric('attnd_flops_total') == 20 * 4 * 4 * 256 * 256 * 64
    assert moved > 20 * 4 * 4 * 256 * 64 * 4  # counts at least the bytes of q, k, v and out of 20 requests
    assert browser.value(FIGURE % 1) != '–'
    # the table counts refusals of the last 10 minutes, and of all time since the start
    assert browser.text('#refusals tbody th').startswith('too-large') and browser.text('#refusals tbody tr').endswith('33')
    device = server.get('/v1/info').json()['devices'][0]
    if 'peak_flops' in device:
        assert device['peak_from'] in browser.text('#devices') and 'of the roof' in browser.text('#devices')
    browser.wait(FIGURE % 0 + " === '0'")  # the load has ended, and its chart still shows it
    assert browser.value("document.querySelector('#figures .trace path').getAttribute('d').split('L').length") > 1
    assert browser.complaints()[0] == []


def test_a_figure_shows_the_past_under_the_pointer(server, browser):
    browser.open(server.url + '/', READY)
    browser.wait('samples.length > 2')
    browser.mouse('Moved', *browser.value("(() => { const b = document.querySelector('#figures .trace').getBoundingClientRect(); return [b.right - 1, b.top + 20]; })()"))
    # one click makes all charts show the same moment
    browser.wait("document.querySelectorAll('#figures .axis')[5].textContent.includes('s ago')")
    browser.mouse('Moved', 5, 5)
    browser.wait("document.querySelectorAll('#figures .axis')[5].textContent.includes('10 min ago')")


# ---- Masks -----------------------------------------------------------------------------------------------------------

# Each row has values for the form, and what they mean: (queries, keys) of each sequence, and the window (left, right).
MASKS = [
    ({'causal': True}, [(1024, 1024)], (-1, 0)),
    ({'Sq': 300, 'Sk': 700, 'causal': True, 'left': 100}, [(300, 700)], (100, 0)),
    ({'Sq': 700, 'Sk': 300, 'causal': False, 'left': 64, 'right': 32, 'alignment': 'top_left', 'tile': '64 x 64'}, [(700, 300)], (64, 32)),
    ({'lengths': 'packed', 'queries': '100, 0, 413', 'keys': '200, 10, 413', 'layout': 'bshd'}, [(100, 200), (0, 10), (413, 413)], (-1, 0)),
    ({'lengths': 'padded rows', 'Sq': 500, 'Sk': 600, 'queries': '500, 130', 'keys': '600, 257', 'layout': 'bhsd', 'row': 1}, [(500, 600), (130, 257)], (-1, 0)),
    ({'flashmask': 'documents', 'Sq': 600, 'Sk': 600, 'documents': '100, 450, 50', 'B': 2, 'dtype': 'float16'}, [(600, 600)] * 2, (-1, 0)),
    ({'flashmask': 'shared prefix', 'Sq': 512, 'Sk': 512, 'prefix': 200, 'operation': 'backward', 'deterministic': True}, [(512, 512)], (-1, -1)),
    ({'dtype': 'float32', 'softcap': 20, 'scale': '0.2', 'alibi': True, 'sinks': True, 'dropout': 0.1, 'D': 48, 'Dv': 80, 'H': 6, 'Hk': 3}, [(1024, 1024)], (-1, 0)),
]


def visible(form, Sq, Sk, window):
    i, j = np.arange(Sq)[:, None], np.arange(Sk)[None]
    at = i if form.get('alignment') == 'top_left' else i + Sk - Sq
    seen = np.full((Sq, Sk), True)
    if window[0] >= 0:
        seen &= j >= at - window[0]
    if window[1] >= 0:
        seen &= j <= at + window[1]
    if form.get('flashmask') == 'documents':
        document = np.repeat(np.arange(3), [int(n) for n in form['documents'].split(',')])
        seen &= document[:, None] == document[None]
    if form.get('flashmask') == 'shared prefix':
        seen &= (j < form['prefix']) | (j <= i)
    return seen


def kinds_of(seen, rows, keys):
    kinds = {'skipped': 0, 'partial': 0, 'whole': 0}
    for i in range(0, seen.shape[0], rows):
        for j in range(0, seen.shape[1], keys):
            tile = seen[i:i + rows, j:j + keys]
            kinds['whole' if tile.all() else 'partial' if tile.any() else 'skipped'] += 1
    return kinds


def observed_numbers(server, form, sequences, H, D, Dv, rows, keys):
    """Returns the numbers that the API gives for the mask in the form."""
    def zeros(S, heads):
        packed = form.get('lengths') == 'packed'
        return wire.tensor(np.zeros((sum(S), heads, D) if packed else (len(sequences), max(S), heads, D), np.float32))
    lengths = list(zip(*sequences))
    members = {'q': zeros(lengths[0], H), 'k': zeros(lengths[1], form.get('Hk', 2)), 'observe': ['pairs', 'flops_forward', 'flops_backward', 'tiles'],
               'tile_size': [rows, keys], 'head_dim_v': Dv}
    if form.get('causal', True) and form.get('flashmask') != 'shared prefix':
        members['causal'] = True
    if 'left' in form:
        members['window'] = [form['left'], form.get('right', -1)]
    if 'alignment' in form:
        members['alignment'] = form['alignment']
    for name, S in zip(('q', 'k'), lengths):
        if form.get('lengths') == 'packed':
            members['cu_seqlens_' + name] = wire.tensor(np.cumsum([0, *S]), 'int32')
        elif form.get('lengths') == 'padded rows':
            members['seqlens_' + name] = wire.tensor(S, 'int32')
    if form.get('flashmask') == 'documents':
        ends = np.cumsum([int(n) for n in form['documents'].split(',')])
        members['mask_startend_rows'] = wire.tensor(np.tile(np.repeat(ends, np.diff(ends, prepend=0))[:, None], (len(sequences), 1, 1, 1)), 'int32')
    elif form.get('flashmask') == 'shared prefix':
        Sk = sequences[0][1]
        members['mask_startend_rows'] = wire.tensor(np.stack([np.full(Sk, Sk), np.where(np.arange(Sk) < form['prefix'], 0, np.arange(Sk))], -1)[None, None], 'int32')
    answer = server.post('/v1/attention/observe', members)
    assert answer.status == 200, answer
    got = answer.json()
    return {'pairs': got['pairs'], 'forward': got['flops_forward'], 'backward': got['flops_backward'], **{kind: got['tiles'][kind] for kind in ('skipped', 'partial', 'whole')}}


def run_as_program(text, name, folder):
    """Runs a program exactly as the page shows it, and returns what it prints, or None if the language is not
    installed."""
    program = {'curl': ['bash'], 'python': [shutil.which('python3') if service.optional('numpy') else None], 'node': [shutil.which('node')]}[name]
    if program == ['bash']:
        return subprocess.run(['bash', '-c', text], capture_output=True, text=True, timeout=60)
    if not program[0]:
        return None
    path = folder / ('problem.mjs' if name == 'node' else 'problem.py')
    path.write_text(text)
    python = [os.sys.executable] if name == 'python' else program
    return subprocess.run([*python, str(path)], capture_output=True, text=True, timeout=60)


@pytest.mark.limit(120)
def test_masks_are_counted_exactly_and_their_requests_run_in_each_language(server, browser, tmp_path):
    for form, sequences, window in MASKS:
        browser.open('about:blank', 'true')
        browser.open(server.url + '/#masks', READY)
        for name, value in form.items():
            browser.fill(f'#mask-form [name="{name}"]', value)
        assert browser.text('#mask-trouble') == ''
        seen = [visible(form, Sq, Sk, window) for Sq, Sk in sequences]
        H, D, Dv = form.get('H', 8), form.get('D', 64), form.get('Dv', 64)
        pairs = H * sum(int(each.sum()) for each in seen)
        rows, keys = map(int, form.get('tile', '128 x 128').split(' x '))
        want = {'pairs': pairs, 'forward': 2 * pairs * (D + Dv), 'backward': 2 * pairs * (3 * D + 2 * Dv), 'skipped': 0, 'partial': 0, 'whole': 0}
        for each in seen:
            for kind, n in kinds_of(each, rows, keys).items():
                want[kind] += n * H
        assert json.loads(browser.value("document.getElementById('mask-facts').dataset.facts")) == want, form
        assert f'{pairs:,}' in browser.text('#mask-facts')
        assert observed_numbers(server, form, sequences, H, D, Dv, rows, keys) == want, form
        for name in ('curl', 'python', 'node'):
            browser.click(f'#as-{name}')
            ran = run_as_program(browser.text('#mask-code'), name, tmp_path)
            if ran is not None:
                assert ran.returncode == 0 and 'cpu' in ran.stdout and 'detail' not in ran.stdout, (form, name, ran.stdout[-600:], ran.stderr[-600:])
        flops = server.metric('attnd_flops_total')
        browser.click('#mask-send')
        browser.wait("document.getElementById('mask-answer').textContent.startsWith('Answered')")
        # Without FlashMask the server also counts the visible pairs exactly. A backward counts as 2.5 times the
        # operations of a forward.
        if 'flashmask' not in form:
            assert server.metric('attnd_flops_total') - flops == want['forward']
    browser.click('#mask-copy')
    browser.wait("/Copied|selected/.test(document.getElementById('mask-answer').textContent)")
    assert browser.complaints()[0] == []


def test_the_picture_of_a_mask_has_the_colours_of_its_tiles(server, browser):
    browser.open(server.url + '/#masks', READY)
    at = """(([x, y]) => { const c = document.getElementById('mask-tiles'), [r, g, b, a] = c.getContext('2d').getImageData(x * c.width, y * c.height, 1, 1).data;
            return a ? '#' + [r, g, b].map(v => v.toString(16).padStart(2, '0')).join('') : ''; })([%f, %f])"""
    for scheme, whole, partial in (('light', '#1f55c4', '#8fb2ee'), ('dark', '#86adff', '#38548f')):
        browser.scheme(scheme)
        # this point of the picture is far below the diagonal, where all pairs count
        browser.wait(at % (0.05, 0.9) + f" === '{whole}'")
        assert browser.value(at % (0.05, 0.05)) == partial and browser.value(at % (0.9, 0.1)) == ''


@pytest.mark.parametrize('name, value, says', [
    ('Sq', '0', 'Queries: an integer from 1 to 65536 is wanted.'),
    ('Hk', '3', 'Key heads: 3 must divide the 8 query heads.'),
    ('scale', 'much', 'Scale: a number is wanted, or nothing.'),
])
def test_what_is_wrong_in_the_form_is_said_and_no_request_is_shown(server, browser, name, value, says):
    browser.open(server.url + '/#masks', READY)
    browser.fill(f'#mask-form [name="{name}"]', value)
    assert browser.text('#mask-trouble') == says
    assert browser.value("document.getElementById('mask-request').hidden && document.getElementById('mask-picture').hidden")


# ---- Maps ------------------------------------------------------------------------------------------------------------


def write_file(path, tensors, members):
    """Writes a safetensors file by the format's definition. bfloat16 numbers are given as uint16."""
    header, data = {'__metadata__': members} if members else {}, b''
    names = {'float32': 'F32', 'float16': 'F16', 'uint16': 'BF16', 'int32': 'I32', 'uint8': 'U8'}
    for name, a in tensors.items():
        header[name] = {'dtype': names[str(a.dtype)], 'shape': list(a.shape), 'data_offsets': [len(data), len(data) + a.nbytes]}
        data += a.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, 'little') + text + data)
    return path


def observed(server, members, **more):
    answer = server.post('/v1/attention/observe', {**members, **more})
    assert answer.status == 200, answer
    return {name: wire.value(t) for name, t in answer.json().items() if isinstance(t, dict) and 'data' in t}


WEIGHTS = "[...document.querySelectorAll('#map-weights tbody td')].map(td => Number(td.title))"


@pytest.mark.limit(120)
def test_a_map_is_zoomed_down_to_weights_that_are_those_of_the_api(server, browser, tmp_path):
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 1500, 4, 32), np.float32) * 2, rng.standard_normal((2, 1500, 2, 32), np.float32)
    slopes = np.array([0.5, 0.25, 0.125, 0], np.float32)
    file = write_file(tmp_path / 'heads.safetensors', {'layer.q': q, 'layer.k': k, 'alibi_slopes': slopes}, {'causal': 'True', 'window': '[1000, -1]', 'format': 'pt'})
    browser.open(server.url + '/#maps', READY)
    browser.give_file('#map-file', file)
    browser.wait("document.getElementById('map-message').textContent.startsWith('4 heads, 1,500 queries, 1,500 keys; row 0 of 2')")
    browser.fill('#map-row', 1)
    browser.wait("document.getElementById('map-message').textContent.includes('row 1 of 2')")
    # query head 3 of the second batch row reads the second head of k
    members = {'q': wire.tensor(q[1:, :, 3:]), 'k': wire.tensor(k[1:, :, 1:]), 'alibi_slopes': wire.tensor(slopes[3:]), 'causal': True, 'window': [1000, -1]}
    everything = observed(server, {**members, 'q': wire.tensor(q[1:]), 'k': wire.tensor(k[1:]), 'alibi_slopes': wire.tensor(slopes)}, observe=['max_logit', 'mean_entropy'])
    for head in range(4):
        shown = browser.text(f'[data-head="{head}"]')
        assert f'entropy {everything["mean_entropy"][0, head]:.2f}' in shown and f'max logit {everything["max_logit"][0, head]:.4g}' in shown
    browser.click('[data-head="3"]')
    browser.wait("document.getElementById('map-title').textContent === 'Head 3' && view.height === 1024")
    assert browser.text('#map-region') == 'queries 0 to 1499, keys 0 to 1499, 1024 x 1024 cells'
    cells = observed(server, members, observe=['map'], map=[1024, 1024])['map']
    assert browser.value('view.cells.reduce((a, b) => a + b, 0)') == pytest.approx(float(cells.sum()), rel=1e-5)

    browser.click('#zoom-in')
    browser.wait('view.rows[1] - view.rows[0] === 750')
    browser.key('+', '#map-stage')
    browser.wait('view.rows[1] - view.rows[0] === 375')
    browser.key('ArrowDown')
    browser.wait('view.rows[0] === 657')
    browser.click('#zoom-out')
    browser.wait('view.rows[1] - view.rows[0] === 750')
    x, y, width = browser.value("(() => { const c = document.getElementById('map-canvas'); c.scrollIntoView({block: 'center'}); const b = c.getBoundingClientRect(); return [b.x, b.y, b.width]; })()")
    before = browser.value('view.rows')
    browser.press(x + width * 0.25, y + width * 0.5)  # dragging zooms in, here to the rows below the middle
    browser.mouse('Moved', x + width * 0.5, y + width * 0.75, buttons=1)
    assert browser.value("document.getElementById('map-box').hidden") is False
    browser.release(x + width * 0.5, y + width * 0.75)
    browser.wait(f'view.rows[0] > {before[0] + 370} && view.rows[1] - view.rows[0] < 200')
    browser.key('Enter', '#map-stage')
    browser.wait("!document.getElementById('map-weights').hidden")
    rows, keys = browser.value('view.rows'), browser.value('view.keys')
    assert rows[1] - rows[0] == keys[1] - keys[0] == 12
    weights = observed(server, members, observe=['weights'], rows=rows, keys=keys)['weights']
    assert np.array_equal(np.array(browser.value(WEIGHTS), np.float32), weights.ravel()) and weights.max() > 0
    assert browser.text('#map-weights tbody tr:nth-child(3) td:nth-child(6)') == f'{weights[0, 0, 2, 4]:.4f}'

    facts = observed(server, members, observe=['key_mass', 'top_keys'], top=10)
    assert browser.value("[...document.querySelectorAll('#map-keys tbody th')].map(th => Number(th.textContent))") == [int(j) for j in np.argsort(-facts['key_mass'][0, 0], kind='stable')[:10]]
    browser.fill('#map-query', 700)
    assert browser.value("[...document.querySelectorAll('#map-top tbody th')].map(th => Number(th.textContent))") == facts['top_keys'][0, 0, 700].tolist()
    browser.fill('#map-sort', 'logit')
    assert browser.value("Number(document.querySelector('#map-heads button').dataset.head)") == int(everything['max_logit'][0].argmax())
    assert browser.complaints()[0] == []


def test_packed_sequences_and_another_layout_are_cut_out_as_the_api_does(server, browser, tmp_path):
    rng = np.random.default_rng(6)
    q, k = rng.standard_normal((70, 2, 16), np.float32), rng.standard_normal((90, 1, 16), np.float32)
    cu_q, cu_k = np.array([0, 30, 70], np.int32), np.array([0, 50, 90], np.int32)
    packed = write_file(tmp_path / 'packed.safetensors', {'q': q, 'k': k, 'cu_seqlens_q': cu_q, 'cu_seqlens_k': cu_k}, {'causal': 'true'})
    bhsd = write_file(tmp_path / 'bhsd.safetensors', {'q': q[None, 30:].transpose(0, 2, 1, 3).copy(), 'k': k[None, 50:].transpose(0, 2, 1, 3).copy()}, {'layout': 'bhsd', 'causal': 'true'})
    want = observed(server, {'q': wire.tensor(q[None, 30:]), 'k': wire.tensor(k[None, 50:]), 'causal': True}, observe=['map'], map=[40, 40])['map']
    browser.open(server.url + '/#maps', READY)
    for file, row in ((packed, 1), (bhsd, 0)):
        browser.give_file('#map-file', file)
        browser.wait(f"document.getElementById('map-name').textContent === '{file.name}'")
        browser.fill('#map-row', row)
        browser.wait("document.getElementById('map-message').textContent.startsWith('2 heads, 40 queries, 40 keys')")
        browser.click('[data-head="1"]')
        browser.wait('view.head === 1 && view.cells?.length === 1600')
        assert np.array_equal(np.array(browser.value('[...view.cells]'), np.float32), want[0, 1].ravel())
    assert browser.complaints()[0] == []


@pytest.mark.parametrize('content, says', [
    (b'no', 'This is no safetensors file: it is shorter than 8 bytes.'),
    (b'x' * 100, 'This is no safetensors file: the length of its header is wrong.'),
    ((2).to_bytes(8, 'little') + b'{}', 'bad.safetensors has no two tensors of three or four axes, which q and k could be.'),
])
def test_a_file_that_is_none_is_named(server, browser, tmp_path, content, says):
    (tmp_path / 'bad.safetensors').write_bytes(content)
    browser.open(server.url + '/#maps', READY)
    browser.give_file('#map-file', tmp_path / 'bad.safetensors')
    browser.wait(f"document.getElementById('map-message').textContent === {json.dumps(says)}")
    assert browser.value("document.getElementById('map-message').classList.contains('wrong')")


# ---- Check -----------------------------------------------------------------------------------------------------------


def test_a_planted_mistake_is_found_explained_and_drawn(server, browser, tmp_path):
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((1, 160, 4, 32), np.float32) for _ in range(3))
    members = {name: wire.tensor(a) for name, a in (('q', q), ('k', k), ('v', v))}
    right = server.forward(**members, causal=True).json()
    out, lse = (wire.value(right[name]).astype(np.float32) for name in ('out', 'lse'))
    browser.open(server.url + '/#check', READY)
    file = write_file(tmp_path / 'right.safetensors', {'q': q, 'k': k, 'v': v, 'out': out, 'lse': lse}, {'causal': 'true'})
    browser.give_file('#check-file', file)
    browser.wait("document.querySelectorAll('.error-map').length === 2")
    assert browser.text('#check-verdict') in ('These results are right.', 'Right, up to rounding.')
    assert browser.value("document.querySelector('.error-map canvas').getAttribute('aria-label')") == 'Errors of out: 0 of 640 cells are beyond the limit'

    out[0, 100:110, 2] += 0.5  # ten queries of one head are made wrong
    file = write_file(tmp_path / 'wrong.safetensors', {'q': q, 'k': k, 'v': v, 'out': out, 'lse': lse / np.float32(np.log(2))}, {'causal': 'true'})
    browser.give_file('#check-file', file)
    browser.wait("document.getElementById('check-message').textContent.startsWith('wrong.safetensors: forward') && document.querySelectorAll('.error-map').length === 2")
    assert browser.text('#check-verdict') == 'These results are wrong.'
    assert 'lse_base2' in browser.text('#check-why') and '0.6931472' in browser.text('#check-why .fix')
    # 320 wrong numbers: 10 queries of 32 numbers
    assert browser.text('#check-errors tbody tr').startswith('out0.5') and '320' in browser.text('#check-errors tbody tr')
    assert browser.value("document.querySelector('.error-map canvas').getAttribute('aria-label')") == 'Errors of out: 10 of 640 cells are beyond the limit'
    x, y = browser.value("(() => { const c = document.querySelector('.error-map canvas'); c.scrollIntoView({block: 'center'}); const b = c.getBoundingClientRect(); return [b.x + b.width * 105.5 / 160, b.y + b.height * 2.5 / 4]; })()")
    browser.mouse('Moved', x, y)
    browser.wait("document.querySelector('.error-map .note').textContent.startsWith('head 2, query 105: ')")
    browser.key('ArrowRight', '.error-map canvas')
    browser.wait("document.querySelector('.error-map .note').textContent.startsWith('head 2, query 106: ')")
    browser.fill('#check-members', '{"causal": false}')  # members in this field override those of the file
    browser.click('#check-again')
    browser.wait("document.querySelector('.error-map canvas')?.getAttribute('aria-label').startsWith('Errors of out: 6')")
    assert browser.complaints()[0] == []


@pytest.mark.limit(120)
def test_each_example_of_a_check_has_the_verdict_that_it_should(server, browser):
    browser.open(server.url + '/#check', READY)
    for n, (verdict, code) in enumerate([('right', ''), ('wrong', 'lse_base2'), ('wrong', 'causal_missing'), ('wrong', 'scale_missing'), ('wrong', 'window_off_by_one'), ('wrong', '')]):
        browser.fill('#check-which', n)
        browser.value("document.getElementById('check-pictures').replaceChildren()")
        browser.click('#check-example')
        browser.wait("document.querySelectorAll('.error-map').length === 2")
        assert verdict in browser.text('#check-verdict').lower() and code in browser.text('#check-why'), (n, browser.text('#check-why'))
    assert browser.complaints()[0] == []


def test_gradients_are_checked_and_drawn(server, browser, tmp_path):
    rng = np.random.default_rng(9)
    q, k, v, dout = (rng.standard_normal((1, 64, 2, 16), np.float32) for _ in range(4))
    got = server.backward(**{name: wire.tensor(a) for name, a in (('q', q), ('k', k), ('v', v), ('dout', dout))}).json()
    dq, dk, dv = (wire.value(got[name]).astype(np.float32) for name in ('dq', 'dk', 'dv'))
    dk[0, 7, 1] = np.nan
    browser.open(server.url + '/#check', READY)
    browser.give_file('#check-file', write_file(tmp_path / 'gradients.safetensors', {'q': q, 'k': k, 'v': v, 'dout': dout, 'dq': dq, 'dk': dk, 'dv': dv}, {}))
    browser.wait("document.querySelectorAll('.error-map').length === 3")
    labels = browser.value("[...document.querySelectorAll('.error-map canvas')].map(c => c.getAttribute('aria-label'))")
    assert labels == [f'Errors of {name}: {n} of 128 cells are beyond the limit' for name, n in (('dq', 0), ('dk', 1), ('dv', 0))]
    assert browser.complaints()[0] == []


# ---- /docs -----------------------------------------------------------------------------------------------------------

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
    # the test types the values that the path's parameters need
    cache = server.post('/v1/caches', {'kv_heads': 1, 'head_dim': 2, 'dtype': 'float32'}).json()['id']
    fork = "document.getElementById('post_v1_caches_id_fork')"
    browser.value(f"{fork}.querySelector('input').value = '{cache}', {fork}.querySelector('button').click()")
    browser.wait(f"{fork}.querySelector('pre').textContent.startsWith('HTTP 201')")
    assert browser.complaints() == ([], {f'127.0.0.1:{server.port}'})


# ---- Both ------------------------------------------------------------------------------------------------------------

# Finds elements that are wider than the page (unless they scroll by themselves) or that extend beyond their row, and
# words that are broken into letters.
LAYOUT = """(() => { const wide = document.documentElement.clientWidth, box = e => e.getBoundingClientRect(), bad = [];
  const say = (what, e) => bad.push(what + ': ' + e.tagName + ' ' + e.textContent.slice(0, 40));
  const scrolls = e => e && (['auto', 'scroll'].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  for (const e of document.querySelectorAll('body *')) if (box(e).right > wide + 0.5 && !scrolls(e.parentElement)) say('too wide', e);
  for (const s of document.querySelectorAll('summary')) for (const e of s.children) {
    if (box(e).bottom > box(s).bottom + 0.5) say('out of its row', e);
    const next = e.nextElementSibling;
    if (next && box(next).top < box(e).bottom - 4 && box(next).left < box(e).right + 4) say('glued', e); }
  for (const e of document.querySelectorAll('td code')) {
    const word = Math.max(...e.textContent.split(/[ ,]+/).map(w => w.length));
    if (e.textContent && box(e).width < 7 * Math.min(word, 12)) say('broken into letters', e); }
  for (const e of document.querySelectorAll('button, [role=tab], .figure b, .facts b, label'))
    if (box(e).width && e.scrollWidth > e.clientWidth + 1) say('cut', e);
  return bad; })()"""
UNFOLD = "for (const each of document.querySelectorAll('details')) each.open = true"


@pytest.mark.parametrize('part', [*PARTS, 'docs'])
def test_nothing_overflows_lies_over_another_or_is_broken_at_any_width(server, browser, part):
    if part == 'docs':
        browser.open(server.url + '/docs', "!!document.querySelector('#schemas details')")
    else:
        show(browser, server, part)
    for width in (1600, 1400, 800, 400):
        browser.size(width)
        for unfold in ('', UNFOLD):
            browser.value(unfold)
            assert browser.value(LAYOUT) == [], width
            assert browser.value('document.documentElement.scrollWidth <= document.documentElement.clientWidth'), width


AXE = service.optional('axe_core_python')


@pytest.mark.skipif(not AXE, reason='axe-core-python is not here (tests/requirements.txt)')
@pytest.mark.parametrize('part', [*PARTS, 'docs'])
def test_axe_finds_no_fault_of_accessibility(server, browser, part):
    with open(os.path.join(os.path.dirname(AXE.__file__), 'axe.min.js')) as f:
        axe = f.read()
    if part == 'docs':  # /docs has many similar entries, so only some are examined
        browser.open(server.url + '/docs', "!!document.querySelector('#schemas details')")
        browser.value("for (const id of ['post_v1_attention_forward', 'ForwardProblem', 'get_v1_info', 'post_v1_caches_id_fork']) document.getElementById(id).open = true")
        browser.value("document.querySelectorAll('details:not([open])').forEach((each, i) => { if (i % 20) each.remove(); })")
    else:
        show(browser, server, part)
        browser.value(UNFOLD)
    if part == 'maps':
        browser.click('#zoom-weights')
        browser.wait("!document.getElementById('map-weights').hidden")
    browser.ask('Runtime.evaluate', expression=axe)
    for scheme in ('light', 'dark'):
        browser.scheme(scheme)
        found = browser.value("axe.run().then(found => found.violations.map(v => [v.id, v.nodes.map(n => n.html.slice(0, 200))]))")
        assert found == [], scheme
    assert browser.value("getComputedStyle(document.documentElement).colorScheme") == 'light dark'


@pytest.mark.parametrize('part', PARTS)
def test_every_control_can_be_used_and_none_breaks_the_page(server, browser, part):
    show(browser, server, part)
    controls = f"[...document.querySelectorAll('#{part} :is(button, select, input, summary)')].filter(e => !e.disabled && e.type !== 'file' && e.getClientRects().length)"
    used = browser.value(f"""(async () => {{ let used = 0;
      for (const e of {controls}) {{
        if (!e.isConnected || e.disabled || !e.getClientRects().length) continue;
        used++;
        if (e.tagName === 'SELECT') for (const option of [...e.options]) {{ e.value = option.value; for (const type of ['input', 'change']) e.dispatchEvent(new Event(type, {{bubbles: true}})); }}
        else if (e.type === 'number') {{ e.value = Number(e.min || 0) + 1; for (const type of ['input', 'change']) e.dispatchEvent(new Event(type, {{bubbles: true}})); }}
        else e.click();
        await new Promise(resolve => setTimeout(resolve, 30));
      }}
      return used; }})()""")
    assert used >= {'live': 2, 'masks': 20, 'maps': 10, 'check': 3}[part]
    browser.wait('samples.length > 1')
    assert browser.complaints() == ([], {f'127.0.0.1:{server.port}'})


def test_the_parts_are_tabs_for_the_keyboard_and_have_addresses(server, browser):
    browser.open(server.url + '/#maps', READY)
    shown = "[...document.querySelectorAll('[role=tabpanel]')].filter(e => !e.hidden).map(e => e.id).join()"
    assert browser.value(shown) == 'maps'
    browser.key('ArrowRight', '#tab-maps')
    browser.wait(shown + " === 'check'")
    browser.key('ArrowRight')
    browser.wait(shown + " === 'live' && location.hash === '#live' && document.activeElement.id === 'tab-live'")
    browser.key('End')
    browser.wait(shown + " === 'check'")
    # the Tab key reaches only the selected tab, which is the fourth
    assert browser.value("document.querySelectorAll('[role=tab][tabindex=\"-1\"]').length") == 3


def test_the_first_page_begins_with_a_link_to_the_interface(server, browser):
    browser.open(server.url + '/', READY)
    assert browser.value("document.querySelector('a').getAttribute('href')") == '/docs'
    assert browser.value("document.querySelector('a').getBoundingClientRect().bottom") < 200


def test_with_tokens_the_pages_ask_once(serve, browser, tmp_path):
    (tmp_path / 'tokens').write_text('secret\n')
    server = serve('--token-file', tmp_path / 'tokens')
    browser.open(server.url + '/', "document.getElementById('token-dialog').open")
    browser.key('Escape', '#token')  # not now
    browser.wait("document.getElementById('trouble').textContent === 'A token is required.'")
    browser.click('#token-again')
    browser.wait("document.getElementById('token-dialog').open")
    for token, says in (('wrong', 'This server does not know that token.'), ('secret', None)):
        browser.value(f"document.getElementById('token').value = '{token}'")
        browser.click('#token-form button')
        browser.wait(f"document.getElementById('token-why').textContent === '{says}'" if says else READY)
    browser.click('#tab-masks')
    browser.click('#mask-send')
    browser.wait("document.getElementById('mask-answer').textContent.startsWith('Answered')")
    assert 'secret' not in browser.text('#mask-code') and '$TOKEN' in browser.text('#mask-code')
    browser.open(server.url + '/docs', "!!document.getElementById('post_v1_attention_forward')")
    browser.value(SEND)
    browser.wait(ANSWERED + ".startsWith('HTTP 200')")  # /docs uses the token that was entered at /
    assert browser.complaints()[0] == []


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
