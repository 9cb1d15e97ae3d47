"""DeepEP's names on ``nccl_ep.Buffer``, for one more release: each goes on to ``nccl_ep.deep_ep``, and says so once."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

_CONSTRUCTOR = "DeepEP's arguments of nccl_ep.Buffer"
_DEFAULTS = (0, 0, False, 24, True, False, False, False)
_told: set[str] = set()


def _tell(what: str, instead: str, stacklevel: int) -> None:
    """Once in a process: in a layer it would be said at every step. stacklevel: as ``warnings.warn`` in the caller."""
    if what not in _told:
        _told.add(what)
        warnings.warn(f"{what}: deprecated, removed in the next release; {instead}", DeprecationWarning, stacklevel + 1)


def has_deep_ep_arguments(*arguments: object) -> bool:
    """Whether a constructor's arguments, from ``num_nvl_bytes`` to ``explicitly_destroy``, are not the defaults."""
    return any(type(a) is not type(b) or a != b for a, b in zip(arguments, _DEFAULTS, strict=True))


def deep_ep_window(
    arguments: tuple[Any, ...], num_ranks: int, domain_size: int | None, sizes: Any, ht_sizes: Any
) -> tuple[Any, Any, Any]:
    """What ``nccl_ep.deep_ep`` keeps with a buffer of such arguments, and the window's ``sizes`` and ``ht_sizes``."""
    from .deep_ep.v1.view import State

    _tell(_CONSTRUCTOR, "make a nccl_ep.deep_ep.Buffer, or a nccl_ep.Buffer.for_shapes", stacklevel=3)
    state = State(*arguments)
    return state, *state.window_sizes(num_ranks, domain_size, sizes, ht_sizes)


class _Forward:
    """A name of ``nccl_ep.deep_ep.Buffer``, on a buffer or on its class."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, core: Any, owner: type) -> Any:
        from .deep_ep import Buffer  # not before: the core does without

        name = self._name
        found = getattr(Buffer if core is None else Buffer.of(core), name)
        _tell(f"nccl_ep.Buffer.{name}", "use that of nccl_ep.deep_ep.Buffer, or of its Buffer.of(buffer)", 2)
        if core is None and inspect.isfunction(inspect.getattr_static(Buffer, name)):  # a method, without its buffer
            return functools.wraps(found)(lambda core, *args, **kwargs: found(Buffer.of(core), *args, **kwargs))
        return found


class DeepEpNames:
    """The names, as a base class of ``nccl_ep.Buffer``."""

    num_nvl_bytes = _Forward()
    num_rdma_bytes = _Forward()
    low_latency_mode = _Forward()
    explicitly_destroy = _Forward()
    group_size = _Forward()
    num_sms = _Forward()

    is_sm90_compiled = _Forward()
    set_num_sms = _Forward()
    get_dispatch_config = _Forward()
    get_combine_config = _Forward()
    get_low_latency_rdma_size_hint = _Forward()
    capture = _Forward()

    get_dispatch_layout = _Forward()
    dispatch = _Forward()
    combine = _Forward()

    low_latency_dispatch = _Forward()
    low_latency_combine = _Forward()
    clean_low_latency_buffer = _Forward()
    get_next_low_latency_combine_buffer = _Forward()
    get_local_buffer_tensor = _Forward()
    low_latency_update_mask_buffer = _Forward()
    low_latency_query_mask_buffer = _Forward()
    low_latency_clean_mask_buffer = _Forward()
