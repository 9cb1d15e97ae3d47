"""The files of a report, known by what is in them."""

from __future__ import annotations

import json
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
# What the page takes from each.
_NEEDED = {
    "head": ("version", "rank", "host", "machine", "torch", "unix_ns", "clock_ns"),
    "buffer": ("name", "num_ranks", "device"),
    "operation": ("operation", "number", "begin_ns", "end_ns", "tokens", "row_bytes", "is_home_bound"),
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
    is_cut: bool = False  # the process ended in the middle of a line

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
    for path in paths:
        for each in _files_of(path):
            try:
                _add(found, each, each.read_text())
            except UnicodeDecodeError as error:
                raise ValueError(f"{each} is no text: {error}") from None
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(f"{each} is damaged: {type(error).__name__}: {error}") from error
    _require_one_group(found.recorded)
    return found


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{path} has no *.jsonl, which nccl_ep.record writes")
    return files


def _add(found: Inputs, path: Path, text: str) -> None:
    first = _parsed(text.partition("\n")[0])
    if isinstance(first, dict) and "nccl_ep_record" in first:
        found.recorded.append(_recorded(path, first, text))
        return
    value = _parsed(text)
    if value is None:
        raise ValueError(f"{path} is no JSON, must be {KINDS}")
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
        if missing := [name for name in _NEEDED[what] if name not in line]:
            raise ValueError(f"{path}: {'an' if what[0] in 'eo' else 'a'} {what} lacks {', '.join(missing)}")
    return lines


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _recorded(path: Path, header: Json, text: str) -> Recorded:
    if header["nccl_ep_record"] != FORMAT:
        raise ValueError(
            f"{path} is a recording of format {header['nccl_ep_record']}, this report reads {FORMAT}: it was written "
            f"by nccl_ep {header.get('version')}"
        )
    _complete(path, "head", [header])
    found = Recorded(path, header)
    lines = text.split("\n")[1:]
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        value = _parsed(line)
        if not isinstance(value, dict):
            if number != len(lines) + 1:
                raise ValueError(f"{path}: line {number} is no JSON object")
            found.is_cut = True  # the last line has no end
        elif "in_buffer" in value:
            found.operations += _complete(path, "operation", [value])
        elif "stats_of" in value:
            found.buffers[value["stats_of"]]["stats"] = value["stats"]
        elif "buffer" in value:
            found.buffers += _complete(path, "buffer", [value])
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
