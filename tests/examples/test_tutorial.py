"""The commands of docs/tutorial.md, in their order. (Its blocks of Python are run by tests/docs.)"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.test_docs import BLOCK, run

SMALL = "--device cpu --ranks 2"


def test_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorial.md").read_text().replace("\\\n", "")
    commands = [line for match in BLOCK.finditer(text) if match[1] == "sh" for line in match[2].splitlines()]
    installing = [line for line in commands if line.startswith("pip install")]
    assert len(installing) == 1, "tested by the wheel's test"
    said = {}
    for line in commands:
        if line in installing:
            continue
        line = line.removeprefix("cd / && ")  # out of the clone, where Python finds its sources
        program, *arguments = shlex.split(line.replace("moe_lm_run", str(tmp_path)))
        assert program == "python" and arguments[0] == "-m", line
        name = arguments[1].rpartition(".")[2]
        if name == "pictures":
            pytest.importorskip("matplotlib")
        said[name] = run(*arguments, *(SMALL.split() if name in ("train", "serve") else []))
    assert list(said) == ["doctor", "train", "serve", "pictures"]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said["train"])]
    assert len(losses) == 40 and losses[-1] < losses[0]
    assert f"wrote {tmp_path}/checkpoint, a checkpoint of step 40" in said["train"]
    assert f"wrote {tmp_path}/train.json" in said["train"] and f"wrote {tmp_path}/serve.json" in said["serve"]
    assert "ms in dispatch and combine" in said["train"]
    assert said["serve"].count("TPOT") == 2 * 4
    drawn = {path.stem for path in tmp_path.glob("*.svg")}
    assert drawn == {"training_h64", "training_layer_h64", "serving_h64"}
    assert drawn == {path.stem for path in tmp_path.glob("*.png")}
