"""Bodies with malformed JSON, with base64 that is not strict, or with tensors that do not fit. Each is refused, and the
message names the fault.

A row has a name, the body, and either words that the answer's `detail` must contain, or the JSON pointer that it must
name. The unit tests compare whole messages, and test_messages.py compares one message of each layer."""
import base64
import json
import re

import numpy as np
import pytest

import service
import wire
from wire import tensor

FORWARD = '/v1/attention/forward'
T = '{"shape":[1,1,1,1],"dtype":"float32","data":"AACAPw=="}'
GOOD = f'{{"q":{T},"k":{T},"v":{T}}}'


def refused(server, body, status=400, code='invalid-request', path=FORWARD):
    answer = server.post(path, body.encode('utf-8', 'surrogateescape') if isinstance(body, str) else body)
    assert answer.status == status, f'{answer} for {str(body)[:300]}'
    problem = answer.json()
    assert problem['code'] == code and problem['detail'], problem
    return problem


def swap(name, text, rest=''):
    """Returns the body GOOD with one tensor replaced by `text`."""
    parts = {'q': T, 'k': T, 'v': T, name: text}
    return '{' + ','.join(f'"{n}":{t}' for n, t in parts.items()) + rest + '}'


def test_the_body_that_the_rows_change_is_good(server):
    assert server.post(FORWARD, GOOD.encode()).status == 200


# ---- J1, J2, J6: syntax. The answer names the byte where it went wrong -----------------------------------------------

SYNTAX = [
    ('nothing', '', None), ('white_space', '  \n', None), ('truncated_in_an_object', GOOD[:-1], len(GOOD) - 1),
    ('truncated_in_a_string', GOOD[:30], 30), ('truncated_in_base64', GOOD[:GOOD.index('Pw')], GOOD.index('Pw')),
    ('truncated_in_a_name', '{"q', 3), ('text_after_the_end', GOOD + 'x', len(GOOD)), ('two_documents', GOOD + GOOD, len(GOOD)),
    ('byte_order_mark', '\ufeff' + GOOD, 0), ('comment', '/* */' + GOOD, 0), ('line_comment', GOOD[:-1] + '// x\n}', len(GOOD) - 1),
    ('nan', GOOD[:-1] + ',"scale":NaN}', len(GOOD) - 1 + 9), ('infinity', GOOD[:-1] + ',"scale":Infinity}', len(GOOD) - 1 + 9),
    ('minus_infinity', GOOD[:-1] + ',"scale":-Infinity}', len(GOOD) - 1 + 10), ('comma_at_the_end', GOOD[:-1] + ',}', len(GOOD)),
    ('comma_in_front', '{,' + GOOD[1:], 1), ('two_commas', GOOD[:-1] + ',,"causal":true}', len(GOOD)),
    ('single_quotes', "{'q':1}", 1), ('name_without_quotes', '{q:1}', 1), ('no_colon', '{"q" 1}', 5), ('leading_zero', GOOD[:-1] + ',"scale":007}', None),
    ('no_digit_after_the_point', GOOD[:-1] + ',"scale":1.}', None), ('plus', GOOD[:-1] + ',"scale":+1}', None), ('hexadecimal', GOOD[:-1] + ',"scale":0x10}', None),
    ('half_an_exponent', GOOD[:-1] + ',"scale":1e}', None), ('capital_true', GOOD[:-1] + ',"causal":True}', None),
    ('line_feed_in_a_string', GOOD.replace('float32', 'float\n32', 1), None), ('bad_escape', GOOD.replace('float32', 'float\\x32', 1), None),
    ('half_a_unicode_escape', GOOD.replace('float32', '\\u00', 1), None), ('lone_surrogate', GOOD.replace('float32', '\\ud800', 1), None),
    ('bytes_that_are_no_utf8', GOOD.replace('float32', 'float\udcff32', 1), None), ('overlong_utf8', GOOD.replace('float32', '\udcc0\udcaf', 1), None),
    ('nul_escape_in_a_name', '{"q\\u0000":1}', None), ('nul_byte', '{"q":\0}', None), ('nul_escape_in_a_value', GOOD.replace('float32', 'float32\\u0000', 1), None),
    ('wrong_bracket', GOOD[:-1] + ']', len(GOOD) - 1), ('closed_too_often', GOOD + '}', len(GOOD)),
    ('unfinished_list', GOOD[:-1] + ',"window":[1,2}', None), ('words', 'hello', 0),
]


@pytest.mark.parametrize('body, offset', [row[1:] for row in SYNTAX], ids=[row[0] for row in SYNTAX])
def test_j1_syntax(server, body, offset):
    detail = refused(server, body)['detail']
    if offset is not None:
        assert re.search(rf'\b(byte|ends after) {offset}\b', detail), f'{detail!r} does not say byte {offset}'


@pytest.mark.parametrize('body', ['[]', '1', '"text"', 'null', 'true', f'[{GOOD}]'])
def test_j1_what_is_no_object(server, body):
    refused(server, body)


@pytest.mark.parametrize('depth', [33, 1001, 1000000])
@pytest.mark.parametrize('open_, close', [('[', ']'), ('{"a":', '}')])
def test_j2_nesting(server, depth, open_, close):
    refused(server, open_ * depth + '1' + close * depth)
    refused(server, '{"q":' + open_ * depth + '1' + close * depth + '}')
    refused(server, swap('q', '{"shape":[1,1,1,1],"dtype":"float32","data":' + open_ * depth))


@pytest.mark.limit(120)
def test_j3_many_numbers_cost_their_tensor_and_no_more(server):
    count = 8_000_000
    body = b'{"q":{"shape":[1,%d,1,1],"dtype":"float16","data":[' % count + b','.join([b'0'] * count) + b']},"k":%s,"v":%s,"outputs":["lse"]}' % (
        (b'{"shape":[1,1,1,1],"dtype":"float16","data":[1]}',) * 2)
    server.post(FORWARD, GOOD.encode())
    before = server.memory_kb('VmHWM')
    assert server.post(FORWARD, body, {'X-Request-Timeout-Ms': '60000'}).status == 200
    # The server holds 16 MB for q and 32 MB for lse, and some more for sending. A tree of cJSON would take 640 MB for
    # these numbers.
    if service.SLOWER == 1:
        assert server.memory_kb('VmHWM') - before < 200 * 1024


# ---- J4, J5, J7: members ---------------------------------------------------------------------------------------------

def with_member(text):
    return GOOD[:-1] + ',' + text + '}'


MEMBERS = [
    ('unknown', with_member('"causl":true'), '/causl', 'causl'), ('unknown_in_a_tensor', swap('q', T[:-1] + ',"strides":[1]}'), '/q/strides', 'strides'),
    ('twice', with_member('"causal":true,"causal":true'), '/causal', 'causal'), ('tensor_twice', with_member(f'"q":{T}'), '/q', 'q'),
    ('shape_twice', swap('q', T[:-1] + ',"shape":[1,1,1,1]}'), '/q/shape', 'shape'), ('data_twice', swap('q', T[:-1] + ',"data":"AACAPw=="}'), '/q/data', 'data'),
    ('null_tensor', swap('q', 'null'), '/q', 'q'), ('null_option', with_member('"scale":null'), '/scale', 'scale'),
    ('tensor_of_a_number', swap('q', '1'), '/q', 'q'), ('tensor_of_a_list', swap('q', '[1]'), '/q', 'q'), ('no_shape', swap('q', '{"dtype":"float32","data":"AACAPw=="}'), '/q', 'shape is missing'),
    ('no_dtype', swap('q', '{"shape":[1,1,1,1],"data":"AACAPw=="}'), '/q', 'dtype is missing'), ('no_data', swap('q', '{"shape":[1,1,1,1],"dtype":"float32"}'), '/q', 'data is missing'),
    ('unknown_dtype', swap('q', T.replace('float32', 'float64')), '/q/dtype', 'float64'), ('dtype_of_a_number', swap('q', T.replace('"float32"', '4')), '/q/dtype', 'dtype'),
    ('shape_of_a_number', swap('q', T.replace('[1,1,1,1]', '1')), '/q/shape', 'shape'), ('data_of_a_number', swap('q', T.replace('"AACAPw=="', '1')), '/q/data', 'data'),
    ('data_of_null', swap('q', T.replace('"AACAPw=="', 'null')), '/q/data', 'data'), ('data_of_an_object', swap('q', T.replace('"AACAPw=="', '{}')), '/q/data', 'data'),
    ('causal_of_a_number', with_member('"causal":1'), '/causal', 'causal'), ('causal_of_a_string', with_member('"causal":"true"'), '/causal', 'causal'),
    ('scale_of_a_string', with_member('"scale":"1"'), '/scale', 'scale'), ('scale_too_large', with_member('"scale":1e400'), '/scale', 'scale'),
    ('scale_beyond_float32', with_member('"scale":1e39'), '/scale', 'float32'), ('softcap_beyond_float32', with_member('"softcap":1e39'), '/softcap', 'float32'),
    ('softcap_below_float32', with_member('"softcap":1e-39'), '/softcap', 'float32'),
    ('layout', with_member('"layout":"sbhd"'), '/layout', 'sbhd'), ('alignment', with_member('"alignment":"left"'), '/alignment', 'left'),
    ('window_of_one', with_member('"window":[1]'), '/window', 'window'), ('window_of_three', with_member('"window":[1,2,3]'), '/window', 'window'),
    ('window_of_halves', with_member('"window":[1.5,0]'), '/window', 'window'), ('window_below', with_member('"window":[-2,0]'), '/window', '-2'),
    ('window_of_2_64', with_member('"window":[18446744073709551616,0]'), '/window', 'window'),
    ('softcap_negative', with_member('"softcap":-1'), '/softcap', '-1'), ('dropout_of_one', with_member('"dropout_p":1'), '/dropout_p', '1'),
    ('dropout_negative', with_member('"dropout_p":-0.1'), '/dropout_p', '-0.1'), ('seed_negative', with_member('"seed":-1'), '/seed', 'seed'),
    ('seed_of_a_fraction', with_member('"seed":0.5'), '/seed', 'seed'), ('outputs_of_a_name', with_member('"outputs":"out"'), '/outputs', 'outputs'),
    ('outputs_of_nothing', with_member('"outputs":[]'), '/outputs', 'empty'), ('outputs_unknown', with_member('"outputs":["out","attention"]'), '/outputs', 'attention'), ('outputs_of_an_input', with_member('"outputs":["q"]'), '/outputs', 'q'),
    ('outputs_twice', with_member('"outputs":["out","out"]'), '/outputs', 'out'), ('outputs_of_backward', with_member('"outputs":["dq"]'), '/outputs', 'dq'),
    ('out_dtype', with_member('"out_dtype":"float64"'), '/out_dtype', 'float64'), ('out_dtype_of_integers', with_member('"out_dtype":"int32"'), '/out_dtype', 'int32'),
    ('encoding', with_member('"encoding":"hex"'), '/encoding', 'hex'), ('verify_negative', with_member('"verify":-1'), '/verify', '-1'),
    ('verify_of_some', with_member('"verify":"some"'), '/verify', 'some'), ('save_of_a_number', with_member('"save":1'), '/save', 'save'),
    ('requests_beside_others', '{"requests":[],"causal":true}', '/causal', 'causal'), ('requests_of_a_number', '{"requests":1}', '/requests', 'requests'),
    ('requests_of_requests', '{"requests":[{"requests":[]}]}', None, None),
    # dimensions
    ('dimension_of_a_fraction', swap('q', T.replace('[1,', '[1.5,')), '/q/shape', '1.5'), ('dimension_of_1e400', swap('q', T.replace('[1,', '[1e400,')), '/q/shape', 'shape'),
    ('dimension_2_53_and_1', swap('q', T.replace('[1,', '[9007199254740993,')), '/q/shape', 'shape'), ('dimension_of_a_string', swap('q', T.replace('[1,', '["1",')), '/q/shape', 'shape'),
    ('dimension_negative', swap('q', T.replace('[1,', '[-1,')), '/q/shape', '-1'), ('dimension_of_null', swap('q', T.replace('[1,', '[null,')), '/q/shape', 'shape'),
    ('dimension_of_a_list', swap('q', T.replace('[1,', '[[1],')), '/q/shape', 'shape'),
]


@pytest.mark.parametrize('body, pointer, word', [row[1:] for row in MEMBERS], ids=[row[0] for row in MEMBERS])
def test_j4_j5_members(server, body, pointer, word):
    if pointer is None:  # a fault of the whole body stays a fault of the whole envelope, without a pointer to a problem
        assert server.post(FORWARD, body.encode()).json()['responses'][0]['error']['status'] == 400
        return
    problem = refused(server, body)
    assert problem.get('pointer', '').startswith(pointer), problem
    assert word in problem['detail'], problem


def test_j5_a_negative_zero_is_no_size(server):
    answer = server.post(FORWARD, swap('q', T.replace('[1,', '[-0,')).encode())
    assert answer.status == 400, answer


@pytest.mark.parametrize('name', ['q', 'k', 'v'])
def test_what_is_required(server, name):
    parts = {n: T for n in 'qkv' if n != name}
    problem = refused(server, '{' + ','.join(f'"{n}":{t}' for n, t in parts.items()) + '}')
    assert re.search(rf'\b{name}\b', problem['detail'])


def test_j7_a_hundred_thousand_members(server):
    refused(server, '{' + ','.join(f'"m{i}":1' for i in range(100000)) + '}')


# ---- B1 to B3: base64 ------------------------------------------------------------------------------------------------

# Faults in the base64 of one float32 (4 bytes, 8 characters). A row has the position of the first invalid character,
# counted within the string.
BASE64 = [
    ('no_padding', 'AACAPw', None), ('half_the_padding', 'AACAPw=', None), ('padding_too_much', 'AACAPw===', 8), ('padding_in_the_middle', 'AA==gD8=', 4),
    ('padding_in_front', '=AACAPw=', 0), ('one_character_left', 'AACAP', None), ('bits_left_over', 'AACAPx==', None), ('line_feed', 'AACA\\nPw==', 4),
    ('space', 'AACA Pw==', 4), ('space_at_the_end', 'AACAPw== ', 8), ('tab', 'AACA\\tPw==', 4), ('url_safe_minus', '-ACAPw==', 0), ('url_safe_underline', 'A_CAPw==', 1),
    ('letter_with_an_accent', 'AACAé===', 4), ('high_escape', 'AACA\\u00e9Pw=', 4), ('comma', 'AACA,w==', 4), ('only_padding', '====', 0),
    ('text_after_padding', 'AACAPw==AACAPw==', 8),
]


@pytest.mark.parametrize('text, offset', [row[1:] for row in BASE64], ids=[row[0] for row in BASE64])
@pytest.mark.parametrize('name', ['q', 'v'])
def test_b1_b2_base64_is_strict(server, name, text, offset):
    problem = refused(server, swap(name, T.replace('AACAPw==', text)))
    assert problem['pointer'] == f'/{name}/data', problem
    if offset is not None:
        assert re.search(rf'\b{offset}\b', problem['detail']), f'{problem["detail"]!r} does not say {offset}'


# A few positions suffice in this test, because test_base64.c tests every position and every character.
@pytest.mark.parametrize('at', [0, 64, 1000, 4095])
@pytest.mark.parametrize('bad', ['*', '=', '\u0100'])
def test_b2_a_bad_character_anywhere_in_a_long_text(server, at, bad):
    good = base64.b64encode(np.ones((1, 768, 1, 1), np.float32).tobytes()).decode()
    assert len(good) == 4096
    body = swap('q', f'{{"shape":[1,768,1,1],"dtype":"float32","data":"{good[:at] + bad + good[at + 1:]}"}}')
    problem = refused(server, body)
    assert problem['pointer'] == '/q/data'
    # '=' may end a group of four characters. If it does, the character after the '=' is the first invalid one.
    assert re.search(rf'\b({at}|{at + 1})\b' if bad == '=' else rf'\b{at}\b', problem['detail']) or bad == '=' and at == 4095, problem


@pytest.mark.parametrize('count', [0, 3, 5, 8])
def test_b3_a_length_that_does_not_fit(server, count):
    for member in ('q', 'k', 'v'):
        problem = refused(server, swap(member, f'{{"shape":[1,1,1,1],"dtype":"float32","data":"{service.b64(bytes(count))}"}}'))
        assert problem['pointer'] == f'/{member}/data'
        assert re.search(rf'\b{count}\b', problem['detail']) and re.search(r'\b4\b', problem['detail']), problem


@pytest.mark.parametrize('numbers', ['[]', '[1,2]', '[[[[1,2]]]]', '[[[[[1]]]],1]', '[1,]', '[1 2]', '["1"]', '["nan"]', '[true]', '[null]', '[[1,2],[3]]'])
def test_numbers_that_do_not_fit(server, numbers):
    refused(server, swap('q', f'{{"shape":[1,1,1,1],"dtype":"float32","data":{numbers}}}'))


def test_numbers_beyond_a_dtype_of_integers(server):
    for numbers in ('[0,2147483648]', '[0,1.5]', '[0,"NaN"]', '[0,-2147483649]'):
        refused(server, with_member(f'"cu_seqlens_q":{{"shape":[2],"dtype":"int32","data":{numbers}}}'))


# ---- T1 to T9: tensors -----------------------------------------------------------------------------------------------

def shaped(*shape, dtype='float32', data=''):
    return {'shape': list(shape), 'dtype': dtype, 'data': data}


def zeros(*shape, dtype='float32'):
    return tensor(np.zeros(shape), dtype)


X = zeros(1, 3, 2, 4)
TENSORS = [
    # T1
    ('product_2_64', dict(q=shaped(2**32, 2**32, 1, 1)), {400, 413}), ('product_wraps_to_zero', dict(q=shaped(2**32, 2**32, 2**32, 2**32)), {400, 413}),
    ('bytes_wrap', dict(q=shaped(2**31, 2**31, 1, 1)), {400, 413}), ('product_wraps_with_a_zero', dict(q=shaped(0, 2**40, 2**40, 4)), {400, 413}),
    ('nine_axes', dict(q=shaped(1, 1, 1, 1, 1, 1, 1, 1, 1, data='AACAPw==')), {400}), ('five_axes', dict(q=zeros(1, 1, 3, 2, 4)), {400}), ('three_axes', dict(q=zeros(3, 2, 4)), {400}),
    ('no_axes', dict(q=shaped(data='AACAPw==')), {400}), ('empty_shape_of_all', dict(q=shaped(), k=shaped(), v=shaped()), {400}),
    # T2
    ('head_dim_zero', dict(q=zeros(1, 3, 2, 0), k=zeros(1, 3, 2, 0)), {400, 422}), ('head_dim_1025', dict(q=zeros(1, 1, 1, 1025), k=zeros(1, 1, 1, 1025), v=zeros(1, 1, 1, 1025)), {400, 422}),
    ('value_dim_1025', dict(v=zeros(1, 3, 2, 1025)), {400, 422}), ('head_dim_2_31', dict(q=shaped(1, 1, 1, 2**31 - 1)), {400, 413, 422}),
    ('heads_no_multiple', dict(q=zeros(1, 3, 3, 4)), {400}), ('more_key_heads', dict(q=zeros(1, 3, 1, 4)), {400}), ('no_heads', dict(q=zeros(1, 3, 0, 4), k=zeros(1, 3, 0, 4), v=zeros(1, 3, 0, 4)), {400, 422}),
    ('no_key_heads', dict(k=zeros(1, 3, 0, 4), v=zeros(1, 3, 0, 4)), {400}), ('batches_differ', dict(k=zeros(2, 3, 2, 4), v=zeros(2, 3, 2, 4)), {400}), ('key_dims_differ', dict(k=zeros(1, 3, 2, 5)), {400}),
    ('lengths_of_k_and_v_differ', dict(v=zeros(1, 4, 2, 4)), {400}), ('heads_of_k_and_v_differ', dict(v=zeros(1, 3, 1, 4)), {400}),
    ('dtypes_differ', dict(k=zeros(1, 3, 2, 4, dtype='float16')), {400}), ('integers', dict(q=zeros(1, 3, 2, 4, dtype='int32'), k=zeros(1, 3, 2, 4, dtype='int32'), v=zeros(1, 3, 2, 4, dtype='int32')), {400}),
    ('scales_without_fp8', dict(q_scale=tensor(np.ones((1, 2)))), {400}),
    # T7
    ('cu_seqlens_alone', dict(cu_seqlens_q=tensor([0, 3], 'int32')), {400}), ('cu_seqlens_of_a_batch', dict(cu_seqlens_q=tensor([0, 3], 'int32'), cu_seqlens_k=tensor([0, 3], 'int32')), {400}),
    ('seqlens_k_too_long', dict(seqlens_k=tensor([4], 'int32')), {400}), ('seqlens_k_negative', dict(seqlens_k=tensor([-1], 'int32')), {400}), ('seqlens_k_of_another_batch', dict(seqlens_k=tensor([1, 1], 'int32')), {400}),
    ('seqlens_k_of_floats', dict(seqlens_k=tensor([1])), {400}), ('mask_rows_negative', dict(causal=True, mask_startend_rows=tensor(np.full((1, 1, 3, 1), -1), 'int32')), {400}),
    ('mask_rows_beyond', dict(causal=True, mask_startend_rows=tensor(np.full((1, 1, 3, 1), 4), 'int32')), {400}), ('mask_rows_of_three', dict(mask_startend_rows=tensor(np.zeros((1, 1, 3, 3)), 'int32')), {400}),
    ('mask_rows_of_one_not_causal', dict(mask_startend_rows=tensor(np.zeros((1, 1, 3, 1)), 'int32')), {400}), ('mask_rows_of_four_causal', dict(causal=True, mask_startend_rows=tensor(np.zeros((1, 1, 3, 4)), 'int32')), {400}),
    ('mask_rows_of_another_length', dict(causal=True, mask_startend_rows=tensor(np.zeros((1, 1, 4, 1)), 'int32')), {400}),
    # biases and masks with wrong shapes or dtypes
    ('bias_of_another_length', dict(bias=zeros(1, 1, 3, 4)), {400}), ('bias_of_another_batch', dict(bias=zeros(2, 1, 3, 3)), {400}), ('bias_of_three_axes', dict(bias=zeros(1, 3, 3)), {400}),
    ('bias_nan', dict(bias=tensor(np.full((1, 1, 3, 3), np.nan))), {400}), ('bias_infinite', dict(bias=tensor(np.full((1, 1, 3, 3), np.inf))), {400}), ('bias_of_integers', dict(bias=zeros(1, 1, 3, 3, dtype='int32')), {400}),
    ('keep_mask_of_two', dict(keep_mask=tensor(np.full((1, 1, 3, 3), 2), 'uint8')), {400}), ('keep_mask_of_floats', dict(keep_mask=zeros(1, 1, 3, 3)), {400}), ('sinks_of_another_count', dict(sinks=zeros(3)), {400}),
    ('slopes_of_another_count', dict(alibi_slopes=zeros(3)), {400}), ('slopes_of_three_axes', dict(alibi_slopes=zeros(1, 1, 2)), {400}),
]


@pytest.mark.parametrize('change, statuses', [row[1:] for row in TENSORS], ids=[row[0] for row in TENSORS])
def test_t1_t2_t7_tensors(server, change, statuses):
    answer = server.forward(**{**dict(q=X, k=X, v=X), **change})
    assert answer.status in statuses, answer
    problem = answer.json()
    named = next(iter(change))
    assert problem['detail'] and (named in problem['detail'] or problem.get('pointer', '').startswith('/' + named)
                                  or any(n in problem['detail'] for n in change)), problem


CU = [('not_from_zero', [1, 3], [0, 3]), ('decreasing', [0, 2, 1, 3], [0, 1, 2, 3]), ('past_the_end', [0, 4], [0, 3]), ('before_the_end', [0, 2], [0, 3]),
      ('keys_past_the_end', [0, 3], [0, 4]), ('counts_differ', [0, 1, 3], [0, 3]), ('negative', [0, -1, 3], [0, 1, 3]), ('empty', [], [])]


@pytest.mark.parametrize('cu_q, cu_k', [row[1:] for row in CU], ids=[row[0] for row in CU])
def test_t7_cu_seqlens(server, cu_q, cu_k):
    x = zeros(3, 2, 4)
    answer = server.forward(q=x, k=x, v=x, cu_seqlens_q=tensor(cu_q, 'int32'), cu_seqlens_k=tensor(cu_k, 'int32'))
    assert answer.status == 400 and 'cu_seqlens' in answer.json()['detail'], answer


@pytest.mark.parametrize('Sq, Sk, outputs', [(10**6, 10**6, ['out', 'lse']), (10**12, 1, ['lse'])])
def test_t5_a_tiny_body_cannot_ask_for_a_huge_answer(server, Sq, Sk, outputs):
    """With batch size 0 every tensor is empty, so the request has no data. The sizes of its answer must be within the
    limits nevertheless."""
    answer = server.forward(q=shaped(0, Sq, 1, 4), k=shaped(0, Sk, 1, 4), v=shaped(0, Sk, 1, 4), outputs=outputs)
    assert answer.status in (200, 400, 413, 422), answer


def test_t5_output_larger_than_every_input(serve):
    server = serve('--staging-bytes', '16M')
    q = tensor(np.zeros((1, 60000, 1, 1)), 'float16')
    k = tensor(np.zeros((1, 1, 1, 1)), 'float16')
    v = tensor(np.zeros((1, 1, 1, 256)), 'float16')
    answer = server.forward(q=q, k=k, v=v)  # the body has 120 KB, and the answer 31 MB
    assert answer.status in (413, 503), answer
    assert server.forward(**wire.small_body()).status == 200


def test_t5_a_hundred_thousand_empty_problems(server):
    empty = '{"q":{"shape":[0,1,1,1],"dtype":"float16","data":""},"k":{"shape":[0,1,1,1],"dtype":"float16","data":""},"v":{"shape":[0,1,1,1],"dtype":"float16","data":""}}'
    answer = server.post(FORWARD, ('{"requests":[' + ','.join([empty] * 100000) + ']}').encode())
    assert answer.status in (400, 413), answer


def test_t6_extremes_are_computed_like_the_reference(server):
    import ref
    q = np.array([65504, -65504, 6e-8, -0.0, 0, 1], np.float64).reshape(1, 6, 1, 1)
    k = np.array([65504, 1, -65504], np.float64).reshape(1, 3, 1, 1)
    v = np.array([65504, -1, 6e-8], np.float64).reshape(1, 3, 1, 1)
    a = server.forward(q=tensor(q, 'float16'), k=tensor(k, 'float16'), v=tensor(v, 'float16')).json()
    out, lse, _ = ref.forward(*(wire.rounded(x, 'float16') for x in (q, k, v)))
    np.testing.assert_allclose(wire.value(a['out']), out, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(wire.value(a['lse']), lse, rtol=1e-5)


@pytest.mark.parametrize('shape', [(1, 3, 2, 5), (1, 2, 2, 4), (3, 2, 4)])
@pytest.mark.parametrize('name', ['dout', 'out'])
def test_t9_shapes_of_results(server, name, shape):
    members = dict(q=X, k=X, v=X, dout=X, out=X, lse=zeros(1, 2, 3))
    members[name] = zeros(*shape)
    answer = server.backward(**members)
    assert answer.status == 400 and name in answer.json()['detail'], answer


@pytest.mark.parametrize('shape', [(1, 2, 4), (1, 3, 2), (2, 3)])
@pytest.mark.parametrize('name', ['lse', 'dlse'])
def test_t9_shapes_of_lse(server, name, shape):
    members = dict(q=X, k=X, v=X, dout=X, out=X, lse=zeros(1, 2, 3))
    members[name] = zeros(*shape)
    answer = server.backward(**members)
    assert answer.status == 400 and name in answer.json()['detail'], answer


def test_t3_offsets_are_64_bit_by_contract(server):
    """Declared sizes must not overflow 64-bit offsets. tests/unit/kernels tests real tensors of more than 2^31
    elements, if memory allows."""
    answer = server.forward(q=shaped(1, 2**31, 1, 1, dtype='float16'), k=zeros(1, 1, 1, 1, dtype='float16'), v=zeros(1, 1, 1, 1, dtype='float16'))
    assert answer.status in (400, 413) and '4294967296' in answer.json()['detail'].replace(',', ''), answer


def test_t8_options_that_are_no_numbers(server):
    for text in ('"scale":1e309', '"softcap":1e309', '"dropout_p":1.0', '"dropout_p":1e-400', '"seed":1e300'):
        answer = server.post(FORWARD, with_member(text).encode())
        assert answer.status == 400 or text == '"dropout_p":1e-400', f'{text}: {answer}'


def test_nothing_internal_is_told(server):
    for body in (GOOD[:50], with_member('"x":1'), swap('q', T.replace('AACAPw==', '!'))):
        text = server.post(FORWARD, body.encode()).body.decode()
        assert not re.search(r'/work|\.c:|0x[0-9a-f]{6}|/home|/tmp', text), text
    assert json.loads(server.post(FORWARD, b'{').body)['title']
