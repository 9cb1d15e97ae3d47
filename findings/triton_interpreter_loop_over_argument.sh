#!/usr/bin/env bash
# triton 3.6.0 and 3.9.0 with TRITON_INTERPRET=1 and torch 2.15.0, no GPU: a loop over blocks of an argument's length.
# Guess: the interpreter runs what compiles, as every GEMM with `for k in range(0, K, BLOCK)`.
# Is: in 3.6.0, which torch 2.11 wants, with numpy 2.2.6 it does. With numpy 2.4.6 the same kernel raises
# InterpreterError where the bound is an argument, which is kept as an array of one element; a constexpr is fine. 3.9.0
# is right with both.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
cat > blocks.py << 'EOF'
from importlib.metadata import version

import torch
import triton
import triton.language as tl


@triton.jit
def count(out, size, step: tl.constexpr):
    blocks = 0
    for _ in range(0, size, step):
        blocks += 1
    tl.store(out, blocks)


@triton.jit
def count_constant(out, size: tl.constexpr, step: tl.constexpr):
    blocks = 0
    for _ in range(0, size, step):
        blocks += 1
    tl.store(out, blocks)


said = [f"triton {version('triton')} numpy {version('numpy')}"]
for kernel in (count, count_constant):
    out = torch.zeros(1, dtype=torch.int32)
    try:
        kernel[(1,)](out, 8, 2)
        said.append(f"{kernel.__name__} {int(out)}")
    except Exception as error:
        said.append(f"{kernel.__name__} {type(error).__name__}: {str(error).splitlines()[-1]}")
print(", ".join(said))
EOF
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0
for version in 3.6.0 3.9.0; do
  for numpy in 2.2.6 2.4.6; do
    venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "triton==$version" "numpy==$numpy"
    TRITON_INTERPRET=1 venv/bin/python -W ignore blocks.py | tee -a seen
  done
done
diff seen - << 'EOF' || { echo changed >&2; exit 1; }
triton 3.6.0 numpy 2.2.6, count 4, count_constant 4
triton 3.6.0 numpy 2.4.6, count InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars'), count_constant 4
triton 3.9.0 numpy 2.2.6, count 4, count_constant 4
triton 3.9.0 numpy 2.4.6, count 4, count_constant 4
EOF
