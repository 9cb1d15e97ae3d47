"""One rank's server: prefill of new requests in high throughput, decoding of all in low latency.

All ranks step together, since an exchange is collective. A rank with nothing to do takes part with no tokens. Shapes
are fixed: a prefill has room for ``prefill_batch`` prompts, a decode step for ``slots`` requests, and tokens that do
not exist have no expert (id -1). So a request's bits do not depend on what else is served, nor on its home rank, nor
on whether a step is made in two batches.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .exchange import NcclEp
from .model import Block, Exchange, Model

Steps = Generator[None, None, None]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass
class Room:
    """Of a rank: requests at a time, tokens of a request, prompts of a prefill and tokens of a prompt, at most."""

    slots: int
    max_length: int
    prefill_batch: int
    max_prompt: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, must be 1 or more")
        if self.max_length % 16:
            raise ValueError(f"max_length is {self.max_length}, must be a multiple of 16, as attention's masks are")
        if self.max_prompt >= self.max_length:
            raise ValueError(f"max_prompt is {self.max_prompt}, must be less than max_length, {self.max_length}")

    def why_not(self, prompt: Tensor, length: int, vocabulary: int) -> str | None:
        """What keeps a request of ``length`` tokens to generate from a slot, or None."""
        is_tensor = isinstance(prompt, Tensor) and prompt.layout == torch.strided and not prompt.is_meta
        if not is_tensor or prompt.dim() != 1 or prompt.dtype not in INTEGERS:
            return "its prompt is no tensor of whole numbers with one dimension"
        if not 1 <= len(prompt) <= self.max_prompt:
            return f"its prompt has {len(prompt)} tokens, must have 1 to {self.max_prompt}"
        if type(length) is not int or length < 1:
            return f"it wants {length} tokens, must be a whole number of 1 or more"
        if len(prompt) + length > self.max_length:
            return f"its prompt of {len(prompt)} and {length} tokens more do not fit, a slot has {self.max_length}"
        tokens = prompt.long()  # eight bits have no number of the vocabulary's size
        outside = tokens[(tokens < 0) | (tokens >= vocabulary)].tolist()
        return f"its prompt has the token {outside[0]}, must be 0 to {vocabulary - 1}" if outside else None


class Engine:
    """``decoders``: an exchange for all slots, or (two-batch overlap) two NcclEp for one half of the slots each."""

    def __init__(self, model: Model, room: Room, prefiller: Exchange, decoders: list[Any], graphs: bool) -> None:
        sizes, device = model.sizes, model.embedding.device
        self.model, self.room, self.prefiller, self.decoders = model, room, prefiller, decoders
        if room.slots % len(decoders):
            raise ValueError(f"{room.slots} slots are not a multiple of {len(decoders)} batches")
        # A slot more, for prompts that are not there.
        shape = (sizes.layers, room.slots + 1, sizes.heads, room.max_length, sizes.hidden // sizes.heads)
        try:
            self.keys = torch.zeros(shape, dtype=model.dtype, device=device)
            self.values = torch.zeros_like(self.keys)
        except RuntimeError as error:  # of torch: how many bytes
            raise MemoryError(
                f"no room for {room.slots} slots (--slots) of {room.max_length} tokens (--max-length, or --prompt and "
                "--output)"
            ) from error
        self.tokens = torch.zeros(room.slots + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.active = torch.zeros(room.slots + 1, dtype=torch.bool, device=device)
        self.logits = torch.zeros(room.slots + 1, sizes.vocabulary, device=device)
        self.places = torch.arange(room.max_length, device=device)
        self.host_active = [False] * room.slots
        self.graph: torch.cuda.CUDAGraph | None = None
        if graphs:
            self._capture()

    # ---- Prefill

    @torch.no_grad()
    def prefill(self, prompts: dict[int, Tensor]) -> None:
        """prompts: by slot. Collective; a rank may have none. ``tokens`` has the first token of each afterwards."""
        model, room, device = self.model, self.room, self.tokens.device
        if not prompts:
            self._nothing(self.prefiller)
            return
        batch, length = room.prefill_batch, room.max_prompt
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        lengths, slots = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), room.slots)
        for row, (slot, prompt) in enumerate(prompts.items()):
            tokens[row, : len(prompt)], lengths[row], slots[row] = prompt, len(prompt), slot
        tokens, lengths, slots = tokens.to(device), lengths.to(device), slots.to(device)
        is_token = self.places[:length] < lengths.unsqueeze(1)  # [B, P]
        x = F.embedding(tokens, model.embedding).to(model.dtype)
        for layer, block in enumerate(model.blocks):
            q, k, v = block.attention.project(block.attention_norm(x), self.places[:length])
            self.keys[layer, slots, :, :length], self.values[layer, slots, :, :length] = k, v
            x = x + block.attention.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            hidden = block.moe_norm(x)
            weights, idx, _ = block.moe.router(hidden)
            idx = torch.where(is_token.unsqueeze(-1), idx, -1)
            args = (each.flatten(0, 1) for each in (hidden, idx, weights))
            x = x + self.prefiller(*args, block.moe.experts).view_as(x) + block.moe.shared(hidden)
        last = x[torch.arange(batch, device=device), (lengths - 1).clamp(min=0)]
        logits = model.head(model.norm(last)).float()
        self.logits[slots], self.tokens[slots], self.positions[slots] = logits, logits.argmax(-1), lengths
        self.tokens[room.slots], self.positions[room.slots] = 0, 0
        for slot in prompts:
            self.host_active[slot] = True
        self._show_active()

    def digest(self, slot: int, length: int) -> list[int]:
        """A number for each layer, of the bits of the first keys and values in a slot."""
        bits = torch.stack([self.keys[:, slot, :, :length], self.values[:, slot, :, :length]], 1).flatten(1)
        words = bits.view({2: torch.int16, 4: torch.int32}[bits.element_size()]).long()
        places = torch.arange(1, words.shape[1] + 1, device=words.device)
        return (words * places).sum(1).tolist()

    def _nothing(self, exchange: Any) -> None:
        """This rank's part of a step in which it has no token: its experts work for the others."""
        sizes, device = self.model.sizes, self.tokens.device
        x = torch.zeros(0, sizes.hidden, dtype=self.model.dtype, device=device)
        idx = torch.zeros(0, sizes.topk, dtype=torch.int64, device=device)
        for block in self.model.blocks:
            exchange(x, idx, torch.zeros(idx.shape, device=device), block.moe.experts)

    # ---- Decode

    def release(self, slots: list[int]) -> None:
        """Their requests are done."""
        for slot in slots:
            self.host_active[slot] = False
        if slots:
            self._show_active()

    def state(self) -> tuple[Tensor, Tensor, list[bool]]:
        """What a step changes beside the cache, for ``restore``."""
        return self.tokens.clone(), self.positions.clone(), list(self.host_active)

    def restore(self, state: tuple[Tensor, Tensor, list[bool]]) -> None:
        """As if the steps since had not been done: what they have left in the cache is written again."""
        tokens, positions, active = state
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.host_active = list(active)
        self._show_active()

    def _show_active(self) -> None:
        self.active[: self.room.slots] = torch.tensor(self.host_active).to(self.active.device)

    @torch.no_grad()
    def decode(self) -> None:
        """A token more for each active slot, in ``tokens``. Collective. On a GPU it is queued, and not awaited."""
        if self.graph is not None:
            self.graph.replay()
        elif not any(self.host_active) and len(self.decoders) == 1:
            self._nothing(self.decoders[0])
        else:
            self._decode()

    def _decode(self) -> None:
        """Batches in turn: while the rows of one travel, the other computes."""
        share = self.room.slots // len(self.decoders)
        running = [
            self._steps(slice(number * share, (number + 1) * share), exchange)
            for number, exchange in enumerate(self.decoders)
        ]
        while running:
            running = [steps for steps in running if next(steps, "done") != "done"]

    def _steps(self, slots: slice, exchange: Any) -> Steps:
        model, batch = self.model, slots.stop - slots.start
        positions = self.positions[slots]
        x = F.embedding(self._as_all(self.tokens[slots]), model.embedding).to(model.dtype).unsqueeze(1)  # [S, 1, H]
        for layer, block in enumerate(model.blocks):
            x = x + self._attend(layer, block, slots, x, positions)
            hidden = block.moe_norm(x).squeeze(1)
            weights, idx, _ = block.moe.router(hidden)
            idx = torch.where(self.active[slots].unsqueeze(-1), idx[:batch], -1)
            given = hidden[:batch], idx, weights[:batch], block.moe.experts
            if len(self.decoders) == 1:
                routed = exchange(*given)
                shared = block.moe.shared(hidden)
            else:
                halves = exchange.in_halves(*given)
                next(halves)  # rows are under way
                shared = block.moe.shared(hidden)
                yield
                routed = yield from halves
            x = x + (self._as_all(routed) + shared).unsqueeze(1)
        logits = model.head(model.norm(x.squeeze(1)))[:batch].float()
        active = self.active[slots]
        self.logits[slots] = logits
        self.tokens[slots] = torch.where(active, logits.argmax(-1), self.tokens[slots])
        self.positions[slots] += active

    def _attend(self, layer: int, block: Block, slots: slice, x: Tensor, positions: Tensor) -> Tensor:
        """Over the whole cache, whatever is in it: what lies past a request's position is masked."""
        projected = block.attention.project(block.attention_norm(x), self._as_all(positions).unsqueeze(1))
        q, k, v = (each[: len(positions)] for each in projected)
        keys, values = self.keys[layer, slots], self.values[layer, slots]
        rows = torch.arange(len(positions), device=x.device)
        keys[rows, :, positions], values[rows, :, positions] = k.squeeze(2), v.squeeze(2)
        mask = (self.places <= positions.unsqueeze(1))[:, None, None]  # [B, 1, 1, max_length]
        return block.attention.finish(self._as_all(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)))

    def _as_all(self, batch: Tensor) -> Tensor:
        """[B, ..] to [S, ..], as many as there are slots. A batch of fewer computes at the shape of all, since a GEMM
        of another shape has other bits."""
        missing = self.room.slots - len(batch)
        return F.pad(batch, (0, 0) * (batch.dim() - 1) + (0, missing)) if missing else batch

    @torch.no_grad()
    def _capture(self) -> None:
        """A decode step as a CUDA graph: routing, batch and positions are read when it is replayed."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._decode()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._decode()
        self.graph = graph


def fixed_shape_exchange(buffer: Any, num_experts: int, mode: str, max_tokens: int, grouped: bool) -> NcclEp:
    """An exchange whose GEMMs have the same shape in every step: room for all rows that could come.

    A grouped GEMM takes the rows that are there, and on a GPU does not wait for their number. A batched one takes all
    that there is room for: more work, but one shape even for the CPU, whose GEMMs have other bits for other shapes.
    """
    layout = "packed" if grouped else "expert_major"
    return NcclEp(buffer, num_experts, mode=mode, layout=layout, rows="all", trains=False, max_tokens=max_tokens)
