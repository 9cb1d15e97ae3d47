#!/usr/bin/env bash
# torch 2.15.0: the gradient of x.to(torch.float8_e4m3fn).
# Guess: straight through, in x's dtype; or the cast is not differentiable.
# Is: the gradient takes the way of the values, a cast to e4m3 without a scale, and back to float32. What is below
# 2^-10 becomes 0, what is above 448 becomes 448, the rest has 4 bits. Seen: 1e-4 -> 0, 1000 -> 448, 1.06 -> 1.
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
seen = []
for factor in (1e-4, 1.06, 1000.0):
    x = torch.ones(2, requires_grad=True)
    quantised = x.to(torch.float8_e4m3fn)
    (quantised.float() * factor).sum().backward()
    seen.append((quantised.requires_grad, x.grad.dtype, x.grad.tolist()))
    print(f"gradient {factor} arrives as {x.grad.tolist()}")
if seen != [(True, torch.float32, [number] * 2) for number in (0.0, 1.0, 448.0)]:
    sys.exit("changed")
EOF
