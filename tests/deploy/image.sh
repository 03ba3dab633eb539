#!/usr/bin/env bash
# Builds the stages of the Dockerfile with a real builder and runs the images: tests/deploy/image.sh [cpu] [test] [gpu]
# (all by default; gpu only if nvcc is installed, which takes minutes). The last line is "image: N passed, N failed".
#
# The images are to be tested on machines without a Docker engine and without a registry. Therefore buildah builds the
# Dockerfile with chroot isolation. A system made by debootstrap replaces the image ubuntu:24.04. The same system with a
# copy of this machine's CUDA compiler replaces the image nvidia/cuda. The script then runs each image as an engine
# would run it, with the user, environment, entrypoint and health check of its configuration. The program is process 1
# of a new pid namespace. It has a network of its own (so that port 8080 is free), a read-only root, no capabilities,
# and no way to gain any.
#
# Checks of each image
#   configuration   user, entrypoint, stop signal, health check, labels, NVIDIA's variables (gpu)
#   contents        which packages it adds to the base, that it has no compiler, and how large it is without the base
#   at work         process 1, read-only root, health check, an answer with the right numbers
#   SIGTERM         every accepted request is answered under load, and the program ends with status 0, in time. The same
#                   holds with --supervise, after the server process was killed once
#
# Needs root and apt. Environment: IMAGE_SUITE=noble|trixie|bookworm (release of the base), IMAGE_CONTEXT=dir (what is
# built; by default the checkout), IMAGE_TESTS="unit fuzz-replay" (targets of the Makefile for the stage test),
# IMAGE_CUDA_ARCHS=90, IMAGE_DIR (work folder), IMAGE_KEEP=1 (keeps the work folder, so that the next run finds bases
# and images).
set -euo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
suite=${IMAGE_SUITE:-noble}
dir=${IMAGE_DIR:-/var/tmp/attnd-image-$suite}
context=${IMAGE_CONTEXT:-$top}
tests=${IMAGE_TESTS-unit fuzz-replay}
archs=${IMAGE_CUDA_ARCHS:-90}
limit_bytes=60000000 # largest size in bytes of an image without its base
grace_s=45           # seconds that a container gets to end, as in deploy/compose.yaml and deploy/k8s
nvcc=$(command -v nvcc || true)
targets=${*:-cpu test${nvcc:+ gpu}}

[ "$(id -u)" = 0 ] || { echo "image: needs root, for debootstrap, chroot and namespaces" >&2; exit 1; }
missing=
for tool in buildah:buildah debootstrap:debootstrap curl:curl python3:python3 ip:iproute2 unshare:util-linux; do
    command -v "${tool%%:*}" >/dev/null || missing+=" ${tool#*:}"
done
if [ -n "$missing" ]; then
    echo "Installing what is missing:$missing"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing; } >/dev/null
fi
for target in $targets; do
    case $target in
    cpu | test) ;;
    gpu) [ -n "$nvcc" ] || { echo "image: gpu needs nvcc on this machine, to stand in for NVIDIA's image" >&2; exit 1; } ;;
    *) echo "image: '$target' is not cpu, test or gpu" >&2; exit 1 ;;
    esac
done

mkdir -p "$dir"
passed=0 failed=0
check() { # check NAME COMMAND...: runs the command, prints one line and counts the result
    local what=$1
    shift
    if "$@"; then passed=$((passed + 1)) && echo "  ok      $what"; else failed=$((failed + 1)) && echo "  FAILED  $what"; fi
}
equals() { [ "$1" = "$2" ] || { echo "          is '$1', must be '$2'" && false; }; }

buildah() { command buildah --root "$dir/storage" --runroot "$dir/run" --storage-driver vfs "$@"; }

container= # the host's process id of the container's process 1; empty if none runs
cleanup() {
    [ -z "$container" ] || kill -KILL "$container" 2>/dev/null || true
    buildah umount --all >/dev/null 2>&1 || true
    # While anything is still mounted here, rm would delete the files of the mounted system, so nothing is deleted then.
    if [ -z "${IMAGE_KEEP:-}" ] && ! grep -q " $dir/" /proc/mounts; then
        buildah rm --all >/dev/null 2>&1 || true
        rm -rf --one-file-system "$dir"
    fi
}
trap cleanup EXIT

# ---- The stand-ins for the registry's images -------------------------------------------------------------------------

make_base() {
    ! buildah inspect --type image localhost/base:"$suite" >/dev/null 2>&1 || return 0
    local mirror components=main script='' verify='' scripts=/usr/share/debootstrap/scripts
    case $suite in
    noble) mirror=${IMAGE_MIRROR:-http://archive.ubuntu.com/ubuntu} components=main,universe ;;
    *) mirror=${IMAGE_MIRROR:-http://deb.debian.org/debian} ;;
    esac
    # An older debootstrap has no script for a newer release. The script of an older release works too, but without the
    # newer release's keyring.
    [ -e "$scripts/$suite" ] || script=$scripts/$([ "$suite" = noble ] && echo jammy || echo sid)
    [ "$suite" != noble ] || [ -e /usr/share/keyrings/ubuntu-archive-keyring.gpg ] || verify=--no-check-gpg
    echo "== a base of debootstrap --variant=minbase $suite"
    rm -rf --one-file-system "$dir/base"
    debootstrap --variant=minbase --components=$components $verify "$suite" "$dir/base" "$mirror" $script >"$dir/base.log" 2>&1 ||
        { tail -20 "$dir/base.log" && return 1; }
    # Makes the base like the registry's image, which has no package lists. It gets this machine's proxy settings for
    # apt.
    rm -rf "$dir/base/var/lib/apt/lists"/* "$dir/base/var/cache/apt"/*.bin "$dir/base/var/cache/apt/archives"/*.deb
    apt-config dump 2>/dev/null | grep -E '^Acquire::https?::' >"$dir/base/etc/apt/apt.conf.d/99host" || true
    commit_base base:"$suite" "$dir/base"
    rm -rf --one-file-system "$dir/base"
}

commit_base() { # image, folder
    local c
    c=$(buildah from scratch)
    buildah copy -q "$c" "$2" / >/dev/null
    buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd /bin/bash "$c"
    buildah commit -q --rm --format docker "$c" localhost/"$1" >/dev/null
}

make_cuda_base() {
    ! buildah inspect --type image localhost/cuda:"$suite" >/dev/null 2>&1 || return 0
    local home c to=$dir/cuda/usr/local/cuda
    home=$(dirname "$(dirname "$(realpath "$nvcc")")")
    echo "== that base with the compiler of $home ($("$nvcc" --version | sed -n 's/^.*release \([0-9.]*\).*/\1/p'))"
    mkdir -p "$to/lib64"
    cp -a "$home/bin" "$home/include" "$home/nvvm" "$to/"
    cp -aL "$home"/lib64/libcudart_static.a "$home"/lib64/libcudadevrt.a "$home"/lib64/libculibos.a "$to/lib64/"
    ln -sfn lib64 "$to/lib"
    [ ! -e "$home/targets" ] || cp -a "$home/targets" "$to/"
    c=$(buildah from --pull-never localhost/base:"$suite")
    buildah copy -q "$c" "$dir/cuda" / >/dev/null
    buildah commit -q --rm --format docker "$c" localhost/cuda:"$suite" >/dev/null
    rm -rf --one-file-system "$dir/cuda"
}

# ---- Building --------------------------------------------------------------------------------------------------------

build() { # target
    buildah bud --isolation chroot --pull-never --layers=false --format docker --target "$1" \
        --build-arg "BASE_IMAGE=localhost/base:$suite" --build-arg "CUDA_IMAGE=localhost/cuda:$suite" \
        --build-arg "CUDA_ARCHS=$archs" --build-arg "TESTS=$tests" \
        -t localhost/attnd:"$1" -f "$context/Dockerfile" "$context" >"$dir/$1.log" 2>&1
}

# Prints the image's configuration in lines such as "user 10001:10001"; lists are JSON.
configuration() {
    buildah inspect --type image localhost/attnd:"$1" | python3 -c '
import json, sys
c = json.load(sys.stdin)["Docker"]["config"]
print("user", c["User"])
print("entrypoint", json.dumps(c["Entrypoint"]))
print("stop", c.get("StopSignal"))
print("health", json.dumps((c.get("Healthcheck") or {}).get("Test")))
print("labels", " ".join(sorted(k for k in c["Labels"] if k.startswith("org.opencontainers"))))
print("port", " ".join(c["ExposedPorts"]))
for e in c["Env"]: print("env", e)'
}

# Prints two sizes in bytes of the layers that the image adds to its base: unpacked, and compressed as a registry sends
# them.
sizes() {
    rm -rf "$dir/oci"
    buildah push -q localhost/attnd:"$1" "oci:$dir/oci:$1" >/dev/null 2>&1
    buildah inspect --type image localhost/base:"$suite" | python3 -c '
import gzip, json, os, sys
base = len(json.load(sys.stdin)["OCIv1"]["rootfs"]["diff_ids"])
blobs = os.path.join(sys.argv[1], "blobs", "sha256")
def load(digest): return json.load(open(os.path.join(blobs, digest.split(":")[1])))
index = json.load(open(os.path.join(sys.argv[1], "index.json")))
layers = load(index["manifests"][0]["digest"])["layers"][base:]
plain = 0
for layer in layers:
    with gzip.open(os.path.join(blobs, layer["digest"].split(":")[1])) as f:
        while piece := f.read(1 << 20): plain += len(piece)
print(plain, sum(l["size"] for l in layers))' "$dir/oci"
}

# ---- Running ---------------------------------------------------------------------------------------------------------

# start ROOT VARIABLE... -- ARGUMENT...: starts the image's entrypoint as process 1 and as the image's user, with these
# environment variables and arguments. Its output goes to $dir/run.log.
start() {
    local root=$1 vars=()
    shift
    while [ "$1" != -- ]; do vars+=("$1") && shift; done
    shift
    rm -f "$dir/pid"
    # shellcheck disable=SC2016
    unshare --mount --pid --net --ipc --fork --propagation private sh -c '
        root=$1 uid=$2 gid=$3; shift 3
        ip link set lo up
        mount --bind "$root" "$root" && mount -o remount,bind,ro "$root" && mount -t proc proc "$root/proc" &&
        mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev" && mkdir "$root/dev/shm" &&
        for d in null zero full random urandom; do : >"$root/dev/$d" && mount --bind "/dev/$d" "$root/dev/$d"; done &&
        exec chroot "$root" /usr/bin/setpriv --reuid "$uid" --regid "$gid" --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
            env -i "$@"' sh "$root" "${user%:*}" "${user#*:}" "${environment[@]}" "${vars[@]}" "${entrypoint[@]}" "$@" >"$dir/run.log" 2>&1 &
    unshared=$!
    for _ in $(seq 100); do
        container=$(cat "/proc/$unshared/task/$unshared/children" 2>/dev/null | tr -d ' ') && [ -n "$container" ] && break
        sleep 0.05
    done
}
within() { nsenter -t "$container" --net --mount -- "$@"; } # its network; this machine's programs
healthy() { # the image's own health check, as its user in its root
    within chroot "$1" /usr/bin/setpriv --reuid "${user%:*}" --regid "${user#*:}" --clear-groups env -i "${environment[@]}" "${health[@]}" >/dev/null 2>&1
}
ready() { for _ in $(seq 300); do if healthy "$1"; then return 0; fi && kill -0 "$container" 2>/dev/null && sleep 0.1 || break; done; cat "$dir/run.log" && false; }
ended() { # waits for the container's process 1, and succeeds if its exit status is $1
    local status=0
    wait "$unshared" || status=$?
    container=
    [ "$status" = "$1" ] || { echo "          status $status, must be $1" && tail -5 "$dir/run.log" && false; }
}
answers() {
    local got
    # Attention of the query [1, 0] over the keys [1, 0] and [0, 2] with scale 1 has a known answer.
    got=$(within curl -sS --max-time 20 http://127.0.0.1:8080/v1/attention/forward -d '{"scale":1,"encoding":"array","q":{"shape":[1,1,1,2],"dtype":"float32","data":[1,0]},
        "k":{"shape":[1,2,1,2],"dtype":"float32","data":[1,0,0,2]},"v":{"shape":[1,2,1,2],"dtype":"float32","data":[1,2,3,4]}}')
    case $got in *'[1.5378'*',2.5378'*) ;; *) echo "          $got" && false ;; esac
}
# Checks that the image's programs cannot create files: in the mounts that they see, not even root can.
read_only() { ! within chroot "$1" /bin/sh -c ': >/probe' 2>/dev/null && ! within chroot "$1" /bin/sh -c ': >/tmp/probe' 2>/dev/null; }
process_one() { equals "$(awk '/^NSpid:/ { print $NF }' "/proc/$container/status")" 1; }
capabilities() { equals "$(awk '/^Cap(Inh|Prm|Eff|Bnd|Amb):/ { print $2 }' "/proc/$container/status" | sort -u)" 0000000000000000; }
no_compiler() {
    local f
    for f in "$1"/usr/bin/gcc* "$1"/usr/bin/make "$1"/usr/bin/python3* "$1"/usr/local/cuda "$1"/src; do
        [ ! -e "$f" ] || { echo "          ${f#"$1"} is there" && return 1; }
    done
}
all_linked() { ! chroot "$1" ldd /usr/local/bin/attnd | grep -E 'not found|libstdc|libcuda|libgcc'; }
packages() { # prints the names of the packages that the image adds to its base
    comm -13 <(chroot "$base_root" dpkg-query -f '${Package}\n' -W | sort) <(chroot "$1" dpkg-query -f '${Package}\n' -W | sort) | paste -sd ' '
}

test_image() { # target
    local c root line name value size user stop labels added
    local -a entrypoint=() health=() environment=()
    while read -r name value; do
        case $name in
        user) user=$value ;;
        stop) stop=$value ;;
        labels) labels=$value ;;
        entrypoint) mapfile -t entrypoint < <(python3 -c 'import json, sys; print("\n".join(json.loads(sys.argv[1])))' "$value") ;;
        health) mapfile -t health < <(python3 -c 'import json, sys; print("\n".join(json.loads(sys.argv[1])))' "$value") ;;
        env) environment+=("$value") ;;
        esac
    done < <(configuration "$1")
    check "the user is 10001" equals "$user" 10001:10001
    check "SIGTERM stops it" equals "$stop" SIGTERM
    check "the entrypoint is the program itself" equals "${entrypoint[*]}" /usr/local/bin/attnd
    check "the health check is the program's own" equals "${health[*]}" "CMD /usr/local/bin/attnd healthcheck"
    health=("${health[@]:1}")
    check "OCI labels" equals "$labels" "$(printf 'org.opencontainers.image.%s ' description licenses revision title version | sed 's/ $//')"
    line=$(printf '%s\n' "${environment[@]}" | grep '^NVIDIA_' | sort | paste -sd ' ' || true)
    if [ "$1" = gpu ]; then check "NVIDIA's variables" equals "$line" "NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_VISIBLE_DEVICES=all"
    else check "NVIDIA's variables are absent" equals "$line" ""; fi

    c=$(buildah from --pull-never localhost/attnd:"$1")
    root=$(buildah mount "$c")
    added=$(packages "$root")
    echo "          packages beyond the base: $added"
    check "every library is found, and none of C++ or CUDA is wanted" all_linked "$root"
    check "no compiler, no Python, no sources, no toolkit" no_compiler "$root"
    size=$(sizes "$1")
    echo "          without the base: ${size% *} bytes, compressed ${size#* }; the program $(stat -c %s "$root/usr/local/bin/attnd")"
    check "smaller than $limit_bytes bytes without the base" test "${size% *}" -lt "$limit_bytes"

    start "$root" --
    check "ready, by its health check" ready "$root"
    check "process 1 of its namespace" process_one
    check "no capabilities" capabilities
    check "its root cannot be written" read_only "$root"
    check "answers with the right numbers" answers
    check "SIGTERM under load: every accepted request is answered, within $grace_s s" \
        within python3 "$top/tests/deploy/drain.py" --pid "$container" --grace "$grace_s" http://127.0.0.1:8080
    check "... and its status is 0" ended 0
    sed -n 's/^.*INFO \(draining .*\|stopped .*\)$/          \1/p' "$dir/run.log"

    start "$root" -- --supervise
    check "--supervise: ready" ready "$root"
    kill -KILL "$(tr -d ' ' <"/proc/$container/task/$container/children")"
    check "--supervise: the server was killed, another one serves" ready "$root"
    check "--supervise: SIGTERM under load" within python3 "$top/tests/deploy/drain.py" --pid "$container" --grace "$grace_s" http://127.0.0.1:8080
    check "--supervise: and its status is 0" ended 0

    if [ "$1" = gpu ] && ! [ -e /dev/nvidia0 ]; then
        start "$root" ATTND_DEVICES=0 --
        check "no GPU here: one that was asked for by number is refused at the start with status 69" ended 69
        grep -m1 '^attnd: ' "$dir/run.log" | sed 's/^/          /'
    fi
    buildah umount "$c" >/dev/null
    buildah rm "$c" >/dev/null
}

make_base
base_container=$(buildah from --pull-never localhost/base:"$suite")
base_root=$(buildah mount "$base_container")
for target in $targets; do
    [ "$target" != gpu ] || make_cuda_base
    echo "== $target: buildah bud --target $target ($(command buildah --version | cut -d' ' -f1-3))"
    began=$SECONDS before=$failed
    check "the stage is built" build "$target"
    echo "          $((SECONDS - began)) s"
    if [ "$failed" != "$before" ]; then
        tail -40 "$dir/$target.log"
    elif [ "$target" = test ]; then
        counts=$(grep -oE '^(unit|fuzz): [0-9]+ passed, [0-9]+ failed|[0-9]+ passed.* in [0-9.]+s.*' "$dir/test.log" | paste -sd ';' | sed 's/;/; /g')
        check "the tests ran in it: ${counts:-not one}" test -n "$counts"
    else
        test_image "$target"
    fi
done
echo "image: $passed passed, $failed failed"
[ "$failed" = 0 ]
