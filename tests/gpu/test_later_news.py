"""What a host hears of a GPU later: ids out of range at the next call, a recording's rows and times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.report.figures import figures
from nccl_ep.report.inputs import load
from tests.report import programs
from tests.report.programs import EXPERTS, HIDDEN, RANKS, SIZES, STEPS, TOKENS, TOPK
from tests.support.gpus import needs_gpu, on_gpu, ranks_on_gpus
from tests.support.processes import run_processes

pytestmark = needs_gpu


def sent(buffer: nccl_ep.Buffer, ids: torch.Tensor, mode: str) -> nccl_ep.DispatchOutput:
    x = torch.ones(len(ids), HIDDEN, device=ids.device).bfloat16()
    return nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS, mode=mode, layout="flat")


def pair(buffer: nccl_ep.Buffer, ids: torch.Tensor, mode: str) -> torch.Tensor:
    out = sent(buffer, ids, mode)
    return nccl_ep.combine(out.x, out.handle)


def expected(ids: torch.Tensor) -> torch.Tensor:
    """Each rank's row once, whatever its weight."""
    ranks = torch.where((ids >= 0) & (ids < EXPERTS), ids // (EXPERTS // RANKS), -1)
    counts = torch.stack([(ranks == rank).any(1) for rank in range(RANKS)]).sum(0)
    return counts[:, None].expand(-1, HIDDEN).bfloat16()


def run_wrong_ids(rank: int, mode: str) -> list[str]:
    """Rank 1 names experts that are none. It hears of it at its next call, which sends nothing, a combine or a
    dispatch; the others do not."""
    device, said = on_gpu(rank), []
    sizes: dict[str, Any] = {**SIZES, "device": device}
    with nccl_ep.Buffer.for_shapes(dist.group.WORLD, mode="auto", **sizes) as buffer:
        good = programs.ids_of(rank, 0).to(device)
        ids = good.clone()
        if rank == 1:
            ids[2, 1], ids[4, 0] = EXPERTS, -9
        for following in ("combine", "dispatch"):
            out = sent(buffer, ids, mode)
            torch.cuda.synchronize()  # so that the news is here before the next call
            if rank == 1:
                with pytest.raises(ValueError, match="expert ids out of range") as caught:
                    nccl_ep.combine(out.x, out.handle) if following == "combine" else sent(buffer, good, mode)
                said.append(str(caught.value))
            assert torch.equal(nccl_ep.combine(out.x, out.handle), expected(ids))
            assert torch.equal(pair(buffer, good, mode), expected(good))
            buffer.check()
    with nccl_ep.Buffer.for_shapes(dist.group.WORLD, mode="auto", on_invalid_ids="count", **sizes) as buffer:
        for _ in range(2):
            assert torch.equal(pair(buffer, ids, mode), expected(ids))
        torch.cuda.synchronize()
        assert buffer.stats()["invalid_ids"] == (4 if rank == 1 else 0)
        if rank == 1:
            with pytest.raises(ValueError, match="4 expert ids out of range"):
                buffer.check()
        buffer.check()
    return said


@ranks_on_gpus
@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_ids_out_of_range_raise_at_the_next_call(mode: str, tmp_path: Path) -> None:
    first, second = run_processes(RANKS, run_wrong_ids, tmp_path, mode, timeout=150.0)
    assert first == [] and len(second) == 2
    for said in second:
        assert "2 expert ids out of range" in said
        assert f"first is {EXPERTS} at token 2, k 1" in said or "first is -9 at token 4, k 0" in said


def run_recorded(rank: int, folder: Path, mode: str) -> None:
    device = on_gpu(rank)
    with (
        nccl_ep.record(folder),
        nccl_ep.Buffer.for_shapes(dist.group.WORLD, mode="auto", **{**SIZES, "device": device}) as buffer,
    ):
        x = torch.ones(TOKENS, HIDDEN, device=device).bfloat16()
        for step in range(STEPS):
            ids = programs.ids_of(rank, step).to(device)
            out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS, mode=mode, layout="packed")
            nccl_ep.combine(out.x, out.handle)
        torch.cuda.synchronize()
        buffer.check()


@ranks_on_gpus
@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_recording_has_the_rows_of_the_routing_and_times_of_the_device(mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    run_processes(RANKS, run_recorded, tmp_path, folder, mode, timeout=150.0)
    found = figures(load([folder]).recorded)
    rows = programs.counted_rows()
    assert found["sent"]["dispatch"]["rows"] == rows
    assert found["sent"]["combine"]["rows"] == [list(column) for column in zip(*rows, strict=True)]
    choices = [programs.counted_choices(step) for step in range(STEPS)]
    assert found["experts"] == [sum(each) for each in zip(*choices, strict=True)]
    for rank in range(RANKS):
        lines = [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        times = [line["device_us"] for line in lines if "in_buffer" in line]
        assert len(times) == 2 * STEPS and min(times) > 0
        assert TOPK == 3 and all(0 < sum(line["rows"]) <= TOKENS * RANKS for line in lines if "rows" in line)


def test_a_graph_is_recorded_once_and_not_changed(tmp_path: Path) -> None:
    """Of a capture the operations are written down without rows and times, and replays give the same sums."""
    sizes: dict[str, Any] = {**SIZES, "device": "cuda"}
    ids = programs.ids_of(0, 0).cuda()
    with nccl_ep.Buffer.for_shapes(None, **sizes) as buffer:
        want = pair(buffer, ids, "ll")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with nccl_ep.record(tmp_path):
            with torch.cuda.graph(graph):
                got = pair(buffer, ids, "ll")
            for _ in range(3):
                got.zero_()
                graph.replay()
                assert torch.equal(got, want)
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    captured = [line for line in lines if "in_buffer" in line]
    assert [line["operation"] for line in captured] == ["dispatch", "combine"]
    assert all(line["is_captured"] and "device_us" not in line for line in captured)
