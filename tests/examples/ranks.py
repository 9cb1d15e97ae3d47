"""What the ranks of tests/examples do, as processes: several runs in a row, since starting a rank takes long."""

from __future__ import annotations

import argparse
import os
import signal
import warnings
from typing import Any

import torch
import torch.distributed as dist

from examples.moe_lm import check, serve, train
from examples.moe_lm.exchange import NcclEp, make_buffer
from examples.moe_lm.experts import Experts
from examples.moe_lm.load import Request, make_load
from examples.moe_lm.ranks import Ranks, world_of
from examples.moe_lm.sizes import Sizes

SIZES = "--device cpu --hidden 32 --heads 2 --expert-inner 32 --shared-inner 32"
SMALL = f"{SIZES} --length 16 --sequences 4 --profile-at -1 --log-every 10"
STEPS = 80  # of the curves that have to fall
COMPARED = 20  # of those that only have to be the same
BAD_ONES = 27
SERVING = f"{SIZES} --slots 4 --prompt 3-12 --output 2-6 --requests 9"


def run_train(arguments: str) -> dict[str, Any]:
    options = train.parse(f"{SMALL} {arguments}".split())
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = train.train(world_of(options, torch.device("cpu")), options)
    torch._dynamo.reset()
    return report


def train_each(_: int, runs: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By name the reports of train.py with these arguments, in this order, on the ranks that there are."""
    return {name: run_train(arguments) for name, arguments in runs.items()}


def serve_each(_: int) -> dict[str, Any]:
    """Tokens and logits by request, served in different ways. Rank 0 has them."""
    options = serve.parse(SERVING.split())
    world = world_of(options, torch.device("cpu"))
    found: dict[str, Any] = {}
    for mode, exchange, overlap in (
        ("fixed", "nccl_ep", False), ("auto", "nccl_ep", False), ("fixed", "nccl_ep", True),
        ("fixed", "nccl_ep_arrivals", False), ("fixed", "all_to_all_single", False), ("fixed", "deep_ep", False),
        ("rebalanced", "nccl_ep", False), ("rebalanced", "nccl_ep", True),
    ):  # fmt: skip
        changed = {"rebalance": 3} if mode == "rebalanced" else {"mode": mode}
        server = serve.Server(world, argparse.Namespace(**vars(options) | changed))
        server.use(exchange, overlap)

        def served(requests: list[Request], server: serve.Server = server) -> list[Request]:
            server.serve(requests, keep_logits=True)
            return serve.gather(world, requests)

        name = f"{exchange}, {mode}" + (", overlap" if overlap else "")
        found[name] = served(load(options, world.size))
        if name == "nccl_ep, fixed":
            found["alone, on another rank"] = []
            for request in load(options, world.size)[:3]:
                request.home = (request.home + 1) % world.size
                found["alone, on another rank"] += served([request])
            found["all on rank 0"] = served(load(options, 1))
            found["arriving"] = served(make_load(9, 200.0, world.size, prompt=(3, 12), output=(2, 6)))
            found["check"] = check.compare_with_one_rank(server, 6) | check.count_changed(server)
            server.options.seed += 1
            found["check of other weights"] = check.compare_with_one_rank(server, 6)
            server.options.seed -= 1
            found["with bad ones"] = served(with_bad_ones(options, world.size))[1:]
            found["bad ones alone"] = served(with_bad_ones(options, world.size)[: -BAD_ONES - 1 : -1])
            found["after bad ones"] = served(load(options, world.size)[:3])
            found["modes"] = [server.engine.prefiller.how["mode"], server.engine.decoders[0].how["mode"]]
        if exchange == "nccl_ep_arrivals":
            server.engine.prefiller.overlaps = False
            found["nccl_ep_arrivals, one behind"] = served(load(options, world.size))
        if server.rebalancer is not None:
            found[f"placements, {overlap}"] = server.rebalancer.report()
        server.close()
    return found


def with_bad_ones(options: Any, num_ranks: int) -> list[Request]:
    """The load, and behind it requests that cannot be served, each with a home in turn."""
    room, bad = options.max_length, []

    def add(prompt: Any, length: Any = 2, arrival: Any = 0.0, home: Any = None, **more: Any) -> None:
        number = 100 + len(bad)
        bad.append(Request(number, arrival, number % num_ranks if home is None else home, prompt, length, **more))

    good = torch.arange(5)
    add(good, 500)
    add(good, room - 4)
    add(torch.zeros(0, dtype=torch.int64))
    add(torch.arange(13))
    for outside in (-1, 256, 1 << 40):
        add(torch.tensor([1, outside, 3]))
    for length in (0, -3, 2.5, True, None):
        add(good, length)
    for prompt in (good.float(), good.unsqueeze(0), [1, 2, 3], torch.tensor(3), good.to("meta"), good.to(torch.uint16)):
        add(prompt)
    for arrival in (-1.0, float("inf"), float("nan"), "now"):
        add(good, arrival=arrival)
    for home in (-1, num_ranks, 1.5, "all"):
        add(good, home=home)
    add(good, tokens=[1])
    assert len(bad) == BAD_ONES
    fine = load(options, num_ranks)
    return [fine[0], *fine, *bad]  # one is there twice


def load(options: Any, num_ranks: int) -> list[Request]:
    return make_load(options.requests, 0.0, num_ranks, prompt=options.prompt, output=options.output)


# ---- Worlds that end


def fails(world: Ranks, options: argparse.Namespace) -> None:
    """Rank 1 does as ``options.how`` says; the others wait for it in an exchange, and say so."""
    buffer = make_buffer(world.experts, Sizes(), 4, torch.float32, world.device, "ll")
    if world.rank == 1:
        if options.how == "raises":
            raise IndexError("of rank 1 alone")
        if options.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    exchange = NcclEp(buffer, 8, mode="ll", rows="all")
    x, idx = torch.zeros(1, 64), torch.zeros(1, 2, dtype=torch.int64)
    if world.rank == 0:
        exchange(x, idx, torch.zeros(1, 2), Experts(4, 64, 8))
    dist.barrier()
