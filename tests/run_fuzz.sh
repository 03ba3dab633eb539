#!/bin/sh
# Runs fuzz targets: `run_fuzz.sh replay PROGRAM...` feeds each its corpus once, `run_fuzz.sh SECONDS PROGRAM...` lets
# libFuzzer search for that long. The corpus of .../replay_fuzz_json or .../libfuzzer_fuzz_json is
# tests/fuzz/corpus/json. What the search finds new stays in build/fuzz/found/NAME;
# what crashes a target is written to build/fuzz/crashes/.
set -u
mode=$1
shift
passed=0 failed=0
for program in "$@"; do
    name=$(basename "$program")
    name=${name#*fuzz_}
    corpus=tests/fuzz/corpus/$name
    if [ "$mode" = replay ]; then
        timeout 600 ${UNIT_UNDER:-} "$program" "$corpus"
    else
        mkdir -p "build/fuzz/found/$name" build/fuzz/crashes "$corpus"
        dict=tests/fuzz/$name.dict
        "$program" -max_total_time="$mode" -timeout=25 -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix="build/fuzz/crashes/$name-" \
            $([ -f "$dict" ] && echo "-dict=$dict") "build/fuzz/found/$name" "$corpus" >"build/fuzz/$name.log" 2>&1
    fi
    status=$?
    if [ $status = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    if [ "$mode" != replay ]; then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "build/fuzz/$name.log")
        echo "$name: ${runs:-0} runs$([ $status = 0 ] || echo ", FOUND SOMETHING (status $status): build/fuzz/$name.log")"
    elif [ $status != 0 ]; then
        echo "$name: FAILED (status $status)"
    fi
done
echo "fuzz: $passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
