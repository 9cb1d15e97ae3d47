"""``nccl.ep``'s ``Handle``: a routing, and the operations that follow it."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError
from .high_throughput import HighThroughput
from .low_latency import LowLatency
from .streams import on_stream
from .structs import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    LayoutInfo,
    require_struct,
)
from .tensor import tensor_of

_made: dict[int, LowLatency | HighThroughput] = {}  # without a Handle as yet


def number_of(mode: LowLatency | HighThroughput) -> int:
    """A number that ``Handle`` takes in its place."""
    _made[id(mode)] = mode
    return id(mode)


class Handle:
    """Made by ``Group.create_handle``. ``stream`` of every call: a CUDA stream, its number, or None for number 0."""

    def __init__(self, ptr: int | LowLatency | HighThroughput) -> None:
        """``ptr``: of ``init_handle``, once. UsageError for another number."""
        if isinstance(ptr, int):
            if ptr not in _made:
                raise UsageError(f"{ptr:#x} is no handle")
            ptr = _made.pop(ptr)
        self._mode: LowLatency | HighThroughput | None = ptr

    def _valid(self) -> LowLatency | HighThroughput:
        if self._mode is None:
            raise UsageError("the handle was destroyed")
        return self._mode

    @property
    def ptr(self) -> int:
        """A number of this object. (There is no C struct behind it.)"""
        self._valid()
        return id(self)

    def update(self, topk_idx: Any, *, layout_info: LayoutInfo | None = None, stream: Any) -> None:
        """Another routing for the next dispatch, and in high throughput for a combine or a backward pass without one.

        Args:
            topk_idx: int32 or int64 [T, K]; it must not change until that operation is done. -1 is no choice.
            layout_info: high throughput: counters to fill, for which all ranks wait for one another. All give one, or
                none.

        Raises: ValueError for what cannot be served, otherwise as ``nccl_ep.dispatch``.
        """
        mode = self._valid()
        require_struct("layout_info", LayoutInfo() if layout_info is None else layout_info, LayoutInfo)
        ids = tensor_of(topk_idx, "topk_idx", mode.device)
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_idx is {ids.dtype} {list(ids.shape)}, must be int32 or int64 [tokens, top-k]")
        with on_stream(mode.device, stream):
            mode.update(ids.contiguous(), layout_info)

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        config: DispatchConfig | None = None,
        stream: Any,
    ) -> None:
        """Sends tokens to their experts. Collective.

        Raises: ValueError for tensors that do not fit, before anything is sent; OverflowError where rows were dropped
        and the group's policy is TRAP; otherwise as ``nccl_ep.dispatch``.
        """
        mode, config = self._valid(), DispatchConfig() if config is None else config
        require_struct("inputs", inputs, DispatchInputs)
        require_struct("outputs", outputs, DispatchOutputs)
        require_struct("config", config, DispatchConfig)
        require_struct("layout_info", LayoutInfo() if layout_info is None else layout_info, LayoutInfo)
        with on_stream(mode.device, stream):
            mode.dispatch(inputs, outputs, layout_info, config)

    def combine(
        self, inputs: CombineInputs, outputs: CombineOutputs, *, config: CombineConfig | None = None, stream: Any
    ) -> None:
        """Brings rows home, along the routes of this handle's last dispatch or, in high throughput, update. Collective.

        Raises: UsageError before them; ValueError for tensors that do not fit; otherwise as ``nccl_ep.combine``.
        """
        mode, config = self._valid(), CombineConfig() if config is None else config
        require_struct("inputs", inputs, CombineInputs)
        require_struct("outputs", outputs, CombineOutputs)
        require_struct("config", config, CombineConfig)
        with on_stream(mode.device, stream):
            mode.combine(inputs, outputs, config)

    def complete(self, *, config: int = 0, stream: Any) -> None:
        """Receives what ``send_only`` has left. Nothing to do otherwise. ValueError for a config, which is reserved."""
        if not isinstance(config, int) or config != 0:
            raise ValueError(f"config is {config!r}, must be 0")
        mode = self._valid()
        with on_stream(mode.device, stream):
            mode.complete()

    def destroy(self) -> None:
        """What was sent and is not complete is dropped. May be called twice."""
        if self._mode is not None:
            self._mode.drop()
        self._mode = None

    def __repr__(self) -> str:
        return "<Handle destroyed>" if self._mode is None else f"<Handle {self._mode.layout.name}>"
