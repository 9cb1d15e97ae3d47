"""Arguments of the command lines: a mistake is one line, which names the argument and its value."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

MAX_SEED = 2**32 - 1
_MOST_NAME = 200  # bytes, of a file beside which another is written first
MOST = 2**31 - 1  # of any whole number that has no other limit


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without argparse's usage, which would come first."""
        message = re.sub(r"^argument (\S+): is ", r"\1 is ", message)
        self.exit(2, f"{self.prog}: {message}\n")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an argument: a whole number in this range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"is {text}, must be a whole number of {_range(least, most)}")
        if most is None and value > MOST:
            raise argparse.ArgumentTypeError(f"is {text}, must be at most {MOST}")
        return value

    return parse


def _range(least: int, most: int | None) -> str:
    return f"{least} or more" if most is None else f"{least} to {most}"


def number(text: str, least: float = 0.0, above: bool = False) -> float:
    """A finite number of ``least`` or more; ``above``: of more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least or (above and value == least):
        wanted = f"above {least:g}" if above else f"of {least:g} or more"
        raise argparse.ArgumentTypeError(f"is {text}, must be a number {wanted}")
    return value


def above_0(text: str) -> float:
    return number(text, above=True)


def numbers(text: str) -> list[float]:
    """With commas between them."""
    return [number(each) for each in text.split(",")]


def names_of(known: Sequence[str]) -> Callable[[str], str]:
    """The type of an argument: names of these, with commas between them, each once."""

    def check(text: str) -> str:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"is {text}: {', '.join(unknown)} is none of {', '.join(known)}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"is {text}, names something twice")
        return text

    return check


def pair(least: int) -> Callable[[str], tuple[int, int]]:
    """A-B, two whole numbers of ``least`` or more, the lower one first; or A for A-A."""

    def parse(text: str) -> tuple[int, int]:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if not least <= low <= high:
            raise argparse.ArgumentTypeError(f"is {text}, must be A-B with {least} <= A <= B")
        if high > MOST:
            raise argparse.ArgumentTypeError(f"is {text}, must be at most {MOST}")
        return low, high

    return parse


def file_to_write(text: str) -> str:
    """Its folder exists, or can be made."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}, a folder; must be a file to write")
    if (length := len(os.fsencode(path.name))) > _MOST_NAME:
        raise argparse.ArgumentTypeError(f"has a name of {length} bytes, must have at most {_MOST_NAME}")
    folder_to_write(str(path.parent))
    return text


def folder_to_write(text: str) -> str:
    """It is a folder that can be written to, or can be made one."""
    there = next(path for path in (Path(text), *Path(text).absolute().parents) if path.exists() or path.is_symlink())
    if not text or not there.is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"is {text!r}: {there} cannot be written to")
    return text


def require_outside(report: str | None, name: str, folder: str | None) -> None:
    """ValueError where --report would write into the checkpoint of the argument ``name``."""
    if report and folder:
        place = Path(folder).resolve()
        if place in (Path(report).resolve(), *Path(report).resolve().parents):
            raise ValueError(f"--report is {report}, in the checkpoint of {name}, {folder}: must be outside of it")
