"""tools/newer_python.py: which Python the newest frameworks get."""

from pathlib import Path

import pytest

from tools import newer_python


def python(folder: Path, minor: int, has_headers: bool = True, status: int = 0) -> str:
    """A command that answers as a Python 3.`minor` does."""
    include = folder / f"include{minor}"
    include.mkdir(exist_ok=True)
    if has_headers:
        (include / "Python.h").touch()
    command = folder / f"python3.{minor}"
    command.write_text(f"#!/bin/sh\necho {minor} {include}\nexit {status}\n")
    command.chmod(0o755)
    return str(command)


def test_a_python_serves_that_is_new_enough_and_has_headers(tmp_path: Path) -> None:
    assert [newer_python.serves(python(tmp_path, minor)) for minor in (11, 12, 13, 14, 15)] == [
        False, True, True, True, False,
    ]  # fmt: skip
    other = tmp_path / "other"
    other.mkdir()
    assert not newer_python.serves(python(other, 12, has_headers=False))
    assert not newer_python.serves(python(other, 13, status=127))  # a shim of pyenv without its Python
    assert not newer_python.serves(str(tmp_path / "none"))


def test_the_oldest_that_serves_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(newer_python.sys, "executable", python(tmp_path, 11))
    monkeypatch.setattr(newer_python.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(newer_python, "of_uv", lambda: None)
    found = [each for each in newer_python.candidates() if newer_python.serves(each) and str(tmp_path) in each]
    assert found == []
    monkeypatch.setattr(newer_python, "candidates", lambda: iter([python(tmp_path, 11)]))
    assert newer_python.main() == 1 and "no Python 3.12 or newer" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(newer_python, "candidates", lambda: iter([python(tmp_path, minor) for minor in (11, 13, 14)]))
    assert newer_python.main() == 0 and capsys.readouterr().out.strip() == str(tmp_path / "python3.13")
