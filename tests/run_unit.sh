#!/bin/sh
# Runs the C unit tests given as arguments, each within a time limit, and counts: "unit: 120 passed, 0 failed".
# A program's output is shown only when it fails; UNIT_VERBOSE=1 shows all of it.
set -u
passed=0 failed=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
for program in "$@"; do
    timeout "${UNIT_TIMEOUT:-600}" "$program" >"$log" 2>&1
    status=$?
    p=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test(s)\.$/\1/p' "$log" | awk '{ n += $1 } END { print n + 0 }')
    f=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test(s), listed below:$/\1/p' "$log" | awk '{ n += $1 } END { print n + 0 }')
    # A crash, a sanitizer's report, a time-out or a program without a single test is a failure of its own.
    if [ $status -ne 0 ] && [ "$f" = 0 ] || [ "$p" = 0 ] && [ "$f" = 0 ]; then f=1; fi
    passed=$((passed + p)) failed=$((failed + f))
    if [ "$f" != 0 ] || [ -n "${UNIT_VERBOSE:-}" ]; then cat "$log"; fi
    echo "$(basename "$program"): $p passed, $f failed$([ $status -eq 124 ] && echo ' (timed out)')"
done
echo "unit: $passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
