"""What new users get wrong, and what the answer must say: one row per mistake.

    python3 tests/http/mistakes.py --print [URL]

prints every mistake with its answer, from the server at URL, or from servers that the script starts. Read the answers
as somebody who has never seen this project: each must say what came, what is wanted, and what to write instead.

A row has a name, a request, the status, the code of the problem, and words that `detail` must contain: what came, what
is wanted, and the fix. A row with status 200 is a request that the server accepts. If such a row has words too, the
request is most likely a mistake, and the answer's `hints` must contain these words. test_mistakes.py runs all rows.
"""
import base64
import gzip
import io
import json
import os
import sys
import zlib
from collections import namedtuple

import numpy as np

if __name__ == '__main__':
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
import service

Mistake = namedtuple('Mistake', 'name method path headers body status code says server')

FORWARD, BACKWARD, DECODE, CACHES = '/v1/attention/forward', '/v1/attention/backward', '/v1/attention/decode', '/v1/caches'
JSON = {'Content-Type': 'application/json'}
SERVERS = {  # options of each server that the table's rows use; {tokens} becomes the path of a file with one token
    'plain': ('--log-level', 'debug'),
    'tokens': ('--token-file', '{tokens}'),
    'small': ('--max-body-bytes', '4K', '--staging-bytes', '1M'),
    'shm': ('--allow-shm', 'attn_'),
}
TOKEN = 'swordfish-0123456789'

# ---- A good request, in the sizes that a user has --------------------------------------------------------------------

B, H, HK, SQ, SK, D = 2, 4, 2, 3, 5, 8


def array(*shape, dtype='float32'):
    return np.arange(np.prod(shape), dtype='float64').reshape(shape).__mod__(7).__truediv__(4).astype(dtype)


def b64(x):
    return base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()


def tensor(x, **changes):
    made = {'shape': list(x.shape), 'dtype': str(x.dtype), 'data': b64(x), **changes}
    return {name: value for name, value in made.items() if value is not None}


Q, K, V = array(B, SQ, H, D), array(B, SK, HK, D), array(B, SK, HK, D)
GOOD = {'q': tensor(Q), 'k': tensor(K), 'v': tensor(V)}
PACKED = {'q': tensor(array(8, H, D)), 'k': tensor(array(8, HK, D)), 'v': tensor(array(8, HK, D)),
          'cu_seqlens_q': tensor(np.array([0, 3, 8], 'int32')), 'cu_seqlens_k': tensor(np.array([0, 3, 8], 'int32'))}
BACK = {**GOOD, 'dout': tensor(array(B, SQ, H, D))}
STEP = {'q': tensor(array(1, 1, H, D)), 'caches': ['65f5539a077b99991c76bdf597eb53990ea00cd4']}
CACHE = {'kv_heads': HK, 'head_dim': D, 'dtype': 'bfloat16'}
TEXT = json.dumps(GOOD)

ROWS = []


def row(name, body, status, says, code='invalid-request', method='POST', path=FORWARD, headers=JSON, server='plain'):
    if isinstance(body, dict) or isinstance(body, list):
        body = json.dumps(body)
    if isinstance(body, str):
        body = body.encode()
    ROWS.append(Mistake(name, method, path, dict(headers), body, status, None if status == 200 else code, says, server))


def member(name, value, *says, base=GOOD, **more):
    """Makes a row for a member that does not exist in this protocol."""
    row(f'member {name}', {**base, name: value}, 400, (name, *says), **more)


def data(name, text, *says, **more):
    """Makes a row whose q has its bytes written in another way than base64."""
    row(f'data {name}', {**GOOD, 'q': {**GOOD['q'], 'data': text}}, 400, ('q: data', *says), **more)


def shape(name, value, *says, **more):
    row(f'shape {name}', {**GOOD, 'q': {**GOOD['q'], 'shape': value}}, 400, ('q: shape', *says), **more)


def option(name, value, *says, base=GOOD, **more):
    row(f'{name} {json.dumps(value)}', {**base, name: value}, 400, (name, *says), **more)


def text(name, body, *says, **more):
    row(f'JSON {name}', body, 400, says, **more)


# ---- Names of other frameworks ---------------------------------------------------------------------------------------

member('is_causal', True, "write 'causal'", '"alignment": "top_left"')
member('softmax_scale', 0.125, "write 'scale'")
member('sm_scale', 0.125, "write 'scale'")
member('attn_mask', tensor(array(1, 1, SQ, SK)), "'keep_mask'", "'bias'")
member('attention_mask', tensor(array(B, SK)), "'keep_mask'", "'seqlens_k'")
member('key_padding_mask', tensor(array(B, SK)), "'keep_mask'", "'seqlens_k'")
member('window_size', [128, 0], 'write "window": [left, right]')
member('sliding_window', 128, '"window": [left, right]')
member('return_lse', True, '"outputs": ["out", "lse"]')
member('return_softmax_lse', True, '"outputs": ["out", "lse"]')
row('member Q', {'Q': GOOD['q'], 'K': GOOD['k'], 'V': GOOD['v']}, 400, ("'Q'", "did you mean 'q'"))
row('member query', {'query': GOOD['q'], 'key': GOOD['k'], 'value': GOOD['v']}, 400, ("'query'", "write 'q'"))
member('num_heads', H, "shape of q")
member('head_dim', D, "shape of q")
member('batch_size', B, "shape of q")
member('k_cache', tensor(K), "write 'k'", "'seqlens_k'")
member('cu_seqlens', tensor(np.array([0, 3, 8], 'int32')), "'cu_seqlens_q' and 'cu_seqlens_k'")
member('max_seqlen_q', 5, 'leave it out', 'cu_seqlens_q', base=PACKED)
member('enable_gqa', True, 'leave it out', 'heads')
member('dropout', 0.1, "write 'dropout_p'")
member('logits_soft_cap', 30.0, "write 'softcap'")
member('attn_bias', tensor(array(1, 1, SQ, SK)), "write 'bias'")
member('cache_seqlens', tensor(np.array([5, 3], 'int32')), "write 'seqlens_k'")
member('block_table', [[0, 1]], "write 'page_table'", '[pages, page_size, Hk, D]', "'seqlens_k'")
member('kv_indptr', [0, 2], "'cu_seqlens_k'", "'page_table' and 'seqlens_k'")
member('kv_indices', [0, 1], "write 'page_table'")
member('kv_last_page_len', [3], "write 'seqlens_k'")
member('page_size', 16, 'leave it out', 'shape[1] of k')
member('do', GOOD['q'], "write 'dout'", base=GOOD, path=BACKWARD)
member('grad_output', GOOD['q'], "write 'dout'", path=BACKWARD)
member('p', 0.1, "write 'dropout_p'")
member('segment_ids', tensor(np.zeros((B, SQ), 'int32')), "'cu_seqlens_q' and 'cu_seqlens_k'")
member('key_value_seq_lengths', [5, 3], "write 'seqlens_k'")
member('implementation', 'cudnn', 'leave it out')
member('score_mod', None, "write 'bias'")
member('attn_mask_type', 'causal', 'write "causal": true')
member('id', '1', 'X-Request-Id')
member('inputs', [], "'q'", 'in the body itself')
member('casual', True, "did you mean 'causal'")
member('use_cache', True, 'leave it out', CACHES, DECODE)
member('past_key_values', None, "'k' and 'v'", CACHES, DECODE)
member('kv_cache', None, "'k' and 'v'", CACHES, DECODE)
row('member block_table of a backward', {**BACK, 'block_table': [[0, 1]]}, 400, ("'block_table'", 'backward has no pages', "'cu_seqlens_k'"), path=BACKWARD)

# ---- The same in a step of decoding, and of a cache ------------------------------------------------------------------


def decoding(name, value, *says):
    row(f'member {name} of a decode', {**STEP, name: value}, 400, (f"'{name}'", *says), path=DECODE)


def making(name, value, *says):
    row(f'member {name} of a cache', {**CACHE, name: value}, 400, (f"'{name}'", *says), path=CACHES)


decoding('tree_mask', tensor(array(1, 1, 1, 1)), "write 'keep_mask'", 'the last keys of each row')
decoding('attn_mask', tensor(array(1, 1, 1, 1)), "write 'keep_mask'", 'the last keys of each row')
decoding('block_table', [[0, 1]], 'leave it out', "'caches'", 'its pages')
decoding('cache_seqlens', [5], 'leave it out', "'caches'", 'its length')
decoding('use_cache', True, 'leave it out', "'caches' are used")
decoding('past_key_values', None, CACHES, "its id into 'caches'")
decoding('kv_cache', None, CACHES, "its id into 'caches'")
decoding('cache_id', '65f5', '"caches": ["..."]')
decoding('attn_bias', tensor(array(1, 1, 1, 1)), "'keep_mask' and 'alibi_slopes'")
decoding('sm_scale', 0.125, "write 'scale'")
making('num_key_value_heads', HK, "write 'kv_heads'")
making('head_size', D, "write 'head_dim'")
making('v_head_dim', D, "write 'head_dim_v'")
making('block_size', 16, "write 'page_size', 64 or 128")
making('kv_cache_dtype', 'auto', "write 'dtype'")
making('ttl_ms', 60000, "write 'ttl_s', in seconds")
making('max_seq_len', 4096, 'leave it out', 'grows')
making('batch_size', 1, 'leave it out', 'one for each')
row('page_size 256', {**CACHE, 'page_size': 256}, 400, ('page_size: is 256, must be 64 or 128',), path=CACHES)
row('page_size 16', {**CACHE, 'page_size': 16}, 400, ('page_size: is 16, must be 64 or 128',), path=CACHES)
row('k_scale of a latent cache alone', {**CACHE, 'dtype': 'float8_e4m3fn', 'latent': True, 'k_scale': [0.5] * HK}, 400,
    ('v_scale: is missing', 'the same as k_scale'), path=CACHES)
row('save with page_table', {'q': GOOD['q'], 'k': tensor(array(2, 4, HK, D)), 'v': tensor(array(2, 4, HK, D)), 'save': True,
                             'page_table': tensor(np.zeros((B, 1), 'int32')), 'seqlens_k': tensor(np.full(B, 4, 'int32'))},
    422, ('save: no backward can use it', 'backward has no pages'), code='unsupported')

row('dtype as datatype', {**GOOD, 'q': {'shape': [B, SQ, H, D], 'datatype': 'FP32', 'data': b64(Q)}}, 400, ("q: unknown member 'datatype'", "write 'dtype'"))
row('strides in a tensor', {**GOOD, 'q': tensor(Q, strides=[96, 32, 8, 1])}, 400, ("q: unknown member 'strides'", 'C-contiguous'))
row('dout in a forward', {**GOOD, 'dout': GOOD['q']}, 400, ('dout: belongs to backward', BACKWARD))
row('no dout in a backward', GOOD, 400, ('dout: is required', 'gradient of the loss with respect to out'), path=BACKWARD)
row('nothing in the body', {}, 400, ('q: is required', 'q, k and v'))

# ---- Names that have no place here, and where the names are listed ----------------------------------------------------

member('frobnicate', 1, '(/docs lists the members of forward)')
row('member frobnicate of a backward', {**BACK, 'frobnicate': 1}, 400, ('(/docs lists the members of backward)',), path=BACKWARD)
decoding('frobnicate', 1, '(/docs lists the members of decode)')
making('frobnicate', 1, 'a cache has kv_heads, head_dim, head_dim_v, dtype, page_size, latent, k_scale, v_scale and ttl_s')
row('member frobnicate of a fork', {'frobnicate': 1}, 400, ("'frobnicate'", 'the only member is length'), path=f'/v1/caches/{"0" * 40}/fork')
row('member size of a truncation', {'size': 3}, 400, ("'size'", "write 'length'"), path=f'/v1/caches/{"0" * 40}/truncate')
row('member frobnicate of a tensor', {**GOOD, 'q': tensor(Q, frobnicate=1)}, 400, ("q: unknown member 'frobnicate'", 'a tensor has shape, dtype and data'))
for name, cure in (('softmaxScale', "write 'scale'"), ('cuSeqlensQ', "'cu_seqlens_q'"), ('keepMaskAtEnd', "'keep_mask_at_end'"), ('dropout-p', "'dropout_p'"),
                   ('windowSize', '[left, right]'), ('local_window', '[W - 1, 0]'), ('q_cu_seqlens', "write 'cu_seqlens_q'"), ('seqstart_k', "write 'cu_seqlens_k'"), ('lengths', "write 'seqlens_q' and 'seqlens_k'"),
                   ('kv_seq_lens', "write 'seqlens_k'"), ('kv_len', 'the shapes of k and v say it'), ('q_len', 'the shape of q says it'), ('num_attention_heads', 'the shape of q says it'),
                   ('n_rep', 'the heads of q and of k'), ('document_ids', "'cu_seqlens_q' and 'cu_seqlens_k'"), ('left_padding', "'keep_mask' [B, 1, 1, Sk]"), ('leftpad_k', "'keep_mask' [B, 1, 1, Sk]"),
                   ('tgt_mask', "'keep_mask'"), ('mask_mod', "'keep_mask'"), ('prefix_len', "as 'keep_mask'"), ('relative_bias', "write 'bias'"), ('pse', "write 'bias'"), ('logit_softcap', "write 'softcap'"),
                   ('random_seed', "write 'seed'"), ('attn_pdrop', "write 'dropout_p'"), ('learnable_sink', "write 'sinks'"), ('num_sinks', 'are logits'), ('tau', "write 'scale'"), ('is_decoder', "write 'causal'"),
                   ('hidden_states', "'q', 'k' and 'v'"), ('in_proj_weight', 'no weights'), ('xq', "write 'q'"), ('eps', 'nothing is normalised'), ('rope_theta', 'not rotated'), ('top_k', 'exact'),
                   ('q_offset', "'alignment' is top_left"), ('pack_gqa', 'the server decides'), ('allow_tf32', 'the server decides'), ('op', 'the path says it'), ('version', '/v1'), ('api_key', 'Authorization: Bearer'),
                   ('deadline', "write 'timeout_ms'"), ('output_format', 'the header Accept'), ('requires_grad', BACKWARD), ('dq', BACKWARD), ('q_shape', 'an object with shape, dtype and data'),
                   ('average_attn_weights', 'never formed'), ('deterministic', 'always gives the same bits'), ('input_ids', 'no models')):
    member(name, 1, cure)
for name, cure in (('valid_mask', "about masks there are 'keep_mask'"), ('max_attn_window', '"window": [left, right]'), ('prompt_lens', "'seqlens_k'"), ('fp8_scale', "'q_scale'"), ('torch_seed', "'seed'"),
                   ('attn_cap', "'softcap'"), ('sink_weight', "'sinks'"), ('kv_page_indptr', "'page_table'"), ('k_transposed', "'layout'"), ('kernel_version', 'the server decides'), ('bsz', 'the shapes of q, k and v')):
    member(name, 1, cure, '(/docs lists the members of forward)')
for name, cure in (('gradOutput', "write 'dout'"), ('dy', "write 'dout'"), ('o', "write 'out'"), ('stats', "write 'lse'"), ('requires_grad', 'answers dq, dk and dv')):
    row(f'member {name} of a backward', {**BACK, name: 1}, 400, (f"'{name}'", cure), path=BACKWARD)
for name, cure in (('sequence_id', '"caches"'), ('kv_len', "'caches'"), ('gradOutput', BACKWARD), ('mask_mod', "write 'keep_mask'")):
    decoding(name, 1, cure)
for name, cure in (('cu_seqlens_q', 'knows its length'), ('dropout_p', 'drops nothing'), ('bias', "'keep_mask' and 'alibi_slopes'"), ('layout', '[B, Sq, H, D]'), ('save', 'no gradient')):
    row(f'{name} in a decode', {**STEP, name: 1}, 400, (f'{name}: belongs to forward', cure), path=DECODE)
making('kv_lora_rank', 512, "write 'latent'", 'kv_lora_rank + qk_rope_head_dim')
making('num_layers', 32, 'one for each')
making('sliding_window', 128, DECODE)
row('dtype half of a cache', {**CACHE, 'dtype': 'half'}, 400, ("dtype: is 'half'", 'write float16'), path=CACHES)
row('page_size -1', {**CACHE, 'page_size': -1}, 400, ('page_size: is -1, must be 64 or 128',), path=CACHES)
row('kv_heads in quotes', {**CACHE, 'kv_heads': '8'}, 400, ("kv_heads: is '8'", 'without quotes'), path=CACHES)

# ---- Valid, and most likely not meant ----------------------------------------------------------------------------------


def hint(name, *says, base=GOOD, **members):
    row(f'hint {name}', {**base, **members}, 200, says)


hint('scale 0, as a struct of Go has it', 'scale is 0', '1/sqrt(D)', scale=0)
hint('scale sqrt(D)', 'scale is sqrt(D)', scale=8**0.5)
hint('window [0, 0], as a struct of Go has it', 'window [0, 0]', 'leave window out', window=[0, 0])
hint('keep_mask of zeros', 'keep_mask is 0 everywhere', keep_mask=tensor(np.zeros((1, 1, SQ, SK), 'uint8')))
hint('keep_mask of PyTorch, True where hidden', 'only where j > i', keep_mask=tensor(np.triu(np.ones((1, 1, SK, SK), 'uint8'), 1)), q=tensor(array(B, SK, H, D)))
hint('a mask of 0 and 1 as bias', 'bias holds only 0 and 1', 'keep_mask', bias=tensor(np.tri(SQ, SK, dtype='float32')[None, None]))
hint('bhsd without layout', 'more heads than queries', 'layout is bhsd', base={n: tensor(array(1, 8, 128, D)) for n in 'qkv'})

# ---- KServe ------------------------------------------------------------------------------------------------------------


def kserve(name, body, *says):
    row(f'KServe {name}', body, 400, says, path='/v2/models/attention_forward/infer')


IN = [{'name': n, 'shape': [1, 1, 1, 1], 'datatype': 'FP32', 'data': [1]} for n in 'qkv']
kserve('q at the top', GOOD, "unknown member 'q'", '{"inputs": [{"name": "q"')
kserve('causal outside of parameters', {'inputs': IN, 'causal': True}, "unknown member 'causal'", '{"parameters": {"causal"')
kserve('timeout outside of parameters', {'inputs': IN, 'timeout': 1}, "unknown member 'timeout'", '"parameters"')
kserve('version 1', {'instances': []}, "unknown member 'instances'", 'version 2', "'inputs'")
kserve('a name that is none', {'frobnicate': 1}, 'there are id, parameters, inputs, outputs')
kserve('INPUT__0', {'inputs': [{**IN[0], 'name': 'INPUT__0'}]}, "no input 'INPUT__0'", 'its inputs are q, k, v, alibi_slopes')
kserve('dtype', {'inputs': [{'name': 'q', 'shape': [1], 'dtype': 'FP32'}]}, "unknown member 'dtype'", "write 'datatype'")
kserve('an input with a name that is none', {'inputs': [{**IN[0], 'frobnicate': 1}]}, 'there are name, shape, datatype, parameters and data')
kserve('a parameter that is none', {'inputs': IN, 'parameters': {'frobnicate': 1}}, "unknown parameter 'frobnicate'", '/v2/models/attention_forward/config lists them')
kserve('is_causal', {'inputs': IN, 'parameters': {'is_causal': True}}, "unknown parameter 'is_causal'", "write 'causal'")
kserve('OUTPUT__0', {'inputs': IN, 'outputs': [{'name': 'OUTPUT__0'}]}, "'OUTPUT__0'", 'must be out or lse')

# ---- dtypes ----------------------------------------------------------------------------------------------------------

HALVES = {name: tensor(x.astype('float16')) for name, x in (('q', Q), ('k', K), ('v', V))}


def dtype(name, spelt, *says, base=GOOD, which='q'):
    row(f'dtype {which} {spelt}', {**base, which: {**base[which], 'dtype': spelt}}, 400, (f"{which}: dtype is '{spelt}'", *says))


row('dtype fp16', {n: {**t, 'dtype': 'fp16'} for n, t in HALVES.items()}, 200, ())
dtype('', 'torch.bfloat16', 'must be float32, float16, bfloat16 or float8_e4m3fn', 'write bfloat16')
dtype('', 'float', 'must be float32', 'write float32')
dtype('', 'half', 'must be float32', 'write float16', base=HALVES)
dtype('', '<f4', 'must be float32', 'write float32')
dtype('', 'at::kHalf', 'must be float32', 'write float16', base=HALVES)
dtype('', 'DT_BFLOAT16', 'must be float32', 'write bfloat16')
dtype('', "<class 'numpy.float32'>", 'must be float32', 'write float32')
dtype('', "dtype('float32')", 'must be float32', 'write float32')
dtype('', 'Float32Array', 'must be float32', 'write float32')
dtype('', '<V2', 'must be float32', 'write bfloat16')
dtype('', '>f4', 'little-endian', "newbyteorder('<')")
dtype('', 'double', 'must be float32', 'convert', 'float32')
row('dtype float64', {**GOOD, 'q': tensor(Q.astype('float64'))}, 400,
    ("q: dtype is 'float64'", 'must be float32, float16, bfloat16 or float8_e4m3fn', 'convert'))
dtype('', 'float8_e5m2', 'must be float32', 'float8_e4m3fn')
dtype('', 'int8', 'must be float32', 'convert')
dtype('', 'uint16', 'must be float32', 'the bits of bfloat16', 'write that')
dtype('', 'uint8', 'must be float32', 'the bits of float8_e4m3fn', 'write that')
dtype('', 'fp4', 'must be float32', 'dequantise')
dtype('', 'F4', 'must be float32', 'dequantise')
dtype('', 'nvfp4', 'must be float32', 'dequantise')
dtype('', 'tf32', 'must be float32', 'write float32')
dtype('', 'e5m2', 'must be float32', 'convert')
row('dtype int64 of q', {**GOOD, 'q': tensor(Q.astype('int64'))}, 400, ("q: dtype is 'int64'", 'must be float32, float16'))
row('dtype k unlike q', {**GOOD, 'k': HALVES['k']}, 400, ('k: dtype is float16', "must be float32 as q's"))
row('dtype of a number', {**GOOD, 'q': tensor(Q, dtype=4)}, 400, ('q: dtype is 4', 'must be float32'))
row('no dtype', {**GOOD, 'q': tensor(Q, dtype=None)}, 400, ('q: dtype is missing', 'must be float32, float16, bfloat16 or float8_e4m3fn'))
row('cu_seqlens_q int64', {**PACKED, **{n: tensor(np.array([0, 3, 8])) for n in ('cu_seqlens_q', 'cu_seqlens_k')}}, 200, ())
row('cu_seqlens_q int64 too large', {**PACKED, 'cu_seqlens_q': tensor(np.array([0, 3, 2**31 + 5]))}, 400,
    ('cu_seqlens_q: [2] is 2147483653', 'int32', 'between -2147483648 and 2147483647'))
row('cu_seqlens_q float32', {**PACKED, 'cu_seqlens_q': tensor(np.array([0, 3, 8], 'float32'))}, 400,
    ('cu_seqlens_q: dtype is', 'float32', 'must be int32 or int64', 'convert'))
row('seqlens_k int64', {**GOOD, 'seqlens_k': tensor(np.array([5, 3]))}, 200, ())
row('a scale of torch.tensor(0.5)', {**GOOD, 'k_scale': tensor(np.array(0.5, 'float32'))}, 400, ('k_scale: shape has 0 dimensions', 'one number has the shape [1]'))
row('keep_mask bool', {**GOOD, 'keep_mask': tensor(np.tri(SQ, SK, dtype='bool')[None, None])}, 200, ())
row('keep_mask bool of 255', {**GOOD, 'keep_mask': tensor(np.full((1, 1, SQ, SK), 255, 'uint8'), dtype='bool')}, 400,
    ('keep_mask: [0, 0, 0, 0] is 255', 'must be 0 or 1'))
row('keep_mask float32', {**GOOD, 'keep_mask': tensor(np.zeros((1, 1, SQ, SK), 'float32'))}, 400,
    ('keep_mask: dtype is', 'float32', 'must be uint8 or bool', "'bias'"))

# ---- Shapes ----------------------------------------------------------------------------------------------------------

row('shape of rank 3', {n: tensor(x[0]) for n, x in (('q', Q), ('k', K), ('v', V))}, 400,
    ('q: shape [3, 4, 8] has 3 dimensions', 'must have 4', '[B, Sq, H, D]', 'missing axis is written as 1'))
row('shape of rank 2', {n: tensor(x[0, :, 0]) for n, x in (('q', Q), ('k', K), ('v', V))}, 400, ('has 2 dimensions', 'must have 4', '[B, Sq, H, D]'))
row('shape of rank 5', {**GOOD, 'q': tensor(Q[None])}, 400, ('q: shape', 'has 5 dimensions', '[B, Sq, H, D]'))
row('bhsd sent as bshd', {n: tensor(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for n, x in (('q', array(B, 12, 8, D)), ('k', array(B, 18, 8, D)), ('v', array(B, 18, 8, D)))}, 400,
    ("k: shape[2]", 'must divide', '[B, H, S, D]', '"layout": "bhsd"'))
row('bhsd sent as bshd, with a mask', {**{n: tensor(array(1, 8, 16, D)) for n in 'qkv'}, 'keep_mask': tensor(np.ones((1, 1, 16, 16), 'uint8'))}, 400,
    ('keep_mask: shape', '"layout": "bhsd"'))
row('heads not split', {n: tensor(array(2, 5, 32)) for n in 'qkv'}, 400, ('q: shape [2, 5, 32] has 3 dimensions', '[B, Sq, H, D]', 'heads have an axis of their own'))
row('packed with a batch axis', {**PACKED, 'q': tensor(array(1, 8, H, D))}, 400, ('q: shape [1, 8, 4, 8] has 4 dimensions', 'must have 3', '[total_q, H, D]'))
row('keep_mask of rank 2', {**GOOD, 'keep_mask': tensor(np.ones((SQ, SK), 'uint8'))}, 400, ('keep_mask: shape [3, 5] has 2 dimensions', 'must have 4', '1 or Sq, Sk]', 'missing axis is written as 1'))
shape('of a string', '2,3,4,8', "is '2,3,4,8'", 'must be an array of integers', '[1, 128, 8, 64]')
shape('of strings', ['2', '3', '4', '8'], "shape[0] is '2'", 'must be an integer', 'without quotes')
shape('of floats', [2.0, 3.0, 4.0, 8.0], 'shape[0] is 2.0', 'must be an integer', 'without point')
shape('with 2^53 + 2', [2**53 + 2, 3, 4, 8], 'shape[0] is 9007199254740994', 'from 0 to 2^31 - 1')
row('shape with an exponent', TEXT.replace('[2, 3, 4, 8]', '[2, 3e0, 4, 8]', 1), 400, ('shape[1] is 3e0', 'without point and exponent'))
row('k transposed', {**GOOD, 'k': tensor(np.ascontiguousarray(K.swapaxes(2, 3)))}, 400, ('k: shape[2] is 8', 'last two axes exchanged it would fit'))
row('q and k in each other\'s place', {'q': tensor(array(B, SK, HK, D)), 'k': tensor(array(B, SK, H, D)), 'v': GOOD['v']}, 400, ('must divide the 2 heads of q', 'did q and k change places?'))
row('12 heads for 32, as many keys as queries', {'q': tensor(array(1, 128, 32, 16)), 'k': tensor(array(1, 128, 12, 16)), 'v': tensor(array(1, 128, 12, 16))}, 400,
    ('k: shape[2] is 12, must divide the 32 heads of q',))
shape('with -1', [-1, 3, 4, 8], 'shape[0] is -1', 'must be an integer', 'no size can be left open')
shape('as it is printed', 'torch.Size([2, 3, 4, 8])', 'must be an array of integers', '[1, 128, 8, 64]')
row('shape times bytes', {**GOOD, 'q': tensor(Q, shape=[2, 3, 4, 16])}, 400, ('q: data has 768 bytes', '[2, 3, 4, 16] of float32 needs 1536', '768 would be right for float16', "is that the array's dtype?"))
row('float64 bytes as float32', {**GOOD, 'q': {**GOOD['q'], 'data': b64(Q.astype('float64'))}}, 400,
    ('q: data has 1536 bytes', 'of float32 needs 768', '1536 would be right for float64', 'convert the array to float32'))
row('heads that do not divide', {**GOOD, 'k': tensor(array(B, SK, 3, D)), 'v': tensor(array(B, SK, 3, D))}, 400, ('k: shape[2] is 3', 'must divide the 4 heads of q'))
row('another head size', {**GOOD, 'k': tensor(array(B, SK, HK, 4))}, 400, ('k: shape[3] is 4', 'must be 8, the head size of q'))
row('a head size of 2048', {n: tensor(array(1, 1, 1, 2048)) for n in 'qkv'}, 422, ('shape[3] is 2048', 'up to 1024'), code='unsupported')
row('no shape', {**GOOD, 'q': tensor(Q, shape=None)}, 400, ('q: shape is missing', '[B, Sq, H, D]'))

# ---- Bytes -----------------------------------------------------------------------------------------------------------

PLUS = tensor(array(B, SQ, H, D), data=base64.b64encode(b'\xfb\xef\xbe\xff' * (B * SQ * H * D)).decode())
LINES = '\n'.join(b64(Q)[i:i + 76] for i in range(0, len(b64(Q)), 76)) + '\n'
data('with line breaks', LINES, 'line break', 'base64 -w0')
text('raw line break in base64', TEXT.replace(b64(Q), LINES, 1), 'control character 0x0a', 'base64 -w0')
data('in the URL alphabet', base64.urlsafe_b64encode(base64.b64decode(PLUS['data'])).decode(), 'URL', "'+' and '/'", 'b64encode')
data('as a data URI', 'data:application/octet-stream;base64,' + b64(Q), 'data URI', 'behind the comma')
data('as hex', Q.tobytes().hex(), 'hexadecimal', 'base64', 'b64encode')
data('as 0x hex', '0x' + Q.tobytes().hex(), 'hexadecimal', 'base64', 'b64encode')
data("as b'...'", str(base64.b64encode(Q.tobytes())), "b'", '.decode()')
data('without padding', b64(np.zeros(1, 'float32')).rstrip('='), 'ends after 6 characters', "'='", 'multiple of four')
data('with too much padding', b64(Q)[:-4] + 'AA==' + '=', 'padding')
data('with spaces', ' '.join([b64(Q)[:8], b64(Q)[8:]]), 'white space', 'without', )
data('with spaces for plus', PLUS['data'].replace('+', ' '), 'white space', "'+'")
data('percent-encoded', PLUS['data'].replace('+', '%2B').replace('/', '%2F').replace('=', '%3D'), 'percent', 'as it is')
data('as its bytes in numbers', list(Q.tobytes()), 'data has 768 numbers, shape [2, 3, 4, 8] needs 192', 'its bytes', 'base64')
data('as a Buffer', {'type': 'Buffer', 'data': list(Q.tobytes())}, 'is an object', "toString('base64')")
data('as a Float32Array', {str(i): 0.5 for i in range(6)}, 'is an object', 'Array.from(x)')
row('data as a long Float32Array', {**GOOD, 'q': {**GOOD['q'], 'data': {str(i): 0.5 for i in range(192)}}}, 400, ('more than 64 members', 'Array.from(x)'))
text('bytes as a string', json.dumps({**GOOD, 'q': {**GOOD['q'], 'data': Q.tobytes().decode('latin-1')}}), '\\u0000 is not accepted', 'base64')
data('missing', None, 'is null', 'base64', 'array of numbers')
row('no data', {**GOOD, 'q': tensor(Q, data=None)}, 400, ('q: data is missing', 'base64', 'array of numbers'))
data('as an empty string', '', '0 bytes', 'needs 768', 'empty')
data('as an .npy file', (lambda f: (np.save(f, Q), base64.b64encode(f.getvalue()).decode())[1])(io.BytesIO()), '.npy', 'tobytes()')
data('as printed numbers', str(Q.tolist()), 'numbers', 'without the quotes')
data('as repr of an array', repr(Q), 'the print of an array', 'tolist()', 'b64encode')
data('as gzip in base64', base64.b64encode(gzip.compress(Q.tobytes())).decode(), 'gzip', 'uncompressed')
row('a list for a tensor', {**GOOD, 'q': Q.tolist()}, 400, ('q: is an array', 'must be an object', '"shape"', '"dtype"', '"data"'))
row('base64 for a tensor', {**GOOD, 'q': b64(Q)}, 400, ("q: is 'AAAA", 'must be an object', '"shape"'))
row('a long list for a tensor', {**GOOD, 'q': np.zeros((1, 40, 64, 64), 'int').tolist()}, 413, ('values outside tensor data', '"data"'), code='too-large')
data('encoded twice', base64.b64encode(b64(Q).encode()).decode(), 'base64 again', 'encoded twice?')
data('with a prefix', 'base64:' + b64(Q), 'a prefix', 'behind the colon')
data('as zlib in base64', base64.b64encode(zlib.compress(Q.tobytes())).decode(), 'zlib', 'uncompressed')
data('nested as bhsd', Q.transpose(0, 2, 1, 3).tolist(), 'nested as [2, 4, 3, 8]', '"layout": "bhsd"')
data('too few numbers', [1, 2, 3], '3 numbers', 'needs 192')
data('numbers as strings', [str(x) for x in Q.flatten()], 'data at byte', 'without quotes')
data('null among the numbers', [None] + Q.flatten().tolist()[1:], 'null', '"NaN"')
row('true among the numbers', {**GOOD, 'keep_mask': {'shape': [1, 1, SQ, SK], 'dtype': 'bool', 'data': [True] * (SQ * SK)}}, 400, ('keep_mask: data', 'true', '1 and 0'))
row('-1e9 in float16', {**HALVES, 'bias': {'shape': [1, 1, SQ, SK], 'dtype': 'float16', 'data': [-1e9] + [0] * 14}}, 400,
    ('bias: data at byte', 'out of the range of float16', '"-Infinity"'))
text('-Infinity in data', TEXT.replace(json.dumps(b64(Q)), '[' + '-Infinity,' * 191 + '1]', 1), "found 'I'", 'as strings')
text('NaN in data', TEXT.replace(json.dumps(b64(Q)), '[' + 'NaN,' * 191 + '1]', 1), 'NaN', 'string')

# ---- Packed lengths --------------------------------------------------------------------------------------------------

CU = [('cu_seqlens of lengths', [3, 5], ('[0] is 3', 'must be 0', 'lengths', '[0, 3, 8]')),
      ('cu_seqlens of ends', [3, 8], ('[0] is 3', 'must be 0', 'look like ends', '[0, 3, ...]')),
      ('cu_seqlens not from 0', [1, 3, 7], ('[0] is 1', 'must be 0', 'where the first sequence starts')),
      ('cu_seqlens decreasing', [0, 5, 3, 8], ('[2] is 3', 'at least 5')),
      ('cu_seqlens without the total', [0, 3], ('[1] is 3', 'must be 8', 'the rows of q')),
      ('cu_seqlens of lengths behind a 0', [0, 3, 5], ('[2] is 5', 'must be 8', 'lengths', '[0, 0, 3, 8]'))]
row('keep_mask of packed rows', {**PACKED, 'keep_mask': tensor(np.ones((1, 1, 8, 8), 'uint8'))}, 400,
    ('keep_mask: cannot be combined with cu_seqlens_q', 'a problem of its own'))
row('seqlens_k beyond a packed sequence', {**PACKED, 'seqlens_k': tensor(np.array([3, 6], 'int32'))}, 400,
    ('seqlens_k: [1] is 6', 'between 0 and 5', 'cu_seqlens_k'))
row('seqlens_q of another length', {**GOOD, 'seqlens_q': tensor(np.array([1], 'int32'))}, 400, ('seqlens_q: shape[0] is 1', 'must be 2', 'the batch of q'))
for name, values, says in CU:
    cu = tensor(np.array(values, 'int32'))
    row(name, {**PACKED, 'cu_seqlens_q': cu, 'cu_seqlens_k': cu}, 400, says)
row('cu_seqlens_q as a list', {**PACKED, 'cu_seqlens_q': [0, 3, 8]}, 400, ('cu_seqlens_q: is an array', 'must be an object', '"dtype": "int32"'))
row('cu_seqlens_q alone', {n: t for n, t in PACKED.items() if n != 'cu_seqlens_k'}, 400, ('cu_seqlens_k: is required with cu_seqlens_q',))
row('seqlens_k beyond k', {**GOOD, 'seqlens_k': tensor(np.array([5, 6], 'int32'))}, 400, ('seqlens_k: [1] is 6', 'between 0 and 5', 'the keys of k'))

# ---- Options ---------------------------------------------------------------------------------------------------------

option('scale', '0.125', "is '0.125'", 'must be a number', 'without quotes')
option('scale', None, 'is null', 'must be a number', 'leave it out where it is not wanted')
option('causal', 'true', "is 'true'", 'must be true or false', 'without quotes')
option('causal', 'True', "is 'True'", 'must be true or false', 'without quotes')
option('causal', 1, 'is 1', 'must be true or false', 'write true')
option('causal', 'no', "is 'no'", 'must be true or false', 'write false')
option('window', 128, 'is 128', '[left, right]', '-1', '[W - 1, 0]')
option('window', [128], 'has 1 element', '[left, right]')
option('window', [None, 0], '[0] is null', 'must be an integer', '-1')
option('layout', 'BHSD', "is 'BHSD'", 'must be bshd or bhsd', "did you mean 'bhsd'")
option('layout', 'bnsd', "is 'bnsd'", 'must be bshd or bhsd', "write 'bhsd'")
option('layout', 'sbhd', "is 'sbhd'", 'must be bshd or bhsd', 'transpose')
option('encoding', 'list', "is 'list'", 'must be base64 or array', "write 'array'")
option('alignment', 'lower_right', "is 'lower_right'", 'must be bottom_right or top_left', "'bottom_right'")
option('outputs', 'out', "is 'out'", 'must be an array of names', '["out"]')
option('outputs', ['O'], "[0] is 'O'", 'must be out or lse', "'out'")
option('out_dtype', 'float64', "is 'float64'", 'must be float32, float16 or bfloat16')
option('out_dtype', 'torch.float16', "is 'torch.float16'", 'must be float32, float16 or bfloat16', 'write float16')
option('dropout_p', 10, 'is 10', 'at least 0 and below 1')
option('timeout_ms', '5s', "is '5s'", 'must be an integer from 1', 'in milliseconds', 'without quotes and unit')
option('seed', 42.0, 'is 42.0', 'must be an integer from 0', 'without point')
option('outputs', ['out', 'attn_weights'], "[1] is 'attn_weights'", 'must be out or lse', 'never formed')
row('an option beside requests', {'requests': [GOOD], 'causal': True}, 400, ('causal: cannot stand beside requests', 'each of the problems'))
option('scale', 'auto', "is 'auto'", 'must be a number', 'leave it out')
option('scale', '1/8', "is '1/8'", 'must be a number', 'no fractions')
option('scale', [0.1], 'is an array', 'must be a number', 'without brackets')
option('alignment', 'pytorch', "is 'pytorch'", "write 'top_left'")
option('alignment', 'flash_attn', "is 'flash_attn'", "write 'bottom_right'")
option('encoding', 'raw', "is 'raw'", 'must be base64 or array', 'Accept')
option('encoding', 'hex', "is 'hex'", "write 'base64'")
option('encoding', '', "is ''", 'leave it out')
option('layout', 'torch', "is 'torch'", "write 'bhsd'")
option('layout', 'b s h d', "is 'b s h d'", "'bshd'")
option('layout', ['b', 's', 'h', 'd'], 'is an array', 'one string')
option('priority', 'high', "is 'high'", '1 runs first')
option('timeout_ms', 0, 'is 0', 'must be an integer from 1', 'leave it out')
option('seed', -1, 'is -1', 'must be an integer from 0', 'leave it out')
option('outputs', [], 'is empty', 'leave it out')
option('outputs', ['dq'], "[0] is 'dq'", BACKWARD)
option('outputs', ['grad_q'], "[0] is 'grad_q'", "'dq', 'dk' and 'dv'", BACKWARD)
option('verify', True, 'is true', 'must be an integer', 'the number of rows', '"all"')

# ---- JSON ------------------------------------------------------------------------------------------------------------

text('UTF-16 with BOM', TEXT.encode('utf-16'), 'byte 0', 'UTF-16', 'UTF-8')
text('UTF-16', TEXT.encode('utf-16-le'), 'byte 1', 'UTF-16', 'UTF-8')
text('with BOM', TEXT.encode('utf-8-sig'), 'byte 0', 'byte order mark', 'without')
text('repr of a dict', str({**GOOD, 'causal': True}), "found '''", 'double quotes', 'json.dumps')
text('Python True', TEXT[:-1] + ', "causal": True}', "found 'T'", 'true')
text('Python None', TEXT[:-1] + ', "scale": None}', "found 'N'", 'None', 'leave the member out')
text('trailing comma', TEXT[:-1] + ', }', "found '}'", 'comma too many')
text('NaN', TEXT[:-1] + ', "scale": NaN}', "found 'N'", 'no NaN')
text('a variable in single quotes', '{"q": $Q, "k": $K, "v": $V}', "found '$'", 'shell')
text('single quotes of a shell', f"'{TEXT}'", "found '''", 'Windows', '--data-binary @')
text('[object Object]', '[object Object]', "found 'o'", 'JSON.stringify()')
text('percent-encoded', '%7B%22q%22%3A', "found '%'", 'percent-encoding', '--data-binary')
text('an .npz file', (lambda f: (np.savez(f, q=Q), f.getvalue())[1])(io.BytesIO()), "found 'P'", 'a zip file', '.npz')
text('a file name', 'request.json', "found 'r'", '--data-binary @')
text('a tuple', TEXT[:-1] + ', "window": (1, 0)}', "found '('", '[...]')
text('a fraction', TEXT[:-1] + ', "scale": 1/8}', "found '/'", 'no fractions')
text('the bytes of a tensor', Q.tobytes(), 'byte 0x00', 'bare bytes', 'JSON')
text('a pickle', b'\x80\x04\x95abc', 'byte 0x80', 'pickle', 'JSON object')
text('comment', TEXT[:-1] + ', // all keys\n "causal": true}', "found '/'", 'no comments')
text('names without quotes', '{q: 1}', "found 'q'", 'in quotes')
text('truncated', TEXT[:300], 'ends after 300 bytes', 'cut off')
text('empty body', '', 'the body is empty', 'JSON object with q, k and v')
text('gzip without saying so', gzip.compress(TEXT.encode()), 'byte 0', 'gzip', 'Content-Encoding: gzip')
text('form fields', 'q=1&k=2&v=3', "found 'q'", 'form', 'Send JSON', headers={'Content-Type': 'application/x-www-form-urlencoded'})
text('encoded twice', json.dumps(TEXT), 'the body is', 'string', 'must be an object', 'encoded twice')
text('a list of problems', [GOOD, GOOD], 'the body is an array', 'must be an object', '"requests"')
text('two lines of JSON', TEXT + '\n' + TEXT, 'nothing after the value', '"requests"')
text('@file in the body', '@request.json', "found '@'", '--data-binary @')

# ---- HTTP ------------------------------------------------------------------------------------------------------------

row('text/plain', TEXT, 200, (), headers={'Content-Type': 'text/plain;charset=UTF-8'})
row('no content type', TEXT, 200, (), headers={})
for media in ('application/octet-stream', 'multipart/form-data; boundary=x', 'application/x-python-pickle'):
    row(f'Content-Type {media}', TEXT, 415, (media.split(';')[0], 'application/json', 'send'), code='unsupported-media-type', headers={'Content-Type': media})
row('Content-Encoding gzip', gzip.compress(TEXT.encode()), 200, (), headers={**JSON, 'Content-Encoding': 'gzip'})
FILE = json.dumps({n: {'dtype': 'F32', 'shape': t['shape'], 'data_offsets': [0, 0]} for n, t in GOOD.items()}).encode()
for length in (len(FILE), 0x7b, 0x5b20, 0x22):  # the low byte of these lengths is a byte with which JSON may begin
    for said in ({}, JSON, {'Content-Type': 'application/x-www-form-urlencoded'}):
        row(f'a safetensors file of {length} with {said or "no content type"}', length.to_bytes(8, 'little') + FILE, 400,
            ('no JSON', 'like a safetensors file', 'Content-Type: application/x-safetensors'), headers=said)
row('a safetensors file as octets', len(FILE).to_bytes(8, 'little') + FILE, 415, ('like a safetensors file', 'Content-Type: application/x-safetensors'),
    code='unsupported-media-type', headers={'Content-Type': 'application/octet-stream'})
row('binary tensors of KServe without the length of the JSON', json.dumps({'inputs': [{'name': 'q', 'shape': [1], 'datatype': 'FP32', 'parameters': {'binary_data_size': 4}}]}).encode() + b'\x00\x00\x80\x3f',
    400, ('nothing after the value', 'bytes of tensors?', 'Inference-Header-Content-Length', 'how many bytes of the body are JSON'), path='/v2/models/attention_forward/infer', headers={})
row('Content-Encoding gzip, and it is not', TEXT, 400, ('Content-Encoding is gzip', 'begins like JSON', 'was it compressed?'), headers={**JSON, 'Content-Encoding': 'gzip'})
row('deflate without the head and the checksum of zlib', zlib.compress(TEXT.encode())[2:-4], 400, ('Content-Encoding is deflate', 'RFC 1950'),
    headers={**JSON, 'Content-Encoding': 'deflate'})
row('Content-Encoding zstd', b'\x28\xb5\x2f\xfd', 415, ("'zstd'", 'must be gzip or deflate', 'uncompressed'), code='unsupported-media-type',
    headers={**JSON, 'Content-Encoding': 'zstd'})
row('GET with nothing', None, 405, ('GET', 'POST', 'JSON', 'safetensors'), code='method-not-allowed', method='GET', headers={})
row('PUT', TEXT, 405, ('PUT', 'POST'), code='method-not-allowed', method='PUT')
row('POST /v1/info', '{}', 405, ('POST', 'GET'), code='method-not-allowed', path='/v1/info')
row('trailing slash', TEXT, 404, (FORWARD + '/', f'did you mean {FORWARD}?'), code='not-found', path=FORWARD + '/')
row('missing /v1', TEXT, 404, ('/attention/forward', f'did you mean {FORWARD}?'), code='not-found', path='/attention/forward')
row('forward alone', TEXT, 404, ('/forward', f'did you mean {FORWARD}?'), code='not-found', path='/forward')
row('misspelt path', TEXT, 404, ('/v1/attention/foward', f'did you mean {FORWARD}?'), code='not-found', path='/v1/attention/foward')
row('capitals in the path', TEXT, 404, ('/v1/Attention/Forward', f'did you mean {FORWARD}?'), code='not-found', path='/v1/Attention/Forward')
row('options in the URL', TEXT, 400, ("the URL has a query ('?causal')", 'members of the body'), path=FORWARD + '?causal=true')
row('the length of a fork in the URL', None, 400, ("the URL has a query ('?length')", 'members of the body'), path=f'/v1/caches/{"0" * 40}/fork?length=3&x=1')
row('a DELETE with an option', None, 400, ("the URL has a query ('?dry_run')", 'this path has no options'), method='DELETE', path=f'/v1/caches/{"0" * 40}?dry_run=true')
for path, hint in (('/v1/attention/verify', 'verify is a member of POST ' + FORWARD), ('/v1/attention/grad', f'did you mean {BACKWARD}?'), ('/v1/attention/bwd', f'did you mean {BACKWARD}?'),
                   ('/v1/attention/step', f'did you mean {DECODE}?'), ('/v1/attention/append', 'did you mean /v1/caches/{id}/append?'), ('/v1/caches/x/rollback', '/append, /fork and /truncate'),
                   ('/infer', 'did you mean /v2/models/attention_forward/infer?'), ('/v1/sdpa', FORWARD), ('/v1/batch', FORWARD)):
    row(f'POST {path}', TEXT, 404, (f"'{path}'", hint), code='not-found', path=path)
row('DELETE all caches', None, 405, ('DELETE came', 'DELETE /v1/caches/{id} deletes one'), code='method-not-allowed', method='DELETE', path=CACHES)
row('POST /', TEXT, 405, ('POST came', FORWARD), code='method-not-allowed', path='/')
for path, hint in (('/v1/attention', FORWARD), ('/predict', FORWARD), ('/api' + FORWARD, f'did you mean {FORWARD}?')):
    row(f'POST {path}', TEXT, 404, (f"'{path}'", hint, FORWARD), code='not-found', path=path)
row('a model of KServe that is not there', '{}', 404, ("there is no model 'attention'", 'attention_forward', 'GET /v2/models'), code='not-found', path='/v2/models/attention/infer')
row('a verb of KServe that is not there', '{}', 404, ("'/v2/models/attention_forward/generate'", '/infer'), code='not-found', path='/v2/models/attention_forward/generate')
INFER, REGION = '/v2/models/attention_forward/infer', '/v2/systemsharedmemory/region/q'


def shared(name, status, *says, parameters=(('shared_memory_region', 'q'), ('shared_memory_byte_size', 256)), code='invalid-request', server='shm'):
    body = {'inputs': [{'name': 'q', 'shape': [1, 4, 2, 8], 'datatype': 'FP32', 'parameters': dict(parameters)}]}
    row(f'shared memory {name}', body, status, says, code=code, path=INFER, server=server)


shared('that is not offered', 400, 'q: shared memory is not offered here', '--allow-shm', 'binary data', server='plain')
shared('that nobody registered', 404, "q: there is no region 'q'", code='not-found')
shared('without its size', 400, 'shared_memory_byte_size is missing', 'shared_memory_offset', parameters=[('shared_memory_region', 'q')])
shared('with a size in quotes', 400, "q: shared_memory_byte_size: is '256'", 'an integer from 0 to 2^53', parameters=[('shared_memory_region', 'q'), ('shared_memory_byte_size', '256')])
shared('and bytes too', 400, 'q: has binary_data_size and shared_memory_region, must have one of them',
       parameters=[('shared_memory_region', 'q'), ('shared_memory_byte_size', 256), ('binary_data_size', 256)])
shared('by a name of another program', 400, "unknown member 'shared_memory_key'", parameters=[('shared_memory_key', 'q')])
row('register that is not offered', {'key': '/attn_x', 'byte_size': 64}, 501, ('shared memory is not offered here', '--allow-shm PREFIX'), code='not-implemented', path=REGION + '/register')
row('register a path', {'key': '/dev/shm/attn_x', 'byte_size': 64}, 400, ('key: must begin with /attn_', '--allow-shm'), path=REGION + '/register', server='shm')
row('register what is not there', {'key': '/attn_nothing', 'byte_size': 64}, 400, ("key: '/attn_nothing'", 'no such object', 'container'), path=REGION + '/register', server='shm')
row('register without a size', {'key': '/attn_x'}, 400, ('byte_size is missing', '"byte_size": 4096'), path=REGION + '/register', server='shm')
row('register with a name of another program', {'shm_key': '/attn_x', 'byte_size': 64}, 400, ("unknown member 'shm_key'", 'the body must be like {"key": "/name"'), path=REGION + '/register', server='shm')
row('register a GPU', {'raw_handle': {'b64': ''}, 'device_id': 0, 'byte_size': 64}, 501, ('shared memory of a GPU is not offered here', 'register system shared memory'),
    code='not-implemented', path='/v2/cudasharedmemory/region/q/register', server='shm')
row('path of a language model', '{}', 404, ('/v1/chat/completions', 'no language model', FORWARD), code='not-found', path='/v1/chat/completions')
row('X-Request-Timeout-Ms 5s', TEXT, 400, ('X-Request-Timeout-Ms', "'5s'", 'milliseconds'), headers={**JSON, 'X-Request-Timeout-Ms': '5s'})
row('X-Request-Timeout-Ms 0', TEXT, 400, ('X-Request-Timeout-Ms', "'0'", 'from 1'), headers={**JSON, 'X-Request-Timeout-Ms': '0'})
row('a page of another site', TEXT, 403, ('Origin', 'https://example.org', '--cors-origin https://example.org'), code='forbidden-origin',
    headers={'Content-Type': 'text/plain', 'Origin': 'https://example.org'})
row('no token', TEXT, 401, ('no Authorization', 'Authorization: Bearer <token>'), code='unauthorized', server='tokens')
row('wrong token', TEXT, 401, ('not one of those in --token-file', 'Authorization: Bearer <token>'), code='unauthorized', server='tokens', headers={**JSON, 'Authorization': 'Bearer wrong'})
row('token without Bearer', TEXT, 401, ('Bearer', 'Authorization: Bearer <token>'), code='unauthorized', server='tokens', headers={**JSON, 'Authorization': TOKEN})
row('token as Basic', TEXT, 401, ('another scheme than Bearer', 'Authorization: Bearer <token>'), code='unauthorized', server='tokens', headers={**JSON, 'Authorization': 'Basic dTpw'})
row('too large', {n: tensor(np.zeros((1, 64, 1, 8), 'float32')) for n in 'qkv'}, 413, ('4096', 'bytes', "the server's --max-body-bytes"), code='too-large', server='small')


# ---- Printing --------------------------------------------------------------------------------------------------------

def ask(server, mistake):
    return server.ask(mistake.method, mistake.path, mistake.body, mistake.headers)


def falls_short(mistake, answer):
    """Returns what is missing in or wrong with the answer to a mistake, or None."""
    if answer.status != mistake.status:
        return f'status {answer.status}, not {mistake.status}'
    if mistake.status == 200:
        missing = [words for words in mistake.says if words not in ' '.join(answer.json().get('hints', []))]
        return f'hints do not say {missing}' if missing else None
    problem = answer.json()
    if problem['code'] != mistake.code:
        return f'code {problem["code"]}, not {mistake.code}'
    missing = [words for words in mistake.says if words not in problem['detail']]
    return f'does not say {missing}' if missing else None


def start(name, tokens):
    return service.Server(*[option.format(tokens=tokens) for option in SERVERS[name]])


class Elsewhere:
    """A server that already runs at a URL, with the methods of service.Server that rows need."""

    def __init__(self, url):
        host, port = url.removeprefix('http://').rstrip('/').rsplit(':', 1)
        self.address = (host, int(port))

    def ask(self, *request):
        return service.Connection(self.address, 60).ask(*request)


def print_all(url=None):
    import contextlib
    import tempfile
    with contextlib.ExitStack() as stack:
        tokens = stack.enter_context(tempfile.NamedTemporaryFile('w', suffix='.tokens'))
        print(TOKEN, file=tokens, flush=True)
        servers = {'plain': Elsewhere(url)} if url else {name: stack.enter_context(start(name, tokens.name)) for name in SERVERS}
        short = 0
        for mistake in ROWS:
            if mistake.server not in servers:
                continue
            answer = ask(servers[mistake.server], mistake)
            why = falls_short(mistake, answer)
            short += why is not None
            print(f'{mistake.name}\n    {answer.status} ' + ('ok' if answer.status == 200 else answer.json()['detail']))
            if why:
                print(f'    FALLS SHORT: {why}')
        print(f'\n{len(ROWS)} mistakes, {short} answers fall short')


if __name__ == '__main__':
    if sys.argv[1:2] != ['--print']:
        sys.exit(__doc__)
    print_all(*sys.argv[2:3])
