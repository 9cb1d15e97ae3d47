"""Serves the model to a load of requests, and tells the latencies.

python -m examples.moe_lm.serve                              2 CPU ranks, or a GPU each
python -m examples.moe_lm.serve --rates 20,40,80 --exchange nccl_ep,all_to_all_single,deep_ep --overlap off,on
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import checkpoint, ranks, sizes
from .baseline import AllToAll
from .check import compare_with_one_rank, count_changed, count_repeats
from .deepep_calls import DeepEpLowLatency, DeepEpNormal
from .engine import Engine, Room, fixed_shape_exchange
from .exchange import make_buffer
from .load import Request, make_load, summary
from .model import Model
from .ranks import Ranks
from .trace import traced

EXCHANGES = ("nccl_ep", "all_to_all_single", "deep_ep")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.moe_lm.serve", description=__doc__.splitlines()[0])
    add = parser.add_argument

    def pair(text: str) -> tuple[int, int]:
        low, high = map(int, text.split("-"))
        return low, high

    add("--requests", type=int, default=16, help="of each rate")
    add("--rates", default="0", help="requests a second, separated by commas; 0: all at once")
    add("--prompt", type=pair, default=(8, 32), metavar="A-B", help="tokens, drawn uniformly")
    add("--output", type=pair, default=(4, 16), metavar="A-B", help="tokens to generate, drawn uniformly")
    add("--slots", type=int, default=8, help="requests at a time of a rank")
    add("--prefill-batch", type=int, default=2, help="prompts of a prefill of a rank")
    add("--max-length", type=int, help="of prompt and output together; default what the load needs")
    add("--exchange", default="nccl_ep", help=f"one or more of {', '.join(EXCHANGES)}")
    add("--mode", choices=("fixed", "auto"), default="fixed", help="fixed: HT for prefill, LL to decode; auto: by size")
    add("--overlap", default="off", help="off, on or both with a comma: two batches in turn (nccl_ep)")
    add("--expert-gemm", choices=("grouped", "batched"), help="of experts; default grouped on GPUs, batched on the CPU")
    ranks.add_attention(parser)
    add("--no-graphs", action="store_true", help="decode steps are queued kernel by kernel")
    add("--load", metavar="FOLDER", help="a checkpoint of train.py; otherwise seeded random weights")
    add(
        "--check",
        type=int,
        default=0,
        metavar="N",
        help="compare N requests with one rank, and with serving them alone",
    )
    add(
        "--gap",
        type=float,
        help="of logits: closer ones may come out in another order in --check; default: 0 in float32, else 0.1",
    )
    add("--profile", action="store_true", help="where the time of a decode step goes")
    add("--go-on", action="store_true", help="if an exchange fails, go on with the next one; the report says why")
    add("--seed", type=int, default=0)
    add("--report", metavar="FILE", help="JSON of all that was measured")
    ranks.add_arguments(parser)
    sizes.add_arguments(parser)
    options = parser.parse_args(argv)
    options.rates = [float(rate) for rate in options.rates.split(",")]
    options.exchange, options.overlap = options.exchange.split(","), options.overlap.split(",")
    for given, known in ((options.exchange, EXCHANGES), (options.overlap, ("off", "on"))):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(unknown)} is none of {', '.join(known)}")
    least = options.prompt[1] + options.output[1] + 1
    options.max_length = -(-(options.max_length or least) // 16) * 16
    if options.max_length < least:
        parser.error(f"--max-length is {options.max_length}, prompt and output need {least}")
    return options


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
        self.grouped = (options.expert_gemm or ("grouped" if kind == "cuda" else "batched")) == "grouped"
        self.room = Room(options.slots, options.max_length, options.prefill_batch, options.prompt[1])
        self.buffers: list[Any] = []
        self.reference: list[Request] = []  # what check.py compares with
        self.engine: Engine | None = None

    def use(self, exchange: str, overlap: bool) -> Engine:
        """Collective."""
        self.close()
        world, options, room = self.world, self.options, self.room
        count, dtype, is_cuda = self.sizes.experts, self.model.dtype, world.device.type == "cuda"
        prompt_tokens = room.prefill_batch * room.max_prompt
        graphs = is_cuda and not options.no_graphs and exchange != "all_to_all_single"
        prefiller: Any
        decoders: list[Any]
        if exchange == "all_to_all_single":
            prefiller = AllToAll(world.experts, count)
            decoders = [prefiller]
        else:
            tokens = max(prompt_tokens, room.slots)
            buffer = make_buffer(world.experts, self.sizes, tokens, dtype, world.device, "auto")
            self.buffers = [buffer]
            if exchange == "deep_ep":
                prefiller, decoders = DeepEpNormal(buffer, count), [DeepEpLowLatency(buffer, count, room.slots)]
            else:
                prefill_mode, decode_mode = ("auto", "auto") if options.mode == "auto" else ("ht", "ll")
                prefiller = fixed_shape_exchange(buffer, count, prefill_mode, prompt_tokens, self.grouped)
                batches = 2 if overlap else 1
                if overlap:  # a buffer each: two dispatches are under way at a time
                    self.buffers.append(make_buffer(world.experts, self.sizes, room.slots, dtype, world.device, "ll"))
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

    def serve(self, requests: list[Request], keep_logits: bool = False) -> float:
        """Serves all requests of all ranks, each at its home. Collective. Returns the seconds that it took."""
        engine, world = self.engine, self.world
        assert engine is not None
        waiting = [each for each in requests if each.home == world.rank]
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

        can_begin, is_serving, is_waiting = agree()
        while can_begin or is_serving or is_waiting:
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
            if can_begin or is_serving:
                engine.decode()
            else:
                time.sleep(0.0005)  # until a request arrives
            can_begin, is_serving, is_waiting = agree()
            if serving:
                take(list(serving))
        world.synchronize()
        return time.perf_counter() - start


def _any_rank(world: Ranks, *flags: bool) -> tuple[bool, ...]:
    if world.size == 1:
        return flags
    values = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return tuple(bool(value) for value in values.tolist())


def gather(world: Ranks, requests: list[Request]) -> list[Request]:
    """On rank 0 all requests as their homes have served them."""
    mine = [each for each in requests if each.home == world.rank]
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, mine)
    return sorted((each for part in parts for each in part), key=lambda each: each.number)


def measure(server: Server, rate: float, exchange: str, overlap: bool) -> dict[str, Any]:
    options, world = server.options, server.world

    def load(count: int, rate: float) -> list[Request]:
        return make_load(
            count, rate, world.size, prompt=options.prompt, output=options.output, seed=options.seed
        )  # fmt: skip

    server.serve(load(2 * world.size, 0))  # what the first ones set up does not count
    requests = load(options.requests, rate)
    seconds = server.serve(requests)
    served = gather(world, requests)
    return {
        "exchange": exchange, "overlap": overlap, "rate": rate, **summary(served, seconds),
        "outputs": [each.tokens for each in served],
    }  # fmt: skip


def profile_decode(server: Server) -> dict[str, Any]:
    """A decode step with all slots in use; what is served after it has to begin anew."""
    engine, options = server.engine, server.options
    assert engine is not None
    requests = make_load(
        server.room.slots, 0, 1, prompt=options.prompt, output=options.output, seed=options.seed
    )  # fmt: skip
    for first in range(0, server.room.slots, server.room.prefill_batch):
        slots = range(first, min(first + server.room.prefill_batch, server.room.slots))
        engine.prefill({slot: requests[slot].prompt for slot in slots})
    for _ in range(2):
        engine.decode()
    server.world.synchronize()
    dist.barrier()
    times = []
    for _ in range(2):  # the output has room for these steps: at least 4 tokens
        begin = time.perf_counter()
        engine.decode()
        server.world.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    trace = traced(engine.decode)
    engine.release(list(range(server.room.slots)))
    return {"step_ms": min(times), "exchange_ms": trace.exchange_ms(), "layer": trace.layer(server.sizes.layers, True)}


def body(world: Ranks, options: argparse.Namespace) -> None:
    server = Server(world, options)
    report: dict[str, Any] = {
        "what": "serving", "ranks": world.size, "dtype": str(server.model.dtype), "sizes": asdict(server.sizes),
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu", "room": asdict(server.room),
        "options": vars(options), "figures": [], "profiles": [], "checks": [], "failures": [],
    }  # fmt: skip
    for exchange in options.exchange:
        for overlap in options.overlap:
            if overlap == "on" and exchange != "nccl_ep":
                continue
            try:
                _run(server, exchange, overlap, report)
            except Exception as error:
                if not options.go_on:
                    raise
                text = f"{type(error).__name__}: {error}"
                report["failures"].append({"exchange": exchange, "overlap": overlap, "error": text[:2000]})
                print(f"rank {world.rank}, {exchange}, overlap {overlap} FAILED: {text}", flush=True)
            _write(world, options, report)
    server.close()


def _run(server: Server, exchange: str, overlap: str, report: dict[str, Any]) -> None:
    options, world = server.options, server.world
    server.use(exchange, overlap == "on")
    for rate in options.rates:
        report["figures"].append(measure(server, rate, exchange, overlap == "on"))
        if world.rank == 0:
            _show(report["figures"][-1])
        _write(world, options, report)
    if options.profile:
        report["profiles"].append({"exchange": exchange, "overlap": overlap == "on"} | profile_decode(server))
    if options.check and exchange == "nccl_ep":
        found = compare_with_one_rank(server, options.check) | count_changed(server) | count_repeats(server)
        report["checks"].append({"overlap": overlap == "on", **found})
        if world.rank == 0:
            print(f"check: {report['checks'][-1]}", flush=True)


def _write(world: Ranks, options: argparse.Namespace, report: dict[str, Any]) -> None:
    if world.rank == 0 and options.report:
        Path(options.report).parent.mkdir(parents=True, exist_ok=True)
        Path(options.report).write_text(json.dumps(report, indent=1) + "\n")


def _show(found: dict[str, Any]) -> None:
    rate = f"{found['rate']:g} requests/s" if found["rate"] else "all at once"
    print(
        f"{found['exchange']:18}{'overlap ' if found['overlap'] else '        '}{rate:16}"
        f" TTFT {found['ttft_p50_ms']:8.1f} / {found['ttft_p99_ms']:8.1f} ms"
        f"  TPOT {found['tpot_p50_ms']:7.2f} / {found['tpot_p99_ms']:7.2f}"
        f"  ITL {found['itl_p50_ms']:7.2f} / {found['itl_p99_ms']:7.2f} (p50 / p99)"
        f" {found['tokens_per_s']:9,.0f} tokens/s",
        flush=True,
    )


if __name__ == "__main__":
    ranks.run(body, parse())
