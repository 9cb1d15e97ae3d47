"""Modes of torch around the operations: inference mode, autocast, memory that torch fills."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep.low_latency_ranks import small_case
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.gpus import needs_gpu


@contextlib.contextmanager
def _filled_memory() -> Iterator[None]:
    """torch's default for ``use_deterministic_algorithms``: it fills what ``torch.empty`` returns, with NaN or the
    largest number."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "inference": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "filled": lambda device: _filled_memory(),
}
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quant", [None, "fp8_ue8m0"])
@pytest.mark.parametrize("mode", MODES)
def test_results_under_a_mode_are_the_oracles(mode: str, quant: str | None, device: str) -> None:
    """Inside the mode, before and after; what was made inside works outside, and the other way round."""
    changes: dict[str, Any] = {"quant": quant, "rows_dtype": torch.float32, "hidden": 640}
    deepep, native = small_case(1, **changes), Expected(plain_case(1, **changes))
    with shared_buffer(ThreadGroup.make(1)[0], [deepep, native], device=device) as buffer:
        outside = deepep.send(buffer)[2]
        with MODES[mode](device):
            for staged in (False, True):
                native.run(buffer, staged=staged)
            for options in ({}, {"return_recv_hook": True}, {"async_finish": True}):
                received, counts, inside, event, hook = deepep.send(buffer, **options)
                if hook is not None:
                    hook()
                if event.event is not None:
                    event.current_stream_wait()
                deepep.check_received(0, received, counts, inside)
            scratch = deep_ep.Buffer.of(buffer).get_next_low_latency_combine_buffer(inside)
            for handle in (outside, inside):
                y, _, _ = deepep.send_back(buffer, handle)
                deepep.check_combine(y.cpu(), 0)
            status = torch.ones(1, dtype=torch.int32, device=device)
            deep_ep.Buffer.of(buffer).low_latency_query_mask_buffer(status)
            assert status.tolist() == [0]
        scratch.zero_()
        y, _, _ = deepep.send_back(buffer, inside)
        deepep.check_combine(y.cpu(), 0)
        native.run(buffer)


def _torch_calls(body: Callable[[], Any]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as run:
        body()
    return Counter(event.name for event in run.events() if event.name.startswith(("aten::", "nccl_ep::")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_modes_add_no_work(mode: str, device: str) -> None:
    """Torch is called for the same things: nothing is converted, and outputs are not filled before they are written."""
    case = small_case(1)
    x, ids = case.inputs[0].x.to(device), case.inputs[0].topk_idx.to(device)
    weights = torch.rand(ids.shape, device=device)
    with shared_buffer(ThreadGroup.make(1)[0], [case], device=device) as buffer:
        view = deep_ep.Buffer.of(buffer)

        def native() -> None:
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=2, max_tokens=8)
            nccl_ep.combine(out.x, out.handle)

        def deepep() -> None:
            rows, _, handle, _, _ = view.low_latency_dispatch(x, ids, 8, 2, use_fp8=False)
            view.low_latency_combine(rows, ids, weights, handle)
            _, _, handle, _, hook = view.low_latency_dispatch(x, ids, 8, 2, return_recv_hook=True)
            hook()

        for body in (native, deepep):
            body()  # the first has things to make
            plain = _torch_calls(body)
            with MODES[mode](device):
                within = _torch_calls(body)
            assert within == plain, f"{body.__name__}: {within - plain}, {plain - within}"
            assert sum(count for name, count in plain.items() if name.startswith("nccl_ep::")) >= 2


@pytest.mark.parametrize("device", DEVICES)
def test_filled_memory_changes_nothing_between_ranks(device: str) -> None:
    case = small_case(2, quant="fp8", hidden=640)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], device=device) as buffer:
            for staged in (False, True):
                case.run(buffer, staged=staged)

    with _filled_memory():
        run_ranks(2, body)
