"""Checks with attnd whether a solution of FlashInfer-Bench computed right results, and if not, says what is wrong.

    python3 flashinfer_bench.py TRACE_SET DEFINITION UUID TENSORS.safetensors [http://127.0.0.1:8080]
    python3 flashinfer_bench.py --example [http://127.0.0.1:8080]

TRACE_SET is a folder with definitions/*/DEFINITION.json and workloads/*/DEFINITION.jsonl, and UUID is a workload of
that definition. FlashInfer-Bench stores no outputs, so the program that runs the solution saves them:
TENSORS.safetensors has the outputs under the definition's names ("output", "lse", or one of them), and the inputs that
the workload calls random.

    save_file({'output': output, 'lse': lse, 'q': q, 'k': k, 'v': v}, 'TENSORS.safetensors')   # safetensors.torch

Definitions of op_type gqa_ragged, gqa_paged and mla_paged are supported, prefill and decode. The exit status is 0 if
the results are right, 1 if they are not, 2 if something is missing. --example makes a small trace set with a right and
a wrong result, and checks both. Needs Python 3 and NumPy. ATTND_TOKEN is the server's token, if it needs one."""
import json
import math
import os
import pathlib
import sys
import tempfile
import urllib.error
import urllib.request

import numpy as np

# NumPy types that hold the bytes of each dtype. NumPy has no bfloat16, but no function here computes with these
# numbers.
RAW = {'F32': np.float32, 'F16': np.float16, 'BF16': np.uint16, 'F8_E4M3': np.uint8, 'I32': np.int32, 'I64': np.int64}


class Wrong(Exception):
    """Raised if a file of the trace set is missing, or does not follow FlashInfer-Bench's format."""


# ---- safetensors: {name: (dtype, array)} -----------------------------------------------------------------------------


def load(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], 'little')
    head, found = json.loads(data[8:8 + size]), {}
    for name, t in head.items():
        if name != '__metadata__' and t['dtype'] in RAW:
            begin, end = t['data_offsets']
            found[name] = t['dtype'], np.frombuffer(data[8 + size + begin:8 + size + end], RAW[t['dtype']]).reshape(t['shape'])
    return found


def dump(tensors, metadata):
    head, parts, at = {'__metadata__': metadata}, [], 0
    for name, (dtype, x) in tensors.items():
        parts.append(np.ascontiguousarray(x).tobytes())
        head[name] = {'dtype': dtype, 'shape': list(x.shape), 'data_offsets': [at, at + len(parts[-1])]}
        at += len(parts[-1])
    text = json.dumps(head).encode()
    text += b' ' * (-len(text) % 8)
    return len(text).to_bytes(8, 'little') + text + b''.join(parts)


# ---- A workload ------------------------------------------------------------------------------------------------------


def only(paths, what):
    paths = list(paths)
    if not paths:
        raise Wrong(f'{what} is not there')
    return paths[0]


def read_workload(root, name, uuid):
    """Returns the definition of this name, and its workload with this uuid."""
    definition = json.loads(only((root / 'definitions').rglob(name + '.json'), f'{root}/definitions/*/{name}.json').read_text())
    for line in only((root / 'workloads').rglob(name + '.jsonl'), f'{root}/workloads/*/{name}.jsonl').read_text().splitlines():
        workload = json.loads(line)['workload'] if line.strip() else {}
        if workload.get('uuid') == uuid:
            return definition, workload
    raise Wrong(f'no workload of {name} has the uuid {uuid}')


def read_inputs(root, workload, saved):
    """Returns {name: (dtype, array), or a number} of all inputs: those in the workload's files, and the random ones,
    which come from the saved tensors."""
    found = {}
    for name, spec in workload['inputs'].items():
        if spec['type'] == 'scalar':
            found[name] = spec['value']
        elif spec['type'] == 'safetensors':
            found[name] = load(root / spec['path'])[spec['tensor_key']]
        elif name in saved:
            found[name] = saved[name]
        else:
            raise Wrong(f'{name} is random in this workload: save it beside the outputs')
    return found


# ---- From its names to those of POST /v1/attention/check -------------------------------------------------------------


def join(a, b):
    """Joins two tensors, each (dtype, array), along the last axis."""
    return a[0], np.concatenate((a[1], b[1]), -1)


def pages(x):
    """Makes page_table [B, most] and seqlens_k [B] from kv_indptr, kv_indices and kv_last_page_len."""
    starts, indices = x['kv_indptr'][1].astype(np.int64), x['kv_indices'][1]
    count = np.diff(starts)
    table = np.zeros((len(count), max(int(count.max(initial=0)), 1)), np.int32)
    table[np.arange(table.shape[1]) < count[:, None]] = indices[:starts[-1]]
    size = x['k'][1].shape[1]
    # a page of one token is always full, so definitions with pages of one token have no kv_last_page_len
    last = x['kv_last_page_len'][1] if 'kv_last_page_len' in x else size
    return ('I32', table), ('I32', np.where(count > 0, (count - 1) * size + last, 0).astype(np.int32))


def to_check(definition, x, outputs):
    """Returns the tensors and options of the request to /v1/attention/check."""
    kind = definition['op_type']
    if kind == 'mla_paged':
        # Latent attention (MLA): one head of keys, whose first columns are the values.
        keys = join(x['ckv_cache'], x['kpe_cache'])
        x = {**x, 'q': join(x['q_nope'], x['q_pe']), 'k': (keys[0], keys[1][:, :, None]), 'v': (x['ckv_cache'][0], x['ckv_cache'][1][:, :, None])}
    elif kind == 'gqa_paged':
        x = {**x, 'k': x['k_cache'], 'v': x['v_cache']}
    elif kind != 'gqa_ragged':
        raise Wrong(f'op_type {kind} is not one of gqa_ragged, gqa_paged, mla_paged')
    tensors, options = {n: x[n] for n in 'qkv'}, {'scale': repr(float(x['sm_scale']))}
    if 'causal' in definition['name']:
        options['causal'] = 'true'  # the last query sees the last key, which is attnd's default
    decode = 'qo_indptr' not in x
    if not decode:
        tensors['cu_seqlens_q'] = x['qo_indptr']
    if kind == 'gqa_ragged':
        tensors['cu_seqlens_k'] = x['kv_indptr']
    else:
        tensors['page_table'], tensors['seqlens_k'] = pages(x)
    for name in ('output', 'lse'):
        if name in outputs:
            tensors['out' if name == 'output' else name] = outputs[name]
    if not {'out', 'lse'} & set(tensors):
        raise Wrong('neither "output" nor "lse" is among the saved tensors')
    # FlashInfer-Bench has lse as [total_q, H] in base 2, attnd as [H, total_q] in natural logarithms
    if 'lse' in tensors:
        tensors['lse'] = 'F32', (tensors['lse'][1].astype(np.float32) * np.float32(math.log(2))).swapaxes(0, 1)
    if decode:  # one query per row: FlashInfer-Bench has [B, H, D], attnd [B, 1, H, D]
        for name in ('q', 'out'):
            if name in tensors:
                tensors[name] = tensors[name][0], tensors[name][1][:, None]
        if 'lse' in tensors:
            tensors['lse'] = 'F32', tensors['lse'][1].swapaxes(0, 1)[:, :, None]
    return tensors, options


def check(url, tensors, options):
    headers = {'Content-Type': 'application/x-safetensors', 'Accept': 'application/json'}
    if os.environ.get('ATTND_TOKEN'):
        headers['Authorization'] = 'Bearer ' + os.environ['ATTND_TOKEN']
    try:
        with urllib.request.urlopen(urllib.request.Request(url + '/v1/attention/check', dump(tensors, options), headers)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        raise Wrong(json.load(e)['detail']) from None
    except urllib.error.URLError as e:
        raise Wrong(f'{url}: {e.reason}') from None


def run(root, name, uuid, saved, url):
    """Checks one workload and prints the verdict. Returns whether the results are right."""
    root, saved = pathlib.Path(root), load(pathlib.Path(saved))
    definition, workload = read_workload(root, name, uuid)
    answer = check(url, *to_check(definition, read_inputs(root, workload, saved), saved))
    print(f'{name} {uuid}: {answer["verdict"]}')
    for tensor, e in answer['errors'].items():
        print(f'  {tensor}: the largest error is {e["max_abs"]}, the limit {e["limit"]:.1e}; {e["wrong"]} of {e["of"]} are wrong')
    for w in answer['where']:
        print(f'  where: {w["tensor"]}, {w["what"]}')
    for e in answer['explanations']:
        # an explanation names one mistake, or two mistakes that the kernel makes together
        codes = ' and '.join(e[n] for n in ('code', 'and') if n in e)
        print(f'  because ({codes}): {e["detail"]}\n  to fix: {e["fix"]}')
    return answer['verdict'] != 'mismatch'


# ---- A small trace set -----------------------------------------------------------------------------------------------


def make_example(root):
    """Makes a definition and a workload in FlashInfer-Bench's format: a decode step of two rows over pages of 4 tokens,
    with a right and a wrong result. Returns the arguments of run()."""
    name, H, Hk, D, size = 'gqa_paged_decode_h4_kv2_d16_ps4', 4, 2, 16, 4
    axes = {'batch_size': 'var', 'num_pages': 'var', 'len_indptr': 'var', 'num_kv_indices': 'var', 'num_qo_heads': H, 'num_kv_heads': Hk, 'head_dim': D, 'page_size': size}
    pool = {'shape': ['num_pages', 'page_size', 'num_kv_heads', 'head_dim'], 'dtype': 'float16'}
    row = {'shape': ['batch_size', 'num_qo_heads', 'head_dim'], 'dtype': 'float16'}
    definition = {
        'name': name, 'op_type': 'gqa_paged',
        'axes': {n: {'type': 'var'} if a == 'var' else {'type': 'const', 'value': a} for n, a in axes.items()},
        'inputs': {'q': row, 'k_cache': pool, 'v_cache': pool, 'kv_indptr': {'shape': ['len_indptr'], 'dtype': 'int32'},
                   'kv_indices': {'shape': ['num_kv_indices'], 'dtype': 'int32'}, 'kv_last_page_len': {'shape': ['batch_size'], 'dtype': 'int32'},
                   'sm_scale': {'shape': None, 'dtype': 'float32'}},
        'outputs': {'output': row, 'lse': {'shape': ['batch_size', 'num_qo_heads'], 'dtype': 'float32', 'description': 'The 2-based log-sum-exp of attention logits.'}},
    }
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, H, D), (8, size, Hk, D), (8, size, Hk, D)))
    index = {'kv_indptr': np.array([0, 3, 5], np.int32), 'kv_indices': np.array([6, 1, 4, 0, 7], np.int32), 'kv_last_page_len': np.array([2, 4], np.int32)}
    blob = f'blob/workloads/gqa_paged/{name}/index.safetensors'
    inputs = {n: {'type': 'random'} for n in ('q', 'k_cache', 'v_cache')}
    inputs.update({n: {'type': 'safetensors', 'path': './' + blob, 'tensor_key': n} for n in index}, sm_scale={'type': 'scalar', 'value': D ** -0.5})
    workload = {'uuid': 'e2142798', 'axes': {'batch_size': 2, 'num_pages': 8, 'len_indptr': 3, 'num_kv_indices': 5}, 'inputs': inputs}
    for folder in (f'definitions/{definition["op_type"]}', f'workloads/{definition["op_type"]}', os.path.dirname(blob)):
        (root / folder).mkdir(parents=True)
    (root / f'definitions/gqa_paged/{name}.json').write_text(json.dumps(definition, indent=2))
    (root / f'workloads/gqa_paged/{name}.jsonl').write_text(json.dumps({'definition': name, 'workload': workload, 'solution': None, 'evaluation': None}) + '\n')
    (root / blob).write_bytes(dump({n: ('I32', x) for n, x in index.items()}, {}))

    def solve(group):
        """Returns a solution's results. group[h] says which head of k and v head h of q reads; wrong entries give wrong
        results."""
        output, lse = np.zeros((2, H, D)), np.zeros((2, H))
        for b, n in enumerate((10, 8)):
            of = index['kv_indices'][index['kv_indptr'][b]:index['kv_indptr'][b + 1]]
            kk, vv = (x[of].reshape(-1, Hk, D)[:n, group].astype(np.float64) for x in (k, v))
            z = np.einsum('hd,jhd->hj', q[b], kk) * D ** -0.5
            lse[b] = np.log2(np.exp(z).sum(-1))
            output[b] = np.einsum('hj,jhd->hd', np.exp(z - lse[b][:, None] * np.log(2)), vv)
        return {'output': ('F16', output.astype(np.float16)), 'lse': ('F32', lse.astype(np.float32))}
    random = {n: ('F16', x) for n, x in (('q', q), ('k_cache', k), ('v_cache', v))}
    (root / 'right.safetensors').write_bytes(dump({**random, **solve([0, 0, 1, 1])}, {}))
    (root / 'wrong.safetensors').write_bytes(dump({**random, **solve([0, 1, 0, 1])}, {}))
    return name, workload['uuid']


def main():
    words = sys.argv[1:]
    url = words.pop().rstrip('/') if words and '://' in words[-1] else 'http://127.0.0.1:8080'
    try:
        if words == ['--example']:
            with tempfile.TemporaryDirectory() as folder:
                name, uuid = make_example(pathlib.Path(folder))
                right, wrong = (run(folder, name, uuid, f'{folder}/{x}.safetensors', url) for x in ('right', 'wrong'))
                return 0 if right and not wrong else 1
        if len(words) != 4:
            print(__doc__)
            return 2
        return 0 if run(*words, url) else 1
    except (Wrong, OSError, KeyError) as e:
        print(f'flashinfer_bench.py: {e}', file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main())
