"""What was measured, as a list of flat records in a JSON file: docs/benchmarks.md has the fields."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, Any]

# In the order of writing. What could not be measured has the value null, and says why in one more field, "skipped".
FIELDS = (
    "bench", "system", "api", "op", "figure", "value", "unit", "p99", "ranks", "tokens", "hidden", "topk", "experts",
    "dtype", "layout", "routing", "num_sms", "num_sms_used", "seed", "device", "revision", "date",
)  # fmt: skip
# That some records have. ht: cached, alignment (of packed), placement ("in_place"; "staged": a copy was needed, for a
# tensor outside the arena). overlap: mode, gemm, partition. ll: enable_shrink, where the buffer masks late ranks.
# time_line: mode, alignment, domain_size where it was given, and of a kernel's stamp the first and the last warp's time
# (value: the median one's).
# host (bench/measure_host.py): what torch.set_default_device was given.
# wire (bench/measure_wire.py): the format of sums on their way home.
# suite: how many tests of tests/gpu passed or were skipped, under the NCCL named. model: examples/moe_lm.
# rivals: version of the system, and a note that its figure needs.
# plan: of a build with NCCL_EP_LAB, what was in EP_PLAN_D, EP_PLAN_C or EP_PLAN_HD; "": the library's own.
# gin (tests/gpu/test_gin.py): messages of a rank to a peer, bytes of each, and what carries them.
_MORE = (
    "cached", "alignment", "placement", "mode", "gemm", "partition", "enable_shrink", "kernel", "stamp", "first",
    "last", "messages", "bytes", "network", "nccl", "skipped", "default_device", "wire", "domain_size",
    "version", "note", "plan",
)  # fmt: skip


def make(common: Record, **fields: Any) -> Record:
    """A record of all fields, in their order, and of those that only some records have."""
    values = {"bench": "ll", "unit": "us", "p99": None, "num_sms_used": None} | common | fields
    record = {name: values.pop(name) for name in FIELDS}
    record |= {name: values.pop(name) for name in _MORE if name in values}
    if values:
        raise TypeError(f"records have no field {', '.join(values)}")
    return record


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * percent) // 100) - 1))]


def slowest(samples: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Median and 99th percentile of the rank with the highest median. One sample a rank is a mean: it has no p99."""
    rank = max(samples, key=median)
    return round(median(rank), 3), round(percentile(rank, 99), 3) if len(rank) > 1 else None


def revision() -> str:
    """Of the sources: NCCL_EP_REVISION (for copies without .git), else git's, else "unknown"."""
    if given := os.environ.get("NCCL_EP_REVISION"):
        return given
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # or git would find that of a directory above
        return "unknown"
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells, one below the other."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def save(path: Path, records: Iterable[Record]) -> None:
    """All records, one a line; a reader never sees half a file."""
    text = ",\n".join(json.dumps(record) for record in records)
    beside = path.with_name(path.name + ".new")
    beside.write_text(f"[\n{text}\n]\n")
    beside.replace(path)


def given(parser: argparse.ArgumentParser, paths: Iterable[Path]) -> list[Record]:
    """``load`` of files that were named on the command line. Exits where one cannot be read."""
    try:
        return load(paths)
    except (OSError, ValueError) as error:
        parser.error(str(error))


# Older files have floors that were measured; the floor is computed.
_RETIRED = ("floor_flags", "floor_push")


def load(paths: Iterable[Path]) -> list[Record]:
    """Records of several files in one list. Raises ValueError for a file of another kind."""
    records: list[Record] = []
    for path in paths:
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        if not isinstance(found, list) or any(not isinstance(record, dict) for record in found):
            raise ValueError(f"{path} is not a list of records")
        for record in found:
            if missing := [name for name in FIELDS if name not in record]:
                raise ValueError(f"{path}: a record lacks {', '.join(missing)}")
        records += [record for record in found if record["system"] not in _RETIRED]
    return records
