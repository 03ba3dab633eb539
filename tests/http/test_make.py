"""What make prints about CUDA: if there is a GPU but no nvcc, it prints what is missing, and otherwise nothing. Also
what `make run` prints while it builds."""
import os
import subprocess

import pytest

import service

ROOT = os.path.join(service.HERE, '..')


def make(tmp_path, *arguments):
    env = {k: v for k, v in os.environ.items() if k not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'CUDA', 'CUDA_ARCHS', 'CUDA_PTX', 'NVCC', 'B', 'CI', 'SAN', 'TSAN')}
    run = subprocess.run(['make', '-s', '-C', ROOT, '--no-print-directory', f'B={tmp_path}/build', *arguments], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_gpu_without_nvcc_is_told_about(tmp_path):
    text = make(tmp_path, 'print-advice', 'NVCC=/no/such/nvcc', 'GPU_FILES=/dev/null')
    assert text.startswith('make: there is a GPU here but no nvcc') and text.count('\n') == 1


@pytest.mark.parametrize('arguments', [('CUDA=0', 'GPU_FILES=/dev/null'), ('NVCC=true', 'GPU_FILES=/dev/null')])
def test_otherwise_nothing_is_said(tmp_path, arguments):
    assert make(tmp_path, 'print-advice', *arguments) == ''


def test_cuda_is_in_when_its_compiler_is_there(tmp_path):
    assert make(tmp_path, 'print-cuda', 'NVCC=/no/such/nvcc') == 'no\n'
    assert make(tmp_path, 'print-cuda', 'CUDA=0') == 'no\n'


def test_the_compute_capabilities_are_those_asked_for(tmp_path):
    """$B/flags, a file on which every object depends, contains the compute capabilities."""
    def targets(*arguments):
        make(tmp_path, 'print-cuda', 'NVCC=true', 'CUDA_HOME=/nowhere', *arguments)
        with open(tmp_path / 'build/flags') as f:
            return [word for word in f.read().split() if word.startswith('arch=')]
    hopper = ['arch=compute_90a,code=sm_90a']
    ptx = ['arch=compute_80,code=compute_80']
    assert targets() == [f'arch=compute_{a},code=sm_{a}' for a in (80, 89, 90)] + ptx + hopper
    assert targets('CUDA_ARCHS=90') == ['arch=compute_90,code=sm_90'] + ptx + hopper
    assert targets('CUDA_ARCHS=90', 'CUDA_PTX=') == ['arch=compute_90,code=sm_90'] + hopper


@pytest.mark.skipif('MAKELEVEL' not in os.environ, reason='not run by make: its switches are not known, and with others everything would be built anew')
def test_run_says_how_far_it_is(tmp_path):
    """`make run` in a copy of this build from which two files were removed."""
    build = os.path.dirname(service.BINARY)
    for name in ('flags', 'server', 'text', 'proto-json', 'kernels', 'libserver.a', 'libattn.a'):
        subprocess.run(['cp', '-a', os.path.join(build, name), tmp_path], check=True)
    run = subprocess.run(['make', '-C', ROOT, '--no-print-directory', 'run', f'B={tmp_path}', 'ARGS=--version'], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if not line.startswith('make[')]
    assert lines[:2] == ['  1 of 2  ar libproto.a', '  2 of 2  ld attnd'] and lines[-1].startswith('attnd '), run.stdout


def test_run_says_that_cuda_takes_minutes(tmp_path):
    def said(*arguments):  # make must print the advice itself; the command that prints it is not enough
        return any(line.startswith('The CUDA kernels take minutes to compile; CUDA=0') for line in make(tmp_path, '-n', 'run', *arguments).splitlines())
    assert said('CUDA=1', 'NVCC=true', 'CUDA_HOME=/nowhere')
    assert not said('CUDA=0')


def test_layers_are_read_from_includes_without_compiling(clone):
    """The tool layers.py runs in a checkout where nothing was built. Then it runs with two object files, which show the
    functions that their sources call, and then with one of them older than its source."""
    def layers(status):
        env = {k: v for k, v in os.environ.items() if k not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'B', 'SAN', 'TSAN')}
        run = subprocess.run(['make', '-s', '-C', clone, '--no-print-directory', 'check-layers', 'CUDA=0'], env=env, capture_output=True, text=True)
        assert bool(run.returncode) == status, run
        assert not list((clone / 'build').rglob('*.o')) or (clone / 'build/server/base/clean.o').exists()
        return run.stdout
    assert ', no calls, 0 faults' in layers(False)
    source = clone / 'server/base/clean.c'
    source.write_text('#include "server/http/tcp.h"\nint clean(void);\nint clean(void) { return tcp_is_mute(0); }\n')
    assert 'server/base/clean.c includes server/http/tcp.h: server/base may not use server/http' in layers(True)
    source.write_text('int tcp_is_mute(int);\nint clean(void);\nint clean(void) { return tcp_is_mute(0); }\n')
    assert ' 0 faults' in layers(False)  # the object file shows this call, although no #include does
    built = clone / 'build/server'
    for name in ('base/clean', 'http/tcp'):
        (built / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(['cc', '-D_GNU_SOURCE', '-I.', '-c', '-o', built / (name + '.o'), f'server/{name}.c'], cwd=clone, check=True)
    text = layers(True)
    assert 'server/base/clean calls server/http/tcp: server/base may not use server/http' in text and 'calls of 2 object files, 1 faults' in text, text
    os.utime(built / 'base/clean.o', (1, 1))
    assert 'calls of 1 object files (1 older than their sources are left out), 0 faults' in layers(False)
    source.unlink()
    (built / 'base/clean.o').unlink()
    (built / 'http/tcp.o').unlink()
