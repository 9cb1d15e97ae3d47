"""Which of the server's operators give a row the same bits wherever it lies, and whatever else is in the batch?

python -m examples.moe_lm.bits [--size h4096] [--slots 64] [--prefill-batch 4] [--max-prompt 512]

Every operator runs on a batch, and on the same batch in another order: a prompt (in decoding: a request) somewhere
else, with other neighbours. All rows are compared, since a sum in another order is seldom another one in bf16: of one
element in 65,536, say. Operators of a decode step also run from a CUDA graph, as the server's do.

The library's own operations promise these bits. Torch's GEMMs and attention do not, though at a fixed shape they mostly
have them: a kernel that splits the sum of some tiles, and not of others, has not. Exits with 1 if an operator differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ranks, sizes
from .experts import Experts, has_grouped_mm
from .model import Linear, RMSNorm, Router

Operator = Callable[..., Tensor]
REPEATS = 10


@dataclass
class Case:
    """What an operator makes of rows in another order, or of the same once more: how many have other bits."""

    name: str
    rows: int
    moved: int
    repeated: int = 0

    @property
    def differs(self) -> bool:
        return bool(self.moved or self.repeated)

    def __str__(self) -> str:
        found = f"OTHER BITS in {self.moved} of {self.rows} rows, {self.repeated} in {REPEATS} repeats"
        return f"{self.name:66} {found if self.differs else 'the same bits'}"


def count_other(got: Tensor, want: Tensor) -> int:
    """The rows of [rows, ..] that have other bits."""
    return int((got != want).flatten(1).any(1).sum())


def captured(operator: Operator, example: tuple[Tensor, ...]) -> Operator:
    """The operator as a CUDA graph, for inputs like the example."""
    given = tuple(each.clone() for each in example)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        operator(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = operator(*given)

    def replay(*inputs: Tensor) -> Tensor:
        for own, each in zip(given, inputs, strict=True):
            own.copy_(each)
        graph.replay()
        return made.clone()

    return replay


def ways(operator: Operator, inputs: tuple[Tensor, ...], in_graph: bool) -> Iterator[tuple[str, Operator]]:
    """The operator as it is and, on a GPU, in a graph."""
    yield "", operator
    if in_graph and inputs[0].is_cuda:
        yield ", in a graph", captured(operator, inputs)


def moved(name: str, operator: Operator, inputs: tuple[Tensor, ...], batch: int, in_graph: bool) -> Iterator[Case]:
    """operator: tensors [rows, ..] to [rows, ..], where rows are those of ``batch`` prompts or requests."""
    for how, run in ways(operator, inputs, in_graph):
        want, case = run(*inputs), Case(name + how, 0, 0)
        for shift in sorted({1, batch // 2, batch - 1} - {0}):
            step = shift * (len(want) // batch)
            case.moved += count_other(run(*(each.roll(step, 0) for each in inputs)), want.roll(step, 0))
            case.rows += len(want)
        case.repeated = sum(count_other(run(*inputs), want) for _ in range(REPEATS))
        yield case


def dense(
    model: sizes.Sizes, rows: int, batch: int, decode: bool, dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    """The operators of a block on [rows, hidden]."""
    with device:
        x = torch.randn(rows, model.hidden).to(dtype)
        inner = torch.randn(rows, model.shared_inner).to(dtype)
    for name, given, outputs in (
        ("qkv", x, 3 * model.hidden), ("attention out", x, model.hidden), ("shared up", x, 2 * model.shared_inner),
        ("shared down", inner, model.hidden), ("head", x, model.vocabulary),
    ):  # fmt: skip
        with device:
            linear = Linear(given.shape[1], outputs).to(dtype)
        torch.nn.init.normal_(linear.weight, std=given.shape[1] ** -0.5)
        yield from moved(f"{name} [{rows}, {given.shape[1]}] x {outputs}", linear, (given,), batch, decode)
    with device:
        norm, router = RMSNorm(model.hidden), Router(model)
    torch.nn.init.normal_(router.weight, std=model.hidden**-0.5)
    yield from moved(f"norm [{rows}, {model.hidden}]", norm, (x,), batch, decode)
    yield from moved(f"router, weights [{rows}, {model.hidden}]", lambda x: router(x)[0], (x,), batch, decode)
    yield from moved(f"router, ids [{rows}, {model.hidden}]", lambda x: router(x)[1], (x,), batch, decode)


def grouped(
    model: sizes.Sizes, rows: int, local: int, decode: bool, dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    """The experts' GEMMs: rows of each expert alone, and in another order between and behind others."""
    with device:
        experts = Experts(local, model.hidden, model.expert_inner).to(dtype)
        x = torch.randn(rows, model.hidden).to(dtype)
    experts.grouped_mm = has_grouped_mm(device.type, dtype)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    most = rows // local // 8 * 8  # of an expert
    few = max(8, most // 2 // 8 * 8)
    ends = torch.arange(1, local + 1, device=device, dtype=torch.int32)
    own = x[: local * few].view(local, few, model.hidden)
    others = x[len(x) - local * (most - few) :].view(local, most - few, model.hidden)

    def packed(groups: Tensor) -> Tensor:
        return torch.cat([groups.flatten(0, 1), x.new_zeros(rows - local * groups.shape[1], model.hidden)])

    alone, among = packed(own), packed(torch.cat([others, own.flip(1)], 1))
    for how, run in ways(experts.packed, (alone, ends * few), decode):
        want = run(alone, ends * few)[: local * few]
        got = run(among, ends * most)[: local * most].view(local, most, -1)[:, most - few :].flip(1).flatten(0, 1)
        repeated = sum(count_other(run(alone, ends * few)[: local * few], want) for _ in range(REPEATS))
        name = f"experts, {rows} rows, {few} or {most} of each{how}"
        yield Case(name, len(want), count_other(got, want), repeated)


def attention(
    model: sizes.Sizes, batch: int, length: int, decode: bool, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """A sequence anywhere in the batch; in decoding with anything behind its last token."""
    shape = (batch, model.heads, length, model.hidden // model.heads)
    keys, values, queries = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    name = f"{'decode' if decode else 'prefill'} attention {list(shape)}"
    if not decode:
        yield from moved(
            name, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (queries, keys, values),
            batch, False,
        )  # fmt: skip
        return
    places = torch.arange(length, device=device)
    positions = torch.arange(batch, device=device) * (length - 1) // max(batch - 1, 1)

    def last_row(q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
        mask = (places <= last.unsqueeze(1))[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    inputs = queries[:, :, :1].contiguous(), keys, values, positions
    yield from moved(name, last_row, inputs, batch, True)
    is_behind = (places > positions.unsqueeze(1))[:, None, :, None]
    other = [torch.where(is_behind, torch.randn_like(each), each) for each in (keys, values)]
    got, want = last_row(inputs[0], *other, positions), last_row(*inputs)
    yield Case(f"{name}, other values behind the last", len(want), count_other(got, want))


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.moe_lm.bits", description=(__doc__ or " ").splitlines()[0]
    )
    for name, value in (("slots", 64), ("prefill-batch", 4), ("max-prompt", 512), ("max-length", 592)):
        parser.add_argument(f"--{name}", type=int, default=value)
    ranks.add_attention(parser)
    ranks.add_arguments(parser)
    sizes.add_arguments(parser)
    options = parser.parse_args(argv)
    ranks.choose_attention(options)
    kind, count = ranks.device_type(options), ranks.num_ranks(options)
    model, dtype, device = sizes.sizes_of(options, kind, count), sizes.dtype_of(options, kind), torch.device(kind)
    local, slots, batch = model.experts // count, options.slots, options.prefill_batch
    prompts = batch * options.max_prompt
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as the CPU ranks do: a second thread's scratch is aligned otherwise, which changes bits

    def cases() -> Iterator[Case]:
        for rows, of, decode in ((slots, slots, True), (prompts, batch, False), (batch, batch, False)):
            yield from dense(model, rows, of, decode, dtype, device)
        for tokens, decode in ((slots, True), (prompts, False)):
            rows = count * tokens * min(model.topk, local) + 8 * local
            yield from grouped(model, rows, local, decode, dtype, device)
        yield from attention(model, slots, options.max_length, True, device, dtype)
        yield from attention(model, batch, options.max_prompt, False, device, dtype)

    differs = False
    for case in cases():
        print(case, flush=True)
        differs |= case.differs
    return 1 if differs else 0


if __name__ == "__main__":
    raise SystemExit(main())
