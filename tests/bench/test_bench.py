"""The benchmark on CPU ranks: its records, its table, its plots, and that it notices wrong results."""

import json
import os
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from bench import (
    configuration,
    floors,
    jobs,
    lanes,
    ll,
    measure,
    operations,
    options,
    overlap,
    plot,
    records,
    table,
    workload,
)
from bench.rivals import interface, torch_all_to_all
from bench.world import Skipped
from nccl_ep import reference
from tests import ROOT
from tests.support.processes import run_python

SYSTEMS = {"nccl_ep", "torch_all_to_all", "torch_symm_mem"}


def run(*command: str, code: int = 0) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "NCCL_EP_REVISION": "some-revision"}
    done = run_python(*command, environment=env, timeout=600, cwd=ROOT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def shape(**changed: Any) -> workload.Shape:
    fields = {
        "num_ranks": 4, "tokens": 16, "hidden": 400, "topk": 4, "num_experts": 32, "dtype": "bf16",
        "layout": "expert_major", "routing": "uniform", "seed": 1,
    }  # fmt: skip
    return workload.Shape(**(fields | changed))


def gpu_record(**fields: Any) -> records.Record:
    common = {
        "system": "nccl_ep", "api": "native", "ranks": 4, "hidden": 7168, "topk": 8, "experts": 256, "dtype": "bf16",
        "layout": "expert_major", "routing": "uniform", "num_sms": 0, "seed": 1, "device": "NVIDIA H200",
        "revision": "r", "date": "2026-11-21",
    }  # fmt: skip
    return records.make(common, **fields)


# ---- From end to end


def test_ll_records_all_figures_on_cpu_ranks(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.json"
    shown = run(
        "-m", "bench", "ll", "--device", "cpu", "--tokens", "1,5", "--iterations", "5", "--json", str(path),
        "--figures", "event,host,memory",
    )  # fmt: skip
    found = json.loads(path.read_text())
    for record in found:
        skipped = ["skipped"] if record["value"] is None else []
        assert list(record) == [*records.FIELDS, *skipped]
        assert record["device"].startswith("cpu ") and record["revision"] == "some-revision" and record["ranks"] == 2
        assert record["value"] is None or record["value"] > 0
    assert {record["system"] for record in found} == SYSTEMS
    assert all(record["value"] is not None for record in found if record["system"] != "torch_symm_mem")
    mine = [record for record in found if record["system"] == "nccl_ep" and record["unit"] == "us"]
    keys = {tuple(record[name] for name in ("api", "op", "figure", "tokens", "dtype")) for record in mine}
    assert len(keys) == len(mine) == 2 * 3 * 2 * 2 * 2
    assert all(record["p99"] >= record["value"] for record in mine)
    assert sum(record["figure"] == "memory" and record["unit"] == "MB" for record in found) == 4

    for line in ("pair", "torch_all_to_all", "not measured: torch_symm_mem", "memory, 5 tokens, fp8", "some-revision"):
        assert line in shown
    assert shown.strip() == table.render(found).strip()
    written = plot.draw(found, tmp_path / "plots")
    names = [file.name for file in written]
    assert names == ["ll_tokens.png", "ll_tokens.svg", "ll_beside_others.png", "ll_beside_others.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG") and "<svg" in written[1].read_text()


def test_torchrun_goes_on_after_a_failing_configuration(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    arguments = ("--device", "cpu", "--tokens=-1,2", "--dtype", "bf16", "--iterations", "2", "--no-rivals")
    run(*torchrun, "-m", "bench", "ll", *arguments, "--json", str(path), code=1)
    assert {record["tokens"] for record in records.load([path])} == {2}


def test_ranks_that_die_take_one_configuration_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = []

    class Launcher:
        def __init__(self, num_ranks: int) -> None:
            pass

        def run(self, module: str, argv: list[str], settings: dict[str, str], deadline: float) -> str:
            assert module == "bench"
            worlds.append(settings["NCCL_EP_BENCH_JOBS"])
            died_in = {1: 1, 3: 9}.get(len(worlds))
            end = int(worlds[-1].split(":")[1])
            state = {"job": end if died_in is None else died_in, "failures": []}
            Path(settings["NCCL_EP_BENCH_STATE"]).write_text(json.dumps(state))
            return "" if died_in is None else "rank 1 ended with code -9"

    monkeypatch.setattr(jobs, "Launcher", Launcher)
    argv = ["--device", "cpu", "--tokens", "1,2", "--json", str(tmp_path / "records.json")]
    parsed = options.parse(argv)
    parsed.device = "cuda"  # where the last rival has ranks of its own
    assert jobs.start_ranks(ll.BENCH, argv, parsed) == 1
    assert worlds == ["0:8", "2:8", "8:12", "10:12"]  # of the last rival, too, the others are tried


# ---- Its parts


def test_one_run_measures_every_payload_and_layout(tmp_path: Path) -> None:
    """Every row that a caller may give, in every layout, held against the oracle; rivals once a payload."""
    path = tmp_path / "records.json"
    run(
        "-m", "bench", "ll", "--device", "cpu", "--tokens", "3", "--iterations", "2", "--hidden", "416",
        "--dtype", ",".join(workload.DTYPES), "--layout", ",".join(reference.LAYOUTS), "--figures", "event",
        "--json", str(path),
    )  # fmt: skip
    found = records.load([path])
    every = {(dtype, layout) for dtype in workload.DTYPES for layout in reference.LAYOUTS}
    for system, where in (("nccl_ep", every), ("torch_all_to_all", {(d, "packed") for d in workload.DTYPES})):
        mine = [r for r in found if r["system"] == system and r["value"] is not None]
        assert {(r["dtype"], r["layout"]) for r in mine} == where
        assert len(mine) == len(where) * len(configuration.OPS) * (2 if system == "nccl_ep" else 1)


def test_overlap_records_all_figures_on_cpu_ranks(tmp_path: Path) -> None:
    path = tmp_path / "new" / "overlap.json"
    arguments = ("--device", "cpu", "--dtype", "fp8", "--iterations", "3", "--layout", "flat", "--json", str(path))
    shown = run("-m", "bench", "overlap", *arguments)
    found = records.load([path])
    expected = {("nccl_ep", "alone"), ("gemm", "alone"), ("gemm", "alone_on_rest"), ("nccl_ep", "overlapped"),
                ("gemm", "overlapped"), ("nccl_ep", "slowdown"), ("nccl_ep", "fused"), ("nccl_ep", "halves"),
                ("gemm", "between"), ("nccl_ep", "staged"), ("nccl_ep", "exposed"), ("nccl_ep", "op"),
                ("gemm", "experts"), ("nccl_ep", "both"), ("nccl_ep", "of_longer")}  # fmt: skip
    in_lanes = {pair for pair in expected if pair[1] in ("alone", "alone_on_rest", "overlapped", "slowdown")}
    for op, figures in (("dispatch", expected), ("combine", expected), ("spin", in_lanes)):
        assert {(r["system"], r["figure"]) for r in found if r["op"] == op} == figures
    assert len(found) == 2 * len(expected) + len(in_lanes)
    for record in found:
        assert record["bench"] == "overlap" and record["gemm"] == "128x128x64" and record["layout"] == "flat"
        assert record["value"] > 0 or record["figure"] == "exposed"
        assert record["unit"] == ("x" if record["figure"] in ("slowdown", "of_longer") else "us")
    value = {(r["op"], r["system"], r["figure"]): r["value"] for r in found}
    slowdown = value["combine", "nccl_ep", "overlapped"] / value["combine", "nccl_ep", "alone"]
    assert value["combine", "nccl_ep", "slowdown"] == pytest.approx(slowdown, rel=1e-3, abs=1e-3)
    longer = max(value["dispatch", "nccl_ep", "op"], value["dispatch", "gemm", "experts"])
    both = value["dispatch", "nccl_ep", "both"]
    assert value["dispatch", "nccl_ep", "of_longer"] == pytest.approx(both / longer, rel=1e-3, abs=1e-3)
    assert "128x128x64" in shown and shown == run("-m", "bench", "table", str(path))
    assert plot.main([str(path), "--out", str(tmp_path)]) == 1  # nothing of ll


def test_overlap_says_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "overlap.json"
    run("-m", "bench", "overlap", "--device", "cpu", "--tokens=-1", "--json", str(path), code=1)
    assert records.load([path]) == []
    run("-m", "bench", "overlap", "--device", "cpu", "--gemm", "1,2", code=2)


def test_a_gemm_is_compared_with_its_share_of_sms() -> None:
    assert overlap.over_share(110, 100, 132, 12) == pytest.approx(1.0)
    assert overlap.over_share(126, 100, 132, 12) == pytest.approx(126 / 110)


@pytest.mark.parametrize(
    ("gemm_us", "is_cuda", "tries"), [(20.0, True, 5), (1.0, True, 5), (1.0, False, 2)], ids=["enough", "short", "cpu"]
)
def test_overlapped_figures_are_of_lanes_that_last_long_enough(
    gemm_us: float, is_cuda: bool, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side operations take ten times as long as the first guess assumes: GEMMs are added until they cover them,
    or the figure is given up. CPU ranks take what they have."""
    runs: list[tuple[int, int]] = []

    def run(chains: int, gemms: int) -> tuple[float, float]:
        runs.append((chains, gemms))
        return (100.0 if gemms else 10.0), (gemm_us if chains else 100.0)

    made = types.SimpleNamespace(num_sms=132, run=run, widen=lambda on_all_sms: None)
    monkeypatch.setattr(overlap, "make_lanes", lambda *_: made)
    world: Any = types.SimpleNamespace(together=lambda body: body(), agree=lambda body: [body()], is_cuda=is_cuda)
    found: list[records.Record] = []
    measured = object.__new__(overlap.Overlap)
    measured.__dict__.update(
        world=world,
        options=types.SimpleNamespace(iterations=2),
        chain=2,
        _note=found.append,
        failures=[],
        _common=dict.fromkeys(records.FIELDS),
    )
    measured._measure_fused("dispatch", lambda: None, lambda: None, 12, "none")
    beside = [gemms for chains, gemms in runs if chains == 4 and gemms]
    assert beside == sorted(beside) and len(set(beside)) == tries
    figures = {(r["system"], r["figure"]): r for r in found}
    if gemm_us == 20.0:
        assert beside[-1] * gemm_us >= 4 * 2 * 100.0 > beside[0] * gemm_us
    if gemm_us == 20.0 or not is_cuda:
        assert figures["nccl_ep", "slowdown"]["value"] == 10.0
    else:
        assert "did not last alike" in figures["nccl_ep", "overlapped"]["skipped"]


def test_gemms_laid_out_for_fewer_sms_leave_torchs_settings_alone() -> None:
    def state() -> tuple[Any, int | None]:
        return torch.backends.cuda.preferred_blas_library(), torch._C._get_sm_carveout_experimental()

    before = state()
    with pytest.raises(KeyError), lanes._laid_out(12):
        assert state() == (torch._C._BlasBackend.Cublaslt, 12)
        raise KeyError
    assert state() == before


def test_lanes_of_threads_run_side_by_side() -> None:
    """Each lane waits for the other, which would not end one after the other; errors of either come out."""
    meeting = threading.Barrier(2, timeout=60)
    gate: Any = types.SimpleNamespace(gate=types.SimpleNamespace(wait=lambda: None))
    taken = lanes.ThreadLanes(gate, meeting.wait, meeting.wait, chain=2).run(2, 4)
    assert min(taken) > 0

    def wrong() -> None:
        raise ValueError("wrong")

    for calls in ((wrong, int), (int, wrong)):
        with pytest.raises(ValueError, match="wrong"):
            lanes.ThreadLanes(gate, *calls, chain=1).run(1, 1)


@pytest.mark.parametrize("layout", reference.LAYOUTS)
@pytest.mark.parametrize("dtype", workload.DTYPES)
def test_check_notices_a_wrong_bit(layout: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = shape(num_ranks=1, layout=layout, dtype=dtype, hidden=416)
    inputs = workload.make_inputs(given)
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=16, hidden=416, topk=4, num_experts=32, dtype=given.payload.combined, device="cpu"
    ) as buffer:
        workload.Checked(given, 0, inputs, buffer)

        def flip(tensor: torch.Tensor, row: int) -> None:
            tensor.view(torch.uint8).view(-1, tensor.shape[-1] * tensor.element_size())[row, -1] ^= 1

        def wrong_dispatch(*args: Any, **kwargs: Any) -> nccl_ep.DispatchOutput:
            out = nccl_ep.dispatch(*args, **kwargs)
            results = reference.dispatch(
                [reference.RankInput(inputs[0].x, inputs[0].topk_idx)], num_experts=32, max_tokens=16, layout=layout
            )
            flip(out.x, int(results[0].valid.nonzero()[-1]))
            return out

        def wrong_combine(*args: Any, **kwargs: Any) -> torch.Tensor:
            y = nccl_ep.combine(*args, **kwargs)
            flip(y, 3)
            return y

        for name, wrong, said in (
            ("dispatch", wrong_dispatch, r"^x: \d+ of"),
            ("combine", wrong_combine, "^combine's result"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(workload, name, wrong)
                with pytest.raises(AssertionError, match=said):
                    workload.Checked(given, 0, inputs, buffer)


def test_a_num_sms_with_other_bits_is_noticed() -> None:
    given = shape(num_ranks=1)
    inputs = workload.make_inputs(given)
    with nccl_ep.Buffer.for_shapes(None, max_tokens=16, hidden=400, topk=4, num_experts=32, device="cpu") as buffer:
        checked = workload.Checked(given, 0, inputs, buffer)
        for make in (operations.native_operations, operations.op_operations):
            make(given, buffer, inputs[0], checked, 0)
        checked.y[2, 5] += 1
        for make in (operations.native_operations, operations.op_operations):
            with pytest.raises(AssertionError, match="combine"):
                make(given, buffer, inputs[0], checked, 0)


def test_each_routing_loads_experts_as_it_says() -> None:
    for routing in workload.ROUTINGS:
        given = shape(routing=routing, num_experts=64, topk=8, tokens=50)
        ids = torch.stack([i.topk_idx for i in workload.make_inputs(given)])
        assert ids.shape == (4, 50, 8) and int(ids.min()) >= 0 and int(ids.max()) < 64
        assert all(len(set(token)) == 8 for token in ids.view(-1, 8).tolist())
        is_local = ids // 16 == torch.arange(4).view(4, 1, 1)
        assert {"all_local": is_local.all(), "all_remote": not is_local.any()}.get(routing, True)
        load = torch.bincount(ids.reshape(-1), minlength=64).sort().values
        assert (int(load[-1]) > 100) == (routing in ("skewed", "hot_expert")), load
        if routing == "hot_expert":  # one, of all tokens
            assert int(load[-1]) == 200 and int(load[-2]) < 60
    with pytest.raises(ValueError, match="top-8 of 4"):
        workload.make_inputs(shape(routing="all_local", num_experts=16, topk=8))


def test_the_wire_floor_counts_the_busiest_rank() -> None:
    full = {"tokens": 128, "hidden": 7168, "topk": 8, "num_experts": 256}
    given = shape(**full)
    times = floors.wire_us(given, workload.make_inputs(given))
    # 5.05 MB leave or enter the busiest rank, 4.95 in the mean: 14 us at 350 GB/s (docs/benchmarks.md, floors).
    assert 13.5 < times["dispatch"] < 15 and 13.5 < times["combine"] < 15
    quantised = shape(**full, dtype="fp8")
    assert floors.wire_us(quantised, workload.make_inputs(quantised))["dispatch"] == pytest.approx(
        times["dispatch"] * (7168 + 224) / 14336
    )
    local = shape(**full, routing="all_local")
    assert floors.wire_us(local, workload.make_inputs(local))["pair"] == 0


def test_rivals_sort_and_quantise_as_we_do() -> None:
    counts = torch.tensor([[2, 0, 3], [0, 0, 1], [4, 1, 0]])
    lies = [(rank, expert, i) for rank in range(3) for expert in range(3) for i in range(int(counts[rank, expert]))]
    want = sorted(range(len(lies)), key=lambda n: (lies[n][1], lies[n][0], lies[n][2]))
    assert torch_all_to_all.by_expert(counts, len(lies)).tolist() == want
    x = workload.make_inputs(shape())[0].x
    quantised, scales = interface.quantized(x)
    theirs, their_scales = reference.quantize_fp8(x, "fp8")
    differ = quantised.contiguous().view(torch.uint8) != theirs.view(torch.uint8)
    assert differ.float().mean() < 0.01  # a factor's last bit
    assert torch.allclose(scales, their_scales)


def test_a_figure_is_that_of_the_slowest_rank() -> None:
    ranks = [[1.0, 2.0, 30.0], [5.0, 6.0, 7.0]]
    assert records.slowest(ranks) == (6.0, 7.0)
    assert records.slowest([[3.0], [4.0]]) == (4.0, None)
    assert records.percentile([float(i) for i in range(1, 201)], 99) == 198.0


def test_kernels_of_a_trace_are_summed_for_each_call() -> None:
    def kernel(name: str, start: float, duration: float) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": start, "dur": duration}

    events: list[dict[str, Any]] = [{"ph": "M", "name": "dispatch"}, kernel("ncclDevKernel", 0, 99)]
    for call in range(3):
        events += [
            kernel("void ep::ll::dispatch<8>", 10 * call, 2),
            kernel("void ep::ll::dispatch<8>", 10 * call + 2, 3 + call),
        ]
        events += [kernel("void ep::ll::combine<8>", 10 * call + 6, 4)]
    both = {"dispatch": "dispatch", "combine": "combine"}
    found = measure.find_kernels(events[::-1], 3, both)
    assert found == {"dispatch": [5, 6, 7], "combine": [4, 4, 4]}
    with pytest.raises(Skipped, match=r"\*combine\* in 2 calls"):
        measure.find_kernels(events[2:7], 2, both)


def test_kernels_that_the_profiler_lost_are_noticed() -> None:
    """Of two dispatches' four kernels two are left: each call would be one of another kind, and the median nonsense."""
    names = {"dispatch": "dispatch"}
    route, send = ({"cat": "kernel", "name": f"dispatch_{kind}", "dur": 9} for kind in ("route", "send"))
    left = [route | {"ts": 0}, send | {"ts": 100}]
    with pytest.raises(Skipped, match=r"saw 2 kernels .* in 2 calls, not the same: dispatch_route and dispatch_send"):
        measure.find_kernels(left, 2, names)
    assert measure.find_kernels(left, 1, names) == {"dispatch": [109]}


def test_the_first_profiled_calls_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    rank: Any = types.SimpleNamespace(
        align=lambda: None, synchronize=lambda: None, gate=types.SimpleNamespace(wait=lambda: None)
    )

    class Profile:
        def __init__(self, **_: Any) -> None: ...
        def __enter__(self) -> "Profile":
            called.clear()
            return self

        def __exit__(self, *_: Any) -> None: ...
        def export_chrome_trace(self, path: str) -> None:
            kernels = [{"cat": "kernel", "name": "dispatch", "ts": 100 * i, "dur": i} for i in range(len(called))]
            Path(path).write_text(json.dumps({"traceEvents": kernels}))

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    effort = measure.Effort(warm_up=2, iterations=5, chain=1, host_calls=1)
    found = measure.kernel_times(rank, lambda: called.append(1), effort, {"dispatch": "dispatch"})
    assert found == {"dispatch": [3, 4, 5, 6, 7]}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--ranks 0", "--ranks 0: must be 1 or more"),
        ("--topk 16 --experts 15 --ranks 3", "--topk 16 of 15 experts"),
        ("--hidden 100", "--hidden 100: must be a multiple of 16"),
        ("--experts 15", "15 experts do not divide over 2 ranks"),
        ("--tokens 8,x", "--tokens: '8,x': must be whole numbers, separated by commas"),
        ("--json /dev/null", "--json: /dev/null is there and no file"),
        ("--json /dev/null/x.json", "--json: /dev/null/x.json cannot be written: /dev/null: File exists"),
    ],
)
def test_impossible_shapes_start_nothing(given: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--device", "cpu", *given.split()])
    assert why in capsys.readouterr().err


def test_the_cost_of_a_recording_is_measured_beside_none(tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    said = run("-m", "bench.measure_recording", str(path), "--steps", "2")
    found = records.load([path])
    assert [(each["figure"], each["is_recorded"]) for each in found] == [
        ("queued", False), ("queued", True), ("host", False), ("host", True),
    ]  # fmt: skip
    assert all(len(each["samples"]) == 9 and min(each["samples"]) > 0 for each in found)
    for without, recorded in (found[:2], found[2:]):
        assert f"{without['value']} us, recorded {recorded['value']} us" in said
