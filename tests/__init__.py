"""Tests by topic, each with its helpers; tests/support has what many share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
