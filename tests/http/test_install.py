"""What `make install` installs, as users see it: a library that a C program can use with pkg-config alone, the manual
and the shell completion.

These tests call make with the switches (MAKEFLAGS) of the make that runs them. With other switches it would build
everything again."""
import os
import re
import shutil
import subprocess

import pytest

import service

ROOT = os.path.abspath(os.path.join(service.HERE, '..'))
pytestmark = pytest.mark.skipif('MAKELEVEL' not in os.environ, reason='not run by make: its switches are not known')


def needs(tool):
    return pytest.mark.skipif(not shutil.which(tool), reason=f'{tool} is not here')


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=50 * service.SLOWER, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(*arguments):
    return run('make', '-C', ROOT, '--no-print-directory', *arguments)


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp('destination')
    make('install', f'DESTDIR={folder}', 'prefix=/opt/attnd')
    return folder / 'opt/attnd'


def test_what_is_installed_and_removed(tmp_path):
    def files():
        return sorted(os.path.relpath(os.path.join(folder, name), tmp_path) for folder, _, names in os.walk(tmp_path) for name in names)
    make('install', f'DESTDIR={tmp_path}')
    assert files() == ['usr/local/' + name for name in (
        'bin/attnd', 'include/attn/attention.h', 'lib/libattn.a', 'lib/pkgconfig/attn.pc', 'share/bash-completion/completions/attnd', 'share/man/man1/attnd.1')]
    assert run(tmp_path / 'usr/local/bin/attnd', '--version').startswith('attnd ')
    for _ in range(2):  # the second `make install` finds nothing to do
        make('uninstall', f'DESTDIR={tmp_path}')
        assert files() == []


@needs('pkg-config')
@needs('cc')
def test_a_program_is_built_by_pkg_config_alone(installed, tmp_path):
    env = dict(os.environ, PKG_CONFIG_PATH=str(installed / 'lib/pkgconfig'))
    # the installed paths contain DESTDIR, which pkg-config does not know
    flags = run('pkg-config', f'--define-variable=prefix={installed}', '--cflags', '--libs', 'attn', env=env).split()
    run('cc', '-std=c11', '-Wall', '-Wextra', '-Werror', os.path.join(ROOT, 'deploy/examples/attention.c'), *flags, '-o', tmp_path / 'attention')
    printed = run(tmp_path / 'attention').splitlines()
    assert printed[0].startswith('out: 1 2, 2.33952 3.33952; 2 rows checked') and printed[1].startswith('refused: k: shape[2] is 2'), printed


@needs('mandoc')
def test_the_manual_has_no_fault_and_every_option(installed):
    page = installed / 'share/man/man1/attnd.1'
    assert run('mandoc', '-T', 'lint', '-W', 'warning', page) == ''
    # the manual prints a bold letter as letter, backspace, letter; this removes the repetition
    shown = re.sub('.\b', '', run('mandoc', '-T', 'ascii', page))
    headings, flags = re.findall(r'^[A-Z ]+$', shown, re.M), re.findall(r'^ {5,7}(--[a-z-]+)', shown, re.M)
    assert headings == ['NAME', 'SYNOPSIS', 'DESCRIPTION', 'OPTIONS', 'SIGNALS', 'EXIT STATUS', 'EXAMPLES']
    assert flags + ['--help', '--version'] == [line.split()[0] for line in run(service.BINARY, '--help').splitlines() if line.startswith('  --')]


COMPLETE = r"""
set -eu
. "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
compopt() { :; } # there is none while bash completes nothing
_attnd
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize('words, offered', [
    (['attnd', 'he'], ['healthcheck']),
    (['attnd', '--log-l'], ['--log-level']),
    (['attnd', '--max-b'], ['--max-body-bytes', '--max-batch']),
    (['attnd', '--log-level', ''], ['debug', 'info', 'warn', 'error']),
    (['attnd', '--log-level', '=', 'd'], ['debug']),
    (['attnd', '--supervise', '--log-format', '='], ['text', 'json']),
    (['attnd', '--devices', 'c'], ['cpu']),
    (['attnd', '--supervise', '--tls-k'], ['--tls-key']),
    (['attnd', '--token-file', 'Makef'], ['Makefile']),
    (['attnd', '--tls-key', '=', 'a fi'], ['a file with blanks']),
    (['attnd', '--queue-depth', ''], ['']),
], ids=lambda x: ' '.join(x))
@needs('bash')
def test_bash_completes(installed, tmp_path, words, offered):
    file = installed / 'share/bash-completion/completions/attnd'
    for name in ('Makefile', 'a file with blanks'):
        (tmp_path / name).touch()
    assert run('bash', '-c', COMPLETE, 'bash', file, *words, cwd=tmp_path).split('\n')[:-1] == offered


@needs('bash')
def test_bash_takes_the_completion_and_offers_every_option(installed):
    file = installed / 'share/bash-completion/completions/attnd'
    assert 'complete -F _attnd attnd' in run('bash', '-c', '. "$1" && complete -p attnd', 'bash', file)
    offered = set(run('bash', '-c', COMPLETE, 'bash', file, 'attnd', '--supervise', '--').split())
    assert offered == {line.split()[0] for line in run(service.BINARY, '--help').splitlines() if line.startswith('  --')}
