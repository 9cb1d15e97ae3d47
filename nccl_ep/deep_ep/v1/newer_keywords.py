"""Keywords that branches of DeepEP V1 have added to the low-latency methods.

Single-batch overlap is SGLang's: a combine whose send begins while the down GEMM, on another stream, still
writes the rows, and waits for that kernel's signals. On Hopper the GEMM counts up a signal for each block of rows of an
expert, on Blackwell one for each expert. nvfp4.py has those of NVFP4 rows.

Callers pass them also where they ask for nothing (``overlap=False``); such calls are served.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...checks import require_tensors, require_within

_INT32 = (1, (1 << 31) - 1)
HOPPER_SMS, BLACKWELL_SMS = 3, 32  # that SGLang's GEMM leaves free


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
            require_within(*_INT32, block_m=block_m, threshold=threshold, num_sms=num_sms)
            return RowSignals(comp_signal, block_m, threshold, num_sms)
        require_tensors(src_signals=src_signals)
        assert src_signals is not None
        if src_signals.shape != (local,) or src_signals.dtype not in (torch.uint32, torch.int32):
            raise ValueError(
                f"src_signals is {src_signals.dtype} {list(src_signals.shape)}, must be torch.uint32 [{local}]"
            )
        num_sms = BLACKWELL_SMS if num_sms is None else num_sms
        require_within(*_INT32, src_signal_expect_value=src_signal_expect_value, num_sms=num_sms)
        return RowSignals(src_signals, max(rows.shape[1], 1), src_signal_expect_value, num_sms)
