"""Finds the elements that a sentence of a check's `where` names.

    mask('queries 128 to 255, columns 0, 8 of head 3', 'out', (1, 256, 4, 64))     boolean, of that shape

Shapes are [B, S, H, D] for out, dq, dk and dv, [B, H, Sq] for lse, and the input's shape for dbias and other gradients
of options. If a sentence does not name an axis, it means all of that axis. A range that contains right elements too ("9
queries between 3 and 40") stands for the whole range."""
import re

import numpy as np

# index of each axis in [B, S, H, D]
AXIS = {'batch row': 0, 'sequence': 0, 'query': 1, 'key': 1, 'head': 2, 'column': 3}
LSE_AXIS = {'batch row': 0, 'sequence': 0, 'head': 1, 'query': 2}
NAME = r'(batch rows?|sequences?|quer(?:y|ies)|keys?|heads?|columns?|axis \d from the end:)'
STEPS = re.compile(rf'every (\d+)th of the {NAME} from (\d+) to (\d+)')
BETWEEN = re.compile(rf'\d+ {NAME} between (\d+) and (\d+)')
PLAIN = re.compile(rf'{NAME} (\d+)(?: to (\d+)|((?:, \d+)*))')


def singular(name):
    return 'query' if name in ('query', 'queries') else name[:-1] if name.endswith('s') else name


def ranges(text):
    """Returns [(name of an axis, its indices)], and the words of the text that it does not understand."""
    found = []

    def take(pattern, of):
        nonlocal text

        def one(match):
            found.append(of(*match.groups()))
            return ''
        text = pattern.sub(one, text)
    take(STEPS, lambda step, name, a, b: (singular(name), range(int(a), int(b) + 1, int(step))))
    take(BETWEEN, lambda name, a, b: (singular(name), range(int(a), int(b) + 1)))
    take(PLAIN, lambda name, a, b, more: (singular(name), range(int(a), int(b) + 1) if b else [int(a), *map(int, re.findall(r'\d+', more or ''))]))
    rest = re.sub(r'elements of every head( and query|, (query|key) and column)|of every head|all elements|\bof\b|[, ]', '', text)
    return found, rest


def mask(text, tensor, shape):
    """Returns the elements that the sentence names. Raises ValueError if it does not understand the sentence."""
    found, rest = ranges(text)
    if rest:
        raise ValueError(f'{text!r}: {rest!r} is no place')
    inside = np.ones(shape, bool)
    for name, indices in found:
        if name.startswith('axis'):
            axis = len(shape) - int(name.split()[1])
        else:
            axis = (LSE_AXIS if tensor == 'lse' else AXIS)[name]
        if not 0 <= axis < len(shape) or max(indices) >= shape[axis]:
            raise ValueError(f'{text!r}: {tensor} {list(shape)} has no such {name}')
        along = np.zeros(shape[axis], bool)
        along[list(indices)] = True
        inside &= along.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return inside


def bounding_box(wrong):
    """Returns the smallest block (one range per axis) that contains all true elements."""
    box = np.zeros(wrong.shape, bool)
    if wrong.any():
        box[np.ix_(*[np.arange(at.min(), at.max() + 1) for at in np.nonzero(wrong)])] = True
    return box
