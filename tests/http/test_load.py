"""The programs of tests/load that print tables."""
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import service

DECODE = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'load', 'decode.py')


def table(server, *options):
    """Runs decode.py and returns {column: value} for each row that it prints."""
    host, port = server.address
    done = subprocess.run([sys.executable, DECODE, '--url', f'http://{host}:{port}', '-D', '16', '--heads', '2:1', '--count', '5', *options],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    head, _, *rows = ([cell.strip() for cell in line.strip('|').split('|')] for line in done.stdout.splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


def us(row):
    return {name: int(cell) for name, cell in row.items() if ',' not in cell}


def test_a_step_of_decoding_is_told_by_its_parts(server):
    rows = table(server, '--caches', '1,2', '--lengths', '3,40')
    assert [row['caches, positions of each'] for row in rows] == ['1, 3', '2, 3', '1, 40', '2, 40']
    for row in map(us, rows):
        parts = [row[name] for name in ('wire', 'decode, encode', 'wait', 'launch', 'copy', 'kernel')]
        # each stage is rounded by itself, so their sum may differ a little
        assert sum(parts) == pytest.approx(row['p50'], abs=4)
        assert row['kernel'] > 0 and row['copy'] == 0 and row['p50'] <= row['p99']


@pytest.mark.parametrize('staging', ['0', '1'])
@pytest.mark.parametrize('script, slow', [('launch.slow=200', 'launch'), ('delay=200', 'kernel')])
def test_a_slow_launch_and_a_slow_kernel_are_told_apart(serve, script, slow, staging):
    server = serve('--cpu-threads', '1', binary=service.FAKE, env={'ATTN_FAKE_SCRIPT': script, 'ATTN_FAKE_READS_STAGING': staging})
    row, = map(us, table(server, '--caches', '2', '--lengths', '3'))
    assert row[slow] > 190000, row
    # compares only these two columns, because the others depend on the machine
    other = 'kernel' if slow == 'launch' else 'launch'
    assert row[other] < 150000, row

@pytest.mark.parametrize('tool, good', [('ab', r'Failed requests: +0\n'), ('hey', r'distribution:\s+\[200\]\s+320 responses\n\s*$')])
def test_the_line_of_another_load_tool_counts_no_refusal(server, tmp_path, tool, good):
    """Runs the command that tests/load/README.md shows for another load tool, if the tool is installed. No answer may
    be a refusal."""
    if not shutil.which(tool):
        pytest.skip(f'{tool} is not here')
    with open(os.path.join(os.path.dirname(DECODE), 'README.md')) as f:
        line, = re.findall(rf'^    ({tool} .*)$', f.read(), re.M)
    x = {'shape': [1, 8, 1, 4], 'dtype': 'float32', 'data': [0.5] * 32}
    (tmp_path / 'request.json').write_text(json.dumps({'q': x, 'k': x, 'v': x}))
    words = line.replace('http://127.0.0.1:8080', server.url).replace('-n 2000', '-n 320').split()
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=50 * service.SLOWER)
    assert run.returncode == 0 and re.search(good, run.stdout) and 'Non-2xx' not in run.stdout, run.stdout + run.stderr
