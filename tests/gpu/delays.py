"""Kernels with delays and planted bugs, of builds with NCCL_EP_LAB: what a rank does in
tests/gpu/test_delays.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import _C
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu.chains import Chain, chain_buffer, replay_graphs
from tests.gpu.ht_chains import HtChain, ht_chain_buffer, replay_ht_graphs
from tests.gpu.ht_ranks import ExpectedHt, overwrite_inputs, own_layouts, shared_ht_buffer, wide_cases
from tests.gpu.ranks import cuda_cases, run_case, run_overwritten, wide_case
from tests.gpu.watched_arrivals import watch
from tests.support.expected import Expected, shared_buffer
from tests.support.gpus import on_gpu
from tests.support.harness import synchronize

DISPATCH, COMBINE = 1, 2  # kinds, as bits
DEADLINE = 1.0  # seconds, of the search for bugs; delays last 2 ms at most
BATCH = 40  # runs of a chain between two looks at what they found
MEETING = 60.0  # seconds that ranks wait for one another between batches
ONE_GPU_RANKS = 4


@dataclass(frozen=True)
class Search:
    """What is planted, and the chain that must show it."""

    bugs: tuple[str, ...]
    kinds: int
    letters: str = "ddccc"  # calls of a kind in a row: a rank can be a call ahead of the others
    to_rank_0: bool = False
    is_ht: bool = False
    # In a world on one GPU a call is one launch of all ranks, and no rank begins a call before all have ended the one
    # before: what only such a rank can do wrong is not to be seen there.
    on_one_gpu: bool = True

    def buffer(self, group: Any, device: str | torch.device) -> nccl_ep.Buffer:
        return ht_chain_buffer(group, device) if self.is_ht else chain_buffer(group, device)

    def chain(self, buffer: nccl_ep.Buffer, seed: int) -> Chain:
        if self.is_ht:
            return HtChain(self.letters, buffer, given=False, seed=seed)
        return Chain(self.letters, buffer, seed=seed, to_rank_0=self.to_rank_0)


SEARCHES = {
    "one_bank in dispatch": Search(("one_bank",), DISPATCH, on_one_gpu=False),
    "one_bank in combine": Search(("one_bank",), COMBINE, on_one_gpu=False),
    "skipped_reset in dispatch": Search(("skipped_reset",), DISPATCH),
    "skipped_reset in combine": Search(("skipped_reset",), COMBINE),
    "reused_epoch in dispatch": Search(("reused_epoch",), DISPATCH),
    "reused_epoch in combine": Search(("reused_epoch",), COMBINE, on_one_gpu=False),
    "early_epoch in dispatch": Search(("early_epoch",), DISPATCH),
    "early_epoch in combine": Search(("early_epoch",), COMBINE),
    "torn_rows in dispatch": Search(("torn_rows",), DISPATCH),
    "torn_rows in combine": Search(("torn_rows",), COMBINE),
    # Ignored credits alone do no harm: there is a second net, the records of all ranks, each of which was sent after
    # its rank's last call. Combines that wait for nobody's rows have none but these two.
    "ignored_credits, unchecked_headers": Search(
        ("ignored_credits", "unchecked_headers"), COMBINE, "dcccc", to_rank_0=True, on_one_gpu=False
    ),
}
# Of high throughput. Its routing and rows are waited for apart from the records, so that neither one bank nor unchecked
# records were seen to do harm in a chain; nor does early_done, as a combine's rows live on in it. A world on one GPU
# shows the others: rows that are announced too early or not at all are missing within the launch, counters that are not
# cleared and epochs that do not move in a later one.
_HT_BUGS = ("skipped_reset", "reused_epoch", "early_epoch", "early_rows", "unannounced_rows")
SEARCHES |= {
    f"{bug} in {name} of high throughput": Search((bug,), kind, "fdhccc", is_ht=True)
    for name, kind, bugs in (("dispatch", DISPATCH, (*_HT_BUGS, "torn_rows")), ("combine", COMBINE, _HT_BUGS))
    for bug in bugs
}
# Without cached dispatches: the counts of their handle may be of another call than its slots, which nobody has filled
# then, and rows would be copied anywhere.
SEARCHES["reused_epoch in dispatch of high throughput"] = Search(("reused_epoch",), DISPATCH, "fdccc", is_ht=True)


@dataclass(frozen=True)
class Found:
    """What a search saw without the bug and with it; empty: nothing."""

    without: str
    planted: str


def set_testing(**state: Any) -> None:
    """Of the current GPU, or of all that are emulated; without a word, it is as in any build."""
    if _C.EMULATES_GPU:
        return _C.set_gpu_testing(0, **state)
    torch.cuda.synchronize()
    _C.set_gpu_testing(torch.cuda.current_device(), **state)


@contextlib.contextmanager
def delays(**state: Any) -> Iterator[None]:
    """Delays, or planted bugs, in all kernels of the current GPU: see ``_C.set_gpu_testing``."""
    set_testing(**state)
    try:
        yield
    finally:
        set_testing()


def meet(group: Any, text: str = "") -> list[str]:
    """What all ranks say, as "rank 1: ..."; nothing of those that say nothing."""
    texts = group.allgather(b":" + text.encode(), MEETING)  # stores may not take nothing
    return [f"rank {rank}: {said[1:].decode()}" for rank, said in enumerate(texts) if len(said) > 1]


def _has_failed(buffer: nccl_ep.Buffer) -> bool:
    try:
        buffer.require_usable()
    except nccl_ep.EpError:
        return True
    return False


def stress(chain: Chain, run: Callable[[], None], runs: int, group: Any, *, batch: int = BATCH) -> str:
    """Runs the chain, with new inputs each time. Returns what went wrong on the first ranks to see anything."""
    buffer = chain.buffer
    for done in range(batch, runs + batch, batch):
        problem = ""
        try:
            for _ in range(batch):
                chain.renew()
                run()
            synchronize(buffer.device)
            buffer.check()
            if wrong := int(chain.wrong):
                problem = f"{wrong} wrong elements"
        except RuntimeError as error:
            # Torch's own, of an operation that was called as such, where the buffer has failed.
            if not isinstance(error, nccl_ep.EpError) and not _has_failed(buffer):
                raise
            problem = f"{type(error).__name__}: {error}"
            synchronize(buffer.device)
        if problems := meet(group, problem):
            return f"after {done} runs: {'; '.join(problems)}"
    return ""


def search(name: str, group: Any, device: torch.device, runs: int, *, on_one_gpu: bool) -> Found:
    """The same chain under the same delays without the bug and with it. All ranks call, and find the same."""
    wanted, seen = SEARCHES[name], []
    seed = 1 + list(SEARCHES).index(name)
    runs = runs // 2 if wanted.is_ht else runs  # its chains take longer, and show more in each
    sets = group.rank() == 0 or not on_one_gpu  # the state is the GPU's
    with wanted.buffer(group, device) as buffer:
        chain = wanted.chain(buffer, seed)
        if on_one_gpu:
            chain.run()
            run: Callable[[], None] = chain.run
        else:
            run = chain.capture().replay
        torch.cuda.synchronize()
        buffer.set_timeout(DEADLINE)
        for bugs in ((), wanted.bugs):
            meet(group)
            if sets:
                set_testing(seed=seed, bugs=list(bugs), kinds=wanted.kinds)
            meet(group)
            seen.append(stress(chain, run, runs, group))  # its last words are said when the GPU is idle
            if sets:
                set_testing()
            meet(group)
    return Found(*seen)


def search_all(names: list[str], group: Any, device: torch.device, runs: int, *, on_one_gpu: bool) -> dict[str, Found]:
    found = {}
    for name in names:
        try:
            found[name] = search(name, group, device, runs, on_one_gpu=on_one_gpu)
        except Exception as error:
            raise RuntimeError(f"in the search for {name}") from error
    return found


def search_over_nccl(rank: int, names: list[str], runs: int) -> dict[str, Found]:
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    return search_all(names, group, device, runs, on_one_gpu=False)


def search_on_one_gpu(_: int, names: list[str], runs: int) -> dict[str, Found]:
    """In a process of its own, whose ranks are threads."""

    def body(group: ThreadGroup) -> dict[str, Found]:
        torch.cuda.set_device(0)
        return search_all(names, group, torch.device("cuda", 0), runs, on_one_gpu=True)

    return run_ranks(ONE_GPU_RANKS, body)[0]


def run_with_delays(rank: int, num_ranks: int, count: int, replays: int) -> dict[bool, tuple[int, float]]:
    """Generated cases, by turns staged and fused, inputs that are overwritten at once, and graphs without and with
    programmatic dependent launch."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    cases = [Expected(case) for case in cuda_cases(count, num_ranks)]
    cases += [Expected(wide_case(num_ranks, **how)) for how in ({}, {"quant": "fp8_ue8m0", "layout": "packed"})]
    with shared_buffer(group, cases, device=device) as buffer:
        for number, case in enumerate(cases):
            with delays(seed=1 + number):
                run_case(case, buffer, staged=number % 2 == 1)
        for seed in range(1, 6):
            with delays(seed=seed):
                for _ in range(4):
                    run_overwritten(cases[-2], buffer)
    found = {}
    with chain_buffer(group, device) as buffer:
        for pdl in (False, True):
            with delays(seed=5 + pdl):
                found[pdl] = replay_graphs(buffer, replays, pdl=pdl, seed=5)
    return found


def run_ht_with_delays(rank: int, num_ranks: int, count: int, replays: int) -> dict[bool, tuple[int, float]]:
    """The same of high throughput: generated cases, wide ones, layouts of the ranks' own, inputs that are overwritten
    at once, graphs."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    cases = [ExpectedHt(case) for case in [*cuda_cases(count, num_ranks), *wide_cases(num_ranks)]]
    with shared_ht_buffer(group, [each.case for each in cases], device=device) as buffer:
        for number, case in enumerate(cases):
            with delays(seed=1 + number):
                case.run(buffer, num_sms=number % 4)
    with delays(seed=3):
        own_layouts(group, device)
    for seed in (4, 5, 6):
        with delays(seed=seed):
            overwrite_inputs(group, device, wide=True)
    found = {}
    with ht_chain_buffer(group, device) as buffer:
        for given in (False, True):
            with delays(seed=7 + given):
                found[given] = replay_ht_graphs(buffer, replays, given=given, seed=5)
    return found


def watch_with_delays(rank: int, replays: int) -> None:
    device = on_gpu(rank)
    with delays(seed=13 + rank):
        watch(rendezvous_of(dist.group.WORLD), device, replays)
