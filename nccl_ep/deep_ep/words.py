"""Errors of the core, in the words of who calls DeepEP's methods."""

from __future__ import annotations

import re

_ROOM = "the window is too small"


class Words:
    """What DeepEP's callers call the core's arguments: ``Words(rows="x")``. room: where a window gets more of it."""

    def __init__(self, *, room: str = "", **names: str) -> None:
        self._names, self._room = names, room
        self._named = re.compile(rf"\b({'|'.join(names)})(?= (?:is|are|has|of shape|at address)\b)")

    def told(self, error: TypeError | ValueError) -> TypeError | ValueError:
        """What to raise for an error of the core."""
        text = self._named.sub(lambda found: self._names[found[1]], str(error))
        if self._room and text.startswith(_ROOM):
            text = f"{text}; {self._room}"
        if text == str(error):
            return error
        return TypeError(text) if isinstance(error, TypeError) else ValueError(text)
