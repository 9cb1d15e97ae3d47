"""Tests by topic; tests/support has what they share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
