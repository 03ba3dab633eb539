"""What a client reads when it is refused, word for word: status, pointer, detail.

The bodies are the rows of test_json.py of the same name; the requests of OTHERS stand here. A sentence names the tensor
or option, the index, the value and the rule. Whoever changes one changes it here too, and asks who may be reading it.
"""
import pytest

from test_json import BASE64, CU, FORWARD, GOOD, MEMBERS, SYNTAX, T, TENSORS, X, swap, tensor, zeros

# What many of them say.
OBJECT = 'must be an object: {"shape": [...], "dtype": "float32", "data": base64 or numbers}'
DTYPES = 'must be float32, float16, bfloat16 or float8_e4m3fn'
EDGE = 'must be an integer from -1 to 2^53, where -1 is unbounded'
SIZE = 'must be an integer from 0 to 2^31 - 1'
ROWS = 'must be an integer from 0 to 2^53, the number of rows, or "all"'
DATA = 'must be base64 in a string or an array of numbers'
UNFINISHED = 'before the value is complete (was it cut off?)'
NO_POINT = 'it is written without point and exponent'
BHSD = 'read as [B, H, S, D] all would fit: is "layout": "bhsd" missing?'
WHITE_SPACE = "white space; write it without (forms and URLs turn '+' into a space)"
URL_SAFE = "the URL alphabet; '+' and '/' are wanted, as base64.b64encode() writes them"

WORDS = {
    'nothing': (400, '', 'the body is empty, expected a JSON object with q, k and v'),
    'white_space': (400, '', 'the body is empty, expected a JSON object with q, k and v'),
    'truncated_in_an_object': (400, '', f'not JSON: the body ends after 180 bytes, {UNFINISHED}'),
    'truncated_in_a_string': (400, '', f'not JSON: the body ends after 30 bytes, {UNFINISHED}'),
    'truncated_in_base64': (400, '', f'not JSON: the body ends after 54 bytes, {UNFINISHED}'),
    'truncated_in_a_name': (400, '', f'not JSON: the body ends after 3 bytes, {UNFINISHED}'),
    'text_after_the_end': (400, '', "not JSON at byte 181: expected nothing after the value, found 'x'"),
    'two_documents': (400, '',
        'not JSON at byte 181: expected nothing after the value, found \'{\' (several problems go into one {"requests": [...]})'),
    'byte_order_mark': (400, '', 'not JSON at byte 0: expected a value, found byte 0xef (a byte order mark? Send UTF-8 without one)'),
    'comment': (400, '', "not JSON at byte 0: expected a value, found '/' (JSON has no comments, and no fractions such as 1/8)"),
    'line_comment': (400, '', "not JSON at byte 180: expected ',' or '}', found '/' (JSON has no comments, and no fractions such as 1/8)"),
    'nan': (400, '',
        "not JSON at byte 189: expected a value, found 'N' (JSON has no NaN or Infinity; inside `data` write them as strings; for None leave the member out)"),
    'infinity': (400, '',
        "not JSON at byte 189: expected a value, found 'I' (JSON has no NaN or Infinity; inside `data` write them as strings)"),
    'minus_infinity': (400, '', "not JSON at byte 190: expected a digit, found 'I' (JSON has no NaN or Infinity; inside `data` write them as strings)"),
    'comma_at_the_end': (400, '', "not JSON at byte 181: expected a member's name in quotes, found '}' (a comma too many?)"),
    'comma_in_front': (400, '', "not JSON at byte 1: expected a member's name in quotes or '}', found ',' (a comma too many?)"),
    'two_commas': (400, '', "not JSON at byte 181: expected a member's name in quotes, found ',' (a comma too many?)"),
    'single_quotes': (400, '',
        "not JSON at byte 1: expected a member's name in quotes or '}', found ''' (strings stand in double quotes, as json.dumps() writes them)"),
    'name_without_quotes': (400, '', "not JSON at byte 1: expected a member's name in quotes or '}', found 'q'"),
    'no_colon': (400, '', "not JSON at byte 5: expected ':', found '1'"),
    'leading_zero': (400, '', 'byte 189: a number may not begin with 0 and another digit'),
    'no_digit_after_the_point': (400, '', "not JSON at byte 191: expected a digit, found '}'"),
    'plus': (400, '', "not JSON at byte 189: expected a value, found '+' (a number has no plus sign)"),
    'hexadecimal': (400, '', "not JSON at byte 190: expected ',' or '}', found 'x'"),
    'half_an_exponent': (400, '', "not JSON at byte 191: expected a digit, found '}'"),
    'capital_true': (400, '', "not JSON at byte 190: expected a value, found 'T' (JSON writes true and false, as json.dumps() does)"),
    'line_feed_in_a_string': (400, '', 'not JSON at byte 38: control character 0x0a inside a string'),
    'bad_escape': (400, '', 'not JSON at byte 39: expected one of "\\/bfnrtu after a backslash, found \'x\''),
    'half_a_unicode_escape': (400, '', 'not JSON at byte 37: expected a hexadecimal digit, found \'"\''),
    'lone_surrogate': (400, '', 'not JSON at byte 39: expected the second half of a surrogate pair, found \'"\''),
    'bytes_that_are_no_utf8': (400, '', 'byte 38: invalid UTF-8'),
    'overlong_utf8': (400, '', 'byte 33: invalid UTF-8'),
    'nul_escape_in_a_name': (400, '', 'byte 8: \\u0000 is not accepted (bytes are sent in base64)'),
    'nul_byte': (400, '', 'not JSON at byte 5: expected a value, found byte 0x00'),
    'nul_escape_in_a_value': (400, '', 'byte 45: \\u0000 is not accepted (bytes are sent in base64)'),
    'wrong_bracket': (400, '', "not JSON at byte 180: expected ',' or '}', found ']'"),
    'closed_too_often': (400, '', "not JSON at byte 181: expected nothing after the value, found '}'"),
    'unfinished_list': (400, '', "not JSON at byte 194: expected ',' or ']', found '}'"),
    'words': (400, '', "not JSON at byte 0: expected a value, found 'h' (form fields or a file's name? Send JSON: requests.post(url, json=...), curl --data-binary @FILE)"),
    'unknown': (400, '/causl', "unknown member 'causl', did you mean 'causal'?"),
    'unknown_in_a_tensor': (400, '/q/strides', "q: unknown member 'strides'; leave it out, data is C-contiguous: np.ascontiguousarray(x)"),
    'twice': (400, '/causal', "member 'causal' is given twice"),
    'tensor_twice': (400, '/q', "member 'q' is given twice"),
    'shape_twice': (400, '/q/shape', "q: member 'shape' is given twice"),
    'data_twice': (400, '/q/data', "q: member 'data' is given twice"),
    'null_tensor': (400, '/q', f'q: is null, {OBJECT}'),
    'null_option': (400, '/scale', 'scale: is null, must be a number; leave it out where it is not wanted'),
    'tensor_of_a_number': (400, '/q', f'q: is 1, {OBJECT}'),
    'tensor_of_a_list': (400, '/q', f'q: is an array, {OBJECT}'),
    'no_shape': (400, '/q', 'q: shape is missing; q is [B, Sq, H, D]'),
    'no_dtype': (400, '/q', f'q: dtype is missing, {DTYPES}'),
    'no_data': (400, '/q', f'q: data is missing, {DATA}'),
    'unknown_dtype': (400, '/q/dtype', f"q: dtype is 'float64', {DTYPES}; convert it to float32"),
    'dtype_of_a_number': (400, '/q/dtype', f'q: dtype is 4, {DTYPES}'),
    'shape_of_a_number': (400, '/q/shape', 'q: shape is 1, must be an array of integers, such as [1, 128, 8, 64]'),
    'data_of_a_number': (400, '/q/data', f'q: data is 1, {DATA}'),
    'data_of_null': (400, '/q/data', f'q: data is null, {DATA}; JSON.stringify() writes null for undefined and NaN'),
    'data_of_an_object': (400, '/q/data', f"q: data is an object, {DATA}; of a typed array of JavaScript send Array.from(x), or Buffer.from(x.buffer).toString('base64')"),
    'causal_of_a_number': (400, '/causal', 'causal: is 1, must be true or false; write true'),
    'causal_of_a_string': (400, '/causal', "causal: is 'true', must be true or false, without quotes"),
    'scale_of_a_string': (400, '/scale', "scale: is '1', must be a number, without quotes"),
    'scale_too_large': (400, '/scale', 'scale: is 1e400, must be within the range of float64'),
    'layout': (400, '/layout', "layout: is 'sbhd', must be bshd or bhsd; transpose the tensors to one of these"),
    'alignment': (400, '/alignment', "alignment: is 'left', must be bottom_right or top_left; write 'top_left'"),
    'window_of_one': (400, '/window', 'window: has 1 element, must have 2: [left, right], where -1 is unbounded'),
    'window_of_three': (400, '/window', 'window: has 3 elements, must have 2: [left, right], where -1 is unbounded'),
    'window_of_halves': (400, '/window/0',
        f'window: [0] is 1.5, {EDGE}; {NO_POINT}'),
    'window_below': (400, '/window/0', f'window: [0] is -2, {EDGE}'),
    'window_of_2_64': (400, '/window/0',
        f'window: [0] is 18446744073709551616, {EDGE}'),
    'scale_beyond_float32': (400, '/scale', 'scale: is 1e+39, must be between -3.4e38 and 3.4e38 (a float32)'),
    'softcap_beyond_float32': (400, '/softcap', 'softcap: is 1e+39, must be 0 or between 1.18e-38 and 3.4e38 (a float32)'),
    'softcap_below_float32': (400, '/softcap', 'softcap: is 1e-39, must be 0 or between 1.18e-38 and 3.4e38 (a float32)'),
    'softcap_negative': (400, '/softcap', 'softcap: is -1, must be 0 or between 1.18e-38 and 3.4e38 (a float32)'),
    'dropout_of_one': (400, '/dropout_p', 'dropout_p: is 1, must be at least 0 and below 1'),
    'dropout_negative': (400, '/dropout_p', 'dropout_p: is -0.1, must be at least 0 and below 1'),
    'seed_negative': (400, '/seed', 'seed: is -1, must be an integer from 0 to 2^64 - 1; leave it out where it is not wanted'),
    'seed_of_a_fraction': (400, '/seed', f'seed: is 0.5, must be an integer from 0 to 2^64 - 1; {NO_POINT}'),
    'outputs_of_a_name': (400, '/outputs', 'outputs: is \'out\', must be an array of names, such as ["out"]'),
    'outputs_of_nothing': (400, '/outputs', 'outputs: is empty, must name out or lse; leave it out for the default'),
    'outputs_unknown': (400, '/outputs/1', "outputs: [1] is 'attention', must be out or lse"),
    'outputs_of_an_input': (400, '/outputs/0', "outputs: [0] is 'q', must be out or lse"),
    'outputs_twice': (400, '/outputs/1', "outputs: [1] names 'out' a second time"),
    'outputs_of_backward': (400, '/outputs/0', "outputs: [0] is 'dq', must be out or lse; gradients are POST /v1/attention/backward"),
    'out_dtype': (400, '/out_dtype', "out_dtype: is 'float64', must be float32, float16 or bfloat16; convert what comes back"),
    'out_dtype_of_integers': (400, '/out_dtype', "out_dtype: is 'int32', must be float32, float16 or bfloat16; convert what comes back"),
    'encoding': (400, '/encoding', "encoding: is 'hex', must be base64 or array; write 'base64'"),
    'verify_negative': (400, '/verify', f'verify: is -1, {ROWS}; leave it out where it is not wanted'),
    'verify_of_some': (400, '/verify', f"verify: is 'some', {ROWS}"),
    'save_of_a_number': (400, '/save', 'save: is 1, must be true or false; write true'),
    'requests_beside_others': (400, '/causal', 'causal: cannot stand beside requests; it belongs to each of the problems in there'),
    'requests_of_a_number': (400, '/requests', 'requests: is 1, must be an array of problems'),
    'dimension_of_a_fraction': (400, '/q/shape/0',
        f'q: shape[0] is 1.5, {SIZE}; {NO_POINT}'),
    'dimension_of_1e400': (400, '/q/shape/0',
        f'q: shape[0] is 1e400, {SIZE}; {NO_POINT}'),
    'dimension_2_53_and_1': (400, '/q/shape/0', f'q: shape[0] is 9007199254740993, {SIZE}'),
    'dimension_of_a_string': (400, '/q/shape/0', f"q: shape[0] is '1', {SIZE}, without quotes"),
    'dimension_negative': (400, '/q/shape/0', f'q: shape[0] is -1, {SIZE}; no size can be left open'),
    'dimension_of_null': (400, '/q/shape/0', f'q: shape[0] is null, {SIZE}'),
    'dimension_of_a_list': (400, '/q/shape/0', f'q: shape[0] is an array, {SIZE}, without brackets'),
    'no_padding': (400, '/q/data',
        "q: data ends after 6 characters of base64, inside a group of four; '=' at the end fills it to a multiple of four"),
    'half_the_padding': (400, '/q/data', "q: data ends after 7 characters of base64, inside a group of four; a second '=' is missing"),
    'padding_too_much': (400, '/q/data',
        'q: data is not base64 at character 8 (byte 58 of the body): nothing may follow the padding'),
    'padding_in_the_middle': (400, '/q/data',
        'q: data is not base64 at character 4 (byte 54 of the body): nothing may follow the padding'),
    'padding_in_front': (400, '/q/data',
        'q: data is not base64 at character 0 (byte 50 of the body): padding where a group of four has not two characters yet'),
    'one_character_left': (400, '/q/data', 'q: data ends after 5 characters of base64, inside a group of four; a character or more is missing'),
    'bits_left_over': (400, '/q/data',
        'q: data is not base64 at character 6 (byte 56 of the body): padding after a character whose unused bits are not zero'),
    'line_feed': (400, '/q/data',
        'q: data is not base64 at character 4 (byte 55 of the body): a line break; `base64 -w0` and base64.b64encode() write none'),
    'space': (400, '/q/data',
        f'q: data is not base64 at character 4 (byte 54 of the body): {WHITE_SPACE}'),
    'space_at_the_end': (400, '/q/data',
        f'q: data is not base64 at character 8 (byte 58 of the body): {WHITE_SPACE}'),
    'tab': (400, '/q/data',
        f'q: data is not base64 at character 4 (byte 55 of the body): {WHITE_SPACE}'),
    'url_safe_minus': (400, '/q/data',
        f'q: data is not base64 at character 0 (byte 50 of the body): {URL_SAFE}'),
    'url_safe_underline': (400, '/q/data',
        f'q: data is not base64 at character 1 (byte 51 of the body): {URL_SAFE}'),
    'letter_with_an_accent': (400, '/q/data',
        'q: data is not base64 at character 4 (byte 54 of the body): not a character of the base64 alphabet (RFC 4648 section 4)'),
    'high_escape': (400, '/q/data',
        'q: data is not base64 at character 4 (byte 59 of the body): not a character of the base64 alphabet (RFC 4648 section 4)'),
    'comma': (400, '/q/data', 'q: data is not base64 at character 4 (byte 54 of the body): numbers as text; send the array without the quotes'),
    'only_padding': (400, '/q/data',
        'q: data is not base64 at character 0 (byte 50 of the body): padding where a group of four has not two characters yet'),
    'text_after_padding': (400, '/q/data',
        'q: data is not base64 at character 8 (byte 58 of the body): nothing may follow the padding'),
    'product_2_64': (400, '/q/shape', 'q: shape [4294967296, 4294967296, 1, 1] of float32 is more bytes than can be counted'),
    'product_wraps_to_zero': (400, '/q/shape',
        'q: shape [4294967296, 4294967296, 4294967296, 4294967296] of float32 is more bytes than can be counted'),
    'bytes_wrap': (400, '/q/shape', 'q: shape [2147483648, 2147483648, 1, 1] of float32 is more bytes than can be counted'),
    'product_wraps_with_a_zero': (400, '/q/shape',
        'q: shape [0, 1099511627776, 1099511627776, 4] of float32 is more bytes than can be counted'),
    'nine_axes': (400, '/q/shape', 'q: shape has 9 dimensions, must have 1 to 4; q is [B, Sq, H, D]'),
    'five_axes': (400, '/q/shape', 'q: shape has 5 dimensions, must have 1 to 4; q is [B, Sq, H, D]'),
    'three_axes': (400, '/q/shape', 'q: shape [3, 2, 4] has 3 dimensions, must have 4: [B, Sq, H, D]; a missing axis is written as 1, and heads have an axis of their own'),
    'no_axes': (400, '/q/shape', 'q: shape has 0 dimensions, must have 1 to 4; q is [B, Sq, H, D]'),
    'empty_shape_of_all': (400, '/q/shape', 'q: shape has 0 dimensions, must have 1 to 4; q is [B, Sq, H, D]'),
    'head_dim_zero': (400, '/q/shape/3', 'q: shape[3] is 0, must be at least 1'),
    'head_dim_577': (422, '/q/shape/3', 'q: shape[3] is 577, head sizes up to 576 are supported'),
    'value_dim_577': (422, '/v/shape/3', 'v: shape[3] is 577, head sizes up to 576 are supported'),
    'head_dim_2_31': (400, '/q/data', 'q: data has 0 bytes, shape [1, 1, 1, 2147483647] of float32 needs 8589934588; the string is empty'),
    'heads_no_multiple': (400, '/k/shape/2',
        'k: shape[2] is 2, must divide the 3 heads of q'),
    'more_key_heads': (400, '/k/shape/2',
        'k: shape[2] is 2, must divide the 1 heads of q'),
    'no_heads': (400, '/q/shape/2', 'q: shape[2] is 0, must be at least 1'),
    'no_key_heads': (400, '/k/shape/2', 'k: shape[2] is 0, must be at least 1'),
    'batches_differ': (400, '/k/shape/0', 'k: shape[0] is 2, must be 1, the batch of q'),
    'key_dims_differ': (400, '/k/shape/3', 'k: shape[3] is 5, must be 4, the head size of q'),
    'lengths_of_k_and_v_differ': (400, '/v/shape/1', 'v: shape[1] is 4, must be 3, the keys of k'),
    'heads_of_k_and_v_differ': (400, '/v/shape/2', 'v: shape[2] is 1, must be 2, the heads of k'),
    'dtypes_differ': (400, '/k/dtype', "k: dtype is float16, must be float32 as q's, or float8_e4m3fn"),
    'integers': (400, '/q/dtype', f"q: dtype is 'int32', {DTYPES}; convert it to float32"),
    'scales_without_fp8': (400, '/q_scale', 'q_scale: q has dtype float32, scales are for float8_e4m3fn'),
    'cu_seqlens_alone': (400, '/q/shape', 'q: shape [1, 3, 2, 4] has 4 dimensions, must have 3 with cu_seqlens_q: [total_q, H, D]; leave out the first axis'),
    'cu_seqlens_of_a_batch': (400, '/q/shape', 'q: shape [1, 3, 2, 4] has 4 dimensions, must have 3 with cu_seqlens_q: [total_q, H, D]; leave out the first axis'),
    'seqlens_k_too_long': (400, '/seqlens_k/data', 'seqlens_k: [0] is 4, must be between 0 and 3, the keys of k'),
    'seqlens_k_negative': (400, '/seqlens_k/data', 'seqlens_k: [0] is -1, must be between 0 and 3, the keys of k'),
    'seqlens_k_of_another_batch': (400, '/seqlens_k/shape/0', 'seqlens_k: shape[0] is 2, must be 1, the batch of q'),
    'seqlens_k_of_floats': (400, '/seqlens_k/dtype', "seqlens_k: dtype is 'float32', must be int32 or int64; convert it to int32"),
    'mask_rows_negative': (400, '/mask_startend_rows/data',
        'mask_startend_rows: [0, 0, 0, 0] is -1, must be between 0 and 3, the queries of q'),
    'mask_rows_beyond': (400, '/mask_startend_rows/data',
        'mask_startend_rows: [0, 0, 0, 0] is 4, must be between 0 and 3, the queries of q'),
    'mask_rows_of_three': (400, '/mask_startend_rows/shape/3', 'mask_startend_rows: shape[3] is 3, must be 2 or 4 when not causal'),
    'mask_rows_of_one_not_causal': (400, '/mask_startend_rows/shape/3',
        'mask_startend_rows: shape[3] is 1, must be 2 or 4 when not causal'),
    'mask_rows_of_four_causal': (400, '/mask_startend_rows/shape/3',
        'mask_startend_rows: shape[3] is 4, must be 1 or 2 when causal'),
    'mask_rows_of_another_length': (400, '/mask_startend_rows/shape/2',
        'mask_startend_rows: shape[2] is 4, must be 3, the keys of k'),
    'bias_of_another_length': (400, '/bias/shape/3', 'bias: shape[3] is 4, must be 3, the keys of k'),
    'bias_of_three_axes': (400, '/bias/shape',
        'bias: shape [1, 3, 3] has 3 dimensions, must have 4: [1 or B, 1 or H, 1 or Sq, Sk]; a missing axis is written as 1'),
    'bias_nan': (400, '/bias/data', 'bias: [0, 0, 0, 0] is nan, must be finite or -inf'),
    'bias_infinite': (400, '/bias/data', 'bias: [0, 0, 0, 0] is inf, must be finite or -inf'),
    'bias_of_integers': (400, '/bias/dtype', "bias: dtype is 'int32', must be float32, float16 or bfloat16; convert it to float32"),
    'keep_mask_of_two': (400, '/keep_mask/data', 'keep_mask: [0, 0, 0, 0] is 2, must be 0 or 1'),
    'keep_mask_of_floats': (400, '/keep_mask/dtype', "keep_mask: dtype is 'float32', must be uint8 or bool; what is added to the scores is 'bias'"),
    'sinks_of_another_count': (400, '/sinks/shape/0',
        'sinks: shape[0] is 3, must be 2, the heads of q'),
    'slopes_of_another_count': (400, '/alibi_slopes/shape/0',
        'alibi_slopes: shape[0] is 3, must be 2, the heads of q'),
    'slopes_of_three_axes': (400, '/alibi_slopes/shape', 'alibi_slopes: shape [1, 1, 2] has 3 dimensions, must have 1 or 2: [H] or [B, H]'),
    'not_from_zero': (400, '/cu_seqlens_q/data', 'cu_seqlens_q: [0] is 1, must be 0, where the first sequence starts; these look like ends, a 0 before them is wanted: [0, 1, ...]'),
    'decreasing': (400, '/cu_seqlens_q/data', 'cu_seqlens_q: [2] is 1, must be at least 2, the value before it'),
    'past_the_end': (400, '/cu_seqlens_q/data', 'cu_seqlens_q: [1] is 4, must be 3, the rows of q'),
    'before_the_end': (400, '/cu_seqlens_q/data', 'cu_seqlens_q: [1] is 2, must be 3, the rows of q'),
    'keys_past_the_end': (400, '/cu_seqlens_k/data', 'cu_seqlens_k: [1] is 4, must be 3, the rows of k'),
    'counts_differ': (400, '/cu_seqlens_k/shape/0', "cu_seqlens_k: shape[0] is 2, must be 3 as cu_seqlens_q's"),
    'negative': (400, '/cu_seqlens_q/data', 'cu_seqlens_q: [1] is -1, must be at least 0, the value before it'),
    'empty': (400, '/cu_seqlens_q/shape/0', 'cu_seqlens_q: shape[0] is 0, must be at least 1'),
}


def bodies():
    """name: what is sent, of every row of test_json.py."""
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
    ('[1,2]', '/q/data', 'q: data has 2 numbers, shape [1, 1, 1, 1] needs 1'),
    ('[[[[1,2]]]]', '/q/data', 'q: data has 2 numbers, shape [1, 1, 1, 1] needs 1'),
    ('[[[[[1]]]],1]', '/q/data', 'q: data at byte 53 of the body: arrays are nested deeper than 4'),
    ('[1,]', '', "not JSON at byte 52: expected a value, found ']' (a comma too many?)"),
    ('[1 2]', '', "not JSON at byte 52: expected ',' or ']', found '2'"),
    ('["1"]', '/q/data', 'q: data at byte 51 of the body: a string here is "NaN", "Infinity" or "-Infinity", numbers stand without quotes'),
    ('["nan"]', '/q/data', 'q: data at byte 51 of the body: a string here is "NaN", "Infinity" or "-Infinity", numbers stand without quotes'),
    ('[true]', '/q/data', 'q: data at byte 50 of the body: a number is expected, 1 and 0 for true and false'),
    ('[null]', '/q/data', 'q: data at byte 50 of the body: null is no number; "NaN" stands for one that is missing'),
    ('[[1,2],[3]]', '/q/data', 'q: data at byte 58 of the body: this array is shorter than the ones before it'),
]


@pytest.mark.parametrize('numbers, pointer, words', NUMBERS, ids=[n[0] for n in NUMBERS])
def test_words_about_numbers(server, numbers, pointer, words):
    problem = server.post(FORWARD, swap('q', f'{{"shape":[1,1,1,1],"dtype":"float32","data":{numbers}}}').encode()).json()
    assert (problem.get('pointer', ''), problem['detail']) == (pointer, words)


BACK = dict(q=X, k=X, v=X, dout=X)
LSE = zeros(1, 2, 3)
BACKWARD = [
    ({**BACK, 'dout': zeros(1, 2, 2, 4)}, 400, '/dout/shape/1', 'dout: shape[1] is 2, must be 3, the queries of q'),
    ({**BACK, 'out': zeros(1, 2, 2, 4), 'lse': LSE}, 400, '/out/shape/1', 'out: shape[1] is 2, must be 3, the queries of q'),
    ({**BACK, 'out': X, 'lse': zeros(1, 2, 4)}, 400, '/lse/shape/2', 'lse: shape[2] is 4, must be 3, the queries of q'),
    ({**BACK, 'dlse': zeros(1, 2, 4)}, 400, '/dlse/shape/2', 'dlse: shape[2] is 4, must be 3, the queries of q'),
    ({**BACK, 'out': X}, 400, '/lse', 'lse: is required with out (give both or neither)'),
    ({**BACK, 'lse': LSE}, 400, '/out', 'out: is required with lse (give both or neither)'),
    ({**BACK, 'outputs': ['dsinks']}, 400, '/outputs', 'outputs: dsinks needs sinks, which is not given'),
    ({**BACK, 'grad_dtype': 'float16'}, 400, '/grad_dtype', "grad_dtype: is float16, must be float32, q's dtype"),
    ({**BACK, 'grad_dtype': 'float64'}, 400, '/grad_dtype', "grad_dtype: is 'float64', must be float32, float16 or bfloat16; convert what comes back"),
    ({**BACK, 'out_dtype': 'float32'}, 400, '/out_dtype',
     "out_dtype: belongs to forward, POST /v1/attention/forward; the dtype of dq, dk and dv is 'grad_dtype'"),
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
