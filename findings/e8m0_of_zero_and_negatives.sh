#!/usr/bin/env bash
# torch 2.15.0 and ml_dtypes 0.6.0: casts to e8m0, the scale of MX formats, of numbers that it has not got.
# Guess: both give the same code for the same float, and a zero or a negative scale is told by NaN or by an error.
# Is: torch makes 2^-127 of 0, and that then compares equal to 0; it drops the sign of -2. ml_dtypes makes NaN of both.
# torch.zeros(dtype=float8_e8m0fnu) has code 0, which is 2^-127, while fill_(0) raises. In range the two agree.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 ml_dtypes==0.6.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import sys

import ml_dtypes
import numpy as np
import torch

print("torch", torch.__version__, "ml_dtypes", ml_dtypes.__version__)
E8M0 = torch.float8_e8m0fnu
given = [0.0, -2.0, 1.0, 2.5, 3.0]
ours = torch.tensor(given).to(E8M0).view(torch.uint8).tolist()
theirs = np.array(given, dtype=np.float32).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist()
print("codes of", given, "torch", ours, "ml_dtypes", theirs, "(255 is NaN)")
zero = torch.zeros(2, dtype=E8M0)
print("torch.zeros:", zero.float().tolist(), "== 0 is", (zero == 0).tolist())
try:
    zero.fill_(0.0)
    filled = "works"
except RuntimeError as error:
    filled = f"RuntimeError: {error}"
print("fill_(0):", filled)
if (
    (ours, theirs) != ([0, 128, 127, 128, 129], [255, 255, 127, 128, 129])
    or zero.float().tolist() != [2.0**-127] * 2
    or not (zero == 0).all()
    or filled == "works"
):
    sys.exit("changed")
EOF
