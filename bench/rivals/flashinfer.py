"""FlashInfer's one-sided ``MoeAlltoAll``: rank-major rows, padded. Its combine must follow its dispatch: pairs alone.

It compiles its module at its first use, for minutes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..operations import Operations
from ..workload import Given, Shape
from ..world import World
from .interface import Received, Rival, dequantized, require_rows, version_of

ON_CPU = False


def layouts(mode: str, dtype: str) -> tuple[str, ...]:
    return ("rank_major",) if dtype in ("bf16", "given_fp8") else ()


class FlashInfer(Rival):
    def __init__(self, world: World, shape: Shape, inputs: list[Given]) -> None:
        from flashinfer.comm.mapping import Mapping
        from flashinfer.comm.mnnvl import MnnvlConfig, TorchDistBackend
        from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll

        super().__init__(world, shape, inputs)
        self.version = version_of("flashinfer-python")
        self.kernels = {"dispatch": "DispatchKernel", "combine": "CombineKernel"}  # with those that prepare
        ranks = world.num_ranks
        mapping = Mapping(world_size=ranks, rank=world.rank, gpus_per_node=ranks, tp_size=ranks, moe_ep_size=ranks)
        self.exchange: Any = MoeAlltoAll(
            mapping, max_num_tokens=shape.tokens, top_k=shape.topk, num_experts=shape.num_experts,
            hidden_size=shape.hidden, mnnvl_config=MnnvlConfig(comm_backend=TorchDistBackend()),
        )  # fmt: skip
        self.ids = self.given.topk_idx.int().contiguous()
        self.payloads = [*self._sent(self.given), self.ids, self.given.weights.contiguous()]
        self.home = torch.empty(shape.tokens, shape.hidden, dtype=torch.bfloat16, device=self.device)

    def _sent(self, of: Given) -> tuple[torch.Tensor, ...]:
        return (of.x,) if of.scales is None else (of.x, of.scales)

    def _rows_to_combine(self) -> torch.Tensor:
        """[R, T, H] in the workspace."""
        rows: torch.Tensor = self.exchange.get_combine_payload_tensor_in_workspace(
            self.shape.tokens, self.shape.hidden, torch.bfloat16
        )
        return rows

    def _dispatch(self) -> Any:
        """With ids of -1 for the rows that do not exist."""
        return self.exchange.dispatch(
            self.ids, self.payloads, self.shape.tokens, invalid_token_expert_id=-1,
            expert_id_payload_index=len(self._sent(self.given)),
        )  # fmt: skip

    def receive(self) -> Received:
        rows, came, weights = self._dispatch()
        ids, first = came.view(-1, self.shape.topk), self.experts.start
        is_mine = (ids >= first) & (ids < first + self.shape.num_local)
        rows = rows.view(-1, self.shape.hidden)
        return Received(rows, ids=torch.where(is_mine, ids - first, -1), weights=weights.view(-1, self.shape.topk))

    def room(self, received: Received) -> torch.Tensor:
        return self._rows_to_combine().view(-1, self.shape.hidden)

    def send_home(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        self.exchange.combine(self._rows_to_combine(), self.shape.tokens, payload_in_workspace=True, output=self.home)
        return self.home

    def check(self) -> None:
        shape, ranks = self.shape, self.world.num_ranks
        rows, *scales, came, weights = self._dispatch()
        came, weights = came.view(ranks, shape.tokens, -1), weights.view(ranks, shape.tokens, -1)
        back = self._rows_to_combine()
        self.world.synchronize()
        for source, theirs in enumerate(self.all):
            is_row, here = (came[source] >= 0).any(1), self.here(theirs.topk_idx)
            for got, want in zip((rows, *scales), self._sent(theirs), strict=True):
                require_rows(f"rows of rank {source}", got.view(ranks, shape.tokens, -1)[source][is_row], want[here])
            mine = (came[source] // shape.num_local == self.world.rank) & (came[source] >= 0)
            applied = torch.where(mine, weights[source] * self.factors()[came[source].clamp(min=0).long()], 0).sum(1)
            plain = rows.view(ranks, shape.tokens, -1)[source].float()
            if scales:
                plain = dequantized(plain, scales[0].view(ranks, shape.tokens, -1)[source])
            back[source].copy_(torch.where(is_row[:, None], plain * applied[:, None], 0).bfloat16())
        self.exchange.combine(back, shape.tokens, payload_in_workspace=True, output=self.home)
        self.world.synchronize()
        self.require_sum(self.home)

        def pair() -> None:
            self.exchange.dispatch(self.ids, self.payloads, shape.tokens)
            self.exchange.combine(self._rows_to_combine(), shape.tokens, payload_in_workspace=True, output=self.home)

        self.ways[None] = Operations({"pair": pair})


make = FlashInfer
