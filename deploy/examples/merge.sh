#!/bin/sh
# merge.sh: merges the results over two parts of the keys with curl. It sends out and lse of each forward unchanged.
#
#   sh merge.sh [http://127.0.0.1:8080]
set -eu
url=${1:-http://127.0.0.1:8080}/v1/attention

# Sends a POST to an operation and prints the answer. If the server refuses, it prints the reason and fails.
post() {
    answer=$(curl -sS -w '\n%{http_code}' "$url/$1" -d "$2")
    case $answer in
    *'
200') echo "${answer%?200}" ;;
    *)
        echo "$answer" | sed -nE 's/.*"detail":"(([^"\\]|\\.)*)".*/refused: \1/p' >&2
        return 1
        ;;
    esac
}

# Sends a forward of one query over the key $1 with the value $2. Prints the answer without `sizes` and the members
# after it. The merge's request needs the answer in this form.
part() {
    answer=$(post forward '{"q": {"shape": [1, 1, 1, 1], "dtype": "float32", "data": [1]},
        "k": {"shape": [1, 1, 1, 1], "dtype": "float32", "data": ['"$1"']},
        "v": {"shape": [1, 1, 1, 1], "dtype": "float32", "data": ['"$2"']}}')
    echo "${answer%%,\"sizes*}}"
}

# Both keys have the same weight, so the result is the mean of both values.
first=$(part 0.5 2) second=$(part 0.5 4)
whole=$(post merge '{"parts": ['"$first"', '"$second"'], "encoding": "array"}')
case $whole in
'{"out":{"shape":[1,1,1,1],"dtype":"float32","data":[[[[3]]]]},"lse":'*) echo "merge: out is 3" ;;
*) echo "not what was expected: $whole" >&2; exit 1 ;;
esac

if post merge '{"parts": []}'; then exit 1; fi
