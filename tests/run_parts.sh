#!/bin/sh
# run_parts.sh COUNT COMMAND...: runs pytest COUNT times at once, each with its share of the tests (ATTND_PART=1/2 and
# ATTND_PART=2/2, see conftest.py), which wait more than they compute. What the first prints is shown as it comes, what
# the others print when all have ended. The status is 0 if all had 0; a share without a test is none.
set -u
count=$1
shift
[ "$count" -gt 1 ] || exec "$@"
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
for n in $(seq 2 "$count"); do
    (ATTND_PART=$n/$count "$@" >"$folder/$n" 2>&1; echo $? >"$folder/$n.status") &
done
ATTND_PART=1/$count "$@"
status=$?
wait
for n in $(seq 2 "$count"); do
    cat "$folder/$n"
    case $(cat "$folder/$n.status") in
    0) ;;
    5) ;; # no tests: the first has at least as many
    *) status=1 ;;
    esac
done
exit $status
