"""Sizes of the model: named ones, each number of which the command line can change."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace

import torch

from .arguments import whole

MAX_TOPK, MAX_ROW_BYTES, MAX_EXPERTS_OF_A_RANK = 32, 1 << 16, 65534  # of the library


@dataclass(frozen=True)
class Sizes:
    """``experts``: of all ranks. ``expert_inner``, ``shared_inner``: between the two GEMMs of a SwiGLU."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    experts: int = 8
    topk: int = 2
    expert_inner: int = 64
    shared_inner: int = 64
    vocabulary: int = 256  # bytes

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"--{argument(field.name)} is {value}, must be 1 or more")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(f"--hidden is {self.hidden}, must be an even multiple of --heads, {self.heads}")
        if self.topk > min(self.experts, MAX_TOPK):
            raise ValueError(f"--topk is {self.topk}, must be at most {MAX_TOPK} and at most --experts, {self.experts}")

    def check_ranks(self, num_ranks: int) -> None:
        """Can they share the experts?"""
        if self.experts % num_ranks:
            raise ValueError(f"--experts is {self.experts}, must be a multiple of the {num_ranks} ranks with experts")
        if self.experts > MAX_EXPERTS_OF_A_RANK * num_ranks:
            raise ValueError(f"--experts is {self.experts}, must be at most {MAX_EXPERTS_OF_A_RANK} on a rank")


def argument(name: str) -> str:
    """Of the command line."""
    return name.replace("_", "-")


# Parameters take 16 bytes each in training: float32, its gradient, two moments.
NAMED = {
    "tiny": Sizes(),
    "small": Sizes(512, 4, 8, 16, 4, 512, 1024),
    "h2048": Sizes(2048, 4, 16, 64, 8, 1024, 2048),
    "h4096": Sizes(4096, 4, 32, 64, 8, 1024, 2048),
    "h4096-one-gpu": Sizes(4096, 2, 32, 64, 8, 1024, 2048),
    "h7168": Sizes(7168, 1, 56, 128, 8, 1024, 2048),
    "h7168-256": Sizes(7168, 2, 56, 256, 8, 2048, 2048),  # of some GPUs' memory
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sizes of the model")
    group.add_argument("--size", choices=NAMED, help='default "tiny" on the CPU, "h4096" or "h4096-one-gpu" on GPUs')
    for field in fields(Sizes):
        if field.name != "vocabulary":
            group.add_argument(f"--{argument(field.name)}", type=whole(1), metavar="N")
    group.add_argument(
        "--dtype", choices=DTYPES, help="of activations and GEMMs; default fp32 on the CPU, bf16 on GPUs"
    )


def sizes_of(options: argparse.Namespace, device_type: str, num_ranks: int) -> Sizes:
    name = options.size
    if name is None:
        name = "tiny" if device_type == "cpu" else "h4096" if num_ranks > 1 else "h4096-one-gpu"
    given = {field.name: getattr(options, field.name, None) for field in fields(Sizes)}
    found = replace(NAMED[name], **{field: value for field, value in given.items() if value is not None})
    row_bytes = found.hidden * dtype_of(options, device_type).itemsize
    if row_bytes % 16 or row_bytes > MAX_ROW_BYTES:
        raise ValueError(f"--hidden is {found.hidden}, rows must be multiples of 16 bytes up to {MAX_ROW_BYTES}")
    return found


def dtype_of(options: argparse.Namespace, device_type: str) -> torch.dtype:
    return DTYPES[options.dtype or ("fp32" if device_type == "cpu" else "bf16")]
