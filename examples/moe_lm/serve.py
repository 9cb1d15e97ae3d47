"""Serves the model to a load of requests, and tells the latencies.

python -m examples.moe_lm.serve                              2 CPU ranks, or a GPU each
python -m examples.moe_lm.serve --rates 20,40,80 --exchange nccl_ep,all_to_all_single,deep_ep --overlap off,on
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import checkpoint, ranks, sizes
from .arguments import MAX_SEED, MOST, Parser, file_to_write, names_of, number, numbers, pair, require_outside, whole
from .check import compare_with_one_rank, count_changed, count_repeats
from .data import Corpus
from .files import write_whole
from .load import HEADS, Request, make_load, show, summary
from .ranks import Ranks
from .server import Server, gather
from .trace import traced

EXCHANGES = ("nccl_ep", "nccl_ep_arrivals", "all_to_all_single", "deep_ep")
PROFILED = 5  # decode steps of profile_decode


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m examples.moe_lm.serve", description=(__doc__ or " ").splitlines()[0])
    add = parser.add_argument
    add("--requests", type=whole(1), default=16, help="of each rate")
    add("--rates", type=numbers, default="0", help="requests a second, separated by commas; 0: all at once")
    add("--prompt", type=pair(1), default=(8, 32), metavar="A-B", help="tokens, drawn uniformly")
    add("--output", type=pair(1), default=(4, 16), metavar="A-B", help="tokens to generate, drawn uniformly")
    add("--slots", type=whole(1), default=8, help="requests at a time of a rank")
    add("--prefill-batch", type=whole(1), default=2, help="prompts of a prefill of a rank")
    add("--max-length", type=whole(1), help="of prompt and output together; default what the load needs")
    add(
        "--exchange", type=names_of(EXCHANGES), default="nccl_ep",
        help=f"one or more of {', '.join(EXCHANGES)}; nccl_ep_arrivals: a prefill's experts begin while rows come",
    )  # fmt: skip
    add("--mode", choices=("fixed", "auto"), default="fixed", help="fixed: HT for prefill, LL to decode; auto: by size")
    add(
        "--overlap", type=names_of(("off", "on")), default="off",
        help="off, on or both with a comma: two batches in turn (nccl_ep)",
    )  # fmt: skip
    add(
        "--rebalance", type=whole(0), default=0, metavar="STEPS",
        help="experts go where the load is, every so many steps (nccl_ep); 0: they stay",
    )  # fmt: skip
    add(
        "--copies", type=whole(1), default=1, metavar="N", help="room of a rank for copies of experts, with --rebalance"
    )
    add("--expert-gemm", choices=("grouped", "batched"), help="of experts; default grouped on GPUs, batched on the CPU")
    ranks.add_attention(parser)
    add("--no-graphs", action="store_true", help="decode steps are queued kernel by kernel")
    add("--load", metavar="FOLDER", help="a checkpoint of train.py; otherwise seeded random weights")
    add(
        "--check", type=whole(0), default=0, metavar="N",
        help="compare N requests with one rank, and with serving them alone",
    )  # fmt: skip
    add(
        "--gap", type=number,
        help="of logits: closer ones may come out in another order in --check; default: 0 in float32, else 0.1",
    )  # fmt: skip
    add(
        "--log-every", type=whole(1), metavar="STEPS",
        help="a line for so many steps; default 1 on the CPU, 100 on GPUs, where a step takes milliseconds",
    )  # fmt: skip
    add("--profile", action="store_true", help="where the time of a decode step goes")
    add("--go-on", action="store_true", help="if an exchange fails, go on with the next one; the report says why")
    add("--seed", type=whole(0, MAX_SEED), default=0)
    add("--report", type=file_to_write, metavar="FILE", help="JSON of all that was measured")
    ranks.add_arguments(parser)
    sizes.add_arguments(parser)
    options = parser.parse_args(argv)
    options.exchange, options.overlap = options.exchange.split(","), options.overlap.split(",")
    least = options.prompt[1] + max(options.output[1], PROFILED + 1 if options.profile else 0) + 1
    options.max_length = -(-(options.max_length or least) // 16) * 16
    try:
        check(options, least, ranks.num_ranks(options))
    except (ValueError, checkpoint.CheckpointError) as error:
        parser.error(str(error))
    return options


def check(options: argparse.Namespace, least: int, num_ranks: int) -> None:
    """ValueError or CheckpointError for what cannot be served by so many ranks. ``least``: tokens of a slot."""
    ranks.check(options)
    model = sizes.sizes_of(options, ranks.device_type(options), num_ranks)
    model.check_ranks(num_ranks)
    if options.max_length < least:
        raise ValueError(f"--max-length is {options.max_length}, prompt and output need {least}")
    tokens = options.prefill_batch * options.prompt[1]
    if tokens > MOST:
        raise ValueError(f"--prefill-batch is {options.prefill_batch}: with --prompt {tokens} tokens, at most {MOST}")
    corpus = Corpus(options.seed)
    corpus.check("--prompt", options.prompt[1], corpus.held_out)
    if "on" in options.overlap:
        if "nccl_ep" not in options.exchange:
            raise ValueError(f"--overlap is {','.join(options.overlap)}, but nccl_ep is not in --exchange")
        if options.slots % 2:
            raise ValueError(f"--slots is {options.slots}, must be a multiple of 2 for --overlap on")
    if options.rebalance and options.exchange != ["nccl_ep"]:
        raise ValueError(f"--rebalance is {options.rebalance}, but --exchange is {','.join(options.exchange)}")
    most = model.experts * (num_ranks - 1) // num_ranks
    if options.rebalance and options.copies > most:
        raise ValueError(f"--copies is {options.copies}, must be at most {most}: a rank has an expert once")
    if options.check and options.load:
        raise ValueError(f"--check is {options.check}, it compares seeded weights, without --load")
    if options.check and "nccl_ep" not in options.exchange:
        raise ValueError(f"--check is {options.check}, but nccl_ep is not in --exchange")
    if options.load:
        checkpoint.check(options.load, model)
    require_outside(options.report, "--load", options.load)


def measure(server: Server, rate: float, exchange: str, overlap: bool) -> dict[str, Any]:
    options, world = server.options, server.world

    def load(count: int, rate: float) -> list[Request]:
        return make_load(
            count, rate, world.size, prompt=options.prompt, output=options.output, seed=options.seed
        )  # fmt: skip

    first = load(2 * world.size, 0)
    ranks.say(world, f"{len(first)} requests before, which set up what does not count ..")
    server.serve(first)
    requests = load(options.requests, rate)
    log_every = options.log_every or (1 if world.device.type == "cpu" else 100)
    seconds = server.serve(requests, log_every=log_every)
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
    for _ in range(PROFILED - 3):
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
    if server.rebalancer is not None:
        report["rebalanced"] = server.rebalancer.report()
        _write(world, options, report)
        for each in server.rebalancer.told if world.rank == 0 else ():
            print(
                f"step {each.step}: {each.moves} experts moved, the fullest rank had {each.before:.2f} times "
                f"the mean load, has {each.after:.2f}",
                flush=True,
            )
    if options.report:
        ranks.say(world, f"wrote {options.report}")
    ranks.say_what_times_mean(world)


def _run(server: Server, exchange: str, overlap: str, report: dict[str, Any]) -> None:
    options, world = server.options, server.world
    server.use(exchange, overlap == "on")
    for rate in options.rates:
        what = f"{options.requests} requests, {_rate(rate)}, {exchange}"
        ranks.say(world, f"serving {what}, on {ranks.described(world)} ..")
        report["figures"].append(measure(server, rate, exchange, overlap == "on"))
        if world.rank == 0:
            _show(report["figures"][-1])
        _write(world, options, report)
    if options.profile:
        report["profiles"].append({"exchange": exchange, "overlap": overlap == "on"} | profile_decode(server))
    if options.check and exchange == "nccl_ep":
        ranks.say(world, f"comparing {options.check} requests with one rank, and with serving them alone ..")
        found = compare_with_one_rank(server, options.check) | count_changed(server) | count_repeats(server)
        report["checks"].append({"overlap": overlap == "on", **found})
        if world.rank == 0:
            print(f"check: {report['checks'][-1]}", flush=True)


def _write(world: Ranks, options: argparse.Namespace, report: dict[str, Any]) -> None:
    if world.rank == 0 and options.report:
        Path(options.report).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(options.report), json.dumps(report, indent=1) + "\n")


def _show(found: dict[str, Any]) -> None:
    def both(key: str, digits: int, width: int) -> str:
        p50, p99 = (show(found[f"{key}_p{share}_ms"], digits) for share in (50, 99))
        return f"{key.upper()} {p50:>{width}} / {p99:>{width}}"

    figures = both("ttft", 1, 8), both("tpot", 2, 7), both("itl", 2, 7)
    name = HEADS.get(found["exchange"], found["exchange"])
    print(
        f"{name:27}{'overlap ' if found['overlap'] else '        '}{_rate(found['rate']):16} "
        f"{'  '.join(figures)} ms (p50 / p99) {found['tokens_per_s']:9,.0f} tokens/s",
        flush=True,
    )


def _rate(rate: float) -> str:
    return f"{rate:g} requests/s" if rate else "all at once"


if __name__ == "__main__":
    ranks.run(body, parse())
