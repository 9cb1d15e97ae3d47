"""The version, in its only place: the build reads it from here."""

__version__ = "0.3.0"
