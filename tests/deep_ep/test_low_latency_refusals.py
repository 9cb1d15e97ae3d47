"""What DeepEP's low-latency methods refuse, and that the next call is unharmed by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep.low_latency_ranks import IDS, dispatched, one_rank, rebuilt, small_case
from tests.support.expected import shared_buffer


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": torch.ones(3, 4, 16).bfloat16()}, ValueError, r"x has shape \[3, 4, 16\], must be \[tokens, hidden\]"),
        ({"x": torch.ones(3, 64)}, ValueError, "quant fp8 of fp32"),
        ({"x": None}, TypeError, "x is None, must be a tensor"),
        ({"topk_idx": None}, TypeError, "topk_idx is None, must be a tensor"),
        ({"topk_idx": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, r"topk_idx has shape \[2, 2\], must be \[3"),
        ({"topk_idx": torch.zeros(3, 2)}, ValueError, "topk_idx is torch.float32, must be torch.int64 or torch.int32"),
        ({"topk_idx": [[0, 1]] * 3}, TypeError, "topk_idx is a list, must be a tensor"),
        ({"num_max_dispatch_tokens_per_rank": 2}, ValueError, "3 tokens, but num_max_dispatch_tokens_per_rank is 2"),
        ({"num_max_dispatch_tokens_per_rank": 0}, ValueError, "num_max_dispatch_tokens_per_rank is 0"),
        ({"num_max_dispatch_tokens_per_rank": 4000}, ValueError, "the window is too small for 4000 tokens"),
        ({"num_experts": 0}, ValueError, "experts"),
        ({"use_ue8m0": True}, ValueError, "use_ue8m0 is set, and round_scale is not"),
        ({"async_finish": True, "return_recv_hook": True}, ValueError, "async_finish and return_recv_hook are both"),
        ({"use_fp8": ()}, TypeError, "use_fp8 is a tuple, must be True or False"),
        ({"round_scale": 2}, TypeError, "round_scale is 2, must be True or False"),
        ({"async_finish": "no"}, TypeError, "async_finish is 'no', must be True or False"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)}, ValueError, r"must be \[2\]"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(2)}, ValueError, "is torch.float32, must be torch.int32"),
        ({"dispatch_wait_recv_cost_stats": torch.zeros(2, dtype=torch.int64)}, ValueError, r"must be \[1\]"),
        ({"x": torch.ones(3, 64, device="meta").bfloat16()}, ValueError, "x is on meta, the buffer on cpu"),
    ],
)
def test_a_bad_dispatch_is_refused_and_harms_nothing(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    good = {
        "x": torch.ones(3, 64).bfloat16(), "topk_idx": torch.zeros(3, 2, dtype=torch.int64),
        "num_max_dispatch_tokens_per_rank": 4, "num_experts": 2,
    }  # fmt: skip
    with one_rank() as buffer:
        with pytest.raises(error, match=text):
            buffer.low_latency_dispatch(**{**good, **changes})
        *_, counts, _, _, _ = buffer.low_latency_dispatch(**good)  # nothing was sent, nothing is harmed
        assert counts.tolist() == [4, 0]  # of six rows, those that there is room for
        assert buffer.stats()["dispatches"] == 1


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": torch.ones(2, 3, 64).bfloat16()}, ValueError, r"x has shape \[2, 3, 64\], must be \[2, 4, 64\]"),
        ({"x": torch.ones(2, 4, 32).bfloat16()}, ValueError, r"x has shape \[2, 4, 32\], must be \[local .*, 64\]"),
        ({"x": torch.ones(2, 64, 4).bfloat16().transpose(1, 2)}, ValueError, "not contiguous"),
        ({"x": torch.ones(2, 4, 64).to(torch.int16)}, ValueError, "must be torch.bfloat16"),
        ({"topk_weights": torch.ones(3, 2).bfloat16()}, ValueError, "weights is torch.bfloat16, must be torch.float32"),
        ({"topk_weights": torch.ones(3, 3)}, ValueError, r"weights has shape \[3, 3\]"),
        ({"topk_idx": torch.zeros(4, 2, dtype=torch.int64)}, ValueError, "after a dispatch of 4 tokens, top-2"),
        ({"topk_idx": torch.zeros(3, 3, dtype=torch.int64)}, ValueError, "after a dispatch of 3 tokens, top-3"),
        ({"out": torch.zeros(3, 64)}, ValueError, "out is torch.float32, must be torch.bfloat16"),
        ({"out": torch.zeros(2, 64).bfloat16()}, ValueError, r"out has shape \[2, 64\], must be \[3, 64\]"),
        ({"use_logfmt": True, "zero_copy": True}, ValueError, "use_logfmt and zero_copy are both set"),
        ({"zero_copy": True, "x": torch.ones(2, 4, 64)}, ValueError, "with zero_copy it must be as torch.bfloat16"),
        ({"async_finish": True, "return_recv_hook": True}, ValueError, "async_finish and return_recv_hook are both"),
        ({"use_logfmt": True, "x": torch.ones(2, 4, 64)}, ValueError, "must both be bf16, or both fp16"),
        ({"zero_copy": "no"}, TypeError, "zero_copy is 'no', must be True or False"),
        ({"use_logfmt": 2}, TypeError, "use_logfmt is 2, must be True or False"),
        ({"return_recv_hook": ()}, TypeError, "return_recv_hook is a tuple, must be True or False"),
        ({"combine_wait_recv_cost_stats": torch.zeros(1)}, ValueError, "is torch.float32, must be torch.int64"),
        (
            {"zero_copy": True, "handle": (IDS, None, -1, 64, 2)},
            ValueError,
            "num_max_dispatch_tokens_per_rank is -1, must be at least 1",
        ),
        ({"zero_copy": True, "handle": (IDS, None, 1 << 40, 64, 2)}, ValueError, "is 1099511627776, beyond 32 bits"),
        ({"zero_copy": True, "handle": (IDS, None, 10**9, 64, 2)}, ValueError, "too small for 1000000000 tokens"),
        ({"zero_copy": True, "handle": (IDS, None, 4, 64, 0)}, ValueError, "0 experts do not divide"),
    ],
)
def test_a_bad_combine_is_refused_and_harms_nothing(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with one_rank() as buffer:
        ids, rows, _, handle, _, _ = dispatched(buffer)
        good = {"x": rows, "topk_idx": ids, "topk_weights": torch.ones(3, 2), "handle": handle}
        with pytest.raises(error, match=text):
            buffer.low_latency_combine(**{**good, **changes})
        assert buffer.low_latency_combine(**good)[0][:, 0].tolist() == [2, 1, 2]
        assert buffer.stats()["combines"] == 1


def test_a_handle_that_is_none() -> None:
    """Copies of src_info have lost the routing behind it; other tuples have other sizes."""
    with one_rank() as buffer:
        ids, rows, _, handle, _, _ = dispatched(buffer)
        src_info, *rest = handle
        weights = torch.ones(3, 2)
        for wrong in (src_info.clone(), torch.zeros(4, 2, dtype=torch.int32).t().contiguous(), src_info[:, :3]):
            with pytest.raises(ValueError, match="src_info"):
                buffer.low_latency_combine(rows, ids, weights, (wrong, *rest))
        with pytest.raises(ValueError, match=r"src_info has shape \[2, 4\], must be \[2, 3\]"):
            buffer.low_latency_combine(rows[:, :3].contiguous(), ids, weights, (src_info, rest[0], 3, 64, 2))
        handle[0].view(-1).as_strided((8,), (1,), 8 + 4).fill_(1000)  # behind src_info and the numbers of tokens
        with pytest.raises(ValueError, match="the handle is not of these sizes, or was changed"):
            buffer.low_latency_combine(rows, ids, weights, handle)


def test_a_destroyed_buffer_refuses_every_call() -> None:
    buffer = one_rank()
    ids, rows, _, handle, _, _ = dispatched(buffer)
    buffer.destroy()
    calls: list[Any] = [
        lambda: dispatched(buffer),
        lambda: buffer.low_latency_combine(rows, ids, torch.ones(3, 2), handle),
        lambda: buffer.clean_low_latency_buffer(4, 64, 2),
        lambda: buffer.get_next_low_latency_combine_buffer(handle),
        lambda: buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
        buffer.low_latency_clean_mask_buffer,
    ]
    for call in calls:
        with pytest.raises(nccl_ep.UsageError, match="destroyed"):
            call()


def test_a_rank_that_does_not_come() -> None:
    case = small_case(2)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case]) as buffer:
            if group.rank() == 0:
                buffer.set_timeout(0.3)
                *_, handle, _, hook = case.send(buffer, return_recv_hook=True)
                for _ in range(2):  # a hook that has failed says so again
                    with pytest.raises(nccl_ep.TimeoutError, match="nothing of this call was heard from rank 1"):
                        hook()
                with pytest.raises(nccl_ep.TimeoutError, match="nothing of this call was heard from rank 1"):
                    case.send_back(buffer, handle)

    run_ranks(2, body)


@pytest.mark.parametrize("hooks", [False, True])
def test_handles_of_different_dispatches_are_refused_on_all_ranks(hooks: bool) -> None:
    case = small_case(2)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [case]) as buffer:
            handles = [case.send(buffer)[2] for _ in range(2)]
            for handle in handles[::-1]:
                case.check_combine(case.send_back(buffer, rebuilt(handle))[0], rank)
            mine, theirs = (f"rank {each} that of dispatch {1 + each}" for each in (rank, 1 - rank))
            with pytest.raises(nccl_ep.MismatchError, match=f"gave handles of different .*: {mine}, {theirs}"):
                _, _, hook = case.send_back(buffer, handles[rank], return_recv_hook=hooks)
                hook()
            with pytest.raises(nccl_ep.MismatchError, match="the buffer has failed: ranks gave handles of different"):
                case.send(buffer)

    run_ranks(2, body)


def test_keywords_of_branches_are_checked() -> None:
    """SGLang passes them also where they ask for nothing. What they ask for is refused by its name."""
    x, ids, weights = torch.ones(2, 64, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    core = nccl_ep.Buffer.for_shapes(None, max_tokens=2, hidden=64, topk=1, num_experts=1, device="cpu")
    with nccl_ep.deep_ep.Buffer.of(core) as buffer:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 2, 1, use_fp8=False, use_nvfp4=False)
        nothing: dict[str, object] = {
            "overlap": False,
            "comp_signal": None,
            "block_m": 64,
            "threshold": 0,
            "num_sms": 3,
        }
        assert torch.equal(buffer.low_latency_combine(rows, ids, weights, handle, **nothing)[0], x)
        ignored: dict[str, Any] = {"comp_signal": weights, "block_m": -1, "src_signals": "none", "num_sms": 0}
        assert torch.equal(buffer.low_latency_combine(rows, ids, weights, handle, **ignored)[0], x)
        unknown: dict[str, Any] = {"overlapp": False}
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'overlapp'"):
            buffer.low_latency_combine(rows, ids, weights, handle, **unknown)
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'use_nvfp5'"):
            buffer.low_latency_dispatch(x, ids, 2, 1, use_nvfp5=False)  # type: ignore[call-arg]


_COUNTERS = torch.ones(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"return_recv_hook": False}, ValueError, "overlap is set, and return_recv_hook is not"),
        ({"async_finish": True}, ValueError, "async_finish and return_recv_hook are both set"),
        ({"use_logfmt": True}, ValueError, "overlap and use_logfmt are both set"),
        ({"overlap": 2}, TypeError, "overlap is 2, must be True or False"),
        ({"comp_signal": None}, ValueError, "of comp_signal and src_signals neither is given"),
        ({"src_signals": _COUNTERS}, ValueError, "of comp_signal and src_signals both are given"),
        ({"comp_signal": [1, 1]}, TypeError, "comp_signal is a list, must be a tensor"),
        ({"comp_signal": torch.ones(2)}, ValueError, "row_signals is torch.float32, must be torch.int32"),
        ({"comp_signal": torch.ones(3, dtype=torch.int32), "block_m": 2}, ValueError, r"\[3\], must be \[2, 2\]"),
        ({"comp_signal": _COUNTERS.to("meta")}, ValueError, "comp_signal is on meta, the buffer on cpu"),
        ({"packed_recv_count": torch.ones(2)}, ValueError, r"packed_recv_count is torch.float32 \[2\], must be"),
        ({"packed_recv_count": torch.ones(3, dtype=torch.int32)}, ValueError, r"torch.int32 \[3\], must be .* \[2\]"),
        ({"block_m": 0}, ValueError, "block_m is 0, must be 1 to 2147483647"),
        ({"block_m": None}, TypeError, "block_m is None"),
        ({"threshold": 0}, ValueError, "threshold is 0, must be 1 to 2147483647"),
        ({"num_sms": 0}, ValueError, "num_sms is 0, must be 1 to 2147483647"),
        (
            {"comp_signal": None, "src_signals": torch.ones(3, dtype=torch.int32)},
            ValueError,
            r"src_signals is torch.int32 \[3\], must be torch.uint32 \[2\]",
        ),
        (
            {"comp_signal": None, "src_signals": _COUNTERS, "src_signal_expect_value": 0},
            ValueError,
            "src_signal_expect_value is 0, must be 1 to",
        ),
    ],
)
def test_a_bad_overlap_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    """Nothing is sent, and the next call is unharmed."""
    with one_rank() as buffer:
        ids, rows, _, handle, _, _ = dispatched(buffer)
        good = {
            "x": rows, "topk_idx": ids, "topk_weights": torch.ones(3, 2), "handle": handle, "return_recv_hook": True,
            "overlap": True, "comp_signal": _COUNTERS, "block_m": 4, "threshold": 1,
        }  # fmt: skip
        with pytest.raises(error, match=text):
            buffer.low_latency_combine(**{**good, **changes})
        combined, _, hook = buffer.low_latency_combine(**good)
        hook()
        assert combined[:, 0].tolist() == [2, 1, 2]
        assert buffer.stats()["combines"] == 1


def test_a_signal_that_does_not_come() -> None:
    with one_rank() as buffer:
        ids, rows, _, handle, _, _ = dispatched(buffer)
        buffer.set_timeout(0.3)
        signals = torch.tensor([1, 0], dtype=torch.int32)
        with pytest.raises(nccl_ep.TimeoutError, match="signal of row block 0 of local expert 1's rows in combine 1"):
            buffer.low_latency_combine(
                rows, ids, torch.ones(3, 2), handle, return_recv_hook=True, overlap=True, src_signals=signals,
                src_signal_expect_value=1,
            )  # fmt: skip
