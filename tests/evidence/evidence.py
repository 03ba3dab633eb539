"""Measures whether `POST /v1/attention/check` can be trusted: a server checks thousands of results of kernels that are
right, or wrong in a known way, and this script counts its verdicts.

    make evidence                    some hundred problems, as in CI
    make evidence EVIDENCE=all       all of them; takes minutes
    make evidence ARGS="--only alignment:7 --show"    one problem, and the whole answer

There are four kinds of cases. A check names each mistake that it knows by a code.

| kind | what the kernel does | right answer |
|---|---|---|
| table | one mistake that has a code (known_mistakes.py) | not `match`; the first code is that of the mistake |
| right | no mistake; four dtypes, tiles of 32 to 256 keys | not `mismatch` |
| invented | one mistake that has no code (inventions.py) | `mismatch`, with the wrong place and no explanation |
| pair | two of the ten most frequent mistakes | both codes among the explanations |

Another code counts as right too, if a kernel with its mistake computes the same results on this problem. To find that
out, the script computes the results of both kernels. A case counts if the error of its mistake exceeds two limits. One
is ten times `explained`, the error that rounding explains according to the answer. The other is ten times the error of
this script's kernel without a mistake. If the error does not exceed this second limit, another problem is drawn. Seeds
are fixed. The exit status is 1 if a bound of BOUNDS is broken."""
import argparse
import collections
import http.client
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
import types
import urllib.parse
import zlib

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, '..'), os.path.join(HERE, '../differential')]
import inventions  # noqa: E402
import known_mistakes as mistakes  # noqa: E402
import places  # noqa: E402
import problems  # noqa: E402
from kernel import Kernel, NormalizedFirst, planted  # noqa: E402

SEED = 20261127
# A planted mistake counts only if its error exceeds EXCEEDS times `explained` (the error that rounding explains); a
# smaller one may pass for rounding.
EXCEEDS = 10
SAME = 1.01  # Several explanations count as first if their remaining error is at most SAME times that of the first.
SHOWN = 100  # most failed cases that are printed
DRAWS = 60  # most problems that are drawn for a case until its mistake changes the results
FEWEST_COUNTED = 0.9  # least fraction of all problems whose mistake exceeds EXCEEDS times `explained`
# half the relative distance between two neighbouring numbers of each dtype
UNIT = {'float32': 6e-8, 'float16': 4.9e-4, 'bfloat16': 3.9e-3}
ATOL = {'float32': 1e-6, 'float16': 1e-5, 'bfloat16': 1e-4, problems.FLOAT8: 1e-4}
# If the limit of a check is above WIDE times the error of right kernels (estimated in judge()), it could hide mistakes.
# Tensors of fewer than MANY elements are exempt, because their errors depend on chance.
WIDE, MANY = 10, 64
COVERED = 0.99  # least fraction of the wrong elements that the answer's `where` must cover
TIMEOUT_MS = 60000  # deadline of a request in ms: enough to try every explanation on every problem here
# Mistakes of precision. Their errors may be less than ten times `explained` (the error that rounding explains).
PRECISION = ('accumulated_in_16_bit', 'scores_in_16_bit', 'tf32_products', 'truncated')
# Pairs of mistakes that no kernel can make together. A kernel without a causal mask cannot align the mask wrongly.
PAIR_OPPOSES = ({'alignment', 'causal_missing'},)

# The problems on which kernels without a mistake are checked: {name of a line of the report: options of the problems
# that the line counts}.
RIGHT = {**{dtype: {'dtype': dtype} for dtype in (*problems.DTYPES, problems.FLOAT8)}, 'pages': {'pages': True}, 'FlashMask rows': {'row_mask': True}}

# Each row has the kind of case, what is counted, 'at most' or 'at least', and a fraction of the counted cases.
BOUNDS = (
    ('table', 'passed', 'at most', 0.0),
    ('table', 'named first', 'at least', 0.95),
    ('right', 'mismatch', 'at most', 0.0),
    ('right', 'limit is wide', 'at most', 0.0),
    ('invented', 'mismatch', 'at least', 1.0),
    ('invented', 'located', 'at least', 1.0),
    ('invented', 'explained falsely', 'at most', 0.03),
    ('pair', 'both named', 'at least', 0.70),
)


# ---- Cases -----------------------------------------------------------------------------------------------------------

def cases(everything):
    """Yields (kind, name, number) of every case, or of the short list's cases."""
    def of(kind, names, all_of, part_of):
        return [(kind, name, n) for name in names for n in range(all_of if everything else part_of)]
    pairs = ['+'.join(p) for p in itertools.combinations(mistakes.FREQUENT, 2) if set(p) not in PAIR_OPPOSES]
    return (of('table', mistakes.TABLE, 25, 1) + of('right', RIGHT, 100, 6) +
            of('invented', list(inventions.ALL) if everything else list(inventions.ALL)[::2], 7, 1) +
            of('pair', pairs if everything else pairs[::6], 4, 1))


def error(got, want):
    """Returns the largest difference. It is infinite where only one of two numbers is NaN or infinite."""
    with np.errstate(invalid='ignore'):
        d = np.abs(np.where(got == want, 0, got - want))
    return float(np.nan_to_num(d, nan=np.inf).max(initial=0))


class Case:
    """One case: a problem, and the results of a kernel that makes the mistakes in `name`."""

    def __init__(self, kind, name, number):
        self.kind, self.name, self.number = kind, name, number
        self.codes = {'table': [name], 'pair': name.split('+')}.get(kind, [])
        for attempt in range(DRAWS):
            self.draw(np.random.default_rng([SEED, zlib.crc32(f'{kind} {name}'.encode()), number, attempt]))
            if not all(m.fits(self.problem, self.variant[m.__name__]) for m in self.mistakes if self.codes):
                continue
            if kind == 'right' or self.exceeds() and all(self.matters(c) for c in self.codes if kind == 'pair'):
                break

    def draw(self, rng):
        self.variant = {}
        if self.kind == 'right':
            planted_here, needs = [], RIGHT[self.name]
        elif self.kind == 'invented':
            planted_here, needs = [inventions.ALL[self.name]], dict(inventions.ALL[self.name].needs)
            self.variant['seed'] = int(rng.integers(2**31))
        else:
            planted_here, needs = [mistakes.TABLE[c] for c in self.codes], {}
            for m in planted_here:
                needs.update(m.needs)
                self.variant[m.__name__] = m.variants[self.number % len(m.variants)]
        self.problem = problems.draw(rng, **needs)
        self.tile = int(rng.choice((32, 64, 128, 256)))
        self.mistakes = planted_here
        self.truth = Kernel(self.problem, exact=True).run()
        self.right = Kernel(self.problem, tile=self.tile).run()
        self.kernel = planted(*planted_here)(self.problem, tile=self.tile, variant=self.variant)
        self.sent = self.kernel.run() if planted_here else self.right

    def exceeds(self):
        return any(error(self.sent[n], self.truth[n]) > EXCEEDS * max(error(self.right[n], self.truth[n]), 1e-12) for n in self.sent)

    def matters(self, code):
        """Returns whether the mistake `code` of a pair matters: a kernel with only the other mistake must have
        different results."""
        others = [m for m in self.mistakes if m.__name__ != code]
        without = planted(*others)(self.problem, tile=self.tile, variant=self.variant).run()
        return any(error(self.sent[n], without[n]) > EXCEEDS * max(error(self.right[n], self.truth[n]), 1e-12) for n in self.sent)

    def members(self):
        return {**problems.members(self.problem, self.sent, self.kernel.result_dtype), 'timeout_ms': TIMEOUT_MS}

    def computes_the_same(self, code, answer):
        """Returns whether a kernel with the mistake `code`, in any of its variants, computes the same results as this
        case's kernel, within the limits of the answer."""
        if code not in mistakes.TABLE:
            return False
        other = mistakes.TABLE[code]
        exact = code not in PRECISION
        this = planted(*self.mistakes)(self.problem, exact=exact, tile=self.tile, variant=self.variant).run()
        for form in other.variants:
            try:
                that = planted(other)(self.problem, exact=exact, tile=self.tile, variant={code: form}).run()
            # no kernel can make the mistake `code` on this problem: for example it has no softcap, or D is not Dv
            except (ValueError, KeyError, IndexError):
                continue
            if all(that[n].shape == this[n].shape and error(that[n], this[n]) <= answer['errors'][n]['limit'] for n in self.sent):
                return True
        return False

    def wrong(self, name, limit):
        """Returns which elements of a result differ by more than the limit from those of the float64 kernel."""
        got, want = self.sent[name], self.truth[name]
        with np.errstate(invalid='ignore'):
            return ~((got == want) | (np.abs(got - want) <= limit))


# ---- Judging an answer -----------------------------------------------------------------------------------------------

def codes_of(explanation):
    return [explanation[n] for n in ('code', 'and') if n in explanation]


def first_codes(explanations):
    """Returns the codes of the first explanation, and of each other one whose remaining error is the same but for
    rounding."""
    best = explanations[0]['error_if_so'] if explanations else 0
    return [c for e in explanations if e['error_if_so'] <= SAME * best or e is explanations[0] for c in codes_of(e)]


def judge(case, answer):
    """Returns what is counted for one case (its flags), and what is wrong with the answer."""
    f = types.SimpleNamespace(kind=case.kind, name=case.name, number=case.number, counted=True, why='', flags=set(), first='')
    verdict, explanations, errors = answer['verdict'], answer.get('explanations', []), answer['errors']
    f.first = '+'.join(codes_of(explanations[0])) if explanations else '-'
    explained = {n: e['explained'] for n, e in errors.items()}
    if case.kind == 'right':
        if verdict == 'mismatch':
            f.flags.add('mismatch')
        other = NormalizedFirst(case.problem).run()
        for n, e in errors.items():
            # A right kernel's error is estimated by the errors of two right kernels, and by the rounding of the result.
            least = UNIT[case.kernel.result_dtype(n)] * np.abs(np.nan_to_num(case.truth[n], posinf=0, neginf=0)).max(initial=0)
            fair = max(error(case.right[n], case.truth[n]), error(other[n], case.truth[n]), least) + ATOL[case.problem.dtype] + (2e-5 if n == 'lse' else 0)
            if case.truth[n].size >= MANY and e['limit'] > WIDE * fair:
                f.flags.add('limit is wide')
                f.why = f'{n}: limit {e["limit"]:.1e}, error {error(case.right[n], case.truth[n]):.1e}'
    else:
        f.counted = any(error(case.sent[n], case.truth[n]) > EXCEEDS * explained[n] for n in case.sent) and case.exceeds()
        if verdict == 'match':
            f.flags.add('passed')
        if verdict == 'mismatch':
            f.flags.add('mismatch')
    first = first_codes(explanations)
    if case.kind == 'table':
        if case.name in first or any(case.computes_the_same(c, answer) for c in first):
            f.flags.add('named first')
    if case.kind == 'pair':
        if set(case.codes) <= {c for e in explanations for c in codes_of(e)}:
            f.flags.add('both named')
    if case.kind == 'invented':
        if explanations and not any(case.computes_the_same(c, answer) for c in first):
            f.flags.add('explained falsely')
        f.why = misplaced(case, answer)
        if not f.why:
            f.flags.add('located')
    return f


def misplaced(case, answer):
    """Returns why the answer's `worst` and `where` do not locate the mistake, or '' if they do."""
    for n, e in answer['errors'].items():
        wrong = case.wrong(n, e['limit'])
        if not wrong.any():
            continue
        if abs(int(wrong.sum()) - e['wrong']) > 1 + wrong.sum() // 1000:
            return f'{n}: {e["wrong"]} are said to be wrong, {int(wrong.sum())} are'
        for w in answer['worst']:
            if w['tensor'] == n and not problems.in_layout(case.problem, n, wrong)[tuple(w['index'])]:
                return f'{n}: worst names {w["index"]}, which is right'
        covered, box = np.zeros_like(wrong), places.bounding_box(wrong)
        for w in answer['where']:
            if w['tensor'] != n:
                continue
            try:
                here = places.mask(w['what'], n, wrong.shape)
            except ValueError as unclear:
                return f'{n}: {unclear}'
            if abs(int((here & wrong).sum()) - w['wrong']) > 1 + wrong.sum() // 1000:
                return f'{n}: {w["what"]}: {w["wrong"]} are said to be wrong there, {int((here & wrong).sum())} are'
            if (here & ~box).any():
                return f'{n}: {w["what"]} is wider than the block of all that is wrong'
            covered |= here
        if (wrong & ~covered).sum() > (1 - COVERED) * wrong.sum():
            return f'{n}: where covers {int((wrong & covered).sum())} of the {int(wrong.sum())} that are wrong'
    return ''


# ---- Running ---------------------------------------------------------------------------------------------------------

class Client:
    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        self.connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=300)

    def check(self, members):
        self.connection.request('POST', '/v1/attention/check', json.dumps(members), {'Content-Type': 'application/json'})
        answer = self.connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f'{answer.status}: {body[:400].decode()}')
        return json.loads(body)


client = None


def begin(url):
    global client
    client = Client(url)


def one(identity):
    case = Case(*identity)
    try:
        answer = client.check(case.members())
    except RuntimeError as e:
        return types.SimpleNamespace(kind=case.kind, name=case.name, number=case.number, counted=True, flags={'refused'}, first='-', why=f'{e}: {problems.describe(case.problem)}')
    return judge(case, answer)


def report(found, say=print):
    """Prints the counts, one line for each code, and returns the bounds of BOUNDS that are broken."""
    rows = collections.OrderedDict()
    for f in found:
        rows.setdefault((f.kind, f.name), []).append(f)
    flags = {'table': ('passed', 'named first'), 'right': ('mismatch',), 'invented': ('mismatch', 'located', 'explained falsely'), 'pair': ('both named',)}
    kind_before = None
    for (kind, name), of in rows.items():
        if kind != kind_before:
            say(f'\n{kind:52} {"counted":>8} ' + ' '.join(f'{x:>17}' for x in flags[kind]) + '  otherwise first')
            kind_before = kind
        counted = [f for f in of if f.counted]
        others = collections.Counter(f.first for f in counted if kind == 'table' and 'named first' not in f.flags or 'explained falsely' in f.flags)
        say(f'{name:52} {len(counted):8} ' + ' '.join(f'{sum(x in f.flags for f in counted):17}' for x in flags[kind]) +
            '  ' + ', '.join(f'{c} {n}' for c, n in others.most_common(3)))
    broken = []
    say('')
    for kind, flag, side, share in BOUNDS:
        counted = [f for f in found if f.kind == kind and f.counted]
        n = sum(flag in f.flags for f in counted)
        if not counted:
            continue
        well = n <= share * len(counted) if side == 'at most' else n >= share * len(counted)
        say(f'{kind:9} {flag:18} {n:5} of {len(counted):5} ({n / len(counted):6.1%}; {side} {share:.0%})  {"" if well else "BROKEN"}')
        if not well:
            broken.append((kind, flag))
    small = [f for f in found if not f.counted and f.name not in PRECISION]
    if len(small) > (1 - FEWEST_COUNTED) * len(found):
        broken.append(('all', 'too few mistakes matter'))
        say(f'{len(small)} of {len(found)} mistakes do not exceed {EXCEEDS} times `explained`: BROKEN')
    refused = [f for f in found if 'refused' in f.flags]
    if refused:
        broken.append(('all', 'refused'))
    for f in refused[:10]:
        say(f'refused: {f.kind} {f.name}:{f.number}: {f.why}')
    return broken


def main(words=None):
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--all', action='store_true', help='all problems, not a part')
    ap.add_argument('--kind', choices=('table', 'right', 'invented', 'pair'), help='this kind alone')
    ap.add_argument('--only', help='NAME or NAME:NUMBER: this code, invention, pair or dtype alone')
    ap.add_argument('--every', type=int, default=1, help='only every Nth of them')
    ap.add_argument('--show', action='store_true', help='print what is sent and answered')
    ap.add_argument('--url', help='a server that runs already')
    ap.add_argument('--jobs', type=int, default=os.cpu_count())
    a = ap.parse_args(words)
    name, _, number = (a.only or '').partition(':')
    todo = [c for c in cases(a.all or bool(a.only)) if (not a.kind or c[0] == a.kind) and (not name or c[1] == name) and (not number or c[2] == int(number))][::a.every]
    if not todo:
        sys.exit('no such case')
    start = time.monotonic()
    import service
    server = None if a.url else service.Server().start()
    url = a.url or server.url
    try:
        if a.show:
            begin(url)
            for c in todo:
                case = Case(*c)
                print(c, case.variant, problems.describe(case.problem), {n: error(case.sent[n], case.truth[n]) for n in case.sent}, sep='\n  ')
                answer = client.check(case.members())
                print(json.dumps(answer, indent=1), judge(case, answer), sep='\n')
            return 0
        with multiprocessing.Pool(a.jobs, begin, (url,)) as pool:
            found = list(pool.imap(one, todo, chunksize=4))
    finally:
        if server:
            server.stop()
    broken = report(found)
    amiss = [f for f in found if f.counted and 'refused' not in f.flags and
             any((flag in f.flags) == (side == 'at most') for kind, flag, side, _ in BOUNDS if kind == f.kind)]
    for f in amiss[:SHOWN]:
        print(f'amiss: {f.kind} --only {f.name}:{f.number}: first {f.first} {f.why}')
    if len(amiss) > SHOWN:
        print(f'and {len(amiss) - SHOWN} more')
    print(f'{len(found)} problems in {time.monotonic() - start:.0f} s: {"all bounds hold" if not broken else "broken: " + ", ".join(" ".join(b) for b in broken)}')
    return 1 if broken else 0


if __name__ == '__main__':
    sys.exit(main())
