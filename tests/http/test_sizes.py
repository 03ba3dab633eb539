"""Answers in each format contain the sizes that the server has read, because nothing else would show that a layout was
misread."""
import numpy as np
import pytest

import formats
import wire
from caches import DECODE, Cache


def zeros(*shape):
    return wire.tensor(np.zeros(shape))


BHSD = {'q': zeros(1, 8, 128, 64), 'k': zeros(1, 2, 128, 64), 'v': zeros(1, 2, 128, 32), 'layout': 'bhsd'}
READ = [
    ('as_bshd', 'forward', {'q': zeros(1, 8, 128, 64), 'k': zeros(1, 8, 128, 64), 'v': zeros(1, 8, 128, 64)}, {'B': 1, 'Sq': 8, 'Sk': 8, 'H': 128, 'Hk': 128, 'D': 64, 'Dv': 64}),
    ('bhsd', 'forward', BHSD, {'B': 1, 'Sq': 128, 'Sk': 128, 'H': 8, 'Hk': 2, 'D': 64, 'Dv': 32}),
    ('backward', 'backward', {**BHSD, 'dout': zeros(1, 8, 128, 32)}, {'B': 1, 'Sq': 128, 'Sk': 128, 'H': 8, 'Hk': 2, 'D': 64, 'Dv': 32}),
    ('packed', 'forward', {'q': zeros(5, 4, 8), 'k': zeros(6, 2, 8), 'v': zeros(6, 2, 8), 'cu_seqlens_q': wire.tensor([0, 3, 5], 'int32'),
                           'cu_seqlens_k': wire.tensor([0, 2, 6], 'int32')}, {'sequences': 2, 'total_q': 5, 'total_k': 6, 'H': 4, 'Hk': 2, 'D': 8, 'Dv': 8}),
    ('pages', 'forward', {'q': zeros(2, 1, 4, 8), 'k': zeros(9, 16, 2, 8), 'v': zeros(9, 16, 2, 8), 'page_table': wire.tensor(np.zeros((2, 3)), 'int32'),
                          'seqlens_k': wire.tensor([7, 40], 'int32')}, {'B': 2, 'Sq': 1, 'Sk': 48, 'H': 4, 'Hk': 2, 'D': 8, 'Dv': 8}),
]


@pytest.mark.parametrize('kind', formats.FORMATS)
@pytest.mark.parametrize('name, op, members, sizes', READ, ids=[r[0] for r in READ])
def test_an_answer_tells_the_sizes_as_they_were_read(server, kind, name, op, members, sizes):
    status, facts = formats.ask(server, kind, op, members)
    assert (status, facts.get('sizes')) == (200, sizes), facts


def test_each_answer_of_an_envelope_tells_its_own_sizes(server):
    answer = server.forward(requests=[{n: zeros(1, S, 2, 8) for n in 'qkv'} for S in (3, 5)])
    assert [r['sizes']['Sq'] for r in answer.json()['responses']] == [3, 5]


def test_a_backward_of_a_context_tells_the_sizes_of_what_was_saved(server):
    context = server.forward(**BHSD, save=True).json()['context']
    answer = server.backward(context=context, dout=zeros(1, 8, 128, 32))
    assert answer.json()['sizes'] == READ[1][3], answer


def test_a_decode_tells_the_longest_of_its_caches(serve):
    server = serve('--kv-bytes', '4M')
    caches = [Cache(server, kv_heads=2, head_dim=16, head_dim_v=8) for _ in range(2)]
    for cache, S in zip(caches, (200, 3)):
        assert 'sizes' not in server.post(cache.path('/append'), {'k': zeros(S, 2, 16), 'v': zeros(S, 2, 8)}).json()
    answer = server.post(DECODE, {'q': zeros(2, 1, 4, 16), 'caches': [c.id for c in caches], 'k': zeros(2, 1, 2, 16), 'v': zeros(2, 1, 2, 8)})
    assert answer.json()['lengths'] == [201, 4]
    assert answer.json()['sizes'] == {'B': 2, 'Sq': 1, 'Sk': 201, 'H': 4, 'Hk': 2, 'D': 16, 'Dv': 8}, answer
