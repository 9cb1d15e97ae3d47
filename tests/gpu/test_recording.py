"""What nccl_ep.record writes of operations on GPUs, beside what the routing says."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.testing import ThreadGroup
from tests.support.gpus import busy, needs_gpu, on_gpu, ranks_on_gpus
from tests.support.processes import run_processes

pytestmark = needs_gpu

TOKENS, HIDDEN, TOPK, LOCAL_EXPERTS = 200, 256, 5, 6  # top-k that does not divide a warp
MANY = 700  # operations: more than a recording has entries to begin with, or writes at a time


def ids_of(rank: int, ranks: int, step: int) -> torch.Tensor:
    """[T, K], each expert once; some choices are none."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.rand(TOKENS, ranks * LOCAL_EXPERTS, generator=random).topk(TOPK)[1]
    return ids.where(torch.rand(TOKENS, TOPK, generator=random) < 0.8, -1)


def counted(ids: torch.Tensor, ranks: int) -> tuple[list[int], list[int], list[int]]:
    """Rows to each rank where a token goes there once, where each choice is a row, and choices of each expert."""
    tokens = ids.tolist()
    owners = [[expert // LOCAL_EXPERTS for expert in each if expert >= 0] for each in tokens]
    rows = [sum(rank in each for each in owners) for rank in range(ranks)]
    per_choice = [sum(each.count(rank) for each in owners) for rank in range(ranks)]
    return rows, per_choice, [sum(each.count(expert) for each in tokens) for expert in range(ranks * LOCAL_EXPERTS)]


def buffer_of(group: Any, ranks: int, device: torch.device) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=ranks * LOCAL_EXPERTS, mode="auto",
        device=device, late_weights=True,
    )  # fmt: skip


def lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
    assert "recording_ended_ns" in lines[-1]
    return [line for line in lines if "in_buffer" in line]


def check_lines(lines: list[dict[str, Any]], steps: list[tuple[str, torch.Tensor]], ranks: int) -> None:
    """Of a dispatch and a combine of each step, in this order."""
    assert len(lines) == 2 * len(steps)
    for (mode, ids), dispatch, combine in zip(steps, lines[::2], lines[1::2], strict=True):
        prefix = "ht " if mode == "ht" else ""
        assert (dispatch["operation"], combine["operation"]) == (f"{prefix}dispatch", f"{prefix}combine")
        rows, _, choices = counted(ids, ranks)
        assert (dispatch["rows"], dispatch["choices"]) == (rows, choices)
        assert combine["rows"] == rows and "choices" not in combine
        assert dispatch["device_us"] > 0 and combine["device_us"] > 0
    for mode in ("ht", "ll"):
        numbers = [line["number"] for line in lines[::2] if line["operation"].startswith("ht") == (mode == "ht")]
        assert all(later == earlier + 1 for earlier, later in pairwise(numbers))


def exchange(buffer: nccl_ep.Buffer, ids: torch.Tensor, experts: int, mode: str) -> None:
    x = torch.ones(TOKENS, HIDDEN, device=ids.device, dtype=torch.bfloat16)
    layout = "flat" if mode == "ht" else "packed"
    out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=experts, mode=mode, layout=layout)
    nccl_ep.combine(out.x, out.handle)


def many_operations(group: Any, rank: int, ranks: int, device: torch.device, folder: Path) -> None:
    """Of both modes on two streams; ids are overwritten at once."""
    experts, streams = ranks * LOCAL_EXPERTS, [torch.cuda.Stream(device), torch.cuda.Stream(device)]
    steps = [(("ll", "ht")[step // 3 % 2], ids_of(rank, ranks, step % 20)) for step in range(MANY // 2)]
    given = [ids.to(torch.int32 if step % 2 else torch.int64).to(device) for step, (_, ids) in enumerate(steps)]
    with buffer_of(group, ranks, device) as buffer:
        for mode in ("ll", "ht"):
            exchange(buffer, given[0].clone(), experts, mode)
        torch.cuda.synchronize()
        with nccl_ep.record(folder):
            busy(100)  # the host is ahead
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            for step, ((mode, _), ids) in enumerate(zip(steps, given, strict=True)):
                with torch.cuda.stream(streams[step // 5 % 2]):
                    exchange(buffer, ids, experts, mode)
                    ids.fill_(-1)
        torch.cuda.synchronize()
    check_lines(lines_of(folder, rank), steps, ranks)


def captured_operations(group: Any, rank: int, ranks: int, device: torch.device, folder: Path) -> None:
    experts, ids = ranks * LOCAL_EXPERTS, ids_of(rank, ranks, 0)
    given = ids.to(device)
    with buffer_of(group, ranks, device) as buffer:
        for mode in ("ll", "ht"):
            exchange(buffer, given, experts, mode)
        torch.cuda.synchronize()
        with nccl_ep.record(folder):
            exchange(buffer, given, experts, "ht")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                exchange(buffer, given, experts, "ht")
                exchange(buffer, given, experts, "ll")
            for _ in range(3):
                graph.replay()
            exchange(buffer, given, experts, "ll")
        del graph
        torch.cuda.synchronize()
    lines = lines_of(folder, rank)
    captured = lines[2:6]
    assert [line["operation"] for line in captured] == ["ht dispatch", "ht combine", "dispatch", "combine"]
    for line in captured:
        assert line["is_captured"] and not {"rows", "choices", "device_us"} & set(line)
    check_lines(lines[:2] + lines[6:], [("ht", ids), ("ll", ids)], ranks)


def other_operations(group: Any, rank: int, ranks: int, device: torch.device, folder: Path) -> None:
    """Split, cached, of exact sizes, without tokens; weights that home ranks apply make each choice a row."""
    experts, ids = ranks * LOCAL_EXPERTS, ids_of(rank, ranks, 0)
    given, x = ids.to(device), torch.ones(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    weights = torch.ones(TOKENS, TOPK, device=device)
    with buffer_of(group, ranks, device) as buffer, nccl_ep.record(folder):
        out = nccl_ep.dispatch_send(x, given, buffer=buffer, num_experts=experts).receive()
        nccl_ep.combine_send(out.x, out.handle, weights=weights).receive()
        exact = nccl_ep.dispatch(
            x, given, buffer=buffer, num_experts=experts, mode="ht", layout="flat", capacity="exact"
        )
        nccl_ep.dispatch_cached(x, exact.handle)
        nccl_ep.combine_weights(torch.ones(out.weights.shape, device=device), out.handle)
        nccl_ep.dispatch(x[:0], given[:0], buffer=buffer, num_experts=experts)
        torch.cuda.synchronize()
    lines = lines_of(folder, rank)
    assert [line["operation"] for line in lines] == [
        "dispatch send", "dispatch receive", "combine send", "combine receive", "ht route", "ht send",
        "ht cached dispatch", "combine_weights", "dispatch",
    ]  # fmt: skip
    rows, per_choice, choices = counted(ids, ranks)
    none = [0] * ranks
    assert [line.get("rows") for line in lines[:7]] == [rows, None, per_choice, None, None, rows, rows]
    assert lines[8]["rows"] == none and lines[8]["choices"] == [0] * experts
    assert [line.get("choices") for line in lines[:7]] == [choices, None, None, None, None, choices, choices]
    assert all(line["device_us"] > 0 for line in lines)


def failed_operations(group: Any, rank: int, ranks: int, device: torch.device, folder: Path) -> None:
    """One that the host refuses before it is on its stream leaves those around it as they are."""
    ids = ids_of(rank, ranks, 0)
    with buffer_of(group, ranks, device) as buffer:
        with nccl_ep.record(folder):
            exchange(buffer, ids.to(device), ranks * LOCAL_EXPERTS, "ht")
            with pytest.raises((ValueError, RuntimeError)):
                nccl_ep.dispatch(
                    torch.ones(TOKENS + 1, HIDDEN, device=device, dtype=torch.bfloat16),
                    ids.new_zeros(TOKENS + 1, TOPK).to(device), buffer=buffer, num_experts=ranks * LOCAL_EXPERTS,
                    mode="ht", layout="flat",
                )  # fmt: skip
            exchange(buffer, ids.to(device), ranks * LOCAL_EXPERTS, "ll")
        torch.cuda.synchronize()
    check_lines(lines_of(folder, rank), [("ht", ids), ("ll", ids)], ranks)


PROGRAMS = [many_operations, captured_operations, other_operations, failed_operations]
programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)


@programs
def test_a_recording_of_one_rank(program: Any, tmp_path: Path) -> None:
    program(ThreadGroup.make(1)[0], 0, 1, torch.device("cuda", 0), tmp_path / "made")


def _in_process(rank: int, program: Any, folder: Path) -> None:
    program(rendezvous_of(dist.group.WORLD), rank, dist.get_world_size(), on_gpu(rank), folder)


@ranks_on_gpus
@programs
def test_a_recording_of_ranks_on_gpus(program: Any, tmp_path: Path) -> None:
    run_processes(2, partial(_in_process, program=program, folder=tmp_path / "made"), tmp_path)
