"""What the ranks of tests/examples do, as processes: several runs in a row, since starting a rank takes long."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch

from examples.moe_lm import check, serve, train
from examples.moe_lm.load import Request, make_load
from examples.moe_lm.ranks import world_of

SIZES = "--device cpu --hidden 32 --heads 2 --expert-inner 32 --shared-inner 32"
SMALL = f"{SIZES} --length 16 --sequences 4 --profile-at -1"
STEPS = 200  # of the curves that are compared
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
        ("fixed", "all_to_all_single", False), ("fixed", "deep_ep", False),
    ):  # fmt: skip
        server = serve.Server(world, argparse.Namespace(**vars(options) | {"mode": mode}))
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
            found["modes"] = [server.engine.prefiller.how["mode"], server.engine.decoders[0].how["mode"]]
        server.close()
    return found


def load(options: Any, num_ranks: int) -> list[Request]:
    return make_load(options.requests, 0.0, num_ranks, prompt=options.prompt, output=options.output)
