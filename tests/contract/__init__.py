"""What every backend promises, written once (suite.py), and the backends that are held to it (test_*.py)."""

import pytest

for _name in ("bits", "counts", "deadlines", "errors", "reuse"):
    pytest.register_assert_rewrite(f"tests.contract.{_name}")
