#!/usr/bin/env bash
# The CUDA kernels under compute-sanitizer: tests/gpu/sanitize.sh [BUILD]      (BUILD defaults to build)
#
#   memcheck     the grid, problems of decoding, random problems
#   initcheck    the grid, problems of decoding
#   racecheck    the grid
#
# The grid has problems with each dtype, each of several head sizes and each mask, at odd lengths. Each head size of the
# grid is a check of its own. At most JOBS checks (default 8) run at once, because a tool keeps one core and little of
# the GPU busy. racecheck takes tens of times as long as the program alone, so each check has a time limit of
# ATTN_SANITIZE_SECONDS (default 600). A check without its summary by then counts as failed. ATTN_SANITIZE_TOOLS chooses
# tools (memcheck initcheck racecheck), and ATTN_CUDA_FAMILY chooses kernels. racecheck does not know which accesses the
# mbarriers of sm90 order. It therefore reports hazards there that are none (kernels/README.md). The script builds
# nothing. Without a GPU or compute-sanitizer it runs nothing and says so.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=${1:-build}
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
limit=${ATTN_SANITIZE_SECONDS:-600}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)

if ! nvidia-smi -L >/dev/null 2>&1 || [ -z "$sanitizer" ]; then
    echo "tests/gpu/sanitize.sh: no GPU or no compute-sanitizer here: skipped"
    echo "0 passed, 0 failed"
    exit 0
fi

# under TOOL TESTS COUNT [D]: runs the tests whose names match TESTS under a tool, with COUNT random problems. D selects
# one head size of the grid. The outcome goes to a file in $results.
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
under() {
    local log start=$SECONDS status name="$1 $2${4:+ D $4}"
    log=$results/$1.${2//[^a-z_]/}.${4:-}
    ATTN_BACKEND=cuda ATTN_TESTS=$2 ATTN_RANDOM_COUNT=$3 ATTN_GRID_D=${4:-} timeout "$limit" "$sanitizer" --tool "$1" --error-exitcode 9 \
        "$build/tests/unit/kernels/test_backends" >"$log.log" 2>&1
    status=$?
    # racecheck's summary line has another form than that of the other tools
    if [ $status = 0 ] && grep -qE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$log.log"; then
        echo "ok   $name ($((SECONDS - start)) s): $(grep -E 'SUMMARY' "$log.log" | tail -1)" >"$log.ok"
    else
        echo "FAIL $name (status $status, $((SECONDS - start)) s)" >"$log.fail"
        grep -vE '^\[ +(RUN|OK)' "$log.log" | cut -c1-300 | tail -30 >>"$log.fail"
    fi
    cat "$log".ok "$log".fail 2>/dev/null
}

# later ARGUMENTS: runs the function `under` in the background, with these arguments.
later() {
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-8}" ]; do wait -n; done
    under "$@" &
}

for tool in ${ATTN_SANITIZE_TOOLS:-memcheck initcheck racecheck}; do
    for D in 256 192 128 96 64 40; do later "$tool" 'test_grid*' 0 "$D"; done
    [ "$tool" != memcheck ] || later "$tool" 'test_random_problems*' 200
    [ "$tool" = racecheck ] || later "$tool" 'test_*decoding*' 60
done
wait

passed=$(find "$results" -name '*.ok' | wc -l) failed=$(find "$results" -name '*.fail' | wc -l)
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
