"""A router's choices of logical experts as choices of physical ones, which dispatch takes."""

from __future__ import annotations

import torch

from ..checks import MAX_INT32, require_tensors, require_within
from ..devices import choose_device
from .balancing import logical_maps


def map_experts(
    topk_idx: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_count: torch.Tensor,
    *,
    rank: int,
    load: torch.Tensor | None = None,
) -> torch.Tensor:
    """Chooses a copy of each expert: of n copies token t of rank r takes number (t + r) % n. One op, and no gradient.

    Args:
        topk_idx: [T, K] int64 or int32 logical experts; -1 is no choice, and stays.
        logical_to_physical_map: int64 [E, X], of which the first ``logical_count[e]`` are the copies of e.
        logical_count: int64 [E], 1 to X (EPLB's ``expert_count``).
        rank: of the caller.
        load: int64 [E], or None: the choices of each expert are added to it, on the device, in the same launch.

    Returns:
        [T, K] physical experts, of the dtype of ``topk_idx``.

    Raises:
        ValueError: for shapes, dtypes and devices that do not fit; on the CPU for an id that is no expert. A GPU puts
            2147483647 there, which a dispatch refuses as it refuses any id out of range, and ids below -1 stay.
    """
    given = {
        "topk_idx": topk_idx, "logical_to_physical_map": logical_to_physical_map, "logical_count": logical_count,
    }  # fmt: skip
    if load is not None:
        given["load"] = load
    require_tensors(**given)
    require_within(0, MAX_INT32, rank=rank)
    if not torch.compiler.is_compiling():
        for name, each in given.items():
            if each.layout != torch.strided or each.is_quantized or each.is_nested:
                raise ValueError(f"{name} is a {each.layout} tensor of {each.dtype}, must be strided")
        if load is not None and load.requires_grad:
            raise ValueError("load requires a gradient, and is added to in place: must not")
    mapped: torch.Tensor = torch.ops.nccl_ep.map_experts.default(
        topk_idx, logical_to_physical_map, logical_count, rank, load
    )
    return mapped


class ExpertMap:
    """The placement of one layer on its device: maps choices, and counts them.

    Its tensors stay where they are, and ``set`` writes over them: a captured graph, or a compiled layer, has the new
    placement at once.

    Args:
        physical_to_logical_map: int64 [P], -1 for an empty place. num_logical_experts: E. rank: of the caller.

    Attributes:
        load: int64 [E] on the device, choices of this rank's tokens since ``clear_load``. Across ranks: their sum.
        physical_to_logical_map: int64 [P] on the CPU.
        logical_to_physical_map, logical_count: int64 [E, P - E + 1] and [E] on the device.
    """

    def __init__(
        self,
        physical_to_logical_map: torch.Tensor,
        num_logical_experts: int,
        *,
        rank: int,
        device: torch.device | str = "cpu",
    ) -> None:
        places, count = logical_maps(physical_to_logical_map, num_logical_experts)
        if physical_to_logical_map.dim() != 1:
            raise ValueError(
                f"physical_to_logical_map has shape {list(physical_to_logical_map.shape)}, must be [physical experts]"
            )
        require_within(0, MAX_INT32, rank=rank)
        device = choose_device(device)
        self.rank = rank
        self.physical_to_logical_map = physical_to_logical_map.cpu().clone()
        self.logical_to_physical_map, self.logical_count = places.to(device), count.to(device)
        self.load = torch.zeros(num_logical_experts, dtype=torch.int64, device=device)

    @property
    def num_physical_experts(self) -> int:
        """``num_experts`` of a dispatch."""
        return len(self.physical_to_logical_map)

    def __call__(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """[T, K] logical experts, -1 for none: the physical ones, as ``map_experts`` chooses them. Counts them."""
        return map_experts(
            topk_idx, self.logical_to_physical_map, self.logical_count, rank=self.rank, load=self.load
        )  # fmt: skip

    def set(self, physical_to_logical_map: torch.Tensor) -> None:
        """Another placement, int64 [P], from the next operation of the stream on. ValueError for another P."""
        require_tensors(physical_to_logical_map=physical_to_logical_map)
        if physical_to_logical_map.shape != self.physical_to_logical_map.shape:
            raise ValueError(
                f"physical_to_logical_map has shape {list(physical_to_logical_map.shape)}, must be "
                f"{list(self.physical_to_logical_map.shape)}"
            )
        places, count = logical_maps(physical_to_logical_map, len(self.load))
        self.physical_to_logical_map.copy_(physical_to_logical_map)
        self.logical_to_physical_map.copy_(places)
        self.logical_count.copy_(count)

    def clear_load(self) -> None:
        self.load.zero_()
