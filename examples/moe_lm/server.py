"""A server: a model, an engine for it, and the loop that serves requests."""

from __future__ import annotations

import argparse
import gc
import math
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from . import checkpoint, ranks, sizes
from .arriving import Arriving
from .baseline import AllToAll
from .deepep_calls import DeepEpLowLatency, DeepEpNormal
from .engine import Engine, Room, fixed_shape_exchange
from .exchange import make_buffer
from .load import Request
from .model import Model
from .ranks import Ranks
from .rebalance import Rebalancer


class Progress:
    """What rank 0 says while it serves its requests: a line each ``every`` steps and one at the end; 0: nothing."""

    def __init__(self, world: Ranks, every: int, requests: int) -> None:
        self._says, self._every, self._requests = world.rank == 0 and every > 0, every, requests
        self._steps = self._told = 0
        self._seconds = 0.0  # of the steps since the last line
        self._waiting = self._serving = 0
        self.tokens = 0

    def step(self, seconds: float, waiting: int, serving: int) -> None:
        self._steps += 1
        self._seconds += seconds
        self._waiting, self._serving = waiting, serving
        if self._says and self._steps % self._every == 0:
            self.tell()

    def tell(self) -> None:
        """Of the steps that no line was of."""
        if not self._says or self._steps == self._told:
            return
        step_ms = self._seconds / (self._steps - self._told) * 1e3
        done = self._requests - self._waiting - self._serving
        requests = f"{self._waiting:3} wait, {self._serving:3} in slots, {done:3} done"
        print(
            f"step {self._steps:5}  rank 0's requests: {requests}  {self.tokens:6} tokens  {step_ms:8.2f} ms a step",
            flush=True,
        )
        self._told, self._seconds = self._steps, 0.0


class Server:
    """A model, and an engine for it that can be changed for another."""

    def __init__(self, world: Ranks, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        kind = world.device.type
        ranks.choose_attention(options)
        self.sizes = sizes.sizes_of(options, kind, world.size)
        with world.device:
            model = Model(self.sizes, world.rank, world.size, sizes.dtype_of(options, kind))
        model.initialise(options.seed)
        if options.load:
            checkpoint.load(options.load, model)
        self.model = model.for_serving()
        self.rebalancer: Rebalancer | None = None
        if options.rebalance:
            self.rebalancer = Rebalancer(world, self.model, options.copies, options.rebalance)
        self.grouped = (options.expert_gemm or ("grouped" if kind == "cuda" else "batched")) == "grouped"
        self.room = Room(options.slots, options.max_length, options.prefill_batch, options.prompt[1])
        self.buffers: list[Any] = []
        self.reference: list[Request] = []  # what check.py compares with
        self.engine: Engine | None = None

    def use(self, exchange: str, overlap: bool) -> Engine:
        """Collective."""
        self.close()
        world, options, room = self.world, self.options, self.room
        sizes = self.sizes if self.rebalancer is None else self.rebalancer.physical_sizes
        count, dtype, is_cuda = sizes.experts, self.model.dtype, world.device.type == "cuda"
        prompt_tokens = room.prefill_batch * room.max_prompt
        graphs = is_cuda and not options.no_graphs and exchange != "all_to_all_single"
        prefiller: Any
        decoders: list[Any]
        if exchange == "all_to_all_single":
            prefiller = AllToAll(world.experts, count)
            decoders = [prefiller]
        else:
            tokens = max(prompt_tokens, room.slots)
            buffer = make_buffer(world.experts, sizes, tokens, dtype, world.device, "auto")
            self.buffers = [buffer]
            if exchange == "deep_ep":
                prefiller, decoders = DeepEpNormal(buffer, count), [DeepEpLowLatency(buffer, count, room.slots)]
            else:
                prefill_mode, decode_mode = ("auto", "auto") if options.mode == "auto" else ("ht", "ll")
                prefiller = (
                    Arriving(buffer, count, prompt_tokens, sizes.topk)
                    if exchange == Arriving.name
                    else fixed_shape_exchange(buffer, count, prefill_mode, prompt_tokens, self.grouped)
                )
                batches = 2 if overlap else 1
                if overlap:  # a buffer each: two dispatches are under way at a time
                    self.buffers.append(make_buffer(world.experts, sizes, room.slots, dtype, world.device, "ll"))
                # Room for a token of each slot, also where a batch has half of them: GEMMs keep their shape.
                decoders = [
                    fixed_shape_exchange(self.buffers[number], count, decode_mode, room.slots, self.grouped)
                    for number in range(batches)
                ]
        self.model.use(prefiller)
        self.engine = Engine(self.model, room, prefiller, decoders, graphs)
        return self.engine

    def close(self) -> None:
        self.engine = None
        gc.collect()  # a graph ends before the buffer that it was captured on
        self.world.synchronize()
        dist.barrier()
        for buffer in self.buffers:
            buffer.destroy()
        self.buffers = []

    def _admit(self, requests: list[Request]) -> list[Request]:
        """This rank's in the order of their arrival, without those that it refuses. One that is there twice is served
        once."""
        admitted = []
        for each in {id(request): request for request in requests if _is_mine(self.world, request)}.values():
            why_not = self._why_not(each)
            if isinstance(each, Request):
                each.refused = why_not
            if why_not is None:
                admitted.append(each)
            else:
                print(f"request {getattr(each, 'number', '')} is refused: {why_not}", flush=True)
        return sorted(admitted, key=lambda each: each.arrival)

    def _why_not(self, request: Request) -> str | None:
        if not isinstance(request, Request):
            return f"it is a {type(request).__name__}, must be a Request"
        if type(request.number) is not int:
            return "its number is none"
        if not _has_home(self.world, request):
            return f"its home is {request.home}, must be 0 to {self.world.size - 1}"
        if not isinstance(request.arrival, int | float) or not 0 <= request.arrival < math.inf:
            return f"its arrival is {request.arrival}, must be a number of 0 or more"
        if any(type(each) is not list or each for each in (request.tokens, request.times, request.logits)):
            return "it was served before"
        return self.room.why_not(request.prompt, request.length, self.sizes.vocabulary)

    def serve(self, requests: list[Request], keep_logits: bool = False, log_every: int = 0) -> float:
        """Serves all requests of all ranks, each at its home. Collective. Returns the seconds that it took.

        ``log_every``: steps, as of ``Progress``. A step is a prefill of the prompts that have come, and a decode.

        A request that cannot be served is refused by its home: ``refused`` says why, and the others are served.
        """
        engine, world = self.engine, self.world
        assert engine is not None
        waiting = self._admit(requests)
        progress = Progress(world, log_every, len(waiting))
        serving: dict[int, Request] = {}
        free = list(range(self.room.slots))
        dist.barrier()
        start = time.perf_counter()

        def agree() -> tuple[bool, ...]:
            """After the step that is queued: has any rank a prompt to begin, a request to go on with, one to wait for?

            The ranks ask while their devices work.
            """
            left = sum(len(each.tokens) + 1 < each.length for each in serving.values())
            room = left < self.room.slots
            can_begin = bool(waiting and room and waiting[0].arrival <= time.perf_counter() - start)
            return _any_rank(world, can_begin, left > 0, bool(waiting))

        def take(slots: list[int]) -> None:
            """The new tokens of these slots; the host waits for the device here."""
            tokens = engine.tokens.tolist()
            logits = engine.logits.cpu() if keep_logits else None
            now = time.perf_counter() - start
            for slot in slots:
                serving[slot].tokens.append(tokens[slot])
                serving[slot].times.append(now)
                if logits is not None:
                    serving[slot].logits.append(logits[slot].clone())
            done = [slot for slot in slots if serving[slot].is_done]
            for slot in done:
                del serving[slot]
                free.append(slot)
            engine.release(done)
            progress.tokens += len(slots)

        can_begin, is_serving, is_waiting = agree()
        while can_begin or is_serving or is_waiting:
            began, is_step = time.perf_counter(), can_begin or is_serving
            if can_begin:
                begun = []
                now = time.perf_counter() - start
                while waiting and free and len(begun) < self.room.prefill_batch and waiting[0].arrival <= now:
                    slot = free.pop(0)
                    serving[slot] = waiting.pop(0)
                    begun.append(slot)
                engine.prefill({slot: serving[slot].prompt for slot in begun})
                for slot in begun if keep_logits else ():
                    serving[slot].cache = engine.digest(slot, len(serving[slot].prompt))
                if begun:
                    take(begun)
            if is_step:
                engine.decode()
            else:
                time.sleep(0.0005)  # until a request arrives
            can_begin, is_serving, is_waiting = agree()
            if serving:
                take(list(serving))
            if self.rebalancer is not None:
                self.rebalancer.step()
            if is_step:
                progress.step(time.perf_counter() - began, len(waiting), len(serving))
        world.synchronize()
        seconds = time.perf_counter() - start
        progress.tell()
        return seconds


def _any_rank(world: Ranks, *flags: bool) -> tuple[bool, ...]:
    if world.size == 1:
        return flags
    values = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return tuple(bool(value) for value in values.tolist())


def _has_home(world: Ranks, request: Request) -> bool:
    home = getattr(request, "home", None)
    return type(home) is int and 0 <= home < world.size


def _is_mine(world: Ranks, request: Request) -> bool:
    """Rank 0 has those that have no home, too."""
    return world.rank == (request.home if _has_home(world, request) else 0)


def gather(world: Ranks, requests: list[Request]) -> list[Request]:
    """On rank 0 all requests as their homes have served them."""
    # Of a refused one the prompt may be anything, of which not all can be sent.
    mine = [
        replace(each, prompt=torch.zeros(0)) if each.refused else each
        for each in requests
        if isinstance(each, Request) and _is_mine(world, each)
    ]
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, mine)
    every = [each for part in parts for each in part]
    return sorted(every, key=lambda each: each.number if type(each.number) is int else -1)
