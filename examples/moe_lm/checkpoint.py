"""Checkpoints: a folder that has one whole checkpoint at any time, for any number of ranks.

FOLDER/checkpoint.json          the model's sizes, the step, and of each tensor its file, place, shape and CRC-32
FOLDER/data-STEP-RANDOM/R.bin   the tensors that rank R wrote, one after the other, as float32 numbers

``save`` writes a new data folder beside the old one, and then a new checkpoint.json in the place of the old one, by one
rename. Before it the folder has the old checkpoint, after it the new one. The old data goes when all ranks are done.
``load`` reads JSON and numbers: nothing is unpickled. Each expert has a name of its own, so that it finds any rank.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from .files import sync_folder, write_whole
from .model import Model
from .sizes import Sizes

FORMAT = "examples.moe_lm checkpoint, version 1"
INDEX = "checkpoint.json"
_DATA = re.compile(r"data-\d+-[0-9a-f]{8}")  # folders that save() has made, and files that it has begun
_BEGUN = re.compile(re.escape(INDEX) + r"\.[0-9a-f]{8}\.new")
T = TypeVar("T")


class CheckpointError(RuntimeError):
    """The text names the folder or the file, and says what is wrong with it."""


@dataclass(frozen=True)
class Place:
    """Of a tensor. ``file``: in the data folder. ``first``: its first byte there."""

    file: str
    first: int
    shape: list[int]
    crc32: int

    @property
    def bytes(self) -> int:
        return 4 * math.prod(self.shape)


@dataclass(frozen=True)
class Index:
    """What checkpoint.json says. ``data``: the name of the data folder."""

    step: int
    sizes: dict[str, int]
    data: str
    tensors: dict[str, Place]


# ---- What is saved


def _named(model: Model, values: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors shaped as parameters, under the names that they have in a checkpoint."""
    first = model.rank * model.blocks[0].moe.experts.count
    named = {}
    for name, value in values.items():
        if ".experts." in name:
            named |= {f"{prefix}{name}.{first + own}": part for own, part in enumerate(value.detach())}
        else:
            named[prefix + name] = value.detach()
    return named


def _moments(model: Model, optimiser: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Of AdamW, by the parameters' names; zeros before the first step."""
    found: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in model.named_parameters():
        state = optimiser.state[parameter]
        if not state:
            on_device = parameter.device if parameter.is_cuda else "cpu"
            state |= {"step": torch.zeros((), dtype=torch.float32, device=on_device)}
            state |= {moment: torch.zeros_like(parameter) for moment in found}
        for moment, values in found.items():
            values[name] = state[moment]
    return found


def _state(model: Model, optimiser: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    state = _named(model, dict(model.named_parameters()), "model.")
    if optimiser is not None:
        for moment, values in _moments(model, optimiser).items():
            state |= _named(model, values, f"{moment}.")
    return state


# ---- Save


def prepare(folder: str) -> None:
    """Collective, before there is anything to save: makes the folder. All raise where that fails."""
    _on_rank_0(folder, lambda: Path(folder).mkdir(parents=True, exist_ok=True))


def save(folder: str, model: Model, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Collective. ``model``: not the wrapper around it. If a rank fails, all raise, and the old checkpoint stays."""
    rank = _rank()
    state = _state(model, optimiser)
    owners: dict[str, int] = {}  # by name: the first rank that has the tensor
    for number, names in enumerate(_all_ranks(folder, lambda: list(state))):
        for name in names:
            owners.setdefault(name, number)
    mine = {}
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # collective
        if owners[name] == rank:
            mine[name] = whole.cpu()
    data = _on_rank_0(folder, lambda: _make_data_folder(folder, step))
    try:
        parts = _all_ranks(folder, lambda: _write_tensors(Path(folder, data, f"{rank}.bin"), mine))
        places = {name: place for part in parts for name, place in part.items()}
        index = Index(step, asdict(model.sizes), data, places)
        _on_rank_0(folder, lambda: _replace_index(folder, index))
    except CheckpointError:
        if rank == 0:
            _remove_other_data(folder)
        raise
    if rank == 0:
        _remove_other_data(folder)


def _make_data_folder(folder: str, step: int) -> str:
    name = f"data-{step}-{secrets.token_hex(4)}"
    Path(folder, name).mkdir(parents=True)
    sync_folder(Path(folder).parent)
    return name


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    if not tensors:
        return places
    try:
        with open(path, "xb") as file:
            for name, tensor in tensors.items():
                if tensor.dtype != torch.float32:
                    raise ValueError(f"{name} is {tensor.dtype}, must be torch.float32")
                numbers = memoryview(tensor.contiguous().numpy()).cast("B")
                places[name] = Place(path.name, file.tell(), list(tensor.shape), zlib.crc32(numbers))
                file.write(numbers)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return places


def _replace_index(folder: str, index: Index) -> None:
    """From now on the folder has the new checkpoint."""
    _check_files(folder, index)  # a rank of another machine may have written into another folder of this name
    sync_folder(Path(folder, index.data))
    sync_folder(Path(folder))
    write_whole(Path(folder, INDEX), json.dumps({"format": FORMAT} | asdict(index)) + "\n")


def _remove_other_data(folder: str) -> None:
    """Data folders that checkpoint.json does not name: of older checkpoints, and of a save() that was ended."""
    try:
        kept = read_index(folder).data
    except CheckpointError:  # a first save() failed
        kept = ""
    for path in Path(folder).glob("*"):
        if _DATA.fullmatch(path.name) and path.name != kept:
            shutil.rmtree(path, ignore_errors=True)
        elif _BEGUN.fullmatch(path.name):
            path.unlink(missing_ok=True)


# ---- Load


def load(folder: str, model: Model, optimiser: torch.optim.Optimizer | None = None) -> int:
    """Collective. Reads this rank's tensors in place, and returns the number of steps that were made.

    If anything is wrong all ranks raise, and the tensors are as they were.
    """
    state = _state(model, optimiser)
    index: Index = _on_rank_0(folder, lambda: check(folder, model.sizes))
    values: dict[str, Tensor] = {}
    _all_ranks(folder, lambda: values.update({name: _read_tensor(folder, index, name, state[name]) for name in state}))
    for name, tensor in state.items():
        value = values.pop(name).to(tensor.device)
        if isinstance(tensor, DTensor):  # its own part of what every rank has
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(value)
    if optimiser is not None:
        for parameter in model.parameters():
            optimiser.state[parameter]["step"].fill_(index.step)
    return index.step


def check(folder: str, sizes: Sizes) -> Index:
    """What the checkpoint of --load says, if it is one of this model and its files are there. Reads no tensor."""
    try:
        return _checked(folder, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"--load is {folder}: {error}") from error


def _checked(folder: str, sizes: Sizes) -> Index:
    index = read_index(folder)
    if index.sizes != asdict(sizes):
        names = index.sizes.keys() | asdict(sizes).keys()
        there, here = ({name: each.get(name) for name in names} for each in (index.sizes, asdict(sizes)))
        differ = [f"{name} is {there[name]} there and {here[name]} here" for name in sorted(names)]
        differ = [text for name, text in zip(sorted(names), differ, strict=True) if there[name] != here[name]]
        raise CheckpointError(f"{folder} has a model of other sizes: {', '.join(differ)}")
    _check_files(folder, index)
    return index


def read_index(folder: str) -> Index:
    path = Path(folder, INDEX)
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is no folder")
    if not path.exists():
        raise CheckpointError(f"{folder} is no checkpoint of examples.moe_lm.train: it has no {INDEX}")
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, it is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f'{path} does not say "format": "{FORMAT}", so it is not of this program')
    try:
        tensors = {name: Place(**place) for name, place in found["tensors"].items()}
        index = Index(found["step"], dict(found["sizes"].items()), found["data"], tensors)
        _require_whole("step", index.step)
        if not _DATA.fullmatch(index.data):
            raise ValueError(f"data is {index.data!r}, no folder of save()")
        for name, place in tensors.items():
            _require_whole(name, place.first, place.crc32, *place.shape)
            if not re.fullmatch(r"\d+\.bin", place.file):
                raise ValueError(f"{name} is in {place.file!r}, no file of save()")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return index


def _require_whole(name: str, *numbers: int) -> None:
    """Whole numbers of 64 bits, not negative: JSON has others, too."""
    for each in numbers:
        if type(each) is not int or not 0 <= each < 1 << 63:
            raise ValueError(f"{name} has {each!r}, must be a whole number of 0 or more")


def _check_files(folder: str, index: Index) -> None:
    if Path(folder, index.data).is_symlink():
        raise CheckpointError(f"{Path(folder, index.data)} is a link, must be a folder")
    ends: dict[str, int] = {}
    for place in index.tensors.values():
        ends[place.file] = max(ends.get(place.file, 0), place.first + place.bytes)
    for file, size in ends.items():
        path = Path(folder, index.data, file)
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link, must be a file")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, must have {size}")


def _read_tensor(folder: str, index: Index, name: str, like: Tensor) -> Tensor:
    place = index.tensors.get(name)
    if place is None or place.shape != list(like.shape):
        raise CheckpointError(f"{Path(folder, INDEX)} has no tensor {name} of shape {list(like.shape)}")
    path = Path(folder, index.data, place.file)
    numbers = bytearray(place.bytes)
    try:
        with open(path, "rb") as file:
            file.seek(place.first)
            count = file.readinto(numbers)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if count != len(numbers) or zlib.crc32(numbers) != place.crc32:
        raise CheckpointError(f"{path} is damaged: {name} has another CRC-32 than {INDEX} says")
    return torch.frombuffer(numbers, dtype=torch.float32).view(place.shape)


# ---- All ranks or none


def _all_ranks(folder: str, action: Callable[[], T]) -> list[Any]:
    """Collective: what ``action`` gives on every rank. If one fails, all raise with its words."""
    mine: tuple[Any, str] = (None, "")
    try:
        mine = (action(), "")
    except CheckpointError as error:
        mine = (None, str(error))
    except Exception as error:
        mine = (None, f"{folder}: {type(error).__name__}: {error}")
    found: list[Any] = [mine]
    if dist.is_initialized():
        found *= dist.get_world_size()
        try:
            dist.all_gather_object(found, mine)
        except RuntimeError as error:
            raise CheckpointError(f"{folder}: a rank is gone: {error}") from error
    for rank, (_, error) in enumerate(found):
        if error:
            raise CheckpointError(f"{error} (rank {rank})")
    return [value for value, _ in found]


def _on_rank_0(folder: str, action: Callable[[], T]) -> T:
    """Collective: what ``action`` gives on rank 0, on all ranks."""
    found: T = _all_ranks(folder, lambda: action() if _rank() == 0 else None)[0]
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
