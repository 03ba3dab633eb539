#!/bin/sh
# check-ptxas.sh OBJECT NVCC ...: runs the compiler with -Xptxas -v and fails if ptxas reports that a kernel of this
# folder became slow:
#   C75xx          ptxas serialised a product, ignored a register hint, or inserted a fence
#   spill stores   ptxas put registers into local memory
# The most bytes of spill stores that each kernel may have are below. "Producer" means that most of the spills are in
# the code of the warpgroup that loads tiles, which has few registers.
#   forward_tiles                      16, once per work tile (BM queries of one head), with options
#   forward_tiles, keys in splits      48; with options 200 (producer, once per work tile)
#   forward_tiles, options of          450; keys in splits 600 (producer)
#     pairs.cuh
#   forward_tiles, float8              60 with tiles of 224 keys, 32 at head size 256 (producer, once per work tile or
#                                      unit of V^T)
#   backward_tiles                     64; only softcap 240; softcap, ALiBi and FlashMask 224 (producer, once per tile
#                                      of keys; addresses, once per tile of queries); options of pairs.cuh 800 (some
#                                      twenty registers, once per tile of queries)
#   latent_tiles                       128 (addresses; 5 words per two tiles of keys; the end of a split of the keys)
#   wide_tiles                         350 (producer, once per work tile)
#   scores_of_part                     softcap, ALiBi or FlashMask 80; bias, keep_mask or dropout 640 (producer;
#                                      addresses and bits of dropout, once per tile); otherwise none
#   products_of_part, backward_keys,   none
#     queries_of_kept, observe_rows,
#     observe_mass
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
