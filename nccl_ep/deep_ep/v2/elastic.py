"""DeepEP V2's ``ElasticBuffer``: one dispatch and one combine over both modes.

Rows come flat (a token once a rank), or with ``do_expand`` packed (a row for each choice). ``do_cpu_sync`` gives exact
sizes, in high throughput. Without it sizes are the largest that can be, and small calls take low latency.
docs/migrating_from_deepep.md says what is the same and what differs.
"""

from __future__ import annotations

from typing import Any

import torch

from ...bootstrap import process_group_of, rendezvous_of
from ...buffer import Buffer as Core
from ...checks import (
    MAX_INT32,
    MAX_TOPK,
    require_bools,
    require_int32,
    require_integers,
    require_timeout,
    require_within,
)
from ...choices import Mode
from ...devices import choose_device
from ...events import EventHandle, run_on_comm_stream
from ...functional import dispatch
from ...room import Room, sizes_told
from ..v1.buffer import Buffer as V1
from ..v1.config import sizes_for_bytes
from .arguments import Shapes
from .operations import Operations

_SMS_ALONE = 64  # where nothing else computes
_QPS = 129
_NOT_HERE = {
    "engram": "remote memory (Engram)", "pp": "sends between pipeline stages", "agrs": "all-gather sessions",
    "all_gather": "all-gather sessions", "create_agrs": "all-gather sessions", "destroy_agrs": "all-gather sessions",
    "lb": "the exchange of redundant experts", "get_engram": "remote memory (Engram)",
    "get_pp": "sends between pipeline stages", "get_agrs": "all-gather sessions",
}  # fmt: skip


class ElasticBuffer(Operations):
    """A buffer with V2's methods over a core buffer (``core``). Making one is collective.

    Args:
        group: as ``nccl_ep.deep_ep.Buffer`` takes it; any backend.
        num_bytes: of window to reserve at least. Without the sizes below it is for high throughput alone.
        num_cpu_bytes: 0; there is no memory on hosts here.
        num_max_tokens_per_rank: tokens of a rank in a call at most, equal on all ranks; the default of ``dispatch``.
        hidden: elements of a row in bf16. num_topk: choices of a token; 0: any number up to 32.
        allow_multiple_reduction: False: with ``do_expand`` partial sums travel in float32, twice the bytes, so that a
            result is rounded once.
        prefer_overlap_with_compute: whether ``get_theoretical_num_sms`` leaves SMs for others.
        num_gpu_timeout_secs: the deadline of all waits.
        use_fp8_dispatch, deterministic, allow_hybrid_mode, sl_idx: accepted; they change nothing here. Results are
            always deterministic.
        num_allocated_qps, num_cpu_timeout_secs, explicitly_destroy: the same.
        options: ``device``, ``on_overflow`` and the other keywords of ``nccl_ep.Buffer``.

    Attributes: those arguments, and ``rank_idx``, ``num_ranks``, ``num_scaleout_ranks``, ``num_scaleup_ranks``,
    ``scaleout_rank_idx``, ``scaleup_rank_idx``, ``num_rdma_ranks``, ``num_nvlink_ranks``, ``runtime``, ``core``.

    Raises: ValueError for arguments that have no meaning here; otherwise as ``nccl_ep.Buffer``.

    Source: DeepEP V2's ``ElasticBuffer``.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        **options: Any,
    ) -> None:
        require_bools(
            use_fp8_dispatch=use_fp8_dispatch, deterministic=deterministic, allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction, explicitly_destroy=explicitly_destroy,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
        )  # fmt: skip
        require_int32(
            num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, sl_idx=sl_idx,
            num_allocated_qps=num_allocated_qps, num_cpu_timeout_secs=num_cpu_timeout_secs,
        )  # fmt: skip
        require_integers(num_bytes=num_bytes, num_cpu_bytes=num_cpu_bytes)
        require_within(0, MAX_TOPK, num_topk=num_topk)
        if num_cpu_bytes:
            raise ValueError(f"num_cpu_bytes is {num_cpu_bytes}, but a window has no memory on the host here")
        require_timeout(num_gpu_timeout_secs=num_gpu_timeout_secs)
        rendezvous = rendezvous_of(group)
        ranks = rendezvous.size()
        options = {"timeout": float(num_gpu_timeout_secs), **options}
        if num_max_tokens_per_rank > 0 and hidden > 0:
            device_type = choose_device(options.get("device")).type
            shapes = Shapes(
                ranks, num_max_tokens_per_rank, hidden, num_topk, allow_multiple_reduction, device_type
            )  # fmt: skip
            self.num_bytes = shapes.num_bytes() if num_bytes is None else num_bytes
            spare = max(self.num_bytes - shapes.num_bytes(), 0)
            made_with = sizes_told(
                num_bytes=num_bytes, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk,
                allow_multiple_reduction=allow_multiple_reduction,
            )  # fmt: skip
            core = Core.for_shapes(rendezvous, **(shapes.arguments(spare) | options), _made_with=made_with)
        elif num_bytes is not None and num_bytes > 0:
            self.num_bytes = num_bytes
            domain = options.get("domain_size") or ranks
            ht_sizes = sizes_for_bytes(num_bytes, ranks, domain)
            made_with = sizes_told(num_bytes=num_bytes)
            room = Room(ht=ht_sizes, max_tokens=num_max_tokens_per_rank or None, made_with=made_with)
            core = Core(rendezvous, _room=room, **options)
        else:
            raise ValueError(
                f"num_bytes is {num_bytes}, num_max_tokens_per_rank {num_max_tokens_per_rank}, hidden {hidden}: "
                "give the bytes, or the other two"
            )
        core.group = process_group_of(group)
        self.core, self.group, self.device, self.name, self.runtime = (
            core, core.group, core.device, core.name, core.runtime,
        )  # fmt: skip
        self.rank_idx, self.num_ranks = core.rank, core.num_ranks
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute, self.deterministic = prefer_overlap_with_compute, deterministic
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        self.num_allocated_qps = num_allocated_qps or _QPS
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(core.rank, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._has_ll = core._mode == "auto"
        self._wire_dtype = None if allow_multiple_reduction else torch.float32

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of the window of a buffer with these arguments on the default device, rounded up to 2 MiB. Not
        collective here.

        Raises: ValueError for sizes that no buffer has.

        Source: DeepEP V2's method of that name.
        """
        require_within(1, MAX_INT32, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden)
        require_within(0, MAX_TOPK, num_topk=num_topk)
        require_bools(
            use_fp8_dispatch=use_fp8_dispatch, allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
        )  # fmt: skip
        ranks = rendezvous_of(group).size()
        device_type = choose_device(None).type
        return Shapes(
            ranks, num_max_tokens_per_rank, hidden, num_topk, allow_multiple_reduction, device_type
        ).num_bytes()  # fmt: skip

    # ---- Tuning and state

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs (thread blocks) for calls in high throughput: ``deep_ep.Buffer.num_sms``, or at least 64 without
        ``prefer_overlap_with_compute``. Bandwidths are accepted and change nothing. ValueError for sizes without sense.
        """
        require_int32(num_experts=num_experts, num_topk=num_topk, num_scaleout_topk=num_scaleout_topk)
        if num_experts < 1 or num_topk < 1:
            raise ValueError(f"num_experts is {num_experts}, num_topk {num_topk}, must be at least 1")
        num_sms = V1.num_sms if self.prefer_overlap_with_compute else max(V1.num_sms, _SMS_ALONE)
        if self.device.type == "cuda":
            num_sms = min(num_sms, torch.cuda.get_device_properties(self.device).multi_processor_count)
        return num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """DeepEP's number for callers that pass it on; queue pairs are NCCL's here."""
        require_int32(num_sms=num_sms)
        return min(num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Domains of ranks that share memory, and the ranks of each."""
        return self.num_ranks // self.core.domain_size, self.core.domain_size

    def get_logical_domain_size(self) -> tuple[int, int]:
        """The same."""
        return self.get_physical_domain_size()

    def get_comm_stream(self) -> Any:
        """As ``nccl_ep.Buffer.get_comm_stream``."""
        return self.core.get_comm_stream()

    @staticmethod
    def capture() -> EventHandle:
        """The present point of the current stream, for ``previous_event``."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """All ranks' streams come here before any goes on. Collective. It is a dispatch without tokens.

        use_comm_stream: on the buffer's own stream. with_cpu_sync: the host waits for the device before and after.
        """
        require_bools(use_comm_stream=use_comm_stream, with_cpu_sync=with_cpu_sync, sequential=sequential)
        if with_cpu_sync and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        x = torch.empty((0, 8), dtype=torch.bfloat16, device=self.device)
        ids = torch.empty((0, 1), dtype=torch.int64, device=self.device)

        def call() -> tuple[torch.Tensor, ...]:
            mode: Mode = "ll" if self._has_ll else "ht"
            out = dispatch(x, ids, buffer=self.core, num_experts=self.num_ranks, mode=mode, layout="flat", max_tokens=1)
            return out.x, out._info, out.handle.tensor

        with torch.no_grad():
            run_on_comm_stream(self.core, call, (x, ids), use_comm_stream)
        if with_cpu_sync and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(self) -> None:
        """As ``nccl_ep.Buffer.check``."""
        self.core.check()

    def destroy(self) -> None:
        """Gives the window back; also without ``explicitly_destroy``. May be called twice."""
        self.core.destroy()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __getattr__(self, name: str) -> Any:
        what = next((what for start, what in _NOT_HERE.items() if name.startswith(f"{start}_") or name == start), None)
        reason = "" if what is None else f": {what} has no meaning in nccl_ep"
        raise AttributeError(f"{type(self).__name__} of nccl_ep has no {name!r}{reason}")
