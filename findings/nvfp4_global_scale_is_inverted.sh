#!/usr/bin/env bash
# torchao 0.18.0 and compressed-tensors 0.20.0: the float32 factor that a whole NVFP4 tensor has beside block scales.
# Guess: one format, one factor; a checkpoint's can be handed on.
# Is: torchao's is a divisor, amax / (448 * 6); compressed-tensors' is the multiplier, (448 * 6) / amax. Both are
# float32 of one element and neither says so: the wrong one gives block scales of 448, or of the smallest number.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 torchao==0.18.0 compressed-tensors==0.20.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import sys
from importlib.metadata import version

import torch
from compressed_tensors.quantization.utils import generate_gparam
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

print("torchao", version("torchao"), "compressed-tensors", version("compressed-tensors"), "torch", torch.__version__)
x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 0.02
divisor = per_tensor_amax_to_scale(x.abs().max())
multiplier = generate_gparam(x.min(), x.max())
right = nvfp4_quantize(x, 16, divisor)[0].float()
wrong = nvfp4_quantize(x, 16, multiplier[0])[0].float()
print(f"torchao {divisor.item():.4g}, compressed-tensors {multiplier.item():.4g}")
print(f"block scales with the right one {right.min().item()} to {right.max().item()}, with the other {wrong.unique()}")
product = float(divisor * multiplier)
if abs(product - 1) > 1e-6 or right.max() != 448 or right.min() < 1 or wrong.unique().tolist() != [2.0**-6]:
    sys.exit("changed")
EOF
