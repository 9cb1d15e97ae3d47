#!/usr/bin/env bash
# torch 2.15.0: how often torch.compile calls its backend for the first call of a layer, whose helper has a keyword
# argument with a default that only Python reads.
# Guess: a default is a constant of the trace, be it 1 or 1.0, and the backend is called once.
# Is: with dynamic=True a default that is a float counts as an input of the graph. The trace is finished and compiled,
# thrown away, and done once more with the float as a constant: the backend is called twice. With an int it is not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import sys

import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

print("torch", torch.__version__)


def with_float(x, *, factor=1.0):
    return x * 2 if factor == 1.0 else x * 3


def with_int(x, *, factor=1):
    return x * 2 if factor == 1 else x * 3


def compilations(helper, dynamic):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = torch.compile(lambda x: helper(x), backend=counter, fullgraph=True, dynamic=dynamic)
    layer(torch.ones(8, 4))
    print(f"{helper.__name__}, dynamic={dynamic}: the backend was called {counter.frame_count} times")
    return counter.frame_count


seen = [compilations(helper, dynamic) for helper in (with_float, with_int) for dynamic in (None, True)]
if seen != [1, 2, 1, 1]:
    sys.exit("changed")
EOF
