#!/bin/sh
# Low latency's figures of a machine: sh bench/measure_ll.sh STEP FOLDER, with the built package on PYTHONPATH.
# No step begins a shape after nine minutes; each leaves FOLDER/ll_STEP*.json, and the last thing it prints is a table.
# main: the targets. layouts, payloads, deepep: what must not cost more. shapes: others. sms: over num_sms. overlap: a
# GEMM.
set -eu
step=${1:?main, layouts, payloads, deepep, shapes, sms or overlap} out=${2:?a folder}
mkdir -p "$out"
bench() { python3 -m bench "$@"; }
ll() { bench ll --time-limit=520 --no-rivals --json "$out/ll_$step.json" "$@"; }
case $step in
main) bench ll --time-limit=520 --tokens 128,1,8,32,512 --json "$out/ll_main.json" ;;
layouts) ll --tokens 128,8 --layout expert_major,packed,rank_major,flat --api native --figures graph ;;
payloads) ll --tokens 128 --dtype fp16,fp32,fp8_rounded,fp8_ue8m0,given_fp8,given_int8,given_fp4 --api native --figures graph ;;
deepep) ll --tokens 1,128 --api native,deepep --figures graph,event,host ;;
shapes)
    # One after the other, whatever becomes of one of them.
    code=0
    for shape in "--ranks 2" "--hidden 2880" "--hidden 4096" "--topk 1" "--topk 16" "--routing hot_expert" "--routing skewed"; do
        name=$(echo "$shape" | tr -d -- '- ')
        # shellcheck disable=SC2086
        bench ll --time-limit 75 --tokens 1,32,128 --api native --figures graph --no-rivals $shape \
            --json "$out/ll_shapes_$name.json" || code=1
    done
    exit $code ;;
sms) ll --tokens 128,8,32 --num-sms 8,16,24,32,48,64,96,132 --api native --figures graph ;;
overlap) bench overlap --time-limit=520 --mode ll --dtype bf16 --num-sms 12,20,36,52,68 --json "$out/ll_overlap.json" ;;
*) echo "$step is no step: main, layouts, payloads, deepep, shapes, sms or overlap" >&2; exit 2 ;;
esac
