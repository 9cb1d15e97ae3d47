"""Time in dispatch and combine from a profiler's trace: what counts, and what counts once."""

from __future__ import annotations

from typing import Any

import pytest

from examples.moe_lm.trace import Trace, kind_of
from tests.deep_ep.test_kernel_names import kernels_of_sources

LL, HT = "void ep::ll::(anonymous namespace)::", "void ep::ht::(anonymous namespace)::"


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def launched(number: int, at: float, kernel: str, ts: float, dur: float) -> list[dict[str, Any]]:
    """A launch on the host and its kernel."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, 1.0, correlation=number),
        event("kernel", kernel, ts, dur, tid=7, correlation=number, stream=7),
    ]


def test_an_exchange_lasts_from_its_first_kernel_to_its_last() -> None:
    events = [
        event("user_annotation", "baseline.dispatch", 0.0, 50.0),
        *launched(1, 10.0, "radixSort", 100.0, 5.0),
        *launched(2, 20.0, "ncclDevKernel_SendRecv", 200.0, 30.0),
        event("cpu_op", "aten::mm", 60.0, 5.0),
        *launched(3, 61.0, "nvjet_gemm", 240.0, 100.0),
    ]
    trace = Trace(events)
    (segment,) = trace.exchanges()
    assert (segment.begin, segment.end) == (100.0, 230.0)
    assert trace.exchange_ms() == pytest.approx(0.130)


def test_counts_that_are_on_the_host_between_two_ops_count() -> None:
    events = [
        event("cpu_op", "nccl_ep::ht_route", 0.0, 5.0), *launched(1, 1.0, f"{HT}dispatch_route<true>", 10.0, 4.0),
        event("cpu_op", "nccl_ep::ht_dispatch_routed", 20.0, 5.0), *launched(2, 21.0, f"{HT}dispatch_send", 30.0, 10.0),
        event("cpu_op", "nccl_ep::ht_combine", 40.0, 5.0), *launched(3, 41.0, f"{HT}combine_rows", 60.0, 10.0),
    ]  # fmt: skip
    assert [(each.begin, each.end) for each in Trace(events).exchanges()] == [(10.0, 40.0), (60.0, 70.0)]
    assert Trace(events).exchange_ms() == pytest.approx(0.040)


def test_kernels_of_a_graph_are_known_by_their_names() -> None:
    events = [
        event("kernel", f"{LL}dispatch<4>", 0.0, 5.0, stream=7),
        event("kernel", "flash_fwd", 6.0, 3.0, stream=7),
        event("kernel", f"{LL}combine<4>", 10.0, 4.0, stream=7),
        event("kernel", f"{LL}dispatch<4>", 12.0, 6.0, stream=8),  # two microseconds at the same time
        event("kernel", "cutlass::gemm", 20.0, 4.0, stream=7),
        event("kernel", f"{LL}combine<4>", 30.0, 4.0, stream=7),
    ]
    trace = Trace(events)
    assert trace.exchange_ms() == pytest.approx((5 + 8 + 4) / 1e3)
    layer = [(each["kind"], each["begin_us"]) for each in trace.layer(2, True)]
    assert layer == [
        ("dispatch", -2.0),
        ("GEMM", 6.0),
        ("combine", 16.0),
    ]
    assert len(trace.layer(1, True)) == 6


def test_nested_and_other_ops_do_not_count_twice() -> None:
    events = [
        event("user_annotation", "deep_ep.dispatch", 0.0, 50.0),
        event("cpu_op", "nccl_ep::ht_dispatch", 10.0, 20.0),
        event("cpu_op", "aten::sort", 35.0, 10.0),
        event("cpu_op", "nccl_ep::ll_combine", 60.0, 5.0),
    ]
    assert Trace(events).exchange_ms() == pytest.approx(0.055)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{HT}dispatch_send<false, 640>(ep::KernelArgs<ep::HtDispatchParams>)", "dispatch"),
        (f"{LL}combine<(ep::DType)0>(ep::KernelArgs<ep::LlCombineParams>)", "combine"),
        ("ncclDevKernel_SendRecv", "all_to_all"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("nvjet_hsh_128x256", "GEMM"),
        ("vectorized_elementwise_kernel", "other"),
    ],
)
def test_a_kernels_name_tells_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kernels_of_the_library_have_their_kinds() -> None:
    words = {
        "LlDispatch": "dispatch",
        "HtDispatch": "dispatch",
        "HtRoute": "dispatch",
        "LlCombine": "combine",
        "HtCombine": "combine",
    }
    found = set()
    for name, parameter in kernels_of_sources():
        if word := words.get(parameter.removesuffix("Params")):
            assert kind_of(name) == word, name
            found.add(parameter)
    assert len(found) == len(words)
