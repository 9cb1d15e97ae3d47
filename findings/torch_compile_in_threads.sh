#!/usr/bin/env bash
# torch 2.11.0: threads that call functions compiled by torch.compile for the first time, each a function of its own.
# Guess: a compilation takes a lock, or is the thread's own: all threads get their results, as with one thread.
# Is: most calls raise RuntimeError, "Detected that you are using FX to symbolically trace a dynamo-optimized function",
# though no program traces anything: that a trace is under way is a flag of the process. Under a lock the same calls work.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.11.0 numpy==2.2.6
OMP_NUM_THREADS=1 venv/bin/python -W ignore - << 'EOF'
import contextlib
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode

torch._dynamo.config.recompile_limit = 64
with FakeTensorMode():  # what the first of these changes is the process's: it comes before the threads
    pass


def calls(number: int, lock: contextlib.AbstractContextManager, said: Counter) -> None:
    for turn in range(6):
        factor = 10 * number + turn

        def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ((x.sin() * factor + y.cos()) @ (x + y).t()).relu().sum(0)

        x, y = torch.ones(8 + factor, 16, requires_grad=True), torch.ones(8 + factor, 16)
        with lock:
            try:
                torch.compile(layer, backend="aot_eager", dynamic=False)(x, y).sum().backward()
                said["works"] += 1
            except RuntimeError as error:
                said[str(error)[:77]] += 1


def outcome(lock: contextlib.AbstractContextManager) -> Counter:
    torch._dynamo.reset()
    said = Counter()
    with ThreadPoolExecutor(8) as pool:
        for number in range(8):
            pool.submit(calls, number, lock, said)
    return said


print("torch", torch.__version__)
at_once, one_by_one = outcome(contextlib.nullcontext()), outcome(threading.Lock())
print("one by one:", dict(one_by_one))
print("at once:", dict(at_once))
text = "Detected that you are using FX to symbolically trace a dynamo-optimized funct"
if one_by_one != {"works": 48} or not at_once[text] or at_once["works"] + at_once[text] != 48:
    sys.exit("changed")
EOF
