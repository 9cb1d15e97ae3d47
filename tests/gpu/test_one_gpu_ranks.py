"""All 72 ranks of a rack on one GPU (csrc/cuda/host/one_gpu): ranks that have bits in a third word.

On a GPU with NCCL_EP_LAB, and on an emulated one: NCCL_EP_EMULATOR_GPUS=1 python tests/support/emulated.py THIS FILE.
"""

from __future__ import annotations

import os

import pytest

from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.ht.harness import check_ht_case
from tests.ll.mask_ranks import Parted, run_all
from tests.support.cases import Case
from tests.support.expected import plain_case, shared_buffer
from tests.support.gpus import NUM_GPUS
from tests.support.harness import check_case
from tests.support.patience import PATIENCE

IS_EMULATED = _C.EMULATES_GPU and os.environ.get("NCCL_EP_EMULATOR_GPUS") == "1"
_reason = "no GPU here" if NUM_GPUS == 0 else "several ranks on one GPU: build with -DNCCL_EP_LAB=ON"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_EMULATED and (NUM_GPUS == 0 or _C.EMULATES_GPU or not hasattr(_C, "set_gpu_testing")), reason=_reason
    ),
]
RANKS = 72
DEVICE = "cpu" if IS_EMULATED else "cuda"
NUM_SMS = 1  # of a rank: all blocks must run at a time


def _case(**how: object) -> Case:
    tokens = tuple(rank % 4 for rank in range(RANKS))
    return plain_case(RANKS, topk=8, max_tokens=3, tokens=tokens, hidden=128, **how)


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_low_latency_gives_the_oracles_bits(layout: str) -> None:
    check_case(_case(layout=layout), num_sms=NUM_SMS, device=DEVICE)


@pytest.mark.parametrize("layout", ["packed", "flat"])
def test_high_throughput_gives_the_oracles_bits(layout: str) -> None:
    check_ht_case(_case(layout=layout), num_sms=NUM_SMS, device=DEVICE)


def test_masks_have_a_bit_for_each_rank() -> None:
    """Ranks 1 and 65 part: bits that a word of 64 would take for one. All ranks are in one launch, so all keep step."""
    case = Parted(_case(), frozenset(range(65)) - {1})

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case.whole], enable_shrink=True, device=DEVICE) as buffer:
            run_all([case], buffer, lambda: group.allgather(b"", PATIENCE), in_step=True)

    run_ranks(RANKS, body)
