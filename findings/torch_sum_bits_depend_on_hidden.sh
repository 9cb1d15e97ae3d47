#!/usr/bin/env bash
# torch 2.15.0 on the CPU: [tokens, K, hidden].sum(1) in float32, as one combines the rows of K experts.
# Guess: a column is a sum of K numbers, whose bits do not depend on how many columns stand beside it.
# Is: with hidden 256 and K = 8 the sum goes by k from the first to the last; with hidden 36 some columns go another
# way, and with K = 32 all do. The same at every instruction set (ATEN_CPU_CAPABILITY=default, avx2, avx512).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import sys

import torch

print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
rows = torch.randn(64, 32, 256, generator=torch.Generator().manual_seed(0))


def by_hand(part):
    total = part[:, 0].clone()
    for k in range(1, part.shape[1]):
        total += part[:, k]
    return total


seen = {}
for topk in (8, 32):
    for hidden in (256, 36, 7):
        part = rows[:, :topk, :hidden].contiguous()
        seen[topk, hidden] = int((part.sum(1) != by_hand(part)).sum())
        print(f"K = {topk}, hidden {hidden}: {seen[topk, hidden]} of {64 * hidden} differ from a sum in the order of k")
both = rows[:, :8, :36].contiguous().sum(1) != rows[:, :8].contiguous().sum(1)[:, :36]
print(f"K = 8: {int(both.sum())} of the first 36 columns' numbers change when hidden is 256 instead of 36")
if seen[8, 256] != 0 or not both.any() or 0 in (seen[8, 36], seen[8, 7], seen[32, 256]):
    sys.exit("changed")
EOF
