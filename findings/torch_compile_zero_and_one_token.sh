#!/usr/bin/env bash
# torch 2.15.0: graphs that torch.compile makes for tensors of 8, 5, 1, 0 and 3 tokens.
# Guess: mark_dynamic (or dynamic=True) on the dimension of tokens gives one graph for every number of tokens.
# Is: 0 and 1 get graphs of their own all the same, so a rank of a MoE model compiles in the middle of a run when it
# first has 0 or 1 token. mark_dynamic(min=0) raises ConstraintViolationError there. mark_unbacked gives one graph.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.2.6
venv/bin/python -W ignore - << 'EOF'
import logging
import sys

import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

print("torch", torch.__version__)
logging.disable(logging.CRITICAL)
MARKS = {
    "nothing": lambda x: None,
    "mark_dynamic": lambda x: torch._dynamo.mark_dynamic(x, 0),
    "mark_dynamic from 0": lambda x: torch._dynamo.mark_dynamic(x, 0, min=0, max=64),
    "mark_unbacked": lambda x: torch._dynamo.decorators.mark_unbacked(x, 0),
}


def graphs(mark, dynamic):
    torch._dynamo.reset()
    counter = CompileCounter()  # runs eagerly: no compiler is needed
    layer = torch.compile(lambda x: x * 2 + 1, backend=counter, dynamic=dynamic)
    made = []
    for tokens in (8, 5, 1, 0, 3):
        x = torch.randn(tokens, 4)
        mark(x)
        try:
            layer(x)
            made.append(counter.frame_count)
        except Exception as error:
            made.append(type(error).__name__)
    print(f"{mark_name}, dynamic={dynamic}: graphs after each call {made}")
    return made


raises = "ConstraintViolationError"
wanted = [[1, 2, 3, 4, 4], [1, 1, 2, 3, 3], [1, 1, 2, 3, 3], [1, 1, raises, raises, 3], [1, 1, 1, 1, 1]]
seen = []
for mark_name, dynamic in (("nothing", None), ("nothing", True), *((name, None) for name in list(MARKS)[1:])):
    seen.append(graphs(MARKS[mark_name], dynamic))
if seen != wanted:
    sys.exit("changed")
EOF
