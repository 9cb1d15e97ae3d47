"""Trains the model: data parallel outside of the experts, expert parallel inside.

python -m examples.moe_lm.train                    2 CPU ranks, or a GPU each, started by itself
torchrun --nproc-per-node 8 -m examples.moe_lm.train --size h4096
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import nccl_ep

from . import checkpoint, ranks, sizes
from .a2sgd import Traffic, a2sgd_hook, average_parameters, counted_average_hook
from .arguments import (
    MAX_SEED,
    MOST,
    Parser,
    above_0,
    file_to_write,
    folder_to_write,
    names_of,
    require_outside,
    whole,
)
from .arriving import Arriving
from .baseline import AllToAll
from .data import Corpus
from .exchange import NcclEp, make_buffer
from .files import write_whole
from .model import Model
from .ranks import Ranks
from .trace import traced

EXCHANGES = ("nccl_ep", "nccl_ep_arrivals", "all_to_all_single")
BALANCE = 0.01  # weight of the load-balancing loss


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m examples.moe_lm.train", description=(__doc__ or " ").splitlines()[0])
    add = parser.add_argument
    add("--steps", type=whole(1), default=50)
    add("--sequences", type=whole(1), default=8, help="of a step, on all ranks together")
    add("--length", type=whole(1), default=64, help="tokens of a sequence")
    add("--lr", type=above_0, default=3e-3)
    add("--seed", type=whole(0, MAX_SEED), default=0)
    add(
        "--exchange", type=names_of(EXCHANGES), default="nccl_ep",
        help=f"one or more of {', '.join(EXCHANGES)}, one after the other; nccl_ep_arrivals: see arriving.py",
    )  # fmt: skip
    add("--rows", choices=("exact", "all"), default="exact", help="received rows: as many as come, or room for all")
    add("--fp8", action="store_true", help="rows of dispatch travel in eight bits")
    add("--expert-parallel", type=whole(1), metavar="N", help="ranks that share the experts; the default is all")
    add("--dense-grads", choices=("ddp", "fsdp2", "a2sgd"), default="ddp")
    add("--a2sgd-average", type=whole(0), default=50, metavar="STEPS", help="until parameters are averaged; 0 never")
    add("--compile", metavar="BACKEND", nargs="?", const="inductor", help="blocks as one graph; default on GPUs")
    add("--no-compile", action="store_true")
    add("--checkpoint-activations", action="store_true")
    add("--deterministic", action="store_true", help="torch.use_deterministic_algorithms")
    add("--save", type=folder_to_write, metavar="FOLDER", help="a checkpoint at the end; it may be that of --load")
    add("--load", metavar="FOLDER", help="go on from a checkpoint, of any number of ranks")
    add("--log-every", type=whole(1), metavar="STEPS", help="default 1 on the CPU, 10 on GPUs")
    add("--profile-at", type=whole(-1), default=5, metavar="STEP", help="to see where the time goes; -1 never")
    add("--report", type=file_to_write, metavar="FILE", help="JSON of all measured; of several exchanges FILE_exchange")
    add("--go-on", action="store_true", help="if an exchange fails, go on with the next one; the report says why")
    ranks.add_arguments(parser)
    sizes.add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        check(options, ranks.num_ranks(options))
    except (ValueError, checkpoint.CheckpointError) as error:
        parser.error(str(error))
    return options


def check(options: argparse.Namespace, num_ranks: int) -> None:
    """ValueError or CheckpointError for what cannot be trained on so many ranks."""
    ranks.check(options)
    kind, own = ranks.device_type(options), options.expert_parallel or num_ranks
    if num_ranks % own:
        raise ValueError(f"--expert-parallel is {own}, must divide the {num_ranks} ranks")
    model = sizes.sizes_of(options, kind, num_ranks)
    model.check_ranks(own)
    if options.sequences % num_ranks:
        raise ValueError(f"--sequences is {options.sequences}, must be a multiple of the {num_ranks} ranks")
    if options.fp8:
        for name in options.exchange.split(","):
            if name != "nccl_ep":
                raise ValueError(f"--fp8 is there, but {name} has no FP8")
        if sizes.dtype_of(options, kind) != torch.bfloat16:
            raise ValueError("--fp8 is there, but --dtype is fp32, must be bf16")
    corpus = Corpus(options.seed)
    corpus.check("--length", options.length, corpus.training)
    tokens = options.sequences // num_ranks * options.length
    if tokens > MOST:
        raise ValueError(f"--sequences is {options.sequences}: with --length {tokens} tokens of a rank, at most {MOST}")
    if options.compile and options.no_compile:
        raise ValueError(f"--compile is {options.compile}, and --no-compile is there, too")
    if options.compile:
        try:
            torch._dynamo.lookup_backend(options.compile)
        except torch._dynamo.exc.InvalidBackend as error:
            raise ValueError(f"--compile is {options.compile}, which is no backend of torch") from error
    require_outside(options.report, "--save", options.save)
    require_outside(options.report, "--load", options.load)
    if options.load:
        checkpoint.check(options.load, model)
        if "," in options.exchange and options.save and Path(options.save).resolve() == Path(options.load).resolve():
            raise ValueError(f"--load and --save are both {options.load}: the second --exchange would load the first's")


class Trainer:
    def __init__(self, world: Ranks, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        device, kind = world.device, world.device.type
        check(options, world.size)
        self.sizes = sizes.sizes_of(options, kind, world.size)
        self.dtype = sizes.dtype_of(options, kind)
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention has a deterministic backward pass
        with device:
            self.model = Model(self.sizes, world.experts.rank(), world.experts.size(), self.dtype)
        self.model.initialise(options.seed)
        self.model.checkpoints_activations = options.checkpoint_activations
        tokens = options.sequences // world.size * options.length
        self.buffers: list[nccl_ep.Buffer] = []
        self._use_exchange(tokens)
        self._compile(kind)
        self.traffic = Traffic()
        self.step_model: Any = self._wrap()
        # Two groups: with FSDP2 the dense parameters are DTensors, and one fused kernel takes no mixture.
        experts = self.model.expert_parameters()
        dense = [parameter for name, parameter in self.model.named_parameters() if name not in experts]
        self.optimiser = torch.optim.AdamW(
            [{"params": dense}, {"params": list(experts.values())}],
            lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=kind == "cuda",
        )  # fmt: skip
        self.first_step = checkpoint.load(options.load, self.model, self.optimiser) if options.load else 0
        self.corpus = Corpus(options.seed)
        self.losses: list[Tensor] = []

    def _use_exchange(self, tokens: int) -> None:
        """A buffer for each layer: its outputs stay in its arena until the layer's backward pass is done."""
        options, world = self.options, self.world
        if options.exchange == "all_to_all_single":
            self.model.use(AllToAll(world.experts, self.sizes.experts))
            return
        quant, count = "fp8" if options.fp8 else None, self.sizes.experts
        for _ in range(self.sizes.layers):
            self.buffers.append(make_buffer(world.experts, self.sizes, tokens, self.dtype, world.device, "ht"))
        if options.exchange == Arriving.name:
            self.model.use(*[Arriving(each, count, tokens, self.sizes.topk) for each in self.buffers])
            return
        self.model.use(*[NcclEp(each, count, mode="ht", rows=options.rows, quant=quant) for each in self.buffers])

    def _compile(self, kind: str) -> None:
        options = self.options
        backend = options.compile or ("inductor" if kind == "cuda" and not options.no_compile else None)
        if backend is None:
            return
        torch._dynamo.config.optimize_ddp = False  # blocks are smaller than buckets already
        whole = options.exchange == "nccl_ep"  # the others wait for the host or for streams, which no graph can hold
        for block in self.model.blocks:
            block.compile(backend=backend, fullgraph=whole)

    def _wrap(self) -> torch.nn.Module:
        """Data parallel for what all ranks have. Experts are not shared by all of them, and stay outside."""
        model, how = self.model, self.options.dense_grads
        experts = model.expert_parameters()
        if how == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            return fully_shard(model, ignored_params=set(experts.values()))
        wrapper = torch.nn.parallel.DistributedDataParallel
        wrapper._set_params_and_buffers_to_ignore_for_model(model, list(experts))
        wrapped = wrapper(model, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(self.traffic, a2sgd_hook if how == "a2sgd" else counted_average_hook)
        return wrapped

    def _average_expert_gradients(self) -> None:
        """A dispatch has brought the tokens of its whole group: the sum is there, but for the other replicas'."""
        for parameter in self.model.expert_parameters().values():
            assert parameter.grad is not None
            if self.world.replicas.size() > 1:
                dist.all_reduce(parameter.grad, group=self.world.replicas)
            parameter.grad.div_(self.world.size)

    def step(self, number: int) -> None:
        options, world = self.options, self.world
        batch = self.corpus.batch(number, options.sequences, options.length, world.rank, world.size).to(world.device)
        for group in self.optimiser.param_groups:
            group["lr"] = options.lr * min(1.0, (number + 1) / 20)
        logits, balance = self.step_model(batch[:, :-1].contiguous())
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        (loss + BALANCE * balance).backward()
        self._average_expert_gradients()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.losses.append(loss.detach())
        every = options.a2sgd_average
        if options.dense_grads == "a2sgd" and every and (number + 1) % every == 0:
            self.average_dense()

    def average_dense(self) -> None:
        experts = self.model.expert_parameters()
        average_parameters(parameter for name, parameter in self.model.named_parameters() if name not in experts)

    def close(self) -> None:
        """Collective."""
        for buffer in self.buffers:
            buffer.destroy()

    def mean_loss(self) -> float:
        """Of the last step, over the ranks. ArithmeticError if it is none."""
        loss = self.losses[-1].clone()
        dist.all_reduce(loss)
        mean = loss.item() / self.world.size
        if not math.isfinite(mean):
            raise ArithmeticError(f"the loss is {mean}: training has diverged, and is not saved. Try a lower --lr")
        return mean

    def mean_losses(self) -> list[float]:
        """Of all steps so far, over the ranks."""
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)
        return (losses / self.world.size).tolist()


def train(world: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, the same on every rank but for times."""
    if options.save:
        checkpoint.prepare(options.save)
    trainer = Trainer(world, options)
    tokens = options.sequences * options.length
    progress: list[dict[str, Any]] = []
    exchange_ms, layer = None, []
    first = trainer.first_step
    log_every = options.log_every or (1 if world.device.type == "cpu" else 10)
    count, begin = 0, time.perf_counter()
    for number in range(first, first + options.steps):
        if number == first + options.profile_at:
            world.synchronize()
            before = time.perf_counter()
            trace = traced(lambda n=number: trainer.step(n))
            exchange_ms, layer = trace.exchange_ms(), trace.layer(trainer.sizes.layers, False)
            begin += time.perf_counter() - before  # the profiler's time does not count
        else:
            trainer.step(number)
            count += 1
        if number + 1 == first + 3:  # what a first step sets up, and compiles, does not count either
            world.synchronize()
            count, begin = 0, time.perf_counter()
        if (number + 1 - first) % log_every == 0 or number + 1 == first + options.steps:
            loss = trainer.mean_loss()
            world.synchronize()
            seconds = (time.perf_counter() - begin) / max(count, 1)
            entry = {
                "step": number + 1, "loss": loss, "tokens_per_s": tokens / seconds if count else None,
                "step_ms": seconds * 1e3, "exchange_ms": exchange_ms,
            }  # fmt: skip
            progress.append(entry)
            if world.rank == 0:
                _show(entry)
            count, begin = 0, time.perf_counter()
    if options.save:
        if options.dense_grads == "a2sgd":
            trainer.average_dense()
        checkpoint.save(options.save, trainer.model, trainer.optimiser, first + options.steps)
        ranks.say(world, f"wrote {options.save}, a checkpoint of step {first + options.steps}")
    report = _report(trainer, progress, layer)
    trainer.close()
    return report


def _show(entry: dict[str, Any]) -> None:
    speed = "" if entry["tokens_per_s"] is None else f"  {entry['tokens_per_s']:10,.0f} tokens/s"
    where = "" if entry["exchange_ms"] is None else (
        f"  {entry['step_ms']:8.1f} ms a step, {entry['exchange_ms']:.2f} ms in dispatch and combine"
    )  # fmt: skip
    print(f"step {entry['step']:5}  loss {entry['loss']:.4f}{speed}{where}", flush=True)


def _report(trainer: Trainer, progress: list[dict[str, Any]], layer: list[Any]) -> dict[str, Any]:
    world, options = trainer.world, trainer.options
    on_gpu = world.device.type == "cuda"
    speeds = sorted(entry["tokens_per_s"] for entry in progress if entry["tokens_per_s"])
    steps = len(trainer.losses)
    return {
        "what": "training", "exchange": options.exchange, "ranks": world.size,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu", "sizes": asdict(trainer.sizes),
        "dtype": str(trainer.dtype), "tokens_a_step": options.sequences * options.length, "options": vars(options),
        "losses": trainer.mean_losses(), "progress": progress, "layer": layer,
        "tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
        "exchange_ms": progress[-1]["exchange_ms"],
        "dense_gradient_bytes_a_step": {
            "given_to_all_reduce": trainer.traffic.sent // steps, "plain": trainer.traffic.plain // steps,
        },
        "memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "first_buffer": {
            name: value for name, value in trainer.buffers[0].stats().items() if isinstance(value, int | str)
        } if trainer.buffers else None,
    }  # fmt: skip


def body(world: Ranks, options: argparse.Namespace) -> None:
    names = options.exchange.split(",")
    for name in names:
        own = argparse.Namespace(**vars(options) | {"exchange": name})
        path = None
        if options.report:
            path = Path(options.report)
            path = path.with_stem(f"{path.stem}_{name}") if len(names) > 1 else path
            path.parent.mkdir(parents=True, exist_ok=True)
        ranks.say(world, f"training {options.steps} steps on {ranks.described(world)}, exchange {name}")
        try:
            report = train(world, own)
        except Exception as error:
            if not options.go_on:
                raise
            text = f"{type(error).__name__}: {error}"
            report = {"what": "failure", "leg": f"training, {name}", "rank": world.rank, "error": text[:2000]}
            print(f"rank {world.rank}, {name} FAILED: {text}", flush=True)
        if world.rank == 0 and path is not None:
            write_whole(path, json.dumps(report, indent=1) + "\n")
            ranks.say(world, f"wrote {path}")
        traffic = report.get("dense_gradient_bytes_a_step")
        if world.rank == 0 and traffic and options.dense_grads == "a2sgd":
            print(f"dense gradients: {traffic['given_to_all_reduce']} bytes a step, plain averaging {traffic['plain']}")
        torch._dynamo.reset()
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    ranks.say_what_times_mean(world)


if __name__ == "__main__":
    ranks.run(body, parse())
