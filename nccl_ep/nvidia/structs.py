"""The structs of ``nccl.ep`` that are handed to a handle. T tokens, K choices a token, H elements a row, L local
experts, R ranks, M ``max_dispatch_tokens_per_rank``, N rows of a tensor for what is received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checks import described
from .enums import CombineQuantizationRecipe, DispatchQuantizationRecipe, ExpertIdKind, PassDir
from .tensor import Tensor


class Struct:
    """A dataclass that is its own C struct."""

    @property
    def _lowpp(self) -> Any:
        """What callers set single fields on: here the dataclass itself."""
        return self


class _Quantizing(Struct):
    """quantization_recipe is ``quant_recipe`` in C."""

    quantization_recipe: Any

    @property
    def quant_recipe(self) -> Any:
        return self.quantization_recipe

    @quant_recipe.setter
    def quant_recipe(self, recipe: Any) -> None:
        self.quantization_recipe = recipe


def require_struct(name: str, given: Any, kind: type) -> None:
    """TypeError for another struct, or none."""
    if not isinstance(given, kind):
        raise TypeError(f"{name} is {described(given)}, must be a {kind.__name__} of nccl.ep")


@dataclass(kw_only=True)
class HandleConfig(Struct):
    """dispatch_output_per_expert_alignment: EXPERT_MAJOR of high throughput: the first row of an expert is a multiple
    of it. A power of two; 0 and 1 are none. Rows between experts are zeroed."""

    dispatch_output_per_expert_alignment: int = 0


@dataclass(kw_only=True)
class DispatchConfig(_Quantizing):
    """Attributes:
    send_only: low latency: ``Handle.complete`` receives.
    round_scales: DS_FP8E3M4: scales are powers of two.
    pass_direction: high throughput: BWD sends along the routes of the forward dispatch.
    quantization_recipe: what becomes of rows.
    """

    send_only: int = 0
    round_scales: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: DispatchQuantizationRecipe = DispatchQuantizationRecipe.NONE


@dataclass(kw_only=True)
class CombineConfig(_Quantizing):
    """As ``DispatchConfig``. BWD brings the gradients of weights home, too."""

    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: CombineQuantizationRecipe = CombineQuantizationRecipe.NONE


@dataclass(kw_only=True)
class LayoutInfo(Struct):
    """Counts, each int32 or int64.

    Attributes:
        expert_counters: [L] rows of each local expert: of a low-latency dispatch in EXPERT_MAJOR; of an update in high
            throughput, there with padding in EXPERT_MAJOR.
        src_rank_counters: [R] rows from each rank: of a low-latency dispatch in RANK_MAJOR.
        expert_offsets: [L] first row of each local expert: of an update in EXPERT_MAJOR of high throughput.
        recv_total_counter: [1] rows that come, before any is dropped: of an update in high throughput.
        recv_topk_idx_kind: of a dispatch: the numbers of experts in ``outputs.topk_idx``.
    """

    expert_counters: Tensor | None = None
    src_rank_counters: Tensor | None = None
    expert_offsets: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(kw_only=True)
class DispatchInputs(Struct):
    """Attributes:
    tokens: [T, H]. topk_weights: float32 [T, K], for RANK_MAJOR and the forward pass of high throughput.
    scales: [T, S] of any dtype, with FWD alone.
    """

    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class DispatchOutputs(Struct):
    """Attributes:
    tokens: low latency: EXPERT_MAJOR [L, R * M, H], RANK_MAJOR [R, M, H]. High throughput: [N, H].
    topk_weights: float32; RANK_MAJOR [R, M, K], FLAT [N, K], EXPERT_MAJOR of high throughput [N].
    scales: as tokens, [.., S]: those of FWD, or float32 with S = H / 128 of DS_FP8E3M4.
    topk_idx: int32 or int64; RANK_MAJOR [R, M, K], FLAT [N, K]; -1 is none.
    """

    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass(kw_only=True)
class CombineInputs(Struct):
    """Attributes:
    tokens: of the shape of the dispatch's; in high throughput without trailing rows that nothing came for.
    topk_weights: backward: the gradients of ``DispatchOutputs.topk_weights``, of its shape.
    scales: of NVFP4, which is refused.
    """

    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class CombineOutputs(Struct):
    """Attributes:
    tokens: [T, H].
    topk_weights: float32 [T, K]. EXPERT_MAJOR of low latency: read, the weights of the sum (ones by default).
        Backward: written, the gradients of the weights.
    """

    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
