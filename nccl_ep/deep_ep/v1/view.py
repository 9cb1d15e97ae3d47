"""What DeepEP's methods see of a core buffer, and what they keep with it."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch

from ...buffer import Buffer as Core
from ...checks import require_bools, require_int32, require_within
from ...room import Room, ll_sizes_for_bytes, sizes_told
from .config import sizes_for_bytes

_MAX_WINDOW_BYTES = 1 << 48  # csrc/layout/common/region.h


class State:
    """What DeepEP's methods keep with a core buffer: the arguments of DeepEP's constructor, and memory made later.

    The core buffer holds it, so that it outlives each ``deep_ep.Buffer``. It holds neither of them: a cycle would keep
    the window.

    Raises: ValueError, TypeError for arguments that DeepEP's constructor cannot have.
    """

    def __init__(
        self,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        require_bools(
            low_latency_mode=low_latency_mode,
            allow_nvlink_for_low_latency_mode=allow_nvlink_for_low_latency_mode,
            allow_mnnvl=allow_mnnvl,
            use_fabric=use_fabric,
            explicitly_destroy=explicitly_destroy,
        )
        require_within(0, _MAX_WINDOW_BYTES, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.scratch: dict[Any, torch.Tensor] = {}
        self.fitting: dict[tuple[int, int, int], int] = {}  # tokens, by experts, top-k and bytes of a row
        self.unreceived: torch.Tensor | None = None  # src_info of a dispatch whose hook has not run
        self.has_missed_cleaning = False
        self.view: weakref.ref[View] | None = None  # the last one, if it lives

    def room(self, num_ranks: int, domain_size: int | None) -> Room:
        """Of a core buffer that has the bytes asked for."""
        require_int32(domain_size=domain_size or 0)
        ll_bytes, normal_bytes = self.num_rdma_bytes, self.num_nvl_bytes
        if not self.low_latency_mode:
            ll_bytes, normal_bytes = 0, normal_bytes + ll_bytes
        ht = sizes_for_bytes(normal_bytes, num_ranks, domain_size or num_ranks) if normal_bytes else None
        made_with = sizes_told(
            num_nvl_bytes=self.num_nvl_bytes, num_rdma_bytes=self.num_rdma_bytes, low_latency_mode=self.low_latency_mode
        )
        return Room(ll_sizes_for_bytes(num_ranks, ll_bytes), ht, made_with=made_with)

    def num_bytes(self) -> int:
        """Of memory made since the buffer was."""
        return sum(tensor.nbytes for tensor in self.scratch.values())

    def release(self) -> None:
        """At the buffer's end."""
        self.scratch.clear()
        self.unreceived = None


class View:
    """A core buffer, and what the methods look up at each call, taken once."""

    num_sms: ClassVar[int]
    core: Core

    def _attach(self, core: Core, state: State) -> None:
        self.core, self._state, self._view_call = core, state, core._call
        self.name, self.device, self.runtime, self._seq = core.name, core.device, core.runtime, core._seq
        self.group, self.rank, self.num_ranks, self.group_size = core.group, core.rank, core.num_ranks, core.num_ranks
        self.domain_size = core.domain_size
        self.on_overflow, self.enable_shrink = core.on_overflow, core.enable_shrink
        self.num_nvl_bytes, self.num_rdma_bytes = state.num_nvl_bytes, state.num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = state.low_latency_mode, state.explicitly_destroy
        self._fitting = state.fitting
        state.view = weakref.ref(self)

    def require_usable(self) -> None:
        """As of the core buffer."""
        self.core.require_usable()

    def get_comm_stream(self) -> Any:
        """The buffer's own stream, of high priority, on which operations with ``async_finish`` run.

        A ``torch.cuda.Stream``, made when first asked for; on a CPU buffer a ``torch.cpu.Stream``.
        """
        return self.core.get_comm_stream()
