"""Files that are whole at any time, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """What has been made, renamed or removed in it outlives a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Writes beside ``path`` and renames: others see the file of before or the new one. OSError names ``path``.

    What is no file, as /dev/null and a pipe are, stays what it is, and a link leads where it did.
    """
    if path.parts[:2] in (("/", "dev"), ("/", "proc")) or (path.exists() and not path.is_file()):
        with open(path, "a") as stream:
            stream.write(text)
        return
    path = Path(os.path.realpath(path))
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open(beside, "x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
