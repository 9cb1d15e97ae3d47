"""A handle's operations in low latency."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import _C
from ..calls import CombineCall, dispatch_receive_args
from ..checks import require_bools
from ..config import dispatch_numbers, replace_field
from ..errors import UsageError
from ..handle import Handle as Routing
from ..handle import Layout as Rows
from ..pending import OpenSend, Pending, receive_lost
from .enums import CombineQuantizationRecipe, Layout, PassDir, member
from .enums import DispatchQuantizationRecipe as Recipe
from .mode import Mode, kind_of
from .outputs import Outputs, exactly, ids_as_wide, new_handle, outputs_for
from .structs import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    LayoutInfo,
)
from .tensor import rows_of, tensor_of, tensor_or_none

_ops = torch.ops.nccl_ep
_QUANTS = ("fp8", "fp8_rounded")  # by round_scales


class LowLatency(Mode):
    """Operations write into the caller's tensors themselves, those in two calls in the second."""

    _receive: Callable[[], None] | None = None  # what is left of a split operation

    def update(self, topk_idx: torch.Tensor, info: LayoutInfo | None) -> None:
        """The routing of the next dispatch. Nothing is sent."""
        if info is not None:
            raise ValueError("layout_info is given to the dispatch in low latency, must be None here")
        self._topk_idx = topk_idx

    def dispatch(
        self, inputs: DispatchInputs, outputs: DispatchOutputs, info: LayoutInfo | None, config: DispatchConfig
    ) -> None:
        self._require_received()
        _check_direction(config)
        by_rank = self.layout is Layout.RANK_MAJOR
        x = rows_of(inputs.tokens, "inputs.tokens", self.device)
        kind = kind_of(info)
        weights = tensor_of(inputs.topk_weights, "inputs.topk_weights", self.device) if by_rank else None
        scales = tensor_or_none(inputs.scales, "inputs.scales", self.device)
        given = self.given(outputs)
        recipe = member(Recipe, "quantization_recipe", config.quantization_recipe)
        require_bools(round_scales=config.round_scales, send_only=config.send_only)
        _check_recipe(recipe, scales, given["scales"], config)
        quant = _QUANTS[bool(config.round_scales)] if recipe is Recipe.DS_FP8E3M4 else None
        counter = self._counter(info, given)
        topk_idx = ids_as_wide(self.topk_idx, given["topk_idx"], self.sizes.num_experts)
        shape: dict[str, Any] = {
            "num_experts": self.sizes.num_experts, "layout": "rank_major" if by_rank else "expert_major",
            "max_tokens": self.sizes.max_tokens, "quant": quant, "num_sms": self.sizes.num_sms,
        }  # fmt: skip
        buffer, ranks, (num_tokens, topk) = self.buffer, self.buffer.num_ranks, topk_idx.shape
        # What does not fit is refused before anything is sent.
        made, rows, capacity, numbers = self._outputs(x, scales, topk_idx, given, **shape)
        to, call = made.tensors, (buffer._seq, x, scales, topk_idx, weights, capacity, numbers)

        def finish(handle: torch.Tensor) -> None:
            self._sent = Routing(
                handle, buffer._seq, num_tokens, topk, self.sizes.num_experts, self.sizes.max_tokens, rows, capacity,
                ranks, weights=to["topk_weights"],
            )  # fmt: skip
            self.number_experts(to["topk_idx"], kind)
            made.deliver()
            count(to["info"], counter)

        with self.told():
            if buffer._open_sends:
                receive_lost(buffer, "dispatch")
            if config.send_only:
                handle = _ops.ll_dispatch_send.default(*call)
            else:
                handle = new_handle(x, _C.handle_size(numbers, ranks, num_tokens))
                _ops.ll_dispatch_out.default(*call, *to.values(), handle)
        if not config.send_only:
            finish(handle)
            return
        received_by = dispatch_receive_args(handle, *call)
        # What nobody receives any more goes into memory of its own: the caller's may be gone by then.
        open_send = OpenSend("dispatch", _ops.ll_dispatch_recv.default, (*received_by, None, None))
        into = partial(_ops.ll_dispatch_recv_out.default, *received_by, *to.values())

        def receive() -> None:
            with self.told():
                open_send.receive(buffer, into)
            finish(handle)

        self._receive = Pending.of_send(buffer, open_send, receive).receive

    def _outputs(
        self, x: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor,
        given: dict[str, torch.Tensor | None], *, num_experts: int, layout: str, max_tokens: int, quant: str | None,
        num_sms: int,
    ) -> tuple[Outputs, Rows, int, tuple[int, ...]]:  # fmt: skip
        """Where results go, their layout, capacity, the call's numbers. ValueError for what does not fit."""
        buffer, ranks = self.buffer, self.buffer.num_ranks
        _, rows, _, _, numbers = dispatch_numbers(
            num_experts, "ll", layout, max_tokens, None, 1, quant, False, num_sms, topk_idx.shape[1], 0, ranks,
            buffer.ll_max_tokens,
        )  # fmt: skip
        if layout == "rank_major":
            numbers = replace_field(numbers, "all_weights", 1)
        capacity = ranks * max_tokens if layout == "expert_major" else max_tokens
        return outputs_for(buffer, numbers, capacity, x, scales, topk_idx, given), rows, capacity, numbers

    def _counter(self, info: LayoutInfo | None, given: dict[str, torch.Tensor | None]) -> torch.Tensor | None:
        """Of experts, or of source ranks."""
        has_counters = info is not None and info.expert_counters is not None
        by_expert = self.layout is Layout.EXPERT_MAJOR
        if by_expert != has_counters:
            raise ValueError(
                f"layout_info.expert_counters is {'given' if has_counters else 'None'} in {self.layout.name}: it is "
                "given in EXPERT_MAJOR, and only there"
            )
        if by_expert and (given["topk_idx"] is not None or given["topk_weights"] is not None):
            raise ValueError("outputs.topk_idx and outputs.topk_weights are of RANK_MAJOR, must be None here")
        if by_expert:
            return self.counter(info, "expert_counters", self.local_experts)
        return self.counter(info, "src_rank_counters", self.buffer.num_ranks)

    def combine(self, inputs: CombineInputs, outputs: CombineOutputs, config: CombineConfig) -> None:
        self._require_received()
        _check_direction(config)
        rows = tensor_of(inputs.tokens, "inputs.tokens", self.device).contiguous()
        to, sent = tensor_of(outputs.tokens, "outputs.tokens", self.device), self._sent
        if sent is None:
            raise UsageError("this handle has dispatched nothing that it could follow home")
        recipe = member(CombineQuantizationRecipe, "quantization_recipe", config.quantization_recipe)
        require_bools(send_only=config.send_only)
        if recipe is not CombineQuantizationRecipe.NONE:
            raise ValueError("quantization_recipe is NVFP4: nccl_ep sends sums in the dtype of the rows, must be NONE")
        weights = None
        if self.layout is Layout.EXPERT_MAJOR:
            weights = tensor_or_none(outputs.topk_weights, "outputs.topk_weights", self.device)
        to = exactly(to, "tokens", [sent.num_tokens, rows.shape[-1]], to.dtype)
        if not config.send_only:
            self.combine_into(to, rows, sent, weights)
            return
        given = Outputs.of(tokens=to)
        call = CombineCall.of(rows, sent, weights, None, None, to.dtype, None, self.sizes.num_sms, 1)
        pending = call.send(False, None, 0, 1, 0, given.tensors["tokens"])

        def receive() -> None:
            pending.receive()
            given.deliver()

        self._receive = receive

    def complete(self) -> None:
        """Receives what was only sent, if anything was."""
        receive, self._receive = self._receive, None
        if receive is not None:
            receive()

    def drop(self) -> None:
        self._receive = None

    def _require_received(self) -> None:
        if self._receive is not None:
            raise UsageError("an operation of this handle was sent and is not complete: call complete() first")


def count(counts: torch.Tensor, counter: torch.Tensor | None) -> None:
    """``counts`` may be longer: an info tensor begins with them."""
    if counter is not None:
        counter.copy_(counts[: len(counter)])


def _check_direction(config: DispatchConfig | CombineConfig) -> None:
    """UsageError for BWD."""
    if member(PassDir, "pass_direction", config.pass_direction) is PassDir.BWD:
        raise UsageError("pass_direction is BWD, but the handle is of low latency, which has no backward pass")


def _check_recipe(
    recipe: Recipe, scales: torch.Tensor | None, out_scales: torch.Tensor | None, config: DispatchConfig
) -> None:
    """ValueError for scales that do not belong to the recipe."""
    for name, is_given, must in (
        ("inputs.scales", scales is not None, recipe is Recipe.FWD),
        ("outputs.scales", out_scales is not None, recipe is not Recipe.NONE),
    ):
        if is_given != must:
            raise ValueError(f"{name} is {'given' if is_given else 'None'} with recipe {recipe.name}")
    if recipe is Recipe.FWD and config.round_scales:
        raise ValueError(f"round_scales is {config.round_scales} with recipe FWD, which moves scales as they are")
