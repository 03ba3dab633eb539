"""layers.py [BUILD]: checks that each folder of the program uses only the folders that it may use, and that no files
depend on each other in a circle.

Two graphs are checked. The first has the includes of every source. Each folder of LAYERS may include its own headers
and those of the folders on its line, and no others of the project. A library of LIBRARIES may be included only by files
of its own part of the program. The second graph has the calls of every source, read from the object files of BUILD
(build/ after `make`). It shows what includes do not show: two files that call each other through headers of a lower
layer. An object file that is older than its source is left out. Nothing is compiled here.

A circle is a fault in both graphs: headers that include each other, and sources that call each other. (It is no fault
if x.c includes y.h and y.c includes x.h.) Messages about calls name a source without its ending: server/base/log."""
import collections
import os
import re
import subprocess
import sys

# Each folder, and the folders whose headers its files may include besides its own. The whole program uses
# `kernels/attention.h` and `kernels/dtype.h`, so every other folder may include kernels.
LAYERS = {
    "kernels": [],
    "text": [],
    "proto-json": ["text", "kernels"],
    "server/base": ["text", "kernels"],
    "server/caches": ["server/base", "proto-json", "text", "kernels"],
    "server/regions": ["server/base", "proto-json", "text", "kernels"],
    "server/work": ["server/regions", "server/caches", "server/base", "proto-json", "text", "kernels"],
    "server/device": ["server/work", "server/regions", "server/caches", "server/base", "proto-json", "text", "kernels"],
}
for above, folder in (("server/device", "server/intake"), ("server/intake", "server/sched"), ("server/sched", "server/routes"),
                      ("server/routes", "server/http"), ("server/http", "server")):
    LAYERS[folder] = [above] + LAYERS[above]
# Headers of libraries that only one part of the program may include, and the prefixes of that part's paths.
LIBRARIES = {
    "microhttpd.h": ("server/http/",),
    "uv.h": ("server/sched/", "server/base/mailbox."),
}
# Circles that are allowed, because their files form one design. The reason stands beside each circle.
ALLOWED_CIRCLES = [
]


def layer_of(path):
    """Returns the longest folder of LAYERS that contains the path."""
    folder = os.path.dirname(path)
    while folder and folder not in LAYERS:
        folder = os.path.dirname(folder)
    return folder


def sources():
    for top in ("kernels", "text", "proto-json", "server"):
        for folder, _, files in os.walk(top):
            for name in sorted(files):
                if name.endswith((".c", ".h", ".cu", ".cuh")):
                    yield os.path.join(folder, name)


def unit(path):
    return path.rsplit(".", 1)[0]


def includes(path):
    """Returns the project's headers that a source includes, as paths from the top."""
    for line in open(path, encoding="utf-8"):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if match:
            for base in ("", os.path.dirname(path)):
                found = os.path.normpath(os.path.join(base, match[1]))
                if os.path.exists(found):
                    yield found
                    break


def libraries(path):
    """Returns the headers outside the project that a source includes."""
    for line in open(path, encoding="utf-8"):
        match = re.match(r"\s*#\s*include\s+<([^>]+)>", line)
        if match:
            yield match[1]


def circles(graph):
    """Returns the strongly connected components of more than one node (Tarjan's algorithm, without recursion)."""
    index, low, on_stack, stack, found, counter = {}, {}, set(), [], [], 0
    for root in sorted(graph):
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = counter
        counter += 1
        stack.append(root)
        on_stack.add(root)
        while work:
            node, successors = work[-1]
            for successor in successors:
                if successor not in index:
                    index[successor] = low[successor] = counter
                    counter += 1
                    stack.append(successor)
                    on_stack.add(successor)
                    work.append((successor, iter(sorted(graph.get(successor, ())))))
                    break
                if successor in on_stack:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        top = stack.pop()
                        on_stack.discard(top)
                        component.append(top)
                        if top == node:
                            break
                    if len(component) > 1:
                        found.append(sorted(component))
    return found


def object_graph(build):
    """Reads which source uses a symbol that another source defines, from the program's object files. Also returns how
    many files were read, and how many are older than their sources."""
    defined, wanted, looked_at, old = {}, collections.defaultdict(set), 0, 0
    for folder, _, files in os.walk(build):
        for name in files:
            path = os.path.relpath(os.path.join(folder, name), build)
            if not name.endswith(".o") or not path.startswith(("kernels/", "text/", "proto-json/", "server/")):
                continue
            source = unit(path[:-2] if path.endswith(".cu.o") else path)
            path = os.path.join(build, path)
            there = [source + ending for ending in (".c", ".cu") if os.path.exists(source + ending)]
            if not there:
                continue  # the object belongs to a file that no longer exists
            if os.path.getmtime(path) < os.path.getmtime(there[0]):
                old += 1
                continue
            looked_at += 1
            for line in subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout.splitlines():
                kind, symbol = line[17:].split(" ", 1)
                if kind in "TDBRVWC":
                    defined[symbol] = source
                elif kind == "U":
                    wanted[source].add(symbol)
    graph = collections.defaultdict(set)
    for source, symbols in wanted.items():
        graph[source] |= {defined[s] for s in symbols if s in defined} - {source}
    return graph, looked_at, old


def main():
    faults, calls = [], "no calls"
    graph = collections.defaultdict(set)
    for path in sources():
        own = layer_of(path)
        for header in includes(path):
            other = layer_of(header)
            if path.endswith((".h", ".cuh")):
                graph[path].add(header)
            if other != own and other not in LAYERS[own]:
                faults.append(f"{path} includes {header}: {own} may not use {other}")
        for header in libraries(path):
            if header in LIBRARIES and not path.startswith(LIBRARIES[header]):
                faults.append(f"{path} includes <{header}>: only {' and '.join(LIBRARIES[header])} may")
    shown = [("include", graph)]
    if len(sys.argv) > 1:
        objects, looked_at, old = object_graph(sys.argv[1])
        if looked_at or old:
            calls = f"calls of {looked_at} object files" + (f" ({old} older than their sources are left out)" if old else "")
        shown.append(("call", objects))
        for source, others in sorted(objects.items()):
            own = layer_of(source + ".c")
            for other in sorted(others):
                layer = layer_of(other + ".c")
                if layer != own and layer not in LAYERS[own]:
                    faults.append(f"{source} calls {other}: {own} may not use {layer}")
    for how, edges in shown:
        for circle in circles(edges):
            if circle not in ALLOWED_CIRCLES:
                faults.append(f"a circle of files that {how} each other: {', '.join(circle)}")
    for fault in faults:
        print(fault)
    files = sum(1 for _ in sources())
    print(f"layers: includes of {files} files, {calls}, {len(faults)} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
