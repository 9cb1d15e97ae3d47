"""The benchmark's ``fit``: where high throughput overtakes low latency, and the threshold that loses least."""

from pathlib import Path
from typing import Any

import pytest

from bench import crossover, records
from nccl_ep.modes import AUTO_LL_BYTES, choose_mode
from tests.bench.test_bench import gpu_record, run


def test_fit_measures_both_modes_on_cpu_ranks(tmp_path: Path) -> None:
    path, again = tmp_path / "fit.json", tmp_path / "again.json"
    arguments = ("--device", "cpu", "--tokens", "1,64", "--iterations", "3", "--dtype", "bf16", "--layout", "flat")
    shown = run("-m", "bench", "fit", *arguments, "--json", str(path))
    found = records.load([path])
    pairs = {(r["bench"], r["tokens"]) for r in found if r["op"] == "pair" and r["figure"] == "event"}
    assert pairs == {(mode, tokens) for mode in ("ll", "ht") for tokens in (1, 64)}
    fitted = [r for r in found if r["bench"] == "fit"]
    assert fitted == crossover.fit([r for r in found if r["bench"] != "fit"])
    assert fitted[0]["figure"] == "crossover_event"
    text = crossover.render(fitted)
    assert text in shown and "bf16, flat, native, event: " in text
    assert text in run("-m", "bench", "fit", str(path), "--json", str(again))
    assert records.load([again]) == fitted
    assert text in run("-m", "bench", "table", str(path))


def curve_records(figure: str, ll: dict[int, float], ht: dict[int, float], **fields: Any) -> list[records.Record]:
    made = []
    for bench, times in (("ll", ll), ("ht", ht)):
        more = {"cached": False, "alignment": 1, "placement": "in_place"} if bench == "ht" else {}
        for tokens, value in times.items():
            at = {"bench": bench, "op": "pair", "figure": figure, "tokens": tokens, "value": value, "layout": "flat"}
            made.append(gpu_record(**(at | more | fields)))
    return made


def test_the_crossover_lies_where_the_curves_meet() -> None:
    # At 512 twice as fast, at 2,048 half as fast: equal in the middle, by the logarithms.
    found = curve_records("graph", {32: 10, 512: 20, 2048: 100}, {32: 30, 512: 40, 2048: 50})
    others = [
        gpu_record(**(dict.fromkeys(("op",), "pair") | {"bench": "ht", "figure": "graph", "tokens": 32, "value": 1.0,
                   "layout": "flat", "cached": cached, "placement": placement, "alignment": 1, "num_sms": sms}))
        for cached, placement, sms in ((True, "in_place", 0), (False, "staged", 0), (False, "in_place", 12))
    ]  # fmt: skip
    others += [
        gpu_record(
            bench="ll", op="pair", figure="graph", tokens=tokens, value=1000.0, layout="flat", enable_shrink=True
        )
        for tokens in (32, 512, 2048)
    ]
    first, best, loss, now = crossover.fit(found + others)
    assert (first["figure"], first["tokens"], first["value"]) == ("crossover_graph", 1024, 1024 * 4 * 14336)
    assert (best["figure"], best["value"], best["dtype"]) == ("auto_ll_bytes", 1024 * 4 * 14336, "all")
    assert (loss["value"], now["value"]) == (1.0, 1.0)
    assert choose_mode(1024, 14336, 8, 4, None) == "ll" and best["value"] <= AUTO_LL_BYTES
    shown = crossover.render(crossover.fit(found))
    assert "bf16, flat, native, graph: 1024 tokens, 56.00 MiB" in shown and "AUTO_LL_BYTES = 58720256" in shown


def test_the_threshold_loses_least_at_worst() -> None:
    """Two curves that want different thresholds: the one that loses least at worst."""
    early = curve_records("graph", {64: 10, 128: 30, 256: 90}, {64: 15, 128: 20, 256: 30})
    late = curve_records("event", {64: 10, 128: 18, 256: 30}, {64: 40, 128: 20, 256: 20})
    fitted = crossover.fit(early + late)
    values = {r["figure"]: r["value"] for r in fitted}
    assert 64 < fitted[0]["tokens"] < 128 < fitted[1]["tokens"] < 256
    # HT at 128 tokens costs 20 / 18; LL there would cost 30 / 20.
    assert values["loss"] == pytest.approx(20 / 18, abs=1e-3)
    assert choose_mode(128, 14336, 8, 4, None) == "ll" and values["loss_now"] == 3.0
    assert 64 * 4 * 14336 <= values["auto_ll_bytes"] < 128 * 4 * 14336
    (curve,) = crossover.curves(early)
    assert curve.loss(64 * 4 * 14336) == 1.0 and curve.loss(64 * 4 * 14336 - 1) == 1.5  # the edge is LL's


def test_no_crossover_says_which_mode_is_faster() -> None:
    slow = {tokens: 10.0 * tokens for tokens in (1, 2)}
    fast = {tokens: 1.0 * tokens for tokens in (1, 2)}
    for ll, ht, said in ((fast, slow, "low latency is the faster"), (slow, fast, "high throughput is the faster")):
        (only,) = crossover.fit(curve_records("event", ll, ht))
        assert only["value"] is None and only["skipped"].startswith(said)
        assert said in crossover.render([only])
    # Faster once, but not for good.
    (only,) = crossover.fit(curve_records("event", {1: 10, 2: 30, 4: 10}, {1: 20, 2: 20, 4: 20}))
    assert only["value"] is None
    assert crossover.fit(curve_records("event", fast, {})) == []
    assert "no shape" in crossover.render([])
