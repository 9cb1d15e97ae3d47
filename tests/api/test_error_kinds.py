"""Of which class an error is: wrong kinds of arguments are TypeErrors, what is torch's own stays its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.checks import error_of

_of = deep_ep.Buffer.of
SIZES = {"max_tokens": 4, "hidden": 64, "topk": 2, "num_experts": 2, "device": "cpu"}
X, IDS = torch.ones(3, 64, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1], [0, 1]])


@pytest.fixture
def buffer() -> Any:
    with nccl_ep.Buffer.for_shapes(None, **SIZES) as made:
        yield made


def _dispatch(buffer: Any, *given: Any, **changes: Any) -> nccl_ep.DispatchOutput:
    return nccl_ep.dispatch(*(given or (X, IDS)), **{"buffer": buffer, "num_experts": 2, **changes})


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda b: _dispatch(None), "buffer is None, must be a nccl_ep.Buffer"),
    (lambda b: _dispatch(b, None, IDS), "x is None, must be a tensor"),
    (lambda b: _dispatch(b, X, None), "topk_idx is None, must be a tensor"),
    (lambda b: _dispatch(b, X, [[0, 1]]), "topk_idx is a list, must be a tensor"),
    (lambda b: _dispatch(b, max_tokens="8"), "max_tokens is '8', must be an integer"),
    (lambda b: _dispatch(b, capacity=2.5), "capacity is 2.5, must be an integer"),
    (lambda b: _dispatch(b, num_experts=2.0), "num_experts is 2.0, must be an integer"),
    (lambda b: _dispatch(b, layout="packed", expert_alignment=8.0), "expert_alignment is 8.0, must be an integer"),
    (lambda b: _dispatch(b, num_sms="all"), "num_sms is 'all', must be an integer"),
    (lambda b: nccl_ep.combine(None, _dispatch(b).handle), "rows is None, must be a tensor"),
    (lambda b: nccl_ep.combine(X, _dispatch(b)), "handle is a DispatchOutput, must be the handle of a dispatch"),
    (lambda b: nccl_ep.combine(X, None), "handle is a NoneType"),
    (lambda b: nccl_ep.combine(_dispatch(b).x, _dispatch(b).handle, num_sms=0.5), "num_sms is 0.5, must be an integer"),
    (lambda b: nccl_ep.combine_weights(_dispatch(b).weights, None), "handle is a NoneType, must be the handle"),
    (lambda b: nccl_ep.combine_weights(None, _dispatch(b).handle), "values is None, must be a tensor"),
    (lambda b: nccl_ep.dispatch_cached(X, 3), "handle is a int, must be the handle"),
    (lambda b: _dispatch(b, extra=[None]), "extra 0 is None, must be a tensor"),
    (lambda b: _dispatch(b, extra=X), "extra is a Tensor, must be a tuple or a list of tensors"),
    (lambda b: _dispatch(b, extra=None), "extra is None, must be a tuple or a list of tensors"),
    (lambda b: _dispatch(b, extra=3), "extra is 3, must be a tuple or a list of tensors"),
    (lambda b: _of(b).low_latency_combine(X, IDS, IDS, None), "handle is a NoneType, must be the 5 elements"),
    (lambda b: _of(b).low_latency_combine(X, IDS, IDS, (X,)), "handle is 1 elements, must be the 5 elements"),
    (lambda b: _of(b).get_dispatch_layout(None, 2), "topk_idx is None, must be a tensor"),
    (lambda b: _dispatch(b, num_experts=[2]), "num_experts is a list, must be an integer"),
    (lambda b: _of(b).low_latency_combine(X, IDS, IDS, (None, None, 4, 64, 2)), "handle[0] is None, must be a tensor"),
    (lambda b: _of(b).low_latency_query_mask_buffer(None), "mask_status is None, must be a tensor"),
    (lambda b: _of(b).low_latency_update_mask_buffer("a"), "rank_to_mask is 'a', must be an integer"),
    (lambda b: _of(b).low_latency_update_mask_buffer(None), "rank_to_mask is None, must be an integer"),
    (lambda b: _of(b).low_latency_update_mask_buffer(0.5), "rank_to_mask is 0.5, must be an integer"),
    (
        lambda b: _of(b).clean_low_latency_buffer(8.0, 64, 2),
        "num_max_dispatch_tokens_per_rank is 8.0, must be an integer",
    ),
    (
        lambda b: _of(b).get_next_low_latency_combine_buffer((IDS, None, [4], 64, 2)),
        "_per_rank is a list, must be an int",
    ),
    (
        lambda b: _of(b).get_next_low_latency_combine_buffer((IDS, None, 4, 64.0, 2)),
        "hidden is 64.0, must be an integer",
    ),
    (lambda b: _of(b).get_local_buffer_tensor("int8"), "dtype is 'int8', must be a torch.dtype"),
    (lambda b: _of(b).get_local_buffer_tensor(torch.int8, 3), "size is a int, must be a shape"),
    (lambda b: _of(b).get_local_buffer_tensor(torch.int8, (1.5,)), "size[0] is 1.5, must be an integer"),
    (lambda b: _of(b).get_local_buffer_tensor(torch.int8, offset=None), "offset is None, must be an integer"),
    (
        lambda b: _of(b).get_local_buffer_tensor(torch.int8, use_rdma_buffer="no"),
        "use_rdma_buffer is 'no', must be True or",
    ),
    (lambda b: _of(b).low_latency_update_mask_buffer(0, "no"), "mask is 'no', must be True or False"),
    (
        lambda b: _of(b).get_dispatch_layout(IDS, 2, async_finish=torch.ones(2)),
        "async_finish is a Tensor, must be True or",
    ),
    (lambda b: nccl_ep.dispatch_send(X, IDS, buffer=b, num_experts=2, async_finish="no"), "async_finish is 'no', must"),
    (lambda b: nccl_ep.combine_send(_dispatch(b).x, _dispatch(b).handle, async_finish=[]), "async_finish is a list, m"),
    (lambda b: deep_ep.Buffer(None, low_latency_mode="no"), "low_latency_mode is 'no', must be True or False"),
    (lambda b: nccl_ep.Buffer(None, enable_shrink=()), "enable_shrink is a tuple, must be True or False"),
    (lambda b: _of(b).get_low_latency_rdma_size_hint(8, 64, None, 2), "num_ranks is None, must be an integer"),
    (lambda b: b.set_timeout("1"), "seconds is '1', must be a number of seconds"),
    (lambda b: deep_ep.Buffer(None, "1"), "num_nvl_bytes is '1', must be an integer"),
    (lambda b: deep_ep.Buffer(None, 0, 1e6), "num_rdma_bytes is 1000000.0, must be an integer"),
    (lambda b: nccl_ep.Buffer(None, timeout="x"), "timeout is 'x', must be a number of seconds"),
    (lambda b: nccl_ep.Buffer(None, timeout=timedelta(seconds=1)), "timeout is a timedelta, must be a number of s"),
    (lambda b: nccl_ep.Buffer(None, timeout=torch.ones(2)), "timeout is a Tensor, must be a number of seconds"),
    (lambda b: nccl_ep.Buffer(None, timeout=int), "timeout is a type, must be a number of seconds"),
    (lambda b: nccl_ep.Buffer(None, network_seed=X), "network_seed is a Tensor, must be an integer"),
    (lambda b: nccl_ep.Buffer(None, domain_size=X), "domain_size is a Tensor, must be an integer"),
    (lambda b: nccl_ep.Buffer(X), "group is a Tensor: must be a torch process group"),
    (lambda b: nccl_ep.Buffer(np.ones(3)), "group is a ndarray: must be a torch process group"),
    (lambda b: nccl_ep.Buffer(None, domain_size=1.5), "domain_size is 1.5, must be an integer"),
    (lambda b: nccl_ep.Buffer(None, network_seed="a"), "network_seed is 'a', must be an integer"),
    (lambda b: nccl_ep.Buffer(None, name=5), "name is a int, must be a str"),
    (lambda b: nccl_ep.Buffer(None, comm=3), "comm is a int, must be an mpi4py communicator"),
    (
        lambda b: nccl_ep.Buffer.for_shapes(None, **{**SIZES, "max_tokens": 1.5}),
        "max_tokens is 1.5, must be an integer",
    ),
    (lambda b: nccl_ep.Buffer.for_shapes(None, **{**SIZES, "topk": 2.0}), "topk is 2.0, must be an integer"),
    (lambda b: nccl_ep.Buffer.for_shapes(None, **{**SIZES, "num_experts": None}), "num_experts is None, must be an"),
    (lambda b: nccl_ep.Buffer.for_shapes(None, **{**SIZES, "hidden": "64"}), "hidden is '64', must be an integer"),
    (lambda b: nccl_ep.Buffer.for_shapes(None, **SIZES, wire_dtype=X), "wire_dtype is a Tensor, must be a torch.dtype"),
    (lambda b: nccl_ep.Buffer.for_shapes(None, **SIZES, arena_bytes=X), "arena_bytes is a Tensor, must be an integer"),
    (lambda b: nccl_ep.record(None).__enter__(), "path is None, must be that of a folder"),
    (lambda b: nccl_ep.Buffer.for_shapes(None, **SIZES, dtype="bf16"), "dtype is 'bf16', must be a torch.dtype"),
    (lambda b: nccl_ep.Buffer.for_shapes(None, **SIZES, scale_bytes=1.5), "scale_bytes is 1.5, must be an integer"),
]


@pytest.mark.parametrize(("call", "text"), WRONG, ids=[text.split(",")[0] for _, text in WRONG])
def test_a_wrong_kind_is_a_type_error_with_the_value(
    buffer: nccl_ep.Buffer, call: Callable[[Any], Any], text: str
) -> None:
    with pytest.raises(TypeError) as refused:
        call(buffer)
    assert text in str(refused.value)
    out = _dispatch(buffer)  # a refused number is not remembered for its equals
    assert nccl_ep.combine(out.x, out.handle).shape == X.shape


def test_what_counts_as_true_and_false(buffer: nccl_ep.Buffer) -> None:
    is_true = (True, 1, torch.tensor(True), np.bool_(True))
    for value in (*is_true, False, 0, None, torch.tensor(False), np.bool_(False)):
        *_, event = _of(buffer).get_dispatch_layout(IDS, 2, async_finish=value)  # type: ignore[arg-type]
        how: dict[str, Any] = {"use_fp8": False, "async_finish": value}
        *_, ours, _ = _of(buffer).low_latency_dispatch(X, IDS, 4, 2, **how)
        assert (event.event is not None) == (ours.event is not None) == bool(value)


@pytest.mark.parametrize(
    "changes", [{"num_experts": 2.0}, {"max_tokens": 4.0}, {"capacity": 8.0}, {"expert_alignment": 1.0}], ids=str
)
def test_equals_of_numbers_that_were_served(buffer: nccl_ep.Buffer, changes: dict[str, float]) -> None:
    name, value = next(iter(changes.items()))
    assert _dispatch(buffer, **{name: int(value)}).counts.tolist() == [2, 3]
    with pytest.raises(TypeError, match=f"{name} is {value}, must be an integer"):
        _dispatch(buffer, **changes)


def test_a_wire_dtype_is_refused_with_what_there_is(buffer: nccl_ep.Buffer) -> None:
    out = _dispatch(buffer)
    with pytest.raises(ValueError, match=r"wire_dtype is torch.bfloat16, must be torch.float32$"):
        nccl_ep.combine(out.x, out.handle, out_dtype=torch.float32, wire_dtype=torch.bfloat16)


def test_errors_of_torch_stay_what_they_are(buffer: nccl_ep.Buffer) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        error_of(buffer, torch.OutOfMemoryError("no memory"))
    with pytest.raises(RuntimeError, match="can't allocate memory") as failed:
        _dispatch(buffer, capacity=500_000_000)  # rows of 128 bytes, two experts
    assert type(failed.value) is RuntimeError
    assert _dispatch(buffer).counts.tolist() == [2, 3]
    buffer.destroy()
    with pytest.raises(nccl_ep.UsageError, match="was destroyed"):
        _dispatch(buffer)


@pytest.mark.parametrize(("hidden", "size"), [(60, 120), (4, 8), (0, 0), (32776, 65552)])
def test_rows_that_cannot_be_sent_get_no_buffer(hidden: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"rows of {hidden} x torch.bfloat16 have {size} bytes, must be a multiple"):
        nccl_ep.Buffer.for_shapes(None, **{**SIZES, "hidden": hidden})


def test_a_world_of_one_in_a_job_of_several_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with caplog.at_level(logging.WARNING, logger="nccl_ep"), nccl_ep.Buffer.for_shapes(None, **SIZES):
        pass
    assert "world of one rank, and this process is one of 2: pass group=" in caplog.text


@pytest.mark.parametrize("how", ["now", "later", "hook"])
def test_deepep_dispatch_raises_what_was_dropped(how: str) -> None:
    """Ids that name an expert twice may exceed what DeepEP's tensors hold."""
    twice = torch.tensor([[0, 0], [0, 0], [1, 1]])

    def run(buffer: nccl_ep.Buffer, ids: torch.Tensor) -> torch.Tensor:
        options = {"async_finish": how == "later", "return_recv_hook": how == "hook"}
        _, counts, _, _, hook = _of(buffer).low_latency_dispatch(X, ids, 3, 2, use_fp8=False, **options)
        if hook is not None:
            hook()
        return counts

    with nccl_ep.Buffer.for_shapes(None, **SIZES, on_overflow="raise") as strict:
        with pytest.raises(nccl_ep.OverflowError, match=r"1 rows did not fit, .* demand was \[4, 2\]"):
            run(strict, twice)
        assert run(strict, IDS).tolist() == [2, 3]
    with nccl_ep.Buffer.for_shapes(None, **SIZES) as lenient:
        assert run(lenient, twice).tolist() == [3, 2]


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_backward_pass_has_all_gradients(mode: str) -> None:
    """None is missing in silence: neither the tokens', nor the weights'."""
    with nccl_ep.Buffer.for_shapes(None, **SIZES, mode="auto") as both:
        x, weights = X.clone().requires_grad_(), torch.ones(3, 2, requires_grad=True)
        out = nccl_ep.dispatch(x, IDS, weights, buffer=both, num_experts=2, mode=mode, layout="packed")
        y = nccl_ep.combine(out.x, out.handle)
        assert y.requires_grad and not out.counts.requires_grad
        y.sum().backward()
        assert x.grad is not None and weights.grad is not None
        assert torch.equal(x.grad, IDS.ge(0).sum(1, keepdim=True).to(x.dtype).expand(3, 64))
        assert torch.equal(weights.grad, 64 * IDS.ge(0).float())
        with torch.no_grad():
            out = nccl_ep.dispatch(x, IDS, weights, buffer=both, num_experts=2, mode=mode, layout="packed")
            assert not nccl_ep.combine(out.x, out.handle).requires_grad


def test_alias_check_refuses_given_outputs_that_overlap() -> None:
    with nccl_ep.Buffer.for_shapes(None, **SIZES, mode="ht") as buffer:
        how: dict[str, Any] = {"buffer": buffer, "num_experts": 2, "mode": "ht", "layout": "flat"}
        out = nccl_ep.dispatch(X, IDS, **how)
        payload = nccl_ep.dispatch_cached(X, out.handle)
        sums = nccl_ep.combine(out.x, out.handle)
        for wrong, text in ((3, "a int, must be the output"), (payload, "a Payload, must be the output")):
            with pytest.raises(TypeError, match=f"out is {text} of a dispatch"):
                nccl_ep.dispatch(X, IDS, **how, out=wrong)
        with pytest.raises(TypeError, match="out is a DispatchOutput, must be what dispatch_cached returned"):
            nccl_ep.dispatch_cached(X, out.handle, out=out)
        overlaps = "overlaps {} of shape .*, which is read while it is written"
        with pytest.raises(ValueError, match=overlaps.format("x")):
            nccl_ep.dispatch(out.x[1:4], IDS, **how, out=out)
        with pytest.raises(ValueError, match=overlaps.format("x")):
            nccl_ep.dispatch_cached(payload.x[:3], out.handle, out=payload)
        with pytest.raises(ValueError, match=overlaps.format("rows")):
            nccl_ep.combine(out.x, out.handle, out=out.x[1:4])
        more = torch.zeros(4, 64, dtype=X.dtype)
        with pytest.raises(ValueError, match=overlaps.format("bias")):
            nccl_ep.combine(out.x, out.handle, bias=more[:3], out=more[1:])
        bias = torch.ones_like(X)
        want = nccl_ep.combine(out.x, out.handle, bias=bias)
        assert torch.equal(nccl_ep.combine(out.x, out.handle, bias=bias, out=bias), want)  # in its place
        again = nccl_ep.dispatch(X, IDS, **how, out=out)
        assert torch.equal(nccl_ep.combine(again.x, again.handle, out=sums), sums)


def test_numbers_that_auto_would_divide_by_are_refused_first() -> None:
    with pytest.raises(ValueError, match=r"topk is 0|top-k is 0|top-0"):
        nccl_ep.Buffer.for_shapes(None, **{**SIZES, "topk": 0}, mode="auto")
    with nccl_ep.Buffer.for_shapes(None, **SIZES, mode="auto") as buffer:
        for x, ids, text in ((X[:, :0], IDS, "0 bytes|hidden is 0|no elements"), (X, IDS[:, :0], "top-k is 0|top-0")):
            with pytest.raises(ValueError, match=text):
                nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=2, mode="auto")
        for mode in ("ll", "ht", "auto"):
            with pytest.raises(ValueError, match="capacity is -1, must not be negative"):
                nccl_ep.dispatch(X, IDS, buffer=buffer, num_experts=2, mode=mode, layout="flat", capacity=-1)
