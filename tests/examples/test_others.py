"""The layer over the calls of other libraries: what is measured, what is said of those that cannot, the one table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.overlapped_moe import others, table
from examples.overlapped_moe.came import Came
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.fused import BF16_ERROR
from examples.overlapped_moe.inputs import Inputs, Shape
from examples.overlapped_moe.layer import MoeLayer
from examples.overlapped_moe.order import ExpertOrder
from nccl_ep.testing import ThreadGroup
from tests import ROOT
from tests.examples.moe_reference import layer

LIBRARY = "tests.examples.other_library"
SIZES = ["--inner", "32", "--topk", "3", "--experts", "8", "--repetitions", "2"]


@pytest.fixture(scope="module")
def found() -> list[others.Found]:
    """Of two CPU ranks."""
    argv = ["--points", "ht:64:40:8,ll:64:12:8,ll:64:3:8", *SIZES]
    return others.measure(2, [LIBRARY, "flashinfer", "liger_fused"], {}, 300.0, argv, "cpu")


def of(found: list[others.Found], mode: str, tokens: int, layout: str) -> list[others.Found]:
    wanted = {"system": LIBRARY, "mode": mode, "tokens": tokens, "layout": layout}
    return [each for each in found if wanted.items() <= each.items()]


@pytest.mark.parametrize(("mode", "tokens", "layout"), [
    ("ht", 40, "rank_major"), ("ll", 12, "rank_major"), ("ll", 12, "expert_major"),
])  # fmt: skip
def test_the_layer_is_that_of_torch_by_either_gemm(
    found: list[others.Found], mode: str, tokens: int, layout: str
) -> None:
    mine = of(found, mode, tokens, layout)
    assert [each["gemm"] for each in mine] == ["torch", "triton"]
    for each in mine:
        assert "skipped" not in each, each
        assert each["version"] == "2.5" and each["hidden"] == 64 and each["layer_ms"] > 0
        assert each["relative_error_to_torch"] < BF16_ERROR


def test_what_is_wrong_or_absent_has_no_figure(found: list[others.Found]) -> None:
    wrong = of(found, "ll", 12, "flat")
    assert len(wrong) == 2
    for each in wrong:
        assert "from torch's layer" in each["skipped"] and "it differs by" in each["skipped"] and "layer_ms" not in each
    (absent,) = of(found, "ll", 12, "packed")
    assert absent["skipped"] == "absent: No module named 'other_library'"
    assert {each["skipped"] for each in of(found, "ll", 3, "rank_major")} == {"takes no 3 tokens"}
    assert [each for each in found if each["system"] != LIBRARY] == [
        {"system": "flashinfer", "skipped": "needs GPUs"}, {"system": "liger_fused", "skipped": "needs GPUs"},
    ]  # fmt: skip


def test_a_library_that_ends_early_is_told() -> None:
    (one,) = others.measure(2, [LIBRARY], {}, 0.05, ["--points", "ht:64:40:8", *SIZES], "cpu")
    assert one == {"system": LIBRARY, "skipped": "the time limit ended rank 0, 1"}


def points() -> list[dict[str, Any]]:
    common = {"mode": "ht", "hidden": 7168, "tokens": 4096, "one_behind_by_torch_ms": 7.9, "torch_layer_ms": 13.0}
    return [
        common | {"variant": "plain", "overlapped_ms": 8.912, "one_behind_ms": 8.6},
        common | {"variant": "sorts+tma", "overlapped_ms": 8.0, "one_behind_ms": 8.5, "overlapped_graph_ms": 7.5},
        {"mode": "ll", "hidden": 7168, "tokens": 128, "variant": "plain", "overlapped_ms": 3.4, "one_behind_ms": 3.3},
    ]


def other(system: str, ms: float | None = None, mode: str = "ht", **more: Any) -> dict[str, Any]:
    tokens = 4096 if mode == "ht" else 128
    made = {"system": system, "mode": mode, "hidden": 7168, "tokens": tokens, "layout": "rank_major", "version": "1.2"}
    return made | ({} if ms is None else {"layer_ms": ms}) | more


def test_one_table_has_all_of_it() -> None:
    results = {
        "points": points(),
        "others": [
            other("flashinfer", 9.5, gemm="torch"), other("flashinfer", 9.1, gemm="triton+tma"),
            other("deepep_v1", 3.25, mode="ll", layout="expert_major", gemm="triton"),
            other("flashinfer_fused", 7.5, gemm="its own", layout="fused"),
            other("deep_gemm_fused", 5.5, gemm="its own", layout="fused"),
            other(LIBRARY, skipped="it differs by 0.5 from torch's layer", gemm="torch"),
            {"system": "liger_fused", "skipped": "absent: No module named 'liger_cute_kernels'"},
        ],
    }  # fmt: skip
    assert table.lines(results) == [
        "| ms | HT, 4,096 tokens, hidden 7168 | LL, 128 tokens, hidden 7168 |",
        "|---|---|---|",
        "| nccl_ep, overlapped | 8.91 | 3.40 |",
        "| nccl_ep, one step behind the other | 8.60 | 3.30 |",
        "| nccl_ep, one step behind the other, torch's GEMM | 7.90 | |",
        "| torch `all_to_all_single`, torch's GEMM | 13.00 | |",
        "| nccl_ep, overlapped, sorts+tma | 8.00 | |",
        "| nccl_ep, overlapped, sorts+tma, in a CUDA graph | **7.50** | |",
        "| nccl_ep, one step behind the other, sorts+tma | 8.50 | |",
        "| FlashInfer 1.2 `MoeAlltoAll`, rank-major rows, sorted by the caller | 9.10 (triton+tma) | |",
        "| DeepEP V1, 1.2, expert-major rows | | **3.25** (triton) |",
        "| FlashInfer 1.2 `MoEEpLayer`, fused, BF16 | **7.50** | |",
        "| sgl-deep-gemm 1.2 `fp8_mega_moe`, FP8 | **5.50** | |",
        "",
        f"not measured: {LIBRARY}: it differs by 0.5 from torch's layer"
        " (HT, 4,096 tokens, hidden 7168, rank_major, GEMM torch)",
        "not measured: liger_fused: absent: No module named 'liger_cute_kernels'",
    ]


def test_records_have_each_figure_and_what_has_none() -> None:
    own = [each | {"num_sms": 16, "rows_per_block": 128} for each in points()]
    own.append(own[1] | {"variant": "fp8", "overlapped_ms": 12.0})
    results = {
        "gpu": "NVIDIA H200", "ranks": 2, "topk": 8, "experts": 256, "points": own,
        "others": [
            other("flashinfer", 9.5, gemm="torch"), other("deep_gemm_fused", 5.5, gemm="its own", layout="fused"),
            other(LIBRARY, skipped="it differs", gemm="torch"), {"system": "liger_fused", "skipped": "absent: it"},
        ],
    }  # fmt: skip
    made = list(table.records_of(results, "abc", "2026-11-29"))
    shown = [(r["system"], r["op"], r["mode"], r["value"], r["dtype"], r["layout"], r.get("note")) for r in made]
    assert [(r["op"], r["value"]) for r in made if r["figure"] == "graph"] == [("overlapped", 7500)] * 2
    assert shown == [
        ("nccl_ep", "one_behind_by_torch", "ht", 7900, "bf16", "packed", None),
        ("torch", "torch_layer", "ht", 13000, "bf16", "packed", None),
        ("nccl_ep", "overlapped", "ht", 8912, "bf16", "packed", None),
        ("nccl_ep", "one_behind", "ht", 8600, "bf16", "packed", None),
        ("nccl_ep", "overlapped", "ht", 8000, "bf16", "packed", "sorts+tma"),
        ("nccl_ep", "one_behind", "ht", 8500, "bf16", "packed", "sorts+tma"),
        ("nccl_ep", "overlapped", "ht", 7500, "bf16", "packed", "sorts+tma"),
        ("nccl_ep", "overlapped", "ll", 3400, "bf16", "expert_major", None),
        ("nccl_ep", "one_behind", "ll", 3300, "bf16", "expert_major", None),
        ("nccl_ep", "overlapped", "ht", 12000, "fp8", "packed", "fp8"),
        ("nccl_ep", "one_behind", "ht", 8500, "fp8", "packed", "fp8"),
        ("nccl_ep", "overlapped", "ht", 7500, "fp8", "packed", "fp8"),
        ("flashinfer", "layer", "ht", 9500, "bf16", "rank_major", "torch"),
        ("deep_gemm_fused", "layer", "ht", 5500, "fp8", "fused", "its own"),
        (LIBRARY, "layer", "ht", None, "bf16", "rank_major", "torch"),
    ]
    assert made[-1]["skipped"] == "it differs" and made[12]["version"] == "1.2" and made[0]["alignment"] == 128


def test_compiled_passes_are_rows_of_their_own() -> None:
    of_all = {"num_sms": 16, "rows_per_block": 128, "overlapped_compiled_ms": 8.25}
    results = {
        "gpu": "NVIDIA H200", "ranks": 2, "topk": 8, "experts": 256, "others": [],
        "points": [each | of_all for each in points()[:2]],
    }  # fmt: skip
    assert {"| nccl_ep, overlapped, compiled | 8.25 |", "| nccl_ep, overlapped, sorts+tma, compiled | 8.25 |"} <= set(
        table.lines(results)
    )
    made = [r for r in table.records_of(results, "abc", "2026-11-30") if "compiled" in (r.get("note") or "")]
    assert [(r["op"], r["figure"], r["value"], r["note"]) for r in made] == [
        ("overlapped", "event", 8250, "compiled"), ("overlapped", "event", 8250, "sorts+tma, compiled"),
    ]  # fmt: skip


def test_files_of_several_calls_make_one_table() -> None:
    common = {"gpu": "H200", "torch": "2.11", "ranks": 2, "topk": 8, "experts": 256}
    one = common | {"points": points(), "others": [other("flashinfer", 9.5, gemm="torch")]}
    more = common | {"points": [], "others": [other("liger_fused", 7.0, gemm="its own", layout="fused")]}
    made = table.lines(table.merged([one, more]))
    assert "| nccl_ep, overlapped | 8.91 | 3.40 |" in made
    assert "| liger-cute-kernels 1.2, one kernel, BF16 | **7.00** | |" in made and any(
        "9.50 (torch)" in e for e in made
    )
    with pytest.raises(ValueError, match="ranks is 2, 4: must be the same in all"):
        table.merged([one, more | {"ranks": 4}])


def test_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from examples.overlapped_moe import measure

    file = tmp_path / "libnccl.so"
    file.write_text("")
    args = measure.parse([
        "--others", "flashinfer,nccl_ep_nvidia,flashinfer_fused", "--preload", f"nccl_ep_nvidia={file}",
        "--points", "ht:7168:4096,ll:7168:128:256:24", "--variants", "plain,sorts+group+tma,tma+fp8",
    ])  # fmt: skip
    assert args.others == ["flashinfer", "nccl_ep_nvidia", "flashinfer_fused"] and not args.graphs
    assert args.preload == {"nccl_ep_nvidia": str(file)}
    twice = ["--others", "liger_fused", "--preload", f"liger_fused={file}", "--preload", f"liger_fused={file}"]
    assert measure.parse(twice).preload == {"liger_fused": f"{file}:{file}"}
    assert args.shapes == [
        Shape("ht", 7168, 4096, 2048, 8, 256), Shape("ll", 7168, 128, 2048, 8, 256, 256, 24),
    ]  # fmt: skip
    theirs = others.parse([*measure.others_argv(args), "--system", "flashinfer", "--json", "found.json"])
    assert theirs.points == args.shapes and theirs.repetitions == 10
    assert theirs.hows == {
        "triton": {"group": 1, "tma": False, "stages": 4}, "triton+group+tma": {"group": 4, "tma": True, "stages": 4},
    }  # fmt: skip
    for wrong, text in (
        (["--others", "flashinfer,nobodys"], "nobodys: must be of flashinfer, nccl_ep_nvidia, deepep_v1"),
        (["--variants", "quick"], ""), (["--points", "ht:7168"], ""), (["--points", "xl:7168:5"], ""),
        (["--others", "flashinfer", "--preload", f"deepep_v1={file}"], ""),
        (["--others", "flashinfer", "--preload", "flashinfer=/nowhere"], ""),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as exit:
            measure.parse(wrong)
        assert text in capsys.readouterr().err
        assert exit.value.code == 2 if text else wrong[-1].split("=")[0] in str(exit.value)
    with pytest.raises(argparse.ArgumentTypeError, match="nobodys"):
        others.names("nobodys")


@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_rows_by_token_go_into_the_order_of_experts_and_back(tokens: int) -> None:
    local, topk, alignment = 4, 3, 8
    draw = torch.Generator().manual_seed(5)
    ids = torch.rand(tokens, local + 2, generator=draw).topk(topk).indices - 2
    ids = torch.where(ids == 2, 1, ids).clamp(min=-1)  # expert 2 has nothing, and a token may name one twice
    x, weights = torch.randn(tokens, 16, generator=draw), torch.rand(tokens, topk, generator=draw)
    order = ExpertOrder(ids, local, 152, alignment)
    chosen = [[(t, k) for t in range(tokens) for k in range(topk) if ids[t, k] == e] for e in range(local)]
    assert order.counts.tolist() == [len(each) for each in chosen]
    rows = order.gather(x)
    first = 0
    for expert, each in enumerate(chosen):
        assert int(order.firsts[expert]) == first
        assert torch.equal(rows[first : first + len(each)], x[[t for t, _ in each]])
        first += -(-len(each) // alignment) * alignment
        assert int(order.ends[expert]) == first
    made = rows * 3
    made[order.source < 0] = torch.nan
    want = torch.zeros_like(x)
    for each in chosen:
        for t, k in each:
            want[t] += 3 * x[t] * weights[t, k]
    torch.testing.assert_close(order.add(made, weights, torch.full_like(x, torch.nan)), want)


def test_choices_past_the_capacity_are_left_out() -> None:
    order = ExpertOrder(torch.tensor([[0, 1], [0, 1], [1, 0]]), 2, 5, 1)
    assert order.places.tolist() == [[0, 3], [1, 4], [-1, 2]] and int(order.ends[-1]) == 6
    assert order.source.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_blocks_that_have_come_are_those_of_a_dispatch(mode: Any) -> None:
    """Word for word, of a dispatch whose blocks have all arrived."""
    import nccl_ep

    local, rows, tokens = 3, 8, 20
    with nccl_ep.Buffer.for_shapes(
        ThreadGroup.make(1)[0], max_tokens=tokens, hidden=64, topk=2, num_experts=local, mode=mode, device="cpu",
        late_weights=mode == "ll",
    ) as buffer:  # fmt: skip
        experts = Experts.random(local, 64, 32, "cpu")
        moe = MoeLayer(
            buffer, experts, num_experts=local, max_tokens=tokens, topk=2, mode=mode, rows_per_block=rows
        )  # fmt: skip
        ids = torch.tensor([[0, -1], [2, 0]]).repeat(tokens // 2, 1)
        x = torch.randn(tokens, 64).bfloat16()
        out = moe.send(x, ids, torch.ones(tokens, 2), 0).receive()
        if out.offsets is None:
            came = Came.by_expert(out.counts, moe.capacity, rows)
        else:
            came = Came.packed(out.offsets[:local], out.counts, moe.capacity, rows)
        arrivals = moe.arrivals
        assert came.blocks == arrivals.blocks and came.state.shape == arrivals.state.shape
        there = arrivals.rows > 0
        assert torch.equal(came.rows, arrivals.rows) and there.any() and not there.all()
        for mine, wanted in ((came.first, arrivals.first), (came.experts, arrivals.experts)):
            assert torch.equal(mine[there], wanted[there])
        assert list(came.await_blocks()) == sorted(arrivals.await_blocks(5.0), key=lambda block: block.number)
        # Both have one word in front of a block's number.
        assert (came.order >> 32).tolist() == [int(came.state[0])] * came.blocks
        assert sorted((came.order & 0xFFFFFFFF).tolist()) == sorted((arrivals.order & 0xFFFFFFFF).tolist())


def test_inputs_are_the_same_everywhere() -> None:
    shape = Shape("ht", 64, 5, 32, 3, 8)
    one, again, another = (Inputs.random(shape, rank, "cpu") for rank in (1, 1, 0))
    assert torch.equal(one.x, again.x) and torch.equal(one.ids, again.ids)
    assert not torch.equal(one.x, another.x)
    wanted = layer(one.x.float(), one.ids, one.weights, *(torch.ones(8, *each) for each in ((64, 64), (64, 32))))
    assert wanted.isfinite().all()


def test_kernels_that_move_rows_are_those_of_torch() -> None:
    """In Triton's interpreter, in a process of its own."""
    pytest.importorskip("triton")
    program = (
        "import json, torch\n"
        "import tests.examples.overlapped_kernels\n"
        "from examples.overlapped_moe import moved_rows\n"
        "from examples.overlapped_moe.order import ExpertOrder\n"
        "ids = torch.tensor([[0, -1, 2], [2, 0, -1], [-1, -1, -1], [1, 2, 0]])\n"
        "x, weights = torch.randn(4, 1500), torch.rand(4, 3)\n"
        "order = ExpertOrder(ids, 3, 24, 8)\n"
        "there = order.source >= 0\n"
        "same = torch.equal(moved_rows.gather(x, order.source)[there], order.gather(x)[there])\n"
        "rows = torch.where(there[:, None], torch.randn(24, 1500), torch.nan)\n"
        "made = moved_rows.add(rows, order.places, weights, torch.full_like(x, torch.nan))\n"
        "want = order.add(rows, weights, torch.full_like(x, torch.nan))\n"
        "print(json.dumps([same, float((made - want).abs().max())]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    same, most = json.loads(done.stdout)
    assert same and most < 1e-5
