"""What is measured: the calls of each interface. Making them holds their results against the checked ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nccl_ep import Buffer, DispatchOutput, Payload, combine, dispatch, dispatch_cached
from nccl_ep.config import cached_args, combine_args, pack_dispatch
from nccl_ep.handle import QUANTS

from .workload import Checked, Given, Shape

Call = Callable[[], Any]
_ops = torch.ops.nccl_ep
_NARROW_BYTES = 16  # of a row: the smallest
_FILL = 0x5A


@dataclass(frozen=True)
class Operations:
    """Calls by the operation's name. captured: those that a graph takes in place of them."""

    calls: dict[str, Call]
    captured: dict[str, Call] = field(default_factory=dict)

    def get(self, op: str) -> Call:
        return self.calls[op]

    def in_graph(self, op: str) -> Call:
        return self.captured.get(op, self.calls[op])


def narrow(given: Given) -> torch.Tensor:
    """The first bytes of every row: what a dispatch carries that is all but routing."""
    return given.x[:, : _NARROW_BYTES // given.x.element_size()].contiguous()


def _spoil(tensors: Iterable[torch.Tensor]) -> None:
    """So that results of a run before cannot pass for those of the next."""
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(_FILL)


# ---- The public functions


def native_operations(shape: Shape, buffer: Buffer, given: Given, checked: Checked, num_sms: int) -> Operations:
    """Every call allocates its outputs; in graphs, those of high throughput write tensors of an earlier output, which
    lie in the arena, as a capture's own do not. The bits must be the same at every num_sms."""

    kwargs: dict[str, Any] = {"buffer": buffer, "num_sms": num_sms, **shape.dispatch_kwargs()}
    payload: dict[str, Any] = {"quant": shape.quant, "scales": given.scales, **kwargs}

    def run_dispatch(out: DispatchOutput | None = None) -> DispatchOutput:
        return dispatch(given.x, given.topk_idx, given.weights, out=out, **payload)

    def run_combine() -> torch.Tensor:
        return combine(checked.rows, checked.out.handle, num_sms=num_sms)

    def run_pair(out: DispatchOutput | None = None) -> torch.Tensor:
        return combine(checked.rows, run_dispatch(out).handle, num_sms=num_sms)

    checked.require_same(run_dispatch().x, run_combine())
    calls: dict[str, Call] = {"dispatch": run_dispatch, "combine": run_combine, "pair": run_pair}
    if shape.mode == "ll":
        return Operations(calls)

    x = narrow(given)

    def run_routing(out: DispatchOutput | None = None) -> DispatchOutput:
        return dispatch(x, given.topk_idx, given.weights, out=out, **kwargs)

    earlier, routed = checked.out, run_routing()
    _spoil([earlier.x, routed.x])
    checked.require_same(earlier.x, run_pair(earlier))
    run_routing(routed)
    checked.require_narrow(routed.x)
    captured: dict[str, Call] = {
        "routing": lambda: run_routing(routed),
        "dispatch": lambda: run_dispatch(earlier),
        "pair": lambda: run_pair(earlier),
    }
    return Operations({"routing": run_routing, **calls}, captured)


def native_cached(shape: Shape, buffer: Buffer, given: Given, checked: Checked, num_sms: int) -> Operations:
    """High throughput along the routes of an earlier dispatch; graphs as in native_operations."""
    handle = checked.out.handle

    def run_dispatch(out: Payload | None = None) -> Payload:
        return dispatch_cached(given.x, handle, scales=given.scales, quant=shape.quant, out=out, num_sms=num_sms)

    def run_pair(out: Payload | None = None) -> torch.Tensor:
        run_dispatch(out)
        return combine(checked.rows, handle, num_sms=num_sms)

    earlier = run_dispatch()
    checked.require_same(earlier.x, run_pair())
    _spoil([earlier.x])
    checked.require_same(earlier.x, run_pair(earlier))
    captured: dict[str, Call] = {"dispatch": lambda: run_dispatch(earlier), "pair": lambda: run_pair(earlier)}
    return Operations({"dispatch": run_dispatch, "pair": run_pair}, captured)


# ---- torch.ops


def _combine_args(checked: Checked, shape: Shape, num_sms: int) -> tuple[Any, ...]:
    """What follows the handle's tensors in the combine ops of both modes."""
    weighting = 1 if checked.out.handle.layout.has_expert_rows else 0  # functional.py, _DISPATCH and _NONE
    combined = shape.payload.combined
    return (None, None, [], *combine_args(checked.out.handle, weighting, combined, num_sms=num_sms))


def chained(first: Call, second: Call) -> Call:
    def both() -> None:
        first()
        second()

    return both


def op_operations(shape: Shape, buffer: Buffer, given: Given, checked: Checked, num_sms: int) -> Operations:
    """torch.ops.nccl_ep with out= tensors made beforehand. The bits must be those of the public functions."""
    handle = checked.out.handle
    head, routing = (buffer._seq,), (given.topk_idx, given.weights)

    def config(quant: str | None) -> tuple[Any, ...]:
        fields = {"alignment": shape.alignment, "quant": QUANTS[quant], "num_sms": num_sms}
        return handle.capacity, pack_dispatch(handle.routing() | fields)

    y = torch.empty_like(checked.y)
    how = (*_combine_args(checked, shape, num_sms), y)
    calls: dict[str, Call] = {}
    run_dispatch: Call
    run_combine: Call
    if shape.mode == "ll":
        inputs = (*head, given.x, given.scales, *routing, *config(shape.quant))
        outputs = _ops.ll_dispatch.default(*inputs)
        run_dispatch = partial(_ops.ll_dispatch_out.default, *inputs, *outputs)
        run_combine = partial(_ops.ll_combine_out.default, *head, checked.rows, outputs[-1], *how)
    else:
        inputs = (*head, [given.x], given.scales, *routing, *config(shape.quant))
        outputs = _ops.ht_dispatch.default(*inputs)
        run_dispatch = partial(_ops.ht_dispatch_out.default, *inputs, [outputs[0]], *outputs[1:8])
        routes = outputs[6:8]
        run_combine = partial(_ops.ht_combine_out.default, *head, checked.rows, None, *routes, *how)
        inputs = (*head, [narrow(given)], None, *routing, *config(None))
        routed = _ops.ht_dispatch.default(*inputs)
        calls["routing"] = partial(_ops.ht_dispatch_out.default, *inputs, [routed[0]], *routed[1:8])
        _spoil([routed[0]])
        calls["routing"]()
        checked.require_narrow(routed[0])
    calls |= {"dispatch": run_dispatch, "combine": run_combine, "pair": chained(run_dispatch, run_combine)}
    _spoil([outputs[0], y])
    calls["pair"]()
    checked.require_same(outputs[0], y)
    return Operations(calls)


def op_cached(shape: Shape, buffer: Buffer, given: Given, checked: Checked, num_sms: int) -> Operations:
    """As native_cached, by the ops with out= tensors."""
    handle, head = checked.out.handle, (buffer._seq,)
    routes = (handle.tensor, handle.slots)
    inputs = (
        *head, [given.x], given.scales, *routes, *cached_args(handle, QUANTS[shape.quant], num_sms=num_sms),
    )  # fmt: skip
    x, scales, *_ = _ops.ht_dispatch_cached.default(*inputs)
    run_dispatch = partial(_ops.ht_dispatch_cached_out.default, *inputs, [x], scales)
    y = torch.empty_like(checked.y)
    how = (*_combine_args(checked, shape, num_sms), y)
    run_combine = partial(_ops.ht_combine_out.default, *head, checked.rows, None, *routes, *how)
    calls: dict[str, Call] = {"dispatch": run_dispatch, "pair": chained(run_dispatch, run_combine)}
    _spoil([x, y])
    calls["pair"]()
    checked.require_same(x, y)
    return Operations(calls)


# ---- DeepEP's methods


def deepep_operations(shape: Shape, buffer: Buffer, given: Given, checked: Checked) -> Operations:
    """DeepEP's methods: weights at combine, scales column-major. The bits must be those of the public functions."""
    from nccl_ep import deep_ep  # an interface of its own, which the others do without

    max_tokens, view = checked.out.handle.max_tokens, deep_ep.Buffer.of(buffer)

    def run_dispatch() -> Any:
        return view.low_latency_dispatch(
            given.x, given.topk_idx, max_tokens, shape.num_experts, use_fp8=shape.quant is not None
        )

    handle = run_dispatch()[2]

    def run_combine() -> Any:
        return view.low_latency_combine(checked.rows, given.topk_idx, given.weights, handle)

    def run_pair() -> Any:
        return view.low_latency_combine(checked.rows, given.topk_idx, given.weights, run_dispatch()[2])

    received = run_dispatch()[0]
    checked.require_same(received if shape.quant is None else received[0], run_combine()[0])
    return Operations({"dispatch": run_dispatch, "combine": run_combine, "pair": run_pair})
