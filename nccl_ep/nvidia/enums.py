"""The enumerations of ``nccl.ep``, with the values of ``nccl_ep.h``."""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import Any, TypeVar

from ..checks import described

Kind = TypeVar("Kind", bound=IntEnum)


class Algorithm(IntEnum):
    """Low latency or high throughput, of all operations of a group."""

    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    """How received rows lie. Low latency has EXPERT_MAJOR and RANK_MAJOR, high throughput EXPERT_MAJOR and FLAT.

    EXPERT_MAJOR of high throughput is nccl_ep's layout "packed".
    """

    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(IntEnum):
    """Forward or backward, in high throughput; low latency takes no notice of it."""

    FWD = 0
    BWD = 1


class OverflowPolicy(IntEnum):
    """What becomes of rows past ``max_recv_tokens_per_rank``, in high throughput. AUTO is TRAP."""

    AUTO = 0
    TRAP = 1
    DROP = 2


class ZeroCopyMode(IntEnum):
    """ON keeps room for tensors of ``Group.empty`` in the group's window, which rows reach without a copy."""

    AUTO = 0
    OFF = 1
    ON = 2


class ExpertIdKind(IntEnum):
    """Numbers of experts in ``outputs.topk_idx``: within the rank, or within all. AUTO is LOCAL."""

    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class DispatchQuantizationRecipe(IntEnum):
    """NONE: rows as they are. FWD: rows and scales of the caller, bit for bit. DS_FP8E3M4: e4m3, made here."""

    NONE = 0
    FWD = 1
    DS_FP8E3M4 = 2


class CombineQuantizationRecipe(IntEnum):
    """NONE: rows as they are. NVFP4 is refused."""

    NONE = 0
    NVFP4 = 1


def member(kind: type[Kind], name: str, value: Any) -> Kind:
    """The value of an argument, or of a field. ValueError for one that the enumeration has not got."""
    try:
        return kind(operator.index(value))
    except (TypeError, ValueError, RuntimeError):
        known = ", ".join(each.name for each in kind)
        raise ValueError(f"{name} is {described(value)}, must be one of {kind.__name__}: {known}") from None
