"""Requests that arrive at random, from a seed, and what they saw of the server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .data import Corpus


@dataclass
class Request:
    """``arrival``: seconds from the start. ``home``: the rank that serves it. ``times``: of its tokens, likewise.

    ``refused``: why the server has not served it.
    """

    number: int
    arrival: float
    home: int
    prompt: Tensor
    length: int  # tokens to generate
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # [vocabulary] each, if the engine keeps them
    cache: list[int] = field(default_factory=list)  # likewise a digest a layer of what prefill has left
    refused: str | None = None

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.length


def make_load(
    count: int, rate: float, num_ranks: int, *, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0
) -> list[Request]:
    """``rate`` requests a second on average, with exponential gaps (0: all at once); lengths are uniform in the ranges.

    Homes go round. The same seed gives the same prompts at every rate and on any number of ranks.
    """
    draw = torch.Generator().manual_seed(seed)
    corpus = Corpus(seed)
    prompts = torch.randint(prompt[0], prompt[1] + 1, (count,), generator=draw).tolist()
    outputs = torch.randint(output[0], output[1] + 1, (count,), generator=draw).tolist()
    gaps = -torch.rand(count, generator=draw).clamp(min=1e-9).log()
    arrivals = (gaps / rate).cumsum(0).tolist() if rate > 0 else [0.0] * count
    return [
        Request(number, arrivals[number], number % num_ranks, corpus.prompt(number, prompts[number]), outputs[number])
        for number in range(count)
    ]


def percentile(values: list[float], share: float) -> float | None:
    """None of no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


def summary(requests: list[Request], seconds: float) -> dict[str, Any]:
    """In ms. TTFT: from arrival to the first token. TPOT: of a request, the mean time of a token after the first.

    ITL: between any two tokens of a request. A figure that no request has is None.
    """
    served = [each for each in requests if each.times]
    first = [(each.times[0] - each.arrival) * 1e3 for each in served]
    gaps = [(b - a) * 1e3 for each in served for a, b in zip(each.times, each.times[1:], strict=False)]
    per_token = [
        (each.times[-1] - each.times[0]) * 1e3 / (len(each.times) - 1) for each in served if len(each.times) > 1
    ]
    tokens = sum(len(each.tokens) for each in served)
    refused = [each for each in requests if each.refused]
    figures: dict[str, Any] = {
        "requests": len(requests),
        "refused": {each.number if type(each.number) is int else repr(each.number): each.refused for each in refused},
        "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / max(seconds, 1e-9),
    }  # fmt: skip
    for name, values in (("ttft", first), ("tpot", per_token), ("itl", gaps)):
        figures |= {f"{name}_p50_ms": percentile(values, 0.5), f"{name}_p99_ms": percentile(values, 0.99)}
    return figures


# What is shown in place of an exchange's name: DeepEP itself does not run here.
HEADS = {"deep_ep": "DeepEP's calls over nccl_ep"}


def show(figure: float | None, digits: int) -> str:
    """A figure of ``summary`` for people."""
    return "-" if figure is None else f"{figure:.{digits}f}"
