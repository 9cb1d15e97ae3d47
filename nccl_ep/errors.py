"""What the library raises besides ValueError (arguments that cannot be served) and TypeError."""

from __future__ import annotations

import builtins


class EpError(RuntimeError):
    """Base of the errors below."""


class UsageError(EpError):
    """A right call at the wrong time: a destroyed buffer, a handle of another one, a second un-received send."""


class TimeoutError(EpError, builtins.TimeoutError):
    """A rank was not heard of within the deadline. The text names the rank, the phase, what was awaited and seen.

    The buffer has failed: destroy it and make a new one, in the same process if need be.
    """


class MismatchError(EpError):
    """Ranks disagree: about the buffer they make together, or about the call they make. The text has both sides."""


class OverflowError(EpError, builtins.OverflowError):
    """Rows did not fit into the capacity, and the buffer was made with ``on_overflow="raise"``."""


class SystemError(EpError):
    """The operating system, CUDA or NCCL refused something."""
