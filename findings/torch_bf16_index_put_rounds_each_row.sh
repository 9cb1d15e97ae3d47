#!/usr/bin/env bash
# torch 2.15.0 on the CPU: adding bf16 rows into one row, the last step of a MoE layer without a combine kernel.
# Guess: index_add_, scatter_add_ and index_put_(accumulate=True) are three spellings of one sum.
# Is: index_add_ and scatter_add_ add up in float32 and round once; index_put_ rounds to bf16 at every row, so that
# small rows are lost. Seen, of 1 + 4 * 2^-8: 1.015625 by the first two, 1.0 by the third.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import sys

import torch

print("torch", torch.__version__)
rows = torch.tensor([1.0, *[2.0**-8] * 4]).bfloat16().unsqueeze(1).expand(5, 64).contiguous()
token = torch.zeros(5, dtype=torch.int64)


def zeros():
    return torch.zeros(1, 64, dtype=torch.bfloat16)


seen = {
    "index_add_": zeros().index_add_(0, token, rows),
    "scatter_add_": zeros().scatter_add_(0, token.unsqueeze(1).expand(5, 64), rows),
    "index_put_(accumulate=True)": zeros().index_put_((token,), rows, accumulate=True),
}
for name, total in seen.items():
    print(f"{name}: {total.unique().tolist()}")
if [total.unique().tolist() for total in seen.values()] != [[1.015625], [1.015625], [1.0]]:
    sys.exit("changed")
EOF
