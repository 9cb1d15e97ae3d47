"""What has become slower, or larger, since it was measured before."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import records
from .options import words
from .records import Record

# Of a call that is to take as long wherever the rest is equal.
CALL = (
    "bench", "system", "api", "op", "figure", "ranks", "tokens", "hidden", "topk", "experts", "dtype", "layout",
    "routing", "num_sms", "device", "cached", "alignment", "placement", "mode", "gemm", "partition", "enable_shrink",
)  # fmt: skip
_SHOWN = ("bench", "ranks", "op", "figure", "tokens", "hidden", "topk", "experts", "dtype", "layout", "routing", "api")
FIGURES = ("graph", "graph_pdl", "kernel", "memory", "memory_total")  # that the host has no part in
_FURTHER = ("event", "host", "memory_arena")
Key = tuple[object, ...]


class Change(NamedTuple):
    """A measurement that was made before, at its best, and now."""

    before: Record
    now: Record

    @property
    def percent(self) -> float:
        now, before = float(self.now["value"]), float(self.before["value"])
        return 100 * (now / before - 1)


def _best(found: Iterable[Record], figures: Iterable[str]) -> dict[Key, Record]:
    """Of each measurement the smallest value. Records of experiments say what was changed, and are none."""
    best: dict[Key, Record] = {}
    for record in found:
        is_ours = record["system"] == "nccl_ep" and record["figure"] in figures and "change" not in record
        if not is_ours or not record["value"]:  # not measured, or nothing
            continue
        key = tuple(record.get(name) for name in CALL)
        if key not in best or record["value"] < best[key]["value"]:
            best[key] = record
    return best


def find(before: Iterable[Record], now: Iterable[Record], figures: Iterable[str] = FIGURES) -> list[Change]:
    """All measurements that both have, the one that grew most first."""
    old, new = _best(before, figures), _best(now, figures)
    return sorted((Change(old[key], new[key]) for key in new if key in old), key=lambda each: -each.percent)


def render(changes: list[Change], percent: float) -> str:
    """A line for each that grew by more than ``percent``, and a summary."""
    grown = [each for each in changes if each.percent > percent]
    num_shrunk = sum(each.percent < -percent for each in changes)
    lines = [[*_SHOWN, "num_sms", "before", "at", "now", "at", "percent"]] if grown else []
    for each in grown:
        shown = [str(each.now[name]) for name in _SHOWN] + [str(each.now["num_sms"] or "auto")]
        lines.append(
            [*shown, f"{each.before['value']:.2f}", str(each.before["revision"]), f"{each.now['value']:.2f}",
             str(each.now["revision"]), f"{each.percent:+.1f}"]
        )  # fmt: skip
    summary = (
        f"{len(changes)} measurements that were made before: {len(grown)} have grown by more than {percent:g} %, "
        f"{num_shrunk} have shrunk by more"
    )
    return "\n".join([*(records.columns(lines) if lines else []), summary])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench compare",
        description="Prints what NOW has that is slower, or larger, than the best of BEFORE: same shape, same call, "
        "same device. Exit code 1 if there is any.",
    )
    parser.add_argument("now", type=Path, metavar="NOW")
    parser.add_argument("before", nargs="+", type=Path, metavar="BEFORE")
    parser.add_argument("--percent", type=float, default=3.0, help="that is no difference (default: %(default)s)")
    parser.add_argument(
        "--figures", type=words(*FIGURES, *_FURTHER), default=",".join(FIGURES),
        help=f"that are compared, of {', '.join((*FIGURES, *_FURTHER))} (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    before = [path for path in options.before if path.resolve() != options.now.resolve()]
    now = records.given(parser, [options.now])
    if not before:
        parser.error(f"BEFORE is {options.now} alone, which is NOW")
    changes = find(records.given(parser, before), now, options.figures)
    print(render(changes, options.percent))
    return int(any(each.percent > options.percent for each in changes))
