#!/bin/sh
# Runs the C unit tests given as arguments, one per core at a time and each within a time limit, and counts:
# "unit: 120 passed, 0 failed". A program's output is shown only when it fails; UNIT_VERBOSE=1 shows all of it.
# A program that counts by itself ends with such a line, without "unit:".
# UNIT_UNDER: a command that runs the programs (qemu-aarch64-static ..., in arm64.sh).
# PROGRAM@1/2 runs it with ATTN_PART=1/2: one of two halves of a program that takes long (a test over a list counts in
# both).
set -u

# run_unit.sh --one FOLDER PROGRAM: runs one program and writes its counts to FOLDER.
if [ "${1:-}" = --one ]; then
    program=${3%@*} part=${3#"${3%@*}"}
    name=$(basename "$program")$(echo "$part" | tr / -)
    log=$2/$name.log
    ATTN_PART=${part#@} timeout "${UNIT_TIMEOUT:-600}" ${UNIT_UNDER:-} "$program" >"$log" 2>&1
    status=$?
    p=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test(s)\.$/\1/p; s/^\([0-9]*\) passed, [0-9]* failed$/\1/p' "$log" | awk '{ n += $1 } END { print n + 0 }')
    f=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test(s), listed below:$/\1/p; s/^[0-9]* passed, \([0-9]*\) failed$/\1/p' "$log" | awk '{ n += $1 } END { print n + 0 }')
    # A crash, a sanitizer's report, a time-out, or a program without a single test counts as one failed test.
    if [ $status -ne 0 ] && [ "$f" = 0 ] || [ "$p" = 0 ] && [ "$f" = 0 ]; then f=1; fi
    echo "$p $f" >"$2/$name.counts"
    if [ "$f" = 0 ] && [ -z "${UNIT_VERBOSE:-}" ]; then : >"$log"; fi
    echo "$name: $p passed, $f failed$([ $status -eq 124 ] && echo ' (timed out)')" >>"$log"
    cat "$log"
    exit 0
fi

folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
printf '%s\n' "$@" | xargs -P "$(nproc)" -n 1 sh "$0" --one "$folder"
# A program that left no counts was killed, and counts as failed.
missing=$(($# - $(ls "$folder" | grep -c '\.counts$')))
cat "$folder"/*.counts 2>/dev/null | awk -v missing="$missing" '
    { passed += $1; failed += $2 }
    END { printf "unit: %d passed, %d failed\n", passed, failed + missing; exit failed + missing > 0 || passed == 0 }'
