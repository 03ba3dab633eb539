#!/usr/bin/env bash
# The README's two commands on a machine that has only git and make: tests/fresh/run.sh [SUITE]
#
#   bookworm (default), trixie: Debian 12, 13      noble: Ubuntu 24.04
#
# Makes a bare system with debootstrap (variant minbase, plus git and make), clones HEAD into it, and there
#   1. `make run` must serve: a curl from outside is answered with the right numbers;
#   2. `make test` must pass.
# Needs root, debootstrap and curl. The system lies in FRESH_DIR (default /var/tmp/attnd-fresh-SUITE) and is removed
# afterwards; FRESH_KEEP=1 keeps it. FRESH_WORKTREE=1 takes the files as they are instead of HEAD. FRESH_MIRROR names
# another mirror. How this machine reaches the network (resolv.conf, apt's proxy,
# pip's settings and certificates) is carried over.
set -euo pipefail
suite=${1:-bookworm}
case $suite in
noble) mirror=${FRESH_MIRROR:-http://archive.ubuntu.com/ubuntu} components=main,universe ;;
*) mirror=${FRESH_MIRROR:-http://deb.debian.org/debian} components=main ;;
esac
top=$(cd "$(dirname "$0")/../.." && pwd)
dir=${FRESH_DIR:-/var/tmp/attnd-fresh-$suite}
port=${FRESH_PORT:-18080}
[ "$(id -u)" = 0 ] || { echo "fresh: needs root, for debootstrap, chroot and mount" >&2; exit 1; }
for tool in debootstrap curl git; do command -v $tool >/dev/null || { echo "fresh: needs $tool" >&2; exit 1; }; done
mountpoint -q "$dir/proc" && { echo "fresh: $dir is in use" >&2; exit 1; }

served=
cleanup() {
    [ -z "$served" ] || kill -TERM -- "-$served" 2>/dev/null || true
    for m in dev/shm dev/pts dev proc; do
        if mountpoint -q "$dir/$m"; then umount "$dir/$m" || umount -l "$dir/$m"; fi
    done
    # Nothing may still be mounted here, because rm would delete the files of the mounted system.
    if [ -z "${FRESH_KEEP:-}" ] && ! grep -q " $dir/" /proc/mounts; then rm -rf --one-file-system "$dir"; fi
}
trap cleanup EXIT

if [ ! -e "$dir/usr/bin/make" ]; then
    echo "== debootstrap --variant=minbase --include=git,make $suite"
    # An older debootstrap does not know a newer release. The script of an older release works for it, without that
    # release's keyring.
    scripts=/usr/share/debootstrap/scripts script=
    [ -e "$scripts/$suite" ] || script=$scripts/$([ "$suite" = noble ] && echo jammy || echo sid)
    check=$([ "$suite" != noble ] || [ -e /usr/share/keyrings/ubuntu-archive-keyring.gpg ] || echo --no-check-gpg)
    debootstrap --variant=minbase --include=git,make --components=$components $check "$suite" "$dir" "$mirror" $script >"$dir.log" 2>&1 ||
        { tail -20 "$dir.log"; exit 1; }
fi
cp -L /etc/resolv.conf "$dir/etc/resolv.conf"
cp /etc/hosts "$dir/etc/hosts"
apt-config dump 2>/dev/null | grep -E '^Acquire::https?::' >"$dir/etc/apt/apt.conf.d/99host" || true
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$dir/etc/pip.conf"
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || cp /etc/ssl/certs/ca-certificates.crt "$dir/etc/host-certificates.crt"
mount -t proc proc "$dir/proc"
mount --bind /dev "$dir/dev"
mount -t devpts devpts "$dir/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$dir/dev/shm"

rm -rf "$dir/root/attnd"
if [ -n "${FRESH_WORKTREE:-}" ]; then
    echo "== the working tree of $top"
    mkdir -p "$dir/root/attnd"
    (cd "$top" && git ls-files -zco --exclude-standard | tar --null -T - --ignore-failed-read -cf -) | tar -C "$dir/root/attnd" -xf -
else
    echo "== a clone of $(git -C "$top" log -1 --format='%h %s')"
    git clone -q --no-local "$top" "$dir/root/attnd"
fi

inside() { # command line, in the project, with nothing of this machine's environment but pip's settings
    env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8 PIP_CERT=/etc/host-certificates.crt $(env | grep -E '^(https?_proxy|no_proxy)=' || true) \
        chroot "$dir" sh -c "cd /root/attnd && $1"
}

echo "== make run"
set -m
inside "make run ARGS='--listen 127.0.0.1:$port'" >"$dir.run.log" 2>&1 &
served=$!
set +m
start=$SECONDS
until curl -sf "http://127.0.0.1:$port/readyz" >/dev/null; do
    if ! kill -0 "$served" 2>/dev/null || [ $((SECONDS - start)) -gt 900 ]; then
        tail -40 "$dir.run.log"
        echo "fresh: make run does not serve" >&2
        exit 1
    fi
    sleep 0.5
done
echo "   serves after $((SECONDS - start)) s"
# A query of [1, 0] over the keys [1, 0] and [0, 2] with scale 1, whose answer is known.
answer=$(curl -sf "http://127.0.0.1:$port/v1/attention/forward" -d '{"scale":1,"encoding":"array","q":{"shape":[1,1,1,2],"dtype":"float32","data":[1,0]},
    "k":{"shape":[1,2,1,2],"dtype":"float32","data":[1,0,0,2]},"v":{"shape":[1,2,1,2],"dtype":"float32","data":[1,2,3,4]}}')
echo "   $answer"
case $answer in
*1.5378*2.5378*) ;;
*) echo "fresh: that is not attention" >&2; exit 1 ;;
esac
kill -TERM -- "-$served"
wait "$served" || true
served=

echo "== make test"
inside "make test" 2>&1 | tee "$dir.test.log" | grep -E '^(Installing|Fetching|Get:|unit:|fuzz:|FAILED|ERROR|=+ .* =+$|[a-z_]*: )' | grep -v '^Get:' || true
grep -qE '^=+ .*[0-9]+ passed.* in ' "$dir.test.log" && ! grep -qE '^=+ .*[0-9]+ (failed|error)' "$dir.test.log" && ! grep -qE '^make: \*\*\*' "$dir.test.log" ||
    { tail -60 "$dir.test.log"; echo "fresh: make test failed; the log is $dir.test.log" >&2; exit 1; }
echo "fresh: $suite: make run serves, make test passes"
