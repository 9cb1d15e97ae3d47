"""DeepEP V2.5's ``EPBuffer``."""

from __future__ import annotations

from typing import Any

from ...checks import require_bools
from .elastic import ElasticBuffer
from .handle import ElasticEvent


class EPBuffer(ElasticBuffer):
    """V2.5's name of ``ElasticBuffer``, whose calls may give their results to the event.

    What V2.5 has beside (``BufferAllocator``, redundant experts, the other buffers) is not here.

    Source: DeepEP V2.5's ``EPBuffer``.
    """

    def dispatch(self, *args: Any, defer_epilogue: bool = False, **keywords: Any) -> Any:
        """As ``ElasticBuffer.dispatch``. With ``defer_epilogue`` only an event, whose wait returns the results.

        ValueError for ``defer_epilogue`` without ``async_with_compute_stream``.
        """
        *results, event = super().dispatch(*args, **keywords)
        return _deferred(defer_epilogue, results, event)

    def combine(self, *args: Any, defer_epilogue: bool = False, **keywords: Any) -> Any:
        """As ``ElasticBuffer.combine``, likewise."""
        *results, event = super().combine(*args, **keywords)
        return _deferred(defer_epilogue, results, event)


def _deferred(is_deferred: bool, results: list[Any], event: ElasticEvent) -> Any:
    require_bools(defer_epilogue=is_deferred)
    if not is_deferred:
        return (*results, event)
    if event.event is None:
        raise ValueError("defer_epilogue is set and async_with_compute_stream is not: there is nothing to wait for")
    event._results = tuple(results)
    return event
