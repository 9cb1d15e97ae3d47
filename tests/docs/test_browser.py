"""Which browser makes the site's pictures and shows the report: one that starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import browser


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (None, r"none of chromium, chromium-browser, google-chrome is here"),
        ("echo; echo no sandbox >&2; exit 21", r".*/chromium does not start: exit code 21, no sandbox"),
        ("exit 0", r".*/chromium does not start: exit code 0, without a word"),
        ("[[ $* == *--headless*about:blank ]] && echo '<html></html>'", ""),
    ],
)
def test_a_browser_that_does_not_start_is_none(
    program: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program is not None:
        (tmp_path / "chromium").write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / "chromium").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    path, why_not = browser.find()
    assert path == (str(tmp_path / "chromium") if found == "" else None)
    assert re.match(found, why_not)
