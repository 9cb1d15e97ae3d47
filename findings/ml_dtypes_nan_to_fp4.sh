#!/usr/bin/env bash
# ml_dtypes 0.6.0: what its cast to float4_e2m1fn makes of NaN and of what is too large.
# Guess: e2m1 has no NaN, so a cast raises, or NaN becomes the largest magnitude (6), as a GPU's conversion has it.
# Is: NaN becomes a zero of the other sign, infinity becomes 6. A check for NaN or for large values behind the cast
# finds nothing. Seen: NaN -> -0.0, -NaN -> 0.0, inf -> 6.0, 7 -> 6.0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import sys

import ml_dtypes
import numpy as np

print("ml_dtypes", ml_dtypes.__version__)
given = np.array([np.nan, -np.nan, np.inf, 7.0], dtype=np.float32)
codes = given.astype(ml_dtypes.float4_e2m1fn)
seen = [(bool(np.signbit(number)), float(abs(number))) for number in codes.astype(np.float32)]
print("float32", given, "-> e2m1", codes.astype(np.float32))
if seen != [(True, 0.0), (False, 0.0), (False, 6.0), (False, 6.0)]:
    sys.exit("changed")
EOF
