#!/usr/bin/env bash
# torch 2.12.1 and 2.15.0 on the CPU: float32 to float8_e4m3fn past 448, the largest number.
# Guess: a cast is the same in every version: NaN, as the format has no infinity (or 448, as a GPU's conversion).
# Is: until 2.12 what lies past 464 became NaN; since 2.13 it becomes 448, infinity too. So a check for NaN behind the
# cast has nothing to find any more, and ml_dtypes 0.6.0 still gives NaN. float8_e5m2 gives infinity in both.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat > cast.py << 'EOF'
import ml_dtypes
import numpy as np
import torch

x = torch.tensor([448.0, 464.0, 465.0, 1e9, float("inf")])
print("torch", torch.__version__.split("+")[0], x.to(torch.float8_e4m3fn).float().tolist(), end=" ")
print(x[3:].to(torch.float8_e5m2).float().tolist(), x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
EOF
for version in 2.12.1 2.15.0; do
  "${PYTHON:-python3}" -m venv "venv$version"
  "venv$version/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$version" ml_dtypes==0.6.0 \
    numpy==2.2.6
  "venv$version/bin/python" -W ignore cast.py | tee -a seen
  rm -r "venv$version"
done
diff seen - << 'EOF' || { echo changed >&2; exit 1; }
torch 2.12.1 [448.0, 448.0, nan, nan, nan] [inf, inf] [448. 448.  nan  nan  nan]
torch 2.15.0 [448.0, 448.0, 448.0, 448.0, 448.0] [inf, inf] [448. 448.  nan  nan  nan]
EOF
