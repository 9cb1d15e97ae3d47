#!/bin/sh
# Training and serving the example model on the GPUs of this machine, against torch's all_to_all_single and DeepEP's calls:
#   sh bench/measure_model.sh FOLDER [all | train | serve | proof | bits]
# with the built package on PYTHONPATH. Builds nothing. "all" is serve and two sizes of train, in at most four minutes;
# "train" has three sizes; "proof" trains twice and compares the losses; "bits" asks which of torch's operators give a
# row the same bits anywhere. Every leg has a limit of its own. What a leg that fails has said is in FOLDER/LEG.log, and
# FOLDER/LEG_failure.json names it. FOLDER has reports (JSON), pictures (PNG, SVG) and one record of all in the end.
# TRAIN_FLAGS and SERVE_FLAGS are added to the commands: --no-compile, --no-graphs, --checkpoint-activations, --fp8.
set -u
folder=${1:?a folder} step=${2:-all}
mkdir -p "$folder"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONUNBUFFERED=1
gpus=${GPUS:-$(python3 -c 'import torch; print(torch.cuda.device_count())')}
begin=$(date +%s) total=${TOTAL_SECONDS:-232} failed=0

# leg NAME LIMIT MODULE ARGUMENTS..: under timeout, within what is left of the whole.
leg() {
    name=$1 limit=$2
    shift 2
    left=$((total - $(date +%s) + begin))
    [ "$limit" -lt "$left" ] || limit=$left
    code=124
    if [ "$limit" -ge 10 ]; then
        echo "== $name: at most $limit s: $*"
        timeout -k 5 "$limit" python3 -m "$@" >"$folder/$name.log" 2>&1
        code=$?
        grep -v -i "warn\|^ERROR:20" "$folder/$name.log" | tail -n 25 | cut -c 1-300
    fi
    if [ $code -ne 0 ]; then
        failed=1
        python3 - "$folder" "$name" "$code" "$limit" "$*" <<'PYTHON'
import json, pathlib, sys
folder, name, code, limit, command = sys.argv[1:]
log = pathlib.Path(folder, f"{name}.log")
said = log.read_text(errors="replace")[-4000:] if log.exists() else ""
why = f"ended by the limit of {limit} s" if code in ("124", "137") else f"exit code {code}"
found = {"what": "failure", "leg": name, "why": why, "command": command, "said": said}
pathlib.Path(folder, f"{name}_failure.json").write_text(json.dumps(found, indent=1) + "\n")
print(f"== {name} FAILED: {why}")
PYTHON
    fi
}

# Four sequences of 2,048 tokens a rank and step. Both exchanges in one process, one after the other.
train() { # NAME LIMIT SIZE
    # shellcheck disable=SC2086
    leg "train_$1" "$2" examples.moe_lm.train --ranks "$gpus" --size "$3" --sequences $((4 * gpus)) --length 2048 --lr 3e-4 \
        --steps 23 --log-every 5 --profile-at 6 --exchange nccl_ep,all_to_all_single --go-on \
        --report "$folder/train_$1.json" ${TRAIN_FLAGS:-}
}
large=h4096
[ "$gpus" -gt 1 ] || large=h4096-one-gpu

case $step in
all | train) train h4096 80 $large ;;
esac
case $step in
all | serve)
    # shellcheck disable=SC2086
    leg serve 85 examples.moe_lm.serve --ranks "$gpus" --size $large --slots 64 --prefill-batch 4 --prompt 256-512 \
        --output 32-64 --requests $((128 * gpus)) --rates "${RATES:-$((50 * gpus)),$((100 * gpus)),$((200 * gpus))}" \
        --exchange nccl_ep,all_to_all_single,deep_ep --overlap off,on --profile --check 16 --gap 0.1 --go-on \
        --report "$folder/serve.json" ${SERVE_FLAGS:-}
    ;;
esac
case $step in
all | train)
    train h7168 90 h7168
    ;;
esac
case $step in
train) train h2048 60 h2048 ;;
esac
case $step in
bits) leg bits 60 examples.moe_lm.bits --ranks "$gpus" --size $large ;;
esac
case $step in
proof) # 200 steps twice: the same losses, bit for bit; and the baseline's beside them
    for run in first second; do
        # shellcheck disable=SC2086
        leg "proof_$run" 60 examples.moe_lm.train --ranks "$gpus" --size small --sequences $((4 * gpus)) --length 512 \
            --lr 1e-3 --steps 200 --log-every 50 --deterministic --profile-at -1 --no-compile \
            --report "$folder/proof_$run.json" ${TRAIN_FLAGS:-}
    done
    # shellcheck disable=SC2086
    leg proof_baseline 60 examples.moe_lm.train --ranks "$gpus" --size small --sequences $((4 * gpus)) --length 512 \
        --lr 1e-3 --steps 200 --log-every 50 --exchange all_to_all_single --profile-at -1 --no-compile \
        --report "$folder/proof_baseline.json"
    python3 - "$folder" <<'PYTHON' | tee "$folder/proof.txt"
import json, pathlib, sys
files = [pathlib.Path(sys.argv[1], f"proof_{name}.json") for name in ("first", "second", "baseline")]
if missing := [file.name for file in files if not file.exists()]:
    raise SystemExit(f"no proof without {missing}")
losses = [json.loads(file.read_text())["losses"] for file in files]
print("200 steps twice, losses bit for bit the same:", losses[0] == losses[1])
print("largest difference from the baseline's:", max(abs(a - b) for a, b in zip(losses[0], losses[2])))
PYTHON
    ;;
esac
if [ "$step" != proof ] && [ "$step" != bits ]; then
    total=$((total + 30))
    leg pictures 20 examples.moe_lm.pictures "$folder"
    leg table 10 examples.moe_lm.table "$folder" --record "$folder/model.json"
fi
exit $failed
