#!/usr/bin/env bash
# torchao 0.18.0: to_mx(x, float8_e4m3fn, 32) with its default scaling mode, FLOOR.
# Guess: a block's scale is chosen so that its largest number fits, as with amax / 448.
# Is: the scale is 2^(floor(log2(amax)) - 8), so a largest number with a mantissa above 1.75 is cut: 1.9 comes back as
# 1.75, 8 % less, where rounding errs by 3 % at most. RCEIL gives 1.875. (CEIL
# gives a block up to exactly 448 twice the scale that it needs.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 torchao==0.18.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import sys
from importlib.metadata import version

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

print("torchao", version("torchao"), "torch", torch.__version__)


def back(largest, mode=None):
    x = torch.zeros(1, 32)
    x[0, 0] = largest
    given = () if mode is None else (ScaleCalculationMode[mode],)
    scale, codes = to_mx(x, torch.float8_e4m3fn, 32, *given)
    return float(codes[0, 0].float() * scale.float()[0, 0]), int(scale.view(torch.uint8)[0, 0])


seen = {mode: back(1.9, mode) for mode in (None, "FLOOR", "RCEIL", "CEIL", "EVEN")}
for mode, (number, code) in seen.items():
    print(f"1.9 by {mode or 'the default'}: {number}, scale's code {code}")
edges = [back(448.0, mode)[1] for mode in ("FLOOR", "RCEIL", "CEIL")]
print("scale's codes of a block up to 448 by FLOOR, RCEIL, CEIL:", edges)
if [seen[mode][0] for mode in seen] != [1.75, 1.75, 1.875, 1.875, 1.75] or edges != [127, 127, 128]:
    sys.exit("changed")
EOF
