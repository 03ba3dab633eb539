"""Tests attn-bench: every option of its command line is used in a call that computes. No test here depends on speed."""
import json
import os
import subprocess

import pytest

import service

BENCH = os.path.join(os.path.dirname(service.BINARY), 'attn-bench')
SHAPE = ('--device', 'cpu', '--threads', '1', '-B', '1', '-H', '2', '--sq', '16', '--sk', '24', '-D', '8', '--dtype', 'float32', '--reps', '1', '--json')


def run(*options):
    return subprocess.run([BENCH, *SHAPE, *options], capture_output=True, text=True, timeout=60 * service.SLOWER)


def rows(*options):
    r = run(*options)
    assert r.returncode == 0, r
    return {row['op']: row['outputs'] for row in map(json.loads, r.stdout.splitlines())}


GRADIENTS = ['dq', 'dk', 'dv']


@pytest.mark.parametrize('options', [
    ('--softcap', '30.5'), ('--softcap', '2e-3'), ('--bias',), ('--bias', '-3.4e38', '--padded', '2'), ('--bias=-1',), ('--bias', '--causal'), ('--sinks',),
    ('--keep-mask', '0.5'), ('--keep-mask', '1'), ('--dropout', '0.25'), ('--alibi', '--scale', '0.3'),
    ('--sinks', '--bias', '--keep-mask', '0.9', '--softcap', '30.5', '--dropout', '0.1', '--alibi')])
def test_every_option_of_the_scores_is_timed_both_ways_without_its_gradient(options):
    assert rows('--op', 'both', *options) == {'forward': ['out', 'lse'], 'backward': GRADIENTS}


@pytest.mark.parametrize('options, asked', [
    (('--bias',), ['dbias']), (('--sinks',), ['dsinks']), (('--alibi',), ['dalibi_slopes']), (('--bias', '--sinks', '--alibi'), ['dsinks', 'dbias']),
    (('--bias', '--sinks', '--alibi'), ['dsinks', 'dbias', 'dalibi_slopes'])])
def test_gradients_of_options_are_computed_where_they_are_asked_for(options, asked):
    assert rows('--op', 'backward', *options, '--grads', ','.join(reversed(asked))) == {'backward': GRADIENTS + asked}


@pytest.mark.parametrize('options, says', [
    (('--softcap', '0'), "--softcap is '0', must be above 0 and at most 3.40282e+38"),
    (('--softcap', 'x'), "--softcap is 'x', must be a finite float32"),
    (('--keep-mask', '0'), "--keep-mask is '0', must be above 0 and at most 1"),
    (('--keep-mask', '1.5'), "--keep-mask is '1.5', must be above 0 and at most 1"),
    (('--dropout', '1'), 'dropout_p: is 1, must be at least 0 and below 1'),
    (('--padded', '2'), '--padded is of a bias that hides keys: --bias X'),
    (('--bias', '--padded', '2'), '--padded is of a bias that hides keys: --bias X'),
    (('--grads', 'dbias', '--bias'), '--grads is of a backward: --op backward'),
    (('--op', 'backward', '--grads', 'dbias'), '--grads names a gradient whose option is not given: --bias'),
    (('--op', 'backward', '--grads', 'dq,dk'), '--grads must be of dsinks, dbias and dalibi_slopes, not: dq,dk'),
    (('--op', 'backward', '--sinks', '--grads', ''), '--grads must be of dsinks, dbias and dalibi_slopes, not: ')])
def test_an_impossible_option_is_refused_in_one_line(options, says):
    r = run(*options)
    assert r.returncode == 1 and says in r.stderr and r.stdout == '', r
