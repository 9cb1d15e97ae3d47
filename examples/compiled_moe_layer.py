"""Mixture-of-Experts layers compiled whole, forward and backward: no graph break, one compilation for all of them.

python examples/compiled_moe_layer.py
"""

import logging
import time

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import nccl_ep

TOKENS, HIDDEN, EXPERTS, TOPK, LAYERS = 32, 64, 8, 2, 3


class MoeLayer(torch.nn.Module):
    """Top-k router, experts, and a buffer of its own."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.buffer = nccl_ep.Buffer.for_shapes(
            None, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, dtype=torch.float32, mode="ht",
            device=device,
        )  # fmt: skip
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, device=device)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN, device=device) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, idx = self.router(x).softmax(-1).topk(TOPK)
        out = nccl_ep.dispatch(
            x, idx, weights, buffer=self.buffer, num_experts=EXPERTS, mode="ht", layout="expert_major",
            capacity=TOKENS, zero_padding=True,
        )  # fmt: skip
        return x + nccl_ep.combine(torch.bmm(out.x, self.experts).relu(), out.handle)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() and nccl_ep._C.has_cuda() else "cpu"
    if device == "cpu":
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # or it warns of missing GPUs
    print(f"{LAYERS} layers on {device}: the first call compiles, which takes up to a minute ..", flush=True)
    counter = CompileCounterWithBackend("inductor")
    layers = [MoeLayer(device) for _ in range(LAYERS)]
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
    for tokens in (TOKENS, 17, 1, 0):  # one compilation serves any number of tokens
        x = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
        begin, y = time.perf_counter(), x
        for layer in layers:
            nccl_ep.mark_tokens(y)
            y = layer(y)
        y.pow(2).sum().backward()
        assert x.grad is not None and torch.isfinite(x.grad).all()
        print(f"{tokens} tokens: {time.perf_counter() - begin:.3f} s, {counter.frame_count} compilations so far")
    assert counter.frame_count == 1
    for layer in layers:
        layer.buffer.destroy()


if __name__ == "__main__":
    main()
