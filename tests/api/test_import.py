"""import nccl_ep, and the first buffer: what they cost, and that a compiler still learns what it must know."""

from __future__ import annotations

import subprocess
import sys

from tests import ROOT

MOST = 0.15  # seconds beyond torch's import
BUFFER = 'nccl_ep.Buffer.for_shapes(None, max_tokens=4, hidden=64, topk=2, num_experts=4, device="cpu")'
COST = f"""
import sys, time, torch
begin = time.process_time()
import nccl_ep
buffer = {BUFFER}
seconds = time.process_time() - begin
import nccl_ep.deep_ep, nccl_ep.reference, nccl_ep.testing
nccl_ep.testing.run_ranks(2, lambda group: None)
print(seconds, "torch._dynamo" in sys.modules, "sympy" in sys.modules, "triton" in sys.modules)
"""
MARKS = f"""
import torch, nccl_ep
def marks(seq):
    return {{name: str(value) for name, value in vars(seq).items()}}
early, gone = {BUFFER}, {BUFFER}
assert not marks(early._seq)
gone.destroy()
del gone
import torch._dynamo
late = {BUFFER}
given = torch.empty(late._seq.shape, dtype=torch.int64)
torch._dynamo.mark_dynamic(given, 0)
torch._dynamo.mark_static(given, [1, 2, 3])
torch._dynamo.mark_static_address(given, guard=False)
assert marks(early._seq) == marks(late._seq) == marks(given) != {{}}, (marks(early._seq), marks(late._seq))
"""


ORACLE = """
import torch
from nccl_ep import reference
x = torch.ones(2, 128)
plain = reference.quantize_fp8(x, "fp8")
import torch._dynamo
def twice(x):
    return reference.quantize_fp8(x + 0, "fp8")
assert all(map(torch.equal, torch.compile(twice, backend="eager")(x), plain))
torch._dynamo.reset()
try:
    torch.compile(twice, backend="eager", fullgraph=True)(x)
except torch._dynamo.exc.Unsupported:
    print("refused")
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_costs_little_beyond_torch_and_brings_no_compiler() -> None:
    costs = []
    for _ in range(3):
        seconds, *brought = run(COST).split()
        assert brought == ["False"] * 3
        costs.append(float(seconds))
        if costs[-1] <= MOST:
            break
    assert min(costs) <= MOST, costs


def test_buffers_are_marked_for_a_compiler_that_comes_later() -> None:
    run(MARKS)


def test_the_oracle_is_kept_from_a_compiler_that_comes_later() -> None:
    assert run(ORACLE).split() == ["refused"]
