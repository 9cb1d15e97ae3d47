"""Keywords that branches of DeepEP V1 have added to the low-latency methods: what they ask for is not here.

Callers pass them also where they ask for nothing (``overlap=False``); such calls are served.
"""

from __future__ import annotations

_OVERLAP = (
    "packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms", "src_signals", "src_signal_expect_value",
)  # fmt: skip
_SIGNALS = (
    "a combine that begins while the experts still compute needs a kernel that waits for their signals: turn "
    "single-batch overlap off"
)
# Of each method: what asks for something, why that is not here, and the keywords that say how.
_ASKS = {
    "low_latency_dispatch": ("use_nvfp4", "quantise x yourself, or pass use_fp8", ("x_global_scale",)),
    "low_latency_combine": ("overlap", _SIGNALS, _OVERLAP),
}


def refuse_newer(method: str, given: dict[str, object]) -> None:
    """Raises: TypeError that names the keyword, unless all of them ask for nothing."""
    asks, reason, details = _ASKS[method]
    for name in given:
        if name != asks and name not in details:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
    if given.get(asks):
        raise TypeError(f"{method}({asks}={given[asks]!r}) is not served: {reason}")
    if asks not in given:
        name = next(iter(given))
        raise TypeError(f"{method}({name}=...) belongs to {asks}, which is not served: {reason}")
