#!/bin/sh
# check-ptxas.sh OBJECT NVCC ...: runs the compiler with -Xptxas -v and fails if ptxas reports that a kernel of this
# folder became slow:
#   C75xx          a product was serialised, a register hint ignored, or a fence inserted
#   spill stores   registers in local memory. These are the most bytes allowed:
#                    forward_tiles              16 (written once per work tile, where options need them)
#                    the same for splits        48, with options 200 (most of the producer, once per work tile)
#                    float8, tiles of 224 keys  60, and at head dim 256 32 (all of the producer, which has 24
#                                               registers, once per work tile or unit of V^T)
#                    forward with pairs.cuh     450, and for splits 600 (most of the producer, which has 40 registers)
#                    backward_tiles             64; with the options of pairs.cuh 800 (some twenty registers are written
#                                               once per round); with a softcap 240; with all options 224 (most of
#                                               the producer, which has 24 registers, once per tile of keys;
#                                               addresses, once per round)
#                    latent_tiles               128 (addresses, 5 words per two tiles of keys, and what the end of a
#                                               split needs)
#                    wide_tiles                 350 (most of the producer, which has 24 registers, once per work tile)
#                    scores_of_part             with a softcap, ALiBi or FlashMask 80, with bias, keep_mask or dropout 640
#                                               (most of the producer, which has 40 registers; addresses and bits of
#                                               dropout, once per tile), otherwise none
#                    products_of_part, backward_keys, queries_of_kept, observe_rows, observe_mass  none
# The output of ptxas is stored beside the object, as OBJECT with .log instead of .o.
log=${1%.o}.log
object=$1
shift
"$@" 2> "$log"
status=$?
grep -v -e '^ptxas info' -e 'bytes stack frame' -e '^$' "$log" >&2
[ $status = 0 ] || exit $status
awk '/C75[0-9][0-9]/ { print; bad = 1 }
     /Function properties for/ { name = $NF }
     /bytes spill stores/ && (name ~ /forward_tiles/ && $5 > (name ~ /variantE[34]ELb1/ ? 600 : name ~ /variantE[34]/ ? 450 : name ~ /variantE2ELb1/ ? 200 : name ~ /variantE.ELb1/ ? 48 : name ~ /Li224E.*e4m3/ ? 60 : name ~ /Li256E.*e4m3/ ? 32 : 16) || name ~ /backward_tiles/ && $5 > (name ~ /variantE[34]/ ? 800 : name ~ /variantE2/ ? 224 : name ~ /variantE1/ ? 240 : 64) || name ~ /latent_tiles/ && $5 > 128 || name ~ /wide_tiles/ && $5 > 350 || name ~ /scores_of_part/ && $5 > (name ~ /formE[23]/ ? 640 : name ~ /formE1/ ? 80 : 0) || name ~ /products_of_part|backward_keys|queries_of_kept|observe_(rows|mass)_wgmma/ && $5 > 0) { print name ":" $0; bad = 1 }
     END { exit bad }' "$log" >&2 && exit 0
rm -f "$object"
exit 1
