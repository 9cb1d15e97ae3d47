"""A buffer: one rank's window, shared with the other ranks of a group, through which tokens travel."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, get_args

import torch

from . import _C
from .bootstrap import Rendezvous, StoreGroup, meeting_of, process_group_of, rendezvous_of
from .checks import (
    described,
    error_of,
    require_bools,
    require_dtypes,
    require_int32,
    require_one_of,
    require_seconds,
    require_shape,
    require_timeout,
    require_within,
)
from .choices import LlNetwork, Mode, OnInvalidIds, OnOverflow, Window
from .devices import choose_device
from .errors import UsageError
from .log import logger
from .marks import uncompiled
from .pending import OpenSend, discard
from .room import HtSizes, LlSizes, Room, ll_sizes_for_bytes, room_for_shapes
from .windows import Windows

_MAX_UINT64 = (1 << 64) - 1
_CLEANING_DEADLINES = 4  # that a rank waits for another, which may be waiting in its last operation
_NO_SIZES = "no sizes: Buffer.for_shapes takes those of the calls"
# How names of methods of DeepEP begin that this class has not.
_DEEP_EP_METHODS = (
    "low_latency_", "clean_low_latency_", "get_low_latency_", "get_dispatch_", "get_combine_", "internode_",
)  # fmt: skip
_numbers = itertools.count()
# All that this process has made, and their names, by the ids of their windows.
_buffers: dict[int, tuple[weakref.ref[Buffer], str]] = {}
# Called with a buffer that is about to be destroyed.
when_destroyed: list[Callable[[Buffer], None]] = []


class Companion(Protocol):
    """What another face of a buffer keeps with it, as ``nccl_ep.deep_ep`` does."""

    def num_bytes(self) -> int:
        """Of memory outside the window."""
        ...

    def release(self) -> None:
        """At the buffer's end."""
        ...


class Buffer:
    """Memory and signals for dispatch and combine between the ranks of ``group``. Making one is collective.

    Args:
        group: a torch process group of any backend (gloo is legal), a ``DeviceMesh`` of one dimension, ``None`` for a
            world of one rank, or an object with ``rank()``, ``size()`` and ``allgather(bytes, timeout)``.
        enable_shrink: a rank that is late in a low-latency operation is masked instead of failing the buffer
            (``nccl_ep.deep_ep.Buffer.low_latency_update_mask_buffer``); the same on all.
        elastic: with masks as of ``enable_shrink``, and a rank whose process has ended can be replaced (``replace``);
            of one domain and low latency alone; ``group`` is a ``nccl_ep.StoreGroup``; the same on all ranks.
        join: this process takes the place of a rank of an elastic buffer, as which ``group`` numbers it, while the
            others call ``replace``. Sizes are those of the others.
        comm: an mpi4py communicator in place of a group; MPI knows no deadline, so that making a buffer has none then.
        device: "cuda", "cpu" or a torch device. Default: CUDA where there is a GPU and this build serves it.
        timeout: seconds that a rank waits for the others in an operation, or to make the buffer, before it gives up.
        on_overflow: "count" (rows past a capacity are dropped and counted) or "raise".
        on_invalid_ids: "raise" (a dispatch of a CPU rank refuses expert ids out of range before it sends; after one of
            a GPU the next call raises what the kernel has found), or "count" (``check()`` alone tells). Where such an
            id is not refused, it is no choice.
        domain_size: ranks that share memory, as those of a node do; by default all ranks. On GPUs it must be what NCCL
            finds (docs/network.md), on CPU ranks it is a claim for tests.
        ll_network: how low latency crosses between domains of GPUs: "rail" sends a row to a domain once, to a rank that
            hands it out there; "mesh" sends it to each rank itself. "auto" is the mesh with ``enable_shrink``, and
            where a rank has at most 64 KiB of rows to send and the other domains have at most 8 ranks; else the rail.
            ``stats()`` says which. Bits are the same; CPU ranks take no notice of it. The same on all ranks.
        window: what makes the windows of GPUs: "nccl", or "cumem", CUDA's virtual memory, for the GPUs of one machine:
            no communicator is made, which takes more memory than low latency itself (docs/performance.md#memory).
            Elastic buffers have it anyway, and CPU ranks take no notice of it. The same on all ranks.
        network_seed: for tests: delays and reorders what crosses between domains, of CPU ranks and on one GPU.
        name: by which ops find the buffer; unique in the process, made up by default.

    Raises:
        ValueError: sizes or options that make no sense, with their values. TypeError: a group of another kind.
        MismatchError: the ranks disagree, with both values. TimeoutError: a rank did not come.
        SystemError: no memory for the window, a lost store, or this build lacks the device.

    ``Buffer.for_shapes`` gives the window room for the calls that are to come, in either mode; without it, it has the
    least room that low latency has. It takes ``buffer.stats()["window_bytes"]``. A buffer belongs to the process that
    made it.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        enable_shrink: bool = False,
        elastic: bool = False,
        join: bool = False,
        comm: Any = None,
        device: str | torch.device | None = None,
        timeout: float = 100.0,
        on_overflow: OnOverflow = "count",
        on_invalid_ids: OnInvalidIds = "raise",
        domain_size: int | None = None,
        ll_network: LlNetwork = "auto",
        window: Window = "nccl",
        network_seed: int | None = None,
        name: str | None = None,
        _room: Room | None = None,
    ) -> None:
        rendezvous = rendezvous_of(group, comm)
        require_bools(enable_shrink=enable_shrink, elastic=elastic, join=join)
        _require_elastic(rendezvous, elastic, join)
        require_one_of(("count", "raise"), on_overflow=on_overflow, on_invalid_ids=on_invalid_ids)
        require_one_of(get_args(LlNetwork), ll_network=ll_network)
        require_one_of(get_args(Window), window=window)
        require_within(0, _MAX_UINT64, network_seed=0 if network_seed is None else network_seed)
        require_int32(domain_size=0 if domain_size is None else domain_size)
        require_seconds(timeout=timeout)
        if not isinstance(name, str | None):
            raise TypeError(f"name is a {type(name).__name__}, must be a str")
        self.group = comm if group is None else process_group_of(group)
        self.rank, self.num_ranks = rendezvous.rank(), rendezvous.size()
        self.enable_shrink, self.elastic = bool(enable_shrink or elastic), bool(elastic)
        self.on_overflow = on_overflow
        room = _room or Room(ll_sizes_for_bytes(self.num_ranks), made_with=_NO_SIZES)
        self.max_tokens, self.ll_max_tokens = room.max_tokens, room.ll_max_tokens
        self.device = choose_device(device)
        self.name = name or f"buffer{next(_numbers)}.rank{self.rank}"
        self._companion: Companion | None = None
        self._rendezvous, self._timeout = rendezvous, timeout
        self._room, self._mode = room, room.mode
        self._comm_stream: Any = None
        self._open_sends: dict[str, OpenSend] = {}  # sent and not received, by kind
        self._is_destroyed = False
        self._process = os.getpid()
        claims = {
            "domain_size": domain_size or 0, "network_seed": network_seed or 0, "ll_network": ll_network,
            "raises_invalid_ids": on_invalid_ids == "raise", "is_elastic": self.elastic,
            "uses_cumem": window == "cumem",
        }  # fmt: skip
        self._windows = Windows(rendezvous, self.device, self.enable_shrink, claims)
        start = time.monotonic()
        self.runtime = self._windows.add(
            self.name, room.ll, room.ht, timeout, max_experts=room.max_experts, made_with=room.made_with, join=join
        )
        self._register(self.runtime)
        self._seq = self._newest_seq = self._windows.seqs[0]
        self._call = _C.call_buffer(self._seq, self.num_ranks, self._open_sends, on_overflow == "raise")
        if logger.isEnabledFor(logging.INFO):
            took, window = time.monotonic() - start, self.runtime.stats()["window_bytes"]
            logger.info(
                "made %s in %.3f s: window of %d bytes, %d ranks share memory, deadline %g s",
                repr(self), took, window, self.domain_size, timeout,
            )  # fmt: skip

    @classmethod
    @functools.partial(uncompiled, reason="a buffer is made outside of what is compiled")
    def for_shapes(
        cls,
        group: Any = None,
        *,
        max_tokens: int,
        hidden: int,
        topk: int,
        num_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        wire_dtype: torch.dtype | None = None,
        scale_bytes: int | None = None,
        mode: Mode = "ll",
        arena_bytes: int | None = None,
        late_weights: bool = False,
        **options: Any,
    ) -> Buffer:
        """A buffer whose window fits operations up to these sizes.

        Args:
            max_tokens: tokens a rank sends at most, equal on all ranks; the default of ``dispatch``.
            hidden: elements of a row; rows are a multiple of 16 bytes. topk: choices of a token, 1 to 32.
            num_experts: of all ranks, a multiple of their number; a call may have fewer.
            dtype: of the rows. wire_dtype: of partial sums on their way home, by default ``dtype``.
            scale_bytes: of a row that the caller quantises, or of what is dispatched along with it; by default 4 for
                32 elements.
            mode: what the buffer has room for: "ll", "ht", or "auto" for both, low latency then up to the sizes that
                ``dispatch(mode="auto")`` gives to it.
            arena_bytes: for outputs of high throughput and tensors of ``buffer.empty``, apart from the window's other
                regions; by default two flat outputs that hold all rows that can come.
            late_weights: room for rows that travel unweighted, topk - 1 rows of each token in each of two banks (with
                masks as many for each rank), in low latency. With it a split combine with weights given there sends
                before it has heard from any rank, and can have ``row_signals``; without it the send waits for the other
                ranks' weights. Bits are the same.
            options: ``device``, ``timeout``, ``on_overflow`` and the other keywords of ``Buffer``.

        Raises: as ``Buffer``.
        """
        if unknown := options.keys() - {"_made_with", *(Buffer.__init__.__kwdefaults__ or ())}:
            raise TypeError(f"Buffer.for_shapes() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        made_with = options.pop("_made_with", None)
        comm = options.pop("comm", None)
        rendezvous = rendezvous_of(group, comm)
        ranks = rendezvous.size()
        room = room_for_shapes(
            ranks, options.get("domain_size"), max_tokens=max_tokens, hidden=hidden, topk=topk,
            num_experts=num_experts, dtype=dtype, wire_dtype=wire_dtype, scale_bytes=scale_bytes, mode=mode,
            arena_bytes=arena_bytes, late_weights=late_weights,
            device_type=choose_device(options.get("device")).type,
        )  # fmt: skip
        if made_with:  # another API's, whose sizes do not say how many experts a call has
            room = room._replace(made_with=made_with, max_experts=0)
        buffer = cls(rendezvous, _room=room, **options)
        buffer.group = comm if group is None else process_group_of(group)
        return buffer

    def _register(self, window: _C.Group) -> None:
        _buffers[window.id()] = weakref.ref(self), self.name

    def _add_window(self, ht_sizes: HtSizes) -> None:
        """Adds a window, for high throughput alone. Collective."""
        added = self._windows.add(f"{self.name}.{len(self._windows)}", LlSizes(), ht_sizes, self._timeout)
        # Not before: where there is no window, all is as it was.
        self._register(added)
        self._newest_seq, self._room = self._windows.seqs[-1], self._room._replace(ht=ht_sizes)
        logger.info("%s grew by a window of %d bytes", repr(self), added.stats()["window_bytes"])

    # ---- Masks of ranks, and ranks that are replaced

    def _clean_masks(self) -> None:
        """For the masks of other APIs, whose methods say what it does."""
        with contextlib.ExitStack() as stack:
            meet = functools.cache(lambda: stack.enter_context(meeting_of(self._rendezvous)))
            # It is called between several domains alone.
            self.runtime.clean_masks(lambda mine: meet()(mine, _CLEANING_DEADLINES * self._timeout))

    @property
    def masked(self) -> list[int]:
        """The masked ranks, which low latency leaves out, in order; none without ``enable_shrink`` or ``elastic``.

        As ``stats()["masked_ranks"]``. On CUDA it waits for a copy from the device, not for operations in flight.
        """
        ranks: list[int] = self.runtime.stats()["masked_ranks"]
        return ranks

    def replace(self, rank: int, *, timeout: float = 100.0) -> None:
        """A new process takes the place of ``rank``, whose process has ended. Of a buffer made with ``elastic=True``.

        Collective among the ranks that are not masked, and the new process, which makes its buffer with ``join=True``
        meanwhile. Between operations, with no split call open. This buffer, its addresses and captured graphs stay as
        they are; masks of other ranks too. Afterwards ``rank`` is not masked. Handles of earlier dispatches must not be
        used any more: the new rank has none.

        Args:
            rank: another rank than this, masked or not. timeout: seconds to wait for the others and the new process.

        Raises:
            UsageError: the buffer is not elastic, a split call is open, or the old process still runs.
            TimeoutError: a rank did not come; MismatchError: the ranks disagree about the buffer or who is masked. Then
            the buffer is what it was, but for a mask of ``rank``, and ``replace`` may be called again. Only if a rank
            was lost in the last step, every call says that the buffer is of no use any more.
        """
        self.require_usable()
        require_within(0, self.num_ranks - 1, rank=rank)
        require_timeout(timeout=timeout)
        if not self.elastic:
            raise UsageError(f"rank {rank} cannot be replaced: {self.name} was made without elastic=True")
        if rank == self.rank:
            raise ValueError(f"rank {rank} to replace is this rank itself")
        assert isinstance(self._rendezvous, StoreGroup)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # operations in flight may mask ranks
        left_out = [other for other in self.runtime.stats()["left_out_ranks"] if other != rank]
        with self._rendezvous.meet_newcomer(rank, left_out, timeout) as (allgather, seats):
            self.runtime.replace(rank, seats, timeout, lambda mine: allgather(mine, timeout))
        logger.info("%s has a new rank %d", repr(self), rank)

    # ---- State

    def require_usable(self) -> None:
        """Raises what keeps the buffer from being used.

        UsageError: it was destroyed, or is another process's. TimeoutError, MismatchError: it has failed.
        """
        if os.getpid() != self._process:
            raise UsageError(
                f"{self.name} belongs to process {self._process}, this is its fork {os.getpid()}: make a buffer here"
            )
        if self._is_destroyed:
            raise UsageError(f"the buffer {self.name} was destroyed")
        for window in self._windows:
            window.require_usable()

    def check(self) -> None:
        """Raises what was found since the last call.

        ValueError: expert ids out of range that were no choice: how many, and the first one's token, k and value.
        Otherwise as ``require_usable``.
        """
        self.require_usable()
        for window in self._windows:
            window.check()

    def set_timeout(self, seconds: float) -> None:
        """Changes the deadline of all waits, in seconds, also in captured graphs. ValueError if not positive.

        Operations that wait obey from now on: of another thread, and those in flight on a GPU. One that waits there for
        a rank that has gone has the new deadline, so wait for it before you set a longer one.
        """
        require_seconds(seconds=seconds)
        self.require_usable()
        for window in self._windows:
            window.set_timeout(seconds)
        self._timeout = seconds

    def stats(self) -> dict[str, Any]:
        """What the buffer has done since it was made, what it takes, and what was chosen for it.

        "dispatches", "combines": operations that are complete here, replays of graphs among them ("combines" with those
        of weights); the number of the last one. "calls": those that the host has asked for, by kind: "dispatch",
        "combine", "combine_weights", "split" (those of the first two that were split calls), "ht_dispatch" and
        "ht_combine". "dropped_rows": past a capacity. "invalid_ids": since they were last raised. An extra tensor of a
        low-latency dispatch that takes an operation of its own is one more dispatch in all of these numbers.
        "window_bytes": what the ranks share; "memory_total_bytes": CUDA memory that went when the buffer was made,
        NCCL's included (a neighbour's may be, too); "scratch_bytes": made later for DeepEP's methods.
        "ht_dispatches", "ht_combines": of high throughput, where one of exact sizes counts as two; "staged_dispatches",
        "staged_combines": those of them that needed a copy, because a tensor was not in the arena, which an empty one
        is not (or a row's dtype wider than the wire's); "arena_bytes", "arena_free_bytes".
        "grown": windows that the normal mode of DeepEP has added.
        "masked_ranks": those that are masked (``enable_shrink``); "left_out_ranks": those that low latency leaves out,
        which are these and ranks that count as active until the next operation.
        "mode": what the buffer has room for; "backend", "device", "domain_size": how its operations run.
        "ll_network": "rail" or "mesh", by which low latency crosses between domains of GPUs; "" in one domain.

        On CUDA it waits for a copy from the device, not for operations in flight.
        """
        stats = self._windows.stats()
        stats["scratch_bytes"] = 0 if self._companion is None else self._companion.num_bytes()
        if self.device.type == "cuda":
            stats["memory_total_bytes"] = self._windows.memory_total
        return stats | {"mode": self._mode, "device": str(self.device), "domain_size": self.domain_size}

    def empty(self, size: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """An uninitialised tensor in the window's arena, which other ranks can read and write where it lies.

        Experts that write their rows into one spare ``combine`` a copy. It is an ordinary tensor otherwise, and keeps
        its memory for as long as it is used, the buffer's end included. Where the arena has no room (see
        ``stats()``), it lies in other memory and works as well. Once DeepEP's normal mode has grown ("grown"), it lies
        in the window of that mode.
        """
        self.require_usable()
        require_shape(size)
        require_dtypes(dtype=dtype)
        try:
            made: torch.Tensor = torch.ops.nccl_ep.arena_empty.default(self._newest_seq, list(size), dtype)
        except RuntimeError as error:
            raise error_of(self, error) from None
        return made

    def wire_bytes(self) -> dict[str, list[int]]:
        """What this rank has sent since the buffer was made (CPU backend), each a list [R] that includes itself.

        "rows_count": rows. "rows": their bytes. "other": bytes of op headers, ids and weights. A row that another
        rank has made readable counts where it is read. Of GPUs over a simulated network instead "network", bytes that
        were put into other domains, and "network_puts", by how many puts.
        """
        return self._windows.wire_bytes()

    def get_comm_stream(self) -> Any:
        """The buffer's own stream, of high priority, on which operations with ``async_finish`` run.

        A ``torch.cuda.Stream``, made when first asked for; on a CPU buffer a ``torch.cpu.Stream``.
        """
        if self._comm_stream is None:
            if self.device.type == "cpu":
                self._comm_stream = torch.cpu.Stream()
            else:
                self._comm_stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        return self._comm_stream

    @property
    def domain_size(self) -> int:
        """Ranks that share memory with one another."""
        return int(self.runtime.domain_size())

    def drop_pending(self) -> None:
        """Receives what ``dispatch_send`` and ``combine_send`` have sent and nobody has received, and throws it away.

        Waits for the other ranks, as ``Pending.receive`` does. The next operation of the kind does it by itself where
        the ``Pending`` is gone, or its ``receive`` has failed.

        Raises: UsageError, TimeoutError, MismatchError as ``Pending.receive``.
        """
        self.require_usable()
        for open_send in list(self._open_sends.values()):
            discard(self, open_send)

    def destroy(self) -> None:
        """Gives the window back. Does not wait for other ranks longer than the deadline; may be called twice.

        Another thread may call it while one is in an operation: a wait of the host then ends at once in UsageError.
        """
        if os.getpid() == self._process:
            if not self._is_destroyed:
                for call in when_destroyed:
                    call(self)
                self._is_destroyed = True
                logger.info("destroying %s", repr(self))
            for window in self._windows:
                window.destroy()
            self._open_sends.clear()
            if self._companion is not None:
                self._companion.release()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"<nccl_ep.Buffer {self.name}: rank {self.rank} of {self.num_ranks}, {self.device}>"

    if not TYPE_CHECKING:  # a type checker sees what there is

        def __getattr__(self, name: str) -> Any:
            """Called for what there is not: the names of other libraries' buffers say where they are."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in ("dispatch", "combine"):
                text += f": it is a function, nccl_ep.{name}"
            if name in ("dispatch", "combine") or name.startswith(_DEEP_EP_METHODS):
                text += "; DeepEP's methods are those of nccl_ep.deep_ep.Buffer (docs/migrating_from_deepep.md)"
            raise AttributeError(text)

    def __reduce__(self) -> Any:
        raise TypeError("a nccl_ep.Buffer cannot be pickled or copied: it is one rank's share of memory in use")


def require_buffer(buffer: object) -> None:
    """TypeError for what is no ``nccl_ep.Buffer``."""
    if isinstance(buffer, Buffer):
        return
    if isinstance(getattr(buffer, "core", None), Buffer):
        raise TypeError(f"buffer is {buffer!r}, must be a nccl_ep.Buffer: give its core")
    raise TypeError(f"buffer is {described(buffer)}, must be a nccl_ep.Buffer")


def find_buffer(seq: torch.Tensor, num_ranks: int | None = None) -> Buffer:
    """The buffer of a handle, whose ``seq`` it is, and its ``num_ranks``."""
    found = _buffers.get(seq.shape[0])
    if found is None:
        raise UsageError(f"the handle's buffer, number {seq.shape[0]}, is gone, or lives in another process")
    buffer, name = found[0](), found[1]
    if buffer is None:
        raise UsageError(f"the handle's buffer {name} is gone")
    if num_ranks not in (None, buffer.num_ranks):
        raise UsageError(f"the handle is of {num_ranks} ranks, its buffer {name} of {buffer.num_ranks}")
    return buffer


def living() -> list[Buffer]:
    """The buffers of this process that were not destroyed, in the order in which they were made."""
    found = dict.fromkeys(buffer for each, _ in list(_buffers.values()) if (buffer := each()) is not None)
    return [buffer for buffer in found if not buffer._is_destroyed and buffer._process == os.getpid()]


def _require_elastic(rendezvous: Rendezvous, elastic: bool, join: bool) -> None:
    if join and not elastic:
        raise ValueError("join is True, and elastic False: only ranks of elastic buffers can be replaced")
    if elastic and not isinstance(rendezvous, StoreGroup):
        raise TypeError(
            f"group is a {type(rendezvous).__name__}: that of an elastic buffer must be a nccl_ep.StoreGroup, whose "
            "store a new process can reach"
        )
