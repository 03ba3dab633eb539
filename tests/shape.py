"""shape.py measures how long functions, files and lines of comments are, and how much code a kernel shares with its
sibling (a similar kernel). It fails if a number exceeds its limit below.

A function counts from the first line of its head to its closing brace. The files are those of the program: kernels,
text, proto-json, server. An echo is a run of at least three lines of code that another file has as well. Comments,
braces, includes and pragmas are no lines of code here."""
import collections
import os
import re
import statistics
import sys

# The most lines of a function. "C": functions in .c and .h files. "kernels": functions with __global__ in .cu and .cuh
# files. "CUDA": all other functions in these files.
MOST_LINES = {"C": 100, "CUDA": 200, "kernels": 200}
MEDIAN = 10                 # the median of the lines of C functions
LONG_FILE = 700             # longer files are counted, not refused
MOST_COLUMNS = 120          # the longest line that ends in a comment; clang-format checks the others
MOST_ECHO = 5.0             # the most code that siblings share, in percent
SIBLINGS = [
    ("sm80/forward.cu", "sm80/f32_forward.cu"),
    ("sm80/backward.cu", "sm80/f32_backward.cu"),
    ("sm80/forward.cu", "sm80/backward.cu"),
    ("sm80/f32_forward.cu", "sm80/f32_backward.cu"),
    ("sm80/forward.cu", "sm80/decode.cu"),
    ("sm90/forward/forward_tiles.cuh", "sm90/forward/f8_forward.cu"),
    ("sm90/forward/forward_tiles.cuh", "sm90/latent/latent.cu"),
    ("sm90/forward/forward_tiles.cuh", "sm90/backward/backward_tiles.cuh"),
    ("sm80/forward.cu", "sm90/forward/forward_tiles.cuh"),
    ("sm80/backward.cu", "sm90/backward/backward_tiles.cuh"),
]


def sources():
    for top in ("kernels", "text", "proto-json", "server"):
        for folder, _, files in os.walk(top):
            yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith((".c", ".h", ".cu", ".cuh")))


def without_comments(text):
    return re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)


def functions(text):
    """Yields (first line, lines, head) of each function. Its opening brace is on a line of its own, and `}` at the
    start of a line ends it."""
    lines = without_comments(text).split("\n")
    for n, line in enumerate(lines):
        if line.strip() != "{" or n == 0 or not re.search(r"\)( const)?$|\\$|^\s*: .*\)$", lines[n - 1].rstrip()):
            continue
        first = n
        while first > 0 and lines[first - 1].strip() and not re.search(r"[;}{]$|^#|:$", lines[first - 1].strip()):
            first -= 1
        end = next((m for m in range(n + 1, len(lines)) if lines[m] == line[:len(line) - 1] + "}"), None)
        if end is not None:
            yield first + 1, end - first + 1, " ".join(s.strip() for s in lines[first:n])


def long_comments(text):
    """Returns the lines with a comment that extends beyond MOST_COLUMNS."""
    for comment in re.finditer(r"/\*.*?\*/", text, flags=re.S):
        first = text.count("\n", 0, comment.start()) + 1
        lines = (text[text.rfind("\n", 0, comment.start()) + 1:comment.start()] + comment[0]).split("\n")
        yield from (first + n for n, line in enumerate(lines) if len(line) > MOST_COLUMNS)


def code(path):
    text = without_comments(open(path, encoding="utf-8").read())
    kept = (line.strip() for line in text.split("\n"))
    return [line for line in kept if re.search(r"\w", line) and not line.startswith("#")]


def echo(a, b):
    """Returns the percentage of a's lines that are in runs of three lines which also occur in b."""
    runs = set(zip(b, b[1:], b[2:]))
    hit = {i + n for i, run in enumerate(zip(a, a[1:], a[2:])) if run in runs for n in range(3)}
    return 100 * len(hit) / len(a)


def main():
    faults, lengths, long_files = [], collections.defaultdict(list), []
    for path in sources():
        text = open(path, encoding="utf-8").read()
        if text.count("\n") > LONG_FILE:
            long_files.append(f"{path} {text.count(chr(10))}")
        faults += [f"{path}:{line}: a comment beyond column {MOST_COLUMNS}" for line in long_comments(text)]
        for line, length, head in functions(text):
            kind = "C" if path.endswith((".c", ".h")) else "kernels" if "__global__" in head else "CUDA"
            lengths[kind].append(length)
            if length > MOST_LINES[kind]:
                faults.append(f"{path}:{line}: a function of {length} lines: {head[:80]}")
    print(f'{"functions":12}{"count":>7}{"median":>8}{"longest":>9}{"over 100":>10}')
    for kind, found in lengths.items():
        print(f"{kind:12}{len(found):7}{statistics.median(found):8.0f}{max(found):9}{sum(n > 100 for n in found):10}")
    if statistics.median(lengths["C"]) > MEDIAN:
        faults.append(f'the median of functions in C is above {MEDIAN} lines')
    print(f"files over {LONG_FILE} lines: {', '.join(long_files) or 'none'}")
    for a, b in SIBLINGS:
        lines = [code(os.path.join("kernels/cuda", name)) for name in (a, b)]
        there, back = echo(*lines), echo(*reversed(lines))
        print(f"{a:22}{b:24}echoes {there:4.1f} % and {back:4.1f} %")
        if max(there, back) >= MOST_ECHO:
            faults.append(f"{a} and {b} echo each other: {max(there, back):.1f} % of a file, {MOST_ECHO:.0f} are too many")
    print("\n".join(faults + [f"shape: {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
