"""What overlaps inside high throughput's operations between domains, by the time line of emulated GPUs: run by
tests/support/emulated.py, in a build with -DNCCL_EP_LAB=ON.

A dispatch puts a chunk of its own rows as soon as that chunk is there, and a rank hands out what has come while the
sender still reads its last rows. A combine puts a chunk of a domain's sums as soon as it is there, and the home rank
begins with the first chunk while the rail peer still adds up the last. All tokens go to one rank, so that rows cross in
one direction and sums come back in the other: a home rank with sums to make for others makes these first.

All emulated ranks are in one process and have one clock, so stamps of different ranks can be compared.

Why this is no matter of luck:

* A rank that put only when its last row is there could not show any of it, whatever the times: its first put would
  come after its last row, and what the peer does with it later still.
  ``test_late_chunks_overlap_with_nothing`` plants that.
* So one call that shows it is enough. A call need not: the emulator makes one launch in six 4 to 64 times as slow, and
  a machine may stop the thread of the simulated NIC. But chunks are 32 rows of 512, so that 15 of 16 are still to come
  when the first is put. Mostly the first call shows everything; there are CALLS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.stamps import STAMPS, Stamps, Summary, summary
from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu.delays import COMBINE, DISPATCH, delays, meet
from tests.network.test_emulated_network import name_of
from tests.support.expected import Expected, plain_case
from tests.support.harness import case_buffer

pytestmark = pytest.mark.skipif(
    not _C.EMULATES_GPU or not _C.time_line("ht_dispatch"), reason="no emulated GPU with stamps: make emulated"
)

TOKENS = 512  # of a rank: 16 chunks of 32 rows for each rail peer
CALLS = 12  # at most, of each operation
LATE_CALLS = 3  # of the planted bug
LIMIT = 1200.0  # seconds: emulated GPUs are slow, and the machine may be busy
KERNELS = ("ht_dispatch", "ht_combine")
WARPS = 132 * 32  # of a rank: csrc/cuda/testing/stamps.cuh, kStampWarps

Line = list[dict[str, Summary]]  # of each rank: when the first, the median and the last warp passed a stamp


def line_of(stamps: Stamps, ranks: int) -> Line:
    line = []
    for rank in range(ranks):
        own = {
            name: summary(warps[rank * WARPS : (rank + 1) * WARPS]) for name, warps in zip(STAMPS, stamps, strict=True)
        }
        line.append({name: times for name, times in own.items() if times is not None})
    return line


@dataclass
class Seen:
    """What the calls of one run have shown; rank 0 notes it, for all."""

    case: Expected
    lines: list[dict[str, Line]] = field(default_factory=list)  # of each call, by the kernel
    overlaps: set[str] = field(default_factory=set)

    def pairs(self) -> list[tuple[int, int]]:
        """Ranks outside of the domain that all tokens go to, each with its rail peer there."""
        case = self.case.case
        assert case.domain_size is not None
        owner = next(rank for rank, result in enumerate(self.case.results) if bool(result.valid.any()))
        size, home = case.domain_size, owner // case.domain_size
        return [(rank, home * size + rank % size) for rank in range(case.num_ranks) if rank // size != home]

    def names(self) -> set[str]:
        what = ("rows are put early", "rows are handed out early", "sums are put early", "sums are used early")
        return {f"{sender} to {peer}: {each}" for sender, peer in self.pairs() for each in what}

    def note(self, call: dict[str, Line]) -> None:
        self.lines.append(call)
        first, last = 0, 2  # warp
        for sender, peer in self.pairs():
            mine, theirs = call["ht_dispatch"][sender], call["ht_dispatch"][peer]
            home, adding = call["ht_combine"][sender], call["ht_combine"][peer]
            earlier_later = {
                "rows are put early": (mine["kFirstPut"][first], mine["kLastMade"][last]),
                "rows are handed out early": (theirs["kFirstUsed"][first], mine["kLastMade"][last]),
                "sums are put early": (adding["kFirstPut"][first], adding["kLastMade"][last]),
                "sums are used early": (home["kFirstUsed"][first], adding["kLastMade"][last]),
            }
            self.overlaps |= {
                f"{sender} to {peer}: {each}" for each, (earlier, later) in earlier_later.items() if earlier < later
            }

    def is_complete(self) -> bool:
        return self.overlaps == self.names()

    def show(self) -> str:
        """In us; of the last call."""
        text = []
        for kernel, line in self.lines[-1].items():
            for rank, times in enumerate(line):
                shown = ", ".join(f"{name} {t[0] / 1e3:,.0f}..{t[2] / 1e3:,.0f}" for name, t in times.items())
                text.append(f"{kernel} rank {rank}: {shown}")
        return "\n".join(text)


def run(domains: int, size: int, *, calls: int, network_seed: int) -> Seen:
    """Dispatches and combines, each by itself, until their time lines show all, or so many."""
    ranks = domains * size
    how: dict[str, Any] = {"layout": "flat", "routing": "one_rank", "hidden": 256, "max_tokens": TOKENS}
    case = Expected(plain_case(ranks, domain_size=size, tokens=(TOKENS,) * ranks, **how))
    seen = Seen(case)

    def body(group: ThreadGroup) -> None:
        with case_buffer(case.case, group, mode="ht", device="cpu", network_seed=network_seed) as buffer:
            for _ in range(calls):
                meet(group)
                if group.rank() == 0:
                    for kernel in KERNELS:
                        _C.time_line(kernel)  # of calls before
                meet(group)
                out = case.send(buffer)
                meet(group)
                case.combine(buffer, out.handle)
                buffer.check()
                case.check_dispatch(out, group.rank())
                meet(group)
                if group.rank() == 0:
                    seen.note({kernel: line_of(_C.time_line(kernel), ranks) for kernel in KERNELS})
                meet(group)
                if seen.is_complete():
                    return

    run_ranks(ranks, body, timeout=LIMIT)
    print(f"\n{len(seen.lines)} calls\n{seen.show()}")
    return seen


@pytest.mark.parametrize("topology", [(2, 1), (2, 2)], ids=name_of)
@pytest.mark.parametrize("network_seed", [0, 7], ids=["quick network", "late network"])
def test_puts_begin_before_all_chunks_are_there(topology: tuple[int, int], network_seed: int) -> None:
    seen = run(*topology, calls=CALLS, network_seed=network_seed)
    assert seen.is_complete(), f"not in {CALLS} calls: {sorted(seen.names() - seen.overlaps)}\n{seen.show()}"


@pytest.mark.parametrize("topology", [(2, 1), (2, 2)], ids=name_of)
def test_late_chunks_overlap_with_nothing(topology: tuple[int, int]) -> None:
    """Kernels that put no chunk before all are there: the results are right, and nothing overlaps in any call."""
    with delays(bugs=["late_chunks"], kinds=DISPATCH | COMBINE):
        seen = run(*topology, calls=LATE_CALLS, network_seed=0)
    assert len(seen.lines) == LATE_CALLS and not seen.overlaps, f"{sorted(seen.overlaps)}\n{seen.show()}"
