"""The C library on a GPU beside what one call shows: captured in a CUDA graph, and with any number of SMs. The same
lines run on CPU ranks, where nothing is captured and num_sms changes nothing."""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nccl_ep.bootstrap import SoloRendezvous, rendezvous_of
from nccl_ep.testing import run_ranks
from tests.c import c_api
from tests.c.c_api import Library
from tests.c.case import CaseRun, run_case, tensor
from tests.c.ht_case import HtCaseRun, run_ht_case
from tests.ht.harness import HtPlan
from tests.support.expected import Expected, plain_case
from tests.support.gpus import NUM_SMS, WORLDS, captured, needs_gpu, num_replays, on_gpu, one_gpu_worlds, ranks_on_gpus
from tests.support.harness import synchronize
from tests.support.patience import PATIENCE
from tests.support.processes import run_processes

LAYOUTS = ("expert_major", "packed", "rank_major", "flat")
LL_WAYS = ("fused", "staged")
# Of high throughput: outputs in the arena, elsewhere, and elsewhere with the routing as a call of its own.
HT_WAYS = ("in place", "elsewhere", "routed")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


def replay_other_ids(library: Library, group: Any, layout: str, way: str, device: str) -> int:
    """A dispatch and its combine, captured once, replayed with other tokens, ids and weights in the same memory."""
    ranks, is_ht, staged = group.size(), way in HT_WAYS, way == "staged"
    capacity = 8 * ranks if layout == "expert_major" else None
    cases = [Expected(plain_case(ranks, layout=layout, capacity=capacity, seed=seed)) for seed in (1, 2)]
    if is_ht:
        arena = "ample" if way == "in place" else "none"
        plan = HtPlan(exact=False, arena=arena, rows_in_arena=False, extra=(), cached=(), given=False)
        run: CaseRun = HtCaseRun(library, cases[0], plan, group, device)
    else:
        run = CaseRun(library, cases[0], group, staged, device)
    rank, handle = run.rank, c.c_void_p()
    assert not torch.equal(cases[0].inputs[rank].topk_idx, cases[1].inputs[rank].topk_idx)

    def tensors_of(case: Expected) -> tuple[torch.Tensor, ...]:
        given = case.inputs[rank]
        return given.x, given.topk_idx, given.topk_weights, case.rows[rank]

    x, ids, weights, rows = memory = [run.move(each) for each in tensors_of(cases[0])]
    assert x is not None and ids is not None and weights is not None and rows is not None
    config = c_api.HandleConfig(layout=c_api.LAYOUTS[layout], capacity=capacity or 0)
    library.InitHandle(handle, run.group, config, None)
    library.UpdateHandle(handle, tensor(ids))
    last: dict[str, Any] = {}

    def work() -> None:
        info = run.route(handle) if way == "routed" and isinstance(run, HtCaseRun) else None
        inputs = c_api.DispatchInputs(tokens=tensor(x), topk_weights=tensor(weights))
        last["made"] = run.run_dispatch(handle, inputs, c_api.DispatchConfig(send_only=staged))
        if info is not None:
            last["made"]["info"] = info
        run.finish(handle, [x, ids, weights])
        last["home"] = run.bring_home(handle, rows)

    replay, replays = captured(work, device), num_replays(6)
    for number in range(replays):
        want = cases[(number + 1) % 2]
        for mine, theirs in zip(memory, tensors_of(want), strict=True):
            mine.copy_(theirs)
        replay()
        synchronize(torch.device(device))
        library.Check(run.group)  # its error says more than a difference does
        want.check_dispatch(run.output(last["made"]), rank)
        want.check_combine(last["home"].cpu(), rank)
    if isinstance(run, HtCaseRun):
        calls = replays + (device != "cpu")  # and one before the capture
        assert run.info().num_staged_dispatches == (0 if way == "in place" else calls)
        run.free()
    library.HandleDestroy(handle)
    library.GroupDestroy(run.group)
    return replays


def replay_over_nccl(rank: int, library_file: Path, ways: tuple[str, ...]) -> int:
    on_gpu(rank)
    library, group = Library(library_file), rendezvous_of(dist.group.WORLD)
    return sum(replay_other_ids(library, group, layout, way, "cuda") for layout in LAYOUTS for way in ways)


@on_devices
@pytest.mark.parametrize("way", LL_WAYS + HT_WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_of_one_rank_follows_new_ids(library: Library, layout: str, way: str, device: str) -> None:
    assert replay_other_ids(library, SoloRendezvous(), layout, way, device) > 0


@pytest.mark.parametrize("way", LL_WAYS + HT_WAYS)
def test_the_same_calls_work_for_ranks_on_the_cpu(library: Library, way: str) -> None:
    run_ranks(3, lambda group: replay_other_ids(library, group, "flat", way, "cpu"))


@pytest.mark.gpu
@ranks_on_gpus
@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("ways", [LL_WAYS, HT_WAYS], ids=["ll", "ht"])
def test_graphs_of_ranks_in_processes_follow_new_routing(
    library_file: Path, ways: Any, num_ranks: int, tmp_path: Path
) -> None:
    got = run_processes(num_ranks, replay_over_nccl, tmp_path, library_file, ways, timeout=2 * PATIENCE)
    assert got == [len(LAYOUTS) * len(ways) * num_replays(6)] * num_ranks


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[*needs_gpu, one_gpu_worlds])])
@pytest.mark.parametrize("num_sms", NUM_SMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_of_sms_gives_the_oracles_bits(library: Library, layout: str, num_sms: int, device: str) -> None:
    case = plain_case(2, layout=layout)
    for staged in (False, True):
        run_case(library, Expected(case), staged=staged, device=device, num_sms=num_sms)
    run_ht_case(library, case, device=device, num_sms=num_sms)
