"""From how many tokens on high throughput is the faster mode, by records of both: what ``mode="auto"`` should know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nccl_ep.modes import AUTO_LL_BYTES

from . import records
from .records import Record
from .workload import PAYLOADS

_SHAPE = ("device", "ranks", "hidden", "topk", "experts", "dtype", "layout", "routing", "seed", "revision", "date")
_COMMON = ("system", "api", "op", *_SHAPE)
_MODES = ("ll", "ht")


@dataclass(frozen=True)
class Curve:
    """Times of both modes of one call. points: (tokens, us in LL, us in HT), tokens ascending."""

    like: Record
    figure: str  # that was measured
    points: tuple[tuple[int, float, float], ...]

    def token_bytes(self) -> int:
        """As ``modes.choose_mode`` counts: a row of x for every rank that a token can reach."""
        payload = PAYLOADS[self.like["dtype"]]
        width = self.like["hidden"] // payload.packed
        return int(min(self.like["topk"], self.like["ranks"]) * width * payload.rows.itemsize)

    def crossing(self) -> float | None:
        """Tokens at which HT overtakes LL for good, between two measured numbers by the logarithms. None: at none."""
        gains = [(tokens, math.log(ht / ll)) for tokens, ll, ht in self.points]
        last = max((i for i, (_, gain) in enumerate(gains) if gain > 0), default=-1)
        if last < 0 or last + 1 == len(gains):
            return None
        (below, gain), (above, loss) = gains[last], gains[last + 1]
        return float(below * (above / below) ** (gain / (gain - loss)))

    def why_none(self) -> str:
        always = "low latency" if self.points[-1][2] > self.points[-1][1] else "high throughput"
        return f"{always} is the faster one from {self.points[0][0]} to {self.points[-1][0]} tokens"

    def loss(self, threshold: float) -> float:
        """Time of the mode that ``threshold`` (bytes, as AUTO_LL_BYTES) takes over that of the faster one, at worst."""
        each = self.token_bytes()
        return max((ll if tokens * each <= threshold else ht) / min(ll, ht) for tokens, ll, ht in self.points)


def curves(found: Sequence[Record]) -> list[Curve]:
    """Of pairs by the library's choice of SMs, where both modes were measured. Cached dispatches and staging copies are
    left out, and buffers with masks, which high throughput does not have."""
    times: dict[tuple[object, ...], dict[int, dict[str, float]]] = {}
    like: dict[tuple[object, ...], Record] = {}
    for record in found:
        is_wanted = record["bench"] in _MODES and record["system"] == "nccl_ep" and record["op"] == "pair"
        if not is_wanted or record["unit"] != "us" or record["value"] is None or record["num_sms"]:
            continue
        if record.get("cached") or record.get("placement") == "staged" or record.get("enable_shrink"):
            continue
        key = (record["figure"], *(record[name] for name in _COMMON))
        like.setdefault(key, record)
        times.setdefault(key, {}).setdefault(record["tokens"], {})[record["bench"]] = record["value"]
    made = []
    for key, by_tokens in times.items():
        points = [(tokens, each["ll"], each["ht"]) for tokens, each in sorted(by_tokens.items()) if len(each) == 2]
        if points:
            made.append(Curve(like[key], str(key[0]), tuple(points)))
    return made


def fit(found: Sequence[Record]) -> list[Record]:
    """A record of each crossover (bytes; ``tokens`` rounded), and of the threshold that loses least at worst."""
    made, crossings = [], []
    every = curves(found)
    for curve in every:
        common = {name: curve.like[name] for name in _COMMON}
        common |= {"bench": "fit", "num_sms": 0, "figure": f"crossover_{curve.figure}", "unit": "B"}
        tokens = curve.crossing()
        if tokens is None:
            made.append(records.make(common, tokens=0, value=None, skipped=curve.why_none()))
        else:
            crossings.append(tokens * curve.token_bytes())
            made.append(records.make(common, tokens=round(tokens), value=round(crossings[-1])))
    if crossings:
        # The first of equals: between two measured numbers all are.
        candidates = [math.exp(sum(map(math.log, crossings)) / len(crossings)), *crossings]
        candidates += [tokens * curve.token_bytes() for curve in every for tokens, _, _ in curve.points]
        best = min(candidates, key=lambda threshold: worst_loss(every, threshold))
        common = {name: every[0].like[name] for name in _COMMON} | {"dtype": "all", "layout": "all"}
        figures = {"bench": "fit", "num_sms": 0, "tokens": 0, "figure": "auto_ll_bytes", "unit": "B"}
        made.append(records.make(common, value=round(best), **figures))
        for figure, threshold in (("loss", best), ("loss_now", AUTO_LL_BYTES)):
            loss = round(worst_loss(every, threshold), 3)
            made.append(records.make(common, value=loss, **(figures | {"figure": figure, "unit": "x"})))
    return made


def worst_loss(every: Sequence[Curve], threshold: float) -> float:
    return max(curve.loss(threshold) for curve in every)


def render(fitted: Sequence[Record]) -> str:
    """Of what ``fit`` returned."""
    lines = []
    value = {record["figure"]: record["value"] for record in fitted}
    for record in fitted:
        if record["figure"].startswith("crossover_"):
            how = f"{record['dtype']}, {record['layout']}, {record['api']}, {record['figure'].split('_', 1)[1]}"
            if record["value"] is None:
                lines.append(f"{how}: no crossover: {record['skipped']}")
            else:
                lines.append(f"{how}: {record['tokens']} tokens, {record['value'] / 2**20:.2f} MiB")
    if "auto_ll_bytes" in value:
        lines.append(
            f"AUTO_LL_BYTES = {value['auto_ll_bytes']} ({value['auto_ll_bytes'] / 2**20:.2f} MiB): at worst "
            f"{value['loss']:.3f} times the faster mode at what was measured; now {AUTO_LL_BYTES}: "
            f"{value['loss_now']:.3f}"
        )
    return "\n".join(["low latency below, high throughput above (tokens of a rank; bytes as modes.py counts them)",
                      *(lines or ["no shape was measured in both modes"])])  # fmt: skip
