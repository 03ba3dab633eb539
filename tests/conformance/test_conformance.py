"""Sends every case of golden.py over HTTP, with three random seeds, and judges the answers as check.py does.

The seeds are new in each run. pytest's header and each test's name show them; ATTND_SEEDS=11,12,13 repeats these
seeds."""

import pytest

import check
import golden
import service

# ../conftest.py draws ATTND_SEEDS if the environment does not set it
SEEDS = [int(s) for s in service.SETTINGS['ATTND_SEEDS'].split(',')]
CASES = [(f'{name}-{seed}', make) for seed in SEEDS for name, make in golden.all_cases(seed)]


@pytest.mark.parametrize('make', [make for _, make in CASES], ids=[name for name, _ in CASES])
def test_answer_agrees_with_float64(server, make):
    case = make()
    answer = server.post(case['endpoint'], case['request'])
    worst, why = check.judge(case, answer.status, answer.json())
    assert not why, why


def test_the_judge_is_no_rubber_stamp(server):
    """check.judge() must notice a changed answer, a missing tensor and a refusal."""
    case = dict(golden.all_cases(1))['fwd_float32_d64_causal']()
    answer = server.post(case['endpoint'], case['request']).json()
    assert not check.judge(case, 200, answer)[1]
    out = golden.dec(answer['out'])
    out[0, 3, 1, 5] += 1e-3
    assert 'out' in check.judge(case, 200, {**answer, 'out': golden.enc(out, 'float32')[0]})[1]
    assert check.judge(case, 200, {'out': answer['out']})[1] == 'lse missing'
    assert check.judge(case, 400, {'detail': 'no'})[1] == '400 no'
