#!/usr/bin/env bash
# The CUDA kernels under compute-sanitizer: tests/gpu/sanitize.sh [BUILD]      (BUILD defaults to build)
#
#   memcheck, initcheck   the grid of every dtype, class of head size and mask at odd lengths; decoding; random problems
#   racecheck             the grid
#
# The grid is cut by head size. JOBS (8) checks run at once, for a tool keeps one core and little of the GPU busy.
# racecheck takes tens of times as long as the program alone, so each check has a limit: ATTN_SANITIZE_SECONDS (600).
# One that has not come to its summary by then counts as failed. ATTN_SANITIZE_TOOLS chooses tools (memcheck initcheck
# racecheck), ATTN_CUDA_FAMILY kernels. racecheck does not know what mbarriers order: it reports hazards in sm90 that
# are none (kernels/README.md). Nothing is built here; without a GPU or the tool nothing is run, and it says so.
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

# under TOOL TESTS COUNT [D]: runs the tests that match, with COUNT random problems; D selects one head size of the
# grid. A file in $results records the outcome.
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
under() {
    local log start=$SECONDS status name="$1 $2${4:+ D $4}"
    log=$results/$1.${2//[^a-z_]/}.${4:-}
    ATTN_BACKEND=cuda ATTN_TESTS=$2 ATTN_RANDOM_COUNT=$3 ATTN_GRID_D=${4:-} timeout "$limit" "$sanitizer" --tool "$1" --error-exitcode 9 \
        "$build/tests/unit/kernels/test_backends" >"$log.log" 2>&1
    status=$?
    # racecheck's summary has another form
    if [ $status = 0 ] && grep -qE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$log.log"; then
        echo "ok   $name ($((SECONDS - start)) s): $(grep -E 'SUMMARY' "$log.log" | tail -1)" >"$log.ok"
    else
        echo "FAIL $name (status $status, $((SECONDS - start)) s)" >"$log.fail"
        grep -vE '^\[ +(RUN|OK)' "$log.log" | cut -c1-300 | tail -30 >>"$log.fail"
    fi
    cat "$log".ok "$log".fail 2>/dev/null
}

# later ARGUMENTS: runs `under` in the background.
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
