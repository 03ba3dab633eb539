#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests/gpu/run.sh [BUILD]      (make gpu; BUILD defaults to build)
#
#   1. on Hopper, the building blocks of the kernels, each by itself: TMA, products, barriers, conversions (blocks.cu);
#      and test_verify_lse, which compares rows of scores that the GPU computes in double with those of the host
#   2. test_backends on every CUDA kernel: edge cases and 2000 random problems against the float64 reference; equal bits
#      for a problem alone and among others; rules for NaN
#   3. attnd on the GPU: conformance over HTTP with three random seeds
#   4. one request a thousand times, alone and among random other requests, and a deterministic backward 250 times: equal
#      bits each time
#   5. a random walk of 10,000 operations (ATTN_GPU_WALK) on caches, compared with NumPy
#   6. copies and kernels of different requests overlap (overlap.c)
#   7. with PyTorch: tensors in a client's GPU memory, used in place (cuda_shared_memory.py)
#   8. with two GPUs or more: all of them behind one attnd (two.sh)
#
# BUILD holds attnd, tests/unit/kernels/test_backends and test_verify_lse, tests/gpu/blocks and tests/gpu/overlap, built
# with CUDA. The script builds nothing, so that a build can be carried to a machine that has a GPU and little else. It
# finds libraries in BUILD/lib (LD_LIBRARY_PATH). Needs python3 with NumPy.
# The last line counts passed and failed checks. Without a GPU the script runs nothing and says so.
# The whole output of a failed check is kept in the folder ATTN_GPU_LOGS (default /tmp).
set -u
cd "$(dirname "$0")/../.." || exit 1
build=${1:-build}
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
python=${PYTHON:-python3}
passed=0 failed=0

if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L >/dev/null 2>&1; then
    echo "tests/gpu: no GPU here: skipped"
    echo "0 passed, 0 failed"
    exit 0
fi
nvidia-smi -L

# check NAME COMMAND...: runs the command, counts the result, and shows the output if the command fails.
check() {
    local name=$1 log
    shift
    log=$(mktemp)
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1))
        echo "ok   $name: $(grep -E 'passed|PASSED|every answer right' "$log" | tail -1)"
    else
        failed=$((failed + 1))
        echo "FAIL $name"
        grep -vE '^\[ +(RUN|OK)' "$log" | cut -c1-400 | tail -40
        cp "$log" "${ATTN_GPU_LOGS:-/tmp}/failed-$failed.log"
    fi
    rm -f "$log"
}

check "building blocks" "$build/tests/gpu/blocks"
check "rows of lse" env ATTN_BACKEND=cuda "$build/tests/unit/kernels/test_verify_lse"
# A random test keeps one core busy with the CPU reference and needs little of the GPU, so it runs in the background
# beside the checks below.
logs=$(mktemp -d)
seeds=${ATTN_GPU_SEEDS:-1 100001}
for seed in $seeds; do
    { ATTN_BACKEND=cuda ATTN_RANDOM_SEED=$seed ATTN_RANDOM_COUNT=${ATTN_GPU_COUNT:-1000} "$build/tests/unit/kernels/test_backends" >"$logs/$seed" 2>&1
        echo $? >"$logs/$seed.status"; } &
done
{ ATTND_BINARY=$(realpath "$build/attnd") "$python" tests/http/caches.py --gpu --operations "${ATTN_GPU_WALK:-10000}" >"$logs/walk" 2>&1
    echo $? >"$logs/walk.status"; } &
# ended NAME: waits for a test that runs in the background, prints its output, and returns its status.
ended() {
    while [ ! -s "$logs/$1.status" ]; do sleep 0.2; done
    cat "$logs/$1"
    return "$(cat "$logs/$1.status")"
}

port=${ATTN_GPU_PORT:-18181}
"$build/attnd" --listen "127.0.0.1:$port" --devices 0 --allow-cuda-shm 2>/tmp/attnd-gpu.$$ &
server=$!
trap 'kill $server 2>/dev/null; rm -rf /tmp/attnd-gpu.$$ "$logs"' EXIT
for _ in $(seq 100); do
    "$build/attnd" healthcheck "http://127.0.0.1:$port/readyz" >/dev/null 2>&1 && break
    sleep 0.2
done
for _ in 1 2 3; do check "conformance over HTTP" "$python" tests/conformance/check.py "http://127.0.0.1:$port"; done
check "one answer in a thousand, among neighbours" "$python" tests/gpu/same_bits.py "http://127.0.0.1:$port" 1000
check "one deterministic backward in 250, among neighbours" "$python" tests/gpu/same_bits.py "http://127.0.0.1:$port" 250 backward
if "$python" -c 'import torch' 2>/dev/null; then
    check "a client's GPU memory, in place" "$python" tests/gpu/cuda_shared_memory.py "http://127.0.0.1:$port"
fi
kill -TERM $server
wait $server
status=$?
check "attnd drains and exits 0 (it exited $status)" test "$status" = 0

for seed in $seeds; do check "test_backends on cuda, random problems from $seed" ended "$seed"; done
check "a random walk on caches" ended walk
check "copies and kernels overlap" "$build/tests/gpu/overlap" timeline
if [ "$(nvidia-smi -L | grep -c '^GPU')" -ge 2 ]; then check "several GPUs" bash tests/gpu/two.sh "$build"; fi

echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
