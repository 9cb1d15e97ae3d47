"""nccl_ep in transformers' own expert parallelism: ``DistributedConfig(ep_size=.., ep_implementation="nccl_ep")``.

Importing this module registers it, before ``from_pretrained``, which then loads the experts of each rank alone.
``nccl_ep.integrations.transformers.use_expert_parallel`` is for models that are loaded whole.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from ..buffer import Buffer
from ..checks import MAX_TOPK
from ..functional import combine, dispatch

NAME = "nccl_ep"
MAX_TOKENS = 4096  # tokens (batch * sequence) of a rank in a forward pass at most; set it before models are loaded

_buffers: dict[tuple[Any, ...], Buffer] = {}  # of all layers of one kind


class NcclEpExperts(EPImplementation):  # type: ignore[misc]
    """Tokens to their experts' ranks and home, with gradients. Every rank of the EP group has a batch of its own.

    Raises: ValueError where ranks of the EP group share a batch (tensor parallelism), which would compute it on each;
    otherwise as ``nccl_ep.Buffer`` and ``nccl_ep.dispatch``.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise ValueError(
                f'ep_implementation is "{NAME}" with tp_size {tp_mesh.size()}, whose ranks share a batch: must be 1'
            )

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        num_experts = self.num_local_experts * self.ep_mesh.size()
        out = dispatch(
            hidden_states, top_k_index, top_k_weights.float(), buffer=self._buffer(hidden_states, num_experts),
            num_experts=num_experts, mode="ht", layout="packed", capacity="exact",
        )  # fmt: skip
        assert out.row_expert is not None
        ids = out.row_expert.unsqueeze(1).to(top_k_index.dtype)
        rows = out.x
        if len(rows) == 0:  # one row of no token keeps the experts' gradients connected
            rows, ids = rows.sum(0, keepdim=True), ids.new_zeros((1, 1))
        rows = self.experts_forward(rows, ids, rows.new_ones(ids.shape))[: out.x.shape[0]]
        return combine(rows, out.handle)

    def _buffer(self, x: torch.Tensor, num_experts: int) -> Buffer:
        """Made by the first forward pass, which is collective as all are."""
        group = self.ep_mesh.get_group()
        key = (group, x.shape[1], x.dtype, x.device, num_experts, MAX_TOKENS)
        if key not in _buffers:
            _buffers[key] = Buffer.for_shapes(
                group, max_tokens=MAX_TOKENS, hidden=x.shape[1], topk=min(num_experts, MAX_TOPK),
                num_experts=num_experts, dtype=x.dtype, device=x.device, mode="ht",
            )  # fmt: skip
        return _buffers[key]


EPImplementationInterface.register(NAME, NcclEpExperts)
