#!/bin/sh
# High throughput's figures of a machine: sh bench/measure_ht.sh STEP FOLDER, with the built package on PYTHONPATH.
# No step begins a shape after nine minutes; each leaves FOLDER/ht_STEP*.json, and the last thing it prints is a table.
# main: the targets. staged: cached and staged. sms: over num_sms. shapes: others. fit: AUTO_LL_BYTES. overlap: a GEMM.
set -eu
step=${1:?main, staged, sms, shapes, fit or overlap} out=${2:?a folder}
mkdir -p "$out"
bench() { python3 -m bench "$@"; }
limit=--time-limit=520
case $step in
main) bench ht "$limit" --tokens 4096,1024,8192 --json "$out/ht_main.json" ;;
staged) bench ht "$limit" --tokens 4096 --cached --staged --no-rivals --figures graph,event,memory --json "$out/ht_staged.json" ;;
sms) bench ht "$limit" --tokens 4096 --num-sms 4,8,10,12,16,24,32 --api ops --figures graph --no-rivals --json "$out/ht_sms.json" ;;
shapes)
    # One after the other, whatever becomes of one of them.
    code=0
    for shape in "--ranks 2" "--hidden 2880" "--topk 1" "--topk 16" "--routing hot_expert" "--routing skewed" \
        "--tokens 32768"; do
        name=$(echo "$shape" | tr -d -- '- ')
        # shellcheck disable=SC2086
        bench ht --time-limit 75 --tokens 4096 --layout flat --dtype bf16 --api ops --figures graph,event --no-rivals \
            --iterations 20 $shape --json "$out/ht_shapes_$name.json" || code=1
    done
    exit $code ;;
fit) bench fit "$limit" --json "$out/ht_fit.json" ;;
overlap) bench overlap "$limit" --mode ht --dtype bf16 --json "$out/ht_overlap.json" ;;
*) echo "$step is no step: main, staged, sms, shapes, fit or overlap" >&2; exit 2 ;;
esac
