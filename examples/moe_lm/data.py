"""Text that every machine has: the source of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

HELD_OUT = 0.1  # the last share of the text: prompts to serve, and a loss that training has not seen


def read_text(max_bytes: int) -> torch.Tensor:
    """uint8 [at most ``max_bytes``]: the files of the library's folder, in the order of their names."""
    texts: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_bytes())
        size += len(texts[-1])
        if size >= max_bytes:
            break
    if not texts:
        raise FileNotFoundError(f"no *.py in {sysconfig.get_paths()['stdlib']}: this Python came without its source")
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)[:max_bytes]


class Corpus:
    """``batch`` draws the same sequences for the same seed and step, whatever the number of ranks."""

    def __init__(self, seed: int = 0, max_bytes: int = 4 << 20) -> None:
        text = read_text(max_bytes)
        split = int(len(text) * (1 - HELD_OUT))
        self.training, self.held_out = text[:split], text[split:]
        self.seed = seed

    def check(self, argument: str, tokens: int, text: torch.Tensor) -> None:
        """ValueError if ``text``, ``training`` or ``held_out``, has no stretch of so many tokens and one more."""
        if tokens + 2 > len(text):
            raise ValueError(f"{argument} is {tokens}, must be at most {len(text) - 2}, as there is no more text")

    def batch(self, step: int, sequences: int, length: int, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
        """int64 [sequences / num_ranks, length + 1]: this rank's part of a batch of ``sequences``."""
        if sequences % num_ranks:
            raise ValueError(f"a batch of {sequences} sequences is not a multiple of {num_ranks} ranks")
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.training) - length - 1, (sequences,), generator=draw)
        own = starts.view(num_ranks, -1)[rank]
        return torch.stack([self.training[start : start + length + 1] for start in own.tolist()]).long()

    def prompt(self, number: int, length: int) -> torch.Tensor:
        """int64 [length] of the text that is held out."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        start = int(torch.randint(len(self.held_out) - length, (1,), generator=draw))
        return self.held_out[start : start + length].long()
