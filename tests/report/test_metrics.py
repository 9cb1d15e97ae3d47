"""nccl_ep.metrics, read by a parser that takes nothing but Prometheus' text format."""

from __future__ import annotations

import re

import pytest

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.report import programs
from tests.report.programs import RANKS, SIZES

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
NAME, LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'


def parsed(text: str) -> tuple[dict[str, str], Samples]:
    """Types and samples. A metric is in one place, with HELP and TYPE before its samples."""
    assert text == "" or text.endswith("\n")
    types: dict[str, str] = {}
    samples: Samples = {}
    lines = iter(text.splitlines())
    current = ""
    for line in lines:
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert re.fullmatch(NAME, current) and current not in types and len(line.split(" ", 3)[3]) > 5
            kind = re.fullmatch(rf"# TYPE {current} (counter|gauge)", next(lines))
            assert kind is not None, line
            types[current] = kind[1]
            assert (kind[1] == "counter") == current.endswith("_total")
            continue
        sample = re.fullmatch(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} (-?\d+(?:\.\d+)?)", line)
        assert sample is not None and sample[1] == current, line
        labels = re.findall(LABEL, sample[2])
        assert len(dict(labels)) == len(labels)
        key = (current, frozenset(labels))
        assert key not in samples
        samples[key] = float(line.rpartition(" ")[2])
    return types, samples


def test_counters_are_those_of_the_buffers() -> None:
    def body(group: ThreadGroup) -> tuple[dict, str]:
        with nccl_ep.Buffer.for_shapes(group, mode="auto", name=f"moe.rank{group.rank()}", **SIZES) as buffer:
            for mode in ("ll", "ht", "ht"):
                programs.exchange(buffer, group.rank(), mode, 0)
            group.allgather(b"", 60)  # both are here, and idle
            text, stats = nccl_ep.metrics(), buffer.stats()
            group.allgather(b"", 60)
            return stats, text

    for rank, (stats, text) in enumerate(run_ranks(RANKS, body)):
        types, samples = parsed(text)

        def value(name: str, rank: int = rank, samples: Samples = samples, **labels: str) -> float:
            of_buffer = {"group": "moe", "rank": str(rank), "ranks": str(RANKS)}
            return samples[f"nccl_ep_{name}", frozenset((of_buffer | labels).items())]

        assert value("operations_total", mode="ll", kind="dispatch") == stats["dispatches"] == 1
        assert value("operations_total", mode="ht", kind="combine") == stats["ht_combines"] == 2
        assert value("calls_total", kind="ht_dispatch") == 2 and value("buffer_failed") == 0
        for name in ("window_bytes", "arena_bytes", "arena_free_bytes"):
            assert value(name) == stats[name] > 0
        assert types["nccl_ep_dropped_rows_total"] == "counter" and types["nccl_ep_window_bytes"] == "gauge"


def test_buffers_that_are_gone_have_no_counters_and_names_are_escaped() -> None:
    name = 'a "b"\\\nc'
    with nccl_ep.Buffer.for_shapes(None, name=name, **SIZES):
        _, samples = parsed(nccl_ep.metrics())
        assert any(("group", 'a \\"b\\"\\\\\\nc') in labels for _, labels in samples)
    _, samples = parsed(nccl_ep.metrics())
    assert not any("\\n" in group for _, labels in samples for label, group in labels if label == "group")


def test_a_buffer_that_has_failed_says_so() -> None:
    def body(group: ThreadGroup) -> str:
        with nccl_ep.Buffer.for_shapes(group, name=f"failing.rank{group.rank()}", **SIZES) as buffer:
            if group.rank() == 0:
                buffer.set_timeout(0.2)
                with pytest.raises(nccl_ep.TimeoutError):
                    programs.exchange(buffer, 0, "ll", 0)
            group.allgather(b"", 60)
            text = nccl_ep.metrics()
            group.allgather(b"", 60)
            return text

    _, samples = parsed(run_ranks(RANKS, body)[0])
    failed = {dict(labels)["rank"]: value for (name, labels), value in samples.items()
              if name == "nccl_ep_buffer_failed" and ("group", "failing") in labels}  # fmt: skip
    assert failed["0"] == 1
