"""Tests clients that code generators write from /openapi.json. Each client must be generated without a warning, and it
must be possible to import it. It must send a request, and return an answer and a refusal as typed objects. The
generators come from PyPI (tests/requirements.txt) and have a virtual environment of their own."""
import os
import subprocess

import pytest

import service

VENV = os.path.abspath(os.path.join(service.BUILD, 'venv/bin'))


def tool(name):
    return pytest.mark.skipif(not os.access(os.path.join(VENV, name), os.X_OK), reason=f'{name} is not here (tests/setup.sh test fetches it from PyPI)')


def run(folder, *command, **more):
    env = dict(os.environ, PATH=VENV + os.pathsep + os.environ['PATH'], PYTHONPATH=str(folder))
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100 * service.SLOWER, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def document(server, tmp_path):
    (tmp_path / 'openapi.json').write_bytes(server.get('/openapi.json').body)
    return tmp_path / 'openapi.json'


CLIENT = """
import sys
from attnd_client import Client
from attnd_client.api.attention import post_v1_attention_backward as backward, post_v1_attention_forward as forward
from attnd_client.api.operations import get_readyz, get_v1_info
from attnd_client.models import *
from attnd_client.types import File

client = Client(base_url=sys.argv[1])
identity = Tensor(shape=[1, 2, 1, 2], dtype=Dtype.FLOAT32, data=[1, 0, 0, 1])
values = Tensor(shape=[1, 2, 1, 2], dtype=Dtype.FLOAT32, data='AACAPwAAAEAAAEBAAACAQA==')  # 1 2 3 4

answer = forward.sync(client=client, body=ForwardProblem(q=identity, k=identity, v=values, causal=True, encoding=ForwardProblemEncoding.ARRAY, verify='all'))
assert isinstance(answer, ForwardResult), answer
assert answer.out.data[0][0] == [[1, 2]] and answer.out.dtype is Dtype.FLOAT32 and answer.verification.rows == 2
gradients = backward.sync(client=client, body=BackwardProblem(q=identity, k=identity, v=values, dout=identity, out=answer.out, lse=answer.lse, causal=True))
assert isinstance(gradients, BackwardResult) and gradients.dq.shape == [1, 2, 1, 2], gradients

short = Tensor(shape=[1, 1, 1, 1], dtype=Dtype.FLOAT32, data=[1])
refusal = forward.sync_detailed(client=client, body=ForwardProblem(q=identity, k=short, v=short))
assert refusal.status_code == 400 and isinstance(refusal.parsed, Problem), refusal
assert refusal.parsed.code is ProblemCode.INVALID_REQUEST and refusal.parsed.pointer.startswith('/k/shape'), refusal.parsed

both = forward.sync(client=client, body=ForwardBatch(requests=[ForwardProblem(q=identity, k=identity, v=values), ForwardProblem(q=identity, k=short, v=short)]))
assert isinstance(both, ForwardAnswers) and isinstance(both.responses[0], ForwardResult), both
assert isinstance(both.responses[1], Refusal) and both.responses[1].error.detail == refusal.parsed.detail, both

file = forward.sync_detailed(client=client, body=File(payload=b'nothing'))
assert file.status_code == 400 and 'safetensors' in file.parsed.detail, file

assert isinstance(get_v1_info.sync(client=client), Info) and get_readyz.sync_detailed(client=client).status_code == 200
print(refusal.parsed.detail)
"""


@tool('openapi-python-client')
def test_openapi_python_client(server, document, tmp_path):
    # this override is needed because the generator warns of media types that it does not know
    (tmp_path / 'config.yml').write_text('content_type_overrides:\n  application/x-safetensors: application/octet-stream\n')
    said = run(tmp_path, os.path.join(VENV, 'openapi-python-client'), 'generate', '--config', 'config.yml', '--path', 'openapi.json', '--meta', 'none', '--output-path', 'attnd_client')
    assert said == 'Generating attnd_client\n', said  # the generator prints this line, and no warning
    assert run(tmp_path, os.path.join(VENV, 'python'), '-c', CLIENT, server.url).startswith('k: ')


MODELS = """
import sys, urllib.request, urllib.error
from models import *

def post(body, answer):
    try:
        with urllib.request.urlopen(sys.argv[1] + '/v1/attention/forward', ForwardRequest(body).model_dump_json(exclude_unset=True).encode()) as got:
            return answer.model_validate_json(got.read())
    except urllib.error.HTTPError as e:
        return Problem.model_validate_json(e.read())

identity = Tensor(shape=[1, 2, 1, 2], dtype='float32', data=[1, 0, 0, 1])
answer = post(ForwardProblem(q=identity, k=identity, v=identity, causal=True, encoding='array'), ForwardAnswer).root
assert isinstance(answer, ForwardResult) and answer.out.data.root[0][0] == [[1, 0]], answer
refusal = post(ForwardProblem(q=identity, k=identity, v=Tensor(shape=[1, 2, 2, 2], dtype='float32', data=[1] * 8)), ForwardAnswer)
assert isinstance(refusal, Problem) and refusal.status == 400 and refusal.code is Code.invalid_request, refusal
with urllib.request.urlopen(sys.argv[1] + '/v1/info') as got:
    assert Info.model_validate_json(got.read()).name == 'attnd'
print(refusal.detail)
"""


@tool('datamodel-codegen')
def test_datamodel_codegen(server, document, tmp_path):
    said = run(tmp_path, os.path.join(VENV, 'datamodel-codegen'), '--input', 'openapi.json', '--input-file-type', 'openapi',
               '--output', 'models.py', '--output-model-type', 'pydantic_v2.BaseModel', '--formatters', 'builtin')
    assert said == '', said
    assert run(tmp_path, os.path.join(VENV, 'python'), '-c', MODELS, server.url).startswith('v: ')
