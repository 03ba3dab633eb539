#!/bin/sh
# check-ptxas.sh OBJECT NVCC ...: runs the compiler (with -Xptxas -v) and fails where ptxas says that a kernel of this folder lost its speed:
#   C75xx              a product was serialised, a register hint ignored, a fence put in
#   spill stores       registers in local memory: of forward_tiles more than 16 bytes (written once per tile of work, where options
#                      need them), of float8 with tiles of 224 keys 60 and at head dim 256 32 (all of them of the producer, which has 24 registers, once
#                      per tile of work or unit of V^T),
#                      with the options of pairs.cuh 450 (most of them of the producer, which has 40 registers),
#                      of backward_tiles more than 32, with the options of pairs.cuh 800 (some twenty registers are written once per round), with a softcap 200, with all options 192 (most of them of the producer, which has 24 registers, once per tile of keys; addresses, once per round), of latent_tiles more than 128 (addresses,
#                      5 words per two tiles of keys and what the end of a split needs), of backward_keys and queries_of_kept none
# What ptxas said stays beside the object, in OBJECT less .o and with .log.
log=${1%.o}.log
object=$1
shift
"$@" 2> "$log"
status=$?
grep -v -e '^ptxas info' -e 'bytes stack frame' -e '^$' "$log" >&2
[ $status = 0 ] || exit $status
awk '/C75[0-9][0-9]/ { print; bad = 1 }
     /Function properties for/ { name = $NF }
     /bytes spill stores/ && (name ~ /forward_tiles/ && $5 > (name ~ /variantE[34]/ ? 450 : name ~ /Li224E.*e4m3/ ? 60 : name ~ /Li256E.*e4m3/ ? 32 : 16) || name ~ /backward_tiles/ && $5 > (name ~ /variantE[34]/ ? 800 : name ~ /variantE2/ ? 192 : name ~ /variantE1/ ? 200 : 32) || name ~ /latent_tiles/ && $5 > 128 || name ~ /backward_keys|queries_of_kept/ && $5 > 0) { print name ":" $0; bad = 1 }
     END { exit bad }' "$log" >&2 && exit 0
rm -f "$object"
exit 1
