"""Functions that send one problem in any format of bodies and answers, and read the tensors and other members of its
answer."""
import base64
import json

import wire

FORMATS = ('json', 'safetensors', 'kserve')
SAFETENSORS = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'float8_e4m3fn': 'F8_E4M3', 'int32': 'I32', 'uint8': 'U8'}
KSERVE = {'float32': 'FP32', 'float16': 'FP16', 'bfloat16': 'BF16', 'float8_e4m3fn': 'UINT8', 'int32': 'INT32', 'uint8': 'UINT8'}


def split(members):
    """Splits the members of a JSON problem into tensors {name: (dtype, shape, bytes)} and options."""
    tensors = {n: (m['dtype'], m['shape'], base64.b64decode(m['data'])) for n, m in members.items() if isinstance(m, dict)}
    return tensors, {n: m for n, m in members.items() if n not in tensors}


def send_safetensors(server, op, members, **head):
    tensors, options = split(members)
    header, data = {'__metadata__': {n: json.dumps(m) for n, m in options.items()}}, b''
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {'dtype': SAFETENSORS[dtype], 'shape': shape, 'data_offsets': [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(header).encode()
    return server.post(f'/v1/attention/{op}', len(header).to_bytes(8, 'little') + header + data, {'Content-Type': 'application/x-safetensors', **head})


def ask_safetensors(server, op, members):
    answer = send_safetensors(server, op, members)
    if answer.status != 200:
        return answer.status, answer.json()
    header = json.loads(answer.body[8:8 + int.from_bytes(answer.body[:8], 'little')])
    return 200, {n: json.loads(text) for n, text in header['__metadata__'].items()}


def send_kserve(server, op, members):
    tensors, options = split(members)
    inputs = [{'name': n, 'shape': shape, 'datatype': KSERVE[dtype], 'parameters': {'binary_data_size': len(raw), **({'fp8': True} if dtype == 'float8_e4m3fn' else {})}} for n, (dtype, shape, raw) in tensors.items()]
    outputs = [{'name': n} for n in options.pop('outputs', [])]
    parameters = {n: json.dumps(m) if isinstance(m, (list, dict)) else m for n, m in options.items()}
    head = json.dumps({'inputs': inputs, 'parameters': parameters, **({'outputs': outputs} if outputs else {})}).encode()
    return server.ask('POST', f'/v2/models/attention_{op}/infer', head + b''.join(raw for *_, raw in tensors.values()),
                      {'Inference-Header-Content-Length': str(len(head))})


def ask_kserve(server, op, members):
    answer = send_kserve(server, op, members)
    if answer.status != 200:
        return answer.status, answer.json()
    return 200, {n: json.loads(m) if isinstance(m, str) and m[:1] in '{[' else m for n, m in json.loads(answer.body)['parameters'].items()}


def ask(server, kind, op, members):
    """Sends a problem in one format (`kind`). Returns (status, the members of the answer that are not tensors), or
    (status, the problem document)."""
    if kind == 'safetensors':
        return ask_safetensors(server, op, members)
    if kind == 'kserve':
        return ask_kserve(server, op, members)
    answer = server.post(f'/v1/attention/{op}', members)
    facts = answer.json()
    return answer.status, {n: m for n, m in facts.items() if not (isinstance(m, dict) and 'data' in m)}


def results(server, kind, op, members):
    """Sends a problem in one format (`kind`). Returns (status, the answer's tensors as float64 arrays), or (status, the
    problem document). For `envelope` the tensors are those of its second problem."""
    if kind == 'envelope':
        answer = server.post(f'/v1/attention/{op}', {'requests': [{**members, 'encoding': 'array'}, members]})
        one = answer.json()['responses'][1] if answer.status == 200 else answer.json()
        status, one = (one['error']['status'], one['error']) if 'error' in one else (answer.status, one)
    elif kind == 'kserve':
        answer = send_kserve(server, op, members)
        # a KServe answer may contain -Infinity, which is not JSON but which Python reads
        status, one = answer.status, json.loads(answer.body)
        if status == 200:
            one = {t['name']: {'shape': t['shape'], 'dtype': 'any', 'data': t['data']} for t in one['outputs']}
    else:
        answer = send_safetensors(server, op, members, Accept='application/json') if kind == 'safetensors' else server.post(f'/v1/attention/{op}', members)
        status, one = answer.status, answer.json()
    if status != 200:
        return status, one
    return 200, {n: wire.value(t) for n, t in one.items() if isinstance(t, dict) and 'data' in t}


def pointer_of(kind, members, pointer):
    """Returns the JSON pointer to a wrong member in a body of this format. `pointer` is the pointer that the error has
    for a JSON body."""
    tensors, _ = split(members)
    name, rest = (pointer[1:].split('/', 1) + [''])[:2]
    if kind != 'kserve':
        return pointer
    return f'/inputs/{list(tensors).index(name)}' + (f'/{rest}' if rest else '') if name in tensors else f'/parameters{pointer}'
