"""DeepEP V1's low-latency and normal methods. FP8 is made in its low-latency dispatch, and before its normal one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..operations import Operations
from ..workload import Given, Shape
from ..world import World
from .interface import Received, Rival, dequantized, require_rows, version_of

ON_CPU = False
_NVLINK_BYTES = 2_000_000_000
_LAYOUTS = {"ll": ("expert_major",), "ht": ("flat",)}
_DTYPES = {"ll": ("bf16", "fp8"), "ht": ("bf16", "given_fp8")}


def layouts(mode: str, dtype: str) -> tuple[str, ...]:
    return _LAYOUTS[mode] if dtype in _DTYPES[mode] else ()


class _DeepEP(Rival):
    def __init__(self, world: World, shape: Shape, inputs: list[Given]) -> None:
        import deep_ep

        if "nccl_ep" in str(deep_ep.__file__):
            raise ImportError(f"deep_ep is nccl_ep's: {deep_ep.__file__}")
        super().__init__(world, shape, inputs)
        self.version = version_of("deep_ep", "deep-ep")
        sizes: dict[str, Any] = {"num_nvl_bytes": _NVLINK_BYTES}
        if shape.mode == "ll":
            hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
                shape.tokens, shape.hidden, world.num_ranks, shape.num_experts
            )
            sizes = {"num_rdma_bytes": hint, "low_latency_mode": True, "num_qps_per_rank": shape.num_local}
        self.buffer: Any = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True, **sizes)

    def close(self) -> None:
        self.ways.clear()
        self.buffer.destroy()


class LowLatency(_DeepEP):
    def _dispatch(self) -> Any:
        shape, given = self.shape, self.given
        fp8 = shape.quant is not None
        return self.buffer.low_latency_dispatch(given.x, given.topk_idx, shape.tokens, shape.num_experts, use_fp8=fp8)

    def receive(self) -> Received:
        rows, counts, handle, *_ = self._dispatch()
        return Received(rows, counts=counts, way=handle)

    def send_home(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        home: torch.Tensor = self.buffer.low_latency_combine(
            rows, self.given.topk_idx, self.given.weights, received.way
        )[0]
        return home

    def check(self) -> None:
        given, buffer, dispatch = self.given, self.buffer, self._dispatch
        ids, fp8 = given.topk_idx, self.shape.quant is not None
        received, counts, handle, *_ = dispatch()
        self.world.synchronize()
        plain = dequantized(*received) if fp8 else received
        back = torch.zeros(plain.shape, dtype=torch.bfloat16, device=self.device)
        for local, expert in enumerate(self.experts):
            rows = plain[local, : int(counts[local])]
            sent = self.every("x")[(self.every("topk_idx") == expert).any(1)]
            require_rows(f"rows of expert {expert}", rows, sent, 0.06 if fp8 else 0.0)
            back[local, : len(rows)] = (rows.float() * self.factors()[expert]).bfloat16()

        def combine(handle: Any = handle) -> Any:
            return buffer.low_latency_combine(back, ids, given.weights, handle)

        home = combine()[0]
        self.world.synchronize()
        self.require_sum(home)
        self.ways[None] = Operations({"dispatch": dispatch, "combine": combine, "pair": lambda: combine(dispatch()[2])})


class Normal(_DeepEP):
    """With the layout computed anew each time, and as many output rows as there can be, so that nothing waits."""

    def _dispatch(self, most: int | None = None) -> Any:
        """most: rows of its output, 0: as many as come; default: as many as there can be."""
        shape, given, buffer = self.shape, self.given, self.buffer
        ranks, domains, experts, is_in_rank, _ = buffer.get_dispatch_layout(given.topk_idx, shape.num_experts)
        return buffer.dispatch(
            given.x if given.scales is None else (given.x, given.scales), num_tokens_per_rank=ranks,
            num_tokens_per_rdma_rank=domains, is_token_in_rank=is_in_rank, num_tokens_per_expert=experts,
            topk_idx=given.topk_idx, topk_weights=given.weights,
            num_worst_tokens=shape.num_ranks * shape.tokens if most is None else most,
        )  # fmt: skip

    def receive(self) -> Received:
        rows, ids, weights, _, handle, _ = self._dispatch()
        return Received(rows, ids=ids, weights=weights, way=handle)

    def send_home(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        home: torch.Tensor = self.buffer.combine(rows, received.way)[0]
        return home

    def check(self) -> None:
        shape, given, buffer, dispatch = self.shape, self.given, self.buffer, self._dispatch
        fp8 = given.scales is not None
        received, came, weights, _, handle, _ = dispatch(0)
        sent = torch.cat([self.plain(each) for each in self.all])[self.here(self.every("topk_idx"))]
        plain = dequantized(*received) if fp8 else received
        require_rows("rows", plain, sent)
        mine = torch.where(came >= 0, weights * self.factors()[self.experts.start :][came.clamp(min=0)], 0).sum(1)
        home = buffer.combine((plain.float() * mine[:, None]).bfloat16(), handle)[0]
        self.world.synchronize()
        self.require_sum(home)
        *_, padded, _ = first = dispatch()
        back = torch.zeros(shape.num_ranks * shape.tokens, shape.hidden, dtype=torch.bfloat16, device=self.device)
        del first

        def combine(handle: Any = padded) -> Any:
            return buffer.combine(back, handle)

        self.ways[None] = Operations({"dispatch": dispatch, "combine": combine, "pair": lambda: combine(dispatch()[4])})


def make(world: World, shape: Shape, inputs: list[Given]) -> Rival:
    return (LowLatency if shape.mode == "ll" else Normal)(world, shape, inputs)
