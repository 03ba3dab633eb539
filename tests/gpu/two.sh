#!/usr/bin/env bash
# Several GPUs behind one attnd: tests/gpu/two.sh [BUILD]      (BUILD defaults to build)
#
#   1. --devices all, under concurrent load: every GPU answers, its counters rise, and all answers to a request have the
#   same bits (two.py)
#   2. --devices 1, then --devices 1,0: only these GPUs are used, and the answers are those of step 1
#
# The script builds nothing. Needs python3 with NumPy and two GPUs; with fewer GPUs it runs nothing and says so. Without
# GPUs the script can be tried on a fake backend: ATTND=build/tests/attnd-fake ATTN_FAKE_DEVICES=2 tests/gpu/two.sh
set -u
cd "$(dirname "$0")/../.." || exit 1
build=${1:-build}
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
python=${PYTHON:-python3}
program=${ATTND:-$build/attnd}
prefix=cuda
passed=0 failed=0

if [ -n "${ATTN_FAKE_DEVICES:-}" ]; then
    count=$ATTN_FAKE_DEVICES prefix=fake
else
    count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
    nvidia-smi -L 2>/dev/null
fi
if [ "$count" -lt 2 ]; then
    echo "tests/gpu/two.sh: $count GPU(s) here, two are needed: skipped"
    echo "0 passed, 0 failed"
    exit 0
fi

port=${ATTN_GPU_PORT:-18182}
folder=$(mktemp -d)
server=
trap '[ -n "$server" ] && kill "$server" 2>/dev/null; rm -rf "$folder"' EXIT

# round DEVICES COUNT [OPTION OF TWO.PY ...]: starts a server on these devices, runs two.py against it, and ends the
# server.
round() {
    local devices=$1 expected=$2 line status
    shift 2
    echo "== --devices $devices"
    "$program" --listen "127.0.0.1:$port" --devices "$devices" 2>"$folder/log" &
    server=$!
    for _ in $(seq 300); do
        "$program" healthcheck "http://127.0.0.1:$port/readyz" >/dev/null 2>&1 && break
        kill -0 "$server" 2>/dev/null || break
        sleep 0.2
    done
    "$python" tests/gpu/two.py "http://127.0.0.1:$port" "$expected" --digests "$folder/digests" "$@" >"$folder/out" 2>&1
    grep -v ' passed, ' "$folder/out"
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$folder/out")
    if [ -n "$line" ]; then
        passed=$((passed + ${line%% passed*}))
        line=${line#*, }
        failed=$((failed + ${line%% failed*}))
    else
        failed=$((failed + 1))
    fi
    kill -TERM "$server" 2>/dev/null
    wait "$server"
    status=$?
    server=
    if [ "$status" = 0 ]; then
        passed=$((passed + 1))
        echo "ok   attnd drains and exits 0"
    else
        failed=$((failed + 1))
        echo "FAIL attnd exited with $status"
        tail -20 "$folder/log"
    fi
}

round all "$count"
round 1 1 --only "$prefix:1"
round 1,0 2

echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
