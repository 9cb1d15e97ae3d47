"""Where DeepEP's callers look for events: ``from deep_ep.utils import EventHandle, EventOverlap``."""

from ...events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
