"""The pictures of the example model: names that a reader knows, units, no single points."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib")

from examples.moe_lm import pictures, serve, train

SIZES = {"hidden": 64, "layers": 1, "experts": 8, "topk": 2}
COMMON = {"ranks": 2, "device": "cpu", "sizes": SIZES, "dtype": "torch.float32"}
LAYER = [{"kind": kind, "begin_us": 10.0 * place, "us": 5.0} for place, kind in enumerate(pictures.KINDS)]


def training(exchange: str, entries: int) -> dict[str, Any]:
    progress = [{"step": step, "tokens_per_s": 100.0, "loss": 1.0} for step in range(1, entries + 1)]
    return COMMON | {
        "what": "training", "exchange": exchange, "tokens_a_step": 10, "tokens_per_s": 100.0, "exchange_ms": 20.0,
        "losses": [1.0] * entries, "progress": progress, "layer": LAYER,
    }  # fmt: skip


def serving(*rates: float) -> dict[str, Any]:
    values = {f"{key}_{share}_ms": 2.0 for key in ("ttft", "tpot", "itl") for share in ("p50", "p99")}
    figures = [
        {"exchange": exchange, "overlap": False, "rate": rate} | values
        for exchange in ("nccl_ep", "all_to_all_single", "deep_ep")
        for rate in rates
    ]
    return COMMON | {"what": "serving", "figures": figures, "profiles": []}


def texts(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_every_exchange_has_a_colour() -> None:
    assert set(pictures.COLOURS) == {*train.EXCHANGES, *serve.EXCHANGES}
    reports = [training(exchange, 3) for exchange in train.EXCHANGES]
    assert len(texts(pictures.pictures(reports)["training_h64"]())) == len(reports) + 1


@pytest.mark.parametrize("entries", [1, 3])
def test_training_names_the_exchanges_and_has_no_single_points(entries: int) -> None:
    made = pictures.pictures([training("nccl_ep", entries), training("all_to_all_single", entries)])
    figure = made["training_h64"]()
    assert texts(figure) == ["nccl_ep", "torch's all_to_all_single", "all else of a step"]
    assert all(len(line.get_xdata()) > 1 for axes in figure.axes for line in axes.lines)
    assert all(bool(axes.lines) == (entries > 1) for axes in figure.axes[:2])
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "loss in nats a byte", "tokens/s of all ranks", "time of a step in ms",
    ]  # fmt: skip


@pytest.mark.parametrize("rates", [(0.0,), (20.0,), (20.0, 40.0)])
def test_serving_has_lines_of_several_rates_and_bars_of_one(rates: tuple[float, ...]) -> None:
    figure = pictures.pictures([serving(*rates)])["serving_h64"]()
    names = ["nccl_ep", "torch's all_to_all_single", "DeepEP's calls over nccl_ep"]
    assert sorted(texts(figure)) == sorted([*names, "median", "99th percentile"])
    for axes in figure.axes:
        assert (len(axes.lines), len(axes.patches)) == ((6, 0) if len(rates) > 1 else (0, 6))
        assert axes.get_ylabel() == "time in ms"


def test_a_layer_names_the_exchange() -> None:
    figure = pictures.pictures([training("deep_ep", 2)])["training_layer_h64"]()
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()][::-1]
    assert labels[:4] == [f"exchange: {kind}" for kind in pictures.EXCHANGE] and labels[4:] == [
        "GEMM",
        "attention",
        "other",
    ]
    assert axes.get_title() == "exchange of tokens by DeepEP's calls over nccl_ep: the layer takes 0.1 ms"
    assert axes.get_xlabel().startswith("µs ")
