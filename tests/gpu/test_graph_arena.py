"""Outputs of DeepEP's normal mode in captured graphs: in the arena, and the graph's for as long as it may be replayed.

Needs one GPU: ``pytest tests/gpu/test_graph_arena.py``. Ranks in processes: ``tests/gpu/test_deepep_normal.py``.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep
from tests.support.gpus import needs_gpu

pytestmark = needs_gpu
MB = 1 << 20
TOKENS, HIDDEN, EXPERTS = 1024, 4096, 4
OUTPUT = TOKENS * HIDDEN * 2  # bytes; torch cuts it from a segment of 20 MiB
SEGMENT = 20 * MB


class _Program:
    """One rank's layer: a dispatch, a cached one and a combine of ``x``, whose tokens go where ``ids`` says."""

    def __init__(self, arena_mb: int) -> None:
        self.buffer = nccl_ep.Buffer.for_shapes(
            None, max_tokens=TOKENS, hidden=HIDDEN, topk=2, num_experts=EXPERTS, mode="ht", arena_bytes=arena_mb * MB,
            device="cuda",
        )  # fmt: skip
        self.view = deep_ep.Buffer.of(self.buffer)
        self.x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.ids = torch.zeros(TOKENS, 2, dtype=torch.int64, device="cuda")
        self.weights = torch.ones(TOKENS, 2, device="cuda")
        self.change(0)

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *_: Any) -> None:
        self.buffer.destroy()

    def change(self, seed: int) -> None:
        """Other tokens, some of which go nowhere."""
        made = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(TOKENS, HIDDEN, generator=made))
        ids = torch.stack([torch.randperm(EXPERTS, generator=made)[:2] for _ in range(TOKENS)])
        ids[torch.rand(TOKENS, generator=made) < 0.2] = -1
        self.ids.copy_(ids)

    def dispatch(self, **options: Any) -> tuple[torch.Tensor, Any]:
        per_rank, _, per_expert, is_in_rank, _ = self.view.get_dispatch_layout(self.ids, EXPERTS)
        got = self.view.dispatch(
            self.x, None, per_rank, None, is_in_rank, per_expert, self.ids, self.weights, num_worst_tokens=TOKENS,
            **options,
        )  # fmt: skip
        if options.get("async_finish"):
            got[-1].current_stream_wait()
        return got[0], got[4]

    def layer(self) -> dict[str, torch.Tensor]:
        rows, handle = self.dispatch()
        again = self.view.dispatch(self.x, handle=handle)[0]
        return {"rows": rows, "again": again, "combined": self.view.combine(rows, handle)[0]}

    def check(self, made: dict[str, torch.Tensor]) -> None:
        sent = (self.ids >= 0).any(1)
        came = self.x[sent]
        for name in ("rows", "again"):
            assert torch.equal(made[name][: len(came)], came), name
        if "combined" in made:
            assert torch.equal(made["combined"], torch.where(sent[:, None], self.x, 0))

    def is_inside(self, tensor: torch.Tensor) -> bool:
        return self.buffer.runtime.arena_offset(tensor.data_ptr(), tensor.nbytes) is not None

    def free_bytes(self) -> int:
        """After an eager call, which collects what is no longer used."""
        self.buffer.empty([16], torch.uint8)
        return int(self.buffer.stats()["arena_free_bytes"])

    def fill(self) -> list[torch.Tensor]:
        """The rest of the arena, by eager calls, with a number in each byte."""
        held = []
        while self.is_inside(tensor := self.buffer.empty([OUTPUT], torch.uint8)):
            held.append(tensor.fill_(len(held) + 1))
        return held


def _captured(body: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = body()
    return graph, made


def _require_numbers(held: list[torch.Tensor]) -> None:
    for number, tensor in enumerate(held, 1):
        assert int(tensor.min()) == int(tensor.max()) == number


def _soon(condition: Callable[[], bool]) -> bool:
    """CUDA tells in a thread of its own that a graph is gone."""
    until = time.monotonic() + 20
    while not (is_true := condition()) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return is_true


def _ranges_are_apart(tensors: list[torch.Tensor]) -> bool:
    ranges = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("num_streams", [1, 2])
def test_outputs_lie_in_the_arena(num_streams: int) -> None:
    """Eager calls have claimed half of it before, on one stream; or all of it, on two."""
    with _Program(128) as program:
        for stream in [torch.cuda.current_stream(), torch.cuda.Stream()][:num_streams]:
            with torch.cuda.stream(stream):
                program.check(program.layer())
                torch.cuda.synchronize()
        graph, made = _captured(program.layer)
        assert program.is_inside(made["rows"]) and program.is_inside(made["again"])
        for seed in range(6):
            program.change(seed)
            graph.replay()
            program.check(made)
        program.buffer.require_usable()


def test_an_operation_on_the_buffers_stream_is_captured() -> None:
    """With async_finish the operation is captured on the buffer's stream."""
    with _Program(128) as program:
        program.dispatch(async_finish=True)
        torch.cuda.synchronize()
        graph, (rows, _) = _captured(lambda: program.dispatch(async_finish=True))
        assert program.is_inside(rows)
        for seed in range(3):
            program.change(seed)
            graph.replay()
            program.check({"rows": rows, "again": rows})


def test_two_graphs_and_eager_calls_are_apart() -> None:
    with _Program(192) as program:
        program.layer()
        first, made_first = _captured(program.layer)
        second, made_second = _captured(program.layer)
        tensors = [made[name] for made in (made_first, made_second) for name in ("rows", "again")]
        assert all(map(program.is_inside, tensors)) and _ranges_are_apart(tensors)
        held = program.fill()
        assert held and _ranges_are_apart([*tensors, *held])
        kept = program.layer()
        kept_x, kept_ids = program.x.clone(), program.ids.clone()
        for seed in range(1, 5):
            program.change(seed)
            first.replay()
            program.check(made_first)
            before = {name: each.clone() for name, each in made_first.items()}
            program.change(seed + 100)
            second.replay()
            program.check(made_second)
            assert all(torch.equal(before[name][:1], made_first[name][:1]) for name in ("rows", "again"))
        _require_numbers(held)
        program.x.copy_(kept_x)
        program.ids.copy_(kept_ids)
        program.check(kept)


def test_a_graph_writes_what_only_it_has() -> None:
    """The tensors die before the first replay, and everything else in the arena is taken."""
    with _Program(128) as program:
        program.layer()
        graph, made = _captured(program.layer)
        addresses = [made[name].data_ptr() for name in ("rows", "again")]
        del made
        gc.collect()
        held = program.fill()
        assert held and not {each.data_ptr() for each in held} & set(addresses)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        _require_numbers(held)


def test_layers_of_one_graph_share_memory() -> None:
    """What a layer has freed is the next one's, in the graph's order."""
    with _Program(2 * SEGMENT // MB + 2) as program:
        program.layer()

        def layers() -> tuple[list[bool], torch.Tensor]:
            inside = []
            total = torch.zeros_like(program.x)
            for _ in range(12):
                rows, handle = program.dispatch()
                inside.append(program.is_inside(rows))
                total += program.view.combine(rows, handle)[0]
            return inside, total

        graph, (inside, total) = _captured(layers)
        assert all(inside)
        program.x.fill_(1)
        graph.replay()
        sent = (program.ids >= 0).any(1)
        assert torch.equal(total[:, 0], 12 * sent.to(total.dtype))


def test_memory_returns_when_graph_and_tensors_are_gone() -> None:
    with _Program(192) as program:
        program.layer()
        before = program.free_bytes()
        for keeps_graph in (True, False):
            graph, made = _captured(program.layer)
            assert program.is_inside(made["rows"])
            graph.replay()
            assert program.free_bytes() < before
            if keeps_graph:
                del made
                gc.collect()
                assert program.free_bytes() < before, "the graph may be replayed"
                graph.replay()
                del graph
            else:
                del graph
                gc.collect()
                time.sleep(0.5)
                assert program.free_bytes() < before, "there are tensors"
                program.check(made)
                del made
            gc.collect()
            assert _soon(lambda: program.free_bytes() == before), keeps_graph
            program.check(program.layer())


def test_what_eager_calls_had_claimed_returns_to_them() -> None:
    with _Program(64) as program:
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        for stream in streams:
            with torch.cuda.stream(stream):
                program.layer()
                torch.cuda.synchronize()
        count = len(program.fill())
        graph, made = _captured(program.layer)
        assert program.is_inside(made["rows"])
        graph.replay()
        assert len(program.fill()) < count
        del graph, made
        gc.collect()
        assert _soon(lambda: len(program.fill()) == count)


def test_a_graph_of_a_full_arena_is_right() -> None:
    with _Program(64) as program:
        program.layer()
        held = program.fill()
        with torch.cuda.stream(torch.cuda.Stream()):
            held += [each.fill_(len(held) + i) for i, each in enumerate(program.fill(), 1)]
            torch.cuda.synchronize()
        graph, made = _captured(program.layer)
        assert not program.is_inside(made["again"])
        for seed in range(3):
            program.change(seed)
            graph.replay()
            program.check(made)
        _require_numbers(held)


def test_a_capture_that_fails_gives_its_memory_back() -> None:
    with _Program(192) as program:
        program.layer()
        before = program.free_bytes()

        def fails() -> None:
            program.layer()
            raise ValueError("on purpose")

        with pytest.raises(ValueError, match="on purpose"):
            _captured(fails)
        gc.collect()
        assert _soon(lambda: program.free_bytes() == before)
        graph, made = _captured(program.layer)
        graph.replay()
        program.check(made)


def test_the_buffer_ends_before_the_graph() -> None:
    """Tensors stay; and what the graph had is given back when they are gone."""
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    program = _Program(512)
    with program:
        program.layer()
        graph, made = _captured(program.layer)
        graph.replay()
        torch.cuda.synchronize()
    program.check(made)
    del graph, made, program
    gc.collect()
    for _ in range(2):
        torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before - 128 * MB, "the window was not given back"


def test_native_outputs_are_the_graphs_own() -> None:
    """As a compiler's CUDA graph trees want them; ``out=`` is for the arena."""
    with _Program(128) as program:
        how: dict[str, Any] = {"num_experts": EXPERTS, "mode": "ht", "layout": "flat", "buffer": program.buffer}
        out = nccl_ep.dispatch(program.x, program.ids, program.weights, **how)
        assert program.is_inside(out.x)
        _, made = _captured(lambda: nccl_ep.dispatch(program.x, program.ids, program.weights, **how))
        assert not program.is_inside(made.x)
