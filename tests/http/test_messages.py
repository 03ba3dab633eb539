"""What a client reads when it is refused, compared word for word: status, pointer, detail.

Unit tests compare most messages where they are made (tests/unit/proto-json, tests/unit/kernels). This file compares one
refusal of each layer, to show that status, pointer and detail reach the client. It also compares all messages that have
no unit test. The bodies are the rows of test_json.py with the same names; OTHERS has further requests."""
import pytest

from test_json import BASE64, CU, FORWARD, GOOD, MEMBERS, SYNTAX, T, TENSORS, X, swap, tensor, zeros

# text that many of the messages below contain
OBJECT = 'must be an object: {"shape": [...], "dtype": "float32", "data": base64 or numbers}'
UNFINISHED = 'before the value is complete (was it cut off?)'
WHITE_SPACE = "white space; write it without (forms and URLs turn '+' into a space)"

WORDS = {
    'truncated_in_base64': (400, '', f'not JSON: the body ends after 54 bytes, {UNFINISHED}'),
    'plus': (400, '', "not JSON at byte 189: expected a value, found '+' (a number has no plus sign)"),
    'nul_byte': (400, '', 'not JSON at byte 5: expected a value, found byte 0x00'),
    'unknown_in_a_tensor': (400, '/q/strides', "q: unknown member 'strides'; leave it out, data is C-contiguous: np.ascontiguousarray(x)"),
    'null_tensor': (400, '/q', f'q: is null, {OBJECT}'),
    'layout': (400, '/layout', "layout: is 'sbhd', must be bshd or bhsd; transpose the tensors to one of these"),
    'alignment': (400, '/alignment', "alignment: is 'left', must be bottom_right or top_left; write 'top_left'"),
    'encoding': (400, '/encoding', "encoding: is 'hex', must be base64 or array; write 'base64'"),
    'requests_beside_others': (400, '/causal', 'causal: cannot stand beside requests; it belongs to each of the problems in there'),
    'requests_of_a_number': (400, '/requests', 'requests: is 1, must be an array of problems'),
    'no_padding': (400, '/q/data',
        "q: data ends after 6 characters of base64, inside a group of four; '=' at the end fills it to a multiple of four"),
    'half_the_padding': (400, '/q/data', "q: data ends after 7 characters of base64, inside a group of four; a second '=' is missing"),
    'padding_in_front': (400, '/q/data',
        'q: data is not base64 at character 0 (byte 50 of the body): padding where a group of four has not two characters yet'),
    'bits_left_over': (400, '/q/data',
        'q: data is not base64 at character 6 (byte 56 of the body): padding after a character whose unused bits are not zero'),
    'line_feed': (400, '/q/data',
        'q: data is not base64 at character 4 (byte 55 of the body): a line break; `base64 -w0` and base64.b64encode() write none'),
    'space': (400, '/q/data',
        f'q: data is not base64 at character 4 (byte 54 of the body): {WHITE_SPACE}'),
    'comma': (400, '/q/data', 'q: data is not base64 at character 4 (byte 54 of the body): numbers as text; send the array without the quotes'),
    'product_2_64': (400, '/q/shape', 'q: shape [4294967296, 4294967296, 1, 1] of float32 is more bytes than can be counted'),
    'head_dim_1025': (422, '/q/shape/3', 'q: shape[3] is 1025, head sizes up to 1024 are supported'),
    'head_dim_2_31': (400, '/q/data', 'q: data has 0 bytes, shape [1, 1, 1, 2147483647] of float32 needs 8589934588; the string is empty'),
    'heads_no_multiple': (400, '/k/shape/2',
        'k: shape[2] is 2, must divide the 3 heads of q'),
    'dtypes_differ': (400, '/k/dtype', "k: dtype is float16, must be float32 as q's, or float8_e4m3fn"),
    'scales_without_fp8': (400, '/q_scale', 'q_scale: q has dtype float32, scales are for float8_e4m3fn'),
    'cu_seqlens_alone': (400, '/q/shape', 'q: shape [1, 3, 2, 4] has 4 dimensions, must have 3 with cu_seqlens_q: [total_q, H, D]; leave out the first axis'),
    'bias_of_integers': (400, '/bias/dtype', "bias: dtype is 'int32', must be float32, float16 or bfloat16; convert it to float32"),
}


def bodies():
    """Returns {name: body} for every row of test_json.py."""
    for name, body, *_ in SYNTAX + MEMBERS:
        yield name, body.encode('utf-8', 'surrogateescape')
    for name, text, _ in BASE64:
        yield name, swap('q', T.replace('AACAPw==', text)).encode()
    for name, change, _ in TENSORS:
        yield name, {**dict(q=X, k=X, v=X), **change}
    for name, cu_q, cu_k in CU:
        x = zeros(3, 2, 4)
        yield name, dict(q=x, k=x, v=x, cu_seqlens_q=tensor(cu_q, 'int32'), cu_seqlens_k=tensor(cu_k, 'int32'))


@pytest.mark.parametrize('name, body', [(n, b) for n, b in bodies() if n in WORDS], ids=[n for n, _ in bodies() if n in WORDS])
def test_words(server, name, body):
    answer = server.post(FORWARD, body)
    problem = answer.json()
    assert (answer.status, problem.get('pointer', ''), problem['detail']) == WORDS[name]


def test_every_row_is_used():
    assert set(WORDS) <= {n for n, _ in bodies()}


NUMBERS = [
    ('[]', '/q/data', 'q: data has 0 numbers, shape [1, 1, 1, 1] needs 1'),
    ('[[[[[1]]]],1]', '/q/data', 'q: data at byte 53 of the body: arrays are nested deeper than 4'),
    ('[null]', '/q/data', 'q: data at byte 50 of the body: null is no number; "NaN" stands for one that is missing'),
    ('[[1,2],[3]]', '/q/data', 'q: data at byte 58 of the body: this array is shorter than the ones before it'),
]


@pytest.mark.parametrize('numbers, pointer, words', NUMBERS, ids=[n[0] for n in NUMBERS])
def test_words_about_numbers(server, numbers, pointer, words):
    problem = server.post(FORWARD, swap('q', f'{{"shape":[1,1,1,1],"dtype":"float32","data":{numbers}}}').encode()).json()
    assert (problem.get('pointer', ''), problem['detail']) == (pointer, words)


BACKWARD = [
    ({'q': X, 'dout': X, 'context': '0' * 32}, 400, '/q', 'q: comes from context and cannot be given beside it'),
    ({'dout': X, 'context': '0' * 32}, 404, '/context', 'context: unknown, expired or already used'),
]


@pytest.mark.parametrize('body, status, pointer, words', BACKWARD, ids=[b[3].split(':')[0] + f'_{i}' for i, b in enumerate(BACKWARD)])
def test_words_of_backward(server, body, status, pointer, words):
    answer = server.backward(**body)
    problem = answer.json()
    assert (answer.status, problem.get('pointer', ''), problem['detail']) == (status, pointer, words)


OTHERS = [
    ('POST', '/v1/nothing', {}, 404, 'not-found', "there is nothing at '/v1/nothing' (/openapi.json lists what there is)"),
    ('GET', FORWARD, {}, 405, 'method-not-allowed', 'GET came, this path answers POST with tensors in the body, as JSON or binary (application/json or application/x-safetensors)'),
    ('POST', '/livez', {}, 405, 'method-not-allowed', 'POST came, this path answers GET, HEAD; q, k and v go to POST /v1/attention/forward'),
    ('POST', FORWARD, {'Content-Type': 'text/html'}, 415, 'unsupported-media-type', "Content-Type is 'text/html', must be application/json or application/x-safetensors; send a JSON object or a safetensors file, and name it so"),
    ('POST', FORWARD, {'Content-Encoding': 'br'}, 415, 'unsupported-media-type', "Content-Encoding is 'br', must be gzip or deflate; or send the body uncompressed, without it"),
    ('POST', FORWARD, {'X-Request-Timeout-Ms': 'x'}, 400, 'invalid-request', "X-Request-Timeout-Ms is 'x', must be a whole number of milliseconds from 1 to 2^53"),
    ('POST', FORWARD, {'X-Request-Timeout-Ms': '0'}, 400, 'invalid-request', "X-Request-Timeout-Ms is '0', must be a whole number of milliseconds from 1 to 2^53"),
    ('POST', FORWARD, {'Content-Length': str(1 << 40)}, 413, 'too-large', 'the body has 1099511627776 bytes, the limit is 1073741824 (the server\'s --max-body-bytes)'),
]


@pytest.mark.parametrize('method, path, headers, status, code, words', OTHERS, ids=[o[5] for o in OTHERS])
def test_words_about_the_rest(server, method, path, headers, status, code, words):
    answer = server.ask(method, path, b'' if 'Content-Length' in headers else GOOD.encode() if method == 'POST' else None, headers)
    problem = answer.json()
    assert (answer.status, problem['code'], problem['detail']) == (status, code, words)


def test_the_problem_document_is_whole(server):
    answer = server.post(FORWARD, b'{"q":1}', {'X-Request-Id': 'whole-1'})
    assert answer.headers['content-type'] == 'application/problem+json'
    assert answer.json() == {
        'type': 'urn:attnd:invalid-request', 'title': 'The request is malformed', 'status': 400, 'code': 'invalid-request', 'request_id': 'whole-1',
        'pointer': '/q', 'detail': f'q: is 1, {OBJECT}', 'error': f'q: is 1, {OBJECT}'}


def test_of_an_envelope_the_pointer_names_the_problem(server):
    (good, error) = server.post(FORWARD, f'{{"requests":[{GOOD},{{"q":1}}]}}'.encode()).json()['responses']
    assert 'out' in good
    assert error['error']['pointer'] == '/requests/1/q' and error['error']['detail'] == f'q: is 1, {OBJECT}'


def test_what_is_quoted_is_cut_and_clean(server):
    problem = server.post(FORWARD, b'{"' + b'x' * 5000 + b'\\u001b\\"":1}').json()
    assert len(problem['detail']) < 256 and '\x1b' not in problem['detail']
