"""High throughput on buffers that live: outputs of many layers, inputs overwritten, handles used again, both modes."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import modes, reference
from nccl_ep.testing import run_ranks
from tests.gpu import ht_ranks
from tests.ht.harness import HtPlan, check_ht_case
from tests.support.cases import Case
from tests.support.expected import Expected, plain_case
from tests.support.harness import case_buffer, garble

WORLDS = [(2, 2, 0), (4, 4, 0), (4, 2, 5), (4, 1, 6), (8, 4, 7), (8, 2, 8)]
IDS = [f"{ranks // domain}x{domain}" for ranks, domain, _ in WORLDS]
LAYOUTS = ("flat", "packed", "expert_major", "rank_major")


def _case(num_ranks: int, layout: str, seed: int, **changes: Any) -> Expected:
    capacity = 8 * num_ranks * 2 if layout == "expert_major" else None
    plain: dict[str, Any] = {"num_experts": 4 * num_ranks, "topk": 4, "hidden": 32, "expert_alignment": 1}
    if layout == "packed":
        plain["expert_alignment"] = 4
    return Expected(plain_case(num_ranks, layout=layout, seed=seed, capacity=capacity, **{**plain, **changes}))


def _layers(num_ranks: int, domain_size: int, count: int = 8) -> list[Expected]:
    return [_case(num_ranks, LAYOUTS[i % 4], 40 + i, domain_size=domain_size) for i in range(count)]


def _buffer(case: Case, group: Any, mode: str = "ht", **options: Any) -> nccl_ep.Buffer:
    return case_buffer(case, group, mode=mode, device="cpu", wire_dtype=torch.float32, **options)


def _pause(random_: random.Random) -> None:
    if random_.random() < 0.4:
        time.sleep(random_.random() * 0.004)


@pytest.mark.parametrize("arena_bytes", [0, 1 << 15, 1 << 22], ids=["no-arena", "exhausted", "ample"])
@pytest.mark.parametrize(("num_ranks", "domain_size", "seed"), WORLDS, ids=IDS)
def test_outputs_of_several_layers_live_at_once(num_ranks: int, domain_size: int, seed: int, arena_bytes: int) -> None:
    """Forward through all layers, then backward through them: every output, input and handle stays what it was."""
    layers = _layers(num_ranks, domain_size)

    def body(group: Any) -> dict[str, Any]:
        rank, pauses = group.rank(), random.Random(100 * seed + group.rank())
        with _buffer(layers[0].case, group, arena_bytes=arena_bytes, network_seed=seed) as buffer:
            for _ in range(2):
                outs, rows = [], []
                for case in layers:
                    _pause(pauses)
                    outs.append(case.send(buffer))
                    made = case.rows[rank]
                    rows.append(buffer.empty(made.shape, made.dtype).copy_(made))
                for case, out, each in zip(layers, outs, rows, strict=True):
                    case.check_dispatch(out, rank)
                    _pause(pauses)
                    case.combine_rows(buffer, out.handle, each)
                for case, out in reversed(list(zip(layers, outs, strict=True))):
                    again = nccl_ep.dispatch_cached(case.inputs[rank].x, out.handle)
                    valid = case.results[rank].valid
                    hidden = case.case.hidden
                    assert torch.equal(again.x.reshape(-1, hidden)[valid], out.x.reshape(-1, hidden)[valid])
                    case.combine_weights(buffer, out.handle)
            stats = buffer.stats()
            del outs, rows, each, made, out, again
            assert buffer.stats()["arena_free_bytes"] == buffer.stats()["arena_bytes"] == arena_bytes
            return stats

    for stats in run_ranks(num_ranks, body):
        assert stats["ht_dispatches"] == 2 * 2 * len(layers) and stats["dispatches"] == 0
        if arena_bytes == 0:
            assert stats["staged_dispatches"] == stats["ht_dispatches"]
        elif arena_bytes == 1 << 15:
            assert 0 < stats["staged_dispatches"] < stats["ht_dispatches"]
        else:
            assert stats["staged_dispatches"] == 0
            assert stats["staged_combines"] == 0


@pytest.mark.parametrize("in_arena", [False, True], ids=["ordinary", "arena"])
@pytest.mark.parametrize(("num_ranks", "domain_size", "seed"), WORLDS, ids=IDS)
def test_inputs_are_overwritten_while_a_peer_is_delayed(
    num_ranks: int, domain_size: int, seed: int, in_arena: bool
) -> None:
    """Ranks take turns in being late; the others garble what they passed as soon as their call returns."""
    layers = _layers(num_ranks, domain_size)

    def place(buffer: nccl_ep.Buffer, tensor: torch.Tensor) -> torch.Tensor:
        return buffer.empty(tensor.shape, tensor.dtype).copy_(tensor) if in_arena else tensor.clone()

    def body(group: Any) -> None:
        rank = group.rank()
        with _buffer(layers[0].case, group, arena_bytes=1 << 22, network_seed=seed) as buffer:
            for turn, case in enumerate(layers):
                late = turn % num_ranks == rank
                given = case.case.rank_input(rank)
                given.x = place(buffer, given.x)
                if late:
                    time.sleep(0.01)
                out = case.send(buffer, given)
                garble(given.x, given.topk_idx, given.topk_weights)
                case.check_dispatch(out, rank)
                rows = place(buffer, case.rows[rank])
                garble(out.x, out.weights, out.topk_idx)
                if late:
                    time.sleep(0.01)
                got = nccl_ep.combine(rows, out.handle)
                garble(rows)
                case.check_combine(got, rank)
                values = case.values[rank].clone()
                scalars = nccl_ep.combine_weights(values, out.handle)
                garble(values, out.handle.tensor, out.handle.slots)
                case.check_scalars(scalars, rank)

    run_ranks(num_ranks, body)


def test_arena_tensors_outlive_the_buffer() -> None:
    case = _case(2, "flat", 3)

    def body(group: Any) -> None:
        buffer = _buffer(case.case, group, arena_bytes=1 << 20)
        out = case.send(buffer)
        spare = buffer.empty([7, 3], torch.float32).fill_(2.5)
        assert buffer.stats()["arena_free_bytes"] < buffer.stats()["arena_bytes"]
        buffer.destroy()
        del buffer
        case.check_dispatch(out, group.rank())
        assert spare.eq(2.5).all()
        with pytest.raises(nccl_ep.UsageError, match=r"gone|destroyed"):
            nccl_ep.combine(out.x, out.handle)

    run_ranks(2, body)


def test_a_storage_may_be_resized_and_its_place_is_free() -> None:
    """Frameworks free activations so; in the arena the place is free again."""
    case = _case(2, "flat", 3)

    def body(group: Any) -> None:
        with _buffer(case.case, group, arena_bytes=1 << 20) as buffer:
            before = buffer.stats()["arena_free_bytes"]
            out = case.send(buffer)
            assert buffer.stats()["arena_free_bytes"] < before
            storage, kept = out.x.untyped_storage(), out.x.clone()
            num_bytes = storage.nbytes()
            storage.resize_(0)
            assert storage.nbytes() == 0 and buffer.stats()["arena_free_bytes"] == before
            storage.resize_(num_bytes)
            out.x.copy_(kept)
            case.check_dispatch(out, group.rank())
            case.check_combine(nccl_ep.combine(case.rows[group.rank()], out.handle), group.rank())

    run_ranks(2, body)


def test_buffer_empty_gives_memory_of_the_arena_while_there_is_room() -> None:
    with _buffer(_case(1, "flat", 1).case, None, arena_bytes=4096) as buffer:
        kept = [buffer.empty([512]) for _ in range(5)]  # bf16: 1 KB each, of which four fit
        assert buffer.stats()["arena_free_bytes"] == 0
        assert [tensor.is_contiguous() and tensor.dtype == torch.bfloat16 for tensor in kept] == [True] * 5
        for number, tensor in enumerate(kept):
            tensor.fill_(number)
        assert [float(tensor.sum()) for tensor in kept] == [512.0 * n for n in range(5)]
        del tensor
        kept.pop(1)
        view = kept[0][3:7]
        kept.clear()
        assert buffer.stats()["arena_free_bytes"] == 3072  # the view keeps its block
        assert view.eq(0).all()
        assert buffer.empty([0, 4]).numel() == 0
        with pytest.raises(ValueError, match="dimension of -1"):
            buffer.empty([-1])
        for wrong, text in (
            (5, "size is a int, must be a shape"),
            ({2: 3}, "size is a dict, must be a shape"),
            ([4, 5.5], "size[1] is 5.5, must be an integer"),
            ([None], "size[0] is None, must be an integer"),
        ):
            with pytest.raises(TypeError, match=re.escape(text)):
                buffer.empty(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"size\[0\] is {1 << 64}, must be"):
            buffer.empty([1 << 64])
        with pytest.raises(TypeError, match=r"dtype is 'bf16', must be a torch\.dtype"):
            buffer.empty([4], "bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_outputs_may_lie_in_another_buffers_arena(mode: str) -> None:
    """They are ordinary tensors to a buffer: rows are copied there, and what the other one does is not disturbed."""
    case = _case(2, "flat", 3)

    def body(group: Any) -> None:
        rank, sizes = group.rank(), {"mode": "auto", "arena_bytes": 1 << 20}
        with _buffer(case.case, group, **sizes) as buffer, _buffer(case.case, group, **sizes) as other:
            theirs = case.send(other)
            out = case.send(buffer, **({"out": theirs} if mode == "ht" else {"mode": mode}))
            case.check_dispatch(out, rank)
            assert out.handle.buffer == buffer.name
            combined = other.empty([len(case.inputs[rank].x), case.case.hidden])
            assert other.runtime.arena_offset(combined.data_ptr(), combined.nbytes) is not None
            assert buffer.runtime.arena_offset(combined.data_ptr(), combined.nbytes) is None
            rows = case.rows[rank]
            for _ in range(2):
                nccl_ep.combine(rows, out.handle, out=combined.zero_())
                case.check_combine(combined, rank)
                case.run(other)
            other.destroy()
            case.check_combine(combined, rank)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("size", "error", "text"), [(-1, ValueError, "-1, must be 0 to "), (1.5, TypeError, "1.5, must be an int")]
)
def test_a_size_of_the_arena_without_sense_is_refused(size: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"arena_bytes is {text}"):
        _buffer(_case(1, "flat", 1).case, None, arena_bytes=size)


# ---- The same bits, always


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quant", [None, "fp8", "fp8_ue8m0"])
def test_both_modes_give_the_same_bits(layout: str, quant: str | None) -> None:
    """One buffer does both, in any order, and what comes out is equal to the last bit."""
    case = _case(4, layout, 9, quant=quant, domain_size=2, zero_padding=True)

    def both(buffer: nccl_ep.Buffer, order: tuple[str, ...]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        given = case.inputs[buffer.rank]
        for mode in order:
            out = case.send(buffer, given, mode=mode)
            case.check_dispatch(out, buffer.rank)
            assert out.handle.mode == mode
            y = nccl_ep.combine(case.rows[buffer.rank], out.handle)
            w = nccl_ep.combine_weights(case.values[buffer.rank], out.handle)
            kept = (out.x, out.scales, out.weights, out.topk_idx, out.counts, out.offsets, out.row_expert, y, w)
            yield mode, [tensor for tensor in kept if tensor is not None]

    def body(group: Any) -> None:
        with _buffer(case.case, group, mode="auto", network_seed=4) as buffer:
            first: list[torch.Tensor] = []
            for _, tensors in both(buffer, ("ll", "ht", "ht", "ll", "ll", "ht")):
                first = first or tensors
                for tensor, same in zip(tensors, first, strict=True):
                    assert not reference.first_difference(tensor, same)

    run_ranks(4, body)


@pytest.mark.parametrize("domain_size", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_the_same_whatever_the_timing(layout: str, domain_size: int) -> None:
    case = _case(4, layout, 10, domain_size=domain_size, zero_padding=True)
    runs = []
    for seed in range(1, 9):

        def body(group: Any, seed: int = seed) -> list[torch.Tensor]:
            pauses = random.Random(100 * seed + group.rank())
            with _buffer(case.case, group, arena_bytes=(seed % 3) << 14, network_seed=seed) as buffer:
                _pause(pauses)
                out = case.send(buffer)
                _pause(pauses)
                y = nccl_ep.combine(case.rows[group.rank()], out.handle)
                kept = (out.x, out.weights, out.topk_idx, out.counts, out.demand, out.offsets, out.row_expert, y)
                return [tensor.clone() for tensor in kept if tensor is not None]

        runs.append(run_ranks(4, body))
    for run in runs[1:]:
        for tensors, first in zip(run, runs[0], strict=True):
            for tensor, same in zip(tensors, first, strict=True):
                assert torch.equal(tensor.view(torch.uint8), same.view(torch.uint8))


# ---- Sizes and modes


@pytest.mark.parametrize("domain_size", [2, 1])
@pytest.mark.parametrize("body", [ht_ranks.rows_of_64_kib, ht_ranks.many_tokens])
def test_the_largest_rows_and_most_tokens_are_served(body: Any, domain_size: int) -> None:
    run_ranks(2, lambda group: body(group, "cpu", domain_size=domain_size))


def test_exact_sizes_are_what_came() -> None:
    case = plain_case(3, layout="packed", expert_alignment=16, routing="skewed", topk=2)
    outcome = check_ht_case(case)
    assert HtPlan.of(case).exact
    for rank, result in enumerate(outcome.ranks):
        demand = result.dispatched.demand.tolist()
        assert result.dispatched.x.shape[0] == sum(-(-n // 16) * 16 for n in demand), rank
        assert result.dispatched.handle.capacity == result.dispatched.x.shape[0]


def test_overflow_raises_where_asked() -> None:
    case = _case(2, "flat", 4, topk=2, routing="uniform")

    def body(group: Any) -> None:
        with _buffer(case.case, group, on_overflow="raise", arena_bytes=1 << 20) as buffer:
            with pytest.raises(nccl_ep.OverflowError, match=r"rows did not fit into capacity 3 of layout flat"):
                case.send(buffer, capacity=3)
            case.check_dispatch(case.send(buffer), group.rank())
            assert buffer.stats()["dropped_rows"] > 0

    run_ranks(2, body)


def test_auto_goes_by_what_all_ranks_share() -> None:
    row = 7168 * 2
    assert modes.choose_mode(128, row, 8, 4, None) == "ll"
    assert modes.choose_mode(4096, row, 8, 4, None) == "ht"
    assert modes.choose_mode(1, row, 8, 4, "exact") == "ht"
    most = modes.auto_ll_tokens(10**6, row, 8, 4, 8, "cpu")
    assert modes.choose_mode(most, row, 8, 4, None) == "ll"
    assert modes.choose_mode(most + 1, row, 8, 4, None) == "ht"
    assert modes.choose_mode(200, 8 * row, 8, 4, None) == "ht"
    assert modes.choose_mode(200, 8 * row, 1, 4, None) == "ll"  # a quarter of the rows
    assert modes.auto_ll_tokens(64, row, 8, 4, 8, "cpu") == 64
    # Slots of small rows.
    assert [modes.auto_ll_tokens(10**6, 16, 8, ranks, 64, "cpu") for ranks in (1, 4, 8, 64)] == [4096, 1024, 512, 128]


def test_auto_takes_either_mode_on_one_buffer() -> None:
    most = 1000  # of 64 KiB: more than low latency takes

    def body(group: Any) -> list[str]:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=most, hidden=16384, topk=2, num_experts=4, mode="auto", arena_bytes=0, device="cpu",
            timeout=60.0,
        ) as buffer:  # fmt: skip
            taken = []
            for tokens, max_tokens in ((3, 8), (3, most), (most, most)):  # the tokens of a rank do not count
                x = torch.full((tokens, 16384), 1.0, dtype=torch.bfloat16)
                ids = torch.arange(2 * tokens).view(tokens, 2) % 4
                out = nccl_ep.dispatch(
                    x, ids, buffer=buffer, num_experts=4, mode="auto", layout="flat", max_tokens=max_tokens
                )
                assert nccl_ep.combine(out.x, out.handle)[:, 0].tolist() == [
                    float(len({int(e) // 2 for e in row})) for row in ids
                ]
                taken.append(out.handle.mode)
            return taken

    assert run_ranks(2, body) == [["ll", "ht", "ht"]] * 2


@pytest.mark.parametrize(("hidden", "topk"), [(16384, 1), (4096, 2)], ids=["fewer choices", "smaller rows"])
def test_auto_keeps_to_the_room_that_was_made(hidden: int, topk: int) -> None:
    """By its own bytes the call is one for low latency; the buffer was made for larger ones."""
    tokens = 950

    def body(group: Any) -> str:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=1000, hidden=16384, topk=2, num_experts=4, mode="auto", arena_bytes=0, device="cpu",
            timeout=60.0,
        ) as buffer:  # fmt: skip
            x, ids = torch.ones(3, hidden, dtype=torch.bfloat16), torch.zeros(3, topk, dtype=torch.int64)
            out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=4, mode="auto", layout="flat", max_tokens=tokens)
            return out.handle.mode

    assert modes.choose_mode(tokens, hidden * 2, topk, 2, None) == "ll"
    assert run_ranks(2, body) == ["ht", "ht"]


@pytest.mark.parametrize("quant", [None, "fp8"])
def test_a_cached_dispatch_may_reuse_an_earlier_output(quant: str | None) -> None:
    case = _case(2, "packed", 12)

    def body(group: Any) -> None:
        with _buffer(case.case, group) as buffer:
            x, handle = case.inputs[buffer.rank].x, case.send(buffer).handle
            extra = torch.arange(8.0 * len(x)).view(-1, 8)

            def send(factor: int, **given: Any) -> nccl_ep.Payload:
                return nccl_ep.dispatch_cached(
                    factor * x, handle, extra=[factor * extra], quant=quant, zero_padding=True, **given
                )

            first, want = send(1), send(2)
            assert send(2, out=first) is first
            got, right = ((each.x, each.scales, *each.extra) for each in (first, want))
            for one, other in zip(got, right, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            with pytest.raises(ValueError, match="out's extra 0 is on meta, the buffer on cpu"):
                send(1, out=nccl_ep.Payload(first.x, first.scales, (first.extra[0].to("meta"),)))

    run_ranks(2, body)


def test_a_handle_of_each_mode_is_refused_by_the_other() -> None:
    case = _case(1, "flat", 2)
    with _buffer(case.case, None, mode="auto") as buffer:
        ll, ht = case.send(buffer, mode="ll"), case.send(buffer)
        with pytest.raises(
            nccl_ep.UsageError, match='handle is of mode "ll", a cached dispatch needs one of mode "ht"'
        ):
            nccl_ep.dispatch_cached(case.inputs[0].x, ll.handle)
        with pytest.raises(ValueError, match="combine of high throughput is not split"):
            nccl_ep.combine_send(case.rows[0], ht.handle)
        with pytest.raises(nccl_ep.UsageError, match="out is of a low-latency dispatch"):
            case.send(buffer, out=ll)
        ht.weights = ht.weights.to("meta")
        with pytest.raises(ValueError, match="out's weights is on meta, the buffer on cpu"):
            case.send(buffer, out=ht)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_async_finish_runs_the_whole_operation(layout: str) -> None:
    """The form in which high throughput overlaps with other work; on the CPU it is done when the call returns."""
    case = _case(2, layout, 12)

    def body(group: Any) -> None:
        given = case.inputs[group.rank()]
        with _buffer(case.case, group) as buffer:
            pending = [
                nccl_ep.dispatch_send(
                    given.x, given.topk_idx, given.topk_weights, buffer=buffer, mode="ht", async_finish=True,
                    **case.case.dispatch_kwargs(),
                )
                for _ in range(2)
            ]  # fmt: skip
            for each in pending:
                out = each.receive()
                case.check_dispatch(out, group.rank())
            back = nccl_ep.combine_send(case.rows[group.rank()], out.handle, async_finish=True)
            assert back.event.event is not None and back.event.event.query()
            case.check_combine(back.receive(), group.rank())
            assert buffer.stats()["ht_dispatches"] == 2

    run_ranks(2, body)
