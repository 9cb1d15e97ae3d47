"""nccl_ep as a communication backend of FlashInfer's ``moe_ep``: ``SplitConfig(comm="nccl_ep_ranks")``.

Importing this module registers it. (FlashInfer's own "nccl_ep" calls ``nccl.ep``, which
``nccl_ep.install_as_nccl_ep()`` serves.)
"""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.moe_ep import (
    MoEEpCommunication,
    MoEEpDispatchResult,
    bootstrap_comm_group,
    register_communication,
)

from ..buffer import Buffer
from ..functional import combine, dispatch
from ..handle import Handle

NAME = "nccl_ep_ranks"


@register_communication(NAME)
class RankMajorCommunication(MoEEpCommunication):  # type: ignore[misc]
    """Rows by source rank, in the mode that the sizes ask for. Ranks are those of ``bootstrap.process_group``.

    ``options``: of ``nccl_ep.Buffer.for_shapes``. Raises as that, and as ``nccl_ep.dispatch``.
    """

    def __init__(self, bootstrap: Any, params: Any, config: Any = None, **options: Any) -> None:
        super().__init__(bootstrap, params)
        shapes = {
            "max_tokens": params.max_tokens_per_rank, "hidden": params.hidden_size, "topk": params.top_k,
            "num_experts": params.num_experts, "dtype": params.token_dtype, "mode": "auto",
        }  # fmt: skip
        self.buffer = Buffer.for_shapes(bootstrap_comm_group(bootstrap), **(shapes | options))
        self._sent: Handle | None = None

    @classmethod
    def is_platform_supported(cls) -> bool:
        """On CPU ranks, too."""
        return True

    def dispatch(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
        hidden_states_scale: torch.Tensor | None = None, max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """As ``MoEEpCommunication.dispatch``. ValueError for ``eplb_local_stats``, which FlashInfer gathers itself."""
        if eplb_local_stats is not None:
            raise ValueError("eplb_local_stats is given: gather it with the process group")
        out = dispatch(
            hidden_states.contiguous(), topk_ids, None if topk_weights is None else topk_weights.float(),
            buffer=self.buffer, num_experts=self.params.num_experts, mode="auto", layout="rank_major",
            max_tokens=max_tokens_per_rank or self.params.max_tokens_per_rank, scales=hidden_states_scale,
        )  # fmt: skip
        assert out.topk_idx is not None
        self._sent, tokens = out.handle, out.x.shape[1]
        first, none = self.ep_rank * self.num_local_experts, self.params.invalid_expert_id
        ids = torch.where(out.topk_idx >= 0, out.topk_idx + first, none)
        return MoEEpDispatchResult(
            out.x.flatten(0, 1), ids.flatten(0, 1), None if topk_weights is None else out.weights.flatten(0, 1), tokens,
            None if out.scales is None else out.scales.flatten(0, 1),
        )  # fmt: skip

    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        """As ``MoEEpCommunication.combine``."""
        if self._sent is None:
            raise ValueError("combine without a dispatch before it")
        sent, self._sent = self._sent, None
        rows = expert_output.reshape(sent.num_ranks, sent.max_tokens, -1).contiguous()
        return combine(rows, sent, out=output)

    def destroy(self) -> None:
        """May be called twice."""
        self.buffer.destroy()
