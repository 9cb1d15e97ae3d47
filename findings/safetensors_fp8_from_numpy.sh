#!/usr/bin/env bash
# safetensors 0.8.0, its numpy interface, with arrays of ml_dtypes 0.6.0.
# Guess: what save_file writes, load_file reads; FP8 weights, or their e8m0 scales, as well as bfloat16.
# Is: bfloat16 comes back. e4m3, e5m2 and e8m0 are written, and load_file raises AttributeError on its own file, since
# it looks for the dtype in numpy. The bytes are there: a reader of the header gets them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check safetensors==0.8.0 ml_dtypes==0.6.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import json
import sys

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

print("safetensors", safetensors.__version__, "ml_dtypes", ml_dtypes.__version__)
for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
    given = np.array([0.5, 1, 2, 4], dtype=getattr(ml_dtypes, name))
    save_file({"w": given}, "one.safetensors")
    try:
        seen = "comes back" if load_file("one.safetensors")["w"].dtype == given.dtype else "comes back as another dtype"
    except AttributeError as error:
        seen = f"AttributeError: {error}"
    print(f"{name}: {seen}")
    raw = open("one.safetensors", "rb").read()
    size = int.from_bytes(raw[:8], "little")
    is_there = raw[8 + size :] == given.tobytes() and "w" in json.loads(raw[8 : 8 + size])
    if not is_there or (seen == "comes back") != (name == "bfloat16"):
        sys.exit("changed")
EOF
