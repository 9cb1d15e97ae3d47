"""Which of the server's operators give a row the same bits wherever it lies, and whatever else is in the batch?

python -m examples.moe_lm.bits [--size h4096] [--slots 64] [--prefill-batch 4] [--max-prompt 512]

The library's own operations promise it. Torch's GEMMs and attention do not, though at a fixed shape they mostly do: a
kernel that splits the sum of some tiles, and not of others, does not. Exits with 1 if an operator differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ranks, sizes
from .experts import Experts, has_grouped_mm
from .model import Linear, RMSNorm, Router

Case = tuple[str, list[int]]  # an operator, and the places where a row has other bits


def move_rows(name: str, operator: Callable[[Tensor], Tensor], x: Tensor, places: list[int]) -> Case:
    """operator: [M, ..] to [M, ..]. What it makes of row 0 of x, among other rows, at each place."""
    want = operator(x)[0].clone()
    differ = []
    for place in [0, *places]:
        others = torch.randn_like(x)
        others[place] = x[0]
        if not torch.equal(operator(others)[place], want):
            differ.append(place)
    return name, differ


def dense(model: sizes.Sizes, rows: int, batch: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """The operators of a block on [rows, hidden]."""
    places = sorted({1, rows // batch, rows // 2, rows - 1} - {0, rows})
    with device:
        x = torch.randn(rows, model.hidden).to(dtype)
        inner = torch.randn(rows, model.shared_inner).to(dtype)
    for name, inputs, outputs in (
        ("qkv", x, 3 * model.hidden), ("attention out", x, model.hidden), ("shared up", x, 2 * model.shared_inner),
        ("shared down", inner, model.hidden), ("head", x, model.vocabulary),
    ):  # fmt: skip
        with device:
            linear = Linear(inputs.shape[1], outputs).to(dtype)
        torch.nn.init.normal_(linear.weight, std=inputs.shape[1] ** -0.5)
        yield move_rows(f"{name} [{rows}, {inputs.shape[1]}] x {outputs}", linear, inputs, places)
    with device:
        norm, router = RMSNorm(model.hidden), Router(model)
    torch.nn.init.normal_(router.weight, std=model.hidden**-0.5)
    yield move_rows(f"norm [{rows}, {model.hidden}]", norm, x, places)
    yield move_rows(f"router, weights [{rows}, {model.hidden}]", lambda x: router(x)[0], x, places)
    yield move_rows(f"router, ids [{rows}, {model.hidden}]", lambda x: router(x)[1], x, places)


def grouped(model: sizes.Sizes, rows: int, local: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The experts' GEMMs: a row in a group of any size, anywhere in it. Places are (rows of the first group, row)."""
    with device:
        experts = Experts(local, model.hidden, model.expert_inner).to(dtype)
        row = torch.randn(model.hidden).to(dtype)
    experts.grouped_mm = has_grouped_mm(device.type, dtype)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def run(first: int, place: int) -> Tensor:
        ends = torch.arange(local, device=device, dtype=torch.int32) * 8 + first
        x = torch.randn(rows, model.hidden, device=device).to(dtype)
        x[place] = row
        return experts.packed(x, ends)[place].clone()

    want = run(8, 0)
    differ = [
        first * 10_000 + place
        for first, place in ((8, 0), (8, 3), (16, 9), (64, 40), (136, 130), (200, 190))
        if first + 8 * local <= rows and not torch.equal(run(first, place), want)
    ]
    return f"experts, {rows} rows (first group * 10000 + row)", differ


def attention(
    model: sizes.Sizes, batch: int, length: int, decode: bool, device: torch.device, dtype: torch.dtype
) -> Case:
    """A sequence anywhere in the batch; in decoding with anything behind its last token."""
    shape = (batch, model.heads, length, model.hidden // model.heads)
    keys, values, queries = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    places = torch.arange(length, device=device)
    last = length // 2

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not decode:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        positions = torch.full((batch,), last, device=device)
        mask = (places <= positions.unsqueeze(1))[:, None, None]
        return F.scaled_dot_product_attention(q[:, :, :1], k, v, attn_mask=mask)

    want = run(queries, keys, values)[0].clone()
    kept = last + 1 if decode else length
    differ = []
    for place in sorted({0, 1, batch // 2, batch - 1} & set(range(batch))):
        others = [torch.randn_like(each) for each in (queries, keys, values)]
        for other, each in zip(others, (queries, keys, values), strict=True):
            other[place, :, :kept] = each[0, :, :kept]
        if not torch.equal(run(*others)[place], want):
            differ.append(place)
    return f"{'decode' if decode else 'prefill'} attention {list(shape)}", differ


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.moe_lm.bits", description=__doc__.splitlines()[0])
    for name, value in (("slots", 64), ("prefill-batch", 4), ("max-prompt", 512), ("max-length", 592)):
        parser.add_argument(f"--{name}", type=int, default=value)
    ranks.add_arguments(parser)
    sizes.add_arguments(parser)
    options = parser.parse_args(argv)
    kind, count = ranks.device_type(options), ranks.num_ranks(options)
    model, dtype, device = sizes.sizes_of(options, kind, count), sizes.dtype_of(options, kind), torch.device(kind)
    local, prompts = model.experts // count, options.prefill_batch * options.max_prompt
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as the CPU ranks do: a second thread's scratch is aligned otherwise, which changes bits
    cases = [
        *dense(model, options.slots, options.slots, dtype, device),
        *dense(model, prompts, options.prefill_batch, dtype, device),
        *dense(model, options.prefill_batch, options.prefill_batch, dtype, device),
        *(grouped(model, count * tokens * min(model.topk, local) + 8 * local, local, dtype, device)
          for tokens in (options.slots, prompts)),
        attention(model, options.slots, options.max_length, True, device, dtype),
        attention(model, options.prefill_batch, options.max_prompt, False, device, dtype),
    ]  # fmt: skip
    for name, differ in cases:
        print(f"{name:60} {f'OTHER BITS at {differ}' if differ else 'the same bits'}", flush=True)
    return 1 if any(differ for _, differ in cases) else 0


if __name__ == "__main__":
    raise SystemExit(main())
