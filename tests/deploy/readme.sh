#!/usr/bin/env bash
# Runs deploy/README.md: every fenced block whose info string is exactly "sh", in order, in one shell at the top of the
# checkout. A block marked "sh docker", "sh kubernetes" or "sh root" needs what the word says and is not run. Prints
# each command before it runs. The first command that fails ends the script with its exit status.
#
# Port 8080 must be free, unless the script runs as root. Programs that the blocks start in the background are ended
# here.
# ATTND_BINARY names the program that replaces build/attnd.
set -euo pipefail
cd "$(dirname "$0")/../.."
attnd=${ATTND_BINARY:-build/attnd}
unset ATTND_BINARY # attnd refuses to start if a variable looks like an option but is none, as ATTND_BINARY does
script=$(mktemp)
trap 'rm -f "$script"' EXIT
awk '/^```sh$/ { inside = 1; next } /^```/ { inside = 0 } inside' deploy/README.md | sed "s,^build/attnd\\b,$attnd,; s,^until build/attnd\\b,until $attnd," >"$script"
[ -s "$script" ] || { echo "no blocks" >&2; exit 1; }
# As root, the script runs in a network namespace of its own, where port 8080 is free.
if [ "$(id -u)" = 0 ] && unshare --net true 2>/dev/null; then
    set -- unshare --net sh -c 'ip link set lo up && exec "$@"' sh
else
    set --
fi
# shellcheck disable=SC2016
"$@" timeout 120 bash -c 'trap "kill \$(jobs -p) 2>/dev/null || true; wait" EXIT; set -exuo pipefail; . "$1"' bash "$script"
