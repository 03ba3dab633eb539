#!/bin/sh
# Tests the code for arm64 on another machine. Debian's cross compiler builds it against the packages that
# tests/setup.sh has unpacked into build/tools/arm64. QEMU's user-mode emulator, which has every instruction, runs it.
# The script runs the unit tests of the kernels (without those that take QEMU minutes), of proto-json, and of the
# server's code that several threads share. It also runs the fuzz targets on their corpus, and the conformance cases of
# one seed over HTTP. The tests take three minutes on two cores. QEMU's speed says nothing about the speed of a
# processor.
#
#   tests/arm64.sh              all of these tests
#   tests/arm64.sh attnd ...    builds attnd and runs it with these arguments, without tests
set -u
cd "$(dirname "$0")/.." || exit 1
root=$PWD/build/tools/arm64/root
missing=
command -v aarch64-linux-gnu-gcc >/dev/null || missing="$missing gcc-aarch64-linux-gnu"
command -v qemu-aarch64-static >/dev/null || missing="$missing qemu-user-static"
[ -e "$root/complete" ] || missing="$missing and Debian's libraries for arm64 (build/tools/arm64.log)"
if [ -n "$missing" ]; then
    echo "make arm64: skipped: missing here:$missing"
    exit 0
fi
qemu="qemu-aarch64-static -L $root"
make_arm64() { make --no-print-directory B=build/arm64 CC="aarch64-linux-gnu-gcc --sysroot=$root" CUDA=0 SAN= TSAN= "$@"; }

if [ "${1:-}" = attnd ]; then
    shift
    make_arm64 build/arm64/attnd && exec $qemu build/arm64/attnd "$@"
    exit 1
fi

unit=
for name in kernels/test_simd kernels/test_reference kernels/test_cost kernels/test_dtype kernels/test_philox \
    kernels/test_tiles kernels/test_check kernels/test_attention proto-json/test_base64 proto-json/test_numbers \
    proto-json/test_scan proto-json/test_decode proto-json/test_encode proto-json/test_safetensors \
    proto-json/test_kserve text/test_text proto-json/test_tree server/test_http_head server/test_mailbox \
    server/test_http_threads server/test_heartbeat server/test_queue server/test_staging; do
    unit="$unit build/arm64/tests/unit/$name"
done
replay=
for target in base64 numbers scan safetensors unpack; do replay="$replay build/arm64/tests/fuzz/replay_fuzz_$target"; done
make_arm64 -j"$(nproc)" build/arm64/attnd $unit $replay || exit 1

failed=0
UNIT_UNDER=$qemu sh tests/run_unit.sh $unit || failed=1
# Emulates an arm64 kernel whose memory pages have 64 KiB, as some Linux distributions configure it.
UNIT_UNDER="$qemu -p 65536" sh tests/run_unit.sh build/arm64/tests/unit/server/test_staging || failed=1
UNIT_UNDER=$qemu sh tests/run_fuzz.sh replay $replay || failed=1

# Writes the script that the tests start in place of attnd. It runs attnd in QEMU.
printf '#!/bin/sh\nexec %s %s/build/arm64/attnd "$@"\n' "$qemu" "$PWD" >build/arm64/attnd-qemu
chmod +x build/arm64/attnd-qemu
python=$(sh tests/setup.sh python)
for table in neon_bf16 neon; do
    (cd tests && ATTN_CPU_ISA=$table ATTND_BINARY=$PWD/../build/arm64/attnd-qemu ATTND_SLOWER=10 ATTND_SEEDS=1 \
        PYTHONDONTWRITEBYTECODE=1 sh run_parts.sh 2 "$python" -m pytest -q conformance) || failed=1
done
exit $failed
