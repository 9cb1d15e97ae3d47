"""Keywords that branches of DeepEP V1 have added to the low-latency methods.

Single-batch overlap is SGLang's: a combine whose send begins while the down GEMM, on another stream, still
writes the rows, and waits for that kernel's signals. On Hopper the GEMM counts up a signal for each block of rows of an
expert, on Blackwell one for each expert. nvfp4.py has those of NVFP4 rows.

Callers pass them also where they ask for nothing (``overlap=False``); such calls are served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...checks import MAX_INT32, require_tensors, require_within

HOPPER_SMS, BLACKWELL_SMS = 3, 32  # that SGLang's GEMM leaves free


# What may follow dispatch_wait_recv_cost_stats in low_latency_dispatch, by position: in DeepEP, and in sgl-deep-ep.
_ORDER: dict[str, Any] = {
    "use_fp8": True, "round_scale": False, "use_ue8m0": False, "async_finish": False, "return_recv_hook": False,
}  # fmt: skip
_ORDER_WITH_SCALE: dict[str, Any] = {
    "x_global_scale": None, "use_fp8": True, "round_scale": False, "use_ue8m0": False, "use_nvfp4": False,
    "async_finish": False, "return_recv_hook": False,
}  # fmt: skip


def in_order(values: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords of ``low_latency_dispatch``, of which some are given by position: ``values``.

    The first of these is ``use_fp8``, or ``x_global_scale`` where it is a tensor or None. TypeError for too many, and
    for what is given twice.
    """
    has_scale = values[0] is None or isinstance(values[0], torch.Tensor)
    defaults = _ORDER_WITH_SCALE if has_scale else _ORDER
    if len(values) > len(defaults):
        raise TypeError(f"low_latency_dispatch() got {len(values)} values after the counts, at most {len(defaults)}")
    placed = dict(zip(defaults, values, strict=False))
    for name in placed:
        if keywords[name] is not defaults[name]:
            raise TypeError(f"low_latency_dispatch() got multiple values for argument {name!r}")
    return keywords | placed


@dataclass(slots=True)
class RowSignals:
    """What ``nccl_ep.combine_send`` takes by these names, and the SMs of the send."""

    row_signals: torch.Tensor
    rows_per_signal: int
    signal_threshold: int
    num_sms: int

    @staticmethod
    def of(
        rows: torch.Tensor,
        return_recv_hook: bool,
        use_logfmt: bool,
        packed_recv_count: torch.Tensor | None,
        comp_signal: torch.Tensor | None,
        block_m: int,
        threshold: int,
        num_sms: int | None,
        src_signals: torch.Tensor | None,
        src_signal_expect_value: int,
    ) -> RowSignals:
        """From the keywords of ``low_latency_combine(overlap=True)``. rows: its x, [L, R * M, H].

        Raises: ValueError, TypeError with what is wrong.
        """
        if not return_recv_hook:
            raise ValueError("overlap is set, and return_recv_hook is not: the send alone waits for signals")
        if use_logfmt:
            raise ValueError("overlap and use_logfmt are both set: rows that come one by one travel as they are")
        if (comp_signal is None) == (src_signals is None):
            which = "neither is" if comp_signal is None else "both are"
            raise ValueError(f"of comp_signal and src_signals {which} given, overlap takes one of them")
        local = rows.shape[0]
        if packed_recv_count is not None:
            require_tensors(packed_recv_count=packed_recv_count)
            if packed_recv_count.shape != (local,) or packed_recv_count.dtype != torch.int32:
                raise ValueError(
                    f"packed_recv_count is {packed_recv_count.dtype} {list(packed_recv_count.shape)}, must be "
                    f"torch.int32 [{local}]"
                )
        if comp_signal is not None:
            require_tensors(comp_signal=comp_signal)
            num_sms = HOPPER_SMS if num_sms is None else num_sms
            require_within(1, MAX_INT32, block_m=block_m, threshold=threshold, num_sms=num_sms)
            return RowSignals(comp_signal, block_m, threshold, num_sms)
        require_tensors(src_signals=src_signals)
        assert src_signals is not None
        if src_signals.shape != (local,) or src_signals.dtype not in (torch.uint32, torch.int32):
            raise ValueError(
                f"src_signals is {src_signals.dtype} {list(src_signals.shape)}, must be torch.uint32 [{local}]"
            )
        num_sms = BLACKWELL_SMS if num_sms is None else num_sms
        require_within(1, MAX_INT32, src_signal_expect_value=src_signal_expect_value, num_sms=num_sms)
        return RowSignals(src_signals, max(rows.shape[1], 1), src_signal_expect_value, num_sms)
