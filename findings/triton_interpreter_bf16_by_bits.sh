#!/usr/bin/env bash
# triton 3.6.0 and 3.9.0 with TRITON_INTERPRET=1 and torch 2.15.0, no GPU: a kernel whose operands are bfloat16.
# Guess: the interpreter computes as a GPU does, only slower, or raises where it cannot.
# Is: it keeps bf16 as uint16 and computes with those codes as integers. No error, no warning; only triton's page on
# debugging says that such operations are not supported. A dot product of 4e9 is noticed, 1 * 1 = 2 may not be, nor
# a ReLU by tl.maximum that lets -1 through in 3.9.0; in 3.6.0 it gave 0. Operands that the kernel casts to float32
# first are right, as is float16. A store of float32 into bf16 cuts: 1.999 becomes 1.9921875, by torch 2.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
cat > experts.py << 'EOF'
from importlib.metadata import version

import torch
import triton
import triton.language as tl


@triton.jit
def compute(ones, minus_ones, out, cut, to_float32: tl.constexpr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    x = tl.load(ones + at)
    y = tl.load(minus_ones + at)
    if to_float32:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    tl.store(out + at, tl.dot(x, x))
    tl.store(out + 256 + at, x + x)
    tl.store(out + 512 + at, x * x)
    tl.store(out + 768 + at, tl.maximum(y, 0.0))
    tl.store(cut + i, tl.full((16,), 1.999, tl.float32))


for dtype, to_float32 in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)):
    ones = torch.ones(16, 16, dtype=dtype)
    out = torch.zeros(4, 16, 16)
    cut = torch.zeros(16, dtype=torch.bfloat16)
    compute[(1,)](ones, -ones, out, cut, to_float32)
    dot, plus, times, relu = out[:, 0, 0].tolist()
    how = f"triton {version('triton')} {dtype}{' cast to float32' if to_float32 else ''}"
    print(f"{how}: dot {dot} 1 + 1 = {plus:.6g} 1 * 1 = {times} relu(-1) = {relu} stored {cut[0]}")
EOF
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.2.6
for version in 3.6.0 3.9.0; do
  venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "triton==$version"
  TRITON_INTERPRET=1 venv/bin/python -W ignore experts.py | tee -a seen
done
diff seen - << 'EOF' || { echo changed >&2; exit 1; }
triton 3.6.0 torch.bfloat16: dot 4228120576.0 1 + 1 = 1.70141e+38 1 * 1 = 2.0 relu(-1) = 0.0 stored 1.9921875
triton 3.6.0 torch.bfloat16 cast to float32: dot 16.0 1 + 1 = 2 1 * 1 = 1.0 relu(-1) = 0.0 stored 1.9921875
triton 3.6.0 torch.float16: dot 16.0 1 + 1 = 2 1 * 1 = 1.0 relu(-1) = 0.0 stored 1.9921875
triton 3.9.0 torch.bfloat16: dot 4228120576.0 1 + 1 = 1.70141e+38 1 * 1 = 2.0 relu(-1) = -1.0 stored 1.9921875
triton 3.9.0 torch.bfloat16 cast to float32: dot 16.0 1 + 1 = 2 1 * 1 = 1.0 relu(-1) = 0.0 stored 1.9921875
triton 3.9.0 torch.float16: dot 16.0 1 + 1 = 2 1 * 1 = 1.0 relu(-1) = 0.0 stored 1.9921875
EOF
