"""Pictures of the layer's traces: which bar is what, and that both ways share their microseconds."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import nccl_ep
from examples.overlapped_moe import time_line
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.layer import MoeLayer
from examples.overlapped_moe.time_line import COMBINE, DISPATCH, FIRST, GRADIENTS, OTHER, SECOND, WAIT
from nccl_ep.testing import ThreadGroup
from tests import ROOT
from tests.deep_ep.test_kernel_names import kernels_of_sources

HT = "void ep::ht::(anonymous namespace)::"
SEND, ROWS = f"{HT}dispatch_send<false, 640>(ep::KernelArgs<ep::HtDispatchParams>)", f"{HT}combine_rows<4>(...)"
GEMM, WEIGHTS = "grouped_gemm_kernel", "grouped_weight_gradient_kernel"
CURRENT, COMM = 7, 23
# Name, stream, begin and how long it takes in us, in the order of launches.
ONE_BEHIND = [
    (SEND, COMM, 0.0, 400.0), (GEMM, CURRENT, 410.0, 2000.0), (GEMM, CURRENT, 2411.0, 1000.0),
    (ROWS, COMM, 3420.0, 380.0),
]  # fmt: skip
OVERLAPPED = [
    (SEND, COMM, 0.0, 900.0), ("begin", CURRENT, 1.0, 2.0), (GEMM, CURRENT, 5.0, 2300.0), (GEMM, COMM, 901.0, 1400.0),
    (GEMM, CURRENT, 2306.0, 1000.0), (ROWS, COMM, 3310.0, 380.0),
]  # fmt: skip
BACKWARD = [(SEND, COMM, 0.0, 400.0), (GEMM, CURRENT, 410.0, 900.0), (GEMM, CURRENT, 1311.0, 800.0),
            (ROWS, COMM, 2115.0, 300.0), (WEIGHTS, CURRENT, 2113.0, 1500.0)]  # fmt: skip
Kernels = list[tuple[str, int, float, float]]


def trace(path: Path, has_driver: bool = True, **passes: Kernels) -> Path:
    """As torch 2.11 exports it: ranges and launches of the host, kernels of the GPU with the same correlation. Triton
    launches by the driver."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python3"}, "ts": 1.0},
        {"ph": "i", "name": "Record Window End", "ts": 9e6, "pid": "", "tid": "", "s": "g"},
    ]  # fmt: skip
    host, gpu, correlation = 7e6, 7.0005e6, 30
    for name, kernels in ({"warm-up": ONE_BEHIND} | passes).items():
        about = {"ph": "X", "pid": 100, "tid": 100}
        events.append(about | {"cat": "user_annotation", "name": name, "ts": host, "dur": 1000.0, "args": {}})
        events.append(about | {"cat": "cpu_op", "name": "nccl_ep::ht_dispatch", "ts": host + 2, "dur": 5.0})
        for number, (kernel, stream, begin, length) in enumerate(kernels):
            correlation += 1
            driver = kernel in (GEMM, WEIGHTS)
            if has_driver or not driver:
                events.append(about | {
                    "cat": "cuda_driver" if driver else "cuda_runtime", "ts": host + 10 * number, "dur": 4.0,
                    "name": "cuLaunchKernelEx" if driver else "cudaLaunchKernelExC",
                    "args": {"External id": 3, "correlation": correlation},
                })  # fmt: skip
            events.append({
                "ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": stream, "ts": gpu + begin, "dur": length,
                "args": {"External id": 3, "stream": stream, "correlation": correlation, "grid": [132, 1, 1]},
            })  # fmt: skip
        host, gpu = host + 5000.0, gpu + 5000.0  # the kernels of a pass may run when the next is launched
    text = json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": events[::-1]})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def kinds(bars: list[time_line.Bar]) -> list[tuple[str, int, float, float]]:
    return [(bar.kind, bar.stream, bar.begin, bar.end) for bar in bars]


@pytest.mark.parametrize(("name", "has_driver"), [("trace.json.gz", True), ("trace.json", True), ("trace.json", False)])
def test_bars_are_the_kernels_of_a_pass(tmp_path: Path, name: str, has_driver: bool) -> None:
    """Also where the profiler left launches out."""
    found = time_line.passes(time_line.load(trace(tmp_path / name, has_driver, forward=OVERLAPPED, backward=BACKWARD)))
    assert kinds(found["forward"]) == [
        (DISPATCH, COMM, 0.0, 900.0), (OTHER, CURRENT, 1.0, 3.0), (FIRST, CURRENT, 5.0, 2305.0),
        (FIRST, COMM, 901.0, 2301.0), (SECOND, CURRENT, 2306.0, 3306.0), (COMBINE, COMM, 3310.0, 3690.0),
    ]  # fmt: skip
    if has_driver:  # the last launch was one
        assert [bar.kind for bar in found["backward"]] == [DISPATCH, FIRST, SECOND, GRADIENTS, COMBINE]
    assert list(time_line.passes(time_line.load(trace(tmp_path / name, forward=OVERLAPPED)))) == ["forward"]


def test_a_lane_has_what_its_stream_waits(tmp_path: Path) -> None:
    found = time_line.passes(time_line.load(trace(tmp_path / "trace.json", forward=ONE_BEHIND)))
    comm, current = time_line.lanes(found["forward"])
    assert kinds(comm) == [(DISPATCH, COMM, 0, 400), (WAIT, COMM, 400, 3420), (COMBINE, COMM, 3420, 3800)]
    assert [bar.kind for bar in current] == [FIRST, SECOND]  # 1 us between two kernels is no wait


def test_the_library_s_kernels_are_known() -> None:
    words = {"LlDispatch": DISPATCH, "HtDispatch": DISPATCH, "HtRoute": DISPATCH, "LlCombine": COMBINE,
             "HtCombine": COMBINE}  # fmt: skip
    found = [
        (name, words[key]) for name, parameter in kernels_of_sources() for key in words if parameter.startswith(key)
    ]
    assert len({kind for _, kind in found}) == 2
    for name, kind in found:
        assert time_line._kind({"name": name}, None) == kind, name
    for file, kernel in (("gemm.py", GEMM), ("weight_gradients.py", WEIGHTS)):
        assert f"def {kernel}(" in (ROOT / "examples/overlapped_moe" / file).read_text()


def test_a_picture_has_both_ways_over_one_axis(tmp_path: Path) -> None:
    one = trace(tmp_path / "one.json.gz", forward=ONE_BEHIND, backward=BACKWARD)
    other = trace(tmp_path / "other.json.gz", forward=OVERLAPPED, backward=BACKWARD)
    time_line.make(one, other, tmp_path / "made.svg", title="HT & 4,096 tokens")
    text = (tmp_path / "made.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert float(root.attrib["width"]) <= 900
    shown = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    for word in ("HT & 4,096 tokens", "forward", "backward", *time_line.WAYS, DISPATCH, FIRST, SECOND, COMBINE, WAIT,
                 GRADIENTS, "3,800", "3,690", "3,613", "µs", "500"):  # fmt: skip
        assert word in shown, word
    assert shown.count("3,000") == 2  # on the axis of each pass
    legend = [each for each in root.iter("{http://www.w3.org/2000/svg}text") if each.attrib["y"] == "58"]
    begins = [float(each.attrib["x"]) for each in legend]
    assert len(legend) == 7 and begins[-1] + 7.7 * len(WAIT) < 880
    for each, begin, following in zip(legend, begins, begins[1:], strict=False):  # DejaVu Sans takes 7.7 a letter
        assert begin + 7.7 * len(str(each.text)) + 14 <= following - 6, each.text
    bars = re.findall(r'<g>\n<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)".*?<title>(.*?)</title>', text, re.DOTALL)
    scale = (880 - time_line._LEFT - time_line._RIGHT) / 3800  # of the longest of all
    for about, begin, length in (
        ("dispatch: 400.0 µs from 0.0", 0, 400),
        ("second GEMM: 1,000.0 µs from 2,306.0", 2306, 1000),
    ):
        ((x, width),) = [(float(x), float(w)) for x, w, each in bars if each.startswith(about)][:1]
        assert x == pytest.approx(time_line._LEFT + begin * scale, abs=0.1)
        assert width == pytest.approx(length * scale, abs=0.1)


def test_the_small_trace_has_both_ways_from_0_on(tmp_path: Path) -> None:
    one = trace(tmp_path / "one.json.gz", forward=ONE_BEHIND)
    other = trace(tmp_path / "other.json.gz", forward=OVERLAPPED)
    time_line.make(one, other, tmp_path / "made.svg", title="")
    path = tmp_path / "made.json.gz"
    assert path.stat().st_size < 2000
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert list(names.values()) == ["forward, one step behind the other", "forward, overlapped"]
    bars = [each for each in events if each["ph"] == "X"]
    assert len(bars) == len(ONE_BEHIND) + len(OVERLAPPED)
    assert {pid: min(each["ts"] for each in bars if each["pid"] == pid) for pid in names} == dict.fromkeys(names, 0)
    assert bars[0]["args"]["kernel"] == SEND and bars[0]["tid"] == COMM


def test_a_thousand_kernels_stay_small(tmp_path: Path) -> None:
    many: Kernels = [(SEND + "x" * 400, COMM, 10.0 * n, 7.123 + n % 13) for n in range(1000)]
    path = trace(tmp_path / "many.json.gz", forward=many, backward=many)
    time_line.make(path, path, tmp_path / "made.svg", title="")
    assert (tmp_path / "made.json.gz").stat().st_size < 200_000


def test_a_trace_of_cpu_ranks(tmp_path: Path) -> None:
    """Of torch's profiler itself."""
    path = tmp_path / "cpu.json.gz"
    with nccl_ep.Buffer.for_shapes(
        ThreadGroup.make(1)[0], max_tokens=20, hidden=64, topk=2, num_experts=3, mode="ht", device="cpu"
    ) as buffer:
        layer = MoeLayer(
            buffer, Experts.random(3, 64, 32, "cpu"), num_experts=3, max_tokens=20, topk=2, rows_per_block=8
        )
        x, ids = torch.randn(20, 64).bfloat16(), torch.tensor([[0, 2]]).repeat(20, 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            layer(x, ids, torch.ones(20, 2), overlaps=False)
            with torch.profiler.record_function("forward"):
                layer(x, ids, torch.ones(20, 2), overlaps=False)
        profile.export_chrome_trace(str(path))
    bars = time_line.passes(time_line.load(path))["forward"]
    found = [bar.kind for bar in bars]
    assert found.count(DISPATCH) >= 1 and found.count(COMBINE) >= 1
    assert found.index(DISPATCH) < found.index(COMBINE) and bars[0].begin == 0.0
    assert all(bar.end > bar.begin for bar in bars)
    time_line.make(path, path, tmp_path / "cpu.svg", title="CPU ranks")
    ElementTree.fromstring((tmp_path / "cpu.svg").read_text(encoding="utf-8"))


def test_a_trace_without_a_layer_is_told(tmp_path: Path) -> None:
    path = trace(tmp_path / "none.json")
    with pytest.raises(ValueError, match="no range is named forward or backward"):
        time_line.make(path, path, tmp_path / "made.svg", title="")
    assert not (tmp_path / "made.svg").exists()


def test_ticks_are_round() -> None:
    assert [time_line.step_of(each) for each in (9.0, 13.0, 3800.0, 24001.0)] == [1.0, 2.0, 500.0, 5000.0]
