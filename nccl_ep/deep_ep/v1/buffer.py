"""DeepEP's ``Buffer``: it has a core buffer, and DeepEP's names for what is done with one."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from ... import _C
from ...bootstrap import process_group_of, rendezvous_of
from ...buffer import Buffer as Core
from ...checks import require_int32
from ...events import EventHandle, EventOverlap
from .config import Config, config_of
from .low_latency import LowLatencyMethods
from .normal import NormalMethods
from .view import State

B = TypeVar("B", bound="Buffer")


class Buffer(LowLatencyMethods, NormalMethods):
    """DeepEP V1's ``Buffer``: one core buffer for the normal and the low-latency mode. Making one is collective.

    Args:
        group: a torch process group of any backend (gloo is legal), a ``DeviceMesh`` of one dimension, ``None`` for a
            world of one rank, or an object with ``rank()``, ``size()`` and ``allgather(bytes, timeout)``.
        num_nvl_bytes, num_rdma_bytes: bytes of window to reserve at least: with ``low_latency_mode`` for the normal and
            the low-latency mode, else both for the normal mode.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric, explicitly_destroy:
            accepted; they change nothing here.
        enable_shrink, comm: as of ``nccl_ep.Buffer``.
        options: ``device``, ``timeout``, ``on_overflow`` and the other keywords of ``nccl_ep.Buffer``.

    ``Buffer.of(core)`` gives these methods to a buffer that is there, as to one of ``nccl_ep.Buffer.for_shapes``.
    ``core`` is the ``nccl_ep.Buffer``, for whatever DeepEP has no name for.

    Raises: as ``nccl_ep.Buffer``.

    Source: DeepEP's ``Buffer``.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        domain_size: int | None = None,
        **options: Any,
    ) -> None:
        rendezvous = rendezvous_of(group, comm)
        state = State(
            num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
            allow_mnnvl, use_fabric, explicitly_destroy,
        )  # fmt: skip
        room = state.room(rendezvous.size(), domain_size)
        core = Core(rendezvous, enable_shrink=enable_shrink, domain_size=domain_size, _room=room, **options)
        core.group = comm if group is None else process_group_of(group)
        core._companion = state
        self._attach(core, state)

    @classmethod
    def of(cls: type[B], core: Core | Buffer) -> B:
        """DeepEP's methods for a buffer that is there: the same object for as long as it is used. Not collective.

        TypeError for what is no ``nccl_ep.Buffer`` (one of this class is taken as it is).
        """
        if isinstance(core, cls):
            return core
        if isinstance(core, Buffer):
            core = core.core
        if not isinstance(core, Core):
            raise TypeError(f"core is a {type(core).__name__}, must be a nccl_ep.Buffer")
        state = core._companion
        if state is None:
            state = core._companion = State()
        assert isinstance(state, State)
        view = state.view() if state.view is not None else None
        if not isinstance(view, cls):
            view = cls.__new__(cls)
            view._attach(core, state)
        return view

    # ---- Tuning

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether this build has kernels: they need at least sm_90."""
        return bool(_C.has_cuda())

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """The SMs of operations without a ``config``, of all buffers. ValueError if odd or negative, as in DeepEP."""
        require_int32(new_num_sms=new_num_sms)
        if new_num_sms < 0 or new_num_sms % 2:
            raise ValueError(f"new_num_sms is {new_num_sms}, must be even and not negative")
        Buffer.num_sms = new_num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """DeepEP's table for dispatch, with the SMs of ``set_num_sms``."""
        return config_of(num_ranks, cls.num_sms, is_combine=False)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """DeepEP's table for combine, with the SMs of ``set_num_sms``."""
        return config_of(num_ranks, cls.num_sms, is_combine=True)

    @staticmethod
    def capture() -> EventOverlap:
        """The present point of the current stream (not of a CUDA graph), to be waited for later."""
        return EventOverlap(EventHandle())

    # ---- State, as of the core buffer

    def check(self) -> None:
        """As ``nccl_ep.Buffer.check``."""
        self.core.check()

    def set_timeout(self, seconds: float) -> None:
        """As ``nccl_ep.Buffer.set_timeout``."""
        self.core.set_timeout(seconds)

    def stats(self) -> dict[str, Any]:
        """As ``nccl_ep.Buffer.stats``."""
        return self.core.stats()

    def destroy(self) -> None:
        """Destroys the core buffer; also without ``explicitly_destroy``. May be called twice."""
        self.core.destroy()

    def __enter__(self: B) -> B:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"<nccl_ep.deep_ep.Buffer {self.name}: rank {self.rank} of {self.num_ranks}, {self.device}>"

    def __reduce__(self) -> Any:
        raise TypeError("a nccl_ep.deep_ep.Buffer cannot be pickled or copied: it is one rank's share of memory in use")
