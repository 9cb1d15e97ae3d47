"""NVIDIA's NCCL EP by ``nccl.ep`` of nccl-extensions. Kernels are compiled at their first use, each for 10 s or more.

It needs a newer NCCL than torch's: ``--preload nccl_ep_nvidia=FILE`` names one.
"""

from __future__ import annotations

from typing import Any

import torch

from ..operations import Call, Operations, chained
from ..workload import Given, Shape
from ..world import World
from .interface import Received, Rival, dequantized, require_rows, version_of

ON_CPU = False
_LAYOUTS = {"ll": ("expert_major", "rank_major"), "ht": ("flat",)}
_DTYPES = {"ll": ("bf16", "fp8"), "ht": ("bf16", "given_fp8")}
_kept: list[Any] = []  # what descriptions point to, of all configurations: windows of NCCL outlive them
_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn


def layouts(mode: str, dtype: str) -> tuple[str, ...]:
    return _LAYOUTS[mode] if dtype in _DTYPES[mode] else ()


def _stream() -> int:
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream


class _NcclEp(Rival):
    group: Any
    handle: Any
    # Of ``check``:
    run_dispatch: Call
    run_combine: Call
    rows: torch.Tensor
    back: torch.Tensor
    home: torch.Tensor
    weights: torch.Tensor
    received_ids: torch.Tensor  # [.., K]

    def __init__(self, world: World, shape: Shape, inputs: list[Given]) -> None:
        from nccl import ep
        from nccl.ep.interop.torch import get_nccl_comm_from_group

        if "nccl_ep" in str(ep.Group.__module__):
            raise ImportError("nccl.ep is nccl_ep's")
        super().__init__(world, shape, inputs)
        self.ep: Any = ep
        self.version = str(ep.get_lib_version()) or version_of("nccl-extensions")
        self.comm = self._keep(get_nccl_comm_from_group())
        self.ids = self._tensor(self.given.topk_idx.contiguous())

    def _keep(self, each: Any) -> Any:
        _kept.append(each)
        return each

    def _tensor(self, of: torch.Tensor | None, **options: Any) -> Any:
        self._keep(of)
        return None if of is None else self._keep(self.ep.Tensor(of, **options))

    def _group(self, **options: Any) -> Any:
        config = self.ep.GroupConfig(
            num_experts=self.shape.num_experts, max_dispatch_tokens_per_rank=self.shape.tokens,
            max_token_bytes=2 * self.shape.hidden, **options,
        )  # fmt: skip
        return self._keep(self.ep.Group.create(self.comm, self._keep(config)))

    def new(self, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=self.device)

    def weighted_rows(self, plain: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows of one source or all, with the sum of the experts here; ids [N, K] local, -1 for others."""
        applied = torch.where(ids >= 0, weights * self.factors()[self.experts.start :][ids.clamp(min=0).long()], 0)
        return (plain.float() * applied.sum(1, keepdim=True)).to(_BF16)

    def room(self, received: Received) -> torch.Tensor:
        return self.back.view(received.rows.shape)

    def send_home(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        self.run_combine()
        return self.home

    def by_token(self, exists: torch.Tensor) -> Received:
        """exists: bool, of each row; the others have ids of an earlier dispatch."""
        hidden, topk = self.shape.hidden, self.shape.topk
        ids = torch.where(exists.view(-1, 1), self.received_ids.view(-1, topk), -1)
        return Received(self.rows.view(-1, hidden), ids=ids, weights=self.weights.view(-1, topk))

    def close(self) -> None:
        self.ways.clear()
        self.world.synchronize()
        self.world.gate.wait()
        self.handle.destroy()
        self.group.destroy()


class LowLatency(_NcclEp):
    def __init__(self, world: World, shape: Shape, inputs: list[Given]) -> None:
        super().__init__(world, shape, inputs)
        self.kernels = {"dispatch": "ll_dispatch_kernel", "combine": "ll_combine_kernel"}
        self.group = self._group(algorithm=self.ep.Algorithm.LOW_LATENCY)
        by_expert = shape.layout == "expert_major"
        layout = self.ep.Layout.EXPERT_MAJOR if by_expert else self.ep.Layout.RANK_MAJOR
        self.handle = self.group.create_handle(layout, self.ids, stream=_stream())

    def receive(self) -> Received:
        self.run_dispatch()
        if self.shape.layout == "expert_major":
            return Received(self.rows, counts=self.counts)
        return self.by_token(torch.arange(self.shape.tokens, device=self.device) < self.counts[:, None])

    def check(self) -> None:
        shape, ep, fp8 = self.shape, self.ep, self.shape.quant is not None
        by_expert, ranks, tokens = shape.layout == "expert_major", shape.num_ranks, shape.tokens
        lead = (shape.num_local, ranks * tokens) if by_expert else (ranks, tokens)
        rows = self.new(*lead, shape.hidden, dtype=_FP8 if fp8 else _BF16)
        scales = self.new(*lead, shape.hidden // 128) if fp8 else None
        counts = self.new(lead[0], dtype=torch.int32)
        weights, ids = self.new(*lead, shape.topk), self.new(*lead, shape.topk, dtype=torch.int32).fill_(-1)
        back, home = self.new(*lead, shape.hidden, dtype=_BF16), self.new(tokens, shape.hidden, dtype=_BF16)
        given_weights = self._tensor(self.given.weights.contiguous())
        of_ranks = {} if by_expert else {"topk_weights": self._tensor(weights), "topk_idx": self._tensor(ids)}
        weighted = {} if by_expert else {"topk_weights": given_weights}
        inputs = ep.DispatchInputs(tokens=self._tensor(self.given.x), **weighted)
        outputs = ep.DispatchOutputs(
            tokens=self._tensor(rows), **of_ranks, **({"scales": self._tensor(scales)} if fp8 else {})
        )
        counters = {"expert_counters" if by_expert else "src_rank_counters": self._tensor(counts)}
        info = ep.LayoutInfo(**counters)
        recipe = ep.DispatchQuantizationRecipe
        config = ep.DispatchConfig(quantization_recipe=recipe.DS_FP8E3M4) if fp8 else None
        going = ep.CombineInputs(tokens=self._tensor(back))
        coming = ep.CombineOutputs(tokens=self._tensor(home), **({"topk_weights": given_weights} if by_expert else {}))
        _kept.extend([inputs, outputs, info, config, going, coming])

        def dispatch() -> None:
            self.handle.dispatch(inputs, outputs, layout_info=info, config=config, stream=_stream())

        def combine() -> None:
            self.handle.combine(going, coming, stream=_stream())

        dispatch()
        self.world.synchronize()
        plain = rows if scales is None else dequantized(rows, scales)
        tolerance = 0.06 if fp8 else 0.0
        for place, count in enumerate(counts.tolist()):
            came = plain[place, :count]
            if by_expert:
                expert = self.experts[place]
                sent = self.every("x")[(self.every("topk_idx") == expert).any(1)]
                back[place, :count] = (came.float() * self.factors()[expert]).to(_BF16)
            else:
                sent = self.all[place].x[self.here(self.all[place].topk_idx)]
                back[place, :count] = self.weighted_rows(came, ids[place, :count], weights[place, :count])
            require_rows(f"rows of {shape.layout}, {place}", came, sent, tolerance)
        self.world.synchronize()
        self.world.gate.wait()
        combine()
        self.world.synchronize()
        self.require_sum(home)
        self.rows, self.counts, self.back, self.home = rows, counts, back, home
        self.received_ids, self.weights, self.run_dispatch, self.run_combine = ids, weights, dispatch, combine
        self.ways[None] = Operations({"pair": chained(dispatch, combine)})


class HighThroughput(_NcclEp):
    """Without copies: rows lie in windows of NCCL. A routing is an update of the handle, which a pair includes."""

    def __init__(self, world: World, shape: Shape, inputs: list[Given]) -> None:
        super().__init__(world, shape, inputs)
        ep = self.ep
        self.most = shape.num_ranks * shape.tokens
        self.group = self._group(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=self.most, num_topk=shape.topk,
            zero_copy=ep.ZeroCopyMode.ON,
        )  # fmt: skip
        self.total = self.new(1, dtype=torch.int32)
        # Counters of one update must have one dtype.
        counts = self.new(shape.num_local, dtype=torch.int32)
        self.info = self._keep(
            ep.LayoutInfo(expert_counters=self._tensor(counts), recv_total_counter=self._tensor(self.total))
        )
        self.handle = self.group.create_handle(ep.Layout.FLAT, self.ids, layout_info=self.info, stream=_stream())

    def receive(self) -> Received:
        self.run_dispatch()
        return self.by_token(torch.arange(self.most, device=self.device) < self.total)

    def _window(self, *sizes: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        import nccl.core
        from nccl.core.interop.torch import empty

        memory: torch.Tensor = empty(sizes, dtype=dtype, device=self.device)
        memory.view(torch.uint8).zero_()
        self.world.synchronize()
        window = self._keep(self.comm.register_window(memory, nccl.core.WindowFlag.COLL_SYMMETRIC))
        return memory, self._tensor(memory, window=window, window_offset=0)

    def check(self) -> None:
        shape, ep, given = self.shape, self.ep, self.given
        tokens, hidden, most = shape.tokens, shape.hidden, self.most
        x, x_given = self._window(tokens, hidden, dtype=given.x.dtype)
        x.copy_(given.x)
        rows, rows_made = self._window(most, hidden, dtype=given.x.dtype)
        back, back_given = self._window(most, hidden, dtype=_BF16)
        home, home_made = self._window(tokens, hidden, dtype=_BF16)
        weights, ids = self.new(most, shape.topk), self.new(most, shape.topk, dtype=torch.int64).fill_(-1)
        scales: torch.Tensor | None = None
        scales_given: dict[str, Any] = {}
        scales_made: dict[str, Any] = {}
        if given.scales is not None:
            sent_scales, described = self._window(tokens, hidden // 128, dtype=torch.float32)
            sent_scales.copy_(given.scales)
            scales, made = self._window(most, hidden // 128, dtype=torch.float32)
            scales_given, scales_made = {"scales": described}, {"scales": made}
        inputs = ep.DispatchInputs(
            tokens=x_given, topk_weights=self._tensor(given.weights.contiguous()), **scales_given
        )
        outputs = ep.DispatchOutputs(
            tokens=rows_made, topk_weights=self._tensor(weights), topk_idx=self._tensor(ids), **scales_made
        )
        config = None if scales is None else ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)
        going, coming = ep.CombineInputs(tokens=back_given), ep.CombineOutputs(tokens=home_made)
        _kept.extend([inputs, outputs, config, going, coming])

        def cached() -> None:
            self.handle.dispatch(inputs, outputs, config=config, stream=_stream())

        def dispatch() -> None:
            self.handle.update(self.ids, layout_info=self.info, stream=_stream())
            cached()

        def combine() -> None:
            self.handle.combine(going, coming, stream=_stream())

        dispatch()
        self.world.synchronize()
        count = int(self.total)
        plain = rows[:count] if scales is None else dequantized(rows[:count], scales[:count])
        sent = torch.cat([self.plain(each) for each in self.all])[self.here(self.every("topk_idx"))]
        require_rows("rows", plain, sent)
        back[:count] = self.weighted_rows(plain, ids[:count], weights[:count])
        self.world.synchronize()
        self.world.gate.wait()
        combine()
        self.world.synchronize()
        self.require_sum(home)
        self.rows, self.back, self.home, self.received_ids, self.weights = rows, back, home, ids, weights
        self.run_dispatch, self.run_combine = dispatch, combine
        calls = {"dispatch": dispatch, "cached": cached, "combine": combine, "pair": chained(dispatch, combine)}
        self.ways[None] = Operations(calls)


def make(world: World, shape: Shape, inputs: list[Given]) -> Rival:
    return (LowLatency if shape.mode == "ll" else HighThroughput)(world, shape, inputs)
