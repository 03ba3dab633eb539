#!/bin/sh
# curl.sh: a request with readable numbers, one with base64, an observe (what attention looks at), and a refusal.
#
#   sh curl.sh [http://127.0.0.1:8080]
#
# curl -d sends a body with the content type of a form. attnd reads it as JSON.
set -eu
url=${1:-http://127.0.0.1:8080}/v1/attention

# Sends a POST and prints the answer. If the server refuses, it prints the reason and fails.
post() {
    answer=$(curl -sS -w '\n%{http_code}' "$url/${2:-forward}" -d "$1")
    case $answer in
    *'
200') echo "${answer%?200}" ;;
    *)
        echo "$answer" | sed -nE 's/.*"detail":"(([^"\\]|\\.)*)".*/refused: \1/p' >&2
        return 1
        ;;
    esac
}

# Two queries over two keys, causal: the first query sees only the first key, so its row of out is the first row of v.
identity='{"shape": [1, 2, 1, 2], "dtype": "float32", "data": [1, 0, 0, 1]}'
values='{"shape": [1, 2, 1, 2], "dtype": "float32", "data": [1, 2, 3, 4]}'
numbers=$(post '{"q": '"$identity"', "k": '"$identity"', "v": '"$values"', "causal": true, "encoding": "array"}')
case $numbers in
'{"out":{"shape":[1,2,1,2],"dtype":"float32","data":[[[[1,2]],[[2.339'*) echo "numbers: the first row of out is 1 2" ;;
*) echo "not what was expected: $numbers" >&2; exit 1 ;;
esac

# The numbers as the bytes of a file, in base64 without line breaks (base64 -w0, or openssl base64 -A): little-endian,
# in C order.
bytes=$(mktemp)
trap 'rm -f "$bytes"' EXIT
printf '\000\000\200\077\000\000\000\100\000\000\100\100\000\000\200\100' >"$bytes" # the numbers 1 2 3 4 as float32
values='{"shape": [1, 2, 1, 2], "dtype": "float32", "data": "'$(base64 -w0 "$bytes")'"}'
encoded=$(post '{"q": '"$identity"', "k": '"$identity"', "v": '"$values"', "causal": true, "encoding": "array"}')
[ "${encoded%%,\"backend*}" = "${numbers%%,\"backend*}" ]
echo "base64: the same out and lse"

# An observe returns what attention looks at: here how many pairs of query and key a causal mask lets through, and which
# key has the most weight for each query. It needs no v.
looks=$(post '{"q": '"$identity"', "k": '"$identity"', "causal": true, "observe": ["pairs", "top_keys"], "top": 1, "encoding": "array"}' observe)
case $looks in
'{"top_keys":{"shape":[1,1,2,1],"dtype":"int32","data":[[[[0],[1]]]]}'*'"pairs":3,'*) echo "observe: 3 pairs, the queries look at keys 0 and 1" ;;
*) echo "not what was expected: $looks" >&2; exit 1 ;;
esac

if post '{"q": '"$identity"', "k": '"$identity"', "v": {"shape": [1, 3, 1, 2], "dtype": "float32", "data": [1, 2, 3, 4, 5, 6]}}'; then exit 1; fi
