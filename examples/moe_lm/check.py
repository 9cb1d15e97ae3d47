"""Whether what was served is right: against one rank that has all experts, and against serving requests alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .load import Request, make_load
from .model import Model
from .one_rank import one_rank

if TYPE_CHECKING:
    from .serve import Server


def _requests(server: Server, count: int) -> list[Request]:
    options = server.options
    how: Any = {"prompt": options.prompt, "output": options.output, "seed": options.seed}
    return make_load(count, 0, server.world.size, **how)


@torch.no_grad()
def differences(model: Model, request: Request, gap: float) -> tuple[int, int]:
    """Tokens that one rank would not have chosen, given those before: where its logits of the two are within ``gap``
    of each other, and where they are not."""
    text = torch.cat([request.prompt, torch.tensor(request.tokens)]).to(model.embedding.device)
    logits = model(text[:-1].unsqueeze(0))[0][0, len(request.prompt) - 1 :].cpu()
    tokens = torch.tensor(request.tokens).unsqueeze(-1)
    behind = logits.max(-1).values - logits.gather(-1, tokens).squeeze(-1)
    return int(((behind > 0) & (behind <= gap)).sum()), int((behind > gap).sum())


def compare_with_one_rank(server: Server, count: int) -> dict[str, int]:
    """Collective. On rank 0: tokens compared, and those that differ."""
    from .serve import gather

    requests = _requests(server, count)
    server.serve(requests, keep_logits=True)
    served = gather(server.world, requests)
    server.reference = served  # for count_changed
    found = {"tokens": sum(len(each.tokens) for each in served), "close": 0, "different": 0}
    if server.world.rank == 0:
        alone = one_rank_model(server)
        for each in served:
            close, different = differences(alone, each, server.options.gap)
            found["close"] += close
            found["different"] += different
    return found


def one_rank_model(server: Server) -> Model:
    """All experts here, seeded alike. (Of a checkpoint the parts are gathered by its loader, on all ranks.)"""
    if server.options.load:
        raise ValueError("--check compares seeded weights; tests compare loaded ones")
    with server.world.device:
        model = Model(server.sizes, dtype=server.model.dtype)
    model.initialise(server.options.seed)
    model.for_serving().use(one_rank)
    return model


def count_changed(server: Server, count: int = 4) -> dict[str, Any]:
    """Collective. Serves all requests again, then some alone at another home: all logits should have the same bits.

    On rank 0: how many requests changed, and of those served alone the first token that did, and by how much at most.
    """
    from .serve import gather

    again = [replace(each, tokens=[], times=[], logits=[]) for each in server.reference]
    server.serve(again, keep_logits=True)
    pairs = list(zip(server.reference, gather(server.world, again), strict=True))
    alone = []
    for before in server.reference[:count]:
        moved = replace(before, home=(before.home + 1) % server.world.size, tokens=[], times=[], logits=[])
        server.serve([moved], keep_logits=True)
        alone += [(before, *gather(server.world, [moved]))]
    changes = [change for one, other in alone if (change := _first_change(one, other)) is not None]
    return {
        "served_again": len(pairs), "changed_again": sum(_first_change(*pair) is not None for pair in pairs),
        "served_alone": len(alone), "changed_alone": len(changes),
        "first_changes": [token for token, _ in changes],
        "largest_first_change": max((by for _, by in changes), default=0.0),
    }  # fmt: skip


def _first_change(one: Request, other: Request) -> tuple[int, float] | None:
    """The first token whose logits have other bits, and the largest difference of these."""
    for token, (a, b) in enumerate(zip(one.logits, other.logits, strict=True)):
        if not torch.equal(a, b):
            return token, float((a - b).abs().max())
    return None
