"""The figures of a recorded program, from the files of its ranks. The page shows these, and has them as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .inputs import Json, Recorded

Matrix = list[list[int]]
_CLOCKS_APART_S = 60  # between machines


@dataclass
class Step:
    """An operation of all ranks, of those whose files are there. parts: what each rank's host called for it, two of a
    split call."""

    mode: str  # "LL" or "HT"
    kind: str  # "dispatch", "combine"
    parts: dict[int, list[Json]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.mode} {self.kind}"

    def begin_ns(self, rank: int) -> float:
        """When the rank came to it: on its GPU where that is known."""
        return _begin_ns(self.parts[rank][0])

    def us(self, rank: int, of_device: bool) -> float | None:
        parts = self.parts[rank]
        times = [each["device_us"] for each in parts if "device_us" in each] if of_device else map(_host_us, parts)
        known = list(times)
        return round(sum(known), 3) if known else None


def _host_us(line: Json) -> float:
    return float(line["end_ns"] - line["begin_ns"]) / 1e3


def _begin_ns(line: Json) -> float:
    return float(line["device_begin_ns"] if "device_begin_ns" in line else line["begin_ns"])


def _end_ns(line: Json) -> float:
    on_device = "device_us" in line
    return _begin_ns(line) + line["device_us"] * 1e3 if on_device else float(line["end_ns"])


def figures(recorded: list[Recorded]) -> Json:
    """All that the page says of a recorded program. Times: us, from the first operation's begin on."""
    num_ranks = max([each.buffers[0]["num_ranks"] for each in recorded if each.buffers], default=len(recorded))
    notes = _put_on_one_clock(recorded)
    notes += _notes(recorded, num_ranks)
    steps = steps_of(recorded)
    notes += _other_runs(steps)
    zero = min((line["begin_ns"] for each in recorded for line in each.operations), default=0)
    sent = {kind: _sent(recorded, num_ranks, kind == "combine") for kind in ("dispatch", "combine")}
    waits, waited_by_step = _waits(steps, num_ranks)
    return {
        "num_ranks": num_ranks,
        "ranks": [each.rank for each in recorded],
        "devices": sorted({_device_kind(buffer["device"]) for each in recorded for buffer in each.buffers}),
        "hosts": sorted({each.header["host"] for each in recorded}),
        "version": ", ".join(sorted({each.header["version"] for each in recorded})),
        "torch": ", ".join(sorted({each.header["torch"] for each in recorded})),
        "unix_ns": min((each.header["unix_ns"] for each in recorded), default=0),
        "notes": notes,
        "sent": sent,
        "load": _load(steps),
        "experts": _experts(steps),
        "times": _times(steps, recorded, waited_by_step),
        "waits_us": waits,
        "spans": list(_spans(recorded, zero)),
        "stats": [
            {"rank": each.rank, "name": buffer["name"], **buffer["stats"]}
            for each in recorded
            for buffer in each.buffers
            if "stats" in buffer
        ],
    }


def _device_kind(device: str) -> str:
    return device.partition(":")[0]


def _put_on_one_clock(recorded: list[Recorded]) -> list[str]:
    """Times of a machine are of one clock. Those of several are brought together by their wall clocks."""
    machines = {each.header["machine"] for each in recorded}
    if len(machines) < 2:
        return []
    offsets: dict[str, int] = {}
    for each in recorded:
        header = each.header
        offset = offsets.setdefault(header["machine"], header["unix_ns"] - header["clock_ns"])
        for line in each.operations:
            for name in ("begin_ns", "end_ns", "device_begin_ns"):
                if name in line:
                    line[name] += offset
    return [f"The clocks of {len(machines)} machines are aligned by their wall clocks: waits are as good as these."]


def _notes(recorded: list[Recorded], num_ranks: int) -> list[str]:
    notes = []
    missing = sorted(set(range(num_ranks)) - {each.rank for each in recorded})
    if missing:
        notes.append(
            f"No file of rank {', '.join(map(str, missing))}: rows that these send or bring home are not here."
        )
    if any(buffer["device"] == "cpu" for each in recorded for buffer in each.buffers):
        notes.append("These are CPU ranks: their times say nothing about GPUs.")
    for each in recorded:
        if not each.has_end:
            notes.append(f"{each.path.name} has no end: its process was killed, or its disk was full.")
        failed = sum("has_failed" in line for line in each.operations)
        captured = sum("is_captured" in line for line in each.operations)
        if failed:
            notes.append(f"Rank {each.rank}: {failed} operations failed.")
        if captured:
            notes.append(
                f"Rank {each.rank}: {captured} operations went into CUDA graphs. They count once, without rows and GPU "
                "times; replays are not seen."
            )
    return notes


def _other_runs(steps: list[Step]) -> list[str]:
    """No rank ends an operation before all have begun it, but where masks leave one out."""
    for step in steps:
        if any("is_captured" in line for lines in step.parts.values() for line in lines):
            continue
        early = min(step.parts, key=lambda rank: _end_ns(step.parts[rank][-1]))
        late = max(step.parts, key=step.begin_ns)
        gap_s = (step.begin_ns(late) - _end_ns(step.parts[early][-1])) / 1e9
        if gap_s > _CLOCKS_APART_S:
            return [
                f"Rank {early} ended {step.name} {step.parts[early][-1]['number']} {gap_s:,.0f} s before rank {late} "
                "began it: the files may be of different runs."
            ]
    return []


def kind_of(line: Json) -> tuple[str, str]:
    """Mode and kind."""
    name = line["operation"]
    is_ht = name.startswith("ht ")
    return ("HT" if is_ht else "LL"), ("combine" if "combine" in name else "dispatch")


def steps_of(recorded: list[Recorded]) -> list[Step]:
    """In the order of time. Ranks' calls belong together by buffer, kind and number."""
    found: dict[tuple[Any, ...], Step] = {}
    for each in recorded:
        for line in each.operations:
            if "has_failed" in line:
                continue
            mode, kind = kind_of(line)
            step = found.setdefault((line["in_buffer"], mode, kind, line["number"]), Step(mode, kind))
            step.parts.setdefault(each.rank, []).append(line)
    return sorted(found.values(), key=lambda step: min(step.begin_ns(rank) for rank in step.parts))


def _sent(recorded: list[Recorded], num_ranks: int, is_home_bound: bool) -> dict[str, Matrix]:
    """Rows and bytes [from][to], those to the own rank too."""
    rows, size = ([[0] * num_ranks for _ in range(num_ranks)] for _ in range(2))
    for each in recorded:
        for line in each.operations:
            if line["is_home_bound"] != is_home_bound:
                continue
            for other, count in enumerate(line.get("rows", ())):
                source, target = (other, each.rank) if is_home_bound else (each.rank, other)
                rows[source][target] += count
                size[source][target] += count * line["row_bytes"]
    return {"rows": rows, "bytes": size}


def _choices(step: Step) -> list[int] | None:
    """Of each expert, those of all ranks. Captured operations have none."""
    given = [line["choices"] for lines in step.parts.values() for line in lines if "choices" in line]
    if len({len(each) for each in given}) > 1:
        raise ValueError(f"a {step.name} has other experts on other ranks: give the files of one run")
    return [sum(each) for each in zip(*given, strict=True)] if given else None


def _load(steps: list[Step]) -> list[Json]:
    """Of each dispatch that has rows: those of the fullest expert and rank, over the mean of all of them."""
    found = []
    for step in steps:
        choices = _choices(step) if step.kind == "dispatch" else None
        if not choices or not sum(choices):
            continue
        ranks = max(len(line["rows"]) for lines in step.parts.values() for line in lines if "rows" in line)
        local = len(choices) // ranks
        of_ranks = [sum(choices[r * local : (r + 1) * local]) for r in range(ranks)]
        mean = sum(choices) / len(choices)
        found.append(
            {
                "max": max(choices), "mean": round(mean, 3), "expert": choices.index(max(choices)),
                "max_over_mean": round(max(choices) / mean, 4),
                "rank": of_ranks.index(max(of_ranks)),
                "rank_max_over_mean": round(max(of_ranks) * ranks / sum(of_ranks), 4),
            }
        )  # fmt: skip
    return found


def _experts(steps: list[Step]) -> list[int]:
    """Choices of each expert, of all dispatches together."""
    total: list[int] = []
    for step in steps:
        choices = _choices(step) if step.kind == "dispatch" else None
        if choices:
            total += [0] * (len(choices) - len(total))
            for expert, count in enumerate(choices):
                total[expert] += count
    return total


def _times(steps: list[Step], recorded: list[Recorded], waited: list[Json]) -> dict[str, list[Json]]:
    """By the operation's name, in the order of time: us of each rank, on the host and the device; None: not known."""
    ranks = [each.rank for each in recorded]
    found: dict[str, list[Json]] = {}
    for step, waits in zip(steps, waited, strict=True):
        times = {
            where: [step.us(rank, where == "device_us") if rank in step.parts else None for rank in ranks]
            for where in ("host_us", "device_us")
        }
        found.setdefault(step.name, []).append(times | waits)
    return found


def _waits(steps: list[Step], num_ranks: int) -> tuple[list[list[float]], list[Json]]:
    """How long each rank waited for each other, [waiting][late] in us, and of each step: how long the rank that waited
    most did so, and for whom. A rank waits from where it receives to where the last rank comes, or to its own end."""
    total = [[0.0] * num_ranks for _ in range(num_ranks)]
    of_steps = []
    for step in steps:
        late = max(step.parts, key=step.begin_ns)
        arrival, longest = step.begin_ns(late), 0.0
        for rank, lines in step.parts.items():
            if rank == late:
                continue
            waited = max(0.0, min(arrival, _end_ns(lines[-1])) - _begin_ns(lines[-1])) / 1e3
            total[rank][late] += waited
            longest = max(longest, waited)
        of_steps.append({"wait_us": round(longest, 3), "late_rank": late if longest else None})
    return [[round(each, 3) for each in row] for row in total], of_steps


def _spans(recorded: list[Recorded], zero: int) -> Iterator[Json]:
    for each in recorded:
        for line in each.operations:
            mode, kind = kind_of(line)
            span = {
                "rank": each.rank, "name": line["operation"], "mode": mode, "kind": kind, "number": line["number"],
                "begin_us": (line["begin_ns"] - zero) / 1e3, "us": _host_us(line), "tokens": line["tokens"],
            }  # fmt: skip
            if "device_us" in line:
                span |= {"device_begin_us": (line["device_begin_ns"] - zero) / 1e3, "device_us": line["device_us"]}
            if "rows" in line:
                span["bytes"] = sum(line["rows"]) * line["row_bytes"]
            yield span


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * percent) // 100) - 1))]
