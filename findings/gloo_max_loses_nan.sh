#!/usr/bin/env bash
# torch 2.15.0, gloo: all_reduce(MAX) of two ranks, of which one has NaN in every element.
# Guess: NaN everywhere, as torch.maximum has it, or nowhere: overflow checks of mixed precision go by it.
# Is: half of the elements are NaN and half are the other rank's numbers, and which half depends on the rank that had
# the NaN. Seen with 8 elements: NaN of rank 0 stays in the first four, NaN of rank 1 in the last four.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import os
import sys
import tempfile

import torch
import torch.distributed as dist

print("torch", torch.__version__, flush=True)
store = tempfile.mktemp(dir=os.getcwd())
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
seen = []
for owner in range(2):
    x = torch.full((8,), float("nan") if rank == owner else 1.0)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    seen.append(x.isnan().tolist())
    if rank == 0:
        print(f"NaN of rank {owner}:", x.tolist(), flush=True)
dist.destroy_process_group()
changed = seen != [[True] * 4 + [False] * 4, [False] * 4 + [True] * 4]
if rank == 1:
    os._exit(changed)
if os.wait()[1] != 0 or changed:
    sys.exit("changed")
EOF
