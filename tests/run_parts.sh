#!/bin/sh
# run_parts.sh COUNT COMMAND...: runs pytest COUNT times in parallel, each with its share of the tests (ATTND_PART=1/2
# and ATTND_PART=2/2, see conftest.py), because tests wait more than they compute. The first run's output appears at
# once, and that of the others when all have ended. The status is 0 if each run's status was 0; a share without a test
# does not count.
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
    5) ;; # status 5 means that there were no tests; the first part has at least as many tests as the others
    *) status=1 ;;
    esac
done
exit $status
