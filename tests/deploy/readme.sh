#!/usr/bin/env bash
# Runs deploy/README.md: every fenced block whose info string is exactly "sh", from top to bottom, in one shell at the
# top of the checkout, as a reader would. A block marked "sh docker", "sh kubernetes" or "sh root" needs what the word
# says and is not run. Prints each command before it runs; the first that fails ends it, and the exit status is its own.
#
# Port 8080 must be free, as for the reader, unless we are root. What the blocks start in the background is ended here.
# ATTND_BINARY is the program that stands for build/attnd.
set -euo pipefail
cd "$(dirname "$0")/../.."
attnd=${ATTND_BINARY:-build/attnd}
unset ATTND_BINARY # the program refuses a variable that looks like an option and is none
script=$(mktemp)
trap 'rm -f "$script"' EXIT
awk '/^```sh$/ { inside = 1; next } /^```/ { inside = 0 } inside' deploy/README.md | sed "s,^build/attnd\\b,$attnd,; s,^until build/attnd\\b,until $attnd," >"$script"
[ -s "$script" ] || { echo "no blocks" >&2; exit 1; }
# In a network of its own, if we may: nobody else is on port 8080 there.
if [ "$(id -u)" = 0 ] && unshare --net true 2>/dev/null; then
    set -- unshare --net sh -c 'ip link set lo up && exec "$@"' sh
else
    set --
fi
# shellcheck disable=SC2016
"$@" timeout 120 bash -c 'trap "kill \$(jobs -p) 2>/dev/null || true; wait" EXIT; set -exuo pipefail; . "$1"' bash "$script"
