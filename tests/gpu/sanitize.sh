#!/usr/bin/env bash
# The CUDA kernels under compute-sanitizer: tests/gpu/sanitize.sh [BUILD]      (BUILD defaults to build)
#
#   memcheck, initcheck   the grid of every dtype, class of head size and mask at odd lengths; decoding; random problems
#   racecheck             the grid
#
# racecheck takes tens of times as long as the program alone, so each tool has a limit of its own: ATTN_SANITIZE_SECONDS (600). A tool
# that has not come to its summary by then counts as failed. Nothing is built here; without a GPU or the tool nothing is run, and it says so.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=${1:-build}
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
limit=${ATTN_SANITIZE_SECONDS:-600}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
passed=0 failed=0

if ! nvidia-smi -L >/dev/null 2>&1 || [ -z "$sanitizer" ]; then
    echo "tests/gpu/sanitize.sh: no GPU or no compute-sanitizer here: skipped"
    echo "0 passed, 0 failed"
    exit 0
fi

# under TOOL TESTS COUNT: the tests that match, with that many random problems.
under() {
    local log start=$SECONDS status
    log=$(mktemp)
    ATTN_BACKEND=cuda ATTN_TESTS=$2 ATTN_RANDOM_COUNT=$3 timeout "$limit" "$sanitizer" --tool "$1" --error-exitcode 9 \
        "$build/tests/unit/kernels/test_backends" >"$log" 2>&1
    status=$?
    # racecheck's summary is of its own kind
    if [ $status = 0 ] && grep -qE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$log"; then
        passed=$((passed + 1))
        echo "ok   $1 $2 ($((SECONDS - start)) s): $(grep -E 'SUMMARY' "$log" | tail -1)"
    else
        failed=$((failed + 1))
        echo "FAIL $1 $2 (status $status, $((SECONDS - start)) s)"
        grep -vE '^\[ +(RUN|OK)' "$log" | cut -c1-300 | tail -30
    fi
    rm -f "$log"
}

under memcheck 'test_grid*' 0
under memcheck 'test_*decoding*' 60
under memcheck 'test_random_problems*' 200
under initcheck 'test_grid*' 0
under initcheck 'test_*decoding*' 30
under racecheck 'test_grid*' 0

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
