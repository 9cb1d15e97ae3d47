"""Whether what was served is right: against one rank that has all experts, and against serving requests alone."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .engine import Engine
from .load import Request, make_load
from .model import Model
from .one_rank import AsServed, one_rank

if TYPE_CHECKING:
    from .server import Server


def _requests(server: Server, count: int) -> list[Request]:
    options = server.options
    how: Any = {"prompt": options.prompt, "output": options.output, "seed": options.seed}
    return make_load(count, 0, server.world.size, **how)


def compare_with_one_rank(server: Server, count: int) -> dict[str, Any]:
    """Collective. On rank 0: tokens compared, and those that one rank with all experts would not have chosen.

    One rank computes at the shapes that the server has, without the library: only the exchange differs. "close": its
    logits of the two tokens are within ``--gap`` of each other; "different": further apart; "largest_gap": how far at
    most; "changed_logits": requests whose logits have other bits there.

    How much shapes and rounding matter by themselves: "at_once_different", "at_once_gap": tokens that one rank would
    not have chosen that computes a whole text at once, and how far apart at most; "rounding": how far a logit served
    is at most from one of the same weights in float32. "logits": a digest of the bits of all that were served, which
    other ways of serving should have, too.
    """
    from .server import gather

    requests = _requests(server, count)
    server.serve(requests, keep_logits=True)
    served = gather(server.world, requests)
    server.reference = served  # for count_changed
    if server.world.rank != 0:
        return {}
    logits = [torch.stack(each.logits) for each in served]
    alone = one_rank_model(server)
    as_served = logits_as_served(server, alone, served)
    alone.use(one_rank)
    at_once = [logits_of(alone, each) for each in served]
    in_float32 = [logits_of(alone.in_float32(), each) for each in served]
    gap = server.options.gap
    if gap is None:
        gap = 0.0 if server.model.dtype == torch.float32 else 0.1
    behind, behind_at_once = _behind(as_served, served), _behind(at_once, served)
    return {
        "tokens": len(behind), "gap": gap, "close": int(((behind > 0) & (behind <= gap)).sum()),
        "different": int((behind > gap).sum()), "largest_gap": float(behind.max()),
        "changed_logits": sum(not torch.equal(*pair) for pair in zip(as_served, logits, strict=True)),
        "at_once_different": int((behind_at_once > 0).sum()), "at_once_gap": float(behind_at_once.max()),
        "rounding": max(float((a - b).abs().max()) for a, b in zip(logits, in_float32, strict=True)),
        "logits": _digest(served),
    }  # fmt: skip


def one_rank_model(server: Server) -> Model:
    """All experts here, seeded alike. (Of a checkpoint the parts are gathered by its loader, on all ranks.)"""
    if server.options.load:
        raise ValueError("--check compares seeded weights; tests compare loaded ones")
    with server.world.device:
        model = Model(server.sizes, dtype=server.model.dtype)
    model.initialise(server.options.seed)
    return model.for_serving()


@torch.no_grad()
def logits_as_served(server: Server, model: Model, requests: list[Request]) -> list[torch.Tensor]:
    """[tokens served, vocabulary] of each request: those of ``model`` on one rank, given the tokens before.

    They are served by an engine of the server's shapes.
    """
    room = server.room
    prefiller, decoder = (
        AsServed(server.world.size, server.buffers[0].domain_size, tokens, server.grouped)
        for tokens in (room.prefill_batch * room.max_prompt, room.slots)
    )
    model.use(prefiller)
    engine = Engine(model, room, prefiller, [decoder], graphs=False)
    found: list[torch.Tensor] = []
    for first in range(0, len(requests), room.slots):
        found += _follow(engine, requests[first : first + room.slots])
    return found


def _follow(engine: Engine, requests: list[Request]) -> list[torch.Tensor]:
    """Each in a slot. Whatever the engine chooses, the next token is the one that was served."""
    slots, at_a_time = range(len(requests)), engine.room.prefill_batch
    for first in range(0, len(requests), at_a_time):
        engine.prefill({slot: requests[slot].prompt for slot in slots[first : first + at_a_time]})
    logits = [[row] for row in engine.logits.to("cpu", copy=True)[: len(requests)]]
    for token in range(max(each.length for each in requests) - 1):
        engine.release([slot for slot in slots if requests[slot].length == token + 1])
        going_on = [slot for slot in slots if requests[slot].length > token + 1]
        engine.tokens[going_on] = torch.tensor([requests[slot].tokens[token] for slot in going_on]).to(engine.tokens)
        engine.decode()
        rows = engine.logits.to("cpu", copy=True)
        for slot in going_on:
            logits[slot].append(rows[slot])
    engine.release(list(slots))
    return [torch.stack(each) for each in logits]


@torch.no_grad()
def logits_of(model: Model, request: Request) -> torch.Tensor:
    """[tokens served, vocabulary]: a model's logits, given the tokens before, the whole text at once."""
    text = torch.cat([request.prompt, torch.tensor(request.tokens)]).to(model.embedding.device)
    return model(text[:-1].unsqueeze(0))[0][0, len(request.prompt) - 1 :].cpu()


def _behind(logits: list[torch.Tensor], requests: list[Request]) -> torch.Tensor:
    """[tokens of all]: how far the logit of a served token is below the largest."""
    rows, tokens = torch.cat(logits), torch.tensor([token for each in requests for token in each.tokens])
    return rows.max(-1).values - rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _digest(requests: list[Request]) -> str:
    told = hashlib.sha256()
    for request in requests:
        told.update(torch.stack(request.logits).numpy().tobytes())
    return told.hexdigest()[:16]


def count_changed(server: Server, count: int = 4) -> dict[str, Any]:
    """Collective. Serves all requests again, then some alone at another home: all logits should have the same bits.

    On rank 0: how many requests changed, and what changed first: in which layer prefill's keys or values, or of which
    token the logits, and these by how much at most.
    """
    from .server import gather

    again = [_anew(each) for each in server.reference]
    server.serve(again, keep_logits=True)
    pairs = list(zip(server.reference, gather(server.world, again), strict=True))
    alone = []
    for before in server.reference[:count]:
        moved = _anew(before, home=(before.home + 1) % server.world.size)
        server.serve([moved], keep_logits=True)
        alone += [(before, *gather(server.world, [moved]))]
    changed_again, changed_alone = (
        [change for pair in each if (change := _first_change(*pair))] for each in (pairs, alone)
    )
    return {
        "served_again": len(pairs), "changed_again": len(changed_again),
        "first_changes_again": [what for what, _ in changed_again],
        "served_alone": len(alone), "changed_alone": len(changed_alone),
        "first_changes": [what for what, _ in changed_alone],
        "largest_first_change": max((by for _, by in changed_alone), default=0.0),
    }  # fmt: skip


def count_repeats(server: Server, times: int = 20) -> dict[str, int]:
    """Collective. A decode step of all ranks' requests, again and again: how often this rank's logits have other bits.

    Nothing has changed in between, not even what is left in memory.
    """
    engine, room = server.engine, server.room
    assert engine is not None
    requests = _requests(server, room.prefill_batch * server.world.size)
    mine = [each for each in requests if each.home == server.world.rank]
    engine.prefill({slot: each.prompt for slot, each in enumerate(mine)})
    tokens, positions = engine.tokens.clone(), engine.positions.clone()
    changed, first = 0, None
    for _ in range(1 + times):
        engine.tokens.copy_(tokens)
        engine.positions.copy_(positions)
        engine.decode()
        logits = engine.logits[: len(mine)].clone()
        first = logits if first is None else first
        changed += not torch.equal(logits, first)
    engine.release(list(range(len(mine))))
    return {"repeats": times, "changed_repeats": changed}


def _anew(request: Request, home: int | None = None) -> Request:
    """The same, not served yet, here or at another home."""
    return replace(request, home=request.home if home is None else home, tokens=[], times=[], logits=[], cache=[])


def _first_change(one: Request, other: Request) -> tuple[str, float] | None:
    """What has other bits first, and the largest difference of logits there."""
    by = [float((a - b).abs().max()) for a, b in zip(one.logits, other.logits, strict=True)]
    for layer, (mine, theirs) in enumerate(zip(one.cache, other.cache, strict=True)):
        if mine != theirs:
            return f"prefill, layer {layer}", by[0]
    for token, (a, b) in enumerate(zip(one.logits, other.logits, strict=True)):
        if not torch.equal(a, b):
            return f"token {token}", by[token]
    return None
