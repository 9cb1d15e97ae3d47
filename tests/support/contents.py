"""What stands in the tensors of generated cases."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Two FP4 numbers an element, and exponents alone: torch can do little more than move them; older ones lack them.
_NEW_DTYPES = ("float4_e2m1fn_x2", "float8_e8m0fnu")
FP4, EXPONENTS = (tuple(getattr(torch, name) for name in [name] if hasattr(torch, name)) for name in _NEW_DTYPES)
# words: patterns that a protocol could take for its own. special: infinities, NaN, extremes. few: few distinct values,
# most of them zeros of both signs. Numbers that are not floats have no special ones, and are never few.
CONTENTS = ("plain", "words", "special", "few")

# Patterns that a protocol with flags inside its data could take for a flag.
_WORDS = np.array([0xFFFFFFFF, 0xFFFFFFFE, 0], dtype=np.uint32)


def as_bytes(tensor: Tensor) -> Tensor:
    """Tensors of FP4 and EXPONENTS as uint8, for torch can neither index nor convert them all; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in FP4 + EXPONENTS else tensor


def tensor_of(array: np.ndarray) -> Tensor:
    """A copy with the strides that torch itself gives; an empty numpy array would bring strides of 0."""
    return torch.from_numpy(array).clone(memory_format=torch.contiguous_format)


def content_of(rng: np.random.Generator, rows: int, width: int, dtype: torch.dtype, content: str) -> Tensor:
    """[rows, width] of `dtype`: ordinary values, or one of the other CONTENTS."""
    if dtype in FLOATS:
        made = tensor_of(rng.standard_normal((rows, width), dtype=np.float32))
        if content == "special":
            _strew_special(rng, made, dtype)
        if content == "few":
            made = _few(rng, rows, width)
        made = made.to(dtype)
    else:
        size = dtype.itemsize
        made = tensor_of(rng.integers(0, 256, (rows, width * size), dtype=np.uint8)).view(dtype)
    return _with_words(rng, made) if content == "words" else made


def _with_words(rng: np.random.Generator, made: Tensor) -> Tensor:
    """A copy, some of whose words of 32 bits are those of a protocol."""
    rows, width = made.shape
    count = rows * width * made.dtype.itemsize
    raw = np.zeros(-(-count // 4) * 4, dtype=np.uint8)
    raw[:count] = made.reshape(-1).view(torch.uint8).numpy()
    words = raw.view(np.uint32)
    replaced = rng.random(words.shape) < rng.choice([0.05, 0.5, 1.0])
    words[replaced] = rng.choice(_WORDS, int(replaced.sum()))
    return tensor_of(raw[:count]).view(made.dtype).view(rows, width)


def _few(rng: np.random.Generator, rows: int, width: int) -> Tensor:
    """fp32 values of which so many are zeros that sums of -0 alone are common; 448 is the largest of E4M3."""
    minus = rng.choice([0.4, 0.7, 0.95])
    rest = (1 - minus) / 2
    picked = rng.choice([-0.0, 0.0, 1.0, -1.0, 448.0], (rows, width), p=[minus, rest, rest / 2, rest / 4, rest / 4])
    return tensor_of(picked.astype(np.float32))


def _strew_special(rng: np.random.Generator, made: Tensor, dtype: torch.dtype) -> None:
    """Puts zeros of both signs, denormals, extremes, infinities and NaN into fp32 values for `dtype`."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    values = [0.0, -0.0, tiny / 4, -tiny / 2, tiny, info.max, -info.max]
    # Infinities and NaN on their own occasion: where they are, they hide the rest of their sum.
    if rng.random() < 0.5:
        values += [float("inf"), float("-inf"), float("nan")]
    special = torch.tensor(values)
    where = tensor_of(rng.random(tuple(made.shape)) < rng.choice([0.05, 0.4]))
    picked = tensor_of(rng.integers(0, len(values), int(where.sum())))
    made[where] = special[picked]


def with_strides(rows: Tensor, strides: str) -> Tensor:
    """The same values, laid out otherwise in memory."""
    if strides == "column":
        return rows.t().contiguous().t()
    if strides == "padded":
        wide = rows.new_zeros(rows.shape[0], rows.shape[1] + 3)
        wide[:, 1 : 1 + rows.shape[1]] = rows
        return wide[:, 1 : 1 + rows.shape[1]]
    if strides == "aligned":  # every row begins at a multiple of 16 bytes
        wide = rows.new_zeros(rows.shape[0], -(-rows.shape[1] // 16) * 16)
        wide[:, : rows.shape[1]] = rows
        return wide[:, : rows.shape[1]]
    return rows
