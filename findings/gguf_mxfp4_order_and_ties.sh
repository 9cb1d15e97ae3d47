#!/usr/bin/env bash
# gguf 0.19.0: MXFP4, 32 numbers of e2m1 and one scale.
# Guess: as OCP's MX format is packed elsewhere, element 2i is in the low bits of byte i and 2i + 1 in the high ones;
# ties go to the even code.
# Is: byte i has element i in the low bits and element i + 16 in the high ones, so bytes of torchao or transformers
# cannot be taken over; and a tie goes to the smaller magnitude, even or not: 0.75 -> 0.5, 1.75 -> 1.5, 3.5 -> 3.
# A zero keeps no sign.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check gguf==0.19.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import sys
from importlib.metadata import version

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

print("gguf", version("gguf"))


def packed(numbers: dict[int, float]) -> tuple[list[int], np.ndarray]:
    x = np.zeros((1, 32), dtype=np.float32)
    for place, number in numbers.items():
        x[0, place] = number
    block = quantize(x, GGMLQuantizationType.MXFP4)
    return block[0, 1:].tolist(), dequantize(block, GGMLQuantizationType.MXFP4)[0]


order, _ = packed({0: 6, 1: 1, 16: 2})
print("6, 1 at places 0, 1, and 2 at place 16: bytes", [hex(byte) for byte in order[:3]])
ties = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_, numbers = packed({0: 6, **dict(enumerate(ties, 1))})
print("ties", ties, "->", numbers[1:8].tolist())
zero, _ = packed({0: 6, 1: -0.0})
if order[:3] != [0x47, 0x02, 0] or numbers[1:8].tolist() != [0, 0.5, 1, 1.5, 2, 3, 4] or zero[1] != 0:
    sys.exit("changed")
EOF
