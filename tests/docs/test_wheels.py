"""tools/wheels.py and tools/check_wheel.py: which wheels are built, and what a wheel for others says of itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT

VERSION = "nccl_ep-0.3.0+torch211"
NAME = f"{VERSION}-cp312-cp312-manylinux_2_28_x86_64.whl"
METADATA = "Name: nccl_ep\nVersion: 0.3.0+torch211\nRequires-Dist: torch==2.11.*\n"


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")  # where its neighbours are
    return importlib.import_module("wheels")


@pytest.fixture
def check_wheel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("check_wheel")


PYTHON = {minor: f"/usr/bin/python{minor}" for minor in ("3.14", "3.10", "3.9")}
FOUND = {"3.9": ["2.11"], "3.10": ["2.9", "2.11"], "3.14": ["2.11", "2.15"]}


def test_a_wheel_is_built_for_each_torch_and_each_python_that_has_it(wheels: ModuleType) -> None:
    assert wheels.matrix(["2.15", "2.11"], PYTHON, FOUND) == [
        ("2.11", "3.9", "/usr/bin/python3.9"),
        ("2.11", "3.10", "/usr/bin/python3.10"),
        ("2.11", "3.14", "/usr/bin/python3.14"),
        ("2.15", "3.14", "/usr/bin/python3.14"),
    ]
    assert [each[0] for each in wheels.matrix(None, PYTHON, FOUND)] == ["2.9", "2.11", "2.11", "2.11", "2.15"]


def test_a_torch_that_pypi_has_not_is_refused(wheels: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"--torch 2\.15 2\.99: PyPI has 2\.9 2\.11 2\.15"):
        wheels.matrix(["2.15", "2.99"], PYTHON, FOUND)


def test_the_index_says_which_torches_a_python_has(wheels: ModuleType, tmp_path: Path) -> None:
    """Those from 2.11 on, once each."""
    pip = tmp_path / "pip"
    pip.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n'
        "echo 'torch (2.15.0)'\necho 'Available versions: 2.15.0, 2.11.1, 2.11.0, 2.9.1, 1.13.0'\n"
    )
    pip.chmod(0o755)
    assert wheels.torches(pip, "3.12") == ["2.11", "2.15"]
    assert "--python-version 3.12" in (tmp_path / "asked").read_text()


def test_environments_of_one_torch_share_what_is_unpacked(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own interpreter, and packages by links from one cache."""
    ran = []
    monkeypatch.setattr(wheels, "run", lambda *command, **settings: ran.append((*map(str, command), settings)))
    for minor in ("3.10", "3.14"):
        assert wheels.make_bare(Path("uv"), tmp_path, minor, f"python{minor}", "2.11") == tmp_path / minor / "bin"
    cache = {"UV_CACHE_DIR": str(tmp_path / "cache")}
    assert ran == [
        each
        for minor in ("3.10", "3.14")
        for each in (
            (f"python{minor}", "-m", "venv", f"{tmp_path}/{minor}", {}),
            ("uv", "pip", "install", "--quiet", "--python", f"{tmp_path}/{minor}", "torch==2.11.*", cache),
        )
    ]


def test_a_wheel_for_others_names_its_torch(check_wheel: ModuleType) -> None:
    check_wheel.check_metadata(Path(NAME), METADATA, "2.11")
    for name, metadata in (
        (NAME, METADATA.replace("==2.11.*", ">=2.11")),
        (NAME, METADATA.replace("+torch211", "")),
        (NAME.replace("manylinux_2_28", "linux"), METADATA),
        (NAME, METADATA + "Requires-Dist: nvidia-nccl-cu13\n"),
    ):
        with pytest.raises(AssertionError):
            check_wheel.check_metadata(Path(name), metadata, "2.11")
    with pytest.raises(AssertionError):
        check_wheel.check_metadata(Path(NAME), METADATA, "2.15")


def test_a_wheel_of_this_machine_takes_newer_torches(check_wheel: ModuleType) -> None:
    metadata = METADATA.replace("==2.11.*", ">=2.11").replace("+torch211", "")
    check_wheel.check_metadata(Path("nccl_ep-0.3.0-cp312-cp312-linux_x86_64.whl"), metadata, None)
    with pytest.raises(AssertionError):
        check_wheel.check_metadata(Path(NAME), METADATA, None)


def test_the_libraries_of_a_wheel_are_those_it_should_have(check_wheel: ModuleType) -> None:
    names = [
        "nccl_ep/_C.so", "nccl_ep/libnccl_ep_gin_2.30.7.so", "nccl_ep/py.typed", "nccl_ep-1.dist-info/licenses/LICENSE",
        *(f"nccl_ep/deep_ep/shims/{name}" for name in check_wheel.SHIMS),
    ]  # fmt: skip
    check_wheel.check_names(names, ["2.30.7"])
    for gin, more in (([], []), (["2.30.7", "2.31.2"], []), (["2.30.7"], ["records/a.json"])):
        with pytest.raises(AssertionError):
            check_wheel.check_names(names + more, gin)
