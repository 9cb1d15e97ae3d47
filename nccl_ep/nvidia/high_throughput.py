"""A handle's operations in high throughput."""

from __future__ import annotations

from dataclasses import replace

import torch

from .. import _C, functional, high_throughput
from ..buffer import Buffer
from ..checks import require_within
from ..config import combine_numbers, dispatch_numbers, pack_dispatch
from ..handle import DispatchOutput
from ..handle import Handle as Routing
from ..handle import Layout as Rows
from .enums import CombineQuantizationRecipe, ExpertIdKind, Layout, PassDir, member
from .enums import DispatchQuantizationRecipe as Recipe
from .mode import Mode, Sizes, kind_of
from .outputs import exactly, ids_as_wide, new_handle, outputs_for, trap
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
_NO_ROWS = 8  # elements of 2 bytes: the shortest row that travels


class HighThroughput(Mode):
    """Dispatch and combine write into the caller's tensors themselves, but for the gradients of weights."""

    def __init__(self, buffer: Buffer, sizes: Sizes, layout: Layout, alignment: int) -> None:
        super().__init__(buffer, sizes, layout)
        require_within(0, 1 << 30, dispatch_output_per_expert_alignment=alignment)
        if alignment & (alignment - 1):
            raise ValueError(f"dispatch_output_per_expert_alignment is {alignment}, must be a power of two")
        self.rows = Rows.FLAT if layout is Layout.FLAT else Rows.PACKED
        self.alignment = max(1, alignment) if self.rows is Rows.PACKED else 1

    # ---- Routing

    def update(self, topk_idx: torch.Tensor, info: LayoutInfo | None) -> None:
        """The routing of what follows. With ``info`` collective: the ranks tell one another how much will come.

        All ranks give an ``info``, or none.
        """
        if info is not None and self.rows is Rows.FLAT and info.expert_offsets is not None:
            raise ValueError("layout_info.expert_offsets is of EXPERT_MAJOR, must be None in FLAT")
        counter = self.counter(info, "expert_counters", self.local_experts)
        offsets = self.counter(info, "expert_offsets", self.local_experts)
        total = self.counter(info, "recv_total_counter", 1)
        self._topk_idx, self._sent = topk_idx, None
        if info is None:
            return
        out = self._route(capacity=0)
        if self.rows is Rows.FLAT:
            counts, rows = self._rows_of_experts(out.handle), out.demand.sum(0, keepdim=True)
        else:
            counts = (out.demand + (self.alignment - 1)) // self.alignment * self.alignment
            ends = counts.cumsum(0)
            rows = ends[-1:]
            if offsets is not None:
                offsets.copy_(ends - counts)
        if counter is not None:
            counter.copy_(counts)
        if total is not None:
            total.copy_(rows)

    def _route(self, capacity: int) -> DispatchOutput:
        """A dispatch that brings the routing alone. Collective. ``capacity``: of what follows it."""
        topk_idx = self.topk_idx
        nothing = topk_idx.new_zeros((len(topk_idx), _NO_ROWS), dtype=torch.bfloat16)
        return functional.dispatch(
            nothing, topk_idx, buffer=self.buffer, num_experts=self.sizes.num_experts, mode="ht",
            layout="flat" if self.rows is Rows.FLAT else "packed", max_tokens=self.sizes.max_tokens,
            capacity=capacity, expert_alignment=self.alignment, num_sms=self.sizes.num_sms,
        )  # fmt: skip

    def _followed(self, rows: int) -> Routing:
        """Of the last forward dispatch; behind an update, which all ranks have made, its routing comes with the
        operation that asks, for so many ``rows`` of the caller's."""
        if self._sent is None:
            capacity = self._capacity(rows)
            out = self._route(capacity)
            self._trap(out._info, capacity, pack_dispatch(out.handle.routing()))
            self._sent = out.handle
        return self._sent

    def _capacity(self, rows: int) -> int:
        """Of the routing that an operation follows, with so many ``rows`` of the caller's."""
        return self.sizes.max_received or rows if self._sent is None else self._sent.capacity

    def _rows_of_experts(self, sent: Routing) -> torch.Tensor:
        """[L], in a rank layout, whose demand is that of ranks."""
        at = _C.ht_route_parts(
            sent.num_ranks, self.buffer.domain_size, sent.num_experts, sent.num_tokens, sent.max_tokens, sent.topk
        )[0]
        return sent.tensor[at : at + self.local_experts]

    # ---- Dispatch

    def dispatch(
        self, inputs: DispatchInputs, outputs: DispatchOutputs, info: LayoutInfo | None, config: DispatchConfig
    ) -> None:
        x = rows_of(inputs.tokens, "inputs.tokens", self.device)
        kind = kind_of(info)
        scales = tensor_or_none(inputs.scales, "inputs.scales", self.device)
        weights = tensor_or_none(inputs.topk_weights, "inputs.topk_weights", self.device)
        given, recipe = self.given(outputs), member(Recipe, "quantization_recipe", config.quantization_recipe)
        if recipe is Recipe.DS_FP8E3M4:
            raise ValueError("quantization_recipe is DS_FP8E3M4, which is of low latency: give the scales, with FWD")
        if (scales is None) != (given["scales"] is None):
            raise ValueError("inputs.scales and outputs.scales: both are given, or none")
        direction = member(PassDir, "pass_direction", config.pass_direction)
        forward = direction is PassDir.FWD
        for name, there, must in (
            ("inputs.topk_weights", weights, forward),
            ("outputs.topk_weights", given["topk_weights"], forward),
            ("outputs.topk_idx", given["topk_idx"], forward and self.layout is Layout.FLAT),
        ):
            if (there is not None) != must:
                raise ValueError(
                    f"{name} is {'None' if must else 'given'} in a dispatch with pass_direction "
                    f"{direction.name} and layout {self.layout.name}"
                )
        if forward:
            self._forward(x, scales, weights, given, kind)
        else:
            self._backward(x, scales, given)

    def _forward(
        self, x: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor | None,
        given: dict[str, torch.Tensor | None], kind: ExpertIdKind,
    ) -> None:  # fmt: skip
        buffer, sizes, ranks = self.buffer, self.sizes, self.buffer.num_ranks
        tokens = given["tokens"]
        assert tokens is not None
        capacity = sizes.max_received or tokens.shape[0]
        topk_idx = ids_as_wide(self.topk_idx, given["topk_idx"], sizes.num_experts)
        *_, numbers = dispatch_numbers(
            sizes.num_experts, "ht", self.rows.name.lower(), sizes.max_tokens, capacity, self.alignment, None,
            self.alignment > 1, sizes.num_sms, topk_idx.shape[1], 0, ranks, buffer.ll_max_tokens,
        )  # fmt: skip
        made = outputs_for(buffer, numbers, capacity, x, scales, topk_idx, given)
        length, words = _C.ht_handle_sizes(numbers, ranks, buffer.domain_size, len(x))
        route, slots = new_handle(x, length), new_handle(x, ranks * sizes.max_tokens, words)
        out_x, *rest = made.tensors.values()
        with self.told():
            _ops.ht_dispatch_out.default(
                buffer._seq, [x], scales, topk_idx, weights, capacity, numbers, [out_x], *rest, route, slots
            )
        self._trap(made.tensors["info"], capacity, numbers)
        self._sent = Routing(
            route, buffer._seq, len(x), topk_idx.shape[1], sizes.num_experts, sizes.max_tokens, self.rows, capacity,
            ranks, "ht", slots, self.alignment, made.tensors["topk_weights"],
        )  # fmt: skip
        self.number_experts(None if given["topk_idx"] is None else made.tensors["topk_idx"], kind)
        made.deliver()

    def _trap(self, info: torch.Tensor, capacity: int, numbers: tuple[int, ...]) -> None:
        """If the group's policy asks for it, and rows can have been dropped."""
        if not self.sizes.drops and capacity < self._most_rows(numbers):
            with self.told():
                trap(self.buffer, info, capacity, numbers)

    def _most_rows(self, numbers: tuple[int, ...]) -> int:
        """That can come, if no token names an expert twice."""
        if self.rows is Rows.FLAT:
            return self.buffer.num_ranks * self.sizes.max_tokens
        return _C.default_capacity(numbers, self.buffer.num_ranks)

    def _backward(
        self, x: torch.Tensor, scales: torch.Tensor | None, given: dict[str, torch.Tensor | None]
    ) -> None:  # fmt: skip
        """Along the routes of the forward dispatch, or of the update behind it."""
        to, out_scales = given["tokens"], given["scales"]
        assert to is not None
        capacity = self._capacity(to.shape[0])
        to = exactly(to, "tokens", [capacity, x.shape[1]], x.dtype)
        if scales is not None and out_scales is not None:
            out_scales = exactly(out_scales, "scales", [capacity, scales.shape[1]], scales.dtype)
        sent = self._followed(capacity)
        options = {"scales": scales, "zero_padding": self.alignment > 1, "num_sms": self.sizes.num_sms}
        if to.is_contiguous() and (out_scales is None or out_scales.is_contiguous()):
            payload = high_throughput.Payload(to, out_scales)
            high_throughput.dispatch_cached(x, sent, out=payload, **options)  # type: ignore[arg-type]
            return
        moved = high_throughput.dispatch_cached(x, sent, **options)  # type: ignore[arg-type]
        to.copy_(moved.x)
        if out_scales is not None and moved.scales is not None:
            out_scales.copy_(moved.scales)

    # ---- Combine

    def combine(self, inputs: CombineInputs, outputs: CombineOutputs, config: CombineConfig) -> None:
        rows = rows_of(inputs.tokens, "inputs.tokens", self.device)
        to = tensor_of(outputs.tokens, "outputs.tokens", self.device)
        weights = tensor_or_none(inputs.topk_weights, "inputs.topk_weights", self.device)
        recipe = member(CombineQuantizationRecipe, "quantization_recipe", config.quantization_recipe)
        if recipe is not CombineQuantizationRecipe.NONE:
            raise ValueError(f"quantization_recipe is {recipe.name}, must be NONE")
        direction = member(PassDir, "pass_direction", config.pass_direction)
        backward = direction is PassDir.BWD
        if (weights is not None) != backward:
            raise ValueError(f"inputs.topk_weights is {'None' if backward else 'given'} with pass_direction "
                             f"{direction.name}")  # fmt: skip
        tokens, topk = self.topk_idx.shape
        to = exactly(to, "tokens", [tokens, rows.shape[1]], to.dtype)
        if weights is not None:
            to_weights = tensor_of(outputs.topk_weights, "outputs.topk_weights", self.device)
            to_weights = exactly(to_weights, "topk_weights", [tokens, topk], torch.float32)
        sent = self._followed(rows.shape[0])
        if rows.shape[0] > sent.capacity:
            rows = rows[: sent.capacity]
        elif rows.shape[0] < sent.capacity:  # what lies past its end is of no token
            sent = replace(sent, capacity=rows.shape[0])
        if weights is None:
            self.combine_into(to, rows, sent)
            return
        numbers = combine_numbers(sent, None, to.dtype, None, self.sizes.num_sms)[1]
        weights = weights[: sent.capacity].contiguous()
        with self.told():
            sums, of_weights = _ops.ht_combine.default(
                sent.seq, rows, weights, sent.tensor, sent.slots, None, None, [], sent.num_tokens, sent.capacity,
                numbers,
            )  # fmt: skip
        to.copy_(sums)
        to_weights.copy_(of_weights)

    def complete(self) -> None:
        """Nothing: operations are whole."""
