"""The files of a report, known by what is in them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..recording import FORMAT

KINDS = (
    "a folder or file that nccl_ep.record wrote, records of the benchmark, estimates of its model, "
    "the JSON of nccl_ep.doctor, or that of Buffer.stats()"
)
Json = dict[str, Any]
_MOST_RANKS = 2048  # of a world
# What the page takes from each, and of which type it is: float is a finite number, int a whole one of 64 bits.
_NEEDED: dict[str, tuple[str, ...] | dict[str, type]] = {
    "head": {
        "version": str, "rank": int, "host": str, "machine": str, "torch": str, "unix_ns": int, "clock_ns": int,
    },
    "buffer": {"buffer": int, "name": str, "num_ranks": int, "device": str},
    "operation": {
        "in_buffer": int, "operation": str, "number": int, "begin_ns": int, "end_ns": int, "tokens": int,
        "row_bytes": int, "is_home_bound": bool,
    },
    "record": (
        "bench", "system", "api", "op", "figure", "value", "unit", "p99", "ranks", "tokens", "hidden", "topk",
        "experts", "dtype", "layout", "routing", "device", "revision", "date",
    ),
    "estimate": ("op", "mode", "path", "dtype", "nodes", "tokens", "us", "wire_us", "nic_mb", "bound"),
    "finding": ("level", "text"),
}  # fmt: skip


@dataclass
class Recorded:
    """What one rank has recorded. buffers: in the order of their numbers, with "stats" where they are known."""

    path: Path
    header: Json
    buffers: list[Json] = field(default_factory=list)
    operations: list[Json] = field(default_factory=list)
    has_end: bool = False  # else its process was killed, or its disk was full

    @property
    def rank(self) -> int:
        return int(self.header["rank"])


@dataclass
class Inputs:
    recorded: list[Recorded] = field(default_factory=list)
    records: list[tuple[Path, list[Json]]] = field(default_factory=list)
    models: list[tuple[Path, list[Json]]] = field(default_factory=list)
    doctors: list[tuple[Path, Json]] = field(default_factory=list)
    stats: list[tuple[Path, Json]] = field(default_factory=list)


def load(paths: Iterable[Path]) -> Inputs:
    """Raises OSError for a file that cannot be read; ValueError, with its name, for one of another kind."""
    found = Inputs()
    for each in files_of(paths):
        try:
            _add(found, each, each.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{each} is no text: {error}") from None
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{each} is damaged: {type(error).__name__}: {error}") from error
    _require_one_group(found.recorded)
    return found


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Those that ``load`` reads, each once. ValueError for a folder that has none."""
    found: dict[Path, Path] = {}
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} has no *.jsonl: nccl_ep.record writes one at a rank's first operation")
        for each in files:
            found.setdefault(each.resolve(), each)
    return list(found.values())


def _add(found: Inputs, path: Path, text: str) -> None:
    first = _parsed(text.partition("\n")[0])
    if isinstance(first, dict) and "nccl_ep_record" in first:
        found.recorded.append(_recorded(path, first, text))
        return
    value = _parsed(text)
    if value is None:
        raise ValueError(f"{path} is {'no JSON' if text else 'empty'}, must be {KINDS}")
    if isinstance(value, list) and value and all(isinstance(each, dict) and "bench" in each for each in value):
        found.records.append((path, _complete(path, "record", value)))
    elif isinstance(value, dict) and value.get("kind") == "model":
        found.models.append((path, _complete(path, "estimate", value["estimates"])))
    elif isinstance(value, dict) and {"facts", "findings"} <= value.keys():
        _complete(path, "finding", value["findings"])
        found.doctors.append((path, value))
    elif isinstance(value, dict) and {"calls", "window_bytes"} <= value.keys():
        found.stats.append((path, value))
    else:
        raise ValueError(f"{path} is of a kind that is not known, must be {KINDS}")


def _complete(path: Path, what: str, lines: list[Json]) -> list[Json]:
    """ValueError where one lacks what is needed."""
    for line in lines:
        if not isinstance(line, dict):
            raise ValueError(f"{path}: {line!r} is no {what}")
        needed, article = _NEEDED[what], "an" if what[0] in "eo" else "a"
        if missing := [name for name in needed if name not in line]:
            raise ValueError(f"{path}: {article} {what} lacks {', '.join(missing)}")
        for name, kind in needed.items() if isinstance(needed, dict) else ():
            if not _is(line[name], kind):
                raise ValueError(
                    f"{path}: {name} of {article} {what} is {line[name]!r:.60}, must be of {kind.__name__}"
                )
    return lines


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return _is(value, int) or (type(value) is float and math.isfinite(value))
    if kind is int:
        return type(value) is int and -(1 << 62) < value < 1 << 62
    return type(value) is kind


def _checked_operation(path: Path, line: Json, buffers: list[Json]) -> Json:
    """ValueError for one that cannot have been recorded."""
    _complete(path, "operation", [line])
    if not 0 <= line["in_buffer"] < len(buffers):
        raise ValueError(f"{path}: in_buffer of an operation is {line['in_buffer']}, and {len(buffers)} came before")
    ranks = buffers[line["in_buffer"]]["num_ranks"]
    for name, lengths in (("rows", ranks), ("choices", None)):
        counts = line.get(name, [])
        fits = isinstance(counts, list) and all(_is(each, int) and each >= 0 for each in counts)
        if not fits or (name in line and len(counts) != (lengths or len(counts) // ranks * ranks)):
            raise ValueError(f"{path}: {name} of an operation are {counts!r:.60}, must be numbers of {ranks} ranks")
    for name in ("device_begin_ns", "device_us"):
        if name in line and not _is(line[name], float):
            raise ValueError(f"{path}: {name} of an operation is {line[name]!r:.60}, must be a number")
    return line


def _checked_stats(path: Path, stats: Any) -> Json:
    if not isinstance(stats, dict):
        raise ValueError(f"{path}: stats of a buffer are {stats!r:.60}, must be an object")
    return stats


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _recorded(path: Path, header: Json, text: str) -> Recorded:
    if header["nccl_ep_record"] != FORMAT:
        raise ValueError(
            f"{path} is a recording of format {header['nccl_ep_record']}, this report reads {FORMAT}: it was written "
            f"by nccl_ep {header.get('version')}"
        )
    _complete(path, "head", [header])
    if not 0 <= header["rank"] < _MOST_RANKS:
        raise ValueError(f"{path}: rank is {header['rank']}, must be 0 to {_MOST_RANKS - 1}")
    found = Recorded(path, header)
    lines = text.split("\n")[1:]
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        value = _parsed(line)
        if not isinstance(value, dict):
            if number != len(lines) + 1:
                raise ValueError(f"{path}: line {number} is no JSON object")
            continue  # the last line, which has no end
        if "in_buffer" in value:
            found.operations.append(_checked_operation(path, value, found.buffers))
        elif "recording_ended_ns" in value:
            found.has_end = True
        elif "stats_of" in value:
            found.buffers[value["stats_of"]]["stats"] = _checked_stats(path, value["stats"])
        elif "buffer" in value:
            _complete(path, "buffer", [value])
            if value["buffer"] >= len(found.buffers):  # else it is there twice
                found.buffers.append(value)
            if not header["rank"] < value["num_ranks"] <= _MOST_RANKS:
                raise ValueError(
                    f"{path}: num_ranks of a buffer is {value['num_ranks']}, and this is rank {header['rank']}"
                )
        else:
            raise ValueError(f"{path}: line {number} is of no known kind")
    return found


def _require_one_group(recorded: list[Recorded]) -> None:
    by_rank: dict[int, Recorded] = {}
    for each in recorded:
        other = by_rank.setdefault(each.rank, each)
        if other is not each:
            raise ValueError(
                f"{other.path} and {each.path} are both of rank {each.rank}: give the files of one run and one group"
            )
    sizes = {buffer["num_ranks"]: each.path for each in recorded for buffer in each.buffers}
    if len(sizes) > 1:
        shown = " and ".join(f"{path} of {ranks} ranks" for ranks, path in sizes.items())
        raise ValueError(f"{shown}: give the files of one run and one group")
    recorded.sort(key=lambda each: each.rank)
