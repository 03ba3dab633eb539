#!/bin/sh
# merge.sh: two parts of the keys become the whole, by curl. Forward's out and lse go into the merge as they come.
#
#   sh merge.sh [http://127.0.0.1:8080]
set -eu
url=${1:-http://127.0.0.1:8080}/v1/attention

# Prints the answer of an operation; where the server refuses, its reason, and fails.
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

# A forward of one query over the key and the value that are given: its answer up to the sizes is a part.
part() {
    answer=$(post forward '{"q": {"shape": [1, 1, 1, 1], "dtype": "float32", "data": [1]},
        "k": {"shape": [1, 1, 1, 1], "dtype": "float32", "data": ['"$1"']},
        "v": {"shape": [1, 1, 1, 1], "dtype": "float32", "data": ['"$2"']}}')
    echo "${answer%%,\"sizes*}}"
}

# Both keys weigh the same, so the whole is the mean of both values.
first=$(part 0.5 2) second=$(part 0.5 4)
whole=$(post merge '{"parts": ['"$first"', '"$second"'], "encoding": "array"}')
case $whole in
'{"out":{"shape":[1,1,1,1],"dtype":"float32","data":[[[[3]]]]},"lse":'*) echo "merge: out is 3" ;;
*) echo "not what was expected: $whole" >&2; exit 1 ;;
esac

if post merge '{"parts": []}'; then exit 1; fi
