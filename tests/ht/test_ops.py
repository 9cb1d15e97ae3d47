"""The ops of high throughput as a compiler sees them: opcheck, fakes, exact sizes as symbols, a compiled layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import nccl_ep
from nccl_ep.config import cached_args, combine_args, pack_dispatch
from nccl_ep.handle import LAYOUTS, QUANTS
from nccl_ep.testing import run_ranks
from tests.support.expected import Expected, plain_case
from tests.support.harness import case_buffer, garble
from tests.support.op_checks import (
    EXACT_OPS,
    HT_OPS,
    LOCAL_OPS,
    UTILS,
    apart_from_numbers,
    as_fake,
    check_apart,
    check_compiled,
    described,
    faked,
    number_at,
)

ops = torch.ops.nccl_ep
OPS = [*HT_OPS, "row_carrier"]
HT_QUANTS = [name for name in QUANTS if name is None or not name.endswith("_swizzled")]  # others it refuses


def _case(num_ranks: int, layout: str, quant: str | None = None, **changes: Any) -> Expected:
    capacity = 8 * num_ranks if layout == "expert_major" else None
    alignment = 4 if layout == "packed" else 1
    changes = {"hidden": 640, **changes}
    return Expected(
        plain_case(
            num_ranks, layout=layout, quant=quant, expert_alignment=alignment, capacity=capacity, zero_padding=True,
            **changes,
        )
    )  # fmt: skip


def _buffer(case: Expected, group: Any, **options: Any) -> nccl_ep.Buffer:
    return case_buffer(case.case, group, mode="ht", scale_bytes=2000, wire_dtype=torch.float32, device="cpu", **options)


class Calls:
    """Arguments of every op for one case on one buffer, after a dispatch whose handle the combines use."""

    def __init__(self, case: Expected, buffer: nccl_ep.Buffer) -> None:
        shape, given, rank = case.case, case.inputs[buffer.rank], buffer.rank
        extra = torch.arange(8.0 * len(given.x)).view(-1, 8)
        out = nccl_ep.dispatch(
            given.x, given.topk_idx, given.topk_weights, buffer=buffer, mode="ht", scales=given.scales, extra=[extra],
            **shape.dispatch_kwargs(),
        )  # fmt: skip
        handle, layout = out.handle, LAYOUTS[shape.layout]
        head, quant = (buffer._seq,), int(QUANTS[shape.quant])
        fields = {"alignment": shape.expert_alignment, "quant": quant, "zero_padding": True}
        config = (handle.capacity, pack_dispatch(handle.routing() | fields))
        dispatch = (*head, [given.x, extra], given.scales, given.topk_idx, given.topk_weights, *config)
        sizes = combine_args(handle, int(layout.has_expert_rows))
        biases = [given.x.float()] if shape.layout == "flat" else []
        routes = (handle.tensor, handle.slots)
        combine = (*head, case.rows[rank], case.values[rank], *routes, None, None, biases, *sizes)
        made = ops.ht_dispatch.default(*dispatch)
        outs = [[torch.zeros_like(made[0]), torch.zeros_like(made[8])], *(torch.zeros_like(each) for each in made[1:8])]
        cached = (*head, [given.x, extra], given.scales, *routes, *cached_args(handle, quant, True))
        deepep = (
            *head, given.x, given.scales, given.topk_idx, given.topk_weights, shape.num_experts, shape.max_tokens,
            len(given.x) * buffer.num_ranks, 0,
        )  # fmt: skip
        self.out = out
        self.args: dict[str, tuple[Any, ...]] = {
            "ht_dispatch": dispatch,
            "ht_dispatch_out": (*dispatch, *outs),
            "ht_dispatch_cached": cached,
            "ht_dispatch_cached_out": (*cached, *outs[:2]),
            "ht_dispatch_deepep": deepep,
            "ht_combine": combine,
            "ht_combine_out": (*combine, torch.zeros(len(given.x), shape.hidden)),
            "arena_empty": (*head, [3, 5], torch.float16),
            "row_carrier": (*head, given.x, *routes, list(out.x.shape), config[1]),
        }

    def run(self, name: str) -> Any:
        return getattr(ops, name).default(*self.args[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_opcheck_passes_for_each_op_on_one_rank(name: str, layout: str) -> None:
    case = _case(1, layout)
    with _buffer(case, None) as buffer:
        calls = Calls(case, buffer)
        # Contents of an uninitialised tensor are nobody's.
        utils = UTILS[:3] if name == "arena_empty" else UTILS
        with apart_from_numbers(calls.out.handle):
            for util in utils:
                torch.library.opcheck(getattr(ops, name).default, calls.args[name], test_utils=util)
        case.check_combine(nccl_ep.combine(case.rows[0], calls.out.handle), 0)


@pytest.mark.parametrize("num_domains", [1, 2])
def test_opcheck_passes_for_the_layout_of_tokens(num_domains: int) -> None:
    args = (torch.tensor([[0, 7, -1], [4, 5, 12]]), 4, num_domains, 12)
    assert LOCAL_OPS == ["token_layout", "map_experts", "carrier", "carried", "size_at"]  # see below, test_placement.py
    assert not ops.token_layout.default._schema.is_mutable
    assert faked("token_layout", args) == described(ops.token_layout(*args))
    torch.library.opcheck(ops.token_layout.default, args, test_utils=UTILS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_passes_for_carriers_of_gradients(dtype: torch.dtype) -> None:
    x, values = torch.randn(3, 16, dtype=dtype, requires_grad=True), torch.randn(3, 16)
    for name, args in {"carrier": (x,), "carried": (x, values)}.items():
        op = getattr(ops, name)
        assert not op.default._schema.is_mutable
        made = op(*args)
        assert made.requires_grad and faked(name, args) == described(made)
        torch.library.opcheck(op.default, args, test_utils=UTILS)
    assert torch.equal(ops.carried(x, values), values)
    given = torch.randn(3, 16)
    ops.carried(ops.carrier(x), values).backward(given)
    assert torch.equal(x.grad, given.to(dtype))
    with pytest.raises(ValueError, match=r"values have shape \[16, 3\], their carrier \[3, 16\]"):
        ops.carried(x, values.T)


@pytest.mark.parametrize(
    ("ids", "numbers", "message"),
    [
        (torch.zeros(2, 3), (1, 1, 4), "topk_idx is torch.float32, must be torch.int32"),
        (torch.zeros(3, dtype=torch.int64), (1, 1, 4), "topk_idx has 1 dimensions"),
        (torch.zeros(2, 3, dtype=torch.int64), (4, 3, 12), "4 ranks in 3 domains"),
        (torch.zeros(2, 3, dtype=torch.int64), (0, 1, 12), "0 ranks in 1 domains"),
        (torch.zeros(2, 3, dtype=torch.int64), (4, 1, 10), "10 experts do not divide over 4 ranks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(ids: torch.Tensor, numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.token_layout(ids, *numbers)


@pytest.mark.parametrize("name", OPS)
def test_opcheck_passes_for_ranks_in_lockstep(name: str) -> None:
    case = _case(4, "packed", domain_size=2)

    def body(group: Any) -> None:
        with _buffer(case, group) as buffer:
            calls = Calls(case, buffer)
            for util in ("test_schema", "test_faketensor"):
                torch.library.opcheck(getattr(ops, name).default, calls.args[name], test_utils=util)
            case.combine(buffer, calls.out.handle)

    run_ranks(4, body)


@pytest.mark.parametrize("quant", HT_QUANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_are_what_the_ops_return(layout: str, quant: str | None) -> None:
    scales = {"scales_dtype": torch.int32, "scales_width": 3} if quant is None else {}
    case = _case(2, layout, quant, tokens=(3, 0), idx_dtype=torch.int32, **scales)

    def body(group: Any) -> None:
        with _buffer(case, group) as buffer:
            calls = Calls(case, buffer)
            for name in OPS:
                assert faked(name, calls.args[name]) == described(calls.run(name)), name

    run_ranks(2, body)


@pytest.mark.parametrize("quant", HT_QUANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cached_dispatch_into_given_tensors_has_the_same_bits(layout: str, quant: str | None) -> None:
    """Every bit is the functional op's, in tensors of the arena and in others."""
    scales = {"scales_dtype": torch.int32, "scales_width": 3} if quant is None else {}
    case = _case(2, layout, quant, tokens=(3, 7), **scales)

    def body(group: Any) -> None:
        with _buffer(case, group, arena_bytes=1 << 20) as buffer:
            calls = Calls(case, buffer)
            x, scales, x1, *none = calls.run("ht_dispatch_cached")
            want = x, x1, scales
            assert len(x) and len(scales) and not any(map(len, none))
            for empty in (buffer.empty, torch.empty):
                given = [empty(each.shape, dtype=each.dtype) for each in want]
                garble(*given)
                staged = buffer.stats()["staged_dispatches"]
                ops.ht_dispatch_cached_out.default(*calls.args["ht_dispatch_cached"], given[:2], given[2])
                assert buffer.stats()["staged_dispatches"] - staged == (empty is torch.empty)
                for mine, theirs in zip(given, want, strict=True):
                    assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))

    run_ranks(2, body)


BAD_OUTPUTS = [
    ("too few", lambda x, x1, scales: ([x], scales), "1 output tensors for 2"),
    ("rows", lambda x, x1, scales: ([x[1:], x1], scales), r"out\.x has shape \[7, 640\], must be \[8, 640\]"),
    (
        "dtype",
        lambda x, x1, scales: ([x.view(torch.int8), x1], scales),
        r"out\.x is torch.int8, must be torch.float8_e4m3fn",
    ),
    ("extra rows", lambda x, x1, scales: ([x, x1[1:]], scales), r"out\.x has shape \[7, 8\], must be \[8, 8\]"),
    ("extra strides", lambda x, x1, scales: ([x, torch.zeros(8, 16)[:, ::2]], scales), "is not contiguous"),
    ("address", lambda x, x1, scales: ([x, torch.zeros(66)[2:].view(8, 8)], scales), "not aligned to 16 bytes"),
    ("scales", lambda x, x1, scales: ([x, x1], scales[:, 1:]), r"out\.scales has shape \[8, 4\], must be \[8, 5\]"),
]


@pytest.mark.parametrize(("change", "text"), [bad[1:] for bad in BAD_OUTPUTS], ids=[bad[0] for bad in BAD_OUTPUTS])
def test_given_tensors_that_are_refused(change: Callable[..., Any], text: str) -> None:
    case = _case(1, "flat", "fp8")
    with _buffer(case, None) as buffer:
        calls = Calls(case, buffer)
        *args, xs, scales = calls.args["ht_dispatch_cached_out"]
        before = buffer.stats(), buffer.wire_bytes()
        with pytest.raises(ValueError, match=text):
            ops.ht_dispatch_cached_out.default(*args, *change(*xs, scales))
        assert (buffer.stats(), buffer.wire_bytes()) == before
        calls.run("ht_dispatch_cached_out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_over_what_is_read(layout: str) -> None:
    reads = {
        "ht_dispatch_out": ("xs", "x_scales", "topk_idx", "topk_weights"),
        "ht_dispatch_cached_out": ("xs", "x_scales", "route", "slots"),
        "ht_combine_out": ("rows", "route", "slots", "biases"),
    }
    case = _case(1, layout)
    with _buffer(case, None) as buffer:
        calls = Calls(case, buffer)
        for name, inputs in reads.items():
            check_apart(name, calls.args[name], inputs)


@pytest.mark.parametrize("num_experts", [3, 4, 5])
def test_fakes_know_the_size_of_a_route(num_experts: int) -> None:
    """Its parts are aligned, and one of them has a word more than experts."""
    case = _case(1, "flat", num_experts=num_experts)
    with _buffer(case, None) as buffer:
        calls = Calls(case, buffer)
        for name in ("ht_dispatch", "ht_dispatch_deepep"):
            assert faked(name, calls.args[name]) == described(calls.run(name)), name


def _symbolic(name: str, args: list[Any], real: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What the op's fake returns, in which the sizes that are numbers are those of the real results."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        made: Sequence[torch.Tensor] = getattr(ops, name).default(*(as_fake(mode, each, True) for each in args))
    for tensor, symbolic in zip(real, made, strict=True):
        assert tensor.dtype == symbolic.dtype and tensor.dim() == symbolic.dim()
        for size, symbol in zip(tensor.shape, symbolic.shape, strict=True):
            assert isinstance(symbol, torch.SymInt) or size == symbol
    return made


@pytest.mark.parametrize("layout", ["flat", "packed", "rank_major"])
def test_exact_sizes_are_symbols_in_a_trace(layout: str) -> None:
    """What is only known when the op runs must not be a number in a trace."""
    case = _case(1, layout)
    with _buffer(case, None) as buffer:
        calls = Calls(case, buffer)
        args = list(calls.args["ht_dispatch"])
        args[5] = -1  # capacity
        made = _symbolic("ht_dispatch", args, ops.ht_dispatch.default(*args))
        assert isinstance(made[7].shape[0], torch.SymInt)
        assert isinstance(made[0].shape[0], torch.SymInt) == (layout != "rank_major")


@pytest.mark.parametrize("layout", ["flat", "packed", "rank_major"])
def test_exact_sizes_in_two_ops_have_the_bits_of_one(layout: str) -> None:
    """The tensors of the one op, bit for bit; and opcheck, which runs each of the two more than once."""
    case = _case(1, layout)
    with _buffer(case, None) as buffer:
        calls = Calls(case, buffer)
        *args, _, config = calls.args["ht_dispatch"]
        wanted = ops.ht_dispatch.default(*args, -1, config)
        info, route, sizes = ops.ht_route.default(*args, config)
        num_rows, num_slots = ops.size_at(sizes, 0), ops.size_at(sizes, 1)
        assert num_slots == len(wanted[7]) and num_rows == wanted[0].shape[:-1].numel()
        routed = (*args, info, route, num_rows, num_slots, config)
        *outputs, slots, x1, x2, x3 = ops.ht_dispatch_routed.default(*routed)
        at = number_at(calls.out.handle)
        assert route[at] == wanted[6][at] + 2, "the one op has counted as two"
        numbered = route.clone()
        numbered[at] = wanted[6][at]
        for mine, theirs in zip((*outputs, info, numbered, slots, x1, x2, x3), wanted, strict=True):
            assert torch.equal(mine, theirs)
        with apart_from_numbers(calls.out.handle):
            for name, given in zip(EXACT_OPS, ((*args, config), routed), strict=True):
                for util in UTILS:
                    torch.library.opcheck(getattr(ops, name).default, given, test_utils=util)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            symbol = ops.size_at(as_fake(mode, sizes), 0)
            assert isinstance(symbol, torch.SymInt)


def test_exact_sizes_in_deepeps_convention_are_symbols() -> None:
    """The rows are a symbol; the counts are not, and lie where the host can read them."""
    case = _case(1, "flat")
    with _buffer(case, None) as buffer:
        args = list(Calls(case, buffer).args["ht_dispatch_deepep"])
        args[7] = -1  # capacity
        real = ops.ht_dispatch_deepep.default(*args)
        made = _symbolic("ht_dispatch_deepep", args, real)
        assert isinstance(made[0].shape[0], torch.SymInt) and isinstance(made[6].shape[0], torch.SymInt)
        ids = case.inputs[0].topk_idx
        assert real[8].device.type == made[8].device.type == "cpu"
        assert real[8].tolist() == [len(ids), *(int((ids == expert).sum()) for expert in range(2))]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_layer_gives_the_eager_bits(layout: str, backend: str) -> None:
    case = _case(1, layout)
    given = case.inputs[0]
    with _buffer(case, None) as buffer:

        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, mode="ht", **case.case.dispatch_kwargs())
            return nccl_ep.combine(out.x * 2, out.handle)

        check_compiled(layer, (given.x, given.topk_idx, given.topk_weights), backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", ["packed", "rank_major", "flat"])
def test_a_compiled_layer_of_exact_sizes_gives_the_eager_bits(layout: str, backend: str) -> None:
    """The handle's capacity is a symbol."""
    case = _case(1, layout)
    given = case.inputs[0]
    kwargs = case.case.dispatch_kwargs() | {"capacity": "exact"}
    with _buffer(case, None) as buffer:

        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, mode="ht", **kwargs)
            again = nccl_ep.dispatch_cached(x, out.handle)
            values = nccl_ep.combine_weights(out.weights, out.handle)
            return torch.cat([nccl_ep.combine(2 * out.x + again.x, out.handle), values.to(x.dtype)], 1)

        check_compiled(layer, (given.x, given.topk_idx, given.topk_weights), backend)
