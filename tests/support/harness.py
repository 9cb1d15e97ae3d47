"""Runs a generated case on real ranks and holds every result against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import nccl_ep
from nccl_ep import _C, reference
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support import failures as failures  # is in force where it is imported
from tests.support.cases import Case
from tests.support.contents import as_bytes
from tests.support.patience import of_living_ranks

NO_BUFFER = 1 << 40  # no buffer's number: csrc/torch/ops/registry.h


@dataclass
class RankResult:
    """What one rank of the library made of a case."""

    dispatched: nccl_ep.DispatchOutput
    combined: torch.Tensor
    scalars: torch.Tensor
    wire: dict[str, list[int]] = field(default_factory=dict)


def of_no_buffer(handle: nccl_ep.Handle) -> nccl_ep.Handle:
    """The same handle of a buffer that this process never had."""
    return dataclasses.replace(handle, seq=handle.seq.new_empty((NO_BUFFER, *handle.seq.shape[1:])))


def synchronize(device: torch.device) -> None:
    """Waits for the current GPU. Ranks on CPUs are done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, after the current stream's work: over tests/gin_loopback, a copy that stands behind an operation
    may hold up those that the operation waits for."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor.cpu()


def case_buffer(case: Case, group: Any, **options: Any) -> nccl_ep.Buffer:
    """A buffer of the case's sizes; between domains it has the rail, and ids out of range are no choice. options: of
    ``Buffer.for_shapes``."""
    return nccl_ep.Buffer.for_shapes(
        group,
        max_tokens=case.max_tokens,
        hidden=case.hidden,
        topk=case.topk,
        num_experts=case.num_experts,
        **{
            "domain_size": case.domain_size,
            "late_weights": True,
            "ll_network": "rail",
            "timeout": of_living_ranks(60.0),
            "on_invalid_ids": "count",
            **options,
        },
    )


def make_buffer(case: Case, group: Any, **options: Any) -> nccl_ep.Buffer:
    """One in which all operations of the case fit."""
    room = {"dtype": case.dtype, "wire_dtype": torch.float32, "scale_bytes": case.scales_width * 8}
    return case_buffer(case, group, **{**room, **options})


def garble(*tensors: torch.Tensor | None) -> None:
    """Overwrites what they hold, with zeros where they have strides."""
    for tensor in tensors:
        if tensor is not None:
            tensor.reshape(-1).view(torch.uint8).fill_(0x5A) if tensor.is_contiguous() else as_bytes(tensor).zero_()


def to_device(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The tensor there, with its strides."""
    return tensor if tensor is None or tensor.device == device else copy_to(tensor, device)


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same, a copy in any case."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    as_bytes(moved).copy_(as_bytes(tensor))
    return moved


def dispatch_case(
    case: Case, given: reference.RankInput, buffer: nccl_ep.Buffer, *, staged: bool = False, **options: Any
) -> nccl_ep.DispatchOutput:
    run = nccl_ep.dispatch_send if staged else nccl_ep.dispatch
    x, topk_idx, weights, scales = (
        to_device(t, buffer.device) for t in (given.x, given.topk_idx, given.topk_weights, given.scales)
    )
    result: Any = run(x, topk_idx, weights, buffer=buffer, scales=scales, **case.dispatch_kwargs(), **options)
    if staged:
        garble(x, topk_idx, weights, scales)  # inputs are free once the send is done
        result = result.receive()
    return result


def combine_options(case: Case, rank: int, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of combine on a rank; the rest the library takes from the handle and the buffer."""
    return {name: _to(value, device) for name, value in case.rank_combine_kwargs(rank).items()}


def combine_case(
    case: Case, rows: torch.Tensor, handle: nccl_ep.Handle, rank: int, *, staged: bool = False,
    given: dict[str, Any] | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """given: combine_options() of the case, if they are on the device already."""
    kwargs = combine_options(case, rank, rows.device) if given is None else given
    result: Any = (nccl_ep.combine_send if staged else nccl_ep.combine)(rows, handle, **kwargs, **options)
    if staged:
        rows.zero_()
        result = result.receive()
    return result


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(_to(item, device) for item in value) if isinstance(value, tuple) else value


def run_case_on_rank(
    case: Case, group: ThreadGroup, inputs: list[reference.RankInput], results: list[reference.DispatchResult],
    *, staged: bool, network_seed: int, device: str, ll_network: str, **options: Any,
) -> RankResult:  # fmt: skip
    rank = group.rank()
    with make_buffer(case, group, network_seed=network_seed, device=device, ll_network=ll_network) as buffer:
        out = dispatch_case(case, inputs[rank], buffer, staged=staged, **options)
        rows = case.expert(out.x, results[rank], rank)
        values = case.scalars(results[rank], rank).to(rows.device)
        combined = combine_case(case, rows, out.handle, rank, staged=staged, **options)
        scalars = nccl_ep.combine_weights(values, out.handle)
        synchronize(buffer.device)
        buffer.require_usable()  # its error says more than a difference does
        return RankResult(out, combined.cpu(), scalars.cpu(), buffer.wire_bytes())


def check_dispatch(got: nccl_ep.DispatchOutput, want: reference.DispatchResult, where: str) -> None:
    for name in ("counts", "demand", "overflow", "offsets", "row_expert", "total", "topk_idx", "weights"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert (mine is None) == (theirs is None), f"{where}: {name} is {mine}, the oracle has {theirs}"
        if mine is not None:
            difference = reference.first_difference(on_host(mine), theirs)
            assert not difference, f"{where}: {name}: {difference}"
    for name in ("x", "scales"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert (mine is None) == (theirs is None), f"{where}: {name}"
        if mine is None:
            continue
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, f"{where}: {name} {mine.shape} {mine.dtype}"
        valid = want.valid.flatten()
        mine, theirs, width = as_bytes(mine), as_bytes(theirs), mine.shape[-1]
        difference = reference.first_difference(on_host(mine).view(-1, width)[valid], theirs.view(-1, width)[valid])
        assert not difference, f"{where}: {name}: {difference}"


def check_results(
    case: Case, inputs: list[reference.RankInput], results: list[reference.DispatchResult], got: Sequence[Any],
    where: str,
) -> None:  # fmt: skip
    """Holds what every rank got (``dispatched``, ``combined``, ``scalars``) against the oracle."""
    rows = [case.expert(got[rank].dispatched.x.cpu(), results[rank], rank) for rank in range(case.num_ranks)]
    combined = reference.combine(rows, results, inputs, **case.combine_kwargs())
    values = [case.scalars(result, rank) for rank, result in enumerate(results)]
    scalars = reference.combine_weights(values, results, inputs, num_experts=case.num_experts, layout=case.layout)
    for rank, result in enumerate(got):
        here = f"{where} rank {rank}"
        check_dispatch(result.dispatched, results[rank], here)
        if case.zero_padding:
            check_padding(result.dispatched, results[rank], here)
        for name, mine, theirs in (
            ("combined", result.combined, combined[rank]),
            ("scalars", result.scalars, scalars[rank]),
        ):
            difference = reference.first_difference(mine, theirs)
            assert not difference, f"{here}: {name}: {difference}"


def check_case(
    case: Case, *, staged: bool = False, network_seed: int = 0, device: str = "cpu", ll_network: str = "rail",
    **options: Any,
) -> list[reference.DispatchResult]:  # fmt: skip
    """Runs the case; fails with its description where a bit differs. Returns the oracle's results."""
    inputs = case.inputs()
    results = reference.dispatch(inputs, **case.dispatch_kwargs())
    given = case.inputs() if staged else inputs  # a staged run overwrites its inputs
    buffer = {"network_seed": network_seed, "device": device, "ll_network": ll_network}
    got = run_ranks(
        case.num_ranks,
        lambda group: run_case_on_rank(case, group, given, results, staged=staged, **buffer, **options),
    )
    check_results(case, inputs, results, got, case.describe())
    if device == "cpu" and not _C.EMULATES_GPU:
        check_wire(case, inputs, results, got, staged=staged and not options.get("async_finish"))
    if (_C.EMULATES_GPU or device != "cpu") and case.domain_size not in (None, case.num_ranks):
        check_network(case, inputs, got, is_mesh=ll_network == "mesh")
    return results


def check_padding(got: nccl_ep.DispatchOutput, want: reference.DispatchResult, where: str) -> None:
    for tensor in (got.x, got.scales):
        if tensor is not None:
            padding = tensor.cpu().view(torch.uint8).flatten(0, -2)[~want.valid.flatten()]
            assert not padding.any(), f"{where}: padding is not zero"


def sends_unweighted(case: Case, *, staged: bool) -> bool:
    """Whether a combine's send sends rows for the home ranks to weight, in their own dtype."""
    return staged and case.is_weighted_at_home


def check_wire(
    case: Case, inputs: list[reference.RankInput], results: list[reference.DispatchResult], got: list[RankResult],
    *, staged: bool,
) -> None:  # fmt: skip
    """One row for each (token, rank with an expert of it), each way, and no byte more. Home come all rows that the
    dispatch gave, where no sum can be made of them."""
    rows = home_rows = reference.wire_rows(inputs, num_experts=case.num_experts)
    sent, home = row_bytes(case, got[0].dispatched.scales)
    other = other_bytes(case, inputs, rows)
    if sends_unweighted(case, staged=staged):
        home_rows = torch.stack([(result.row_of >= 0).flatten(1).sum(1) for result in results], 1)
        home = case.hidden * case.rows_dtype.itemsize
        other += 8 * rows.T
    for rank, result in enumerate(got):
        for peer in range(case.num_ranks):
            there, back = int(rows[rank, peer]), int(home_rows[peer, rank])
            assert result.wire["rows_count"][peer] == there + back, f"{case.describe()}: {rank} -> {peer}"
            expected = there * sent + back * home
            assert result.wire["rows"][peer] == expected, f"{case.describe()}: {rank} -> {peer} bytes"
        assert result.wire["other"] == other[rank].tolist(), f"{case.describe()}: rank {rank} beside rows"


def row_bytes(case: Case, scales: torch.Tensor | None) -> tuple[int, int]:
    """Of a row that is dispatched with these scales, and of one on its way home."""
    payload = case.hidden * (1 if case.quant else case.dtype.itemsize)
    body = payload + (0 if scales is None else -(-scales.shape[-1] * scales.element_size() // 16) * 16)
    is_keyed = not case.quant and (not case.dtype.is_floating_point or case.dtype.itemsize == 1 or scales is not None)
    keys = -(-body // 512) * 4 if is_keyed else 0
    return body + -(-keys // 16) * 16, case.home_bytes


def check_network(
    case: Case, inputs: list[reference.RankInput], got: list[RankResult], *, is_mesh: bool = False
) -> None:
    """Between domains: one row for each (token, domain with an expert of it), each way, a record a call, and no byte
    more; from a rank to those of its place in the other domains. In the mesh one row for each (token, rank with an
    expert of it), from a rank to all of the other domains."""
    size = case.domain_size or case.num_ranks
    link = 1 if is_mesh else size  # ranks that a row is for
    sent, home = row_bytes(case, got[0].dispatched.scales)
    local = case.num_experts // case.num_ranks * link  # experts of a link
    to_link = torch.zeros(case.num_ranks, case.num_ranks // link, dtype=torch.int64)  # rows
    for source, given in enumerate(inputs):
        ids = given.topk_idx
        links = torch.where((ids >= 0) & (ids < case.num_experts), ids // local, -1)
        for number in range(case.num_ranks // link):
            to_link[source, number] = (links == number).any(-1).sum()
    entries = [-(-tokens * case.topk // 4) * 16 for tokens in case.tokens]
    is_weighted = case.is_weighted_at_home
    for rank, result in enumerate(got):
        for peer in range(case.num_ranks):
            expected = 0
            if peer % link == rank % link and peer // size != rank // size:
                records = 3 * 32 + (4 + 2 * is_weighted) * entries[rank]
                there, back = int(to_link[rank, peer // link]), int(to_link[peer, rank // link])
                scalars = case.tokens[peer] * -(-case.topk // 4) * 16
                expected = records + there * sent + back * home + scalars
            crossed = result.wire["network"][peer]
            assert crossed == expected, f"{case.describe()}: {rank} -> {peer}: {crossed} bytes, not {expected}"


def other_bytes(case: Case, inputs: list[reference.RankInput], rows: torch.Tensor) -> torch.Tensor:
    """What is no row of a dispatch, a combine and one of weights, [sender, peer], by docs/wire_format.md."""
    ranks, local = case.num_ranks, case.num_experts // case.num_ranks
    choices = torch.zeros(ranks, ranks, dtype=torch.int64)  # [source, owner]
    for source, given in enumerate(inputs):
        ids = given.topk_idx[(given.topk_idx >= 0) & (given.topk_idx < case.num_experts)]
        choices[source] = torch.bincount(ids // local, minlength=ranks)
    id_words = -(-case.topk // (4 if local <= 254 else 2))
    ids_bytes = 8 * (id_words + id_words % 2) * torch.tensor(case.tokens)[:, None]
    is_weighted = case.is_weighted_at_home
    scalars = choices if case.layout in reference.EXPERT_LAYOUTS else case.topk * rows
    return 3 * 64 + ids_bytes + 8 * choices * (1 + is_weighted) + 8 * scalars.T
