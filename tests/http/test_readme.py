"""What the README shows, run: its curl requests against their printed answers, its Python program against its printed lines."""
import os
import re
import subprocess
import sys

import service

with open(os.path.join(service.HERE, '../README.md')) as f:
    README = f.read()


def test_curl_transcripts(server):
    shown = re.findall(r"^\$ curl -s (http://127\.0\.0\.1:8080(\S+))(?: -H '([^']*)')? -d '(.*?)'\n(.*?)\n```", README, re.M | re.S)
    assert len(shown) >= 2
    for _, path, header, body, printed in shown:
        headers = dict([header.split(': ', 1)]) if header else {}
        headers['Content-Type'] = 'application/x-www-form-urlencoded'  # as curl has it
        answer = server.post(path, body.encode(), headers).body.decode()

        def same(text):  # what differs from run to run and machine to machine
            return re.sub(r'"backend":"[^"]*"', '"backend":""', re.sub(r'"timing_us":\{[^}]*\}', '"timing_us":{}', text))
        assert same(answer) == same(printed)


def test_python_program(server):
    (program, printed), = re.findall(r'```python\n(.*?)```\n\n```\n(.*?)```', README, re.S)
    program = program.replace('http://127.0.0.1:8080', server.url)
    run = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=50 * service.SLOWER)
    assert run.returncode == 0, run.stderr

    def same(text):
        return re.sub(r"cpu \w+ |'(max_abs|relative)': [0-9.e-]+", '', text)
    assert same(run.stdout) == same(printed)


def test_wrk_line_names_a_script_that_is_there():
    for script in re.findall(r'wrk .* -s (\S+)', README):
        assert os.path.exists(os.path.join(service.HERE, '..', script))


def test_links_lead_somewhere():
    for link in re.findall(r'\]\(([^)#:]+)\)', README):
        assert os.path.exists(os.path.join(service.HERE, '..', link)), link
