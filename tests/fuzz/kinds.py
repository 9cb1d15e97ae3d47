"""What one round of the fuzz does: everything follows from its seed."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nccl_ep
from nccl_ep import reference
from nccl_ep.testing import run_ranks
from tests.gpu.handles import change_handle, num_parts, use_handle
from tests.gpu.layers import LAYOUTS, layer, layer_buffer
from tests.ht.harness import check_ht_case
from tests.support.cases import Case, generate
from tests.support.expected import Expected, expected_cases, run_case, shared_buffer
from tests.support.harness import check_case
from tests.support.processes import run_processes

_MOST_RANKS = 8  # of threads that share the cores


def _case(seed: int) -> Case:
    """The first generated one from there on that few ranks have."""
    return next(case for case in map(generate, range(seed * 16, seed * 16 + 16)) if case.num_ranks <= _MOST_RANKS)


def _network(seed: int) -> int:
    return seed % 1000 + 1


def low_latency(seed: int) -> None:
    """Fused and split, over one domain and several."""
    check_case(_case(seed), staged=seed % 2 == 1, network_seed=_network(seed))


def high_throughput(seed: int) -> None:
    """Exact sizes, extra tensors, cached payloads, tensors in the arena and beside it."""
    check_ht_case(_case(seed), network_seed=_network(seed))


def extra(seed: int) -> None:
    """Extra tensors of both modes lie where the rows of x do, and give the same bits."""
    rng = random.Random(f"extra {seed}")
    ranks, layout = rng.choice([1, 2, 3, 4]), rng.choice(reference.LAYOUTS)
    domains = [size for size in range(1, ranks + 1) if ranks % size == 0]
    how: dict[str, Any] = {"num_experts": 2 * ranks, "layout": layout}
    if layout != "rank_major":
        how["capacity"] = rng.choice([1, 5, 24 * ranks])
    topk, sizes = rng.randint(1, 4), [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
    given = rng.choice([None, "fp8", "scales"])
    domain = rng.choice(domains)

    def body(group: Any) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(seed * 64 + group.rank())
        tokens = int(torch.randint(0, 7, (1,), generator=made))
        x = torch.randn(tokens, 32, generator=made).to(torch.bfloat16)
        ids = torch.randint(-2, 2 * ranks + 1, (tokens, topk), generator=made)
        weights = torch.rand(tokens, topk, generator=made)
        more = [torch.randint(-(1 << 31), 1 << 31, (tokens, 4 * size), generator=made).int() for size in sizes]
        beside = {"quant": "fp8"} if given == "fp8" else {"scales": torch.rand(tokens, 3)} if given == "scales" else {}
        seen: list[torch.Tensor] = []
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=6, hidden=32, topk=topk, num_experts=2 * ranks, device="cpu", mode="auto",
            domain_size=domain, network_seed=_network(seed), scale_bytes=512, timeout=60.0, on_invalid_ids="count",
        ) as buffer:  # fmt: skip
            for mode in ("ll", "ht"):
                out = nccl_ep.dispatch(
                    x, ids, weights, buffer=buffer, mode=mode, extra=more, zero_padding=True, **beside, **how
                )
                seen += [out.x.view(torch.uint8), out.weights, out.counts, *out.extra]
        half = len(seen) // 2
        assert all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True)), f"extra {seed}"
        return seen

    run_ranks(ranks, body)


def handles(seed: int) -> None:
    """Whatever a handle holds, an operation ends, and reaches nothing else: the next buffer works."""
    rng = random.Random(f"handles {seed}")
    ranks, layout, mode = rng.choice([1, 2, 4]), rng.choice(LAYOUTS), rng.choice(["ll", "ht"])
    steps = ["sums", "scalars"] + ["cached"] * (mode == "ht")
    steps += ["dispatch", "home"] * (layout in ("packed", "expert_major"))
    step, domain = rng.choice(steps), rng.choice([None, 1])
    case = layer(ranks, layout, seed, domain_size=domain)

    def body(group: Any) -> None:
        made = torch.Generator().manual_seed(seed * 64 + group.rank())
        with layer_buffer(case.case, group, "cpu", mode=mode) as buffer:
            out = case.send(buffer, mode=mode)
            part = int(torch.randint(num_parts(out.handle), (1,), generator=made))
            buffer.set_timeout(0.1)
            with contextlib.suppress(nccl_ep.TimeoutError, ValueError):
                use_handle(step, case, buffer, out, change_handle(out.handle, part, made))
        with layer_buffer(case.case, group, "cpu", mode=mode) as buffer:
            case.check_dispatch(case.send(buffer, mode=mode), group.rank())

    run_ranks(ranks, body)


def _in_process(rank: int, seed: int, ranks: int, domain: int) -> None:
    import torch.distributed as dist

    cases = expected_cases(4, num_ranks=ranks, domain_size=domain, first=seed % 100_000)
    with shared_buffer(dist.group.WORLD, cases, domain_size=domain, network_seed=_network(seed)) as buffer:
        for case in cases:
            run_case(case, buffer)
    plain = Expected(dataclasses.replace(layer(ranks, LAYOUTS[seed % 4], seed).case, domain_size=domain))
    with layer_buffer(plain.case, dist.group.WORLD, "cpu", network_seed=_network(seed)) as buffer:
        plain.check_dispatch(plain.send(buffer), rank)


def processes(seed: int) -> None:
    """Ranks that are processes, both modes."""
    rng = random.Random(f"processes {seed}")
    ranks = rng.choice([2, 4])
    with tempfile.TemporaryDirectory() as folder:
        run_processes(ranks, _in_process, Path(folder), seed, ranks, rng.choice([1, 2, ranks]))


KINDS: dict[str, Callable[[int], None]] = {
    each.__name__: each for each in (low_latency, high_throughput, extra, handles, processes)
}
