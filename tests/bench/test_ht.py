"""The benchmark of high throughput on CPU ranks: records, what it notices, text and pictures."""

import json
import os
import re
import subprocess
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from bench import (
    configuration,
    floors,
    ht_configuration,
    measure,
    operations,
    options,
    overlap,
    plot,
    records,
    table,
    workload,
)
from bench.__main__ import main as bench_main
from bench.workload import Shape
from bench.world import Skipped
from nccl_ep import reference
from nccl_ep.testing import ThreadGroup, run_ranks
from tests import ROOT
from tests.bench.test_bench import gpu_record, run, shape

FIELDS = [*records.FIELDS, "cached", "alignment", "placement"]


def ht_shape(layout: str = "flat", **changed: Any) -> Shape:
    alignment = 8 if layout == "packed" else 1
    return shape(**{"num_ranks": 2, "layout": layout, "mode": "ht", "alignment": alignment, **changed})


def ht_buffer(given: Shape, group: Any, arena_bytes: int | None) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=given.tokens, hidden=given.hidden, topk=given.topk, num_experts=given.num_experts, mode="ht",
        arena_bytes=arena_bytes, device="cpu",
    )  # fmt: skip


# ---- From end to end


def test_ht_records_all_figures_on_cpu_ranks(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.json"
    shown = run(
        "-m", "bench", "ht", "--device", "cpu", "--tokens", "3,8", "--iterations", "2", "--dtype", "bf16",
        "--cached", "--staged", "--json", str(path), "--figures", "event,host,memory",
    )  # fmt: skip
    found = json.loads(path.read_text())
    for record in found:
        assert list(record) == FIELDS and record["bench"] == "ht" and record["value"] >= 0
        if record["system"] == "nccl_ep":
            assert record["alignment"] == (8 if record["layout"] == "packed" else 1)
    mine = [r for r in found if r["system"] == "nccl_ep" and r["unit"] == "us"]
    names = ("api", "op", "figure", "tokens", "layout", "cached", "placement")
    keys = {tuple(record[name] for name in names) for record in mine}
    assert len(keys) == len(mine)
    expected = {
        (api, op, figure, tokens, layout, cached, placement)
        for api in ("native", "ops")
        for figure in ("event", "host")
        for tokens in (3, 8)
        for layout in ("flat", "packed")
        for cached in (False, True)
        for op in (("dispatch", "pair") if cached else ht_configuration.OPS)
        for placement in (("in_place",) if (op, layout) == ("combine", "packed") else ("in_place", "staged"))
    }
    assert keys == expected
    memory = {(r["figure"], r["layout"], r["tokens"], r["placement"]): r["value"] for r in found if r["unit"] == "MB"}
    assert len(memory) == 2 * 2 * 3  # staged, there is no arena
    for (figure, layout, tokens, placement), value in memory.items():
        if figure == "memory":  # beside the arena
            assert value == pytest.approx(memory["memory", layout, tokens, "in_place"], abs=0.005), placement
            assert value < 0.1 * memory["memory_arena", layout, tokens, "in_place"]
    rivals = [r for r in found if r["system"] == "torch_all_to_all"]
    assert {(r["op"], r["tokens"]) for r in rivals} == {(op, t) for op in configuration.OPS for t in (3, 8)}
    assert all(r["placement"] is None and not r["cached"] for r in rivals)

    for line in ("high throughput: 2 ranks", "routing   8", "memory_arena, 8 tokens, bf16, packed, in_place"):
        assert line in shown
    assert shown.strip() == table.render(found).strip()
    written = plot.draw(found, tmp_path / "plots")
    names = {"ht_tokens", "ht_tokens_2", "ht_beside_others", "ht_beside_others_2"}
    assert {file.name for file in written} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}


def test_one_run_measures_every_payload_and_layout_of_high_throughput(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    run(
        "-m", "bench", "ht", "--device", "cpu", "--tokens", "3", "--iterations", "2", "--hidden", "416",
        "--dtype", ",".join(workload.DTYPES), "--layout", ",".join(reference.LAYOUTS), "--figures", "event",
        "--json", str(path), "--cached", "--routing", "hot_expert", "--no-rivals",
    )  # fmt: skip
    found = records.load([path])
    every = {(dtype, layout) for dtype in workload.DTYPES for layout in reference.LAYOUTS}
    assert {(r["dtype"], r["layout"]) for r in found} == every
    assert len(found) == len(every) * 2 * (len(ht_configuration.OPS) + 2)
    assert {r["system"] for r in found} == {"nccl_ep"} and {r["placement"] for r in found} == {"in_place"}


def test_overlap_records_high_throughput_alone(tmp_path: Path) -> None:
    path = tmp_path / "overlap.json"
    arguments = ("--device", "cpu", "--dtype", "bf16", "--iterations", "3", "--mode", "ht", "--json", str(path))
    shown = run("-m", "bench", "overlap", *arguments)
    found = records.load([path])
    assert len(found) == 36 and {r["op"] for r in found} == {"dispatch", "combine", "spin"}
    assert all(r["mode"] == "ht" and r["layout"] == "flat" and r["value"] is not None for r in found)
    assert shown.startswith("ht: 2 ranks") and "ll: " not in shown


def test_options_that_make_no_sense() -> None:
    for command, *arguments in (
        ("ht", "--alignment", "0"), ("fit", "--alignment", "-1"), ("overlap", "--mode", "ht", "--alignment", "0"),
        ("ht", "--figures", "graph"), ("ht", "--figures", "graph_pdl"), ("ht", "--api", "deepep"),
        ("fit", "--experts", "15"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            bench_main([command, "--device", "cpu", *arguments])


@pytest.mark.parametrize(("mode", "num_steps"), [("ht", 6), ("ll", 7)])
def test_the_scripts_of_figures_give_options_that_exist(
    mode: str, num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(options, "_C", types.SimpleNamespace(has_cuda=lambda: True))
    script = ROOT / "bench" / f"measure_{mode}.sh"
    steps = re.findall(r"^(\w+)\)", script.read_text(), re.MULTILINE)
    assert len(steps) == num_steps
    for step in steps:
        command = ["sh", str(script), step, str(tmp_path / "out")]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        for line in lines:
            _, module, name, *arguments = line.split()
            parsers = {
                "ll": options.parse, "ht": options.parse_ht, "fit": options.parse_fit, "overlap": overlap.parse,
            }  # fmt: skip
            parsed = parsers[name](arguments)
            assert module == "bench" and parsed.device == "cuda"
            assert parsed.json.parent == tmp_path / "out" and parsed.json.name.startswith(f"{mode}_{step}")
        assert len(lines) == (7 if step == "shapes" else 1)


# ---- Its parts


def lone_world() -> Any:
    return types.SimpleNamespace(
        rank=0, is_cuda=False, device=torch.device("cpu"), synchronize=lambda: None, device_name=lambda: "cpu",
        together=lambda body: body(), agree=lambda body: [body()],
    )  # fmt: skip


def lone_configuration(given: Shape, figures: list[str], note: Any) -> ht_configuration.HtConfiguration:
    plan = configuration.Plan(figures, [], [])
    return ht_configuration.HtConfiguration(lone_world(), given, measure.Effort(0, 1, 1, 1), note, plan)


@pytest.mark.parametrize("outputs, expected", [(0, ["staged"] * 2), (1, ["in_place", "staged"]), (4, ["in_place"] * 2)])
def test_placement_is_what_the_buffer_counted(outputs: int, expected: list[str]) -> None:
    """Not what was asked for: in an arena of one output the second call copies."""
    given = ht_shape(num_ranks=1)
    mine = workload.make_inputs(given)[0]
    made = lone_configuration(given, [], lambda record: None)
    arena_bytes = outputs * given.output_rows() * given.row_bytes() + (512 if outputs else 0)
    with ht_buffer(given, None, arena_bytes) as buffer:
        made._buffer = buffer
        kept: list[nccl_ep.DispatchOutput] = []

        def call() -> list[float]:
            kept.append(nccl_ep.dispatch(mine.x, mine.topk_idx, buffer=buffer, **given.dispatch_kwargs()))
            return [1.0]

        assert [made._placed("pair", made._sample(call))["placement"] for _ in range(2)] == expected
        assert made._placed("combine", made._sample(call)) == {"placement": "in_place"}
        rows = kept[0].x.clone()  # not in the arena
        sampled = made._sample(lambda: [float(nccl_ep.combine(rows, kept[0].handle).sum())])
        assert made._placed("combine", sampled) == made._placed("pair", sampled) == {"placement": "staged"}
        assert made._placed("routing", sampled) == {"placement": "in_place"}


@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_wrong_results_of_any_call_are_noticed(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first run, cached, routed alone, into given tensors."""
    given = ht_shape(layout, num_ranks=1, dtype="bf16")
    inputs = workload.make_inputs(given)
    given = workload.fitted(given, inputs)
    with ht_buffer(given, None, workload.arena_bytes_for(given, torch.device("cpu"))) as buffer:
        checked = workload.Checked(given, 0, inputs, buffer)
        arguments = (given, buffer, inputs[0], checked, 0)
        makers = (
            operations.native_operations,
            operations.native_cached,
            operations.op_operations,
            operations.op_cached,
        )
        for make in makers:
            assert make(*arguments).calls
        last = int(checked.valid.nonzero()[-1])

        def flip(x: torch.Tensor) -> None:
            x.view(torch.uint8).view(-1, x.shape[-1] * x.element_size())[last, -1] ^= 1

        real, cached = nccl_ep.dispatch, nccl_ep.dispatch_cached

        def wrong_where(is_wrong: Any) -> Any:
            def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                out = real(x, *args, **kwargs)
                if is_wrong(x, kwargs):
                    flip(out.x)
                return out

            return wrong

        cases = {
            "first run": lambda x, kwargs: x.shape[1] > 8 and kwargs.get("out") is None,
            "given": lambda x, kwargs: x.shape[1] > 8 and kwargs.get("out") is not None,
            "narrow": lambda x, kwargs: x.shape[1] == 8,
        }
        for name, is_wrong in cases.items():
            with monkeypatch.context() as patch:
                patch.setattr(operations, "dispatch", wrong_where(is_wrong))
                said = "narrow rows: 1 of" if name == "narrow" else "dispatch: not the bits"
                if name == "narrow" and layout in reference.RANK_LAYOUTS:
                    said = r"narrow rows: \d of"  # a row of several choices
                with pytest.raises(AssertionError, match=said):
                    operations.native_operations(*arguments)

        for is_given in (False, True):

            def wrong_cached(*args: Any, is_given: bool = is_given, **kwargs: Any) -> Any:
                payload = cached(*args, **kwargs)
                if (kwargs.get("out") is not None) == is_given:
                    flip(payload.x)
                return payload

            with monkeypatch.context() as patch:
                patch.setattr(operations, "dispatch_cached", wrong_cached)
                with pytest.raises(AssertionError, match="dispatch: not the bits"):
                    operations.native_cached(*arguments)
        checked.y[2, 5] += 1
        for make in makers:
            with pytest.raises(AssertionError, match="combine: not the bits"):
                make(*arguments)


def test_graphs_take_given_tensors_of_the_arena() -> None:
    given = ht_shape(num_ranks=1)
    inputs = workload.make_inputs(given)
    with ht_buffer(given, None, workload.arena_bytes_for(given, torch.device("cpu"))) as buffer:
        checked = workload.Checked(given, 0, inputs, buffer)
        made = operations.native_operations(given, buffer, inputs[0], checked, 0)
        assert set(made.captured) == {"routing", "dispatch", "pair"}
        assert made.in_graph("dispatch")().x.data_ptr() == checked.out.x.data_ptr()
        assert made.get("dispatch")().x.data_ptr() != checked.out.x.data_ptr()
        assert made.in_graph("combine") is made.get("combine")
        assert made.in_graph("routing")().x.shape == (given.output_rows(), 8)
        made = operations.native_cached(given, buffer, inputs[0], checked, 0)
        assert made.in_graph("dispatch")().x.data_ptr() == made.in_graph("dispatch")().x.data_ptr()
        assert made.get("dispatch")().x.data_ptr() != made.in_graph("dispatch")().x.data_ptr()
        assert buffer.stats()["staged_dispatches"] == buffer.stats()["staged_combines"] == 0


def test_each_figure_times_its_own_calls_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which call is timed and which kernels count, with clocks of our own: a pair has the kernels of all, graphs take
    captured calls, and what a timed call copied stands in its record."""
    given, found = ht_shape(num_ranks=1), []
    mine = workload.make_inputs(given)[0]
    made = lone_configuration(given, ["graph", "kernel", "event"], found.append)
    called: list[str] = []

    def clock(kind: str) -> Any:
        def times(world: Any, call: Any, effort: measure.Effort, *names: Any) -> Any:
            call()
            if not names:
                return [10.0, 30.0, 20.0]
            return {op: [float(len(name))] for op, name in names[0].items()}  # of what kernels are asked for

        return times

    for name in ("graph_times", "kernel_times", "event_times"):
        monkeypatch.setattr(measure, name, clock(name))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132)
    )
    with ht_buffer(given, None, 1 << 20) as buffer:
        monkeypatch.setattr(type(buffer.runtime), "last_blocks", lambda runtime: [12, 200])
        monkeypatch.setattr(made.world, "is_cuda", True)
        made._buffer = buffer
        out = nccl_ep.dispatch(mine.x, mine.topk_idx, buffer=buffer, **given.dispatch_kwargs())

        def call(name: str, copies: bool = False) -> Any:
            def body() -> None:
                called.append(name)
                if copies:
                    nccl_ep.combine(out.x.clone(), out.handle)

            return body

        calls = {op: call(op, copies=op == "pair") for op in ht_configuration.OPS}
        captured = {"pair": call("captured pair"), "dispatch": call("captured dispatch")}
        fields = {"system": "nccl_ep", "api": "native", "num_sms": 0}
        made._measure_operations(buffer, operations.Operations(calls, captured), fields)
    ops = ht_configuration.OPS
    assert called == [*ops, "pair", "routing", "captured dispatch", "combine", "captured pair", *ops]
    got = {(r["figure"], r["op"]): (r["value"], r["num_sms_used"], r["placement"]) for r in found}
    assert got == {
        ("kernel", "dispatch"): (8.0, 12, "in_place"), ("kernel", "combine"): (7.0, 132, "staged"),
        ("kernel", "routing"): (14.0, 12, "in_place"),
        **{("graph", op): (20.0, 132 if op in ("combine", "pair") else 12, "in_place") for op in ops},
        **{("event", op): (20.0, 132 if op in ("combine", "pair") else 12, "in_place") for op in ops[:3]},
        ("event", "pair"): (20.0, 132, "staged"),
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_the_fitted_capacity_is_the_smallest(layout: str, mode: str) -> None:
    given = ht_shape(layout, mode=mode, routing="skewed", num_ranks=4, tokens=20)
    inputs = workload.make_inputs(given)
    fit = workload.fitted(given, inputs)
    plain = [reference.RankInput(i.x, i.topk_idx) for i in inputs]

    def overflow(capacity: int | None) -> int:
        kwargs = {"num_experts": 32, "max_tokens": 20, "layout": layout, "expert_alignment": given.alignment}
        return sum(int(result.overflow) for result in reference.dispatch(plain, capacity=capacity, **kwargs))

    assert overflow(fit.capacity) == 0
    if layout in reference.EXPERT_LAYOUTS:
        assert fit.capacity is not None and fit.capacity < given.output_rows()
        assert overflow(fit.capacity - given.alignment) > 0
    else:
        assert fit == given
    got = reference.dispatch(plain, num_experts=32, max_tokens=20, layout=layout, capacity=fit.capacity)
    assert all(len(result.valid) == fit.output_rows() for result in got)

    def body(group: ThreadGroup) -> None:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=20, hidden=400, topk=4, num_experts=32, mode=mode, device="cpu",
        ) as buffer:  # fmt: skip
            workload.Checked(fit, group.rank(), inputs, buffer)

    run_ranks(4, body)


def test_the_wire_floor_of_high_throughput_is_that_by_hand() -> None:
    full = {"tokens": 4096, "hidden": 7168, "topk": 8, "num_experts": 256, "num_ranks": 4}
    inputs = workload.make_inputs(shape(**(full | {"hidden": 16})))
    times = floors.wire_us(ht_shape(**full), inputs)
    # 160 MB leave or enter the busiest rank, 158 in the mean: 455 us at 352 GB/s, pushed, and 484 at 331, pulled
    # (docs/benchmarks.md, floors).
    assert 448 < times["dispatch"] < 458 and times["combine"] == pytest.approx(times["dispatch"] * 352 / 331)
    assert times["pair"] == times["dispatch"] + times["combine"] and "routing" not in times
    eight = floors.wire_us(ht_shape(**(full | {"num_ranks": 8})), inputs * 2)
    assert eight["combine"] == pytest.approx(eight["dispatch"] * 344 / 332)
    # All tokens go to one rank: what enters there takes three times as long as what leaves another.
    one = ht_shape(tokens=100, hidden=1024, topk=1, num_experts=4, num_ranks=4)
    ids = torch.zeros(100, 1, dtype=torch.int64)
    hot = [workload.Given(torch.zeros(100, 16), ids, torch.ones(100, 1)) for _ in range(4)]
    assert floors.wire_us(one, hot)["dispatch"] == pytest.approx(300 * 2048 / 352e3)
    assert floors.wire_us(replace(one, mode="ll"), hot)["combine"] == pytest.approx(300 * 2048 / 350e3)


def test_plain_graphs_switch_off_what_overlaps_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Low latency's, and what the profiler sees of it; high throughput's are taken as they are launched. Afterwards all
    is as it was."""
    switched = [True]
    buffer: Any = types.SimpleNamespace(runtime=types.SimpleNamespace(set_pdl=switched.append))
    monkeypatch.setattr(measure, "graph_times", lambda *_: [float(switched[-1])])
    monkeypatch.setattr(measure, "kernel_times", lambda *_: {"dispatch": [float(switched[-1])]})
    rank: Any = types.SimpleNamespace(world=None, effort=None)
    for kind, expected in ((configuration.Configuration, 0.0), (ht_configuration.HtConfiguration, 1.0)):
        assert kind._kernel_times(rank, buffer, lambda: None, {}) == {"dispatch": [expected]} and switched[-1]
    assert configuration.Configuration._graph_times(rank, buffer, lambda: None) == [0.0] and switched[-1]
    assert ht_configuration.HtConfiguration._graph_times(rank, buffer, lambda: None) == [1.0] and switched[-1]


# ---- Text and pictures


def ht_sweep() -> list[records.Record]:
    found = []
    for op in ht_configuration.OPS:
        at = {"bench": "ht", "op": op, "tokens": 4096, "figure": "graph", "layout": "flat", "alignment": 1}
        for sms in (0, 8, 16):
            how = {"cached": False, "placement": "in_place"}
            found.append(gpu_record(**at, **how, value=500.0 - sms, p99=600.0, num_sms=sms, num_sms_used=sms or 12))
        if op != "routing":
            floor = {"system": "floor_wire", "api": "computed", "value": 450.0, "cached": False, "placement": None}
            found.append(gpu_record(**at, **floor))
        if op == "dispatch":
            how = {"cached": True, "placement": "staged"}
            found.append(gpu_record(**at, **how, value=700.0, p99=701.0))
    return found


def test_the_table_tells_placement_and_cached_calls_apart() -> None:
    lines = [" ".join(line.split()) for line in table.render(ht_sweep()).splitlines()]
    assert "op tokens dtype system layout api num_sms placement cached graph floor_wire" in lines
    assert "dispatch 4096 bf16 nccl_ep flat native auto (12) in_place 500.0 (600.0) 450.0" in lines
    assert "dispatch 4096 bf16 nccl_ep flat native auto staged cached 700.0 (701.0) 450.0" in lines
    assert "routing 4096 bf16 nccl_ep flat native auto (12) in_place 500.0 (600.0) -" in lines


def test_plots_draw_what_the_records_have(tmp_path: Path) -> None:
    found = ht_sweep()
    names = [file.name for file in plot.draw(found, tmp_path)]
    assert names == [f"{name}.{kind}" for name in ("ht_num_sms", "ht_beside_others") for kind in ("png", "svg")]
    key, group = next(iter(plot._shapes(found).items()))
    assert plot.plot_tokens(key, group) is None  # of one number of tokens
    routing, dispatch, *_ = plot.plot_bars(key, group).axes
    labels = [tick.get_text() for tick in dispatch.get_yticklabels()]
    drawn = dict(zip(labels, [bar.get_width() for bar in dispatch.patches], strict=True))
    assert drawn["nccl_ep"] == 500.0 and drawn["nccl_ep, routes known, tensors copied"] == 700.0
    assert drawn["the links alone"] == 450.0 and drawn["DeepEP V1, 24 SMs, routes known"] == 809.0
    assert [bar.get_width() for bar in routing.patches] == [500.0]
    sms = plot.plot_num_sms(key, group).axes[1].get_lines()
    assert list(sms[0].get_xdata()) == [8, 16] and list(sms[0].get_ydata()) == [492.0, 484.0]


def test_both_modes_are_drawn_into_files_of_their_own(tmp_path: Path) -> None:
    found = [r | {"bench": "ll"} for r in ht_sweep() if r["op"] != "routing"] + ht_sweep()
    names = {file.stem for file in plot.draw(found, tmp_path)}
    assert names == {"ll_num_sms", "ll_beside_others", "ht_num_sms", "ht_beside_others"}


def test_overlapping_kernels_are_not_counted_twice() -> None:
    """Routing is the first kernel of a dispatch, which takes from its start to the end of the second. This begins
    before the first ends: their sum would have that time twice."""

    def kernel(name: str, start: float, duration: float) -> dict[str, Any]:
        return {"cat": "kernel", "name": f"void ep::{name}<false>()", "ts": start, "dur": duration}

    events = []
    for call, start in enumerate((0.0, 1000.0, 2000.0)):
        events += [
            kernel("ht::dispatch_route", start, 9.5), kernel("ht::dispatch_send", start + 3.25, 460.0 + call),
            kernel("ht::combine_rows", start + 480, 500.0),
        ]  # fmt: skip
    found = measure.find_kernels(events, 3, measure.KERNELS)
    assert found == {"routing": [9.5] * 3, "dispatch": [463.25, 464.25, 465.25], "combine": [500.0] * 3}
    # A kernel that ends before the one that began before it adds nothing.
    events = [kernel("ht::dispatch_route", 5.0, 20.0), kernel("ht::dispatch_send", 7.0, 4.0)]
    assert measure.find_kernels(events, 1, {"dispatch": "dispatch"}) == {"dispatch": [20.0]}
    cached = [kernel("ht::dispatch_send", 0.0, 4.0)]
    with pytest.raises(Skipped, match=r"0 kernels named \*dispatch_route\*"):
        measure.find_kernels(cached, 1, {"routing": measure.KERNELS["routing"]})


def test_kernels_have_the_names_that_are_looked_for() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "csrc/cuda").rglob("*.cu*")))
    kernels = set(re.findall(r"\b(\w+)\(const __grid_constant__", sources))
    assert {"dispatch_route", "dispatch_send", "combine_rows", "dispatch", "combine"} <= kernels
    assert {name for name in kernels if measure.KERNELS["routing"] in name} == {"dispatch_route"}
